"""Two processes of `compress train` share the steps and leave one head."""

import json
import os
import subprocess
import sys

import pytest
import tiny_models as tiny
from safetensors.torch import load_file

from compressor.errors import UsageError
from compressor.recipe_training import Heal
from compressor.train.passport import HeadPassport
from compressor.train.run import heal
from compressor.ui import NullUI

LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
STEPS = 2  # within one round through the documents, where two processes see the batches of one that accumulates two


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("target"))


def run(command):
    """A process that waits for ever for another one is what these tests would see."""
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )


def trained(folder, target, launcher=(), **optimization):
    """The history of a head trained in `folder`."""
    prompts, recipe = folder / "prompts.jsonl", folder / "recipe.yaml"
    prompts.write_text("".join(json.dumps({"text": f"{n} bottles, {n * n} walls"}) + "\n" for n in range(60)))
    training = {
        "answers": {"prompts": str(prompts), "count": 40, "held_out": 6, "max_new_tokens": 24},
        "optimization": {
            **{"steps": STEPS, "rate": 0.01, "warmup": 0, "batch_tokens": 300, "evaluate_every": 1},
            **optimization,
        },
        "draft_vocab_size": 200,
        "aux": [0, 1],
    }
    proposer = {"kind": "eagle3", "training": training}
    recipe.write_text(json.dumps({"name": "tiny", "source": {"uri": str(target)}, "proposer": proposer}))
    command = [sys.executable, *launcher, "-m", "compressor.cli", "train", str(recipe), "--out", str(folder / "head")]
    done = run(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("tokens a cycle on the check's prompts") == 1
    assert not (folder / "head.work").exists()
    passport = HeadPassport.load(folder / "head")
    return passport.training["history"]


def test_two_processes_take_the_steps_of_one_that_accumulates_two_batches(target, tmp_path):
    folders = {name: tmp_path / name for name in ("two", "one", "half")}
    for folder in folders.values():
        folder.mkdir()
    two = trained(folders["two"], target, LAUNCHER)
    one = trained(folders["one"], target, accumulation=2)
    half = trained(folders["half"], target)
    for entry, other in zip(two[1:], one[1:], strict=True):
        assert (entry["step"], entry["tokens"]) == (other["step"], other["tokens"])
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert entry["conditional"] == pytest.approx(other["conditional"], abs=0.02)
    assert half[-1]["tokens"] < one[-1]["tokens"]
    same, control = (apart(folders["one"], folders[name]) for name in ("two", "half"))
    assert same < 0.2 * control


def apart(one, other):
    """How far the weights of two heads lie from each other."""
    left, right = (load_file(folder / "head" / "model.safetensors") for folder in (one, other))
    names = [name for name in left if name not in ("d2t", "t2d")]
    return sum(float((left[name].float() - right[name].float()).square().sum()) for name in names) ** 0.5


def test_an_error_of_the_first_process_is_told_once_and_ends_the_others(target, tmp_path):
    work = tmp_path / "head.work"
    work.mkdir()
    (work / "stranger").touch()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        json.dumps({"name": "t", "source": {"uri": str(target)}, "proposer": {"kind": "eagle3", "training": {}}})
    )
    done = run([sys.executable, *LAUNCHER, "-m", "compressor.cli", "train", recipe, "--out", tmp_path / "head"])
    assert done.returncode != 0
    ours = [line for line in done.stderr.splitlines() if "head.work: not empty and not a work folder" in line]
    assert len(ours) == 1 and "Connection closed" not in done.stderr and "compressor/train/run.py" not in done.stderr


def test_healing_in_several_processes_is_refused(target, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="compress heal: runs in one process, and WORLD_SIZE is 2"):
        heal(target, tmp_path, tmp_path / "out", tmp_path / "work", Heal(), NullUI())
