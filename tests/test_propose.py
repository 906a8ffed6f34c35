"""A job that trains its proposer: the head is trained, measured, healed and part of the signed bundle."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

from compressor import pipeline, propose
from compressor.bundle import Bundle
from compressor.decode.law import Law
from compressor.errors import CompressError, UsageError
from compressor.recipe import Recipe
from compressor.train import check, overlap
from compressor.train.passport import HeadPassport, files
from compressor.ui import NullUI

OPTIMIZATION = {"steps": 60, "rate": 0.01, "warmup": 2, "batch_tokens": 400, "evaluate_every": 20, "save_every": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("propose")


@pytest.fixture(scope="module", autouse=True)
def keys(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPRESS_KEYS", str(folder / "keys"))
        patch.setattr(overlap, "TOKENS", 16)  # a quarter of the time
        yield


@pytest.fixture(scope="module")
def source(folder):
    tiny.save_rows(folder)
    prompts = "".join(json.dumps({"text": f"{n} bottles, {n * n} walls"}) + "\n" for n in range(30))
    (folder / "prompts.jsonl").write_text(prompts)
    return tiny.save(folder / "source")


def recipe(folder, source, kind="eagle3", heal=True, **training):
    answers = {"prompts": str(folder / "prompts.jsonl"), "count": 30, "max_new_tokens": 32, "held_out": 6}
    section = {"answers": answers, "optimization": OPTIMIZATION, **training}
    if kind == "eagle3":
        section = {"draft_vocab_size": 200, "aux": [0, 1], **section}
    proposer = {"kind": kind, "training": section, "num_speculative_tokens": 2}
    if heal:
        proposer["heal"] = {"answers": answers, "optimization": {**OPTIMIZATION, "rate": 0.001}}
    return Recipe.from_dict(
        {
            "name": "tiny",
            "source": {"uri": str(source)},
            "quantization": {"format": "int4-g32", "method": "rtn", "scale_search": "none"},
            "proposer": proposer,
            "measure": {"acceptance": {"prompts": 2, "max_new_tokens": 8}, "quality": {"kind": "none"}},
        }
    )


def run(folder, made, name):
    return pipeline.run(made, out=folder / name, work=folder / f"{name}.work", ui=NullUI())


@pytest.fixture(scope="module")
def bundle(folder, source):
    return run(folder, recipe(folder, source), "bundle")


def test_the_passport_has_acceptance_before_quantization_and_around_healing(bundle):
    rows = [(row.target, row.head) for row in bundle.passport.outcomes.acceptance]
    assert rows[0] == ("baseline", None)
    assert sorted(rows[1:], key=str) == [("quantized", "healed"), ("quantized", None)]


def test_the_better_head_is_the_one_in_the_bundle(bundle):
    quantized = [row for row in bundle.passport.outcomes.acceptance if row.target == "quantized"]
    assert quantized[0].tau >= quantized[1].tau
    assert {"config.json", "model.safetensors", "recipe.yaml"} <= set(bundle.passport.proposer.files)


def test_the_head_in_the_bundle_says_what_it_was_trained_on(bundle):
    passport = HeadPassport.load(bundle.path / "proposer")
    assert passport.training["documents"] == 30 and passport.kind == "eagle3"


def test_the_bundles_own_head_drafts_without_being_named(bundle):
    output = bundle.runner(proposer="eagle3", num_speculative_tokens=2).generate(
        [5, 6, 7, 8], 8, law=Law(temperature=0.0), seed=0
    )
    alone = bundle.runner(proposer="none").generate([5, 6, 7, 8], 8, law=Law(temperature=0.0), seed=0)
    assert output.token_ids == alone.token_ids


def test_a_head_that_was_changed_is_found_by_verification(bundle, folder):
    copy = shutil.copytree(bundle.path, folder / "changed")
    head = copy / "proposer" / "model.safetensors"
    data = bytearray(head.read_bytes())
    data[-1] ^= 1
    head.write_bytes(data)
    with pytest.raises(CompressError, match=r"proposer/model\.safetensors"):
        Bundle.open(copy).verify()


@pytest.mark.parametrize(("kind", "training"), [("medusa", {"heads": 2}), ("draft", {"layers": 1})])
def test_other_proposers_are_trained_by_the_same_recipe(folder, source, kind, training):
    made = run(folder, recipe(folder, source, kind, heal=False, **training), kind)
    assert [row.target for row in made.passport.outcomes.acceptance] == ["baseline", "quantized"]
    assert made.runner(proposer=kind, num_speculative_tokens=2).generate([5, 6], 4, law=Law(temperature=0.0), seed=0)


@pytest.fixture(scope="module")
def head(bundle, folder):
    return shutil.copytree(bundle.path / "proposer", folder / "given")


def given(folder, source, head, **changes):
    made = recipe(folder, source).to_dict()
    made["proposer"] |= {"training": None, "heal": None, "path": str(head), **changes}
    return Recipe.from_dict(made)


def test_a_head_that_is_named_becomes_part_of_the_bundle(folder, source, head):
    made = run(folder, given(folder, source, head), "with-head")
    assert made.passport.proposer.files["model.safetensors"] == files(head)["model.safetensors"]
    assert [row.target for row in made.passport.outcomes.acceptance] == ["baseline", "quantized"]
    assert not [row for row in made.passport.decisions if row.what.startswith("proposer")]  # of its precision, too


def test_the_passport_says_that_a_named_head_reads_the_states_of_other_layers(folder, source, head):
    moved = shutil.copytree(head, folder / "moved")
    config = json.loads((moved / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 2]
    (moved / "config.json").write_text(json.dumps(config))
    (moved / "passport.json").unlink()
    made = run(folder, given(folder, source, moved), "with-moved-head")
    (found,) = [row for row in made.passport.decisions if row.what.startswith("proposer")]
    assert found.what.startswith("proposer moved: with eagle_aux_hidden_state_layer_ids [0, 1] the target would accept")
    assert found.why == "the recipe names this head; it is used as it is"


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kind": "medusa"}, "calls it a proposer of kind medusa"), ({"files": {"a": "0" * 64}}, "a: is missing")],
)
def test_a_named_head_that_is_not_its_passports_is_refused(folder, source, head, change, message):
    other = shutil.copytree(head, folder / f"other-{next(iter(change))}")
    described = json.loads((other / "passport.json").read_text())
    (other / "passport.json").write_text(json.dumps(described | change))
    with pytest.raises(CompressError, match=message):
        run(folder, given(folder, source, other), other.name + "-job")


def test_a_named_head_that_changes_during_the_job_is_refused(folder, source, head, monkeypatch):
    changed = shutil.copytree(head, folder / "changing")
    original = pipeline.quantize

    def quantize(state):
        (changed / "recipe.yaml").write_text("name: other")
        original(state)

    monkeypatch.setattr(pipeline, "quantize", quantize)
    with pytest.raises(CompressError, match="changing: missing or changed since it was recorded"):
        run(folder, given(folder, source, changed), "never")
    assert not (folder / "never").exists()


def test_a_head_that_cannot_be_healed_is_refused_before_quantization(folder, source, head, monkeypatch):
    other = shutil.copytree(head, folder / "own-embedding")
    (other / "passport.json").unlink()
    tensors = load_file(other / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.zeros(tiny.VOCABULARY, 64, dtype=torch.bfloat16)
    save_file(tensors, other / "model.safetensors")
    monkeypatch.setattr(pipeline, "quantize", None)
    heal = recipe(folder, source).to_dict()["proposer"]["heal"]
    with pytest.raises(UsageError, match="an embedding of their own"):
        run(folder, given(folder, source, other, heal=heal), "unhealed")


@pytest.mark.parametrize("stop", ["_keep", "put"])
def test_a_job_that_was_stopped_around_its_proposer_ends_in_the_same_head(folder, source, bundle, monkeypatch, stop):
    made, name = recipe(folder, source), f"stopped-{stop}"

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(propose, stop, stopped)
    with pytest.raises(KeyboardInterrupt):
        run(folder, made, name)
    monkeypatch.undo()
    monkeypatch.setenv("COMPRESS_KEYS", str(folder / "keys"))
    again = pipeline.run(made, out=folder / name, work=folder / f"{name}.work", ui=NullUI(), resume=True)
    assert files(again.path / "proposer")["model.safetensors"] == files(bundle.path / "proposer")["model.safetensors"]
    rows = [[row.model_dump() for row in one.passport.outcomes.acceptance] for one in (again, bundle)]
    assert rows[0] == rows[1]


def test_states_that_the_target_lacks_are_refused_before_any_work(folder, source):
    with pytest.raises(UsageError, match=r"training\.aux: \[0, 7\] must ascend and lie within 0 to 2"):
        run(folder, recipe(folder, source, aux=[0, 7]), "refused")
    assert not (folder / "refused").exists()


def test_the_head_goes_into_the_bundle_in_the_precision_that_the_recipe_says(folder, source, head):
    made = run(folder, given(folder, source, head, precision="int8", precision_loss=0.9), "int8")
    rows = [row for row in made.passport.outcomes.acceptance if row.target == "quantized"]
    assert [row.precision for row in rows] == ["int8", None]
    stored = load_file(made.path / "proposer" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.int8
    assert "proposer's linears in int8" in [row.what for row in made.passport.decisions]
    lowering = HeadPassport.load(made.path / "proposer").lowering
    assert (lowering.precision, lowering.allowed_loss) == ("int8", 0.9)
    assert lowering.files == HeadPassport.load(head).files
    law = Law(temperature=0.0)
    drafted = made.runner(proposer="eagle3", num_speculative_tokens=2).generate([5, 6, 7, 8], 8, law=law, seed=0)
    assert drafted.token_ids == made.runner(proposer="none").generate([5, 6, 7, 8], 8, law=law, seed=0).token_ids


def test_a_precision_that_costs_too_much_stops_the_job_and_another_one_goes_on(folder, source, head, monkeypatch):
    real = check.check

    def worse(kind, place, *rest, **options):
        found = real(kind, place, *rest, **options)
        return replace(found, measured=found.measured | {"tau": 1.0 if place.name == "lowered" else 2.0})

    monkeypatch.setattr(check, "check", worse)
    with pytest.raises(CompressError, match=r"in fp8 the check finds 1\.000 tokens a cycle, 2\.000 before"):
        run(folder, given(folder, source, head, precision="fp8"), "too-low")
    assert not (folder / "too-low").exists()
    monkeypatch.setattr(pipeline, "quantize_block", None)  # it has been done
    monkeypatch.setattr(check, "check", real)
    other = given(folder, source, head, precision="int8", precision_loss=0.9)
    made = pipeline.run(other, out=folder / "too-low", work=folder / "too-low.work", ui=NullUI(), resume=True)
    assert HeadPassport.load(made.path / "proposer").lowering.precision == "int8"
    assert made.passport.recipe["proposer"]["precision"] == "int8"


@pytest.mark.parametrize("trained", [True, False])
def test_a_width_that_the_precision_does_not_divide_is_refused_before_any_work(folder, source, head, trained):
    made = recipe(folder, source, heal=False).to_dict() if trained else given(folder, source, head).to_dict()
    made["proposer"] |= {"precision": "int4-g128", "precision_loss": 0.5}
    with pytest.raises(UsageError, match="inputs, which groups of int4-g128 do not divide"):
        run(folder, Recipe.from_dict(made), f"unfit-{trained}")


def test_what_a_job_checks_of_a_lowered_head_is_what_check_head_measures(folder, source, head):
    longer = {"precision": "int8", "precision_loss": 0.9, "num_speculative_tokens": 5}
    made = run(folder, given(folder, source, head, **longer), "k5")
    recorded = HeadPassport.load(made.path / "proposer").check
    assert (recorded.k, recorded.task, recorded.precision) == (check.K, "head check", "int8")


def test_a_head_in_the_speculators_layout_names_the_target_and_drafts(folder, source):
    made = run(folder, recipe(folder, source, layout="speculators"), "speculators")
    config = json.loads((made.path / "proposer" / "config.json").read_text())["speculators_config"]
    assert config["verifier"] == {"name_or_path": str(source), "architectures": ["LlamaForCausalLM"]}
    assert config["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 2}]
    assert made.runner(proposer="eagle3", num_speculative_tokens=2).generate(
        [5, 6], 4, law=Law(temperature=0.0), seed=0
    )
