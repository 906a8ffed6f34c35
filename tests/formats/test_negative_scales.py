"""Symmetric INT4 under a search: a scale of either sign, so that −8 serves the largest value whichever sign it has."""

import pytest
import torch

from compressor import formats
from compressor.formats.search import best_integer_grid, group_importance
from compressor.kernels import int4_cpu
from compressor.kernels.linear import PackedLinear

SYMMETRIC = ["int4-g32", "int4-g64", "int4-g128"]


def gaussian(rows=64, cols=512, seed=0):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def importance(cols=512):
    return torch.rand(cols, generator=torch.Generator().manual_seed(1)).pow(4)


def errors(fmt, weight, step, h):
    """Weighted squared error of each group."""
    groups = weight.float().unflatten(1, (-1, fmt.group_size))
    squared = (fmt.fake_quantize(groups, step[..., None]) - groups).square()
    return (squared if h is None else squared * group_importance(h, fmt.group_size)).sum(-1)


def of_positive_scales(fmt, weight, h):
    """The steps that the search finds when it may not change signs."""
    groups = weight.float().unflatten(1, (-1, fmt.group_size))
    grid = fmt.grid(weight)

    def store(scale):
        return fmt.storable(scale, grid, search="mse")

    standard = store(groups.abs().amax(-1) / 7.5)
    step, _ = best_integer_grid(groups, group_importance(h, fmt.group_size), (standard, None), (-8, 7), store)
    assert bool((step > 0).all())
    return step


@pytest.mark.parametrize("h", [None, importance()], ids=["plain", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SYMMETRIC)
def test_gaussian_groups_are_better_off_than_with_positive_scales(name, dtype, h):
    fmt, weight = formats.get(name), gaussian().to(dtype)
    grid = fmt.grid(weight, search="mse", importance=h)
    signed, positive = (errors(fmt, weight, s, h) for s in (grid.step, of_positive_scales(fmt, weight, h)))
    assert float(signed.sum()) < 0.94 * float(positive.sum())
    assert float((signed > 1.01 * positive).float().mean()) < 0.05  # the two combs differ a little
    assert 0.3 < float((grid.step < 0).float().mean()) < 0.7


def test_a_group_whose_extremes_are_levels_either_way_up_is_exact():
    fmt = formats.get("int4-g32")
    levels = torch.arange(-8, 8).repeat(2).float()
    weight = torch.stack([levels, -levels]) * 0.25
    grid = fmt.grid(weight, search="mse")
    assert grid.step.flatten().tolist() == [0.25, -0.25]
    assert torch.equal(fmt.decode(fmt.encode(weight, search="mse")), weight)
    assert not torch.equal(fmt.decode(fmt.encode(weight)), weight)  # the standard rule


@pytest.mark.parametrize("name", formats.names())
@pytest.mark.parametrize("search", ["none", "mse"])
def test_only_searched_symmetric_int4_has_negative_scales(name, search):
    fmt = formats.get(name)
    step = fmt.grid(gaussian(128, 512).bfloat16(), search=search, importance=importance()).step
    assert bool((step < 0).any()) == (name in SYMMETRIC and search == "mse")
    assert fmt.negative_scales == (name in SYMMETRIC)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_negative_scales_survive_packing(name):
    fmt, weight = formats.get(name), gaussian().bfloat16()
    grid = fmt.grid(weight, search="mse")
    codes = torch.randint(0, 16, weight.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    again, found = fmt.unpack(fmt.pack(codes, grid))
    assert torch.equal(again, codes) and torch.equal(found.step, grid.step) and bool((found.step < 0).any())
    values = fmt.value(codes.unflatten(1, (-1, fmt.group_size)), found.step[..., None])
    assert torch.equal(fmt.round(values, found.step[..., None]).flatten(1), codes)
    assert torch.equal(fmt.fake_quantize(values, found.step[..., None]), values)


@pytest.mark.parametrize("name", SYMMETRIC)
def test_compressed_tensors_decodes_them_alike(name):
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    fmt = formats.get(name)
    tensors = fmt.encode(gaussian().bfloat16(), search="mse")
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fmt.weights_config()))
    theirs = PackedQuantizationCompressor.decompress({k: v.clone() for k, v in tensors.items()}, scheme)["weight"]
    assert torch.equal(theirs.float(), fmt.decode(tensors))


@pytest.mark.parametrize("name", SYMMETRIC)
def test_the_packed_kernel_runs_them(name):
    fmt = formats.get(name)
    tensors = fmt.encode(gaussian().bfloat16(), search="mse")
    layer = PackedLinear(fmt, tensors, kernel="cpu-int4")
    assert layer.kernel == int4_cpu.OP
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    expected = x.float() @ fmt.decode(tensors).T
    assert float((layer(x).float() - expected).abs().max() / expected.abs().max()) < 0.01
    wrong = {**tensors, "weight_scale": tensors["weight_scale"].abs()}  # negative control: the sign matters
    assert float((layer(x).float() - x.float() @ fmt.decode(wrong).T).abs().max() / expected.abs().max()) > 0.1
