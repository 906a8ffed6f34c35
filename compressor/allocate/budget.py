"""What a group of linears takes in each candidate format, and whether a recipe's budget can hold them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from compressor import formats
from compressor.blocks import SelectedGroup
from compressor.bundle.contents import layout_bytes
from compressor.errors import UsageError
from compressor.recipe import Quantization

Shapes = Sequence[tuple[int, ...]]
"""[out, in] of the linears of a group."""
KEY = "quantization.allocation.bits_per_weight"


def variants(group: SelectedGroup, settings: Quantization) -> list[SelectedGroup]:
    """`group` in each format that it may get; without an allocation as it is."""
    if settings.allocation is None:
        return [group]
    return [replace(group, scheme=formats.scheme(*choice)) for choice in settings.candidates if choice is not None]


def sizes(shapes: Shapes, settings: Quantization, dtype: torch.dtype) -> list[int]:
    """Bytes of a group in each of `settings.candidates`: all that a bundle stores for its weights, scales and stored
    shapes included; unquantized in `dtype`, that of the model."""
    found = []
    for choice in settings.candidates:
        if choice is None:
            found.append(weights(shapes) * dtype.itemsize)
        else:
            scheme = formats.scheme(*choice)
            parts = [layout_bytes(scheme.fmt, (out, inputs), dtype, scheme.rounds_inputs) for out, inputs in shapes]
            found.append(sum(parts))
    return found


def weights(shapes: Shapes) -> int:
    """Number of weights of a group."""
    return sum(map(math.prod, shapes))


def allowed(bits_per_weight: float, count: int) -> int:
    """Whole bytes of a budget for `count` weights. Bits that are the float nearest to 8 · bytes / count give all those
    bytes, as a passport's `bits_per_weight` does."""
    return math.floor(bits_per_weight * count / 8 + 1e-3)


def cheapest(table: Sequence[Sequence[int]]) -> int:
    """Which candidate takes the fewest bytes over all groups; `table` has a row of `sizes` for each."""
    totals = [sum(column) for column in zip(*table, strict=True)]
    return totals.index(min(totals))


def check(settings: Quantization, groups: Sequence[Shapes], dtype: torch.dtype) -> int:
    """The bytes that the recipe's budget gives to `groups`.

    Raises UsageError, naming the key, for a budget that the smallest formats exceed, or that the largest do not fill:
    unless several have the most bits, of which one holds this group better and one that.
    """
    spec = settings.allocation
    assert spec is not None
    table, count = [sizes(shapes, settings, dtype) for shapes in groups], sum(map(weights, groups))
    budget = allowed(spec.bits_per_weight, count)
    least, most = (sum(map(extreme, table)) for extreme in (min, max))
    if budget < least:
        smallest = spec.formats[cheapest(table)]
        raise UsageError(
            f"{KEY}: {spec.bits_per_weight:g} is less than this model takes in {smallest}; set at least "
            f"{_rounded(8 * least / count, math.ceil):g}, or add a smaller format to quantization.allocation.formats"
        )
    bits = [formats.get(choice[0]).bits if choice else 8 * dtype.itemsize for choice in settings.candidates]
    if budget >= most and bits.count(max(bits)) == 1:
        raise UsageError(
            f"{KEY}: {spec.bits_per_weight:g} holds every linear in its largest format, so that nothing is left to "
            f"decide; set less than {_rounded(8 * most / count, math.floor):g}, or remove quantization.allocation"
        )
    return budget


def _rounded(bits: float, towards: Callable[[float], int]) -> float:
    """To 4 digits after the point, in the direction in which the bound still holds."""
    return towards(bits * 1e4) / 1e4
