"""`compress train`, `heal` and `check-head` on a tiny model: from prompts to a head that loads and drafts."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from compressor import cli
from compressor.train import check, export, overlap, states
from compressor.train.passport import HeadPassport, files

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
        patch.setattr(check, "TEXTS", 8)
        patch.setattr(overlap, "TOKENS", 24)
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
                "run": {"threads": 1},
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
    assert [entry["step"] for entry in passport["training"]["history"]] == [0, 10, 20, 30]
    assert passport["check"]["conditional"][0] > 0.25  # an untrained one: 0.005
    assert not (trained / "head.work").exists()
    assert {path.name for path in (trained / "head").iterdir()} == {
        *("config.json", "model.safetensors", "passport.json", "recipe.yaml", "training.svg")
    }


def test_states_kept_in_fp8_teach_nearly_as_well(target, trained, tmp_path):
    write_recipe(tmp_path, target)
    recipe = tmp_path / "recipe.yaml"
    code, output = compress(
        *("train", recipe, "--out", tmp_path / "head"), "--set", "proposer.training.answers.cache_format=fp8"
    )
    assert code == 0, output
    exact, rounded = (history(folder / "head")[-1] for folder in (trained, tmp_path))
    assert rounded["loss"] != exact["loss"]  # it did read them
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.02)


def test_the_head_passes_its_own_check(target, trained):
    code, output = compress("check-head", target, trained / "head")
    assert code == 0 and "tokens a cycle" in output, output


def test_a_head_that_has_learned_next_to_nothing_is_still_exported(target, tmp_path):
    recipe = write_recipe(tmp_path, target, optimization={**SMALL["optimization"], "steps": 2, "rate": 1e-5})
    code, output = compress("train", recipe, "--out", tmp_path / "head")
    assert code == 0 or "is the least to expect" in output, output


def test_a_target_that_answers_nothing_leaves_the_head_unexamined_and_says_so(target, trained, monkeypatch):
    monkeypatch.setattr(overlap, "greedy_texts", lambda *_: [])
    code, output = compress("check-head", target, trained / "head")
    assert code == 0 and "the head is not examined" in output, output


def test_a_head_that_is_not_there_is_said_before_the_target_is_loaded(tmp_path):
    code, output = compress("check-head", tmp_path / "no-target", tmp_path / "none")
    assert code == 2 and "none: no such folder; give the one that holds the head's config.json" in output


def test_a_target_whose_answers_end_at_once_cannot_judge_a_head(target, trained, monkeypatch):
    real = check.measure
    monkeypatch.setattr(check, "measure", lambda *rest: real(*rest) | {"drafts": 0, "tau": 1.0})
    code, output = compress("check-head", target, trained / "head")
    assert code == 1 and "nothing was drafted: the target's answers end with their first token" in output


def test_a_target_too_short_for_the_check_is_refused_before_training(target, tmp_path, monkeypatch):
    monkeypatch.setattr(check, "TOKENS", 5000)
    code, output = compress("train", write_recipe(tmp_path, target), "--out", tmp_path / "head")
    assert code == 1 and "the shortest prompt that a head is checked with and its answer take" in output
    assert "answers:" not in output


def edit(head, change):
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")


def shuffle(head):
    order = torch.randperm(SMALL["draft_vocab_size"], generator=torch.Generator().manual_seed(0))
    edit(head, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][order]}))


def enlarge_norm(head):
    edit(head, lambda tensors: tensors.update({"norm.weight": 20 * tensors["norm.weight"]}))


def move_states(head):
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2]
    (head / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shuffle, "is recorded: other weights"),
        (enlarge_norm, "is recorded: other weights, a missing norm, or another target"),
        (move_states, "with eagle_aux_hidden_state_layer_ids [0, 1] the target would accept"),
    ],
)
def test_a_broken_head_is_flagged(target, trained, tmp_path, damage, message):
    head = shutil.copytree(trained / "head", tmp_path / "head")
    damage(head)
    passport = json.loads((head / "passport.json").read_text())
    passport["files"] = files(head)  # as if it had been exported like this
    (head / "passport.json").write_text(json.dumps(passport))
    code, output = compress("check-head", target, head, "--json", tmp_path / "out.json")
    assert code == 1 and message in output and "Traceback" not in output, output
    assert message in json.loads((tmp_path / "out.json").read_text())["fault"]


def history(head):
    found = json.loads((head / "passport.json").read_text())["training"]["history"]
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in found]


def test_training_that_was_killed_goes_on_to_the_same_head(target, trained, tmp_path):
    recipe = write_recipe(tmp_path, target)
    command = [sys.executable, "-m", "compressor.cli", "train", str(recipe), "--out", str(tmp_path / "head")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    checkpoint = tmp_path / "head.work" / "training" / "last.safetensors"
    while process.poll() is None and not checkpoint.exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL  # it had not finished
    code, output = compress("train", recipe, "--out", tmp_path / "head")
    assert code == 2 and "add --resume" in output
    code, output = compress("train", recipe, "--out", tmp_path / "head", "--resume")
    assert code == 0, output
    assert history(tmp_path / "head") == history(trained / "head")
    assert files(tmp_path / "head")["model.safetensors"] == files(trained / "head")["model.safetensors"]


def test_other_settings_do_not_resume(target, tmp_path):
    recipe = write_recipe(tmp_path, target)
    work = tmp_path / "head.work"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("compressor.train.head.train", interrupted)
        code, _ = compress("train", recipe, "--out", tmp_path / "head")
        assert code == 130 and (work / "answers").is_dir()
    write_recipe(tmp_path, target, decay=0.5)
    code, output = compress("train", recipe, "--out", tmp_path / "head", "--resume")
    assert code == 2 and "cannot resume, changed since it started" in output and "decay" in output


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_states_beyond_the_budget_are_refused_before_they_are_made(target, tmp_path):
    small = {"count": 12, "held_out": 2, "max_new_tokens": 4, "cache_bytes": 1000}
    recipe = write_recipe(tmp_path, target, answers=small)
    code, output = compress("train", recipe, "--out", tmp_path / "head")
    assert code == 2 and "answers.cache_bytes: the states of" in output and "cache: none" in output
    assert not (tmp_path / "head").exists()


def test_states_without_the_final_norm_are_refused(target, tmp_path, monkeypatch):
    original = states.read

    recipe = write_recipe(tmp_path, target)

    def raw(decoder, texts, aux):
        found = original(decoder, texts, (*aux, len(decoder.layers)))
        width = decoder.config.hidden_size
        return [torch.cat([state[:, : -2 * width], state[:, -2 * width : -width]], -1) for state in found]

    monkeypatch.setattr(states, "read", raw)
    code, output = compress("train", recipe, "--out", tmp_path / "head")
    assert code == 1 and "they lack its final norm" in output, output


def test_a_head_heals_on_another_target_and_says_from_what(target, trained, tmp_path):
    code, output = compress(
        *("heal", target, trained / "head", "--out", tmp_path / "healed", "--steps", 3, "--count", 10),
    )
    assert code == 0, output
    passport = json.loads((tmp_path / "healed" / "passport.json").read_text())
    assert passport["healed_from"] == files(trained / "head")


@pytest.mark.parametrize("command", ["train", "heal"])
def test_an_existing_result_is_not_overwritten(target, trained, tmp_path, command):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "mine").write_text("")
    first = (write_recipe(tmp_path, target),) if command == "train" else (target, trained / "head")
    code, output = compress(command, *first, "--out", tmp_path / "head")
    assert code == 2 and "exists already" in output


def test_a_recipe_without_training_trains_nothing(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nsource: {uri: /nowhere}\n")
    code, output = compress("train", path, "--out", tmp_path / "head")
    assert code == 2 and "proposer.training: missing" in output


def test_a_source_that_changed_meanwhile_is_not_resumed(target, tmp_path, monkeypatch):
    source = shutil.copytree(target, tmp_path / "source")
    recipe = write_recipe(tmp_path, source)
    with monkeypatch.context() as patch:
        patch.setattr("compressor.train.head.train", interrupted)
        assert compress("train", recipe, "--out", tmp_path / "head")[0] == 130
    other = tiny.save(tmp_path / "other", seed=1)
    for file in other.glob("*.safetensors"):
        shutil.copyfile(file, source / file.name)
    code, output = compress("train", recipe, "--out", tmp_path / "head", "--resume")
    assert code == 2 and "the source's files changed since it started" in output


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shuffle, "the least that rounding explains; the export is wrong"),
        (enlarge_norm, "the least that rounding explains; the export is wrong"),
        (move_states, "the least that rounding explains; the export is wrong"),
    ],
)
def test_a_head_that_is_exported_wrongly_is_refused_and_the_work_is_kept(
    target, tmp_path, monkeypatch, damage, message
):
    original = export.write

    def write(head, folder, **options):
        original(head, folder, **options)
        damage(folder)

    monkeypatch.setattr(export, "write", write)
    code, output = compress("train", write_recipe(tmp_path, target), "--out", tmp_path / "head")
    assert code == 1 and message in output, output
    assert not (tmp_path / "head").exists() and (tmp_path / "head.work" / "training" / "last.safetensors").exists()


def test_a_file_that_is_not_the_passports_is_named(target, trained, tmp_path):
    head = shutil.copytree(trained / "head", tmp_path / "head")
    (head / "config.json").write_text((head / "config.json").read_text() + "\n")
    code, output = compress("check-head", target, head)
    assert code == 1 and "config.json: is not the file that the passport describes" in output
    (head / "config.json").unlink()
    code, output = compress("check-head", target, head)
    assert code == 1 and "config.json: is missing" in output


def lower(target, head, out, *options):
    return compress("lower-head", target, head, "--out", out, *options)


def test_a_lowered_head_says_what_it_was_and_what_that_cost(target, trained, tmp_path):
    code, output = lower(target, trained / "head", tmp_path / "low", "--precision", "int8", "--max-loss", "0.5")
    assert code == 0 and output.count("tokens a cycle") == 2, output
    old, new = (json.loads((head / "passport.json").read_text()) for head in (trained / "head", tmp_path / "low"))
    assert new["lowering"]["precision"] == "int8" and new["lowering"]["files"] == old["files"]
    assert new["lowering"]["before"]["tau"] == pytest.approx(old["check"]["tau"])
    assert new["files"] == files(tmp_path / "low") and new["training"] == old["training"]
    code, output = compress("check-head", target, tmp_path / "low")
    assert code == 0, output


def test_a_head_without_a_passport_is_lowered_without_one(target, trained, tmp_path):
    head = shutil.copytree(trained / "head", tmp_path / "head")
    (head / "passport.json").unlink()
    code, output = lower(target, head, tmp_path / "low", "--precision", "fp8", "--max-loss", "0.9")
    assert code == 0 and not (tmp_path / "low" / "passport.json").exists(), output


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--precision", "int4-g32"], 2, "say it with --max-loss"),
        (["--precision", "int5"], 2, "precision: 'int5' is not one of fp8, int8"),
        (["--precision", "int4-g128", "--max-loss", "0.9"], 2, "which groups of int4-g128 do not divide"),
    ],
)
def test_a_head_is_not_lowered_unawares(target, trained, tmp_path, options, code, message):
    found, output = lower(target, trained / "head", tmp_path / "low", *options)
    assert found == code and message in output and not list(tmp_path.iterdir()), output


def test_a_head_that_lost_more_than_allowed_is_not_written(target, trained, tmp_path, monkeypatch):
    real = check.check

    def worse(kind, folder, *rest, **options):
        found = real(kind, folder, *rest, **options)
        return found if folder == trained / "head" else replace(found, measured=found.measured | {"tau": 1.0})

    monkeypatch.setattr(check, "check", worse)
    code, output = lower(target, trained / "head", tmp_path / "low", "--precision", "int8")
    assert code == 1 and "a loss of 100.0% of the accepted ones, 5.0% is allowed" in output
    assert not list(tmp_path.iterdir())


def test_a_proposer_of_another_kind_is_not_lowered(target, trained, tmp_path):
    head = shutil.copytree(trained / "head", tmp_path / "head")
    passport = json.loads((head / "passport.json").read_text())
    (head / "passport.json").write_text(json.dumps(passport | {"kind": "draft"}))
    code, output = lower(target, head, tmp_path / "low", "--precision", "int8")
    assert code == 2 and "its passport calls it a proposer of kind draft" in output


@pytest.mark.parametrize(
    ("recipe", "share"),
    [
        ({"proposer": {"training": {"answers": {"self_written": 0.5}}}}, 0.5),
        ({"heal": {"answers": {"self_written": 0.25}}}, 0.25),
        ({"proposer": {"training": None}}, 0.0),
    ],
)
def test_healing_takes_prompts_from_where_training_took_them(trained, recipe, share):
    passport = HeadPassport.load(trained / "head")
    assert passport.model_copy(update={"recipe": recipe}).self_written == share


def test_a_share_that_is_said_is_taken(target, trained, tmp_path):
    options = ("--steps", 3, "--count", 10, "--self-written", 0)
    code, output = compress("heal", target, trained / "head", "--out", tmp_path / "healed", *options)
    assert code == 0, output
    assert HeadPassport.load(tmp_path / "healed").recipe["heal"]["answers"]["self_written"] == 0
