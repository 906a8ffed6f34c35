"""KL of a model with one group of linears rounded, for every group and format, from the block that differs on."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from compressor import blocks, formats
from compressor.blocks import InputStatistics, SelectedGroup
from compressor.distill.loss import kls
from compressor.errors import CompressError
from compressor.models.skeleton import emulate_activations
from compressor.models.stream import BlockStream
from compressor.quantize import quantize_shared
from compressor.quantize.metrics import output_energy
from compressor.ui import UI

Candidate = tuple[str, str] | None
"""(format, activations); None: unquantized."""
MEASURED, PREDICTED, EXACT = "measured", "predicted", "exact"
FORMULA = "KL(cheapest) · error(format) / error(cheapest)"
"""Of a predicted KL, which grows with the square of a small change of the outputs, as the error does."""


@dataclass(frozen=True)
class Cost:
    """kl: KL(original ‖ original with one group in this format), nats a token, mean over the rows. known: `MEASURED`,
    `PREDICTED` from the cheapest format's by `FORMULA`, or `EXACT` where nothing is rounded. error: tr(E H Eᵀ) of the
    rounded weights, summed over the group's linears, H of the same rows; 0 where nothing is rounded."""

    kl: float
    known: str
    error: float


@dataclass(frozen=True)
class Probe:
    """What is measured. candidates: the formats. cheapest: which of them is always measured. everything: so are all
    others. search: how scales are found. dtype: of the bundle. batch_size: rows run together."""

    candidates: Sequence[Candidate]
    cheapest: int
    everything: bool
    search: str
    dtype: torch.dtype
    batch_size: int

    def measures(self, place: int) -> bool:
        """Whether the KL of a candidate is measured. It must be where inputs are rounded: the weights' error does not
        tell what that costs."""
        candidate, reference = self.candidates[place], self.candidates[self.cheapest]
        if candidate is None:
            return False
        rounds_inputs = {candidate[1], reference[1] if reference else None} != {formats.UNROUNDED}
        return place == self.cheapest or self.everything or rounds_inputs


@torch.inference_mode()
def measure(
    stream: BlockStream,
    groups: Sequence[Sequence[SelectedGroup]],
    ids: Tensor,
    probe: Probe,
    *,
    done: int,
    finish: Callable[[int, list[list[Cost]]], None],
    ui: UI,
) -> None:
    """Costs of every group in every candidate, block by block from block `done` on.

    What enters the block is the original's in each case, so only the blocks after it run anew.

    Args:
        stream: the original in float32, in which KLs as small as those of 8-bit formats can be told from zero.
        groups: of each block; their schemes do not matter.
        ids: int64 [rows, length].
        finish: called with a block's index and its costs, [group][candidate].

    Raises CompressError for a KL that is not finite, naming the group; and as `blocks.collect` and `quantize_shared`.
    """
    total = len(stream)
    states = [stream.embed(rows) for rows in ids.split(probe.batch_size)]
    stream.release_embedding()
    (wanted,) = _walk(stream, range(total), [states])
    with ui.progress("allocation", sum(total - index for index in range(done, total))) as progress:
        for index in range(total):
            errors: list[list[float]] = []
            changed: list[list[Tensor]] = []
            with stream.block(index) as layer:
                if index >= done and groups[index]:
                    errors, changed = _round_each(stream, index, layer, groups[index], states, probe)
                states = [stream.run(index, layer, state) for state in states]
            if index < done:
                continue
            progress.advance()
            if changed:
                changed = _walk(stream, range(index + 1, total), changed, progress.advance)
            else:
                progress.advance(total - index - 1)
            found = _kls(stream, wanted, changed) if changed else []
            finish(index, _costs(stream.family.block(index), groups[index], errors, found, probe))


def _walk(
    stream: BlockStream,
    indices: range,
    several: Sequence[Sequence[Tensor]],
    advance: Callable[[], None] = lambda: None,
) -> list[list[Tensor]]:
    """Batches of hidden states, of several models, through blocks `indices`."""
    moved = [list(states) for states in several]
    for index in indices:
        with stream.block(index) as layer:
            for states in moved:
                for place, state in enumerate(states):
                    states[place] = stream.run(index, layer, state)
        advance()
    return moved


def _round_each(
    stream: BlockStream,
    index: int,
    layer: nn.Module,
    groups: Sequence[SelectedGroup],
    states: Sequence[Tensor],
    probe: Probe,
) -> tuple[list[list[float]], list[list[Tensor]]]:
    """(errors [group][candidate], batches that leave the block with each measured candidate, group by group)."""
    prefix = stream.family.block(index)
    seen = blocks.collect(layer, groups, states, lambda x: stream.run(index, layer, x), hessians=True, channels=True)
    errors, changed = [], []
    for group in groups:
        row = []
        for place, candidate in enumerate(probe.candidates):
            if candidate is None:
                row.append(0.0)
                continue
            variant = replace(group, scheme=formats.scheme(*candidate))
            with rounded(layer, variant, seen[group], probe, prefix) as error:
                row.append(error)
                if probe.measures(place):
                    changed.append([stream.run(index, layer, state) for state in states])
        errors.append(row)
    return errors, changed


@contextmanager
def rounded(
    layer: nn.Module, group: SelectedGroup, seen: InputStatistics, probe: Probe, prefix: str
) -> Iterator[float]:
    """`layer` with the linears of `group` rounded to nearest, by scales whose search, if any, `seen` weighs, and their
    inputs as the scheme rounds them; as it was on exit. Yields Σ tr(E H Eᵀ). The weights are rounded from
    `probe.dtype`, as a bundle's are."""
    assert seen.hessian is not None and seen.largest is not None
    fmt, linears = group.scheme.fmt, [layer.get_submodule(name) for name in group.names]
    originals = [linear.get_parameter("weight") for linear in linears]
    results = quantize_shared(
        [weight.to(probe.dtype) for weight in originals],
        fmt,
        method="rtn",
        names=[prefix + name for name in group.names],
        hessian=seen.hessian,
        search=probe.search,
        fused=group.fused_as is not None,
    )
    error, hooks = 0.0, []
    try:
        for linear, original, result in zip(linears, originals, results, strict=True):
            weight = fmt.decode(result.tensors).to(probe.dtype).to(original.dtype)
            error += output_energy((weight - original).float(), seen.hessian)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            if group.scheme.rounds_inputs:
                scale = fmt.input_global_scale(seen.largest.max()) if group.needs_range else None
                hooks.append(emulate_activations(linear, fmt, scale))  # type: ignore[arg-type]
        yield max(error, 0.0)
    finally:
        for hook in hooks:
            hook.remove()
        for linear, original in zip(linears, originals, strict=True):
            linear.weight = original


def _kls(stream: BlockStream, wanted: Sequence[Tensor], several: Sequence[Sequence[Tensor]]) -> list[float]:
    """Mean KL of each of several models, from what leaves the last block of the original and theirs."""
    totals, rows = [0.0] * len(several), sum(map(len, wanted))
    with stream.head() as logits:
        for place, target in enumerate(wanted):
            found = kls(logits, logits, target, [states[place] for states in several])
            totals = [total + len(target) * kl / rows for total, kl in zip(totals, found, strict=True)]
    return totals


def _costs(
    prefix: str, groups: Sequence[SelectedGroup], errors: list[list[float]], found: Sequence[float], probe: Probe
) -> list[list[Cost]]:
    """[group][candidate], from the KLs of those that were measured, in order."""
    measured = iter(found)
    costs = []
    for group, row in zip(groups, errors, strict=True):
        known = {place: next(measured) for place in range(len(row)) if probe.measures(place)}
        if not all(map(math.isfinite, known.values())):
            raise CompressError(
                f"{prefix}{group.names[0]}: the KL with its group rounded is not finite; check the source's weights, "
                "or add it to quantization.ignore"
            )
        costs.append([_cost(place, row, known, probe) for place in range(len(row))])
    return costs


def _cost(place: int, errors: list[float], known: dict[int, float], probe: Probe) -> Cost:
    if probe.candidates[place] is None:
        return Cost(0.0, EXACT, 0.0)
    if place in known:
        return Cost(max(known[place], 0.0), MEASURED, errors[place])  # float32 may leave a little less than zero
    reference = errors[probe.cheapest]
    ratio = errors[place] / reference if reference > 0 else 0.0
    return Cost(max(known[probe.cheapest], 0.0) * ratio, PREDICTED, errors[place])
