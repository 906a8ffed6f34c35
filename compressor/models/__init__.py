"""Architectures: one small file a family; `get` finds the one for a model's config."""

from compressor.models import gemma3, llama, mistral, phi3, qwen2, qwen3
from compressor.models.base import Family, LinearGroup, unknown_family

_BY_TYPE = {
    model_type: module.FAMILY
    for module in (llama, mistral, qwen2, qwen3, gemma3, phi3)
    for model_type in module.FAMILY.model_types
}


def get(model_type: str) -> Family:
    """The family of a config's `model_type`. Raises CompressError naming the supported ones."""
    if model_type not in _BY_TYPE:
        raise unknown_family(model_type, sorted(_BY_TYPE))
    return _BY_TYPE[model_type]


__all__ = ["Family", "LinearGroup", "get"]
