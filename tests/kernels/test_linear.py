import pytest
import torch
import torch.nn.functional as F

from compressor import formats
from compressor.errors import CompressError, UsageError
from compressor.kernels import int4_cpu, int8_cpu
from compressor.kernels.linear import PackedLinear

INT4 = ["int4-g32", "int4-g64", "int4-g32-asym", "int4-g128"]


def encoded(name, out=32, width=128, dtype=torch.bfloat16):
    fmt = formats.get(name)
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(0)) * 0.05
    return fmt, fmt.encode(weight.to(dtype))


def inputs(width=128, dtype=torch.bfloat16):
    return torch.randn(2, 3, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", INT4)
def test_int4_runs_packed_in_bfloat16_and_proves_it(name):
    fmt, tensors = encoded(name)
    bias = torch.randn(32)
    layer = PackedLinear(fmt, tensors, bias=bias)
    assert (layer.path, layer.kernel) == ("cpu-int4", int4_cpu.OP)
    assert int4_cpu.OP in layer.proof and "dispatched" in layer.proof
    x = inputs()
    expected = F.linear(x.float(), fmt.decode(tensors), bias)
    assert (layer(x).float() - expected).abs().max() < 0.01 * expected.abs().max()
    assert not layer.state_dict(), "packed tensors are not part of a dense state dict"
    assert "weight" not in dict(layer.named_buffers()), "the dense weight stays in memory"


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", *INT4])
def test_float32_decodes_and_says_why(name):
    fmt, tensors = encoded(name)
    layer = PackedLinear(fmt, tensors, dtype=torch.float32)
    assert layer.path == "dequantized"
    assert ("no packed" if "fp4" in name else "runs in float32") in layer.proof
    x = inputs(dtype=torch.float32)
    torch.testing.assert_close(layer(x), F.linear(x, fmt.decode(tensors)))


def test_a_shape_the_kernel_cannot_take_is_decoded_or_refused_as_asked():
    fmt, tensors = encoded("int4-g32", out=24)
    layer = PackedLinear(fmt, tensors)
    assert layer.path == "dequantized" and "divisible by 16, not 24" in layer.proof
    with pytest.raises(CompressError, match="divisible by 16, not 24"):
        PackedLinear(fmt, tensors, kernel="cpu-int4")
    assert PackedLinear(*encoded("int4-g32"), kernel="dequantized").path == "dequantized"
    with pytest.raises(UsageError, match="kernel: 'cpu-int8' is not one of"):
        PackedLinear(fmt, tensors, kernel="cpu-int8")


def test_scales_that_bfloat16_cannot_hold_are_not_rounded_silently():
    fmt, tensors = encoded("int4-g32", dtype=torch.float32)
    assert tensors["weight_scale"].dtype == torch.float32
    layer = PackedLinear(fmt, tensors)
    assert layer.path == "dequantized" and "not exact in bfloat16" in layer.proof


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_four_bit_activations_are_emulated_and_said(name):
    fmt, tensors = encoded(name)
    x = inputs(dtype=torch.float32)
    scale = fmt.input_global_scale(x.abs().max())
    if scale is not None:
        tensors["input_global_scale"] = scale
    layer = PackedLinear(fmt, tensors, dtype=torch.float32, activations=True)
    assert "4-bit inputs emulated" in layer.proof
    rounded = fmt.fake_quantize_activation(x, scale)
    torch.testing.assert_close(layer(x), F.linear(rounded, fmt.decode(tensors)))
    assert not torch.allclose(layer(x), F.linear(x, fmt.decode(tensors)), rtol=1e-3)


@pytest.mark.parametrize("rows", [1, int8_cpu.DENSE_ROWS])
@pytest.mark.parametrize("layout", ["int-quantized", "pack-quantized"])
def test_int8_runs_packed_in_bfloat16_and_proves_it(layout, rows):
    fmt = formats.get("int8").for_inputs(layout == "int-quantized")
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    tensors, bias = fmt.encode(weight), torch.randn(32)
    layer = PackedLinear(fmt, tensors, bias=bias)
    assert fmt.compression_format == layout and (layer.path, layer.kernel) == ("cpu-int8", int8_cpu.OP)
    assert int8_cpu.OP in layer.proof and "dispatched" in layer.proof and not layer.state_dict()
    x = inputs().view(-1, 128)[:1].repeat(rows, 1)
    expected = F.linear(x.float(), fmt.decode(tensors), bias)
    assert (layer(x).float() - expected).abs().max() < 0.01 * expected.abs().max()
    with pytest.raises(CompressError, match="cpu-int4 cannot run this layer: its weights are int8"):
        PackedLinear(fmt, tensors, kernel="cpu-int4")
    decoded = PackedLinear(fmt, tensors, bias=bias, kernel="dequantized")
    assert decoded.path == "dequantized"
    torch.testing.assert_close(decoded(x).float(), expected, rtol=0, atol=0.01 * float(expected.abs().max()))


@pytest.mark.parametrize("damage", ["shifted", "scaled"])
def test_an_int8_kernel_that_does_not_do_what_it_says_is_refused(monkeypatch, damage):
    fmt, tensors = encoded("int8")
    real, rows = int8_cpu.Int8Linear.forward, {"shifted": 0, "scaled": int8_cpu.DENSE_ROWS}[damage]
    wrong = {"shifted": lambda layer, x: real(layer, x.roll(1, -1)), "scaled": lambda layer, x: 1.1 * real(layer, x)}
    monkeypatch.setattr(
        int8_cpu.Int8Linear, "forward", lambda layer, x: (wrong[damage] if len(x) >= rows else real)(layer, x)
    )
    with pytest.raises(CompressError, match="off by"):
        PackedLinear(fmt, tensors)


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8-block128"])
def test_inputs_in_8_bits_are_rounded_row_by_row_and_said(name):
    fmt, tensors = encoded(name)
    x = inputs(dtype=torch.float32)
    layer = PackedLinear(fmt, tensors, dtype=torch.float32, activations=True)
    assert "8-bit inputs emulated" in layer.proof
    expected = F.linear(fmt.fake_quantize_activation(x), fmt.decode(tensors))
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x.view(6, -1)), expected.view(6, -1))
    assert not torch.allclose(layer(x), F.linear(x, fmt.decode(tensors)), rtol=1e-5)


@pytest.mark.parametrize("damage", ["shifted", "silent", "decoded wrongly"])
def test_a_kernel_that_does_not_do_what_it_says_is_refused(monkeypatch, damage):
    fmt, tensors = encoded("int4-g32")
    real = int4_cpu.linear
    if damage == "shifted":
        monkeypatch.setattr(int4_cpu, "linear", lambda x, weight, bias: real(x.roll(1, -1), weight, bias))
        says = "off by"
    elif damage == "decoded wrongly":  # the kernel is right, what many rows would run is not
        decode = int4_cpu.decode
        monkeypatch.setattr(int4_cpu, "decode", lambda weight: decode(weight).roll(1, -1))
        says = "do not decode to this layer's weight"
    else:  # right numbers, but not from the kernel
        dense = fmt.decode(tensors).bfloat16()
        monkeypatch.setattr(int4_cpu, "linear", lambda x, weight, bias: F.linear(x, dense))
        says = "did not run"
    with pytest.raises(CompressError, match=says):
        PackedLinear(fmt, tensors)
