"""GGUF conversion: exactly the dequantized weights, a tokenizer that behaves, and damage refused in one line."""

import json
import shutil

import pytest
import torch

from compressor.checkpoint import gguf as gguf_source
from compressor.checkpoint import source
from compressor.checkpoint.reader import ShardReader
from compressor.errors import CompressError, UsageError


@pytest.fixture(scope="module")
def converted(tmp_path_factory, make_gguf):
    """(resolved source, expected float32 weights, GGUF path, cache)"""
    folder = tmp_path_factory.mktemp("gguf")
    expected = make_gguf(folder / "tiny.gguf")
    return (
        source.resolve(str(folder / "tiny.gguf"), cache=folder / "cache"),
        expected,
        folder / "tiny.gguf",
        folder / "cache",
    )


def test_weights_are_dense_bfloat16_equal_to_the_dequantized_ones(converted):
    resolved, expected, _, _ = converted
    with ShardReader(resolved.folder) as reader:
        assert reader.keys() == sorted(expected)  # the head is tied, so there is no second table
        for name, weight in expected.items():
            assert torch.equal(reader.get(name), weight.to(torch.bfloat16)), name


def test_the_converted_folder_loads_in_transformers(converted):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(converted[0].folder, output_loading_info=True)
    assert not any(report.values()) and model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings and not hasattr(model.config, "quantization_config")


def test_no_local_path_is_written_down(converted):
    resolved, _, path, _ = converted
    for file in resolved.folder.glob("*.json"):
        assert str(path.parent) not in file.read_text(), file.name
    assert (
        not {"is_local", "local_files_only"}
        & json.loads((resolved.folder / "tokenizer_config.json").read_text()).keys()
    )


@pytest.fixture(scope="module")
def tokenizer(converted):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(converted[0].folder)


def test_special_tokens_are_single_ids_and_end_tokens_are_set(tokenizer):
    assert tokenizer.encode("<|im_start|>") == [1] and tokenizer.encode("a<|im_end|>")[-1] == 2
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_the_chat_template_applies(tokenizer):
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n" and ids[0] == 1


def test_bos_is_added_only_where_the_file_says_so(tokenizer, tmp_path, make_gguf):
    from transformers import AutoTokenizer

    assert tokenizer("hi").input_ids[0] != tokenizer.bos_token_id
    make_gguf(tmp_path / "bos.gguf", add_bos=True)
    resolved = source.resolve(str(tmp_path / "bos.gguf"), cache=tmp_path / "cache")
    assert AutoTokenizer.from_pretrained(resolved.folder)("hi").input_ids[0] == 1


def test_digits_are_cut_off_first_where_llama_cpp_does_so(tokenizer, converted, tmp_path, make_gguf):
    from transformers import AutoTokenizer

    assert tokenizer.tokenize("a\n\n1") == ["a", "ĊĊ", "1"]
    assert tokenizer.decode(tokenizer("a\n\n12  3").input_ids) == "a\n\n12  3"
    assert converted[0].notes == ["tokenizer: digits split one by one, as llama.cpp does for pre-tokenizer 'smollm'"]
    make_gguf(tmp_path / "gpt2.gguf", pre="gpt-2")
    resolved = source.resolve(str(tmp_path / "gpt2.gguf"), cache=tmp_path / "cache")
    assert resolved.notes == []
    assert AutoTokenizer.from_pretrained(resolved.folder).tokenize("a\n\n1") == ["a", "Ċ", "Ċ", "1"]


def test_an_unknown_pre_tokenizer_is_noted_and_the_note_is_kept(tmp_path, make_gguf):
    make_gguf(tmp_path / "odd.gguf", pre="nobody-knows")
    first, second = (source.resolve(str(tmp_path / "odd.gguf"), cache=tmp_path / "cache") for _ in range(2))
    assert "'nobody-knows'" in first.notes[0] and first == second


def test_a_conversion_is_kept_by_content_and_dtype(converted, monkeypatch):
    resolved, expected, path, cache = converted
    wide = source.resolve(str(path), dtype="float32", cache=cache)
    with ShardReader(wide.folder) as reader:
        assert torch.equal(reader.get("model.norm.weight"), expected["model.norm.weight"])
    monkeypatch.setattr(gguf_source, "_open", lambda path: pytest.fail("converted again"))
    assert source.resolve(str(path), cache=cache) == resolved
    assert source.local_folder(str(path), cache=cache) == resolved.folder
    assert source.local_folder(str(path), dtype="float16", cache=cache) is None


def test_a_conversion_that_was_killed_is_done_again(converted, tmp_path):
    resolved, _, path, _ = converted
    name = resolved.folder.parent.name
    half = tmp_path / "gguf" / f".building-{name}"
    (half / "model").mkdir(parents=True)
    (half / "model" / "model.safetensors").write_bytes(b"half")
    again = source.resolve(str(path), cache=tmp_path)
    assert again.folder == tmp_path / "gguf" / name / "model" and not half.exists()
    original = {file.name: file.read_bytes() for file in resolved.folder.iterdir()}
    assert {file.name: file.read_bytes() for file in again.folder.iterdir()} == original


def test_conversion_is_quiet_and_leaves_the_settings_of_transformers(tmp_path, make_gguf, capfd):
    import gguf
    from transformers.utils import logging

    make_gguf(tmp_path / "tiny.gguf")
    before = logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf.GGUFReader
    lines = []
    capfd.readouterr()
    source.resolve(str(tmp_path / "tiny.gguf"), cache=tmp_path / "cache", progress=lines.append)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf.GGUFReader) == before
    assert lines == [f"converting tiny.gguf to bfloat16 safetensors (once; kept in {tmp_path / 'cache'})"]


def refused(path, cache, words):
    with pytest.raises(CompressError, match=words) as caught:
        source.resolve(str(path), cache=cache)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not list(cache.glob("gguf/*/model")) and not list(cache.glob("gguf/.building*"))


@pytest.mark.parametrize("keep", [0, 3, 20, 400, 5000, -1])
def test_a_truncated_file_is_refused_in_one_line(converted, tmp_path, keep):
    (tmp_path / "cut.gguf").write_bytes(converted[2].read_bytes()[:keep])
    refused(tmp_path / "cut.gguf", tmp_path / "cache", "not a readable GGUF file, or truncated")


def test_other_files_under_a_gguf_name_are_refused(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"PK\3\4" * 100)
    refused(tmp_path / "no.gguf", tmp_path / "cache", "not a readable GGUF file")
    (tmp_path / "odd.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 400)
    refused(tmp_path / "odd.gguf", tmp_path / "cache", "not a readable GGUF file")


def test_an_architecture_transformers_does_not_know_is_named(tmp_path, make_gguf):
    make_gguf(tmp_path / "new.gguf", architecture="newllm")
    refused(tmp_path / "new.gguf", tmp_path / "cache", "newllm")


def test_a_weight_that_is_not_there_is_not_invented(tmp_path, make_gguf):
    make_gguf(tmp_path / "few.gguf", leave_out="blk.1.ffn_up.weight")
    refused(
        tmp_path / "few.gguf", tmp_path / "cache", r"not in the GGUF, among them model\.layers\.1\.mlp\.up_proj\.weight"
    )


def test_a_tensor_that_would_be_dropped_is_not_lost_silently(tmp_path, make_gguf):
    make_gguf(tmp_path / "more.gguf", extra={"blk.2.nextn.eh_proj.weight": (64, 64)})
    refused(tmp_path / "more.gguf", tmp_path / "cache", "would drop tensors")
    make_gguf(tmp_path / "rope.gguf", extra={"rope_freqs.weight": (8,)})
    refused(tmp_path / "rope.gguf", tmp_path / "cache", r"rope_freqs\.weight")


def test_a_part_of_a_split_file_is_refused(converted, tmp_path):
    shutil.copy(converted[2], tmp_path / "x-00002-of-00003.gguf")
    refused(tmp_path / "x-00002-of-00003.gguf", tmp_path / "cache", "split GGUF")


def test_another_dtype_is_bad_usage(converted, tmp_path):
    with pytest.raises(UsageError, match="'int8'"):
        source.resolve(str(converted[2]), dtype="int8", cache=tmp_path)


def test_a_write_that_fails_is_one_line_and_leaves_nothing(converted, tmp_path, monkeypatch):
    from safetensors import SafetensorError
    from transformers import PreTrainedModel

    def full_disk(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", full_disk)
    with pytest.raises(CompressError, match=r"cannot write the converted weights .*No space left"):
        source.resolve(str(converted[2]), cache=tmp_path)
    assert [path.suffix for path in (tmp_path / "gguf").iterdir()] == [".lock"]


def test_too_little_space_is_said_before_converting(converted, tmp_path, monkeypatch):
    monkeypatch.setattr("compressor.checkpoint.gguf._TOKENIZER_BYTES", 10**18)
    with pytest.raises(CompressError, match="not enough space"):
        source.resolve(str(converted[2]), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
