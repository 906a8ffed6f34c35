"""`quantization.ignore` names linears of the model: run and plan refuse a pattern without one before any work."""

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

from compressor import pipeline, plan
from compressor.errors import UsageError
from compressor.recipe import Recipe
from compressor.ui import NullUI

pytestmark = pytest.mark.usefixtures("keys")


@pytest.fixture
def source(tmp_path):
    return tiny.save(tmp_path / "source", "llama-tied", shard="1GB")


def recipe(source, ignore):
    return Recipe.from_dict(
        {
            "name": "tiny",
            "source": {"uri": str(source)},
            "quantization": {"format": "int4-g32", "method": "rtn", "scale_search": "none", "ignore": ignore},
            "proposer": {"kind": "none"},
            "measure": {"quality": {"kind": "none"}},
        }
    )


def run(tmp_path, made):
    return pipeline.run(made, out=tmp_path / "bundle", work=tmp_path / "work", ui=NullUI())


REFUSED = [
    (
        ["*.dwn_proj"],
        r"'\*\.dwn_proj' matches no linear of this model; the nearest is 'model\.layers\.\d\.mlp\.down_proj'",
    ),
    (["lm_head", "model.layers.0.mlp.downproj"], r"nearest is 'model\.layers\.0\.mlp\.down_proj'"),
    (["lmhead"], r"'lmhead' .* nearest is 'lm_head'"),
    (["re:.*down_proj"], r"'re:\.\*down_proj' matches no linear"),
    (["model.layers.0.self_attn.qkv_proj"], "matches no linear"),  # the engines' name, not the checkpoint's
    (["*.down_proj.weight"], "matches no linear"),
    (["model.layers.2.*"], "matches no linear"),  # there are two blocks
    (["*"], r"\['\*'\] leaves nothing to quantize; remove a pattern"),
    (["*.self_attn.*", "*.mlp.*"], "leaves nothing to quantize"),
]


@pytest.mark.parametrize(("ignore", "said"), REFUSED)
def test_a_pattern_that_does_nothing_or_everything_is_refused_before_any_work(tmp_path, source, ignore, said):
    for attempt in (lambda: run(tmp_path, recipe(source, ignore)), lambda: plan.make(recipe(source, ignore))):
        with pytest.raises(UsageError, match=rf"quantization\.ignore: .*{said}") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "work").exists() and not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("ignore", [[], ["lm_head"], ["lm_*", "*.down_proj"], ["model.layers.1.*"]])
def test_patterns_that_match_are_accepted(source, ignore):
    kept = sum(item.count for item in plan.make(recipe(source, ignore)).linears)
    assert kept == {"*.down_proj": 12, "model.layers.1.*": 7}.get((ignore or [""])[-1], 14)


def test_the_head_may_be_named_and_is_ignored_once(tmp_path, source):
    assert run(tmp_path, recipe(source, ["lm_head"])).passport.quantization.ignored == ["lm_head"]


def test_a_linear_of_an_mtp_module_may_be_named(tmp_path, source):
    with pytest.raises(UsageError, match=r"'mtp\.fc' matches no linear"):
        plan.make(recipe(source, ["mtp.fc"]))
    tensors = load_file(source / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.randn(64, 128).bfloat16()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert "mtp.fc" in run(tmp_path, recipe(source, ["mtp.fc"])).passport.quantization.ignored
