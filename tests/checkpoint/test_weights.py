"""Dense weights are read from plain and packed checkpoints by their original names."""

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file

from compressor import formats
from compressor.checkpoint.weights import Weights
from compressor.errors import CompressError
from compressor.formats.config import quantization_config


def test_a_plain_checkpoint_is_read_as_it_is(tmp_path):
    folder = tiny.save(tmp_path, shard="1GB")
    stored = load_file(folder / "model.safetensors")
    weights = Weights(folder)
    assert weights.packed == {}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights.get(name), stored[name])


def test_a_quantized_layer_that_no_target_names_is_refused(tmp_path):
    folder = tiny.save(tmp_path, shard="1GB")
    stored, name = load_file(folder / "model.safetensors"), "model.layers.0.mlp.up_proj"
    fmt = formats.get("fp8")
    encoded = fmt.encode(stored.pop(f"{name}.weight"))
    stored |= {f"{name}.{suffix}": tensor for suffix, tensor in encoded.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    for target in ("re:.*up_proj$", "re:.*down_proj$"):
        tiny.edit_config(
            folder, quantization_config=quantization_config(fmt, activations=False, ignore=[], targets=[target])
        )
        if "up" in target:
            assert Weights(folder).packed == {name: ["weight", "weight_scale"]}
            assert torch.equal(Weights(folder).get(f"{name}.weight"), fmt.decode(encoded))
        else:
            with pytest.raises(CompressError, match=rf"config\.json: .* no target names '{name}', which is quantized"):
                Weights(folder)


def test_nan_is_refused_with_file_and_tensor(tmp_path):
    folder = tiny.save(tmp_path, shard="1GB")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    stored[name][3, 5] = float("nan")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CompressError, match=rf"model\.safetensors.*{name}"):
        Weights(folder).get(name)
