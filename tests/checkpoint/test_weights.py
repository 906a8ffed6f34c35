"""Dense weights are read from plain and packed checkpoints by their original names."""

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

from compressor.checkpoint.weights import Weights
from compressor.errors import CompressError


def test_a_plain_checkpoint_is_read_as_it_is(tmp_path):
    folder = tiny.save(tmp_path, shard="1GB")
    stored = load_file(folder / "model.safetensors")
    weights = Weights(folder)
    assert weights.packed == {}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights.get(name), stored[name])


def test_nan_is_refused_with_file_and_tensor(tmp_path):
    folder = tiny.save(tmp_path, shard="1GB")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    stored[name][3, 5] = float("nan")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompressError, match=rf"model\.safetensors.*{name}"):
        Weights(folder).get(name)
