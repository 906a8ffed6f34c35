"""A job chooses the formats of its linears by what each costs in KL, and quantizes as if the recipe had named them."""

import copy
import json

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file

from compressor import formats, pipeline, plan, plan_costs
from compressor.allocate import budget, stage
from compressor.allocate import measure as measuring
from compressor.bundle import signing
from compressor.bundle.contents import differences
from compressor.bundle.passport import Passport
from compressor.checkpoint.digest import sha256_file
from compressor.decode import engine
from compressor.errors import CompressError, UsageError
from compressor.quantize.rtn import rtn
from compressor.recipe import Recipe
from compressor.ui import NullUI

pytestmark = pytest.mark.usefixtures("keys")

FORMATS = ["int4-g32", "int8", "none"]
GROUPS = 8
"""Of a tiny model: two blocks of q/k/v, o, gate/up and down."""


@pytest.fixture
def source(tmp_path):
    return tiny.save(tmp_path / "source", "llama-tied")


def recipe(source, rows, *, allocation=None, **sections):
    quantization = {"format": "int4-g32", **sections.pop("quantization", {})}
    if allocation is not None:
        quantization["allocation"] = {"bits_per_weight": 7, "formats": FORMATS, "rows": 4, **allocation}
    return Recipe.from_dict(
        {
            "name": "tiny",
            "source": {"uri": str(source)},
            "quantization": quantization,
            "calibration": {"kind": "tokens", "path": str(rows), "rows": 6, "length": 32, "batch_size": 2},
            "proposer": {"kind": "none"},
            "measure": {"quality": {"kind": "none"}},
            **sections,
        }
    )


def run(tmp_path, made, name="bundle", **options):
    return pipeline.run(made, out=tmp_path / name, work=tmp_path / "work", ui=NullUI(), **options)


def shards(bundle):
    return {path.name: sha256_file(path) for path in sorted(bundle.path.glob("*.safetensors"))}


def options_of(bundle):
    """By (first linear, format), the option."""
    groups = bundle.passport.quantization.allocation.groups
    return {(group.linears[0], option.format): option for group in groups for option in group.options}


def test_the_choice_keeps_to_the_budget_and_the_bundle_is_what_the_passport_says(tmp_path, source, rows):
    bundle = run(tmp_path, recipe(source, rows, allocation={}))
    bundle.verify(signing.ensure_keypair()[1])
    quantization = bundle.passport.quantization
    made = quantization.allocation
    assert len(made.groups) == GROUPS and made.rows == 4 and made.length == 32
    assert made.bits_per_weight <= 7 and made.bytes <= made.budget_bytes
    assert made.bytes == sum(group.options[group.chosen].bytes for group in made.groups)
    assert made.bits_per_weight == pytest.approx(8 * made.bytes / sum(group.weights for group in made.groups))
    chosen = {name: group.options[group.chosen].format for group in made.groups for name in group.linears}
    stored = {layer.name: layer.format for layer in quantization.layers}
    assert {name: fmt for name, fmt in chosen.items() if fmt != "none"} == stored
    assert len(set(chosen.values())) > 1
    assert {name for name, fmt in chosen.items() if fmt == "none"} <= set(quantization.ignored)
    assert made.kl_sum_bound <= made.kl_sum <= sum(group.options[0].kl for group in made.groups)
    tensors = {key: t for file in bundle.path.glob("*.safetensors") for key, t in load_file(file).items()}
    for name, fmt in chosen.items():
        if fmt == "none":
            assert tensors[f"{name}.weight"].dtype == torch.bfloat16
        else:
            packed, inputs = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_shape"][1]
            assert packed.dtype == torch.int32 and packed.shape[1] * 32 == formats.get(fmt).bits * inputs


WAYS = {
    "gptq": {},
    "guided": {"quantization": {"guided": True}},
    "rtn": {"quantization": {"method": "rtn"}},
    "rtn-plain": {"quantization": {"method": "rtn", "scale_search": "none"}},
    "distilled": {"quantization": {"guided": True}, "distillation": {"steps": 2, "rows": 2, "held_out": 2}},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bytes_come_out_when_overrides_name_the_choice(tmp_path, source, rows, way):
    made = recipe(source, rows, allocation={}, **copy.deepcopy(WAYS[way]))
    allocated = run(tmp_path, made)
    groups = [group.model_dump() for group in allocated.passport.quantization.allocation.groups]
    named = stage.settings(made.quantization, groups)
    assert named.allocation is None and named.overrides
    sections = copy.deepcopy(WAYS[way]) | {"quantization": named.model_dump()}
    by_hand = run(tmp_path, recipe(source, rows, **sections), "by-hand")
    assert shards(by_hand) == shards(allocated)
    assert shards(run(tmp_path, recipe(source, rows, **WAYS[way]), "uniform")) != shards(allocated)  # negative control


@torch.inference_mode()
def kl_of_the_whole_model(source, ids, names, fmt, search="mse"):
    """KL(original ‖ original with `names` rounded) in float32, through the whole model at once."""
    original = engine.load(source, dtype=torch.float32)
    seen = {}
    linear = original.get_submodule(names[0])
    hook = linear.register_forward_pre_hook(lambda module, args: seen.update(x=args[0].flatten(0, 1)))
    log_p = original(input_ids=ids).logits.log_softmax(-1)
    hook.remove()
    importance = seen["x"].square().mean(0)
    for name in names:
        weight = original.get_submodule(name).weight
        decoded = fmt.decode(rtn(weight.bfloat16(), fmt, search=search, importance=importance))
        weight.copy_(decoded.bfloat16())
    log_q = original(input_ids=ids).logits.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize(
    ("family", "search"), [("llama-tied", "mse"), ("llama-tied", "none"), ("gemma3", "mse"), ("phi3", "mse")]
)
def test_what_is_measured_is_the_kl_of_the_whole_model_with_one_group_rounded(tmp_path, rows, family, search):
    source = tiny.save(tmp_path / "source", family)
    asked = {"formats": ["int4-g32", "int8"], "measure": "all"}
    bundle = run(tmp_path, recipe(source, rows, quantization={"scale_search": search}, allocation=asked))
    ids, off = load_file(rows)["ids"][:4], []
    for group in bundle.passport.quantization.allocation.groups:
        for option in group.options:
            assert option.known == "measured"
            wanted = kl_of_the_whole_model(source, ids, group.linears, formats.get(option.format), search)
            off.append(abs(option.kl / wanted - 1))
    # a scale whose neighbour is as good may come out as either: few groups, and little
    assert max(off) < 0.05 and sorted(off)[len(off) // 2] < 1e-5
    assert bundle.passport.quantization.allocation.prediction is None


def test_predictions_are_near_what_is_measured_and_say_that_they_are_predictions(tmp_path, source, rows):
    predicted = run(tmp_path, recipe(source, rows, allocation={}))
    measured = run(tmp_path, recipe(source, rows, allocation={"measure": "all"}), "measured")
    ours, theirs = options_of(predicted), options_of(measured)
    for (name, fmt), option in ours.items():
        assert option.known == {"int4-g32": "measured", "int8": "predicted", "none": "exact"}[fmt]
        truth = theirs[name, fmt]
        assert truth.known == ("exact" if fmt == "none" else "measured")
        assert option.kl == pytest.approx(truth.kl, rel=1e-6 if option.known == "measured" else 0.6, abs=0)
        assert (option.kl == 0) == (fmt == "none")
    prediction = predicted.passport.quantization.allocation.prediction
    assert prediction.kind == "derived" and "error(cheapest)" in prediction.formula


def test_formats_that_round_inputs_are_always_measured(tmp_path, source, rows):
    asked = {"format": "int8", "activations": "8bit"}
    made = recipe(source, rows, quantization=asked, allocation={"formats": ["int4-g32", "int8"]})
    assert made.quantization.candidates == [("int4-g32", "16bit"), ("int8", "8bit")]
    bundle = run(tmp_path, made)
    bundle.verify(signing.ensure_keypair()[1])
    assert {option.known for option in options_of(bundle).values()} == {"measured"}
    found = {(layer.format, layer.activations) for layer in bundle.passport.quantization.layers}
    assert found == {("int4-g32", "16bit"), ("int8", "8bit")}
    plain = run(tmp_path, recipe(source, rows, allocation={"formats": ["int4-g32", "int8"], "measure": "all"}), "plain")
    ours, theirs = options_of(bundle), options_of(plain)
    assert all(ours[key].kl > theirs[key].kl for key in ours if key[1] == "int8")
    assert all(ours[key].kl == theirs[key].kl for key in ours if key[1] == "int4-g32")


def test_4_bit_inputs_are_measured_with_the_largest_input_seen(tmp_path, source, rows):
    asked = {"format": "nvfp4", "activations": "4bit"}
    made = recipe(source, rows, quantization=asked, allocation={"formats": ["nvfp4", "none"]})
    bundle = run(tmp_path, made)
    bundle.verify(signing.ensure_keypair()[1])
    groups = bundle.passport.quantization.allocation.groups
    assert {group.options[group.chosen].format for group in groups} == {"nvfp4", "none"}
    assert {option.known for group in groups for option in group.options} == {"measured", "exact"}


def test_the_group_that_costs_most_gets_the_larger_format(tmp_path, rows):
    """One linear with outlying weights, which 4 bits in groups of 32 hold badly."""
    model = tiny.random_model("llama-tied")
    model.model.layers[1].self_attn.o_proj.weight.data[:, ::32] *= 40
    source = tmp_path / "source"
    model.to(torch.bfloat16).save_pretrained(source)
    tiny.tokenizer().save_pretrained(source)
    made = recipe(source, rows, allocation={"bits_per_weight": 5.0, "formats": ["int4-g32", "int8"]})
    bundle = run(tmp_path, made)
    found = {layer.name: layer.format for layer in bundle.passport.quantization.layers}
    assert found["model.layers.1.self_attn.o_proj"] == "int8"
    said = [d.what for d in bundle.passport.decisions]
    assert any(what.startswith("formats chosen by KL: ") and "groups at int8" in what for what in said)
    (why,) = [d.why for d in bundle.passport.decisions if d.what == "keeps model.layers.1.self_attn.o_proj at int8"]
    assert why.startswith("its KL at int4-g32 of ") and "(measured) costs" in why


def test_ignored_linears_are_not_decided_about_and_do_not_count(tmp_path, source, rows):
    made = recipe(source, rows, quantization={"ignore": ["*.down_proj"]}, allocation={})
    bundle = run(tmp_path, made)
    groups = bundle.passport.quantization.allocation.groups
    assert len(groups) == GROUPS - 2
    assert not any("down_proj" in name for group in groups for name in group.linears)


def test_guided_hessians_rotation_and_distillation_go_with_it(tmp_path, source, rows):
    made = recipe(
        source,
        rows,
        quantization={"guided": True},
        allocation={},
        transform={"rotation": "r1+r2", "smoothing": "awq"},
        distillation={"steps": 2, "rows": 2, "held_out": 2},
    )
    bundle = run(tmp_path, made)
    bundle.verify(signing.ensure_keypair()[1])
    assert bundle.passport.quantization.distillation is not None


def test_rounding_without_a_scale_search_still_measures_on_rows(tmp_path, source, rows):
    asked = {"method": "rtn", "scale_search": "none"}
    bundle = run(tmp_path, recipe(source, rows, quantization=asked, allocation={}))
    assert bundle.passport.quantization.calibration.rows == 6
    assert "no calibration" not in [decision.what for decision in bundle.passport.decisions]


# ------------------------------------------------------------------ resuming


class Stop(Exception):
    pass


def test_a_stopped_measurement_goes_on_at_its_block_and_gives_the_same_bytes(tmp_path, source, rows, monkeypatch):
    whole, made = run(tmp_path, recipe(source, rows, allocation={}), "whole"), recipe(source, rows, allocation={})
    rounded, seen = measuring.rounded, []

    def watched(layer, group, statistics, probe, prefix):
        seen.append((prefix, group.names[0]))
        if len(seen) == 11:  # in the second block: 4 groups of 2 formats are a block
            raise Stop
        return rounded(layer, group, statistics, probe, prefix)

    monkeypatch.setattr(measuring, "rounded", watched)
    with pytest.raises(Stop):
        run(tmp_path, made)
    assert (tmp_path / "work").exists()
    del seen[:]
    monkeypatch.setattr(measuring, "rounded", lambda *args: seen.append(args[-1]) or rounded(*args))
    bundle = run(tmp_path, made, resume=True)
    assert seen == ["model.layers.1."] * 8
    assert shards(bundle) == shards(whole)


def test_a_guided_and_distilled_job_that_stops_in_the_stage_and_after_it_gives_the_same_bytes(
    tmp_path, source, rows, monkeypatch
):
    made = recipe(source, rows, allocation={}, **WAYS["distilled"])
    whole, rounded, seen = run(tmp_path, made, "whole"), measuring.rounded, []

    def stopped(*args):
        seen.append(args)
        if len(seen) == 11:
            raise Stop
        return rounded(*args)

    def stop(*_):
        raise Stop

    for module, name, replacement in [(measuring, "rounded", stopped), (pipeline.stage, "distill", stop)]:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, replacement)
            with pytest.raises(Stop):
                run(tmp_path, made, resume=True)
    assert shards(run(tmp_path, made, resume=True)) == shards(whole)


def test_a_finished_allocation_is_not_measured_again(tmp_path, source, rows, monkeypatch):
    def stop(*_):
        raise Stop

    made = recipe(source, rows, allocation={})
    whole = run(tmp_path, made, "whole")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "quantize", stop)
        with pytest.raises(Stop):
            run(tmp_path, made)
    monkeypatch.setattr(stage, "measure", stop)
    assert shards(run(tmp_path, made, resume=True)) == shards(whole)


# ------------------------------------------------------------------ what is refused

BUDGETS = [
    (4.2, r"4\.2 is less than this model takes in int4-g32; set at least (4\.\d+), or add a smaller format to quant"),
    (16, r"16 holds every linear in its largest format, so that nothing is left to decide; set less than (16), or rem"),
]


@pytest.mark.parametrize(("bits", "said"), BUDGETS)
def test_a_budget_that_decides_nothing_is_refused_before_any_work(tmp_path, source, rows, bits, said):
    made = recipe(source, rows, allocation={"bits_per_weight": bits})
    for attempt in (lambda: run(tmp_path, made), lambda: plan.make(made)):
        with pytest.raises(UsageError, match=rf"^quantization\.allocation\.bits_per_weight: {said}") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "bundle").exists() and not (tmp_path / "work").exists()


def test_the_least_budget_that_the_refusal_names_is_reachable(tmp_path, source, rows):
    with pytest.raises(UsageError) as caught:
        plan.make(recipe(source, rows, allocation={"bits_per_weight": 4}))
    least = float(str(caught.value).split("set at least ")[1].split(",")[0])
    plan.make(recipe(source, rows, allocation={"bits_per_weight": least}))
    with pytest.raises(UsageError, match="is less than"):
        plan.make(recipe(source, rows, allocation={"bits_per_weight": least - 1e-3}))


def test_a_budget_of_exactly_the_least_bytes_gives_the_smallest_format_to_all(tmp_path, source, rows):
    """Bits a weight as the passport writes them: the quotient of two whole numbers, rounded to a float."""
    settings = recipe(source, rows, allocation={}).quantization
    for out in range(1, 400):
        shapes = [[(out, 64)], [(3, 128), (out, 128)]]
        least = sum(budget.sizes(group, settings, torch.bfloat16)[0] for group in shapes)
        count = sum(map(budget.weights, shapes))
        spec = settings.allocation.model_copy(update={"bits_per_weight": 8 * least / count})
        asked = settings.model_copy(update={"allocation": spec})
        assert budget.check(asked, shapes, torch.bfloat16) == least
        spec = settings.allocation.model_copy(update={"bits_per_weight": 8 * (least - 1) / count})
        with pytest.raises(UsageError, match="is less than"):
            budget.check(settings.model_copy(update={"allocation": spec}), shapes, torch.bfloat16)
    generous = run(tmp_path, recipe(source, rows, allocation={}), "generous").passport.quantization.allocation
    least = sum(group.options[0].bytes for group in generous.groups)
    bits = 8 * least / sum(group.weights for group in generous.groups)
    bundle = run(tmp_path, recipe(source, rows, allocation={"bits_per_weight": bits}))
    made = bundle.passport.quantization.allocation
    assert made.bytes == made.budget_bytes == least and {group.chosen for group in made.groups} == {0}
    assert shards(bundle) == shards(run(tmp_path, recipe(source, rows), "uniform"))


def test_formats_of_as_many_bits_leave_a_choice_that_needs_no_budget(tmp_path, source, rows):
    """Neither holds every group better than the other; were one of more bits, it would be refused as above."""
    asked = {"formats": ["int4-g32", "nvfp4"], "bits_per_weight": 6, "measure": "all"}
    made = run(tmp_path, recipe(source, rows, allocation=asked)).passport.quantization.allocation
    for group in made.groups:
        assert group.options[group.chosen].kl == min(option.kl for option in group.options)
    with pytest.raises(UsageError, match="nothing is left to decide"):
        plan.make(recipe(source, rows, allocation={"formats": ["int4-g32", "int8"], "bits_per_weight": 9}))


def test_a_candidate_that_does_not_divide_is_refused_before_any_work(tmp_path, source, rows):
    made = recipe(source, rows, allocation={"formats": ["int4-g32", "int4-g128"], "bits_per_weight": 4.6})
    for attempt in (lambda: run(tmp_path, made), lambda: plan.make(made)):
        with pytest.raises(CompressError, match="in_features 64 is not a multiple of int4-g128's group"):
            attempt()


def test_a_kl_that_is_not_finite_is_refused_by_name(tmp_path, source, rows, monkeypatch):
    monkeypatch.setattr(measuring, "kls", lambda a, b, wanted, several: [float("nan")] * len(several))
    with pytest.raises(
        CompressError, match=r"model\.layers\.0\.self_attn\.q_proj: the KL with its group rounded is not"
    ):
        run(tmp_path, recipe(source, rows, allocation={}))


def broken(passport, change):
    fields = copy.deepcopy(passport.model_dump(mode="json"))
    change(fields["quantization"]["allocation"])
    return Passport.make(**fields)


CHANGES = {
    "quantization.allocation of model.layers.0": lambda a: a["groups"][0].update(chosen=1 - a["groups"][0]["chosen"]),
    "quantization.allocation bytes of model.layers.0": lambda a: [o.update(bytes=9) for o in a["groups"][0]["options"]],
    "quantization.allocation.bytes: the passport says 9": lambda a: a.update(bytes=9),
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_passport_whose_choice_is_not_that_of_its_layers_is_found(tmp_path, source, rows, said):
    bundle = run(tmp_path, recipe(source, rows, allocation={"formats": ["int4-g32", "int8"], "bits_per_weight": 6}))
    digests = {path.name: sha256_file(path) for path in bundle.path.iterdir() if path.is_file()}
    assert differences(bundle.path, bundle.passport, digests) == []
    found = differences(bundle.path, broken(bundle.passport, CHANGES[said]), digests)
    assert any(line.startswith(said) for line in found), found


def test_a_choice_that_is_no_option_is_no_passport(tmp_path, source, rows):
    bundle = run(tmp_path, recipe(source, rows, allocation={}))
    with pytest.raises(CompressError, match="chosen is 3, there are 3 options"):
        broken(bundle.passport, lambda allocation: allocation["groups"][0].update(chosen=3))


def test_a_plan_tells_the_budget_and_the_stage(tmp_path, source, rows, monkeypatch):
    machine = plan_costs.Machine(1e11, 5e10, 1e10, 1e-4, 1e-7, 1e-7)
    monkeypatch.setattr(plan_costs, "measure_machine", lambda *_: machine)  # whose own varies from call to call
    made = plan.make(recipe(source, rows, allocation={}))
    assert [entry.name for entry in made.stages] == ["allocation", "quantize"]
    assert all(entry.seconds > 0 and entry.memory_bytes > 0 for entry in made.stages)
    assert made.format == "int4-g32 or int8 or none" and made.bits_per_weight == 7
    assert any("is found when it runs" in note for note in made.notes)
    bundle = run(tmp_path, recipe(source, rows, allocation={}))
    bytes_ = sum(path.stat().st_size for path in bundle.path.glob("model*.safetensors"))
    assert bundle.passport.ledger.bundle_bytes <= made.bundle_bytes < 1.1 * bytes_
    both = [plan.make(recipe(source, rows, allocation={"measure": measured})) for measured in ("cheapest", "all")]
    assert both[0].stages[0].seconds < both[1].stages[0].seconds
    json.dumps(made.to_dict())
