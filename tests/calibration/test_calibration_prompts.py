"""The shipped prompts are well formed, diverse, ours, and the two sets are disjoint."""

import gzip
import json
import random
import re
from collections import Counter

import pytest
from jinja2 import TemplateError

from compressor.calibration.prompts import (
    calibration_prompts,
    encode,
    evaluation_prompts,
    interleaved,
    prompts_digest,
)

BOTH = pytest.mark.parametrize("prompts", [calibration_prompts(), evaluation_prompts()], ids=["calibration", "eval"])


def content(prompt) -> str:
    return prompt.get("text") or "\n".join(message["content"] for message in prompt["messages"])


def runs(text: str, n: int) -> set[tuple[str, ...]]:
    """All runs of n words, without punctuation and case."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def shared_runs(prompts, texts, n: int) -> dict[str, tuple[str, ...]]:
    """Prompt id → a run of n words that it shares with one of `texts`."""
    theirs = set().union(*(runs(text, n) for text in texts))
    return {p["id"]: min(common) for p in prompts if (common := runs(content(p), n) & theirs)}


def test_there_are_enough_prompts():
    assert len(calibration_prompts()) >= 240
    assert len(evaluation_prompts()) >= 48
    copying = {"summarise", "extract", "rewrite", "code-edit"}
    assert sum(p["category"] in copying for p in evaluation_prompts()) >= 16


@BOTH
def test_prompts_are_well_formed(prompts):
    assert len({p["id"] for p in prompts}) == len(prompts)
    for prompt in prompts:
        assert set(prompt) in ({"id", "category", "messages"}, {"id", "category", "text"}), prompt["id"]
        assert content(prompt).strip()
        if "messages" in prompt:
            turns = [m["role"] for m in prompt["messages"]]
            turns = turns[1:] if turns[0] == "system" else turns
            assert turns == [("user", "assistant")[i % 2] for i in range(len(turns))], prompt["id"]
            assert turns[-1] == "user", prompt["id"]


def test_prompts_are_diverse():
    counts = Counter(p["category"] for p in calibration_prompts())
    assert len(counts) >= 15
    assert max(counts.values()) < 0.1 * counts.total()


def test_evaluation_prompts_share_no_eight_words_with_calibration_prompts():
    texts = [content(p) for p in calibration_prompts()]
    assert shared_runs(evaluation_prompts(), texts, 8) == {}


def test_an_evaluation_prompt_that_quotes_a_calibration_prompt_is_found():
    texts = [content(p) for p in calibration_prompts()]
    long = next(p for p in calibration_prompts() if len(content(p).split()) > 30)
    quoting = {"id": "leak", "text": "Please: " + " ".join(content(long).upper().split()[5:16])}
    assert list(shared_runs([*evaluation_prompts(), quoting], texts, 8)) == ["leak"]


def test_prompts_share_no_thirteen_words_with_data_sets(shared_data):
    files = [
        *("gsm8k/test.jsonl", "mt_bench/*.jsonl", "spec_bench/*.jsonl", "self_instruct/*.jsonl"),
        *("calib_mix/*.jsonl", "humaneval/*.gz", "xstest/*", "truthfulqa/*"),
    ]
    paths = [path for pattern in files for path in sorted(shared_data.glob(pattern))]
    raw = [gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes() for path in paths]
    texts = [data.decode(errors="replace").replace("\\n", " ") for data in raw]
    ours = [*calibration_prompts(), *evaluation_prompts()]
    assert shared_runs(ours, texts, 13) == {}
    line = json.loads((shared_data / "gsm8k/test.jsonl").read_text().splitlines()[0])
    assert list(shared_runs([*ours, {"id": "copied", "text": line["question"]}], texts, 13)) == ["copied"]


def test_every_beginning_of_an_interleaved_list_is_diverse():
    prompts = calibration_prompts()
    categories = {p["category"] for p in prompts}
    for rng in (None, random.Random(3)):
        order = interleaved(prompts, rng)
        assert sorted(p["id"] for p in order) == sorted(p["id"] for p in prompts)
        assert {p["category"] for p in order[: len(categories)]} == categories
    assert {p["category"] for p in prompts[: len(categories)]} != categories  # file order is not diverse


def test_interleaving_is_seeded():
    prompts = calibration_prompts()
    first, again, other = (interleaved(prompts, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_digest_names_the_prompts():
    prompts = evaluation_prompts()
    assert prompts_digest(prompts) == prompts_digest(evaluation_prompts())
    assert prompts_digest(prompts) != prompts_digest(prompts[1:])


def test_messages_open_the_assistants_turn(tokenizer):
    ids = encode({"messages": [{"role": "user", "content": "Hi"}]}, tokenizer)
    assert tokenizer.decode(ids) == "<s>user\nHi</s>\n<s>assistant\n"


def test_text_is_continued_as_it_is(tokenizer):
    assert tokenizer.decode(encode({"text": "The end of"}, tokenizer)) == "The end of"


def test_without_a_template_contents_become_plain_text(plain_tokenizer):
    messages = [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "C"},
    ]
    assert plain_tokenizer.decode(encode({"messages": messages}, plain_tokenizer)) == "A\n\nB\n\nC\n\n"


def test_a_template_without_system_role_gets_the_instruction_in_the_user_turn(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m['role'] }}: {{ m['content'] }}|{% endfor %}"
    )
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}
    assert tokenizer.decode(encode({"messages": [system, user]}, tokenizer)) == "user: Be brief.\n\nWhy?|"
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(TemplateError, match="never"):
        encode({"messages": [user]}, tokenizer)


@BOTH
def test_every_prompt_is_encoded(prompts, tokenizer):
    assert all(encode(prompt, tokenizer) for prompt in prompts)
