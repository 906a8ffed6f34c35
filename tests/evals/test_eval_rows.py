"""Quality rows: written by the reference, cut from a text, or none."""

from types import SimpleNamespace

import pytest
import torch
from tiny_writer import calibration_spec, writer

from compressor import calibration, evals
from compressor.calibration import selfgen
from compressor.calibration.prompts import calibration_prompts, evaluation_prompts
from compressor.errors import CompressError, UsageError


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(selfgen, "MAX_NEW_TOKENS", 40)
    monkeypatch.setattr(selfgen, "USUAL_NEW_TOKENS", 30)


def build(tokenizer, *, seed=0, vocab_size=None, **changes):
    spec = SimpleNamespace(**{"kind": "self", "path": None, "rows": 4, "length": 128, **changes})
    return evals.build(spec, tokenizer, seed=seed, load_model=writer, vocab_size=vocab_size)


def test_the_reference_answers_evaluation_prompts_only(tokenizer):
    rows = build(tokenizer, rows=8, length=256)
    text = tokenizer.decode(rows.ids.flatten())

    def quoted(prompts):
        return [p["id"] for p in prompts if "messages" in p and p["messages"][-1]["content"] in text]

    assert len(quoted(evaluation_prompts())) >= 3
    assert quoted(calibration_prompts()) == []
    assert (rows.ids.shape, rows.name, rows.digest) == ((8, 256), "self-generated", calibration.digest(rows.ids))


def test_the_same_check_finds_prompts_in_calibration_rows(tokenizer):
    made = calibration.build(calibration_spec(rows=8, length=256), tokenizer, seed=0, load_model=writer)
    text = tokenizer.decode(made.ids.flatten())
    assert any("messages" in p and p["messages"][-1]["content"] in text for p in calibration_prompts())


def test_the_seed_decides_the_rows(tokenizer):
    first, again, other = (build(tokenizer, seed=seed).digest for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_none_gives_no_rows(tokenizer):
    assert build(tokenizer, kind="none") is None
    with pytest.raises(UsageError, match=r"measure\.quality\.kind: 'web' is unknown"):
        build(tokenizer, kind="web")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "essay.txt"
    path.write_bytes("".join(f"Line {i} – nothing new.\n" for i in range(60)).encode())
    return path


def test_text_windows_are_evenly_spaced_over_the_tokens(tokenizer, text):
    rows = build(tokenizer, kind="text", path=str(text), rows=5, length=100)
    stream = tokenizer(text.read_text()).input_ids
    starts = torch.linspace(0, len(stream) - 100 - 1, 5).long().tolist()
    assert rows.ids.tolist() == [stream[s : s + 100] for s in starts]
    assert rows.ids.tolist() != [stream[s + 1 : s + 101] for s in starts]
    assert (rows.name, rows.digest) == ("essay.txt", calibration.digest(rows.ids))
    assert build(tokenizer, kind="text", path=str(text), rows=5, length=100, seed=9).digest == rows.digest


def test_line_ends_are_those_of_text_files(tokenizer, text, tmp_path):
    windows = tmp_path / "windows.txt"
    windows.write_bytes(text.read_bytes().replace(b"\n", b"\r\n"))
    assert build(tokenizer, kind="text", path=windows).digest == build(tokenizer, kind="text", path=text).digest


def test_a_text_that_is_too_short_is_refused(tokenizer, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 128)
    with pytest.raises(CompressError, match=r"short\.txt: has 128 tokens, a row of 128 needs 129"):
        build(tokenizer, kind="text", path=path)
    path.write_text("x" * 129)
    assert build(tokenizer, kind="text", path=path, rows=1).ids.shape == (1, 128)


def test_a_text_that_is_not_utf8_is_refused(tokenizer, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 " * 100)
    with pytest.raises(CompressError, match=r"latin\.txt: not UTF-8 at byte 3"):
        build(tokenizer, kind="text", path=path)


def test_a_missing_text_is_a_usage_error(tokenizer, tmp_path):
    with pytest.raises(UsageError, match=r"measure\.quality\.path: cannot read .*gone\.txt"):
        build(tokenizer, kind="text", path=tmp_path / "gone.txt")


def test_ids_beyond_the_model_are_refused(tokenizer, text):
    with pytest.raises(CompressError, match=r"essay\.txt: token id \d+ is outside .* of 60: wrong tokenizer"):
        build(tokenizer, kind="text", path=text, vocab_size=60)


def test_a_real_corpus_gives_the_windows_of_the_common_evaluation(shared_data):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260K" / "hf")
    path = shared_data / "lowbit_float_tables" / "NOTES.md"
    rows = build(tokenizer, kind="text", path=path, rows=3, length=64)
    stream = tokenizer(path.read_text()).input_ids
    starts = torch.linspace(0, len(stream) - 64 - 1, 3).long().tolist()
    assert rows.ids.tolist() == [stream[s : s + 64] for s in starts]
