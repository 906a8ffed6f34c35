"""Mistral: Llama's names, attention in a sliding window."""

from compressor.models.base import Family

FAMILY = Family(model_types=("mistral",))
