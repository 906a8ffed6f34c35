"""`compress train`, `heal` and `check-head` on a tiny model: from prompts to a head that loads and drafts."""

import json
import shutil

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from compressor import cli
from compressor.train import check
from compressor.train.passport import files

SMALL = {
    "answers": {"count": 40, "max_new_tokens": 24, "held_out": 6},
    "optimization": {
        "steps": 30,
        "rate": 0.01,
        "warmup": 2,
        "batch_tokens": 400,
        "evaluate_every": 10,
        "save_every": 10,
    },
    "draft_vocab_size": 200,
    "aux": [0, 1],
}


@pytest.fixture(scope="module", autouse=True)
def short_check():
    """Two prompts and twelve tokens show the same here, in a fraction of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "PROMPTS", 2)
        patch.setattr(check, "TOKENS", 12)
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("target"))


def write_recipe(folder, target, **changes):
    path = folder / "recipe.yaml"
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": f"{n} bottles, {n * n} walls"}) + "\n" for n in range(60)))
    training = {**SMALL, "answers": {**SMALL["answers"], "prompts": str(prompts)}, **changes}
    path.write_text(
        json.dumps(
            {
                "name": "tiny",
                "source": {"uri": str(target)},
                "proposer": {"kind": "eagle3", "training": training},
            }
        )
    )
    return path


def compress(*arguments):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    code, output = compress(
        "train", write_recipe(folder, target), "--out", folder / "head", "--json", folder / "out.json"
    )
    assert code == 0, output
    return folder


def test_training_ends_in_a_head_whose_passport_tells_what_it_learned_from(trained):
    passport = json.loads((trained / "out.json").read_text())["passport"]
    assert passport["training"]["documents"] == 40
    assert [entry["step"] for entry in passport["training"]["history"]] == [10, 20, 30]
    assert passport["check"]["conditional"][0] > 0.5
    assert not (trained / "head.work").exists()
    assert {path.name for path in (trained / "head").iterdir()} == {
        *("config.json", "model.safetensors", "passport.json", "recipe.yaml")
    }


def test_the_head_passes_its_own_check(target, trained):
    code, output = compress("check-head", target, trained / "head")
    assert code == 0 and "tokens a cycle" in output, output


@pytest.mark.parametrize("broken", ["shuffled", "aux"])
def test_a_broken_head_is_flagged(target, trained, tmp_path, broken):
    head = shutil.copytree(trained / "head", tmp_path / "head")
    if broken == "aux":
        config = json.loads((head / "config.json").read_text())
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2]
        (head / "config.json").write_text(json.dumps(config))
    else:
        tensors = load_file(head / "model.safetensors")
        order = torch.randperm(len(tensors["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        save_file(tensors, head / "model.safetensors")
    passport = json.loads((head / "passport.json").read_text())
    passport["files"] = files(head)  # as if it had been exported like this
    (head / "passport.json").write_text(json.dumps(passport))
    code, output = compress("check-head", target, head)
    assert code == 1 and "error:" in output and "Traceback" not in output, output
