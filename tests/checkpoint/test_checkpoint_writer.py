"""Writing safetensors: deterministic bytes, right shards and index, nothing half-written."""

import json
import os
import shutil
from collections import namedtuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.checkpoint import writer
from compressor.checkpoint.header import TORCH_DTYPES
from compressor.checkpoint.reader import INDEX_NAME, ShardReader
from compressor.errors import CompressError


@pytest.fixture
def parts(tmp_path):
    """Three part files, as a block-by-block job leaves them, and all their tensors."""
    generator = torch.Generator().manual_seed(0)
    tables = [
        {"embed.weight": torch.randn(10, 8, generator=generator).bfloat16()},
        {
            "layer.0.weight_packed": torch.randint(0, 99, (4, 4), dtype=torch.int32, generator=generator),
            "layer.0.scale": torch.ones(4, 1, dtype=torch.float8_e4m3fn),
            "layer.0.odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
            "layer.0.shape": torch.tensor([4, 8]),
        },
        {"norm.weight": torch.ones(8), "empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)},
    ]
    paths = []
    for i, table in enumerate(tables):
        paths.append(tmp_path / f"part-{i}.safetensors")
        writer.save_atomic(paths[-1], table)
    return paths, {name: tensor for table in tables for name, tensor in table.items()}


def assert_same(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].float(), tensor.float())


def test_a_saved_file_reads_back_in_every_dtype(tmp_path):
    tensors = {name: torch.ones(3, 2).to(dtype) for name, dtype in TORCH_DTYPES.items() if dtype != torch.complex64}
    tensors["strided"] = torch.arange(12.0).reshape(3, 4).T
    writer.save_atomic(tmp_path / "x.safetensors", tensors)
    assert_same(load_file(tmp_path / "x.safetensors"), tensors)


def test_a_saved_file_has_the_bytes_of_the_reference_implementation(tmp_path):
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(2), "é": torch.ones(1, dtype=torch.int64)}
    writer.save_atomic(tmp_path / "ours", tensors, {"format": "pt"})
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_bytes_do_not_depend_on_the_order_of_the_dictionary(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.zeros(3, dtype=torch.uint8), "c": torch.ones(1).half()}
    writer.save_atomic(tmp_path / "1", tensors, {"x": "1", "y": "2"})
    writer.save_atomic(tmp_path / "2", dict(reversed(tensors.items())), {"y": "2", "x": "1"})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    writer.save_atomic(tmp_path / "3", tensors | {"a": torch.zeros(2)}, {"x": "1", "y": "2"})
    assert (tmp_path / "1").read_bytes() != (tmp_path / "3").read_bytes()


def test_a_dtype_without_a_safetensors_name_is_refused(tmp_path):
    with pytest.raises(CompressError, match="'z' has dtype"):
        writer.save_atomic(tmp_path / "x", {"z": torch.ones(1, dtype=torch.complex128)})
    assert not list(tmp_path.iterdir())


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    writer.save_atomic(path, {"a": torch.ones(2)})
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        writer.save_atomic(path, {"a": torch.zeros(2)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_parts_become_one_file_with_an_index(parts, tmp_path):
    paths, tensors = parts
    weight_map = writer.assemble(paths, tmp_path / "out", max_shard_bytes=10**9)
    assert weight_map == dict.fromkeys(sorted(tensors), "model.safetensors")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", INDEX_NAME]
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)


@pytest.mark.parametrize("limit", [1, 64, 200])
def test_every_tensor_is_in_exactly_one_shard(parts, tmp_path, limit):
    paths, tensors = parts
    weight_map = writer.assemble(paths, tmp_path / "out", max_shard_bytes=limit)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    nbytes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    assert index == {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": weight_map}
    names = sorted(set(weight_map.values()))
    assert names == [f"model-{i + 1:05d}-of-{len(names):05d}.safetensors" for i in range(len(names))] and len(names) > 1
    found = {}
    for name in names:
        shard = load_file(tmp_path / "out" / name)
        assert not found.keys() & shard.keys()
        assert len(shard) == 1 or sum(nbytes[tensor] for tensor in shard) <= limit
        found |= shard
    assert_same(found, tensors)
    with ShardReader(tmp_path / "out") as reader:
        assert reader.keys() == sorted(tensors)


def test_shards_follow_the_order_of_the_parts(parts, tmp_path):
    paths, _ = parts
    assert writer.assemble(paths, tmp_path / "a", max_shard_bytes=200)["embed.weight"].startswith("model-00001")
    assert writer.assemble(paths[::-1], tmp_path / "b", max_shard_bytes=200)["embed.weight"].startswith("model-00002")


def test_assembling_twice_gives_the_same_bytes(parts, tmp_path):
    paths, _ = parts
    for out in ("1", "2"):
        writer.assemble(paths, tmp_path / out, max_shard_bytes=100)
    writer.assemble(paths, tmp_path / "2", max_shard_bytes=100)  # over its own result, as after a kill
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / out).iterdir()} for out in ("1", "2"))
    assert first == second


def test_large_tensors_are_streamed_in_chunks(parts, tmp_path, monkeypatch):
    paths, tensors = parts
    monkeypatch.setattr(writer, "_CHUNK_BYTES", 7)
    writer.assemble(paths, tmp_path / "out", max_shard_bytes=10**9)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), tensors)


def test_a_tensor_in_two_parts_is_named(parts, tmp_path):
    paths, _ = parts
    writer.save_atomic(tmp_path / "again.safetensors", {"norm.weight": torch.ones(8)})
    with pytest.raises(CompressError, match=r"again\.safetensors: tensor 'norm\.weight' is in part-2"):
        writer.assemble([*paths, tmp_path / "again.safetensors"], tmp_path / "out", max_shard_bytes=100)
    assert not (tmp_path / "out").exists()


def test_a_damaged_part_is_named(parts, tmp_path):
    paths, _ = parts
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    with pytest.raises(CompressError, match=r"part-1\.safetensors: truncated"):
        writer.assemble(paths, tmp_path / "out", max_shard_bytes=100)


def test_nothing_to_assemble_is_an_error(tmp_path):
    with pytest.raises(CompressError, match="no tensors"):
        writer.assemble([], tmp_path / "out", max_shard_bytes=100)


def test_shards_of_another_run_are_not_mixed_in(parts, tmp_path):
    paths, _ = parts
    writer.assemble(paths, tmp_path / "out", max_shard_bytes=100)
    with pytest.raises(CompressError, match="belongs to another set of shards"):
        writer.assemble(paths, tmp_path / "out", max_shard_bytes=10**9)


def test_a_full_disk_leaves_no_shards(parts, tmp_path, monkeypatch):
    paths, _ = parts
    calls = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append(descriptor) if not calls else full_disk())
    with pytest.raises(OSError, match="No space left"):
        writer.assemble(paths, tmp_path / "out", max_shard_bytes=100)
    assert calls and not list((tmp_path / "out").iterdir())


def test_too_little_space_is_said_before_anything_is_written(parts, tmp_path, monkeypatch):
    paths, _ = parts
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(free=10))
    with pytest.raises(CompressError, match=r"out: not enough space, .* 1e-08 GB free"):
        writer.assemble(paths, tmp_path / "out", max_shard_bytes=100)
    assert not (tmp_path / "out").exists()
    writer.ensure_space(tmp_path / "not" / "yet" / "there", 10)
    with pytest.raises(CompressError):
        writer.ensure_space(tmp_path / "not" / "yet" / "there", 11)
