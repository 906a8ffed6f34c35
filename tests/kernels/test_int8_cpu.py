"""The int8 kernel beside plain float32 arithmetic."""

import pytest
import torch

from compressor import formats
from compressor.errors import CompressError
from compressor.kernels import int8_cpu, quantized

CPU = torch.device("cpu")


def layer(rows=48, cols=80, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    stored = formats.get("int8").encode(torch.randn(rows, cols, generator=generator).bfloat16())
    own = torch.randn(rows, generator=generator).bfloat16() if bias else None
    return quantized.linear(formats.get("int8"), stored, own, dtype=torch.bfloat16, device=CPU)[0], stored, own


@pytest.mark.parametrize("count", [1, 3, int8_cpu.DENSE_ROWS - 1, int8_cpu.DENSE_ROWS, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_decoded_weight(count, bias):
    linear, stored, own = layer(bias=bias)
    x = torch.randn(count, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.float() @ formats.get("int8").decode(stored).T + (0 if own is None else own.float())
    assert isinstance(linear, int8_cpu.Int8Linear)
    assert torch.allclose(linear(x).float(), expected, rtol=2.0**-7, atol=2.0**-7 * float(expected.abs().max()))
    wrong = formats.get("int8").decode({**stored, "weight_scale": stored["weight_scale"].flip(0)})
    assert not torch.allclose(linear(x).float(), x.float() @ wrong.T, rtol=2.0**-7, atol=2.0**-7)


def test_leading_dimensions_are_kept():
    assert layer()[0](torch.zeros(2, 3, 80).bfloat16()).shape == (2, 3, 48)
    assert layer()[0](torch.zeros(0, 80).bfloat16()).shape == (0, 48)


def test_joined_layers_give_the_same_outputs_side_by_side():
    parts = [layer(rows, bias=True, seed=rows)[0] for rows in (16, 48)]
    x = torch.randn(4, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.equal(int8_cpu.join(parts)(x), torch.cat([part(x) for part in parts], -1))


def test_layers_of_which_only_some_have_a_bias_are_not_joined():
    assert int8_cpu.join([layer(bias=True)[0], layer()[0]]) is None


@pytest.mark.parametrize(
    ("name", "dtype", "cols"), [("fp8", torch.bfloat16, 16), ("int8", torch.float32, 16), ("int8", torch.bfloat16, 24)]
)
def test_without_a_kernel_that_can_run_it_the_weight_is_decoded(name, dtype, cols):
    stored = formats.get(name).encode(torch.randn(8, cols, generator=torch.Generator().manual_seed(0)).bfloat16())
    linear, shape = quantized.linear(formats.get(name), stored, None, dtype=dtype, device=CPU)
    assert shape == (8, cols) and torch.equal(linear.weight, formats.get(name).decode(stored).to(dtype))


def test_a_weight_that_the_dtype_cannot_hold_is_refused():
    stored = formats.get("fp8").encode(torch.full((8, 16), 1e5))
    with pytest.raises(CompressError, match=r"decoded from fp8 it holds values that torch\.float16 cannot"):
        quantized.linear(formats.get("fp8"), stored, None, dtype=torch.float16, device=CPU)
