"""A full disk is reported with the file that was being written; /dev/full stands for the disk."""

import errno
import os
from types import SimpleNamespace

import pytest
import torch

from compressor import activations, cli_output, record
from compressor.bundle import signing
from compressor.checkpoint import writer
from compressor.errors import naming
from compressor.job import MANIFEST
from tests.test_job import job


def full(path):
    path.symlink_to("/dev/full")
    return path


def expect_named(path, act):
    with pytest.raises(OSError) as caught:
        act()
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


def test_weights(tmp_path):
    path = full(tmp_path / "x.safetensors.tmp")
    expect_named(path, lambda: writer.save_atomic(tmp_path / "x.safetensors", {"a": torch.ones(2)}))


def test_the_shard_index(tmp_path):
    writer.save_atomic(tmp_path / "part", {"a": torch.ones(2)})
    path = full(tmp_path / "model.safetensors.index.json.tmp")
    expect_named(path, lambda: writer.assemble([tmp_path / "part"], tmp_path, max_shard_bytes=1 << 20))


def test_the_manifest_of_a_run(tmp_path):
    started = job(tmp_path)
    path = full(tmp_path / f"{MANIFEST}.tmp")
    expect_named(path, lambda: started.finish("calibration", {}))


@pytest.mark.parametrize(("budget", "name"), [(1 << 20, "hidden-00000.tmp"), (0, "hidden-00000.bin")])
def test_activations(tmp_path, budget, name, monkeypatch):
    states = activations.Activations(tmp_path, (2, 4, 8), torch.bfloat16, budget)
    full(tmp_path / name)

    def run():
        states.start()
        states.put(slice(0, 2), torch.zeros(2, 4, 8, dtype=torch.bfloat16))
        states.advance()

    if budget == 0:  # a device cannot be reserved, which is another error than a full disk
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    expect_named(tmp_path / name, run)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_the_small_files_of_a_bundle(tmp_path, name):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    (source / "config.json").write_text('{"model_type": "llama"}')
    (source / "generation_config.json").write_text("{}")
    state = SimpleNamespace(
        source=SimpleNamespace(folder=source),
        dtype=torch.bfloat16,
        scheme=SimpleNamespace(fmt=None, rounds_inputs=False),
        weights=SimpleNamespace(untied=False),
    )
    path = full(out / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "quantization_config", lambda *_, **__: {})
        patch.setattr(record, "ignored", lambda _: [])
        patch.setattr(record, "_overrides", lambda _: [])
        expect_named(path, lambda: record.write_config(state, out))


def test_a_result_of_the_command_line(tmp_path):
    path = full(tmp_path / "out.json.tmp")
    expect_named(path, lambda: cli_output.write(tmp_path / "out.json", "{}"))


def test_a_key_pair(tmp_path, monkeypatch):
    monkeypatch.setattr(signing.tempfile, "mkstemp", lambda **_: (os.open(full(tmp_path / "k"), os.O_WRONLY), "k"))
    monkeypatch.chdir(tmp_path)
    expect_named(tmp_path / "key.pem", lambda: signing._create_once(tmp_path / "key.pem", b"x", 0o600))


def test_without_naming_nobody_could_tell(tmp_path):
    path = full(tmp_path / "x")
    with pytest.raises(OSError) as caught, path.open("wb") as file:
        file.write(b"x")
        file.flush()
    assert caught.value.filename is None


def test_a_name_that_is_there_stays(tmp_path):
    expected = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as caught, naming(tmp_path / "other"):
        expected.open()
    assert caught.value.filename == str(expected)
