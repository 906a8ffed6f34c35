"""Reading safetensors folders: every tensor by name, and every kind of damage refused by name."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.checkpoint.header import TORCH_DTYPES, read_header
from compressor.checkpoint.reader import INDEX_NAME, ShardReader, check_finite
from compressor.errors import CompressError


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def edit_index(folder: Path, edit) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    edit(index["weight_map"])
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_every_tensor_of_every_shard_is_read_as_stored(sharded):
    stored = {name: tensor for shard in shards(sharded) for name, tensor in load_file(shard).items()}
    assert len(shards(sharded)) > 1
    with ShardReader(sharded) as reader:
        assert reader.keys() == sorted(stored)
        assert reader.files() == [shard.name for shard in shards(sharded)]
        for name, tensor in stored.items():
            assert torch.equal(reader.get(name), tensor)
            assert reader.shape(name) == tuple(tensor.shape)
            assert reader.dtype(name) == tensor.dtype == torch.bfloat16
            assert reader.nbytes(name) == tensor.numel() * 2
            assert name in load_file(sharded / reader.file_of(name))


def test_a_single_file_needs_no_index(single):
    with ShardReader(single) as reader:
        assert reader.keys() == ["a", "b.weight"]
        assert torch.equal(reader.get("b.weight"), torch.ones(3))
        assert "a" in reader and "c" not in reader


def test_a_tensor_outlives_its_reader(single):
    with ShardReader(single) as reader:
        tensor = reader.get("b.weight")
    assert tensor.sum() == 3


def test_every_dtype_has_its_torch_name(tmp_path):
    tensors = {name: torch.zeros(4, dtype=dtype) for name, dtype in TORCH_DTYPES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    with ShardReader(tmp_path) as reader:
        for name, dtype in TORCH_DTYPES.items():
            assert reader.dtype(name) == dtype == reader.get(name).dtype


def test_an_unknown_tensor_is_an_error_that_names_it(single):
    with ShardReader(single) as reader, pytest.raises(CompressError, match=r"single.*'model\.nothing'"):
        reader.get("model.nothing")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard_is_named(sharded, keep):
    victim = shards(sharded)[1]
    victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(CompressError, match=rf"{victim.name}.*truncated"):
        ShardReader(sharded)


def test_bytes_after_the_last_tensor_are_refused(sharded):
    with shards(sharded)[0].open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CompressError, match=f"{shards(sharded)[0].name}.*1 bytes follow"):
        ShardReader(sharded)


def header_file(path: Path, header, data: bytes = b"") -> Path:
    blob = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(blob)) + blob + data)
    return path


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"\x80\x81garbage", "corrupted safetensors header"),
        (b"[1, 2]", "not a JSON object"),
        (b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": 3}', "duplicate key"),
        ({"a": 3}, "entry of tensor 'a'"),
        ({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, "entry of tensor 'a'"),
        ({"a": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 1]}}, "dtype 'Q9'"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1]}}, "spans 1 bytes"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, "hole or overlaps"),
    ],
)
def test_a_garbled_header_is_refused(tmp_path, header, words):
    path = header_file(tmp_path / "x.safetensors", header, b"\0\0")
    with pytest.raises(CompressError, match=words) as caught:
        read_header(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_header_that_is_right_is_accepted(tmp_path):
    entry = {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}, "__metadata__": {"format": "pt"}}
    entries, metadata = read_header(header_file(tmp_path / "x.safetensors", entry, b"ab"))
    assert metadata == {"format": "pt"} and entries["a"].nbytes == 2


def test_other_files_under_a_safetensors_name_are_told_apart(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    with pytest.raises(CompressError, match="git lfs pull"):
        read_header(path)
    path.write_bytes(b"PK\3\4" + b"\xff" * 50)
    with pytest.raises(CompressError, match="not a safetensors file"):
        read_header(path)


def test_a_missing_shard_is_named(sharded):
    victim = shards(sharded)[-1]
    victim.unlink()
    with pytest.raises(CompressError, match=f"{victim.name}.*no such file"):
        ShardReader(sharded)


def test_a_tensor_the_index_promises_and_no_shard_has_is_named(sharded):
    edit_index(sharded, lambda weights: weights.update({"model.extra.weight": shards(sharded)[0].name}))
    with pytest.raises(CompressError, match=r"'model\.extra\.weight' should be in"):
        ShardReader(sharded)


def test_a_tensor_that_is_in_another_shard_than_promised_is_named(sharded):
    first, last = shards(sharded)[0].name, shards(sharded)[-1].name
    moved = next(iter(load_file(sharded / first)))
    edit_index(sharded, lambda weights: weights.update({moved: last}))
    with pytest.raises(CompressError, match=f"{moved!r} should be in {last}, but it is in {first}"):
        ShardReader(sharded)


def test_a_tensor_the_index_does_not_list_is_named(sharded):
    edit_index(sharded, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(CompressError, match=r"'model\.norm\.weight', which the index does not list"):
        ShardReader(sharded)


def test_a_tensor_in_two_shards_is_named(sharded):
    first, last = shards(sharded)[0], shards(sharded)[-1]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(last) | {name: tensor}, last)
    with pytest.raises(CompressError, match=f"{name!r} is in two shards"):
        ShardReader(sharded)


@pytest.mark.parametrize("target", ["../elsewhere.safetensors", "pytorch_model.bin", 7])
def test_an_index_that_points_elsewhere_is_refused(sharded, target):
    edit_index(sharded, lambda weights: weights.update({"model.norm.weight": target}))
    with pytest.raises(CompressError, match="not to a safetensors file beside it"):
        ShardReader(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_an_unreadable_index_is_named(sharded, text):
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(CompressError, match=INDEX_NAME):
        ShardReader(sharded)


def test_two_models_in_one_folder_are_refused(sharded):
    save_file({"a": torch.ones(1)}, sharded / "model.safetensors")
    with pytest.raises(CompressError, match="stale"):
        ShardReader(sharded)


def test_several_files_without_an_index_are_refused(sharded):
    (sharded / INDEX_NAME).unlink()
    with pytest.raises(CompressError, match=f"no {INDEX_NAME}"):
        ShardReader(sharded)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CompressError, match="no safetensors files"):
        ShardReader(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_finite_weights_pass_and_nan_is_named(dtype):
    tensor = torch.ones(3, 5).to(dtype)
    check_finite("w", tensor, "f")
    check_finite("w", torch.empty(0, 5, dtype=dtype), "f")
    tensor[1, 2] = float("nan")
    with pytest.raises(CompressError, match=r"f: tensor 'w' holds 1 NaN and 0 infinite values \(first at \[1, 2\]\)"):
        check_finite("w", tensor, "f")


def test_infinity_is_named_and_integers_are_not_looked_at():
    with pytest.raises(CompressError, match="0 NaN and 1 infinite"):
        check_finite("w", torch.tensor([1.0, -float("inf")]), "f")
    check_finite("w", torch.tensor([2**31 - 1]), "f")
