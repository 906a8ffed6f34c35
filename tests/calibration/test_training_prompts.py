"""Training prompts are distinct, mixed as intended, repeatable, ours, and the examples in them are right."""

import doctest
import gzip
import json
import re
from collections import Counter

import pytest

from compressor.calibration.prompts import calibration_prompts, evaluation_prompts
from compressor.calibration.training_prompts import MOST, function_seeds, training_prompts
from compressor.errors import UsageError

PROMPTS = training_prompts(5000, seed=0)


def content(prompt) -> str:
    return prompt.get("text") or "\n".join(message["content"] for message in prompt["messages"])


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
    assert training_prompts(300, seed=0) == PROMPTS[:300]
    assert content(training_prompts(1, seed=1)[0]) != content(PROMPTS[0])


def test_prompts_and_ids_are_distinct():
    assert len(PROMPTS) == 5000
    assert len({content(prompt) for prompt in PROMPTS}) == len({prompt["id"] for prompt in PROMPTS}) == 5000


def test_every_prompt_is_one_finished_user_message():
    for prompt in PROMPTS:
        assert set(prompt) == {"id", "category", "messages"}
        assert [message["role"] for message in prompt["messages"]] == ["user"]
        assert re.fullmatch(rf"train-{prompt['category']}-\d{{5}}", prompt["id"])
        assert 10 < len(content(prompt)) < 1500
        if prompt["category"] != "code":
            assert not re.search(r"[{}]|\ba [aei]|  ", content(prompt)), content(prompt)


def test_word_problems_ask_for_a_number():
    problems = [content(prompt) for prompt in PROMPTS if prompt["category"] == "wordproblem"]
    assert all(text.endswith("?") and len(re.findall(r"\d+", text)) >= 2 for text in problems)
    assert not any(re.search(r"-\d", text) for text in problems)
    shapes = {re.sub(r"\d+", "#", re.sub(r"\b[A-Z]\w+", "X", text)) for text in problems}
    assert len(shapes) >= 300


@pytest.mark.parametrize("beginning", [40, 200, 1000, 5000])
def test_any_beginning_is_a_fair_mix(beginning):
    counts = Counter(prompt["category"] for prompt in PROMPTS[:beginning])
    assert counts["code"] == counts["wordproblem"] == beginning // 4
    general = [counts[category] for category in {p["category"] for p in PROMPTS} - {"code", "wordproblem"}]
    assert len(general) >= 12 and max(general) - min(general) <= 1


@pytest.mark.parametrize("count", [0, -1, MOST + 1])
def test_an_impossible_count_is_refused(count):
    with pytest.raises(UsageError, match=str(count)):
        training_prompts(count, seed=0)


def test_no_shipped_prompt_is_among_them():
    shipped = {content(prompt) for prompt in [*calibration_prompts(), *evaluation_prompts()]}
    assert not shipped & {content(prompt) for prompt in PROMPTS}


def test_no_ten_words_and_no_function_name_are_from_a_benchmark(shared_data):
    problems = gzip.decompress((shared_data / "humaneval/HumanEval.jsonl.gz").read_bytes()).decode()
    others = [(shared_data / name).read_text() for name in ("gsm8k/test.jsonl", "mt_bench/question.jsonl")]
    theirs = set().union(*(_runs(text.replace("\\n", " ")) for text in [problems, *others]))
    assert [prompt["id"] for prompt in PROMPTS if _runs(content(prompt)) & theirs] == []
    taken = {json.loads(line)["entry_point"] for line in problems.splitlines()}
    assert not taken & {name for seed in function_seeds() for name in seed["names"]}


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + 10]) for i in range(len(words) - 9)}


def test_the_examples_of_every_function_are_right():
    names = [name for seed in function_seeds() for name in seed["names"]]
    assert len(function_seeds()) >= 150 and len(set(names)) == len(names)
    for seed in function_seeds():
        scope: dict = {}
        exec(f"def reference({seed['params']}) -> {seed['returns']}:\n    return {seed['body']}", scope)
        for arguments, result in seed["examples"]:
            assert repr(eval(f"reference({arguments})", scope)) == result, (seed["names"], arguments)


def test_completing_a_prompt_with_the_reference_passes_its_doctest():
    bodies = {name: seed["body"] for seed in function_seeds() for name in seed["names"]}
    tried = 0
    for prompt in PROMPTS[:2000]:
        code = content(prompt)
        if not code.startswith(("def ", "class ", "from ")) or ">>> " not in code:
            continue
        indent, name = re.findall(r"^( *)def (\w+)", code, re.MULTILINE)[0]
        code += f"{indent}    return {bodies[name]}\n"
        code = re.sub(r">>> (.+)(?=\n *None\n)", r">>> print(\1)", code)  # where the interpreter shows nothing
        scope: dict = {}
        exec(code, scope)
        test = doctest.DocTestParser().get_doctest(_docstring(scope, name), scope, name, None, None)
        assert test.examples and doctest.DocTestRunner(verbose=False).run(test).failed == 0, code
        tried += 1
    assert tried > 150


def _docstring(scope: dict, name: str) -> str:
    owners = [value for value in scope.values() if isinstance(value, type) and name in vars(value)]
    return (getattr(owners[0], name) if owners else scope[name]).__doc__
