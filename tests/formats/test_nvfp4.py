"""NVFP4: block and global scales, underflow, scale search, 4-bit activations."""

import pytest
import torch

from compressor import formats
from compressor.errors import CompressError, UsageError
from compressor.formats.grids import E2M1


def normal(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def squared_error(fmt, weight, **options) -> torch.Tensor:
    return (fmt.decode(fmt.encode(weight, **options)) - weight).square().unflatten(1, (-1, 16)).sum(-1)


def test_tensors_on_disk_have_the_documented_dtypes_and_shapes():
    tensors = formats.get("nvfp4").encode(normal(7, 48).bfloat16())
    assert {k: (v.dtype, tuple(v.shape)) for k, v in tensors.items()} == {
        "weight_packed": (torch.uint8, (7, 24)),
        "weight_scale": (torch.float8_e4m3fn, (7, 3)),
        "weight_global_scale": (torch.float32, (1,)),
    }


@pytest.mark.parametrize("search", ["none", "mse"])
def test_codes_and_grid_round_trip_and_the_step_is_what_a_decoder_computes(search):
    fmt = formats.get("nvfp4")
    weight = normal(5, 64)
    grid = fmt.grid(weight, search=search)
    assert torch.equal(grid.step, grid.stored["weight_scale"].float() / grid.stored["weight_global_scale"])
    codes = torch.randint(0, 16, (5, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    again, read = fmt.unpack(fmt.pack(codes, grid))
    assert torch.equal(again, codes) and torch.equal(read.step, grid.step) and read.zero is None
    values = fmt.value(codes, grid.step.repeat_interleave(16, 1))
    assert torch.equal(fmt.fake_quantize(values, grid.step.repeat_interleave(16, 1)), values)


def test_encoding_what_was_decoded_changes_nothing():
    fmt = formats.get("nvfp4")
    weight = normal(8, 64, seed=2)
    weight[:, ::16] = 6 * weight.abs().amax()  # every block holds the largest level, so its scale is found again
    once = fmt.decode(fmt.encode(weight))
    assert torch.equal(fmt.decode(fmt.encode(once)), once) and not torch.equal(once, weight)


def test_fused_parts_share_the_smallest_multiplier():
    fmt = formats.get("nvfp4")
    small, large = normal(8, 32), 3 * normal(8, 32, seed=1)
    shared = fmt.global_scale([small, large])
    assert torch.equal(shared, fmt.global_scale([large])) and shared < fmt.global_scale([small])
    assert torch.equal(shared, 2688 / large.abs().amax().reshape(1))
    tensors = fmt.encode(small, global_scale=shared)
    assert torch.equal(tensors["weight_global_scale"], shared)
    together = squared_error(fmt, small, global_scale=shared).sum() / squared_error(fmt, small).sum()
    assert 0.8 < together < 1.25
    # reading a part with another part's multiplier is not a small error
    wrong = fmt.decode({**tensors, "weight_global_scale": fmt.global_scale([small])})
    assert (wrong - small).square().sum() > 10 * squared_error(fmt, small).sum()


@pytest.mark.parametrize("rule", ["compressed-tensors", "transformer-engine", "subnormal"])
@pytest.mark.parametrize("search", ["none", "mse"])
def test_searched_scales_stay_positive_and_at_most_448_under_a_foreign_multiplier(rule, search):
    fmt = formats.get("nvfp4", underflow=rule)
    weight = normal(8, 64, seed=3) * torch.logspace(-9, 0, 64)
    weight[3] = 0
    for factor in (1.0, 0.01, 50.0):
        scale = fmt.encode(weight, search=search, global_scale=fmt.global_scale([weight]) * factor)["weight_scale"]
        assert bool(scale.float().isfinite().all()) and float(scale.float().max()) <= 448
        assert bool((scale.float() > 0).all()) or (rule == "transformer-engine" and bool((scale.float() >= 0).all()))


@pytest.mark.parametrize("rule", ["compressed-tensors", "transformer-engine", "subnormal"])
def test_zero_tensors_and_single_outliers_stay_finite(rule):
    fmt = formats.get("nvfp4", underflow=rule)
    for search, tolerance in (("none", 1e-6), ("mse", 2**-6)):  # only the standard rule aims at the outlier
        zero = fmt.encode(torch.zeros(3, 32), search=search)
        assert zero["weight_global_scale"].item() == 1 and bool((fmt.decode(zero) == 0).all())
        outlier = torch.full((3, 32), 1e-6)
        outlier[1, 7] = 1e4
        decoded = fmt.decode(fmt.encode(outlier, search=search))
        assert bool(decoded.isfinite().all()) and decoded[1, 7] == pytest.approx(1e4, rel=tolerance)


def test_the_subnormal_rule_keeps_what_the_others_drop():
    weight = torch.zeros(1, 32)
    weight[0, 0] = 448 * 6.0
    weight[0, 16:] = 6 * 2.0**-11  # a quarter of the smallest E4M3 scale, times the largest element
    assert squared_error(formats.get("nvfp4", underflow="subnormal"), weight)[0, 1] == 0
    assert squared_error(formats.get("nvfp4"), weight)[0, 1] > 0
    # a search may move to the smallest scale by itself
    assert squared_error(formats.get("nvfp4"), weight, search="mse")[0, 1] == 0


def test_search_lowers_the_error_never_raises_it_in_a_block_and_obeys_importance():
    fmt = formats.get("nvfp4")
    weight = normal(64, 128, seed=4)
    shared = fmt.global_scale([weight], search="mse")
    none, found = (squared_error(fmt, weight, search=search, global_scale=shared) for search in ("none", "mse"))
    assert bool((found <= none).all()) and float(found.sum()) < 0.85 * float(none.sum())
    importance = torch.rand(128, generator=torch.Generator().manual_seed(5)).pow(6) + 1e-5

    def weighted(order):
        decoded = fmt.decode(fmt.encode(weight, search="mse", importance=order))
        return float(((decoded - weight).square() * importance).sum())

    assert weighted(importance) < 0.9 * weighted(None) < weighted(importance.flip(0))


def test_search_finds_the_scale_that_maps_the_largest_value_to_four():
    fmt = formats.get("nvfp4")
    weight = torch.tensor([4.0, 3.0, 2.0, 1.5, 1.0, 0.5, -3.0, -4.0]).repeat(2)[None]
    head = torch.full((1, 16), 0.0)
    head[0, 0] = 84.0  # makes the global scale 32: the step of 1 that fits these values exactly can be stored
    weight = torch.cat([head, weight], 1)
    assert squared_error(fmt, weight)[0, 1] > 0 and squared_error(fmt, weight, search="mse")[0, 1] == 0


def test_activations_are_rounded_block_by_block_as_the_engine_does():
    fmt = formats.get("nvfp4")
    x = normal(3, 5 * 32, seed=6).reshape(3, 5, 32).bfloat16()
    scale = fmt.input_global_scale(x.abs().amax())
    assert scale.shape == (1,) and scale.item() == pytest.approx(2688 / float(x.abs().amax()))
    rounded = fmt.fake_quantize_activation(x, scale)
    assert rounded.shape == x.shape and rounded.dtype == x.dtype
    block = x.float().reshape(-1, 16)
    stored = (block.abs().amax(1, keepdim=True) / 6 * scale).to(torch.float8_e4m3fn).float()
    expected = E2M1.decode(E2M1.encode(block / (stored / scale))) * (stored / scale)
    assert torch.equal(rounded.reshape(-1, 16), expected.bfloat16())
    # a far too small multiplier lets every block's scale underflow to zero
    assert bool((fmt.fake_quantize_activation(x, scale * 1e-9) == 0).all())
    with pytest.raises(CompressError, match="input_global_scale"):
        fmt.fake_quantize_activation(x)


@pytest.mark.parametrize("amax", [0.0, torch.inf, torch.nan, -1.0])
def test_an_unusable_activation_range_is_refused(amax):
    with pytest.raises(CompressError, match="was this layer ever calibrated"):
        formats.get("nvfp4").input_global_scale(amax)


def test_bad_input_is_refused():
    fmt = formats.get("nvfp4")
    weight = normal(4, 32)
    weight[0, 0] = torch.nan
    with pytest.raises(CompressError, match="NaN or Inf in 1 of 8 groups"):
        fmt.encode(weight)
    with pytest.raises(CompressError, match="NaN or Inf"):
        fmt.global_scale([weight])
    with pytest.raises(CompressError, match=r"q_proj: in_features 172 .* group of 16"):
        fmt.check(172, "q_proj")
    for scale in (0.0, -1.0, torch.nan):
        with pytest.raises(CompressError, match="not one positive finite number"):
            fmt.grid(normal(4, 32), global_scale=torch.tensor([scale]))
    with pytest.raises(UsageError, match="underflow: 'one' is not one of"):
        formats.get("nvfp4", underflow="one")
    tensors = fmt.encode(normal(4, 32))
    with pytest.raises(CompressError, match=r"weight_scale: .*float8_e4m3fn expected"):
        fmt.decode({**tensors, "weight_scale": tensors["weight_scale"].float()})
