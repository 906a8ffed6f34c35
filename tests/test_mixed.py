"""Bundles of 8-bit linears, and of several formats at once, run alike here and in transformers."""

import json
import re
import shutil

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compressor import formats, inspection, pipeline, plan
from compressor.bundle import signing
from compressor.bundle.verify import verify
from compressor.checkpoint.weights import Weights
from compressor.decode import engine
from compressor.errors import CompressError, UsageError
from compressor.formats.config import find_target, target_names
from compressor.kernels.linear import PackedLinear
from compressor.models.skeleton import model_config
from compressor.models.stream import BlockStream
from compressor.recipe import Recipe
from compressor.ui import NullUI

pytestmark = pytest.mark.usefixtures("keys")

IDS = torch.arange(3, 27)[None]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
"""Shapes whose fused parts end where blocks of 128 rows do."""
OVERRIDES = [
    {"targets": ["*.self_attn.*"], "format": "fp8", "activations": "8bit"},
    {"targets": ["*.mlp.down_proj"], "format": "int8"},
    {"targets": ["model.layers.0.self_attn.[qkv]_proj"], "format": "int4-g32"},
    {"targets": ["model.layers.0.self_attn.o_proj"], "format": "none"},
]
STORED = {
    "model.layers.0.self_attn.q_proj": ("int4-g32", "16bit"),
    "model.layers.0.mlp.down_proj": ("int8", "16bit"),
    "model.layers.1.self_attn.q_proj": ("fp8", "8bit"),
    "model.layers.1.self_attn.o_proj": ("fp8", "8bit"),
    "model.layers.1.mlp.up_proj": ("int4-g32", "16bit"),
}
"""What `OVERRIDES` make of some linears beside int4-g32: the last entry that names one counts."""


def recipe(source, rows, **quantization):
    return Recipe.from_dict(
        {
            "name": "tiny",
            "source": {"uri": str(source)},
            "quantization": quantization,
            "calibration": {"kind": "tokens", "path": str(rows), "rows": 6, "length": 32, "batch_size": 6},
            "proposer": {"kind": "none"},
            "measure": {"quality": {"kind": "none"}},
        }
    )


def run(tmp_path, made):
    return pipeline.run(made, out=tmp_path / "bundle", work=tmp_path / "work", ui=NullUI())


@torch.inference_mode()
def logits(model):
    return model(IDS).logits.float()


def of_transformers(folder, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"], info
    return logits(model.eval())


def distance(a, b):
    return float((a - b).norm() / b.norm())


@torch.inference_mode()
def of_the_stream(folder):
    """Logits as the quality measurement computes them, block by block."""
    stream = BlockStream(Weights(folder), model_config(folder)[0], torch.float32)
    hidden = stream.embed(IDS)
    for index in range(len(stream)):
        with stream.block(index) as layer:
            hidden = stream.run(index, layer, hidden)
    with stream.head() as head:
        return head(hidden)


CASES = [
    ("int8", "16bit", "gptq"),
    ("int8", "8bit", "gptq"),
    ("fp8", "16bit", "rtn"),
    ("fp8", "8bit", "gptq"),
    ("fp8-block128", "16bit", "gptq"),
    ("fp8-block128", "8bit", "rtn"),
]


@pytest.mark.parametrize(("fmt", "activations", "method"), CASES)
def test_an_8_bit_bundle_gives_the_same_logits_here_and_in_transformers(tmp_path, rows, fmt, activations, method):
    source = tiny.save(tmp_path / "source", "llama-tied", **WIDE)
    bundle = run(tmp_path, recipe(source, rows, format=fmt, activations=activations, method=method))
    bundle.verify(signing.ensure_keypair()[1])
    assert {(row.format, row.activations) for row in bundle.passport.quantization.layers} == {(fmt, activations)}
    theirs = of_transformers(bundle.path, torch.float32)
    ours = logits(engine.load(bundle.path, dtype=torch.float32))
    assert distance(ours, theirs) < 1e-6
    assert distance(of_the_stream(bundle.path), theirs) < 1e-5
    plain = distance(logits(engine.load(source, dtype=torch.float32)), theirs)
    assert 1e-4 < plain < 0.2  # negative control, and 8 bits change little
    ours, theirs = logits(engine.load(bundle.path, kernel="dequantized")), of_transformers(bundle.path, torch.bfloat16)
    assert distance(ours, theirs) < 1e-6


def test_rounded_inputs_change_the_logits(tmp_path, rows):
    """Negative control: that transformers and this project agree is not because neither rounds."""
    source = tiny.save(tmp_path / "source", "llama-tied")
    bundle = run(tmp_path, recipe(source, rows, format="fp8", activations="8bit", method="rtn"))
    both = logits(engine.load(bundle.path, dtype=torch.float32))
    path = bundle.path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    path.write_text(json.dumps(config))
    assert distance(logits(engine.load(bundle.path, dtype=torch.float32)), both) > 1e-3


@pytest.fixture
def mixed(tmp_path, rows):
    source = tiny.save(tmp_path / "source", "qwen2")
    return run(tmp_path, recipe(source, rows, format="int4-g32", overrides=OVERRIDES))


def test_a_mixed_bundle_is_what_its_passport_says_and_runs_alike_everywhere(mixed):
    mixed.verify(signing.ensure_keypair()[1])
    quantization = mixed.passport.quantization
    found = {row.name: (row.format, row.activations) for row in quantization.layers}
    assert {name: found[name] for name in STORED} == STORED and len(found) == 13
    assert quantization.formats == "int4-g32 + int8 + fp8"
    assert quantization.compression_format == "mixed-precision" and 4.5 < quantization.bits_per_weight < 8
    assert "model.layers.0.self_attn.o_proj" in quantization.ignored
    assert "int4-g32 + int8 + fp8" in (mixed.path / "README.md").read_text()
    theirs = of_transformers(mixed.path, torch.float32)
    model = engine.load(mixed.path, dtype=torch.float32)
    assert distance(logits(model), theirs) < 1e-6
    assert distance(of_the_stream(mixed.path), theirs) < 1e-5
    paths = {name: layer.path for name, layer in engine.load(mixed.path).named_modules() if hasattr(layer, "path")}
    assert all(
        paths[name] == {"int4-g32": "cpu-int4", "int8": "cpu-int8"}.get(STORED[name][0], "dequantized")
        for name in STORED
    )
    assert distance(logits(engine.load(mixed.path)), theirs) < 5e-2
    assert isinstance(model.get_submodule("model.layers.0.self_attn.o_proj"), torch.nn.Linear)
    assert isinstance(model.get_submodule("model.layers.1.self_attn.o_proj"), PackedLinear)


def test_the_targets_match_the_names_of_the_checkpoint_and_of_engines(mixed):
    section = json.loads((mixed.path / "config.json").read_text())["quantization_config"]
    targets = target_names(section["config_groups"])
    for name, (fmt, _) in STORED.items():
        stored = formats.get(fmt).weights_config()
        fused = re.sub("[qkv]_proj$", "qkv_proj", re.sub("(gate|up)_proj$", "gate_up_proj", name))
        for known in {name, fused}:
            assert find_target(known, targets)["weights"] == stored
    assert [*section["config_groups"]["group_0"]["targets"]] == ["Linear"]
    patterns = [target for target in targets if target.startswith("re:")]
    assert all(not re.match(target[3:], "model.layers.11.self_attn.qkv_proj") for target in patterns)
    assert all(not re.match(target[3:], "model.layers.1.self_attn.q_proj_extra") for target in patterns)


def test_inspection_tells_every_format_and_the_mean_of_bits(mixed):
    found = inspection.inspect(mixed.path)
    assert found["format"]["name"] == "int4-g32 + int8 + fp8" and found["format"]["activations"] == "16bit + 8bit"
    assert found["format"]["bits_per_weight"] == pytest.approx(mixed.passport.quantization.bits_per_weight)
    assert found["parameters"] == mixed.passport.source.parameters


def test_a_layer_stored_otherwise_than_the_config_says_is_found(mixed, tmp_path):
    private, public = signing.ensure_keypair()
    folder = shutil.copytree(mixed.path, tmp_path / "copy")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    name = next(name for name, group in groups.items() if group["format"] == "float-quantized")
    groups[name]["targets"] = groups[name]["targets"][:-1]
    path.write_text(json.dumps(config))
    signing.sign(folder, private)
    with pytest.raises(
        CompressError, match=r"format fp8 and 8bit inputs, but config\.json says format int4-g32 and 16bit"
    ):
        verify(folder, public)
    with pytest.raises(CompressError, match="weight_packed is missing"):
        engine.load(folder)


def test_a_plan_counts_the_bytes_of_every_format(tmp_path, rows, mixed):
    made = plan.make(recipe(tmp_path / "source", rows, format="int4-g32", overrides=OVERRIDES))
    assert made.bits_per_weight == mixed.passport.quantization.bits_per_weight
    planned = sum(item.bytes_after for item in made.linears)
    assert planned == sum(row.packed_bytes for row in mixed.passport.quantization.layers)
    assert {(item.name, item.format) for item in made.linears} >= {
        ("mlp.down_proj", "int8"),
        ("self_attn.q_proj", "int4-g32"),
        ("self_attn.q_proj", "fp8"),
    }


def test_4_bit_inputs_of_one_format_are_calibrated_beside_another(tmp_path, rows):
    source = tiny.save(tmp_path / "source", "llama-tied")
    overrides = [{"targets": ["*.down_proj"], "format": "nvfp4", "activations": "4bit"}]
    made = recipe(source, rows, format="fp8", method="rtn", scale_search="none", overrides=overrides)
    bundle = run(tmp_path, made)
    bundle.verify(signing.ensure_keypair()[1])
    tensors = {k: v for f in bundle.path.glob("*.safetensors") for k, v in load_file(f).items()}
    found = sorted(name for name in tensors if name.endswith("input_global_scale"))
    assert found == [f"model.layers.{index}.mlp.down_proj.input_global_scale" for index in range(2)]
    assert all(tensors[name].isfinite().all() for name in found)


REFUSED = [
    (
        [{"targets": ["*.q_proj"], "format": "int8"}],
        r"model\.layers\.0\.self_attn\.qkv_proj is one matrix to engines, and its parts differ \(self_attn\.q_proj int",
    ),
    ([{"targets": ["*.up_proj"], "format": "none"}], r"mlp\.gate_up_proj is one matrix .* mlp\.up_proj none"),
    ([{"targets": ["*.up"], "format": "int8"}], r"\[0\]\.targets: '\*\.up' matches no linear .* nearest is 'model\."),
    ([{"targets": ["lm_head"], "format": "int8"}], r"\[0\]\.targets: 'lm_head' matches no linear"),
    (
        [{"targets": ["*.down_proj"], "format": "int8"}, {"targets": ["*.mlp.*"], "format": "fp8"}],
        r"\[0\]\.targets: \['\*\.down_proj'\] decides no linear: ignore or later entries name them all",
    ),
    ([{"targets": ["*"], "format": "int8"}], "no linear is left in int4-g32 with 16bit activations"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_overrides_that_no_engine_could_load_are_refused_before_any_work(tmp_path, rows, overrides, said):
    source = tiny.save(tmp_path / "source", "llama-tied")
    made = recipe(source, rows, format="int4-g32", overrides=overrides)
    for attempt in (lambda: run(tmp_path, made), lambda: plan.make(made)):
        with pytest.raises(UsageError, match=rf"quantization\.overrides.*{said}") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "bundle").exists() and not (tmp_path / "work").exists()


def test_blocks_that_reach_into_the_next_fused_part_are_refused_before_any_work(tmp_path, rows):
    source = tiny.save(tmp_path / "source", "llama-tied", hidden_size=128, intermediate_size=192)
    made = recipe(source, rows, format="fp8-block128")
    for attempt in (lambda: run(tmp_path, made), lambda: plan.make(made)):
        with pytest.raises(CompressError, match=r"layers\.0\.self_attn\.qkv_proj: out_features 128, 64, 64"):
            attempt()
    tiny.save(source, "llama-tied", **WIDE | {"intermediate_size": 192})
    with pytest.raises(CompressError, match=r"layers\.0\.mlp\.gate_up_proj: out_features 192, 192"):
        plan.make(recipe(source, rows, format="fp8-block128"))


def test_gptq_leaves_less_output_error_than_rounding_in_8_bits(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(Recipe, "needs_hessians", True)  # so that rounding states the same error
    source, errors = tiny.save(tmp_path / "source", num_hidden_layers=1), {}
    for method in ("rtn", "gptq"):
        made = recipe(source, rows, format="int8", activations="8bit", method=method)
        bundle = pipeline.run(made, out=tmp_path / method, work=tmp_path / "work", ui=NullUI())
        errors[method] = sum(layer.error for layer in bundle.passport.quantization.layers)
    assert errors["gptq"] < 0.9 * errors["rtn"]
