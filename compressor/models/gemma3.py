"""Gemma 3 (text): Llama's names, four norms a block whose weights count from 1, sliding and full attention in turn,
scaled embeddings."""

from compressor.models.base import GATE_UP, QKV, Family, gated_blocks

FAMILY = Family(
    model_types=("gemma3_text",),
    groups=gated_blocks(QKV, GATE_UP, mlp_norm="pre_feedforward_layernorm"),
    norm_offset=1.0,
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
