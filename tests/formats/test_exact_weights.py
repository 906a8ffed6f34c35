"""With a scale search every weight is exact in bfloat16: engines that decode to it run the numbers that were chosen."""

import pytest
import torch

from compressor import formats
from compressor.formats.grids import significant


def weight() -> torch.Tensor:
    return (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.037).bfloat16()


def is_exact(name: str, search: str) -> bool:
    fmt = formats.get(name)
    decoded = fmt.decode(fmt.encode(weight(), search=search))
    return torch.equal(decoded.bfloat16().float(), decoded)


@pytest.mark.parametrize("name", ["int4-g32", "int4-g64", "int4-g128", "nvfp4", "mxfp4", "fp8", "fp8-block128"])
def test_searched_weights_are_exact_in_bfloat16(name):
    assert is_exact(name, "mse")


@pytest.mark.parametrize("name", ["int4-g64", "nvfp4", "fp8", "fp8-block128"])
def test_the_standard_rules_do_not_give_that(name):
    assert not is_exact(name, "none")


def test_exactness_costs_less_than_three_percent_of_squared_error():
    fmt, exact = formats.get("int4-g64"), weight()
    free = exact.float()  # float32 scales are not restricted

    def error(w):
        return (fmt.decode(fmt.encode(w, search="mse")) - free).square().sum().item()

    assert error(free) < error(exact) < 1.03 * error(free)


@pytest.mark.parametrize("x", [1.0, 31.0, 33.0, 35.0, 1.03125, -0.1, 0.0, 1e-40, 3e38])
def test_rounding_to_significant_bits_is_to_nearest_even(x):
    value = torch.tensor(x)
    rounded = significant(value, 5).item()
    exponent = torch.frexp(value).exponent.item()
    ulp = 2.0 ** (exponent - 5)
    expected = round(value.item() / ulp) * ulp  # Python rounds ties to even
    assert rounded == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("magnitude", [1e-36, 1e-38, 1e-39, 1e-40])
def test_the_step_is_the_stored_scale_even_where_bfloat16_is_subnormal(magnitude):
    fmt = formats.get("int4-g64")
    grid = fmt.grid((weight().float() / 0.037 * magnitude).bfloat16(), search="mse")
    assert bool((grid.step != 0).all()) and torch.equal(grid.stored["weight_scale"].float(), grid.step)
