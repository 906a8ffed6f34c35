"""Phi-3: q/k/v and gate/up are one matrix each in the checkpoint already."""

from compressor.models.base import Family, LinearGroup

FAMILY = Family(
    model_types=("phi3",),
    groups=(
        LinearGroup(("self_attn.qkv_proj",)),
        LinearGroup(("self_attn.o_proj",)),
        LinearGroup(("mlp.gate_up_proj",)),
        LinearGroup(("mlp.down_proj",)),
    ),
)
