"""Qwen2 and Qwen2.5: Llama's names, biases on q, k and v."""

from compressor.models.base import Family

FAMILY = Family(model_types=("qwen2",))
