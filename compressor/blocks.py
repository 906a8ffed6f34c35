"""One decoder block through calibration and quantization: input statistics, solve, install, pack."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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

    hessian: XᵀX / tokens, float32 [in, in] (the 2 of the GPTQ paper cancels). amax: largest magnitude. Each is None
    where nothing needs it. tokens: rows of X.
    """

    hessian: torch.Tensor | None
    amax: float | None
    tokens: int = 0

    def add(self, x: torch.Tensor) -> None:
        x = x.reshape(-1, x.shape[-1])
        self.tokens += x.shape[0]
        if self.amax is not None:
            low, high = x.aminmax()
            self.amax = max(self.amax, high.item(), -low.item())
        if self.hessian is not None:
            wide = x.float()
            if x.dtype == torch.bfloat16:
                with _bf16_products():
                    self.hessian += wide.T @ wide  # a third faster than addmm_ here
            else:
                self.hessian += wide.T @ wide

    @property
    def finite(self) -> bool:
        return math.isfinite(self.amax or 0.0) and (
            self.hessian is None or bool(self.hessian.diagonal().isfinite().all())
        )


def collect(
    layer: nn.Module,
    groups: Sequence["SelectedGroup"],
    batches: Iterable[torch.Tensor],
    forward: Callable[[torch.Tensor], object],
    *,
    hessians: bool,
) -> dict["SelectedGroup", InputStatistics]:
    """Run the calibration rows through `layer` and gather the statistics of every group's input: of one that is rounded
    to 4 bits, also its largest magnitude.

    Args:
        layer: the block, full precision.
        groups: in order of execution.
        batches: hidden states [rows, length, hidden] that enter the block.
        forward: runs one batch through the layer; it is cut short at the last group's input.
        hessians: accumulate XᵀX, which GPTQ and the scale search weigh errors by.

    Raises CompressError for an input that is not finite, naming the linear.
    """
    statistics: dict[SelectedGroup, InputStatistics] = {}
    hooks = []
    for group in groups:
        linear = _linear(layer, group.names[0])
        size = linear.in_features
        entry = InputStatistics(torch.zeros(size, size) if hessians else None, 0.0 if group.needs_range else None)
        statistics[group] = entry

        def hook(module, args, entry=entry, last=group is groups[-1]):
            entry.add(args[0])
            if last:
                raise _InputsSeen

        hooks.append(linear.register_forward_pre_hook(hook))
    try:
        for hidden in batches:
            with suppress(_InputsSeen):
                forward(hidden)
    finally:
        for handle in hooks:
            handle.remove()
    for group, entry in statistics.items():
        if not entry.finite:
            raise CompressError(
                f"{group.names[0]}: calibration input is not finite; check the source's weights and dtype"
            )
        if entry.hessian is not None:
            entry.hessian /= max(entry.tokens, 1)
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
                chosen.append(SelectedGroup(names, group.fused_as, scheme=formats.scheme(*choice)))
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
            search=settings.scale_search,
            damping=settings.damping,
            order=settings.order,
            block_size=settings.block_size,
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
