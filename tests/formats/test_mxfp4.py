"""MXFP4: power-of-two scales, exponent rules, scale search, 4-bit activations."""

import pytest
import torch

from compressor import formats
from compressor.errors import CompressError, UsageError


def normal(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def squared_error(fmt, weight, **options) -> torch.Tensor:
    return (fmt.decode(fmt.encode(weight, **options)) - weight).square().unflatten(1, (-1, 32)).sum(-1)


def test_tensors_on_disk_have_the_documented_dtypes_and_shapes():
    tensors = formats.get("mxfp4").encode(normal(7, 96).bfloat16())
    assert {k: (v.dtype, tuple(v.shape)) for k, v in tensors.items()} == {
        "weight_packed": (torch.uint8, (7, 48)),
        "weight_scale": (torch.uint8, (7, 3)),
    }


@pytest.mark.parametrize("rule", ["floor", "round", "ceil"])
def test_each_exponent_rule_round_trips_and_treats_the_largest_value_as_it_says(rule):
    fmt = formats.get("mxfp4", exponent_rule=rule)
    weight = normal(64, 64)
    grid = fmt.grid(weight)
    largest = weight.unflatten(1, (-1, 32)).abs().amax(-1) / grid.step
    top = {"floor": 8.0, "round": 7.0, "ceil": 6.0}[rule]
    assert bool((largest >= top / 2).all()) and bool((largest <= top).all()) and float(largest.max()) > 0.9 * top
    codes = torch.randint(0, 16, (64, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    again, read = fmt.unpack(fmt.pack(codes, grid))
    assert torch.equal(again, codes) and torch.equal(read.step, grid.step)
    assert torch.equal(torch.frexp(grid.step).mantissa, torch.full_like(grid.step, 0.5))


def test_search_takes_the_best_exponent_of_each_block_whatever_the_rule():
    weight = normal(64, 128, seed=2)
    plain = {rule: squared_error(formats.get("mxfp4", exponent_rule=rule), weight) for rule in ("floor", "ceil")}
    for rule, errors in plain.items():
        found = squared_error(formats.get("mxfp4", exponent_rule=rule), weight, search="mse")
        assert bool((found <= torch.minimum(plain["floor"], plain["ceil"])).all())
        assert float(found.sum()) < 0.98 * float(errors.sum())


def test_importance_directs_the_search():
    fmt = formats.get("mxfp4")
    weight = normal(64, 128, seed=3)
    importance = torch.rand(128, generator=torch.Generator().manual_seed(4)).pow(6) + 1e-5

    def weighted(order):
        decoded = fmt.decode(fmt.encode(weight, search="mse", importance=order))
        return float(((decoded - weight).square() * importance).sum())

    assert weighted(importance) < weighted(None) and weighted(importance) < weighted(importance.flip(0))


@pytest.mark.parametrize("search", ["none", "mse"])
def test_zero_blocks_get_a_positive_scale(search):
    fmt = formats.get("mxfp4")
    grid = fmt.grid(torch.zeros(2, 64), search=search)
    assert bool((grid.step > 0).all()) and bool(grid.step.isfinite().all())
    assert bool((fmt.decode(fmt.encode(torch.zeros(2, 64), search=search)) == 0).all())


def test_extreme_magnitudes_stay_finite():
    fmt = formats.get("mxfp4")
    weight = torch.stack([torch.full((32,), v) for v in (1e-44, 1e-38, 3e38)])
    decoded = fmt.decode(fmt.encode(weight, search="mse"))
    assert bool(decoded.isfinite().all()) and decoded[2, 0] == pytest.approx(3e38, rel=0.3)


def test_activations_use_the_rounding_rule_of_the_engines():
    fmt = formats.get("mxfp4")
    x = normal(4, 64, seed=5).bfloat16()
    rounded = fmt.fake_quantize_activation(x)
    engine = formats.get("mxfp4", exponent_rule="round")
    assert rounded.dtype == x.dtype and torch.equal(rounded, engine.decode(engine.encode(x)).bfloat16())
    assert not torch.equal(rounded, fmt.decode(fmt.encode(x)).bfloat16())
    assert bool((fmt.fake_quantize_activation(torch.zeros(2, 32)) == 0).all())
    assert fmt.input_global_scale(1.0) is None and fmt.global_scale([x]) is None


def test_bad_input_is_refused():
    fmt = formats.get("mxfp4")
    weight = normal(4, 32)
    weight[0, 0] = torch.inf
    with pytest.raises(CompressError, match="NaN or Inf in 1 of 4 groups"):
        fmt.encode(weight)
    with pytest.raises(CompressError, match=r"w2: in_features 48 .* group of 32; choose a format with groups of 16"):
        fmt.check(48, "w2")
    with pytest.raises(CompressError, match="no global scale"):
        fmt.grid(normal(4, 32), global_scale=torch.ones(1))
    with pytest.raises(UsageError, match="exponent_rule"):
        formats.get("mxfp4", exponent_rule="nearest")
    tensors = fmt.encode(normal(4, 64))
    with pytest.raises(CompressError, match="weight_scale: shape"):
        fmt.decode({**tensors, "weight_scale": tensors["weight_scale"][:, :1]})
