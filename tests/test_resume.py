"""A run killed at any moment and resumed writes the same bytes as one that was left alone."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import tiny_models as tiny
import torch
import yaml
from safetensors.torch import save_file

from compressor.checkpoint.digest import sha256_file

# What each run is waited for before it is killed, a random moment later.
MOMENTS = ["calibration.safetensors", "block-00001.safetensors", "block-00003.safetensors", "outside.safetensors", None]


@pytest.fixture
def recipe(tmp_path):
    source = tiny.save(tmp_path / "source", num_hidden_layers=5)
    ids = torch.randint(3, tiny.VOCABULARY, (16, 64), generator=torch.Generator().manual_seed(3))
    save_file({"ids": ids}, tmp_path / "rows.safetensors")
    path = tmp_path / "recipe.yaml"
    made = {
        "name": "tiny",
        "source": {"uri": str(source)},
        "quantization": {"format": "int4-g32"},
        "calibration": {"kind": "tokens", "path": "rows.safetensors", "rows": 16, "length": 64},
        "measure": {"quality": {"kind": "none"}, "acceptance": {"prompts": 1, "max_new_tokens": 4}},
        "bundle": {"max_shard_bytes": 100_000},
    }
    path.write_text(yaml.safe_dump(made))
    return path


def start(recipe, out, *options):
    command = [sys.executable, "-m", "compressor.cli", str(recipe), "--out", str(out), *options]
    environment = {**os.environ, "COMPRESS_KEYS": str(recipe.parent / "keys")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process):
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def kill_after(process, awaited, delay):
    """SIGKILL a moment after the file `awaited` exists; whether it was still running."""
    deadline = time.monotonic() + 120
    while process.poll() is None and not awaited.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(delay)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return alive


def shards(folder):
    return {path.name: sha256_file(path) for path in sorted(folder.glob("*.safetensors"))}


def test_five_kills_do_not_change_a_byte(recipe, tmp_path):
    code, output = finish(start(recipe, tmp_path / "whole"))
    assert code == 0, output
    expected = shards(tmp_path / "whole")
    assert len(expected) > 1

    out, work = tmp_path / "killed", tmp_path / "killed.work"
    moments = random.Random(0)
    killed = 0
    for name in MOMENTS:
        awaited = work / name if name else tmp_path / ".killed.partial"
        killed += kill_after(start(recipe, out, "--resume"), awaited, moments.uniform(0, 0.05))
        assert not out.exists(), "a half-written bundle appeared"
    assert killed == 5
    code, output = finish(start(recipe, out, "--resume"))
    assert code == 0, output
    assert shards(out) == expected
    assert not work.exists()

    # negative control: another seed of the rows gives other bytes, so the comparison can fail
    ids = torch.randint(3, tiny.VOCABULARY, (16, 64), generator=torch.Generator().manual_seed(4))
    save_file({"ids": ids}, tmp_path / "rows.safetensors")
    code, output = finish(start(recipe, tmp_path / "other"))
    assert code == 0, output
    assert shards(tmp_path / "other") != expected


def test_a_changed_recipe_refuses_to_resume_and_says_what_changed(recipe, tmp_path):
    out = tmp_path / "killed"
    assert kill_after(start(recipe, out), tmp_path / "killed.work/block-00000.safetensors", 0)
    code, output = finish(start(recipe, out, "--resume", "--set", "quantization.damping=0.05"))
    assert code == 2
    assert "quantization.damping: 0.01 → 0.05" in " ".join(output.split())
    assert "Traceback" not in output
