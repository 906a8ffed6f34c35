"""Asymmetric calibration: the codes are those of the problem solved column by column, and the output error falls."""

import pytest
import torch

from compressor import formats
from compressor.errors import CompressError, UsageError
from compressor.quantize import gptq

FMT = formats.get("int4-g32")


def inputs(seed: int = 0, tokens: int = 512, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """X̃ and X, float64 [in, tokens]: the same input in the full-precision model and after quantized blocks."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(size, size // 4, generator=g)
    exact = mix @ torch.randn(size // 4, tokens, generator=g) + 0.5 * torch.randn(size, tokens, generator=g)
    # a part of the difference follows the input, as rounding errors do
    drift = 0.05 * torch.randn(size, size, generator=g) @ exact + 0.2 * torch.randn(size, tokens, generator=g)
    return exact.double(), (exact + drift).double()


def weight(outputs: int = 16, size: int = 64) -> torch.Tensor:
    return torch.randn(outputs, size, generator=torch.Generator().manual_seed(1)).double()


def column_by_column(w, exact, x, grid, damping: float = 0.01) -> torch.Tensor:
    """For every column in turn: the columns left at the minimum of ‖Q X − W X̃‖² + λ ‖Q − W‖² given those rounded, from
    its normal equations; then the first of them is rounded. Knows nothing of W'."""
    hessian = x @ x.T
    ridge = damping * hessian.diagonal().mean()
    damped = hessian + ridge * torch.eye(len(hessian))
    target = w @ exact @ x.T + ridge * w  # of Q (H + λ I)
    q, n = torch.zeros_like(w), w.shape[1]
    for column in range(n):
        rest = target[:, column:] - q[:, :column] @ damped[:column, column:]
        best = torch.linalg.solve(damped[column:, column:], rest.T).T[:, 0]
        q[:, column] = FMT.fake_quantize(best, grid.step[:, column // FMT.group_size])
    return q


def output_error(q: torch.Tensor, w: torch.Tensor, exact: torch.Tensor, x: torch.Tensor) -> float:
    return float((q.double() @ x - w @ exact).square().sum() / (w @ exact).square().sum())


def test_rounding_the_shifted_weight_is_the_column_by_column_solution():
    (exact, x), w = inputs(), weight()
    hessian, cross = x @ x.T, exact @ x.T
    for sign in (1, -1):
        tensors = gptq(w, hessian, FMT, cross=cross, order="none", search="none")
        against = exact if sign > 0 else 2 * x - exact  # negative control: the difference the other way round
        found = column_by_column(w, against, x, FMT.unpack(tensors)[1])
        rows = (found.float() == FMT.decode(tensors)).all(1).float().mean()
        assert rows == 1 if sign > 0 else rows < 0.5


def test_the_output_is_nearer_to_the_full_precision_one_in_every_format():
    (exact, x), w = inputs(), weight(64).bfloat16()
    hessian, cross = (x @ x.T).float(), (exact @ x.T).float()
    other = inputs(seed=7)[0]
    for name in ("int4-g32", "int4-g32-asym", "nvfp4", "mxfp4"):
        fmt = formats.get(name)

        def error(fmt=fmt, **options) -> float:
            return output_error(fmt.decode(gptq(w, hessian, fmt, **options)), w.double(), exact, x)

        assert error(cross=cross) < 0.9 * error()
        assert error(cross=cross) < error(cross=cross, strength=0.3) < error()
        assert error(cross=(other @ x.T).float()) > error()  # negative control: rows of another text


def test_equal_streams_and_no_strength_change_nothing():
    (exact, x), w = inputs(), weight().bfloat16()
    hessian = (x @ x.T).float()
    plain = gptq(w, hessian, FMT)
    same = gptq(w, hessian, FMT, cross=hessian.clone())
    off = gptq(w, hessian, FMT, cross=(exact @ x.T).float(), strength=0.0)
    on = gptq(w, hessian, FMT, cross=(exact @ x.T).float())
    assert all(torch.equal(plain[k], same[k]) and torch.equal(plain[k], off[k]) for k in plain)
    assert not torch.equal(plain["weight_packed"], on["weight_packed"])
    assert on["weight_scale"].dtype == torch.bfloat16


def test_an_input_dead_in_the_quantized_model_alone_still_counts_in_the_target():
    (exact, x), w = inputs(), weight()
    x[5] = 0
    tensors = gptq(w, x @ x.T, FMT, cross=exact @ x.T)
    decoded = FMT.decode(tensors)
    assert bool((decoded[:, 5] == 0).all())
    without = exact.clone()
    without[5] = 0  # negative control
    ignorant = FMT.decode(gptq(w, x @ x.T, FMT, cross=without @ x.T))
    assert output_error(decoded, w, exact, x) < output_error(ignorant, w, exact, x)


def test_what_cannot_be_used_is_refused_naming_the_layer():
    (exact, x), w = inputs(), weight()
    hessian, cross = x @ x.T, exact @ x.T
    with pytest.raises(CompressError, match=r"layers\.3\.q: the cross term must be finite and \[64, 64\], found \[32"):
        gptq(w, hessian, FMT, cross=cross[:32], name="layers.3.q")
    cross[3, 4] = torch.nan
    with pytest.raises(CompressError, match=r"layers\.3\.q: the cross term must be finite"):
        gptq(w, hessian, FMT, cross=cross, name="layers.3.q")
    for strength in (-0.1, 1.5, float("nan")):
        with pytest.raises(UsageError, match="strength"):
            gptq(w, hessian, FMT, cross=hessian, strength=strength)
