"""The names under which engines fuse linears."""

from types import SimpleNamespace

import pytest

from compressor import models

CONFIG = SimpleNamespace(num_hidden_layers=2)


@pytest.mark.parametrize(
    ("module", "fused"),
    [
        ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.gate_up_proj"),
        ("model.layers.0.self_attn.o_proj", None),
        ("model.layers.2.self_attn.k_proj", None),
        ("lm_head", None),
    ],
)
def test_only_parts_of_a_fused_matrix_have_a_fused_name(module, fused):
    assert models.get("llama").fused(CONFIG).get(module) == fused


def test_phi3_is_fused_in_the_checkpoint_already():
    assert models.get("phi3").fused(CONFIG) == {}
