"""Qwen3 (dense): Llama's names, norms on q and k heads."""

from compressor.models.base import Family

FAMILY = Family(model_types=("qwen3",))
