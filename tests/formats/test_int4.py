"""INT4: grids, packing, zero points and scale search."""

import pytest
import torch

from compressor import formats
from compressor.errors import CompressError, UsageError

NAMES = [n for n in formats.names() if n.startswith("int4")]


def normal(rows: int, cols: int, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(fmt, weight, importance=None, **options) -> float:
    squared = (fmt.decode(fmt.encode(weight, importance=importance, **options)) - weight.float()).square()
    return float((squared if importance is None else squared * importance).sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_tensors_on_disk_have_the_documented_dtypes_and_shapes(name, dtype):
    fmt = formats.get(name)
    tensors = fmt.encode(normal(11, 256, dtype=dtype))
    assert tensors["weight_packed"].dtype == torch.int32 and tensors["weight_packed"].shape == (11, 32)
    assert tensors["weight_scale"].dtype == dtype and tensors["weight_scale"].shape == (11, 256 // fmt.group_size)
    assert tensors["weight_shape"].tolist() == [11, 256] and tensors["weight_shape"].dtype == torch.int64
    if name.endswith("asym"):
        assert tensors["weight_zero_point"].dtype == torch.int32
        assert tensors["weight_zero_point"].shape == (2, 256 // fmt.group_size)
    else:
        assert "weight_zero_point" not in tensors
    assert all(t.is_contiguous() for t in tensors.values())


@pytest.mark.parametrize("name", NAMES)
def test_packing_round_trips_codes_and_grid(name):
    fmt = formats.get(name)
    grid = fmt.grid(normal(13, 128, dtype=torch.bfloat16), search="mse")
    codes = torch.randint(0, 16, (13, 128), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    again, read = fmt.unpack(fmt.pack(codes, grid))
    assert torch.equal(again, codes) and torch.equal(read.step, grid.step)
    assert (read.zero is None) == (grid.zero is None)
    if grid.zero is not None:
        assert torch.equal(read.zero, grid.zero)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("search", ["none", "mse"])
def test_the_step_is_the_stored_scale_and_every_code_is_a_fixed_point(name, search):
    fmt = formats.get(name)
    grid = fmt.grid(normal(4, 128, dtype=torch.bfloat16), search=search)
    assert torch.equal(grid.stored["weight_scale"].float(), grid.step)
    codes = torch.arange(16, dtype=torch.uint8).repeat(8).expand(4, -1).unflatten(1, (-1, fmt.group_size))
    zero = None if grid.zero is None else grid.zero[..., None]
    values = fmt.value(codes, grid.step[..., None], zero)
    assert torch.equal(fmt.round(values, grid.step[..., None], zero), codes)
    assert torch.equal(fmt.fake_quantize(values, grid.step[..., None], zero), values)


def test_levels_round_half_to_even_and_saturate_at_minus_eight_and_seven():
    fmt = formats.get("int4-g32")
    x = torch.tensor([[-99.0, -8.5, -0.5, 0.5, 1.5, 2.5, 7.4, 99.0]])
    assert (fmt.round(x, torch.ones(1, 1)).int() - 8).tolist() == [[-8, -8, 0, 0, 2, 2, 7, 7]]


def test_the_standard_scales_are_amax_over_seven_and_a_half_and_range_over_fifteen():
    weight = torch.zeros(1, 32)
    weight[0, :2] = torch.tensor([-3.0, 1.5])
    assert formats.get("int4-g32").grid(weight).step.item() == pytest.approx(3 / 7.5)
    asymmetric = formats.get("int4-g32-asym").grid(weight)
    assert asymmetric.step.item() == pytest.approx(4.5 / 15) and asymmetric.zero.item() == 2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("search", ["none", "mse"])
def test_zero_groups_get_finite_positive_scales_and_decode_to_zero(name, search):
    fmt = formats.get(name)
    weight = normal(3, 256, dtype=torch.bfloat16)
    weight[1] = 0
    tensors = fmt.encode(weight, search=search)
    assert bool((tensors["weight_scale"][1] > 0).all()) and bool((tensors["weight_scale"] != 0).all())
    assert bool(tensors["weight_scale"].isfinite().all())
    assert bool((fmt.decode(tensors)[1] == 0).all()) and bool((fmt.decode(tensors)[0] != 0).any())


@pytest.mark.parametrize("name", NAMES)
def test_search_lowers_the_error_and_importance_directs_it(name):
    fmt = formats.get(name)
    weight = normal(32, 256, seed=2) * torch.rand(256, generator=torch.Generator().manual_seed(3)).square()
    importance = torch.rand(256, generator=torch.Generator().manual_seed(4)).pow(4) + 1e-4
    assert error(fmt, weight, search="mse") < 0.95 * error(fmt, weight, search="none")
    weighted = error(fmt, weight, importance, search="mse")
    unweighted = fmt.decode(fmt.encode(weight, search="mse")) - weight
    assert weighted < 0.95 * float((unweighted.square() * importance).sum())
    reversed_importance = fmt.decode(fmt.encode(weight, search="mse", importance=importance.flip(0))) - weight
    assert weighted < float((reversed_importance.square() * importance).sum())


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym"])
def test_search_is_never_worse_than_the_standard_rule_in_any_group(name):
    fmt = formats.get(name)
    weight = normal(64, 128, seed=5).pow(3)
    per_group = [
        (fmt.decode(fmt.encode(weight, search=s)) - weight).square().unflatten(1, (-1, 32)).sum(-1)
        for s in ("none", "mse")
    ]
    assert bool((per_group[1] <= per_group[0] * (1 + 1e-6)).all())


def test_search_comes_close_to_an_exhaustive_one_of_both_signs():
    fmt = formats.get("int4-g32")
    weight = normal(64, 32, seed=6)
    found = (fmt.decode(fmt.encode(weight, search="mse")) - weight).square().sum(1)
    ratios = torch.linspace(0.3, 1.3, 2001)
    scales = weight.abs().amax(1, keepdim=True) / 7.5 * torch.cat([ratios, -ratios])
    best = torch.stack([(fmt.fake_quantize(weight, s[:, None]) - weight).square().sum(1) for s in scales.T], 1).amin(1)
    assert float((found / best).mean()) < 1.01
    assert float((found / best).max()) < 1.2


def test_one_outlier_does_not_spoil_its_group_under_search():
    weight = normal(1, 64, seed=7) * 0.01
    weight[0, 5] = 0.08
    outlier_matters_little = torch.ones(64)
    outlier_matters_little[5] = 1e-6
    fmt = formats.get("int4-g64")
    others = torch.arange(64) != 5
    plain = (fmt.decode(fmt.encode(weight)) - weight)[0, others].square().sum()
    searched = (fmt.decode(fmt.encode(weight, search="mse", importance=outlier_matters_little)) - weight)[0, others]
    assert searched.square().sum() < 0.5 * plain


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_weights_are_refused(bad):
    weight = normal(4, 64)
    weight[2, 3] = bad
    for name in ("int4-g64", "int4-g64-asym"):
        with pytest.raises(CompressError, match="NaN or Inf in 1 of 4 groups"):
            formats.get(name).encode(weight)


def test_a_size_that_does_not_divide_is_refused_by_name_with_a_remedy():
    with pytest.raises(CompressError, match=r"layers\.0\.down: in_features 576 .* group of 128; .* groups of 64"):
        formats.get("int4-g128").check(576, "layers.0.down")
    with pytest.raises(CompressError, match="choose another format or add the layer"):
        formats.get("int4-g32").check(341, "x")
    formats.get("int4-g64").check(576, "x")


def test_damaged_tensors_are_refused():
    fmt = formats.get("int4-g32-asym")
    tensors = fmt.encode(normal(9, 64))
    for suffix in tensors:
        with pytest.raises(CompressError, match=f"{suffix} is missing"):
            fmt.decode({k: v for k, v in tensors.items() if k != suffix})
        wrong = {**tensors, suffix: tensors[suffix][:1].double()}
        with pytest.raises(CompressError, match=f"{suffix}: .* expected, found"):
            fmt.decode(wrong)
    with pytest.raises(CompressError, match="weight_scale: shape"):
        fmt.decode({**tensors, "weight_scale": tensors["weight_scale"][:, :1]})


def test_options_that_do_not_apply_are_refused():
    fmt = formats.get("int4-g32")
    with pytest.raises(CompressError, match="no global scale"):
        fmt.grid(normal(2, 32), global_scale=torch.ones(1))
    with pytest.raises(UsageError, match="scale_search: 'best' is not one of none, mse"):
        fmt.grid(normal(2, 32), search="best")
    with pytest.raises(UsageError, match="no rounded activations"):
        fmt.fake_quantize_activation(normal(2, 32))
    with pytest.raises(CompressError, match=r"float \[out, in\] weight"):
        fmt.grid(normal(2, 32)[0])
    assert fmt.global_scale([normal(2, 32)]) is None and fmt.activations_config() is None
    assert fmt.input_global_scale(1.0) is None
