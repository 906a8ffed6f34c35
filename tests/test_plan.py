"""A plan tells what a recipe would do from headers alone, and refuses what the run would refuse."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from compressor import plan, plan_costs, plan_training
from compressor.errors import CompressError, UsageError
from compressor.plan_base import Job, Machine
from compressor.recipe import Recipe

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 64, 128, 2, 96
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
MACHINE = Machine(1e11, 5e10, 1e10, 1e-4, 1e-7, 1e-7)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(plan_costs, "measure_machine", lambda *_: MACHINE)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16)}
    for index in range(LAYERS):
        for name, shape in SHAPES.items():
            tensors[f"model.layers.{index}.{name}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return folder


def recipe(folder, **sections):
    return Recipe.from_dict({"name": "t", "source": {"uri": str(folder)}, **sections})


def listing(folder):
    return sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*"))


def test_a_plan_lists_every_class_of_linears_with_its_bytes(model):
    made = plan.make(recipe(model))
    assert {item.name: (item.count, item.out_features, item.in_features) for item in made.linears} == {
        name: (LAYERS, *shape) for name, shape in SHAPES.items()
    }
    gate = next(item for item in made.linears if item.name == "mlp.gate_proj")
    assert gate.bytes_before == LAYERS * 128 * 64 * 2
    assert gate.bytes_after == LAYERS * (128 * 64 // 2 + 128 * 2 + 16)  # codes, one bf16 scale a row, the shape
    assert made.source["basis"] == "headers"
    json.dumps(made.to_dict())


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("int4-g32-asym", "16bit"),
        ("nvfp4", "16bit"),
        ("nvfp4", "4bit"),
        ("mxfp4", "4bit"),
        ("int8", "16bit"),
        ("int8", "8bit"),
        ("fp8", "8bit"),
    ],
)
def test_the_planned_bytes_are_those_the_format_writes(model, name, activations):
    from compressor import formats

    fmt = formats.scheme(name, activations).fmt
    made = plan.make(recipe(model, quantization={"format": name, "activations": activations}))
    for item in made.linears:
        tensors = list(fmt.encode(torch.ones(item.out_features, item.in_features, dtype=torch.bfloat16)).values())
        if activations == "4bit" and (scale := fmt.input_global_scale(1.0)) is not None:
            tensors.append(scale)
        assert item.bytes_after == item.count * sum(tensor.nbytes for tensor in tensors)
    kept = VOCABULARY * HIDDEN * 2
    assert made.bundle_bytes == kept + sum(item.bytes_after for item in made.linears)


def test_a_plan_changes_nothing_on_disk(model):
    before = listing(model.parent)
    plan.make(recipe(model))
    assert listing(model.parent) == before


def test_ignored_linears_are_named_and_stay_as_they_are(model):
    whole = plan.make(recipe(model))
    made = plan.make(recipe(model, quantization={"ignore": ["*.down_proj"]}))
    assert made.ignored == [f"model.layers.{index}.mlp.down_proj" for index in range(LAYERS)]
    assert "mlp.down_proj" not in {item.name for item in made.linears}
    assert made.bundle_bytes > whole.bundle_bytes


def test_half_of_a_fused_matrix_cannot_be_ignored(model):
    with pytest.raises(UsageError, match=r"layers\.0\.self_attn\.k_proj is one part of the fused"):
        plan.make(recipe(model, quantization={"ignore": ["*.k_proj"]}))


def test_a_group_that_does_not_divide_is_refused_by_the_layers_name(model):
    with pytest.raises(CompressError, match=r"model\.layers\.0\.self_attn\.q_proj: in_features 64 .* group of 128"):
        plan.make(recipe(model, quantization={"format": "int4-g128"}))


def test_a_missing_tensor_is_refused_by_name(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(CompressError, match=r"tensor 'model\.layers\.2\.self_attn\.q_proj\.weight' is missing"):
        plan.make(recipe(model))


def test_a_quantized_source_and_an_unknown_architecture_are_refused(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(CompressError, match=r"already quantized \(gptq\)"):
        plan.make(recipe(model))
    (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(CompressError, match="model_type 'mamba' is not supported"):
        plan.make(recipe(model))


def test_a_source_that_is_not_here_is_said_so_and_not_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    uri = "pypi:some-package==1.0#model.gguf"
    made = plan.make(Recipe.from_dict({"name": "t", "source": {"uri": uri}}))
    assert made.source == {"uri": uri, "kind": "pypi", "local": False, "basis": None}
    assert made.linears == [] and made.bundle_bytes is None and made.seconds is None
    assert "not on this machine" in made.notes[0]
    assert made.bits_per_weight == 4.25 and made.calibration_tokens == 128 * 512
    assert not (tmp_path / "cache").exists()


def test_a_model_known_by_its_config_alone_gets_the_same_linears(model):
    from compressor.models import skeleton

    config, _ = skeleton.model_config(model)
    derived = plan._from_config(config, "bfloat16")
    stored = {name for name in plan.Inventory.read(model).tensors}
    assert stored <= set(derived.tensors)
    assert {name.rpartition(".")[0] for name in set(derived.tensors) - stored} >= {"model.norm"}
    assert not any("lm_head" in name for name in derived.tensors)


ROWS = ["calibration rows", "evaluation rows"]
QUANTIZING = ["baseline acceptance", "quantize", "quality", "quantized acceptance"]


def test_stages_follow_the_recipe(model):
    def names(**sections):
        return [stage.name for stage in plan.make(recipe(model, **sections)).stages]

    assert names() == [*ROWS, *QUANTIZING]
    bare = {"measure": {"quality": {"kind": "none"}}, "proposer": {"kind": "none"}}
    assert names(quantization={"method": "rtn", "scale_search": "none"}, **bare) == ["quantize"]
    assert names(quantization={"method": "rtn"}, **bare) == ["calibration rows", "quantize"]  # the search uses data
    assert names(**bare) == ["calibration rows", "quantize"]
    learned = names(quantization={"guided": True}, distillation={}, **bare)
    assert learned == ["calibration rows", "sensitivity", "quantize", "distill"]


def test_whole_hessians_are_planned_for_where_a_run_gathers_them(model):
    def quantize(**sections):
        return next(stage for stage in plan.make(recipe(model, **sections)).stages if stage.name == "quantize")

    rounded, searched = ({"method": "rtn", "scale_search": search} for search in ("none", "mse"))
    assert quantize().memory["Hessians"] > 0
    assert quantize(quantization=searched).memory["Hessians"] == 0
    smoothed = quantize(quantization=searched, transform={"smoothing": "awq"})
    assert smoothed.memory["Hessians"] > 0 and smoothed.seconds > quantize(quantization=searched).seconds
    assert quantize().seconds > quantize(quantization=searched).seconds > quantize(quantization=rounded).seconds


def eagle3(**sections):
    return {"kind": "eagle3", "training": {"answers": {"count": 100, "max_new_tokens": 10}}, **sections}


TRAINING = ["prompts and answers", "hidden states", "training"]
HEALING = [*(f"{name} (healing)" for name in TRAINING), "healed acceptance"]


@pytest.mark.parametrize(
    ("proposer", "training", "healing"),
    [
        ({"kind": "eagle3", "path": "/head"}, [], []),
        ({"kind": "eagle3", "path": "/head", "heal": {}}, [], HEALING),
        ({"kind": "draft", "training": {"layers": 1}}, TRAINING, []),
        ({"kind": "medusa", "training": {}}, TRAINING, []),
        (eagle3(heal={}), TRAINING, HEALING),
    ],
)
def test_training_and_healing_are_stages_where_the_recipe_asks_for_them(model, proposer, training, healing):
    made = plan.make(recipe(model, proposer=proposer))
    assert [stage.name for stage in made.stages] == [*ROWS, *training, *QUANTIZING, *healing]
    assert all(stage.seconds > 0 for stage in made.stages)


@pytest.mark.parametrize(
    ("proposer", "states"),
    [
        (eagle3(), 100 * (75 + 9) * 4 * HIDDEN * 2),
        (eagle3(training={"answers": {"count": 100, "max_new_tokens": 10}, "aux": [1]}), 100 * 84 * 2 * HIDDEN * 2),
        (eagle3(kind="medusa"), 100 * (75 + 9) * HIDDEN * 2),
        (eagle3(heal={"answers": {"count": 400, "max_new_tokens": 10}}), 400 * (75 + 9) * 4 * HIDDEN * 2),
        (eagle3(training={"answers": {"cache": "none"}}), 0),
    ],
)
def test_the_states_of_a_training_are_part_of_the_disk(model, proposer, states):
    without = plan.make(recipe(model)).disk_bytes
    assert plan.make(recipe(model, proposer=proposer)).disk_bytes == without + states


def test_time_of_a_training_follows_its_documents_and_its_steps(model):
    def seconds(count=100, steps=1000, cache="disk", kind="eagle3"):
        answers = {"count": count, "max_new_tokens": 10, "cache": cache, "held_out": 1}
        optimization = {"steps": steps, "rate": 1e-3, "evaluate_every": 1000}
        training = {"answers": answers, "optimization": optimization}
        made = plan.make(recipe(model, proposer={"kind": kind, "training": training}))
        return {stage.name: stage.seconds for stage in made.stages}

    few, many, longer, none = seconds(), seconds(count=400), seconds(steps=4000), seconds(cache="none")
    for name in TRAINING[:2]:
        assert many[name] == pytest.approx(4 * few[name])
    assert longer["training"] == pytest.approx(4 * few["training"], rel=1e-3)
    assert none["hidden states"] == pytest.approx(few["hidden states"] / 100)
    assert none["training"] > few["training"]


def test_the_speeds_of_a_training_are_those_that_were_measured():
    hidden, layers = 576, 30
    job = Job(
        recipe=recipe("x", proposer={"kind": "eagle3", "training": {"answers": {"self_written": 0.0}}}),
        groups=[],
        layers=layers,
        hidden=hidden,
        intermediate=1536,
        vocabulary=49152,
        kv_width=384,
        parameters=135_000_000,
        block_parameters=3_500_000,
        blocks_parameters=106_000_000,
        source_bytes=270_000_000,
        bundle_bytes=120_000_000,
        itemsize=2,
        calibration_tokens=0,
    )
    found = plan_costs.stages(job, replace(MACHINE, bf16_flops=plan_training.REFERENCE_FLOPS))
    seconds = {stage.name: stage.seconds for stage in found}
    assert seconds["prompts and answers"] == pytest.approx(12_000 * (0.9 * 128 / 700 + 75 / 2000))
    assert seconds["hidden states"] == pytest.approx(12_000 * (75 + 0.9 * 128) / 2000)
    assert seconds["training"] == pytest.approx(1500 * 2.2, rel=0.05)  # a head of 10 million weights


def test_more_rows_take_longer_and_activations_stop_at_their_budget(model):
    def quantize(rows, budget=4_000_000_000):
        made = plan.make(recipe(model, calibration={"rows": rows}, run={"activation_budget_bytes": budget}))
        return made, next(stage for stage in made.stages if stage.name == "quantize")

    few, many = quantize(8)[1], quantize(800)[1]
    assert many.seconds > few.seconds
    assert many.memory["calibration activations"] == 800 * 512 * HIDDEN * 2
    made, capped = quantize(800, budget=1000)
    assert capped.memory["calibration activations"] == 1000
    assert any("go to disk" in note for note in made.notes)
    assert made.peak_memory_bytes == max(stage.memory_bytes for stage in made.stages)


def test_a_slower_machine_takes_longer(model, monkeypatch):
    fast = plan.make(recipe(model)).seconds
    slow = replace(MACHINE, bf16_flops=1e9, float32_flops=1e9, column_seconds=1e-3)
    monkeypatch.setattr(plan_costs, "measure_machine", lambda *_: slow)
    assert plan.make(recipe(model)).seconds > 2 * fast


def test_the_machine_is_measured_quickly_and_its_threads_are_put_back(monkeypatch):
    monkeypatch.undo()
    from compressor import formats

    before = torch.get_num_threads()
    measured = plan_costs.measure_machine(formats.get("int4-g64"), "mse", threads=1)
    assert torch.get_num_threads() == before
    assert 1e8 < measured.float32_flops < 1e14 and 1e7 < measured.memory_bytes_per_second < 1e13
    assert 0 <= measured.column_seconds < 0.1 and 0 < measured.search_seconds_per_weight < 1e-3
