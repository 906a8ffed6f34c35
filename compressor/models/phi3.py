"""Phi-3: q/k/v and gate/up are one matrix each in the checkpoint already."""

from compressor.models.base import Family, gated_blocks

FAMILY = Family(model_types=("phi3",), groups=gated_blocks(("self_attn.qkv_proj",), ("mlp.gate_up_proj",)))
