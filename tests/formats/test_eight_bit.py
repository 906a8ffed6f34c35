"""8 bits a weight, against compressed-tensors' own rules, compressors and decompressors."""

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams

from compressor import formats
from compressor.errors import CompressError
from compressor.formats.config import HEAD_LINEARS, head_format_from_config, quantization_config
from compressor.quantize import rtn

NAMES = ["int8", "fp8", "fp8-block128"]
INT8 = formats.get("int8")
ALL = [INT8, INT8.for_inputs(False), formats.get("fp8"), formats.get("fp8-block128")]
IDS = ["int8", "int8 packed", "fp8", "fp8-block128"]


def weight(rows=256, cols=384, dtype=torch.bfloat16):
    """Channels and blocks of very different magnitudes."""
    normal = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    return (normal * torch.logspace(-2, 1, rows)[:, None] * torch.logspace(-1, 1, cols)).to(dtype)


def scheme(fmt):
    args = QuantizationArgs(**fmt.weights_config())
    return QuantizationScheme(targets=["Linear"], weights=args, format=fmt.compression_format)


def compressor(fmt):
    return BaseCompressor.get_value_from_registry(fmt.compression_format)


def same(ours, theirs):
    """Whether tensors by suffix are equal in name, dtype and byte."""
    kinds = [{name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} for found in (ours, theirs)]
    return kinds[0] == kinds[1] and all(
        torch.equal(ours[name].contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8))
        for name in ours
    )


def extremes(fmt, w):
    """Least and largest weight under each scale, [rows, G]."""
    if fmt.name == "fp8-block128":
        blocks = w.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2)
        return blocks.amin(-1), blocks.amax(-1)
    return w.amin(1, keepdim=True), w.amax(1, keepdim=True)


@pytest.mark.parametrize("fmt", ALL, ids=IDS)
def test_the_standard_rule_gives_the_bytes_of_compressed_tensors(fmt):
    w = weight(dtype=torch.float32)  # whose quotients in float32 are theirs
    scale, zero = calculate_qparams(*extremes(fmt, w), scheme(fmt).weights)
    theirs = compressor(fmt).compress({"weight": w, "weight_scale": scale, "weight_zero_point": zero}, scheme(fmt))
    ours = fmt.encode(w)
    assert same(ours, theirs)
    searched = fmt.encode(w, search="mse")
    assert not torch.equal(searched["weight_scale"], theirs["weight_scale"])


@pytest.mark.parametrize("search", ["none", "mse"])
@pytest.mark.parametrize("fmt", ALL, ids=IDS)
def test_the_tensors_decode_as_compressed_tensors_decodes_them_and_pack_again_to_the_same_bytes(fmt, search):
    stored = fmt.encode(weight(), search=search)
    theirs = compressor(fmt).decompress(dict(stored), scheme(fmt))["weight"]
    assert torch.equal(fmt.decode(stored).bfloat16(), theirs.bfloat16())
    again = fmt.pack(*fmt.unpack(stored))
    assert same(again, stored)


@pytest.mark.parametrize("fmt", ALL, ids=IDS)
def test_no_weight_is_further_off_than_half_a_step(fmt):
    original = weight().float()
    stored = fmt.encode(weight())
    step = fmt.unpack(stored)[1].step.repeat_interleave(original.shape[1] // fmt.unpack(stored)[1].step.shape[1], 1)
    if (
        fmt.type == "float"
    ):  # 3 bits behind the point: half a step is a sixteenth of the number, or of the smallest normal
        step = torch.maximum(original.abs() / 8, step * 2.0**-9)
    # the scale, rounded to bfloat16, may cut the largest weight by half its own step, and INT8 has no level for 127.5
    cut = original.abs().amax(1, keepdim=True) * 2.0**-7
    assert bool(((fmt.decode(stored) - original).abs() <= step / 2 + cut).all())
    larger = {**stored, "weight_scale": stored["weight_scale"] * 1.25}  # the bound sees a wrong scale
    assert not bool(((fmt.decode(larger) - original).abs() <= step / 2 + cut).all())


@pytest.mark.parametrize("fmt", ALL, ids=IDS)
def test_zeros_stay_zero_and_nan_is_refused(fmt):
    broken = weight()
    broken[:128] = 0
    assert bool((fmt.decode(fmt.encode(broken))[:128] == 0).all())
    broken[4, 1] = float("nan")
    with pytest.raises(CompressError, match="NaN or Inf"):
        fmt.encode(broken)


@pytest.mark.parametrize("name", NAMES)
def test_a_search_never_makes_the_weighted_error_larger(name):
    fmt, w = formats.get(name), weight()
    importance = torch.rand(w.shape[1], generator=torch.Generator().manual_seed(1)) ** 4

    def error(**options):
        return ((fmt.decode(rtn(w, fmt, **options)) - w.float()).square() * importance).sum().item()

    plain, searched = error(search="none"), error(search="mse", importance=importance)
    assert searched < plain * (0.99 if name == "int8" else 1.0)
    if name == "int8":  # weights that do not matter change the answer, and for the worse
        assert searched < error(search="mse", importance=importance.flip(0))


def test_the_last_rows_may_fill_a_block_in_part():
    fmt, w = formats.get("fp8-block128"), weight(200, 256)
    stored = fmt.encode(w)
    assert stored["weight_scale"].shape == (2, 2)
    assert torch.equal(fmt.decode(stored)[:128], fmt.decode(fmt.encode(w[:128])))
    assert torch.equal(fmt.decode(stored)[128:], fmt.decode(fmt.encode(w[128:])))


def test_what_blocks_do_not_divide_is_refused_naming_the_layer():
    fmt = formats.get("fp8-block128")
    fmt.check(256, "x")
    fmt.check_fused([256, 128, 64], "x")  # the last part may end within a block
    with pytest.raises(CompressError, match=r"layers\.0\.down: in_features 576 .* blocks of 128; choose fp8 or add"):
        fmt.check(576, "layers.0.down")
    with pytest.raises(CompressError, match=r"qkv_proj: out_features 576, 192, 192 .* do not end between them"):
        fmt.check_fused([576, 192, 192], "qkv_proj")
    formats.get("fp8").check_fused([576, 192, 192], "qkv_proj")


@pytest.mark.parametrize("fmt", ALL, ids=IDS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, codes: t.pop(codes), "weight(_packed)? is missing"),
        (lambda t, codes: t.update({codes: t[codes].float()}), "expected, found torch.float32"),
        (lambda t, codes: t.update(weight_scale=t["weight_scale"][:1, :0]), "weight_scale: shape"),
        (lambda t, codes: t.update(weight_scale=t["weight_scale"].int()), "weight_scale: 2-dimensional bfloat16"),
    ],
)
def test_other_tensors_are_refused(fmt, change, message):
    stored = fmt.encode(weight())
    change(stored, "weight_packed" if "weight_packed" in stored else "weight")
    with pytest.raises(CompressError, match=message):
        fmt.decode(stored)


def test_a_nan_among_the_codes_is_refused():
    fmt = formats.get("fp8")
    stored = fmt.encode(weight())
    stored["weight"].view(torch.uint8)[0, 0] = 0xFF
    with pytest.raises(CompressError, match="weight: holds NaN"):
        fmt.decode(stored)


def section(fmt):
    return quantization_config(fmt, activations=fmt.bits == 8, ignore=[], targets=HEAD_LINEARS)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4-g64", "nvfp4"])
def test_a_heads_configuration_is_read_back(name):
    fmt = formats.get(name)
    assert head_format_from_config(section(fmt)).name == name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ([], "is not an object"),
        ({"quant_method": "gguf"}, "quant_method: 'compressed-tensors' expected"),
        ({"config_groups": {"a": {"targets": ["Embedding"]}}}, "only targets"),
        ({"config_groups": {"a": {"targets": 5}}}, "is not a list of module names"),
    ],
)
def test_another_configuration_of_a_head_is_refused(change, message):
    config = {**section(INT8), **change} if isinstance(change, dict) else change or [1]
    with pytest.raises(CompressError, match=message):
        head_format_from_config(config)


def test_a_head_with_other_linears_is_refused():
    config = quantization_config(INT8, activations=True, ignore=[], targets=["Linear", "re:.*fc$"])
    with pytest.raises(CompressError, match="of a head only targets"):
        head_format_from_config(config)


def test_a_head_with_inputs_in_4_bits_is_refused():
    config = quantization_config(formats.get("nvfp4"), activations=True, ignore=[])
    with pytest.raises(CompressError, match="4-bit inputs"):
        head_format_from_config(config)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("search", ["none", "mse"])
def test_a_step_between_two_that_can_be_stored_becomes_one_that_can(name, search):
    fmt = formats.get(name)
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    grid = fmt.grid(weight, search=search)
    assert torch.equal(fmt.storable(grid.step, grid, search=search), grid.step)
    step = fmt.storable(grid.step * 1.2345, grid, search=search)
    assert torch.equal(fmt.storable(step, grid, search=search), step)
    assert not torch.equal(step, grid.step * 1.2345)
    assert torch.allclose(step, grid.step * 1.2345, rtol=2.0**-4)
    moved = fmt.with_step(grid, step)
    codes = fmt.round(weight.float()[:, None], moved.step[..., None]).flatten(1)
    assert torch.equal(fmt.decode(fmt.pack(codes, moved)), fmt.value(codes, step))
