"""The main job on tiny models: every format and family ends in a bundle that engines load, or in one clear line."""

import json

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from compressor import blocks, pipeline
from compressor.bundle import signing
from compressor.decode import engine
from compressor.errors import CompressError, UsageError
from compressor.recipe import Recipe
from compressor.ui import NullUI

pytestmark = pytest.mark.usefixtures("keys")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("All happy pipelines are alike; each unhappy one fails in its own stage. " * 8)
    return path


def recipe(source, rows, text, *, quality=True, **quantization):
    measure = {"acceptance": {"prompts": 2, "max_new_tokens": 6}}
    measure["quality"] = {"kind": "text", "path": str(text), "rows": 2, "length": 32} if quality else {"kind": "none"}
    return Recipe.from_dict(
        {
            "name": "tiny",
            "source": {"uri": str(source)},
            "quantization": {"format": "int4-g32", **quantization},
            "calibration": {"kind": "tokens", "path": str(rows), "rows": 6, "length": 32, "batch_size": 4},
            "measure": measure,
        }
    )


def run(tmp_path, made, name="bundle", **options):
    return pipeline.run(made, out=tmp_path / name, work=tmp_path / f"{name}.work", ui=NullUI(), **options)


def transformers_logits(folder, ids, dtype=torch.float32):
    """Logits of the bundle in transformers, which must load it without missing or unexpected tensors."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    # the packed tensors replace `weight`; anything else missing or left over is an error
    assert not info["unexpected_keys"] and not info["missing_keys"], info
    return model.eval()(ids).logits.detach()


FORMATS = [
    ("int4-g32", "16bit"),
    ("int4-g64", "16bit"),
    ("int4-g32-asym", "16bit"),
    ("nvfp4", "16bit"),
    ("nvfp4", "4bit"),
    ("mxfp4", "16bit"),
    ("mxfp4", "4bit"),
]


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize(("fmt", "activations"), FORMATS)
def test_every_format_ends_in_a_verified_bundle(tmp_path, rows, text, fmt, activations, method):
    source = tiny.save(tmp_path / "source", "llama-tied")
    bundle = run(tmp_path, recipe(source, rows, text, format=fmt, activations=activations, method=method))
    bundle.verify(signing.ensure_keypair()[1])
    passport = bundle.passport
    assert {row.target for row in passport.outcomes.acceptance} == {"baseline", "quantized"}
    quality = passport.outcomes.quality[0]
    assert 0 < quality.kl_nats < 1.0
    assert len(passport.quantization.layers) == 14
    assert not (tmp_path / "bundle.work").exists()


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_every_family_loads_in_transformers_with_our_logits(tmp_path, rows, text, kind):
    source = tiny.save(tmp_path / "source", kind)
    bundle = run(tmp_path, recipe(source, rows, text, quality=False))
    ids = torch.arange(3, 27)[None]
    theirs = transformers_logits(bundle.path, ids)
    ours = engine.load(bundle.path, dtype=torch.float32, kernel="dequantized")(ids).logits
    assert (ours - theirs).norm() / theirs.norm() < 1e-4
    keys = set().union(*(load_file(f) for f in bundle.path.glob("*.safetensors")))
    config = json.loads((bundle.path / "config.json").read_text())
    if config.get("tie_word_embeddings"):
        assert "lm_head.weight" not in keys
    assert "lm_head" in config["quantization_config"]["ignore"]


@pytest.mark.parametrize(("fmt", "activations"), [case for case in FORMATS if "asym" not in case[0]])
def test_every_symmetric_format_loads_in_transformers_as_stored(tmp_path, rows, text, fmt, activations):
    source = tiny.save(tmp_path / "source", "llama-tied")
    bundle = run(tmp_path, recipe(source, rows, text, quality=False, format=fmt, activations=activations))
    ids = torch.arange(3, 27)[None]
    theirs = transformers_logits(bundle.path, ids, torch.bfloat16).float()
    ours = engine.load(bundle.path, kernel="dequantized")(ids).logits.float()
    assert (ours - theirs).norm() / theirs.norm() <= 2e-2
    if fmt.startswith("int4"):
        scales = [t for f in bundle.path.glob("*.safetensors") for k, t in load_file(f).items() if "weight_scale" in k]
        assert all(bool((scale < 0).any()) for scale in scales)
    plain = engine.load(source)(ids).logits.float()  # negative control: the unquantized model is further away
    assert (plain - theirs).norm() / theirs.norm() > 2e-2


@pytest.mark.parametrize("fmt", ["int4-g32", "int4-g32-asym", "nvfp4"])
def test_the_lines_of_the_model_card_load_the_bundle(tmp_path, rows, text, monkeypatch, fmt):
    source = tiny.save(tmp_path / "source", "llama-tied")
    bundle = run(tmp_path, recipe(source, rows, text, quality=False, format=fmt, method="rtn"))
    lines = (bundle.path / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert ("dequantize=True" in lines) == ("asym" in fmt)
    monkeypatch.chdir(bundle.path)
    names: dict = {}
    exec(lines, names)
    ids = torch.arange(3, 27)[None]
    theirs = names["model"](ids).logits.float()
    ours = engine.load(bundle.path, kernel="dequantized")(ids).logits.float()
    assert (ours - theirs).norm() / theirs.norm() <= 2e-2


@pytest.mark.parametrize(("fmt", "guided"), [("int4-g32", False), ("nvfp4", False), ("mxfp4", True)])
def test_rounding_gathers_diagonals_and_stores_what_whole_hessians_would_have_it_store(
    tmp_path, rows, text, monkeypatch, fmt, guided
):
    source = tiny.save(tmp_path / "source", "llama-tied")
    gathered, collect = [], blocks.collect

    def watched(*args, **kwargs):
        found = collect(*args, **kwargs)
        gathered.append({entry.hessian is not None for entry in found.values()})
        return found

    monkeypatch.setattr(blocks, "collect", watched)
    made = recipe(source, rows, text, quality=False, format=fmt, method="rtn", guided=guided)
    bundle = run(tmp_path, made, "diagonals")
    assert gathered == [{False}, {False}]
    monkeypatch.setattr(Recipe, "needs_hessians", True)
    whole = run(tmp_path, made, "whole")
    assert gathered[2:] == [{True}, {True}]
    stored, expected = (
        {k: v for f in b.path.glob("*.safetensors") for k, v in load_file(f).items()} for b in (bundle, whole)
    )
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[k], expected[k]) for k in stored)
    layers, others = bundle.passport.quantization.layers, whole.passport.quantization.layers
    assert all(row.error is None and 0 < row.diagonal_error < 0.1 for row in layers)
    assert all(row.diagonal_error is None and 0 < row.error < 0.1 for row in others)
    assert bundle.passport.quantization.error_name == "relative weighted error"
    assert whole.passport.quantization.error_name == "relative output error"


def test_gptq_is_closer_to_the_reference_than_rounding(tmp_path, rows, text, monkeypatch):
    monkeypatch.setattr(Recipe, "needs_hessians", True)  # so that rounding states the same error
    source = tiny.save(tmp_path / "source", num_hidden_layers=1)
    errors = {}
    for method in ("rtn", "gptq"):
        made = recipe(source, rows, text, quality=False, method=method, activations="4bit", format="nvfp4")
        layers = run(tmp_path, made, method).passport.quantization.layers
        errors[method] = [layer.error for layer in layers]
    assert sum(errors["gptq"]) < sum(errors["rtn"])


def test_ignored_linears_stay_as_they_were_and_are_named(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source")
    made = recipe(
        source, rows, text, quality=False, ignore=["model.layers.0.self_attn.[qkv]_proj", "*.1.mlp.down_proj"]
    )
    bundle = run(tmp_path, made)
    ignore = json.loads((bundle.path / "config.json").read_text())["quantization_config"]["ignore"]
    assert {
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.1.mlp.down_proj",
    } <= set(ignore)
    tensors = {k: v for f in bundle.path.glob("*.safetensors") for k, v in load_file(f).items()}
    original = {k: v for f in source.glob("*.safetensors") for k, v in load_file(f).items()}
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(tensors[name], original[name])
    transformers_logits(bundle.path, torch.arange(3, 20)[None])


def test_part_of_a_fused_matrix_cannot_be_ignored_alone(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source")
    with pytest.raises(UsageError, match=r"q_proj is one part of the fused self_attn\.qkv_proj"):
        run(tmp_path, recipe(source, rows, text, ignore=["*.q_proj"]))


def test_fused_parts_share_one_global_scale(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source")
    # without a search no scale is rounded to a power of two, so that those of different matrices differ
    made = recipe(source, rows, text, quality=False, format="nvfp4", method="rtn", scale_search="none")
    bundle = run(tmp_path, made)
    tensors = {k: v for f in bundle.path.glob("*.safetensors") for k, v in load_file(f).items()}
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    scale = {
        part: tensors[f"model.layers.0.{part}.weight_global_scale"].item()
        for part in (*attention, "mlp.up_proj", "mlp.gate_proj")
    }
    assert scale["self_attn.q_proj"] == scale["self_attn.k_proj"] == scale["self_attn.v_proj"]
    assert scale["mlp.up_proj"] == scale["mlp.gate_proj"]
    assert scale["self_attn.o_proj"] != scale["self_attn.q_proj"]


def test_a_group_that_does_not_divide_is_named_before_any_work(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source", intermediate_size=96)
    with pytest.raises(CompressError, match=r"model\.layers\.0\.mlp\.down_proj: in_features 96 .* group of 64"):
        run(tmp_path, recipe(source, rows, text, format="int4-g64"))
    assert not (tmp_path / "bundle").exists()


def test_nan_in_a_weight_is_named_and_nothing_is_left(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source", shard="1GB")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompressError, match=r"model\.safetensors.*model\.layers\.1\.mlp\.up_proj\.weight"):
        run(tmp_path, recipe(source, rows, text))
    assert not (tmp_path / "bundle").exists() and not list(tmp_path.glob(".*partial"))


def test_an_already_quantized_source_is_refused(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source")
    first = run(tmp_path, recipe(source, rows, text, quality=False, method="rtn"))
    with pytest.raises(CompressError, match="already quantized"):
        run(tmp_path, recipe(first.path, rows, text), "second")


def test_an_existing_bundle_is_not_overwritten(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source")
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle/precious").write_text("x")
    with pytest.raises(UsageError, match="exists already"):
        run(tmp_path, recipe(source, rows, text))


def test_a_duplicate_of_the_tied_table_is_dropped_and_said_so(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source", "llama-tied", shard="1GB")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    bundle = run(tmp_path, recipe(source, rows, text, quality=False, method="rtn"))
    assert any("lm_head.weight" in d.what for d in bundle.passport.decisions)
    tensors["lm_head.weight"] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompressError, match=r"lm_head\.weight' differs from"):
        run(tmp_path, recipe(source, rows, text, method="rtn"), "second")


def test_mtp_tensors_survive_and_are_not_claimed_quantized(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source", shard="1GB")
    tensors = load_file(source / "model.safetensors")
    extra = {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.norm.weight": torch.ones(64).bfloat16()}
    save_file(tensors | extra, source / "model.safetensors", metadata={"format": "pt"})
    bundle = run(tmp_path, recipe(source, rows, text, quality=False, method="rtn"))
    saved = {k: v for f in bundle.path.glob("*.safetensors") for k, v in load_file(f).items()}
    assert all(torch.equal(saved[k], v) for k, v in extra.items())
    assert "mtp.fc" in bundle.passport.quantization.ignored


def test_spilled_activations_give_the_same_weights(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source")
    hashes = []
    for name, budget in (("memory", 1 << 30), ("disk", 0)):
        made = recipe(source, rows, text, quality=False).to_dict()
        made["run"]["activation_budget_bytes"] = budget
        hashes.append(run(tmp_path, Recipe.from_dict(made), name).passport.ledger.files)
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize(
    "change",
    [{"num_attention_heads": 3}, {"hidden_size": "abc"}, {"num_attention_heads": 0}, {"hidden_act": "foo"}],
)
def test_a_config_transformers_cannot_use_is_one_clear_line(tmp_path, rows, text, change):
    source = tiny.save(tmp_path / "source")
    tiny.edit_config(source, **change)
    with pytest.raises(CompressError, match=r"config\.json"):
        run(tmp_path, recipe(source, rows, text))
    assert not (tmp_path / "bundle").exists() and not (tmp_path / "bundle.work").exists()


def test_a_broken_chat_template_or_tokenizer_is_one_clear_line(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source")
    (source / "chat_template.jinja").write_text("{% for m in %}")
    with pytest.raises(CompressError, match="chat template cannot be used"):
        run(tmp_path, recipe(source, rows, text))
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(CompressError, match="no usable tokenizer"):
        run(tmp_path, recipe(source, rows, text))


def test_an_output_place_that_cannot_be_written_is_found_before_the_work(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="cannot be written"):
        run(tmp_path, recipe(source, rows, text), "file/bundle")


def test_a_tensor_the_model_class_lacks_is_not_dropped_silently(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source", shard="1GB")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.sinks"] = torch.ones(4).bfloat16()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    made = recipe(source, rows, text, quality=False).to_dict()
    made["proposer"]["kind"] = "none"
    with pytest.raises(CompressError, match=r"self_attn\.sinks' is not part of a llama"):
        run(tmp_path, Recipe.from_dict(made))


@pytest.mark.parametrize("rule", ["exact", "typical"])
def test_a_draft_model_is_measured_against_both_targets_and_a_lossy_rule_is_marked(tmp_path, rows, text, rule):
    """The source as its own draft agrees with the baseline wholly, and with the quantized target less."""
    source = tiny.save(tmp_path / "source", "llama-tied")
    made = recipe(source, rows, text, quality=False).to_dict()
    made["proposer"] |= {"kind": "draft", "path": str(source), "rule": rule, "branching": [2, 1]}
    made["proposer"]["num_speculative_tokens"] = 2
    made["measure"]["acceptance"] |= {"prompts": 4, "max_new_tokens": 24}
    passport = run(tmp_path, Recipe.from_dict(made)).passport
    baseline, quantized = sorted(passport.outcomes.acceptance, key=lambda row: row.target)
    assert baseline.proposed > 0 and quantized.tau < baseline.tau <= 3
    assert (baseline.accepted == baseline.proposed) or rule == "typical"
    assert passport.verifier.lossy == (rule == "typical") == passport.verifier.rule.startswith("LOSSY")
    assert passport.proposer.kind == "draft" and passport.proposer.settings["branching"] == [2, 1]


def test_a_proposer_that_is_not_there_is_refused_before_any_work(tmp_path, rows, text):
    source = tiny.save(tmp_path / "source", "llama-tied")
    made = recipe(source, rows, text, quality=False).to_dict()
    made["proposer"] |= {"kind": "medusa", "path": str(tmp_path / "nowhere")}
    with pytest.raises(UsageError, match=r"proposer medusa: .*nowhere holds no config\.json"):
        run(tmp_path, Recipe.from_dict(made))
    assert not (tmp_path / "bundle").exists()
