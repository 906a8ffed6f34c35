"""The documents of a training: whose prompts they begin with, and what is written once."""

import json
from types import SimpleNamespace

import pytest
import tiny_models as tiny

from compressor.decode.decoder import Decoder
from compressor.errors import CompressError, UsageError
from compressor.recipe_training import Answers
from compressor.train import answers, documents, self_prompts
from compressor.ui import NullUI


@pytest.fixture(scope="module")
def decoder():
    return Decoder(tiny.random_model())


@pytest.fixture
def tokenizer():
    return tiny.tokenizer()


def prompts(decoder, tokenizer, folder, **changes):
    spec = Answers(**{"count": 12, "held_out": 2, **changes})
    return documents.prompts(decoder, tokenizer, spec, folder, seed=0, ui=NullUI())


def test_the_packages_prompts_come_through_the_chat_template(decoder, tokenizer, tmp_path):
    ids, source = prompts(decoder, tokenizer, tmp_path)
    assert source["prompts"] + source["prompts_left_out"] == 12
    assert all(tokenizer.decode(row).endswith("assistant\n") for row in ids)


def test_a_users_file_gives_texts_and_conversations(decoder, tokenizer, tmp_path):
    lines = [{"text": f"line {n}"} for n in range(3)] + [{"messages": [{"role": "user", "content": "Hello"}]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ids, source = prompts(decoder, tokenizer, tmp_path, prompts=str(tmp_path / "p.jsonl"))
    texts = {tokenizer.decode(row) for row in ids}
    assert texts == {"line 0", "line 1", "line 2", "<s>user\nHello</s>\n<s>assistant\n"}
    assert source["source"]["name"] == "p.jsonl"


def test_too_few_prompts_to_hold_some_out_are_refused(decoder, tokenizer, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"text": "only one line"}\n')
    with pytest.raises(CompressError, match=r"p\.jsonl: 1 prompts .* give more or shorter ones, or set held_out"):
        prompts(decoder, tokenizer, tmp_path, prompts=str(tmp_path / "p.jsonl"))


def test_a_damaged_line_is_named(decoder, tokenizer, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    with pytest.raises(CompressError, match=r"p\.jsonl line 2: needs a field"):
        prompts(decoder, tokenizer, tmp_path, prompts=str(tmp_path / "p.jsonl"))


@pytest.fixture
def turns(monkeypatch, tokenizer):
    """The target writes what is listed here, an end token behind each; calls are counted."""
    monkeypatch.setattr(self_prompts, "PART", 4)
    state = {"calls": 0, "texts": ["What is a cloud made of?", "Why do cats purr?", "short", "Why do cats purr?"]}

    def write(decoder, given, **_):
        state["calls"] += 1
        number = state["calls"]
        texts = [f"{text} {number}" if text != "short" else text for text in state["texts"]]
        return SimpleNamespace(run=lambda: [[*tokenizer(text).input_ids, 2] for text in texts])

    monkeypatch.setattr(answers, "Writing", write)
    return state


def test_the_target_writes_prompts_of_its_own(decoder, tokenizer, tmp_path, turns):
    found = self_prompts.write(decoder, tokenizer, 3, tmp_path, seed=0, ui=NullUI())
    assert found == ["What is a cloud made of? 1", "Why do cats purr? 1", "What is a cloud made of? 2"]
    assert turns["calls"] == 2
    again = self_prompts.write(decoder, tokenizer, 3, tmp_path, seed=0, ui=NullUI())
    assert again == found and turns["calls"] == 2  # nothing is written twice


def test_a_target_that_repeats_itself_is_refused(decoder, tokenizer, tmp_path, turns):
    turns["texts"] = ["short"] * 4
    with pytest.raises(CompressError, match="wrote 0 distinct prompts where 3 are wanted"):
        self_prompts.write(decoder, tokenizer, 3, tmp_path, seed=0, ui=NullUI())


def test_turns_that_were_cut_off_are_left_out(decoder, tokenizer, tmp_path, monkeypatch, turns):
    whole = tokenizer("A whole question, ended?").input_ids
    written = [[*whole, 2], tokenizer("A question cut off in").input_ids]
    monkeypatch.setattr(answers, "Writing", lambda *_, **__: SimpleNamespace(run=lambda: written))
    assert self_prompts.write(decoder, tokenizer, 1, tmp_path, seed=0, ui=NullUI()) == ["A whole question, ended?"]


def test_a_turn_is_opened_where_the_user_begins_to_speak(tokenizer):
    assert tokenizer.decode(self_prompts.opening(tokenizer)) == "<s>user\n"


@pytest.mark.parametrize(("template", "says"), [(None, "chat template, which"), ("{{ 'fixed' }}", "does not show")])
def test_a_tokenizer_that_cannot_open_a_turn_is_refused(tokenizer, template, says):
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=says):
        self_prompts.opening(tokenizer)


def test_answers_are_written_once_part_by_part(decoder, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PART", 2)
    spec = Answers(count=5, held_out=1, max_new_tokens=4)
    texts = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    first = documents.write(decoder, texts, spec, tmp_path, seed=0, ui=NullUI())
    assert [document.tokens[:3] for document in first] == texts and {document.start for document in first} == {3}
    monkeypatch.setattr(answers, "Writing", None)
    assert documents.write(decoder, texts, spec, tmp_path, seed=0, ui=NullUI()) == first


def test_answers_to_other_prompts_are_not_taken_for_these(decoder, tmp_path):
    spec = Answers(count=5, held_out=1, max_new_tokens=2)
    documents.write(decoder, [[5, 6, 7]], spec, tmp_path, seed=0, ui=NullUI())
    with pytest.raises(CompressError, match=r"answers-0000\.safetensors: answers other prompts than these"):
        documents.write(decoder, [[5, 6, 8]], spec, tmp_path, seed=0, ui=NullUI())


def test_prompts_whose_answers_would_leave_the_context_are_left_out(decoder, tokenizer, tmp_path):
    lines = [{"text": "a" * length} for length in (10, 100, 400, 505)]  # the context is 512
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ids, source = prompts(
        decoder, tokenizer, tmp_path, prompts=str(tmp_path / "p.jsonl"), max_new_tokens=100, held_out=1
    )
    assert sorted(map(len, ids)) == [10, 100, 400] and source["prompts_left_out"] == 1


def test_damaged_turns_are_named(decoder, tokenizer, tmp_path, turns):
    self_prompts.write(decoder, tokenizer, 2, tmp_path, seed=0, ui=NullUI())
    (tmp_path / "turns-0000.json").write_text("")
    with pytest.raises(CompressError, match=r"turns-0000\.json: damaged"):
        self_prompts.write(decoder, tokenizer, 2, tmp_path, seed=0, ui=NullUI())


def test_the_digest_is_of_tokens_and_of_where_answers_begin():
    from compressor.train.corpus import Document

    one = [Document([1, 2, 3], 1)]
    others = [[Document([1, 2, 3], 2)], [Document([1, 2], 1), Document([3], 1)], [Document([1, 2, 4], 1)]]
    assert documents.digest(one) == documents.digest([Document([1, 2, 3], 1)])
    assert documents.digest(one) not in [documents.digest(other) for other in others]
