"""Choosing the scale of each group by the squared error it leaves, weighted by how much each input matters.

Every final candidate is judged with the scale as it will be stored and decoded. The search reads each weight some tens
of times, so rows are taken in chunks that stay in the processor's cache; chunks are independent and run on a few
threads. A chunk is also small enough for PyTorch not to split its operations, which would cost more than they do.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 15
# Multiples of the standard scale tried for an integer grid. Below 1 clips the largest values; up to 8/7 lets a
# largest value of either sign land on ±7 instead of between levels. As each is refitted, a finer comb gains nothing:
# 40 ratios left 0.1 % less error than these 14.
INTEGER_RATIOS = tuple(1.125 - 0.05 * i for i in range(14))
# For a grid of either sign: multiples of the standard scale, signed so that the largest value is on the longer side.
# Ratios below 0 put it on the shorter side, which pays where it matters little itself.
SIGNED_RATIOS = (
    *(0.975 - 0.05 * i for i in range(11)),
    *(-1.075, -1.025, -0.975, -0.925, -0.875, -0.825, -0.775, -0.7, -0.625, -0.55),
)
_TINY = torch.finfo(torch.float32).tiny

T = TypeVar("T")
IntegerGrid = tuple[Tensor, Tensor | None]  # step and zero [rows, groups], whole numbers in the latter


def group_importance(importance: Tensor | None, group_size: int) -> Tensor | None:
    """float [in] → float32 [in / group, group], scaled to mean 1 against under- and overflow; None if all zero."""
    if importance is None:
        return None
    h = importance.detach().float()
    mean = h.mean()
    return (h / mean).unflatten(0, (-1, group_size)) if bool(mean > 0) else None


def best_candidate(
    groups: Tensor,
    importance: Tensor | None,
    candidates: list[Tensor],
    step_of: Callable[[Tensor], Tensor],
    fake_quantize: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """For each group, the candidate scale with the least error; the earlier one where they tie.

    groups: float32 [out, G, group]; candidates: stored scales [out, G] each; step_of: stored → float32 step.
    """

    def search(rows: slice) -> Tensor:
        x = groups[rows]
        chosen = candidates[0][rows]
        least = _error(x, fake_quantize(x, step_of(chosen)[..., None]), importance)
        for candidate in candidates[1:]:
            stored = candidate[rows]
            error = _error(x, fake_quantize(x, step_of(stored)[..., None]), importance)
            better = error < least
            least = torch.where(better, error, least)
            chosen = torch.where(better, stored, chosen)
        return chosen

    return torch.cat(_for_rows(groups, search))


def best_integer_grid(
    groups: Tensor,
    importance: Tensor | None,
    grid: IntegerGrid,
    bounds: tuple[int, int],
    store: Callable[[Tensor], Tensor],
    ratios: Sequence[float] = INTEGER_RATIOS,
) -> IntegerGrid:
    """Scale (and zero point) of each group of an integer grid, starting from the standard one; [out, G] float32.
    With a negative ratio among `ratios`, scales may be negative (of a grid without zero points): see SIGNED_RATIOS.

    Each ratio (with each neighbouring zero point) fixes the codes; for given codes the best scale is a quotient, so a
    candidate is worth what its codes can reach, not what its own scale reaches. The winner's fitted scale, that scale
    fitted once more, and the standard one are then compared as `store` rounds them.
    """

    def search(rows: slice) -> IntegerGrid:
        x = groups[rows]
        step, zero = grid[0][rows], None if grid[1] is None else grid[1][rows]
        turned = torch.where(x.amax(-1) > -x.amin(-1), -step, step) if min(ratios) < 0 else step
        found = _fit_codes(x, importance, (turned, zero), bounds, ratios)
        once = (store(found[0]), found[1])
        twice = (store(_refit(x, importance, once, bounds)), once[1])
        least = _integer_error(x, importance, (step, zero), bounds)
        for candidate, candidate_zero in (once, twice):
            error = _integer_error(x, importance, (candidate, candidate_zero), bounds)
            better = (error < least) & (candidate != 0)
            least = torch.where(better, error, least)
            step = torch.where(better, candidate, step)
            if zero is not None and candidate_zero is not None:
                zero = torch.where(better, candidate_zero, zero)
        return step, zero

    steps, zeros = zip(*_for_rows(groups, search), strict=True)
    return torch.cat(steps), None if grid[1] is None else torch.cat(zeros)


def _for_rows(groups: Tensor, work: Callable[[slice], T]) -> list[T]:
    """work(slice) for consecutive chunks of rows of [out, G, group], in order."""
    rows = max(1, CHUNK_ELEMENTS // max(1, groups.shape[1] * groups.shape[2]))
    chunks = [slice(start, start + rows) for start in range(0, max(1, len(groups)), rows)]
    if len(chunks) == 1 or groups.device.type != "cpu":
        return [work(chunk) for chunk in chunks]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return list(pool.map(work, chunks))


def _error(x: Tensor, quantized: Tensor, importance: Tensor | None) -> Tensor:
    """Weighted squared error [rows, G] of `quantized` (overwritten) against x [rows, G, group]."""
    squared = quantized.sub_(x).square_()
    return (squared if importance is None else squared.mul_(importance)).sum(-1)


def _levels(x: Tensor, grid: IntegerGrid, bounds: tuple[int, int]) -> Tensor:
    """Multiples of the step, zero point taken off, that `x` [rows, G, group] rounds to."""
    levels = torch.div(x, grid[0][..., None])
    if grid[1] is None:
        return levels.round_().clamp_(*bounds)
    zero = grid[1][..., None]
    return levels.add_(zero).round_().clamp_(*bounds).sub_(zero)


def _integer_error(x: Tensor, h: Tensor | None, grid: IntegerGrid, bounds: tuple[int, int]) -> Tensor:
    return _error(x, _levels(x, grid, bounds).mul_(grid[0][..., None]), h)


def _moments(x: Tensor, h: Tensor | None, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Σ h·x·level and Σ h·level² of each group: their quotient is the best scale for these levels (overwritten)."""
    weighted = levels if h is None else levels * h
    cross = (weighted * x).sum(-1)
    return cross, (levels.square_() if h is None else weighted.mul_(levels)).sum(-1)


def _refit(x: Tensor, h: Tensor | None, grid: IntegerGrid, bounds: tuple[int, int]) -> Tensor:
    cross, energy = _moments(x, h, _levels(x, grid, bounds))
    return torch.where(energy > 0, cross / energy.clamp(min=_TINY), grid[0])


def _fit_codes(
    x: Tensor, h: Tensor | None, grid: IntegerGrid, bounds: tuple[int, int], ratios: Sequence[float]
) -> IntegerGrid:
    """The fitted scale and the zero point whose codes explain most of Σ h·x², the earlier where they tie."""
    tried = list(_candidates(x, grid, bounds, ratios))
    moments = [_moments(x, h, _levels(x, candidate, bounds)) for candidate in tried]
    # compared all at once: a comparison is little work, and costs as much to dispatch as a rounding
    cross, energy = (torch.stack(parts) for parts in zip(*moments, strict=True))
    gain = cross.square() / energy.clamp(min=_TINY)
    gain = torch.where(cross * torch.stack([step for step, _ in tried]) > 0, gain, 0).nan_to_num_(0, torch.inf)
    explained, best = gain.max(0, keepdim=True)
    found = explained[0] > 0

    def choose(values: Tensor, otherwise: Tensor) -> Tensor:
        return torch.where(found, values.gather(0, best)[0], otherwise)

    step = choose(cross / energy, grid[0])
    return step, None if grid[1] is None else choose(torch.stack([z for _, z in tried if z is not None]), grid[1])


def _candidates(
    x: Tensor, grid: IntegerGrid, bounds: tuple[int, int], ratios: Sequence[float]
) -> Iterator[IntegerGrid]:
    """The standard scale times each ratio; with zero points, each with the one that centres the range, and at every
    other ratio those beside it too: their optimum is as flat."""
    middle = None if grid[1] is None else (x.amax(-1) + x.amin(-1)) / 2
    for index, ratio in enumerate(ratios):
        step = grid[0] * ratio
        if middle is None:
            yield step, None
            continue
        centre = (sum(bounds) / 2 - middle / step).round_()
        for shift in (0, -1, 1) if index % 2 else (0,):
            yield step, (centre + shift).clamp_(*bounds)
