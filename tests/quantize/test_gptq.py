"""GPTQ against rounding to nearest, and at its edges. Its codes are proved in test_gptq_reference."""

import pytest
import torch

from compressor import formats
from compressor.errors import CompressError, UsageError
from compressor.quantize import gptq, quantize_shared, rtn
from compressor.quantize.gptq import factorize, solve
from compressor.quantize.metrics import relative_output_error


def correlated(inputs: int, rows: int = 2048, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Σ x xᵀ of inputs with a few strong directions and uneven magnitudes, as transformer activations have."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs // 8, generator=g) @ torch.randn(inputs // 8, inputs, generator=g)
    x = (x + torch.randn(rows, inputs, generator=g)) * torch.rand(inputs, generator=g).mul(2).exp()
    return (x.T.to(dtype) @ x.to(dtype)) / rows


def normal(rows: int, cols: int, seed: int = 1, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("name", formats.names())
def test_the_output_error_is_below_that_of_rounding_in_every_format(name):
    fmt = formats.get(name)
    weight, hessian = normal(96, 256), correlated(256)
    for search in ("none", "mse"):
        rounded = rtn(weight, fmt, search=search, importance=hessian.diagonal())
        solved = gptq(weight, hessian, fmt, search=search)
        ratio = relative_output_error(weight, fmt.decode(solved), hessian) / relative_output_error(
            weight, fmt.decode(rounded), hessian
        )
        assert ratio < 0.7
        assert {k: (v.dtype, v.shape) for k, v in solved.items()} == {k: (v.dtype, v.shape) for k, v in rounded.items()}


def test_a_search_lowers_the_error_further_and_static_order_beats_none():
    weight, hessian = normal(96, 256, seed=3), correlated(256, seed=4)
    for name in ("int4-g64", "nvfp4", "mxfp4"):
        fmt = formats.get(name)

        def error(fmt=fmt, **options) -> float:
            return relative_output_error(weight, fmt.decode(gptq(weight, hessian, fmt, **options)), hessian)

        assert error() < error(search="none")
        assert error() < 0.5 * error(order="none")


def test_a_hessian_of_other_columns_is_worse_than_the_right_one():
    fmt, weight, hessian = formats.get("int4-g64"), normal(64, 128), correlated(128)
    right = relative_output_error(weight, fmt.decode(gptq(weight, hessian, fmt)), hessian)
    shuffle = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    wrong = fmt.decode(gptq(weight, hessian[shuffle][:, shuffle], fmt))
    assert relative_output_error(weight, wrong, hessian) > 2 * right
    # the columns themselves in another order: not the same layer any more
    misplaced = fmt.decode(gptq(weight, hessian, fmt))[:, shuffle]
    assert relative_output_error(weight, misplaced, hessian) > 0.5


def test_uncorrelated_inputs_leave_nothing_to_compensate():
    weight = normal(16, 64)
    for name in ("int4-g32", "nvfp4", "mxfp4"):
        fmt = formats.get(name)
        solved, rounded = gptq(weight, torch.eye(64), fmt, search="none"), rtn(weight, fmt, search="none")
        assert torch.equal(fmt.decode(solved), fmt.decode(rounded))
        solved = gptq(weight, correlated(64), fmt, search="none")
        assert not torch.equal(fmt.decode(solved), fmt.decode(rounded))


def test_block_size_and_the_scale_of_the_hessian_do_not_change_the_codes():
    fmt, weight, hessian = formats.get("int4-g32"), normal(24, 96).double(), correlated(96).double()
    reference = gptq(weight, hessian, fmt)
    for block_size in (1, 7, 96, 1000):
        other = gptq(weight, hessian, fmt, block_size=block_size)
        assert torch.equal(other["weight_packed"], reference["weight_packed"])
    assert torch.equal(gptq(weight, hessian * 1024, fmt)["weight_packed"], reference["weight_packed"])
    assert not torch.equal(gptq(weight, hessian, fmt, damping=1.0)["weight_packed"], reference["weight_packed"])


def test_float32_and_float64_nearly_agree():
    fmt, weight, hessian = formats.get("nvfp4"), normal(64, 128), correlated(128)
    a, b = fmt.decode(gptq(weight, hessian, fmt)), fmt.decode(gptq(weight.double(), hessian.double(), fmt))
    assert float((a != b).float().mean()) < 0.02
    errors = [relative_output_error(weight, d, hessian) for d in (a, b)]
    assert errors[0] == pytest.approx(errors[1], rel=0.02)


def test_the_result_repeats_bit_for_bit_and_inputs_are_not_touched():
    fmt, weight, hessian = formats.get("int4-g64"), normal(48, 128).bfloat16(), correlated(128)
    kept = weight.clone(), hessian.clone()
    first, second = gptq(weight, hessian, fmt), gptq(weight, hessian, fmt)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert torch.equal(weight, kept[0]) and torch.equal(hessian, kept[1])
    assert first["weight_scale"].dtype == torch.bfloat16


def test_dead_inputs_become_zero_columns_and_leave_the_others_as_they_were():
    fmt, weight, hessian = formats.get("int4-g32"), normal(16, 96).double(), correlated(96).double()
    dead = torch.zeros(96, dtype=torch.bool)
    dead[64:] = True
    hessian[dead] = 0
    hessian[:, dead] = 0
    decoded = fmt.decode(gptq(weight, hessian, fmt, damping=0.0, search="none"))
    assert bool((decoded[:, dead] == 0).all()) and bool(decoded.isfinite().all())
    alone = fmt.decode(gptq(weight[:, :64], hessian[:64, :64], fmt, damping=0.0, search="none"))
    assert torch.equal(decoded[:, :64], alone)
    factor = factorize(hessian, dtype=torch.float64)
    assert torch.equal(factor.dead, dead) and bool((factor.importance[dead] == 0).all())


def test_the_factor_inverts_the_ordered_hessian_and_its_diagonal_is_the_conditional_variance():
    hessian = correlated(64).double()
    factor = factorize(hessian, damping=0.0, dtype=torch.float64)
    u, order = factor.inverse, factor.order
    assert torch.equal(u, u.triu())
    identity = u.T @ u @ hessian[order][:, order]
    assert torch.allclose(identity, torch.eye(64, dtype=torch.float64), atol=1e-8)
    left = order[40:]  # when column order[40] is rounded, these are still free
    variance = 1 / torch.linalg.inv(hessian[left][:, left])[0, 0]
    assert float(u[40, 40]) ** -2 == pytest.approx(float(variance), rel=1e-5)


def rank_deficient(kind: str) -> torch.Tensor:
    """Inputs [tokens, 64], float64, on a subspace: fewer tokens than inputs, or inputs that repeat and add others."""
    if kind == "few tokens":
        return normal(24, 64, seed=5).double()
    x = normal(512, 64, seed=6).double()
    x[:, 40:50] = x[:, :10]
    x[:, 50] = x[:, 3] - 2 * x[:, 7]
    return x


@pytest.mark.parametrize("kind", ["few tokens", "duplicates"])
def test_without_damping_a_singular_hessian_is_swept_as_in_the_limit(kind):
    """What a column's error moves into those left is the regression of least norm, which the pseudo-inverse gives."""
    x = rank_deficient(kind)
    hessian = x.T @ x
    factor = factorize(hessian, damping=0.0, order="none", dtype=torch.float64)
    assert factor.damping == torch.finfo(torch.float64).eps ** 0.5 and factor.precision == "float64"
    u = factor.inverse / factor.inverse.diagonal()[:, None]
    for column in range(63):
        rest = slice(column + 1, 64)
        limit = -torch.linalg.pinv(hessian[rest, rest], hermitian=True, rtol=1e-10) @ hessian[rest, column]
        assert float((u[column, rest] - limit).norm()) < 1e-4 * max(1.0, float(limit.norm()))
        damped = factorize(hessian, damping=0.01, order="none", dtype=torch.float64).inverse  # negative control
    assert float((u - damped / damped.diagonal()[:, None]).norm()) > 1e-2 * float(u.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["few tokens", "duplicates"])
@pytest.mark.parametrize("name", ["int4-g32", "nvfp4", "mxfp4"])
def test_the_limit_fits_dependent_inputs_as_well_as_damping_and_is_reported(kind, name, dtype):
    fmt, x = formats.get(name), rank_deficient(kind)
    hessian, weight = (x.T @ x).to(dtype), normal(48, 64).to(dtype)
    limit, damped = (
        quantize_shared([weight], fmt, method="gptq", names=["q"], hessian=hessian, search="none", damping=damping)[0]
        for damping in (0.0, 0.01)
    )
    rounded = quantize_shared([weight], fmt, method="rtn", names=["q"], hessian=hessian, search="none")[0]
    assert limit.error < 1.2 * damped.error < (0.3 if kind == "few tokens" else 1.0) * rounded.error
    assert limit.stats["damping"] == torch.finfo(dtype).eps ** 0.5 and damped.stats["damping"] == 0.01
    regular = correlated(64, dtype=dtype)  # negative control: nothing to report
    other = quantize_shared([weight], fmt, method="gptq", names=["q"], hessian=regular, damping=0.0)[0]
    assert other.stats["damping"] == 0.0


def test_pivots_that_are_rounding_noise_are_not_divided_by():
    """A duplicate's last pivot is zero but for rounding; taken for a number, it would move errors a million times."""
    x = rank_deficient("duplicates")
    for dtype in (torch.float32, torch.float64):
        u = factorize((x.T @ x).to(dtype), damping=0.0, dtype=dtype).inverse
        assert float((u / u.diagonal()[:, None]).abs().max()) < 10
    noise = torch.linalg.cholesky_ex(x.T @ x)[0].diagonal()  # negative control
    assert float((noise.max() / noise.abs().min()).nan_to_num(torch.inf)) > 1e6


def test_a_hessian_that_is_not_positive_has_its_damping_raised_and_says_so():
    hessian = correlated(32).double()
    values, vectors = torch.linalg.eigh(hessian)
    values[0] = -1e-3 * values.mean()
    factor = factorize(vectors * values @ vectors.T, damping=0.0, dtype=torch.float64)
    assert factor.damping in (1e-3, 1e-2)


def test_what_cannot_be_solved_is_refused_naming_the_layer():
    fmt, weight, good = formats.get("int4-g32"), normal(4, 32), correlated(32)
    indefinite = torch.full((32, 32), 100.0)
    indefinite.fill_diagonal_(1.0)
    cases = [
        (indefinite, "layers.3.q: the Hessian stays singular with damping 10; add calibration rows"),
        (torch.zeros(32, 32), "layers.3.q: the Hessian is empty"),
        (good.clone().index_put_((torch.tensor(1), torch.tensor(2)), torch.tensor(torch.nan)), "layers.3.q: .*NaN"),
        (good[:16], r"layers.3.q: the Hessian must be \[in, in\]"),
    ]
    for hessian, message in cases:
        with pytest.raises(CompressError, match=message):
            gptq(weight, hessian, fmt, name="layers.3.q")
    with pytest.raises(CompressError, match=r"layers\.3\.q: in_features 48"):
        gptq(normal(4, 48), correlated(48), fmt, name="layers.3.q")
    weight[0, 0] = torch.nan
    with pytest.raises(CompressError, match="NaN or Inf in 1 of 4 groups"):
        gptq(weight, good, fmt)


def test_bad_options_are_refused():
    fmt, weight, hessian = formats.get("int4-g32"), normal(4, 32), correlated(32)
    with pytest.raises(UsageError, match="order: 'group' is not one of static, none"):
        gptq(weight, hessian, fmt, order="group")
    for damping in (-0.1, float("nan")):
        with pytest.raises(UsageError, match="damping"):
            gptq(weight, hessian, fmt, damping=damping)
    with pytest.raises(UsageError, match="block_size: 0"):
        gptq(weight, hessian, fmt, block_size=0)


def test_threads_are_left_as_they_were_found():
    before = torch.get_num_threads()
    fmt, factor = formats.get("int4-g32"), factorize(correlated(64), dtype=torch.float32)
    solve(normal(4, 64), factor, fmt, torch.ones(4, 2), None)
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError):
        solve(normal(4, 64), factor, fmt, torch.ones(3, 2), None)
    assert torch.get_num_threads() == before
