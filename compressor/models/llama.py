"""Llama 2 and 3, SmolLM2 and others of the same shape."""

from compressor.models.base import Family

FAMILY = Family(model_types=("llama",))
