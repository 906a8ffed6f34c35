"""Jobs that rotate and smooth: the bundle loads, says what was done, resumes to the same bytes, or stops before it
rounds anything."""

import json

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import random_head
from transformers import AutoModelForCausalLM

from compressor import blocks, pipeline, transform_stage
from compressor.blocks import InputStatistics
from compressor.bundle import signing
from compressor.decode import engine
from compressor.decode.decoder import Decoder
from compressor.errors import CompressError, UsageError
from compressor.recipe import Recipe
from compressor.train import export, overlap, precision
from compressor.transform import rotate
from compressor.ui import NullUI

pytestmark = pytest.mark.usefixtures("keys")


@pytest.fixture
def run(tmp_path):
    tiny.save_rows(tmp_path)
    (tmp_path / "text.txt").write_text("All happy rotations are alike; each wrong one is wrong in its own way. " * 8)

    def run(source, name="bundle", *, quality=True, proposer=None, resume=False, transform=None, **quantization):
        measured = {"kind": "text", "path": str(tmp_path / "text.txt"), "rows": 2, "length": 32}
        made = {
            "name": "tiny",
            "source": {"uri": str(source)},
            "transform": transform or {},
            "quantization": {"format": "int4-g32", **quantization},
            "calibration": {"kind": "tokens", "path": str(tmp_path / "rows.safetensors"), "rows": 6, "length": 32},
            "proposer": proposer or {"kind": "none"},
            "measure": {
                "quality": measured if quality else {"kind": "none"},
                "acceptance": {"prompts": 1, "max_new_tokens": 4},
            },
        }
        recipe = Recipe.from_dict(made)
        return pipeline.run(recipe, out=tmp_path / name, work=tmp_path / f"{name}.work", ui=NullUI(), resume=resume)

    return run


def saved(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def agrees_with_transformers(bundle, dtype=torch.float32, within=1e-4):
    model, info = AutoModelForCausalLM.from_pretrained(bundle.path, dtype=dtype, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"], info
    ids = torch.arange(3, 27)[None]
    theirs = model.eval()(ids).logits.float()
    ours = engine.load(bundle.path, dtype=dtype, kernel="dequantized")(ids).logits.float()
    assert (ours - theirs).norm() / theirs.norm() <= within


def decision(bundle, beginning):
    (found,) = [d for d in bundle.passport.decisions if d.what.startswith(beginning)]
    return found


def test_a_tied_model_rotated_and_smoothed_is_untied_told_and_resumes_to_the_same_bytes(tmp_path, run, monkeypatch):
    source = tiny.save(tmp_path / "source", "llama-tied")
    options = {"transform": {"rotation": "r1+r2", "smoothing": "awq"}}
    bundle = run(source, "whole", **options)
    bundle.verify(signing.ensure_keypair()[1])
    assert 0 < bundle.passport.outcomes.quality[0].kl_nats < 1.0
    agrees_with_transformers(bundle)
    tensors, config = saved(bundle.path), json.loads((bundle.path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert not torch.equal(tensors["model.embed_tokens.weight"], saved(source)["model.embed_tokens.weight"])
    told = decision(
        bundle, "transformed: norm folding, R1 (random signs × Sylvester 64), R2 (random signs × Sylvester 16"
    )
    assert "logits differ by at most" in told.why and "float32" in told.why
    assert f"{320 * 64 * 2} bytes more" in decision(bundle, "lm_head.weight written beside the embedding").what
    assert "groups of linears scaled" in decision(bundle, "awq: ").what

    done = []
    quantize = blocks.quantize

    def killed(*args):
        done.append(args[1])
        if len(done) == 2:
            raise KeyboardInterrupt
        return quantize(*args)

    monkeypatch.setattr(blocks, "quantize", killed)
    with pytest.raises(KeyboardInterrupt):
        run(source, "killed", **options)
    monkeypatch.setattr(transform_stage.check, "check", None)  # the proof is not repeated
    assert run(source, "killed", resume=True, **options).passport.ledger.files == bundle.passport.ledger.files
    assert done == [f"model.layers.{i}." for i in (0, 1, 1)]


@pytest.mark.parametrize(
    ("kind", "smoothing", "quantization"),
    [
        ("phi3", "awq", {"method": "rtn"}),
        ("gemma3", "smoothquant", {"format": "nvfp4", "activations": "4bit"}),
        ("qwen2", "smoothquant", {"format": "mxfp4"}),
    ],
)
def test_smoothed_families_load_in_transformers(tmp_path, run, kind, smoothing, quantization):
    source = tiny.save(tmp_path / "source", kind)
    bundle = run(source, transform={"smoothing": smoothing, "rotation": "r2", "alpha": 0.5}, **quantization)
    assert 0 < bundle.passport.outcomes.quality[0].kl_nats < 2.0
    assert "8 of 8 groups of linears scaled" in decision(bundle, smoothing).what
    assert json.loads((bundle.path / "config.json").read_text()).get("tie_word_embeddings") == json.loads(
        (source / "config.json").read_text()
    ).get("tie_word_embeddings")
    agrees_with_transformers(bundle, torch.bfloat16, 2e-2)  # transformers loads NVFP4 and MXFP4 as they are stored


def test_awq_leaves_less_error_over_the_layers(tmp_path, run, monkeypatch):
    monkeypatch.setattr(Recipe, "needs_hessians", True)  # without AWQ rounding would state another error
    source = tiny.save(tmp_path / "source", num_hidden_layers=1)
    errors = {}
    for smoothing in ("none", "awq"):
        made = {"smoothing": smoothing}
        bundle = run(source, smoothing, quality=False, transform=made, method="rtn")
        errors[smoothing] = sum(layer.error for layer in bundle.passport.quantization.layers)
    assert errors["awq"] < errors["none"]


def test_statistics_of_scaled_inputs_are_those_of_the_inputs_scaled():
    x = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    s = torch.linspace(0.5, 4, 8)
    found = [InputStatistics(torch.zeros(8, 8), 0.0, mean=torch.zeros(8), largest=torch.zeros(8)) for _ in range(2)]
    found[0].add(x)
    found[1].add(x / s)
    for entry in found:
        entry.finish("input")
    found[0].divide(s)
    for name in ("hessian", "mean", "largest", "amax"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), atol=1e-4, rtol=1e-5)


def test_a_wrong_fold_stops_the_job_before_anything_is_rounded(tmp_path, run, monkeypatch):
    source = tiny.save(tmp_path / "source")
    monkeypatch.setattr(rotate, "left", lambda q, tensor: q.inverse(tensor.mT).mT if tensor.dim() == 2 else tensor)
    with pytest.raises(CompressError, match=r"transform norm folding \+ R1 changes the model: logits differ by"):
        run(source, transform={"rotation": "r1"})
    assert not (tmp_path / "bundle").exists()
    assert not list((tmp_path / "bundle.work").glob("block-*"))


def test_what_r1_cannot_be_folded_into_is_refused_before_any_work(tmp_path, run):
    gemma = tiny.save(tmp_path / "gemma", "gemma3")
    with pytest.raises(UsageError, match=r"transform\.rotation: R1 cannot be folded into gemma3_text"):
        run(gemma, transform={"rotation": "r1"})
    source = tiny.save(tmp_path / "source", shard="1GB")
    extra = {"mtp.fc.weight": torch.randn(64, 128).bfloat16()}
    save_file(saved(source) | extra, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"R1 would leave the MTP modules \(mtp\) reading an unrotated stream; use r2"):
        run(source, transform={"rotation": "r1+r2"})
    assert not (tmp_path / "bundle.work").exists()


def test_a_head_that_cannot_be_turned_is_refused_before_any_work(tmp_path, run):
    source = tiny.save(tmp_path / "source", num_hidden_layers=4)
    export.write(random_head(Decoder(engine.load(source))), tmp_path / "head")
    precision.lower(tmp_path / "head", tmp_path / "low", "int8")
    proposer = {"kind": "eagle3", "path": str(tmp_path / "low")}
    with pytest.raises(UsageError, match="its weights are in int8; rotate the head that it was made from"):
        run(source, proposer=proposer, transform={"rotation": "r1"})
    assert not (tmp_path / "bundle.work").exists()


def test_an_eagle3_head_follows_the_rotated_stream(tmp_path, run, monkeypatch):
    monkeypatch.setattr(overlap, "TOKENS", 16)
    source = tiny.save(tmp_path / "source", num_hidden_layers=4)
    export.write(random_head(Decoder(engine.load(source))), tmp_path / "head")
    proposer = {"kind": "eagle3", "path": str(tmp_path / "head"), "num_speculative_tokens": 2}
    bundle = run(source, quality=False, proposer=proposer, transform={"rotation": "r1"}, method="rtn")
    before, after = load_file(tmp_path / "head/model.safetensors"), saved(bundle.path / "proposer")
    q = rotate.r1_rotation(engine.load(source).config, 0)
    expected = q.right(before["fc.weight"].float()).bfloat16()
    torch.testing.assert_close(after["fc.weight"].bfloat16(), expected, atol=0.02, rtol=0.02)
    assert not torch.allclose(before["fc.weight"].float(), after["fc.weight"].float(), atol=0.05)
    assert {row.target for row in bundle.passport.outcomes.acceptance} == {"baseline", "quantized"}
