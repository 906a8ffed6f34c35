"""GPTQ gives the codes of the algorithm that it accelerates: Optimal Brain Quantization with a fixed column order."""

import pytest
import torch

from compressor import formats
from compressor.quantize import gptq

LEVELS = {
    "int4": torch.arange(-8, 8).double(),
    "fp4": torch.tensor([sign * v for sign in (-1, 1) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]).double().unique(),
}
TIES = {"int4": 1e-9, "fp4": 1e-6}
"""Distance to the middle between two levels, in steps, within which either is right: FP4 rounds a float32 quotient."""
DAMPING = 0.01


def kind(name: str) -> str:
    return "int4" if name.startswith("int4") else "fp4"


def layer(outputs: int, inputs: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [out, in] and X Xᵀ of inputs with common directions and uneven magnitudes; float64."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, inputs // 8, generator=g).double() @ torch.randn(inputs // 8, inputs, generator=g).double()
    x = (x + torch.randn(1024, inputs, generator=g)) * torch.rand(inputs, generator=g).mul(2).exp()
    return torch.randn(outputs, inputs, generator=g).double(), x.T @ x


def gauss_jordan(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse by elimination, a pivot at a time; H is positive definite, so that no rows need be exchanged."""
    n = len(matrix)
    work = torch.cat([matrix.double(), torch.eye(n, dtype=torch.float64)], 1)
    for pivot in range(n):
        work[pivot] /= work[pivot, pivot].clone()
        factors = work[:, pivot].clone()
        factors[pivot] = 0
        work -= factors[:, None] * work[pivot]
    return work[:, n:]


def eliminate(inverse: torch.Tensor) -> torch.Tensor:
    """The inverse of H without its first row and column, from that of H: one step of Gaussian elimination."""
    return (inverse - inverse[:, :1] * inverse[:1] / inverse[0, 0])[1:, 1:]


def optimal_brain_quantization(weight, hessian, fmt, grid, order, *, damping=DAMPING, sign=-1.0):
    """The levels [out, in] that rounding column by column gives, and the ties met, bool [out, in].

    After a column is rounded, those left move by −(w − q) / [H⁻¹]₀₀ · [H⁻¹]₀,: with H of the columns left. Its inverse
    is the one before with the rounded column eliminated (Frantar et al. 2022, equations 2 and 3).
    """
    w, left = weight.clone(), order.tolist()
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    inverse = gauss_jordan(damped[left][:, left])
    table = LEVELS[kind(fmt.name)]
    levels, ties = torch.zeros_like(w), torch.zeros_like(w, dtype=torch.bool)
    while left:
        column, group = left[0], left[0] // fmt.group_size
        step = grid.step[:, group].double()
        zero = torch.zeros_like(step) if grid.zero is None else grid.zero[:, group].double()
        distance, nearest = (w[:, column] / step + zero)[:, None].sub(table).abs().topk(2, largest=False)
        ties[:, column] = distance[:, 1] - distance[:, 0] < 2 * TIES[kind(fmt.name)]
        levels[:, column] = table[nearest[:, 0]]
        error = (w[:, column] - (levels[:, column] - zero) * step) / inverse[0, 0]
        left = left[1:]
        w[:, left] += sign * error[:, None] * inverse[0, 1:]
        inverse = eliminate(inverse)
    return levels, ties


def levels_and_grid(tensors, fmt):
    """The level of every decoded weight, from its value."""
    grid = fmt.unpack(tensors)[1]
    step, zero = (
        None if x is None else x.double().repeat_interleave(fmt.group_size, 1) for x in (grid.step, grid.zero)
    )
    exact = fmt.decode(tensors).double() / step + (0 if zero is None else zero)
    table = LEVELS[kind(fmt.name)]
    distance, nearest = exact[..., None].sub(table).abs().min(-1)
    assert float(distance.max()) < 1e-5
    return table[nearest], grid


@pytest.mark.parametrize("order", ["static", "none"])
@pytest.mark.parametrize(
    ("name", "inputs"),
    [("int4-g32", 96), ("int4-g64", 128), ("int4-g32-asym", 64), ("int4-g64-asym", 128), ("nvfp4", 64), ("mxfp4", 64)],
)
def test_the_codes_are_those_of_optimal_brain_quantization(name, inputs, order):
    fmt = formats.get(name)
    weight, hessian = layer(16, inputs)
    ours, grid = levels_and_grid(gptq(weight, hessian, fmt, order=order, search="none", block_size=24), fmt)
    columns = torch.arange(inputs)
    if order == "static":
        columns = hessian.diagonal().argsort(descending=True, stable=True)
    expected, ties = optimal_brain_quantization(weight, hessian, fmt, grid, columns)
    determined = ~ties.any(1)
    # amax / 7.5 as the scale puts a row's most negative weight between −8 and −7, if no column before it moved it
    assert int(ties.sum()) <= (1 if name == "int4-g64" else 0)
    assert torch.equal(ours[determined], expected[determined])
    # negative controls: what a mistake of each kind would have given
    mistakes = [
        optimal_brain_quantization(weight, hessian, fmt, grid, columns, sign=1.0),
        optimal_brain_quantization(weight, hessian, fmt, grid, columns, sign=0.0),
        optimal_brain_quantization(weight, hessian, fmt, grid, columns, damping=0.0),
        optimal_brain_quantization(weight, hessian, fmt, grid, columns.flip(0)),
    ]
    for wrong, _ in mistakes:
        assert not torch.equal(ours[determined], wrong[determined])


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "nvfp4", "mxfp4"])
def test_only_rows_that_met_a_tie_may_differ(name):
    """A tie in the first column of every other row, and none elsewhere."""
    fmt = formats.get(name)
    weight, hessian = layer(16, 64, seed=1)
    weight[:, 1] = 6.0  # the same largest and smallest of the first group in every row, so that its step is known
    weight[:, 2] = -6.0
    _, grid = levels_and_grid(gptq(weight, hessian, fmt, order="none", search="none"), fmt)
    zero = 0.0 if grid.zero is None else grid.zero[::2, 0].double()
    middle = 2.5 if kind(name) == "fp4" else 1.5
    weight[::2, 0] = (middle - zero) * grid.step[::2, 0].double()
    tensors = gptq(weight, hessian, fmt, order="none", search="none")
    ours, grid = levels_and_grid(tensors, fmt)
    expected, ties = optimal_brain_quantization(weight, hessian, fmt, grid, torch.arange(64))
    assert ties.any(1).tolist() == [True, False] * 8 and bool(ties[::2, 0].all())
    assert torch.equal(ours[1::2], expected[1::2])


def test_elimination_gives_the_inverse_of_what_is_left():
    _, hessian = layer(1, 32)
    inverse = gauss_jordan(hessian)
    assert torch.allclose(inverse @ hessian, torch.eye(32, dtype=torch.float64), atol=1e-9)
    for first in range(1, 32):
        inverse = eliminate(inverse)
        assert torch.allclose(inverse, gauss_jordan(hessian[first:, first:]), rtol=1e-8, atol=1e-12)
