"""Rounded activations are, bit for bit, what compressed-tensors computes when transformers runs such a bundle."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from compressor import formats

DTYPES = [torch.bfloat16, torch.float32]


def activations() -> torch.Tensor:
    """Rows of very different magnitudes, so that every mantissa and some underflowing blocks occur."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator) * torch.logspace(-6, 2, 64)[:, None]
    x[0] = 0
    return x


def theirs(fmt, x, global_scale):
    args = QuantizationArgs(**fmt.activations_config())
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), global_scale)
    return fake_quantize(x, scale, zero_point, args, global_scale=global_scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_rounded_activations_equal_those_of_compressed_tensors(name, dtype):
    fmt, x = formats.get(name), activations().to(dtype)
    scale = fmt.input_global_scale(x.abs().amax().float())
    assert torch.equal(fmt.fake_quantize_activation(x, scale), theirs(fmt, x, scale))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-block128"])
def test_inputs_in_8_bits_equal_those_of_compressed_tensors(name, dtype):
    fmt, x = formats.get(name), torch.cat([activations() * 3**i for i in range(4)], 1).to(dtype).view(4, 16, -1)
    expected = theirs(fmt, x, None)
    assert torch.equal(fmt.fake_quantize_activation(x), expected)
    assert torch.equal(fmt.fake_quantize_activation(x.view(64, -1)), expected.view(64, -1))  # rows are rows
    assert not torch.equal(fmt.fake_quantize_activation(x * 1.01) / 1.01, expected)
    other = formats.get("fp8" if name == "fp8-block128" else "fp8-block128")
    assert not torch.equal(other.fake_quantize_activation(x), expected)


def test_another_exponent_rule_would_be_seen():
    fmt, x = formats.get("mxfp4"), activations()
    floor = fmt.decode(fmt.encode(x))
    assert not torch.equal(floor, theirs(fmt, x, None))


def test_another_dtype_of_the_block_scale_would_be_seen():
    fmt, x = formats.get("nvfp4"), activations().bfloat16()
    scale = fmt.input_global_scale(x.abs().amax().float())
    in_float32 = fmt.fake_quantize_activation(x.float(), scale).bfloat16()
    share = (in_float32 != theirs(fmt, x, scale)).float().mean().item()
    assert 0 < share < 0.1
