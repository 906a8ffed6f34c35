"""One decoder block through calibration and quantization: input statistics, solve, install, pack."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

import torch
from torch import nn

from compressor import formats
from compressor.errors import CompressError, UsageError
from compressor.formats import Scheme
from compressor.models import LinearGroup
from compressor.models.skeleton import emulate_activations
from compressor.quantize import LayerResult, quantize_shared
from compressor.recipe import Quantization

_PANEL = 256
"""Rows of a Hessian computed together: as it is symmetric, each panel begins at its own diagonal."""


class _InputsSeen(Exception):
    """Ends a block's forward once its last quantized input has been seen: the rest would be thrown away."""


@contextmanager
def _bf16_products() -> Iterator[None]:
    """float32 matmuls multiply in bf16, accumulate in float32: exact for operands that came from bf16, and faster."""
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    previous = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = previous


@dataclass
class InputStatistics:
    """What quantization needs to know of one group's input.

    hessian: XᵀX / tokens, float32 [in, in] (the 2 of the GPTQ paper cancels), each token times its weight where there
    are weights, of mean 1 (x·√w then rounds to bf16 for the product, as x itself does not need to); until `finish`, XᵀX
    above its diagonal.
    diagonal: that of `hessian`, float32 [in] (until `finish`, sums in float64), where the rest of it is not needed;
    nothing of it rounds to bf16.
    amax: largest magnitude. cross: X̃ᵀX / tokens (until `finish`, X̃ᵀX), float32 [in, in], with X̃ the same input in the
    full-precision model. mean, largest: mean (until `finish`, sum) and largest magnitude of each input, float32 [in].
    Each is None where nothing needs it. tokens: rows of X.
    """

    hessian: torch.Tensor | None
    amax: float | None
    cross: torch.Tensor | None = None
    tokens: int = 0
    mean: torch.Tensor | None = None
    largest: torch.Tensor | None = None
    diagonal: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, size: int, *, hessian: bool, diagonal: bool, amax: bool, cross: bool, channels: bool
    ) -> "InputStatistics":
        """Of `size` inputs, before any was seen; what is asked for is gathered."""
        return cls(
            torch.zeros(size, size) if hessian else None,
            0.0 if amax else None,
            torch.zeros(size, size) if cross else None,
            mean=torch.zeros(size) if channels else None,
            largest=torch.zeros(size) if channels else None,
            diagonal=torch.zeros(size, dtype=torch.float64) if diagonal else None,
        )

    def add(self, x: torch.Tensor, reference: torch.Tensor | None = None, weights: torch.Tensor | None = None) -> None:
        """x [..., in]; reference: X̃, of the same shape and dtype, where there is a cross term; weights [...] ≥ 0."""
        root = None if weights is None else weights.reshape(-1, 1).sqrt()
        x = x.reshape(-1, x.shape[-1])
        self.tokens += x.shape[0]
        if self.amax is not None:
            low, high = x.aminmax()
            self.amax = max(self.amax, high.item(), -low.item())
        if self.mean is not None and self.largest is not None:
            magnitude = x.abs().float()
            self.mean += magnitude.sum(0)
            torch.maximum(self.largest, magnitude.amax(0), out=self.largest)
        if self.hessian is None and self.diagonal is None:
            return
        wide = x.float() if root is None else x * root
        if self.diagonal is not None:
            self.diagonal += wide.square().sum(0)
        if self.hessian is not None:
            with _bf16_products() if x.dtype == torch.bfloat16 else nullcontext():
                for first in range(0, wide.shape[1], _PANEL):
                    panel = wide[:, first : first + _PANEL]
                    self.hessian[first : first + _PANEL, first:] += panel.T @ wide[:, first:]  # addmm_ is slower
                if self.cross is not None and reference is not None:
                    exact = reference.reshape(x.shape).float()
                    self.cross += (exact if root is None else exact * root).T @ wide

    def finish(self, name: str) -> None:
        """All inputs have been added. Raises CompressError naming the linear for one that is not finite."""
        if not self.finite:
            raise CompressError(f"{name}: calibration input is not finite; check the source's weights and dtype")
        if self.hessian is not None:
            below = self.hessian.triu(1).T
            self.hessian.triu_().add_(below).div_(max(self.tokens, 1))
        if self.diagonal is not None:
            self.diagonal = (self.diagonal / max(self.tokens, 1)).float()
        if self.cross is not None:
            self.cross /= max(self.tokens, 1)
        if self.mean is not None:
            self.mean /= max(self.tokens, 1)

    def divide(self, scales: torch.Tensor) -> None:
        """Make these the statistics of x / scales (float32 [in])."""
        assert self.hessian is not None and self.mean is not None and self.largest is not None
        self.hessian = self.hessian / scales / scales[:, None]
        if self.cross is not None:
            self.cross = self.cross / scales / scales[:, None]
        self.mean, self.largest = self.mean / scales, self.largest / scales
        if self.amax is not None:
            self.amax = float(self.largest.max())

    @property
    def finite(self) -> bool:
        return (
            math.isfinite(self.amax or 0.0)
            and (self.hessian is None or bool(self.hessian.diagonal().isfinite().all()))
            and (self.diagonal is None or bool(self.diagonal.isfinite().all()))
            and (self.cross is None or bool(self.cross.isfinite().all()))
        )


@contextmanager
def _shown(
    linears: Mapping["SelectedGroup", nn.Linear], see: Callable[["SelectedGroup", torch.Tensor], None]
) -> Iterator[None]:
    """`see` gets every input of these linears, with its group, before they run."""
    hooks = [
        linear.register_forward_pre_hook(lambda _, args, group=group: see(group, args[0]))
        for group, linear in linears.items()
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def collect(
    layer: nn.Module,
    groups: Sequence["SelectedGroup"],
    batches: Iterable[torch.Tensor],
    forward: Callable[[torch.Tensor], object],
    *,
    hessians: bool,
    diagonals: bool = False,
    channels: bool = False,
    reference: Iterator[object] | None = None,
    weights: Mapping["SelectedGroup", torch.Tensor] | None = None,
) -> dict["SelectedGroup", InputStatistics]:
    """Run the calibration rows through `layer` and gather the statistics of every group's input: of one that is rounded
    to 4 bits, also its largest magnitude.

    Args:
        layer: the block, full precision.
        groups: in order of execution.
        batches: hidden states [rows, length, hidden] that enter the block.
        forward: runs one batch through the layer; it is cut short at the last group's input.
        hessians: accumulate XᵀX, which GPTQ and channel scales weigh errors by.
        diagonals: accumulate its diagonal, which is all that the scale search weighs errors by.
        channels: note each input's mean and largest magnitude, which channel scales need.
        reference: runs the same rows as the full-precision model has them through `layer`, a batch whenever it is asked
            for its next item; the cross terms of asymmetric calibration are then gathered too.
        weights: what each token counts in these sums, by group, float32 [rows, length]; none: all the same.

    Raises CompressError for an input that is not finite, naming the linear.
    """
    linears = {group: _linear(layer, group.names[0]) for group in groups}
    wanted = {"hessian": hessians, "diagonal": diagonals, "channels": channels, "cross": reference is not None}
    statistics = {
        group: InputStatistics.empty(linear.in_features, amax=group.needs_range, **wanted)
        for group, linear in linears.items()
    }
    exact: dict[SelectedGroup, torch.Tensor] = {}
    of_reference, row = False, 0

    def see(group: SelectedGroup, x: torch.Tensor) -> None:
        if of_reference:
            exact[group] = x
            return
        statistics[group].add(x, exact.pop(group, None), weights[group][row : row + len(x)] if weights else None)
        if group is groups[-1]:
            raise _InputsSeen

    with _shown(linears, see):
        for hidden in batches:
            if reference is not None:
                of_reference = True
                next(reference)
                of_reference = False
            with suppress(_InputsSeen):
                forward(hidden)
            row += len(hidden)
    for group, entry in statistics.items():
        entry.finish(group.names[0])
    return statistics


def _linear(layer: nn.Module, name: str) -> nn.Linear:
    module = layer.get_submodule(name)
    if not isinstance(module, nn.Linear):
        raise CompressError(f"{name}: a {type(module).__name__}, where the model family expects a linear")
    return module


@dataclass
class QuantizedLayer:
    """One linear of a finished block."""

    name: str
    shape: tuple[int, int]  # [out, in]
    scheme: Scheme
    result: LayerResult


@dataclass(frozen=True)
class SelectedGroup(LinearGroup):
    """Linears of a group that are quantized alike."""

    scheme: Scheme = field(kw_only=True)

    @property
    def needs_range(self) -> bool:
        """Whether the largest magnitude of the inputs is stored: of 4-bit ones, which formats of 4 bits have."""
        return self.scheme.rounds_inputs and self.scheme.fmt.bits == 4


def selected(groups: Sequence[LinearGroup], prefix: str, settings: Quantization) -> tuple[SelectedGroup, ...]:
    """The groups of a block that are quantized, each with its scheme.

    Raises UsageError where the parts of an engine-fused matrix are not all stored alike: engines could not load them.
    """
    chosen = []
    for group in groups:
        choices = {name: settings.choice(prefix + name) for name in group.names}
        if group.fused_as and len(set(choices.values())) > 1:
            raise _split(group, prefix, settings, choices)
        for choice in dict.fromkeys(choices.values()):
            if choice is not None:
                names = tuple(name for name in group.names if choices[name] == choice)
                chosen.append(SelectedGroup(**vars(group) | {"names": names}, scheme=formats.scheme(*choice)))
    return tuple(chosen)


def _split(group: LinearGroup, prefix: str, settings: Quantization, choices: dict) -> UsageError:
    """What to say of fused parts that are not stored alike."""
    ignored = [name for name in group.names if settings.ignores(prefix + name)]
    if ignored and len(ignored) < len(group.names):
        return UsageError(
            f"quantization.ignore: {prefix}{ignored[0]} is one part of the fused {group.fused_as}; "
            f"ignore all of {', '.join(group.names)} or none"
        )
    stored = [f"{name} {' with '.join(choice) if choice else 'none'}" for name, choice in choices.items()]
    return UsageError(
        f"quantization.overrides: {prefix}{group.fused_as} is one matrix to engines, and its parts differ "
        f"({', '.join(stored)}); give them all one format and one kind of activations"
    )


def quantize(
    layer: nn.Module,
    prefix: str,
    groups: Sequence[SelectedGroup],
    statistics: dict[SelectedGroup, InputStatistics],
    settings: Quantization,
    advance: Callable[[], None],
) -> list[QuantizedLayer]:
    """Quantize the linears of `groups` in place: their weights become what a decoder reads from the packed tensors.

    Args:
        statistics: from `collect`; empty where the method needs no data.
        advance: called after each group, for the progress bar.
    """
    finished = []
    for group in groups:
        linears, fmt = [_linear(layer, name) for name in group.names], group.scheme.fmt
        seen = statistics.get(group)
        results = quantize_shared(
            [linear.weight for linear in linears],
            fmt,
            names=[prefix + name for name in group.names],
            method=settings.method,
            fused=group.fused_as is not None,
            hessian=seen.hessian if seen else None,
            diagonal=seen.diagonal if seen else None,
            search=settings.scale_search,
            damping=settings.damping,
            order=settings.order,
            block_size=settings.block_size,
            cross=seen.cross if seen else None,
            refit=settings.refit,
        )
        for name, linear, result in zip(group.names, linears, results, strict=True):
            linear.weight = nn.Parameter(fmt.decode(result.tensors).to(linear.weight.dtype), requires_grad=False)
            if group.scheme.rounds_inputs:
                input_scale = None
                if group.needs_range:
                    assert seen is not None and seen.amax is not None
                    input_scale = fmt.input_global_scale(seen.amax)
                if input_scale is not None:
                    result.tensors["input_global_scale"] = input_scale
                emulate_activations(linear, fmt, input_scale)
            shape = (linear.out_features, linear.in_features)
            finished.append(QuantizedLayer(prefix + name, shape, group.scheme, result))
        advance()
    return finished
