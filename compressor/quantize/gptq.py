"""GPTQ (Frantar et al. 2022): round one input column at a time and let the columns not yet rounded absorb the error.

With H = Σ x xᵀ over the calibration inputs, rounding column j of W costs least when the remaining columns move by
−(w_j − q_j) / U_jj · U_j,: , where U is the upper Cholesky factor of H⁻¹ = Uᵀ U. Rows of W are independent, columns are
not. Here W is held transposed, [in, out]: a column of the weight is then one contiguous row.

The scales are fixed beforehand from the original weight, so columns may be taken in any order and the codes put back
where they belong ("static" activation order): no index tensor on disk, no cost at run time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CompressError, UsageError
from compressor.formats import Format, Grid

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

    Damping (0 counting as 1e-4) is multiplied by ten, at most three times, where even float64 finds no Cholesky factor.
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
    fraction = damping
    for _ in range(1 + _MAX_RETRIES):
        for precision in dict.fromkeys((dtype, torch.float64)):
            upper = _invert(permuted.to(precision), fraction * mean)
            if upper is not None:
                importance = (diagonal + fraction * mean).float()
                label = str(precision).removeprefix("torch.")
                return Factor(upper.to(dtype), columns, dead, importance.masked_fill_(dead, 0), fraction, label)
        fraction = max(fraction, 1e-4) * 10
    raise CompressError(
        f"{name}: the Hessian stays singular with damping {fraction / 10:g}; "
        "add calibration rows or raise quantization.damping"
    )


def _invert(reversed_hessian: Tensor, ridge: float) -> Tensor | None:
    """Upper U with H⁻¹ = Uᵀ U from the column-reversed H; None where H is not positive definite."""
    damped = reversed_hessian.clone()
    damped.diagonal().add_(ridge)
    lower, info = torch.linalg.cholesky_ex(damped)
    if int(info) != 0 or not bool((lower.diagonal() > 0).all()):
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
    steps = step.T.contiguous()
    zeros = None if zero is None else zero.T.contiguous()
    group_of = (order // (len(order) // step.shape[1])).tolist()
    scaled = u / u.diagonal()[:, None]
    result, errors = torch.empty_like(w), torch.empty_like(w)

    def sweep(start: int, end: int) -> None:
        """Round columns start … end − 1, which have absorbed the errors of all before them. Halving turns most of
        the updates into matrix products."""
        if end - start == 1:
            group = group_of[start]
            value = fmt.fake_quantize(w[start], steps[group], None if zeros is None else zeros[group])
            result[start] = value
            torch.sub(w[start], value, out=errors[start])
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


def pack_values(values: Tensor, fmt: Format, grid: Grid) -> dict[str, Tensor]:
    """Values that lie on `grid` [out, in] → tensors on disk by suffix."""
    zero = None if grid.zero is None else grid.zero[..., None]
    groups = values.unflatten(1, (grid.step.shape[1], -1))
    return fmt.pack(fmt.round(groups, grid.step[..., None], zero).flatten(1), grid)


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
    name: str = "weight",
) -> dict[str, Tensor]:
    """weight float [out, in], hessian float [in, in] (Σ x xᵀ up to a constant) → tensors on disk by suffix.

    damping: fraction of the mean diagonal added to the diagonal. order "static": columns with the largest diagonal
    first, "none": as they are. block_size: columns between two updates of the rest, no effect on the result beyond
    rounding. search: how the scales are chosen, see `Factor` for the weights. A float64 weight is solved in float64,
    any other in float32. Raises as `factorize` and `Format.grid` do.
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
    global_scale: Tensor | None,
    name: str,
) -> tuple[list[dict[str, Tensor]], dict]:
    """`gptq` of weights that read the same input, with one factorization and one sweep for all of them.

    Returns the tensors of each, and the damping that held, the precision of the factorization and the number of dead
    inputs.
    """
    dtype = torch.float64 if weights[0].dtype == torch.float64 else torch.float32
    factor = factorize(hessian, damping=damping, order=order, name=name, dtype=dtype)
    grids = [
        fmt.grid(w.masked_fill(factor.dead, 0), search=search, importance=factor.importance, global_scale=global_scale)
        for w in weights
    ]
    step = torch.cat([g.step for g in grids])
    zeros = [g.zero for g in grids if g.zero is not None]
    values = solve(torch.cat(weights), factor, fmt, step, torch.cat(zeros) if zeros else None, block_size=block_size)
    parts = values.split([len(w) for w in weights])
    stats = {"damping": factor.damping, "precision": factor.precision, "dead_inputs": int(factor.dead.sum())}
    return [pack_values(v, fmt, g) for v, g in zip(parts, grids, strict=True)], stats
