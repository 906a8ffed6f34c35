"""Scales fitted to codes that are already chosen.

With the levels q of a row fixed, the row's error (w − s∘q)ᵀ H (w − s∘q) is a quadratic in its group scales s, with the
matrix A = Q_gᵀ H Q_g' [G, G], where Q_g are the row's levels in group g. What can be stored is coarse (5 significant
bits, E4M3), so the minimum is sought among storable scales, one group after another: for a quadratic, the storable
scale nearest to the best one given all others is the best storable one. The error of no row can grow.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from compressor.formats import Format, Grid

_PASSES = 4
_COUPLING_ELEMENTS = 1 << 24


def row_errors(goal: Tensor, values: Tensor, hessian: Tensor) -> Tensor:
    """(w − v)ᵀ H (w − v) of every row: float [out]."""
    error = goal - values
    return (error @ hessian * error).sum(1)


@torch.no_grad()
def refit(goal: Tensor, codes: Tensor, grid: Grid, fmt: Format, hessian: Tensor, *, search: str) -> Grid:
    """`grid` with the scales that fit `codes` better.

    goal: float [out, in], what the codes stand for; codes: uint8 [out, in]; hessian: float [in, in] in goal's dtype, to
    be damped, for the undamped one fits the calibration rows too closely; search: how `grid` was chosen.
    """
    out, groups = grid.step.shape
    zero = None if grid.zero is None else grid.zero[..., None]
    levels = fmt.value(codes.unflatten(1, (groups, -1)), torch.ones(()), zero).to(goal.dtype)
    step = grid.step.clone()
    size = max(1, _COUPLING_ELEMENTS // groups**2)
    for first in range(0, out, size):
        rows = slice(first, min(first + size, out))
        _refit_rows(goal[rows], levels[rows], step[rows], hessian, lambda s: fmt.storable(s, grid, search=search))
    return fmt.with_step(grid, step)


def _refit_rows(goal: Tensor, levels: Tensor, step: Tensor, hessian: Tensor, store: Callable[[Tensor], Tensor]) -> None:
    """Coordinate descent on `step` [rows, G], in place. levels [rows, G, group]."""
    groups, size = levels.shape[1:]
    flat = levels.flatten(1)
    coupling = torch.stack(
        [
            (levels[:, g] @ hessian[g * size : (g + 1) * size] * flat).unflatten(1, (groups, size)).sum(-1)
            for g in range(groups)
        ]
    )  # [G, rows, G]
    error = goal - (levels * step[..., None]).flatten(1)
    slope = (error @ hessian * flat).unflatten(1, (groups, size)).sum(-1)
    for _ in range(_PASSES):
        changed = False
        for g in range(groups):
            curvature, old = coupling[g, :, g], step[:, g]
            best = old + slope[:, g] / curvature
            new = store(best.float())
            # a group of zeros has no curvature: its comparison with NaN is false
            same_sign = torch.where(old < 0, new < 0, new > 0)
            better = ((new - best).abs() < (old - best).abs()) & same_sign & (curvature > 0)
            change = torch.where(better, new - old, 0)
            step[:, g] = torch.where(better, new, old)
            slope -= coupling[g] * change[:, None].to(slope.dtype)
            changed |= bool(better.any())
        if not changed:
            return
