"""GPTQ (Frantar et al. 2022): round one input column at a time and let the columns not yet rounded absorb the error.

With H = Σ x xᵀ over the calibration inputs, rounding column j of W costs least when the remaining columns move by
−(w_j − q_j) / U_jj · U_j,: , where U is the upper Cholesky factor of H⁻¹ = Uᵀ U. Rows of W are independent, columns are
not. Here W is held transposed, [in, out]: a column of the weight is then one contiguous row.

The scales are fixed beforehand from the original weight, so columns may be taken in any order and the codes put back
where they belong ("static" activation order): no index tensor on disk, no cost at run time.

Asymmetric calibration (GPTAQ, Li et al. 2025, arXiv 2504.02692): earlier blocks are quantized already, so this layer
sees X where the original saw X̃. With C = X̃ Xᵀ, completing the square gives

    ‖Q X − W X̃‖² + λ ‖Q − W‖² = tr((Q − W') (H + λ I) (Q − W')ᵀ) + constant,   W' = W + W (C − H) (H + λ I)⁻¹.

Rounding W' as before therefore is the column-by-column solution: for given rounded columns, the optimum of the others
is that of one and the same quadratic. GPTAQ's own recursion spreads the term of column j, W_:,j (X̃_j − X_j), over the
columns after j, once j is reached, so that no column sees its own or a later one; here each is rounded with all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CompressError, UsageError
from compressor.formats import Format, Grid
from compressor.quantize.metrics import relative_output_error
from compressor.quantize.refit import refit as fit_scales
from compressor.quantize.refit import row_errors

ORDERS = ("static", "none")
_MAX_RETRIES = 3


@dataclass(frozen=True)
class Factor:
    """What GPTQ needs of a Hessian, computed once for all weights that read the same input.

    inverse: U [in, in] upper triangular with (P H Pᵀ + damping)⁻¹ = Uᵀ U; order: int64 [in], the columns as processed
    (P); dead: bool [in], inputs that were always zero; importance: float32 [in], the damped diagonal of H (0 for dead
    inputs), which weighs the scale search; damping: the fraction of the mean diagonal that was added; precision of the
    factorization: "float32" or "float64".

    GPTQ's own loss weighs column j by 1 / U_jj², its variance given the columns still free. Scales searched under those
    weights leave 8 % less error on the calibration rows but 20 % more KL on other text (SmolLM2-135M, INT4 in groups of
    64, WikiText-2): what one column owes to another's compensation does not carry over. Hence the whole variance.
    """

    inverse: Tensor
    order: Tensor
    dead: Tensor
    importance: Tensor
    damping: float
    precision: str


@torch.no_grad()
def factorize(
    hessian: Tensor, *, damping: float = 0.01, order: str = "static", name: str = "weight", dtype: torch.dtype
) -> Factor:
    """Damp, order and invert a Hessian (float [in, in], symmetric, Σ x xᵀ up to a constant) in `dtype` or float64.

    A Hessian of dependent inputs (duplicates, fewer tokens than inputs) is singular. As damping goes to zero its sweep
    has a limit: an input that those after it determine costs nothing to round, and its error moves into them by the
    regression of least norm. Where rounding hides a pivot from even float64, that limit is taken: damping by the root
    of the Hessian's epsilon, at which what damping and what rounding change are about the same. (It fits the inputs as
    well as the usual damping, not better.) Only a Hessian that fails there too, not being positive, has its
    damping (or 1e-4) multiplied by ten, at most three times. The damping and precision that held are in the result.
    Raises CompressError naming the layer for NaN, Inf, a wrong shape, an empty Hessian or one that stays singular;
    UsageError for the options.
    """
    if order not in ORDERS:
        raise UsageError(f"order: {order!r} is not one of {', '.join(ORDERS)}")
    if not damping >= 0:
        raise UsageError(f"damping: {damping} is negative; 0.01 is usual")
    if hessian.dim() != 2 or hessian.shape[0] != hessian.shape[1]:
        raise CompressError(f"{name}: the Hessian must be [in, in], found {[*hessian.shape]}")
    if not bool(hessian.isfinite().all()):
        raise CompressError(f"{name}: the Hessian holds NaN or Inf; check the calibration inputs of this layer")
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    if bool(dead.all()):
        raise CompressError(f"{name}: the Hessian is empty: no calibration input reached this layer")
    columns = torch.arange(len(dead), device=hessian.device)
    if order == "static":
        columns = torch.argsort(diagonal, descending=True, stable=True)
    # the factor of the column-reversed matrix, reversed back, is R upper with H = R Rᵀ: its inverse is U
    reverse = columns.flip(0)
    permuted = hessian[reverse][:, reverse]
    permuted.diagonal()[dead[reverse]] = 1
    mean = float(diagonal.double().mean())
    raised = [max(damping, 1e-4) * 10.0**power for power in range(1, _MAX_RETRIES + 1)]
    limit = torch.finfo(hessian.dtype).eps ** 0.5
    for fraction in (damping, *([limit] if damping < limit else []), *raised):
        for precision in dict.fromkeys((dtype, torch.float64)):
            upper = _invert(permuted.to(precision), fraction * mean)
            if upper is not None:
                importance = (diagonal + fraction * mean).float()
                label = str(precision).removeprefix("torch.")
                return Factor(upper.to(dtype), columns, dead, importance.masked_fill_(dead, 0), fraction, label)
    raise CompressError(
        f"{name}: the Hessian stays singular with damping {raised[-1]:g}; "
        "add calibration rows or raise quantization.damping"
    )


def _invert(reversed_hessian: Tensor, ridge: float) -> Tensor | None:
    """Upper U with H⁻¹ = Uᵀ U from the column-reversed H; None where H is not positive definite beyond rounding."""
    damped = reversed_hessian.clone()
    damped.diagonal().add_(ridge)
    lower, info = torch.linalg.cholesky_ex(damped)
    noise = 8 * torch.finfo(damped.dtype).eps * damped.diagonal()
    if int(info) != 0 or not bool((lower.diagonal().square() > noise).all()):
        return None
    identity = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    upper = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
    return upper if bool(upper.isfinite().all()) else None


@torch.no_grad()
def solve(
    weight: Tensor, factor: Factor, fmt: Format, step: Tensor, zero: Tensor | None, *, block_size: int = 128
) -> Tensor:
    """The quantized weight's values [out, in], in the factor's precision, for given grids [out, in / group]."""
    if block_size < 1:
        raise UsageError(f"block_size: {block_size} is not positive; 128 is usual")
    u, order = factor.inverse, factor.order
    w = weight.to(u.dtype).T[order].contiguous()
    w[factor.dead[order]] = 0
    steps = step.T.contiguous().unbind()
    zeros = None if zero is None else zero.T.contiguous().unbind()
    group_of = (order // (len(order) // step.shape[1])).tolist()
    scaled = u / u.diagonal()[:, None]
    result, errors = torch.empty_like(w), torch.empty_like(w)
    columns, values, left = w.unbind(), result.unbind(), errors.unbind()  # views, made once

    def sweep(start: int, end: int) -> None:
        """Round columns start … end − 1, which have absorbed the errors of all before them. Halving turns most of
        the updates into matrix products."""
        if end - start == 1:
            group = group_of[start]
            value = fmt.fake_quantize(columns[start], steps[group], None if zeros is None else zeros[group])
            values[start].copy_(value)
            torch.sub(columns[start], value, out=left[start])
            return
        middle = (start + end) // 2
        sweep(start, middle)
        w[middle:end].addmm_(scaled[start:middle, middle:end].T, errors[start:middle], alpha=-1)
        sweep(middle, end)

    for start in range(0, len(w), block_size):
        end = min(start + block_size, len(w))
        with _one_thread():
            sweep(start, end)
        w[end:].addmm_(scaled[start:end, end:].T, errors[start:end], alpha=-1)
    decoded = torch.empty_like(w)
    decoded[order] = result
    return decoded.T


@contextmanager
def _one_thread() -> Iterator[None]:
    """The thousands of small operations within a block finish sooner than threads could be woken for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def asymmetric_goals(
    weights: list[Tensor], factor: Factor, hessian: Tensor, cross: Tensor, strength: float, name: str
) -> list[Tensor]:
    """W' [out, in] of each weight in the factor's precision: see the module's text.

    cross: float [in, in], Σ x̃ xᵀ up to the Hessian's constant; strength scales W' − W. Raises CompressError for a cross
    term that is not finite or of another shape, UsageError for the strength.
    """
    if not 0 <= strength <= 1:
        raise UsageError(f"strength: {strength} is not between 0 and 1")
    if cross.shape != hessian.shape or not bool(cross.isfinite().all()):
        raise CompressError(f"{name}: the cross term must be finite and {[*hessian.shape]}, found {[*cross.shape]}")
    u, order = factor.inverse, factor.order
    difference = (cross - hessian).to(u.dtype)[:, order]
    goals = []
    for weight in weights:
        goal = weight.to(u.dtype, copy=True)
        goal[:, order] += strength * (goal @ difference @ u.T @ u)
        goals.append(goal)
    return goals


def _codes(values: Tensor, fmt: Format, grid: Grid) -> Tensor:
    """Codes [out, in] of values that lie on `grid`."""
    zero = None if grid.zero is None else grid.zero[..., None]
    return fmt.round(values.unflatten(1, (grid.step.shape[1], -1)), grid.step[..., None], zero).flatten(1)


def _refitted(
    goal: Tensor, values: Tensor, grid: Grid, fmt: Format, factor: Factor, damped: Tensor, search: str, block_size: int
) -> tuple[Tensor, Grid]:
    """Values and grid after scales fitted to the codes, a second sweep on those, and scales fitted to its codes; the
    second sweep where it leaves a row less error. The error of no row grows."""

    def fit(values: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        codes = _codes(values, fmt, grid)
        grid = fit_scales(goal, codes, grid, fmt, damped, search=search)
        return fmt.decode(fmt.pack(codes, grid)).to(goal.dtype), grid

    values, grid = fit(values, grid)
    again, other = fit(solve(goal, factor, fmt, grid.step, grid.zero, block_size=block_size), grid)
    better = (row_errors(goal, again, damped) < row_errors(goal, values, damped))[:, None]
    return torch.where(better, again, values), fmt.with_step(grid, torch.where(better, other.step, grid.step))


@torch.no_grad()
def gptq(
    weight: Tensor,
    hessian: Tensor,
    fmt: Format,
    *,
    damping: float = 0.01,
    order: str = "static",
    block_size: int = 128,
    search: str = "mse",
    global_scale: Tensor | None = None,
    cross: Tensor | None = None,
    strength: float = 1.0,
    refit: bool = False,
    name: str = "weight",
) -> dict[str, Tensor]:
    """weight float [out, in], hessian float [in, in] (Σ x xᵀ up to a constant) → tensors on disk by suffix.

    damping: fraction of the mean diagonal added to the diagonal. order "static": columns with the largest diagonal
    first, "none": as they are. block_size: columns between two updates of the rest, no effect on the result beyond
    rounding. search: how the scales are chosen, see `Factor` for the weights. cross, strength: asymmetric calibration,
    see `asymmetric_goals`. refit: fit the scales once more to the codes, under the damped Hessian. A float64 weight is
    solved in float64, any other in float32. Raises as `factorize`, `asymmetric_goals` and `Format.grid` do.
    """
    fmt.check(weight.shape[1], name)
    (tensors,), _ = gptq_together(
        [weight],
        hessian,
        fmt,
        damping=damping,
        order=order,
        block_size=block_size,
        search=search,
        global_scale=global_scale,
        cross=cross,
        strength=strength,
        refit=refit,
        name=name,
    )
    return tensors


@torch.no_grad()
def gptq_together(
    weights: list[Tensor],
    hessian: Tensor,
    fmt: Format,
    *,
    damping: float,
    order: str,
    block_size: int,
    search: str,
    global_scale: Tensor | None = None,
    fused: bool = False,
    cross: Tensor | None = None,
    strength: float = 1.0,
    refit: bool = False,
    name: str,
) -> tuple[list[dict[str, Tensor]], dict]:
    """`gptq` of weights that read the same input, with one factorization and one sweep for all of them.

    fused: engines concatenate them, so that a format's global scale, where none is given, is common to all.
    Returns the tensors of each, and the damping that held, the precision of the factorization and the number of dead
    inputs; with a cross term `shift`, tr(Δ H Δᵀ) / tr(W H Wᵀ) of Δ = W' − W; with refit `refitted_scales`, how many.
    """
    dtype = torch.float64 if weights[0].dtype == torch.float64 else torch.float32
    factor = factorize(hessian, damping=damping, order=order, name=name, dtype=dtype)
    stats = {"damping": factor.damping, "precision": factor.precision, "dead_inputs": int(factor.dead.sum())}
    goals = weights
    if cross is not None:
        goals = asymmetric_goals(weights, factor, hessian, cross, strength, name)
        stats["shift"] = relative_output_error(torch.cat(weights), torch.cat(goals), hessian)
    bases = [g.to(w.dtype).masked_fill(factor.dead, 0) for g, w in zip(goals, weights, strict=True)]
    if fused and global_scale is None:
        global_scale = fmt.global_scale(bases, search=search)
    grids = [fmt.grid(b, search=search, importance=factor.importance, global_scale=global_scale) for b in bases]
    step = torch.cat([g.step for g in grids])
    zeros = [g.zero for g in grids if g.zero is not None]
    values = solve(torch.cat(goals), factor, fmt, step, torch.cat(zeros) if zeros else None, block_size=block_size)
    parts = list(values.split([len(w) for w in weights]))
    if refit:
        damped = hessian.to(dtype, copy=True)
        damped.diagonal().copy_(factor.importance)
        clean = [g.to(dtype).masked_fill(factor.dead, 0) for g in goals]
        fitted = [
            _refitted(c, v, g, fmt, factor, damped, search, block_size)
            for c, v, g in zip(clean, parts, grids, strict=True)
        ]
        stats["refitted_scales"] = sum(int((f.step != g.step).sum()) for (_, f), g in zip(fitted, grids, strict=True))
        parts, grids = [v for v, _ in fitted], [f for _, f in fitted]
    return [fmt.pack(_codes(v, fmt, g), g) for v, g in zip(parts, grids, strict=True)], stats
