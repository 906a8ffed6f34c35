"""Channel scales of every group fold into what precedes it without a change of the function."""

from dataclasses import replace

import pytest
import tiny_models as tiny
import torch
from tiny_transforms import KINDS, exactness, refused, save

from compressor import models
from compressor.errors import CompressError
from compressor.transform import scales


def trial(family, config, get):
    return [scales.trial(family, config, 5)]


@pytest.mark.parametrize("kind", KINDS)
def test_scales_of_every_group_leave_every_family_what_it_is(tmp_path, kind):
    found = exactness(save(tmp_path, kind), trial)
    assert 0 < found.max_logit_difference <= 1e-4 and found.dtype == "float32"


def test_every_linear_and_what_precedes_it_takes_part():
    config = tiny.CONFIGS["gemma3"]()
    family = models.get(config.model_type)
    changes = scales.trial(family, config, 0).changes
    assert {f"{name}.weight" for name, _, _ in family.linears(config)} <= set(changes)
    norms = {
        name.removeprefix("model.layers.1.")
        for name in changes
        if name.startswith("model.layers.1.") and "norm" in name
    }
    assert norms == {"input_layernorm.weight", "pre_feedforward_layernorm.weight"}


@pytest.mark.parametrize("name", ["v_proj.weight", "v_proj.bias", "up_proj.weight", "input_layernorm.weight"])
def test_a_fold_that_forgets_one_side_is_refused(tmp_path, name):
    def wrong(family, config, get):
        (made,) = trial(family, config, get)
        return [replace(made, changes={k: v for k, v in made.changes.items() if not k.endswith(name)})]

    assert "transform channel scales changes" in refused(save(tmp_path, "qwen2"), wrong)


def test_a_missing_one_in_gemmas_norms_is_refused(tmp_path):
    refused(save(tmp_path, "gemma3"), trial, replace(models.get("gemma3_text"), norm_offset=0.0))


def test_gate_in_place_of_up_is_refused(tmp_path):
    family = models.get("llama")
    groups = tuple(replace(g, producer="mlp.gate_proj") if g.names == ("mlp.down_proj",) else g for g in family.groups)
    refused(save(tmp_path, "llama"), trial, replace(family, groups=groups))


def test_scales_must_be_positive_and_shared_by_the_heads_that_share_a_value():
    config = tiny.CONFIGS["llama"]()
    family = models.get("llama")
    o_proj = family.groups[1]
    shared = scales.channels(family, config, o_proj)
    assert shared.tolist() == [*range(16), *range(16), *range(16, 32), *range(16, 32)]
    assert scales.channels(family, config, family.groups[0]) is None
    assert scales.channel_scales(family, config, {(0, o_proj): torch.rand(32)[shared] + 1})
    with pytest.raises(CompressError, match=r"layers\.0\.self_attn\.o_proj: channel scales differ among query heads"):
        scales.channel_scales(family, config, {(0, o_proj): torch.rand(64) + 1})
    with pytest.raises(
        CompressError, match=r"layers\.1\.self_attn\.q_proj: channel scales must be positive and finite"
    ):
        scales.channel_scales(family, config, {(1, family.groups[0]): torch.zeros(64)})
    alone = replace(o_proj, producer=None)
    with pytest.raises(CompressError, match="nothing before it can take its channel scales"):
        scales.channel_scales(family, config, {(0, alone): torch.ones(64)})


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_scales_are_moved_to_where_the_norm_is_not_rounded(offset):
    generator = torch.Generator().manual_seed(0)
    norm = (torch.rand(64, generator=generator) + 0.5 - offset).bfloat16()
    norm[3] = -offset  # this channel is switched off
    wanted = torch.rand(64, generator=generator) + 0.5
    found = scales.storable(norm, offset, wanted)
    divided = (norm.double() + offset) / found.double() - offset
    torch.testing.assert_close(divided, divided.bfloat16().double(), rtol=0, atol=1e-6)
    assert found[3] == 1
    used = torch.arange(64) != 3
    torch.testing.assert_close(found[used], wanted[used], rtol=0.01, atol=0)
    exact = (norm.double() + offset) / wanted.double() - offset
    assert (exact - exact.bfloat16().double()).abs().max() > 1e-4, "the scales as wanted would be rounded"
