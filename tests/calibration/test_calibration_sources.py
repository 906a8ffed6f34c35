"""Rows from a local file, a data set, or ready ids; whatever is wrong with them is said in one line."""

import json

import pytest
import safetensors.torch
import torch
from tiny_writer import EOS, calibration_spec

from compressor import calibration
from compressor.errors import CompressError, UsageError


def build(tokenizer, *, seed=0, vocab_size=None, **changes):
    def never():
        raise AssertionError("the target is not needed")

    return calibration.build(calibration_spec(**changes), tokenizer, seed=seed, load_model=never, vocab_size=vocab_size)


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.fixture
def corpus(tmp_path):
    """A file with 8 texts and 4 conversations of about 60 bytes each."""
    path = tmp_path / "corpus.jsonl"
    lines = [{"text": f"Text {i}: " + "abcdefgh " * 6} for i in range(8)]
    lines += [{"messages": [{"role": "user", "content": f"Question {i}?" + " please" * 5}]} for i in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_jsonl_texts_and_messages_become_rows(tokenizer, corpus):
    made = build(tokenizer, kind="jsonl", path=str(corpus), rows=5, length=100)
    assert made.ids.shape == (5, 100)
    text = tokenizer.decode(made.ids.flatten())
    assert "<s>user\nQuestion" in text
    assert "Text " in text
    assert made.description["sources"][0]["name"] == "corpus.jsonl"
    assert len(made.description["sources"][0]["sha256"]) == 64
    json.dumps(made.description)


def test_jsonl_order_is_seeded(tokenizer, corpus):
    first, again, other = (build(tokenizer, seed=s, kind="jsonl", path=str(corpus)).digest for s in (0, 0, 1))
    assert first == again
    assert first != other


def test_jsonl_documents_are_separated_by_the_end_token(tokenizer, tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text('{"text": "aa"}\n\n{"text": "bb"}\n')
    ids = build(tokenizer, kind="jsonl", path=path, rows=1, length=6).ids[0].tolist()
    assert ids[2] == ids[5] == EOS


def test_special_tokens_of_a_template_are_not_doubled(tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    ids = build(tokenizer, kind="jsonl", path=path, rows=1, length=8).ids[0].tolist()
    assert ids[:2] != [1, 1] and ids[0] == 1
    path.write_text('{"text": "hello to you"}')
    assert build(tokenizer, kind="jsonl", path=path, rows=1, length=8).ids[0, 0] == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": "a"', "line 3: not JSON"),
        ('{"body": "a"}', r"line 3: needs a field 'text' or 'messages', has fields \['body'\]"),
        ('["a"]', "line 3: needs a field 'text' or 'messages', has a list"),
        ('{"text": 5}', "line 3: text: must be a string, or a list of messages"),
        ('{"messages": []}', "line 3: messages: must be a string, or a list of messages"),
        ('{"messages": [{"role": "user"}]}', "line 3: messages: must be a string, or a list of messages"),
        ('{"text": "\\ud800"}', "line 3: text: no Unicode text"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "line 3: messages: no Unicode text"),
    ],
)
def test_a_bad_line_is_named(tokenizer, tmp_path, line, said):
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"text": "word " * 4})
    path.write_text(f"{good}\n{good}\n{line}\n")
    with pytest.raises(CompressError, match=said) as error:
        build(tokenizer, kind="jsonl", path=path, rows=50)
    assert str(path) in one_line(error)


@pytest.mark.parametrize("value", [5, None, {}, [], [5], "\ud800"])
def test_a_bad_line_is_named_even_if_its_document_is_not_needed(tokenizer, tmp_path, value):
    path = tmp_path / "bad.jsonl"
    good = json.dumps({"text": "word " * 40})
    path.write_text("\n".join([good] * 9) + "\n")
    assert build(tokenizer, kind="jsonl", path=path, rows=1, length=4).ids.shape == (1, 4)
    for line in range(10):  # wherever it is, and whatever the seeded order takes first
        path.write_text("\n".join([*[good] * line, json.dumps({"text": value}), *[good] * (9 - line)]) + "\n")
        with pytest.raises(CompressError, match=rf"bad\.jsonl line {line + 1}: text: ") as error:
            build(tokenizer, kind="jsonl", path=path, rows=1, length=4)
        one_line(error)


def test_bytes_that_are_not_utf8_are_named(tokenizer, tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "caf\xe9"}\n')
    with pytest.raises(CompressError, match="line 1: not JSON") as error:
        build(tokenizer, kind="jsonl", path=path)
    one_line(error)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tokenizer, tmp_path, content):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(CompressError, match=r"empty\.jsonl: the file is empty"):
        build(tokenizer, kind="jsonl", path=path)


def test_too_few_tokens_are_refused_with_the_rows_there_are(tokenizer, corpus):
    with pytest.raises(CompressError, match=r"corpus\.jsonl: 12 documents with \d+ tokens fill 11 of 40 rows of 64"):
        build(tokenizer, kind="jsonl", path=str(corpus), rows=40)


def test_messages_need_a_chat_template(plain_tokenizer, corpus):
    with pytest.raises(CompressError, match=r"line \d+: messages: .* no chat template") as error:
        build(plain_tokenizer, kind="jsonl", path=str(corpus), rows=12)
    one_line(error)


def test_a_template_that_refuses_the_roles_is_quoted(tokenizer, corpus):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CompressError, match=r"line \d+: messages: .* refuses .*: roles must alternate"):
        build(tokenizer, kind="jsonl", path=str(corpus), rows=12)


@pytest.mark.parametrize("kind", ["jsonl", "tokens"])
def test_a_missing_path_is_a_usage_error(tokenizer, tmp_path, kind):
    with pytest.raises(UsageError, match=r"calibration\.path: not set"):
        build(tokenizer, kind=kind)
    with pytest.raises(UsageError, match=r"calibration\.path: cannot read .*gone\.pt: No such file") as error:
        build(tokenizer, kind=kind, path=tmp_path / "gone.pt")
    one_line(error)


def test_an_unknown_kind_is_a_usage_error(tokenizer):
    with pytest.raises(UsageError, match=r"calibration\.kind: 'web' is unknown"):
        build(tokenizer, kind="web")


def save(path, ids):
    if path.suffix == ".pt":
        torch.save(ids, path)
    else:
        safetensors.torch.save_file({"ids": ids}, path)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_saved_rows_are_taken_as_they_are(tokenizer, tmp_path, suffix, dtype):
    ids = torch.arange(5 * 64).view(5, 64) % 320
    made = build(tokenizer, kind="tokens", path=save(tmp_path / f"ids{suffix}", ids.to(dtype)), seed=7)
    assert torch.equal(made.ids, ids[:4])
    assert made.digest == calibration.digest(ids[:4])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (torch.zeros(3, 64, dtype=torch.long), "has 3 rows of 64, the recipe asks for 4 of 64"),
        (torch.zeros(9, 32, dtype=torch.long), "has 9 rows of 32, the recipe asks for 4 of 64"),
        (torch.zeros(4, 64), r"is torch\.float32 \[4, 64\]; token ids are integers"),
        (torch.zeros(256, dtype=torch.long), r"is torch\.int64 \[256\]; token ids are integers"),
        (torch.full((4, 64), 320), "token id 320 is outside the model's vocabulary of 320: wrong tokenizer"),
        (torch.full((4, 64), -1), "token id -1 is outside"),
    ],
)
def test_saved_rows_that_do_not_fit_are_refused(tokenizer, tmp_path, suffix, ids, said):
    with pytest.raises(CompressError, match=said) as error:
        build(tokenizer, kind="tokens", path=save(tmp_path / f"ids{suffix}", ids))
    one_line(error)


def test_the_models_vocabulary_may_be_larger_than_the_tokenizers(tokenizer, tmp_path):
    path = save(tmp_path / "ids.pt", torch.full((4, 64), 320))
    assert build(tokenizer, kind="tokens", path=path, vocab_size=321).ids.max() == 320


def test_text_from_a_tokenizer_beyond_the_model_is_refused(tokenizer, corpus):
    with pytest.raises(CompressError, match=r"calibration\.kind jsonl: token id \d+ is outside .* of 50"):
        build(tokenizer, kind="jsonl", path=str(corpus), vocab_size=50)


def test_files_that_are_no_tensors_are_refused(tokenizer, tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "trapped"), "w"))

    torch.save({"ids": torch.zeros(4, 64, dtype=torch.long)}, tmp_path / "dict.pt")
    torch.save(Trap(), tmp_path / "trap.pt")
    (tmp_path / "noise.pt").write_bytes(b"noise")
    (tmp_path / "none.pt").write_bytes(b"")
    (tmp_path / "noise.safetensors").write_bytes(b"noise and more noise")
    safetensors.torch.save_file({"rows": torch.zeros(4, 64)}, tmp_path / "other.safetensors")
    for name, said in {
        "dict.pt": "holds a dict",
        "trap.pt": "cannot read it",
        "noise.pt": "cannot read it",
        "none.pt": "cannot read it",
        "noise.safetensors": "not a readable safetensors file",
        "other.safetensors": r"no tensor 'ids', has \['rows'\]",
    }.items():
        with pytest.raises(CompressError, match=said) as error:
            build(tokenizer, kind="tokens", path=tmp_path / name)
        assert name in one_line(error)
    assert not (tmp_path / "trapped").exists()
    with pytest.raises(UsageError, match=r"neither \.safetensors nor \.pt"):
        build(tokenizer, kind="tokens", path=tmp_path / "ids.npy")


@pytest.fixture
def dataset(tmp_path, monkeypatch):
    """A data set in a folder; `datasets` reads it as it would read one of the hub."""
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"text": f"Row {i}: " + "words " * 12, "n": i} for i in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_data_set_becomes_rows(tokenizer, dataset):
    first, again, other = (build(tokenizer, seed=s, kind="hub", dataset=dataset, rows=8) for s in (0, 0, 1))
    assert first.ids.shape == (8, 64)
    assert "Row " in tokenizer.decode(first.ids[0])
    assert first.digest == again.digest != other.digest
    assert first.description["sources"] == [{"name": dataset, "subset": None, "split": "train", "column": "text"}]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"column": "body"}, r"no column 'body'; set calibration\.column to one of \['n', 'text'\]"),
        ({"column": "n"}, "row 1: n: must be a string"),
        ({"split": "future"}, "cannot read split future"),
        ({"subset": "other"}, "cannot read subset other, split train"),
        ({"rows": 500}, "40 documents with .* of 500 rows of 64"),
    ],
)
def test_a_data_set_that_does_not_fit_is_refused(tokenizer, dataset, changes, said):
    with pytest.raises(CompressError, match=said) as error:
        build(tokenizer, kind="hub", dataset=dataset, **changes)
    assert f"calibration.dataset {dataset}" in one_line(error)


def test_a_data_set_out_of_reach_is_refused_in_one_line(tokenizer):
    with pytest.raises(CompressError, match=r"calibration\.dataset nobody/nothing: cannot read split train") as error:
        build(tokenizer, kind="hub", dataset="nobody/nothing")
    assert "use calibration.kind self or jsonl" in one_line(error)
    with pytest.raises(UsageError, match=r"calibration\.dataset: not set"):
        build(tokenizer, kind="hub")
