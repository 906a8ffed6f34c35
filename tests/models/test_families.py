"""The names under which engines fuse linears."""

import pytest

from compressor import models


@pytest.mark.parametrize(
    ("module", "fused"),
    [
        ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.17.mlp.gate_proj", "model.layers.17.mlp.gate_up_proj"),
        ("model.layers.0.self_attn.o_proj", None),
        ("model.layers.0.mlp.experts", None),
        ("lm_head", None),
        ("model.layers.x.self_attn.k_proj", None),
        ("mtp.model.layers.0.self_attn.k_proj", None),
        (f"model.layers.{'9' * 5000}.self_attn.k_proj", None),
    ],
)
def test_only_parts_of_a_fused_matrix_have_a_fused_name(module, fused):
    assert models.get("llama").fused_name(None, module) == fused


def test_phi3_is_fused_in_the_checkpoint_already():
    assert models.get("phi3").fused_name(None, "model.layers.0.self_attn.qkv_proj") is None
