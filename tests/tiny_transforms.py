"""Tiny checkpoints whose norms are not 1, and the check of transforms on them."""

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

from compressor import models
from compressor.errors import CompressError
from compressor.models.skeleton import model_config
from compressor.transform import check
from compressor.transform.view import TransformedWeights

KINDS = ["llama", "llama-tied", "llama-biased", "llama-172", "mistral", "qwen2", "qwen3", "gemma3", "phi3"]
OPTIONS = {
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-172": ("llama", {"hidden_size": 172, "head_dim": 12, "intermediate_size": 96}),
}


def save(folder, kind, **config):
    """A float32 checkpoint none of whose norms is 1: tiny models' are, which would hide a wrong fold."""
    kind, options = OPTIONS.get(kind, (kind, {}))
    tiny.save(folder, kind, dtype=torch.float32, shard="1GB", **options, **config)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(9)
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = torch.rand(tensor.shape, generator=generator) + (-0.5 if kind == "gemma3" else 0.5)
        if name.endswith("bias"):
            assert tensor.abs().max() > 0.01
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def exactness(folder, make, family=None):
    """The check of the transforms that `make(family, config, get)` returns."""
    config, _ = model_config(folder)
    family = family or models.get(config.model_type)
    source = TransformedWeights(folder, family, config, [])
    view = TransformedWeights(folder, family, config, make(family, config, source.get))
    return check.check(view, config, check.token_rows(config.vocab_size, 0))


def refused(folder, make, family=None):
    with pytest.raises(CompressError, match=r"changes the model: logits differ by .* 0\.0001 is allowed") as caught:
        exactness(folder, make, family)
    return str(caught.value)
