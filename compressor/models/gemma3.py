"""Gemma 3 (text): Llama's names, four norms a block, sliding and full attention in turn, scaled embeddings."""

from compressor.models.base import Family

FAMILY = Family(model_types=("gemma3_text",))
