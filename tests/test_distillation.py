"""Jobs that weigh tokens and distil: closer to the original, resumable to the same bytes, kept only where it helps."""

import json

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from compressor import pipeline, sensitivity
from compressor.decode import engine
from compressor.distill import loop, stage
from compressor.errors import CompressError
from compressor.recipe import Recipe
from compressor.ui import NullUI

SHORT = {"steps": 12, "rows": 8, "held_out": 8, "save_every": 5, "scale_rate": 0.002, "other_rate": 0.001}


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A function that runs a job on a tiny model whose weights are large enough for its answers to differ."""
    monkeypatch.setenv("COMPRESS_KEYS", str(tmp_path / "keys"))
    source = tiny.save(tmp_path / "source", "llama-tied", initializer_range=0.15)
    ids = torch.randint(3, tiny.VOCABULARY, (40, 32), generator=torch.Generator().manual_seed(3))
    save_file({"ids": ids}, tmp_path / "rows.safetensors")

    def run(name="bundle", *, distillation=None, resume=False, transform=None, **quantization):
        recipe = Recipe.from_dict(
            {
                "name": "tiny",
                "transform": transform or {},
                "source": {"uri": str(source), "dtype": "float32"},
                "quantization": {"format": "int4-g32", **quantization},
                "calibration": {"kind": "tokens", "path": str(tmp_path / "rows.safetensors"), "rows": 40, "length": 32},
                "distillation": distillation,
                "proposer": {"kind": "none"},
                "measure": {"quality": {"kind": "none"}},
            }
        )
        return pipeline.run(recipe, out=tmp_path / name, work=tmp_path / f"{name}.work", ui=NullUI(), resume=resume)

    return run


def weights(bundle) -> dict[str, str]:
    return {name: digest for name, digest in bundle.passport.ledger.files.items() if name.endswith(".safetensors")}


@pytest.mark.parametrize("fmt", [{"format": "nvfp4", "activations": "4bit"}, {"format": "mxfp4"}, {"format": "fp8"}])
def test_every_kind_of_format_is_distilled_and_kept_only_where_it_helps(job, fmt):
    plain, distilled = job("plain", **fmt), job("distilled", distillation=SHORT, **fmt)
    record = distilled.passport.quantization.distillation
    assert len(record.losses) == SHORT["steps"]
    assert record.after != record.before
    assert (weights(plain) == weights(distilled)) == (record.after > record.before)


def test_scales_that_nobody_searched_are_found(job):
    record = job(distillation={**SHORT, "steps": 40}, scale_search="none").passport.quantization.distillation
    assert record.kept
    assert record.after < 0.97 * record.before


def test_a_distilled_bundle_loads_in_transformers_with_the_same_logits(job):
    bundle = job(distillation=SHORT)
    assert bundle.passport.quantization.distillation.kept
    ids = torch.arange(3, 27)[None]
    theirs = AutoModelForCausalLM.from_pretrained(bundle.path, dtype=torch.float32).eval()(ids).logits
    ours = engine.load(bundle.path, dtype=torch.float32, kernel="dequantized")(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_a_killed_distillation_resumes_to_the_same_bytes(job, monkeypatch):
    whole = job("whole", distillation=SHORT)
    kept = loop.Distiller.step
    seen = []

    def dies(self, rows, rates):
        seen.append(rows)
        if len(seen) == 8:
            raise KeyboardInterrupt
        return kept(self, rows, rates)

    monkeypatch.setattr(loop.Distiller, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        job("killed", distillation=SHORT)
    monkeypatch.setattr(loop.Distiller, "step", lambda self, rows, rates: seen.append(rows) or kept(self, rows, rates))
    before = len(seen)
    resumed = job("killed", distillation=SHORT, resume=True)
    assert len(seen) - before == SHORT["steps"] - 5  # from the checkpoint of step 5
    assert weights(resumed) == weights(whole)
    assert resumed.passport.quantization.distillation.losses == whole.passport.quantization.distillation.losses


def test_a_distillation_that_makes_it_worse_is_not_kept(job):
    plain = job("plain")
    ruined = job("ruined", distillation={**SHORT, "steps": 3, "scale_rate": 5.0})
    record = ruined.passport.quantization.distillation
    assert record.after > record.before
    assert not record.kept
    assert weights(ruined) == weights(plain)
    assert any(decision.what == "distillation not kept" for decision in ruined.passport.decisions)


def test_a_loss_that_is_not_finite_stops_with_a_line(job, monkeypatch):
    monkeypatch.setattr(loop, "kl_gradient", lambda *args: (float("nan"), torch.zeros(8, 32, 64)))
    with pytest.raises(CompressError, match="loss or gradient is not finite"):
        job(distillation=SHORT)


def test_a_damaged_checkpoint_and_a_changed_block_are_refused(job, tmp_path, monkeypatch):
    kept = loop.Distiller.step

    def dies(self, rows, rates):
        if (tmp_path / "bundle.work" / stage.CHECKPOINT).exists():
            raise KeyboardInterrupt
        return kept(self, rows, rates)

    monkeypatch.setattr(loop.Distiller, "step", dies)
    with pytest.raises(KeyboardInterrupt):
        job(distillation=SHORT)
    path = tmp_path / "bundle.work" / stage.CHECKPOINT
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CompressError, match=r"distill\.safetensors: damaged"):
        job(distillation=SHORT, resume=True)
    path.write_bytes(whole)
    monkeypatch.setattr(loop.Distiller, "step", kept)
    saved = pipeline.stage_bundle

    def changes(state, out):
        file = stage.trained_file(state, 1)
        file.write_bytes(file.read_bytes()[:-4] + b"\0\0\1\0")
        return saved(state, out)

    monkeypatch.setattr(pipeline, "stage_bundle", changes)
    with pytest.raises(CompressError, match=r"trained-00001\.safetensors: missing or changed"):
        job(distillation=SHORT, resume=True)


def test_every_epoch_sees_every_row_once_in_another_order():
    schedule = loop.Schedule(steps=8, rows=3, batch_size=2, rates=None, seed=5, save_every=1)
    seen = [row for step in range(4) for row in schedule.rows_at(step, 6)]
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert seen[:6] != seen[6:]
    assert schedule.rows_at(2, 6) == schedule.rows_at(2, 6)


def test_guided_hessians_are_those_of_the_weighted_tokens(job, tmp_path, monkeypatch):
    seen = {}
    kept = pipeline.blocks.quantize

    def keep(layer, prefix, groups, statistics, *rest):
        seen[prefix] = {group.names[0]: (statistics[group].hessian, statistics[group].tokens) for group in groups}
        return kept(layer, prefix, groups, statistics, *rest)

    monkeypatch.setattr(pipeline.blocks, "quantize", keep)
    monkeypatch.setattr(
        sensitivity, "token_weights", lambda m, groups, ids, **kw: {g: torch.full(ids.shape, 4.0) for g in groups}
    )
    job("plain")
    plain, seen = seen, {}
    job("guided", guided=True)
    # weights of 4 everywhere multiply block 0's Hessians by 4
    for name, (hessian, tokens) in seen["model.layers.0."].items():
        assert torch.allclose(hessian, 4 * plain["model.layers.0."][name][0], rtol=1e-5)
        assert tokens == 40 * 32


def test_a_guided_job_changes_the_weights_and_resumes_without_a_second_backward_pass(job, monkeypatch):
    plain, guided = job("plain"), job("guided", guided=True)
    assert weights(plain) != weights(guided)
    monkeypatch.setattr(pipeline, "quantize", lambda state: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        job("killed", guided=True)
    monkeypatch.undo()
    monkeypatch.setattr(sensitivity, "token_weights", None)
    assert weights(job("killed", guided=True, resume=True)) == weights(guided)


def test_token_weights_that_changed_are_refused(job, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "quantize", lambda state: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            job(guided=True)
    path = tmp_path / "bundle.work" / sensitivity.FILE
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\1\0")
    with pytest.raises(CompressError, match=r"sensitivity\.safetensors: missing or changed"):
        job(guided=True, resume=True)
    manifest = json.loads((tmp_path / "bundle.work" / "job.json").read_text())
    assert not manifest["blocks"]


def test_everything_together_is_killed_before_distilling_resumes_and_loads(job, monkeypatch):
    everything = {
        "distillation": SHORT,
        "transform": {"rotation": "r1+r2", "smoothing": "awq"},
        "asymmetric": True,
        "guided": True,
        "refit": True,
        "overrides": [{"targets": ["*.down_proj"], "format": "int8"}, {"targets": ["*.1.*.o_proj"], "format": "none"}],
    }
    whole = job("whole", **everything)
    with monkeypatch.context() as patch:
        patch.setattr(stage, "distill", lambda state: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            job("killed", **everything)
    resumed = job("killed", resume=True, **everything)
    assert weights(resumed) == weights(whole)
    ids = torch.arange(3, 27)[None]
    theirs = AutoModelForCausalLM.from_pretrained(whole.path, dtype=torch.float32).eval()(ids).logits
    ours = engine.load(whole.path, dtype=torch.float32, kernel="dequantized")(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-3)
    source = engine.load(whole.path.parent / "source", dtype=torch.float32)(ids).logits.log_softmax(-1)

    def distance(logits):
        return float((source.exp() * (source - logits.log_softmax(-1))).sum(-1).mean())

    assert distance(ours) < 0.3 * distance(torch.zeros_like(ours))  # a law that knows nothing
