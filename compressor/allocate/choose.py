"""The choice itself: one option for each group, the least total loss under a budget of bytes. Numbers alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from compressor.errors import CompressError

Option = tuple[int, float]
"""(bytes, loss) of one way to store a group."""
_NOTHING = 1e-12
"""Of the largest loss: an exchange that saves less than this is no gain, and might go round in circles."""


@dataclass(frozen=True)
class Choice:
    """indices: the option of each group. bytes, loss: their sums. bound: no choice under the budget loses less. price:
    the loss that one more byte of budget would save, to first order; 0 where every gain fitted."""

    indices: tuple[int, ...]
    bytes: int
    loss: float
    bound: float
    price: float


def least_bytes(groups: Sequence[Sequence[Option]]) -> int:
    """What the smallest options take together."""
    return sum(min(size for size, _ in options) for options in groups)


def choose(groups: Sequence[Sequence[Option]], budget: int) -> Choice:
    """Choose for `groups`, each a list of options, under `budget` bytes.

    Every group begins at its smallest option and climbs along the lower convex hull of its (bytes, loss), the steepest
    step of all groups first: the Lagrangian solution (Shoham and Gersho, 1988). What the first step that does not fit
    leaves is then filled with smaller steps, and with exchanges of one or two groups' options while they gain.

    Raises CompressError for a budget below the smallest options, and for a loss that is not finite or below zero.
    """
    if not all(0 <= loss < float("inf") for options in groups for _, loss in options):
        raise CompressError("allocation: a loss is not finite or below zero")
    least = least_bytes(groups)
    if budget < least:
        raise CompressError(f"allocation: {budget} bytes are less than the {least} of the smallest options")
    hulls = [hull(options) for options in groups]
    indices = [corners[0] for corners in hulls]
    left, loss = budget - _bytes(groups, indices), _loss(groups, indices)
    bound, price = None, 0.0
    blocked: set[int] = set()  # groups whose next step did not fit: those after it would skip it
    for slope, group, step in sorted(_steps(groups, hulls)):
        size, gain = _difference(groups[group], hulls[group][step], hulls[group][step + 1])
        if group in blocked or size > left:
            blocked.add(group)
            if bound is None:  # all steeper steps are in: with a part of this one it would be the relaxed optimum
                bound, price = max(loss + slope * left, 0.0), -slope
            continue
        indices[group] = hulls[group][step + 1]
        left, loss = left - size, loss + gain
    _exchange(groups, indices, budget)
    loss = _loss(groups, indices)
    return Choice(tuple(indices), _bytes(groups, indices), loss, loss if bound is None else min(loss, bound), price)


def hull(options: Sequence[Option]) -> list[int]:
    """The corners of the lower convex hull of (bytes, loss), smallest first, up to the least loss: indices."""
    corners: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: options[i]):
        size, loss = options[index]
        if corners and loss >= options[corners[-1]][1]:
            continue  # more bytes for no less loss
        while len(corners) > 1:
            (size0, loss0), (size1, loss1) = (options[corner] for corner in corners[-2:])
            if (loss1 - loss0) * (size - size1) < (loss - loss1) * (size1 - size0):
                break
            corners.pop()
        corners.append(index)
    return corners


def _steps(groups: Sequence[Sequence[Option]], hulls: Sequence[list[int]]) -> Iterator[tuple[float, int, int]]:
    """(loss a byte, group, which step) of every step along every hull; along one hull they rise."""
    for group, corners in enumerate(hulls):
        for step in range(len(corners) - 1):
            size, gain = _difference(groups[group], corners[step], corners[step + 1])
            yield gain / size, group, step


def _difference(options: Sequence[Option], before: int, after: int) -> Option:
    return options[after][0] - options[before][0], options[after][1] - options[before][1]


def _bytes(groups: Sequence[Sequence[Option]], indices: Sequence[int]) -> int:
    return sum(options[index][0] for options, index in zip(groups, indices, strict=True))


def _loss(groups: Sequence[Sequence[Option]], indices: Sequence[int]) -> float:
    return sum(options[index][1] for options, index in zip(groups, indices, strict=True))


def _exchange(groups: Sequence[Sequence[Option]], indices: list[int], budget: int) -> None:
    """Change the options of one or two groups at a time, the best such change first, while that lessens the loss."""
    tolerance = _NOTHING * max((loss for options in groups for _, loss in options), default=0.0)
    while True:
        moves = [(-1, 0, 0, 0.0)]  # beside any other move this one makes a change of one group
        for group, options in enumerate(groups):
            for index in range(len(options)):
                if index != indices[group]:
                    moves.append((group, index, *_difference(options, indices[group], index)))
        owner, sizes = (torch.tensor([move[place] for move in moves]) for place in (0, 2))
        losses = torch.tensor([move[3] for move in moves], dtype=torch.float64)
        total = losses + losses[:, None]
        total[(sizes + sizes[:, None] > budget - _bytes(groups, indices)) | (owner == owner[:, None])] = float("inf")
        best = int(total.argmin())
        if not float(total.flatten()[best]) < -tolerance:
            return
        for group, index, _, _ in (moves[best // len(moves)], moves[best % len(moves)]):
            if group >= 0:
                indices[group] = index
