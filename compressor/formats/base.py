"""What a number format is: how weights become codes and scales, how those lie on disk, and the configuration they need.

A format is stateless and knows no model, no file and no algorithm. `quantize/` drives it through `grid` (choose the
scales), `round`/`fake_quantize` (choose the codes) and `pack` (the tensors on disk).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CompressError, UsageError

SEARCHES = ("none", "mse")
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of scales that have the dtype of the weight; the last of them stands in for any other."""
CODES = ("weight_packed", "weight")
"""Suffixes that a quantized linear's codes have on disk, several to an element or one."""
_GROUP_SIZES = (128, 64, 32, 16)


@dataclass(frozen=True)
class Grid:
    """Everything about a quantized weight [out, in] except its codes.

    step: float32 [out, in / group], the multiplier a decoder computes from the stored tensors, bit for bit;
    value = (level(code) − zero) · step, negative only where the format has `negative_scales`. A group is an equal part
    of a row, at most the whole row, and several rows may share a scale. zero: float32 [out, in / group], whole numbers;
    None where the format is symmetric. stored: the scale tensors as on disk by suffix; a zero point is still unpacked:
    int8 [out, in / group].
    """

    step: Tensor
    zero: Tensor | None
    stored: dict[str, Tensor]


class Format(ABC):
    """One number format and its layout on disk in compressed-tensors. `group_size` None: one scale a row."""

    name: str
    group_size: int | None
    bits: int
    bits_per_weight: float  # scales included, but for a single one a row
    compression_format: str
    negative_scales = False  # may be found by a search: the levels reach further down than up

    def for_inputs(self, rounded: bool) -> "Format":
        """This format in the layout that engines run beside inputs that are rounded too, or are not."""
        return self

    def check(self, in_features: int, layer: str) -> None:
        """Raise CompressError when a layer with this many inputs does not divide into whole groups."""
        if self.group_size is not None and in_features % self.group_size:
            fitting = next((g for g in _GROUP_SIZES if g < self.group_size and not in_features % g), None)
            remedy = f"a format with groups of {fitting}" if fitting else "another format"
            raise CompressError(
                f"{layer}: in_features {in_features} is not a multiple of {self.name}'s group of {self.group_size}; "
                f"choose {remedy} or add the layer to quantization.ignore"
            )

    def check_fused(self, out_features: Sequence[int], layer: str) -> None:  # noqa: B027 - most formats do not care
        """Raise CompressError where parts with so many outputs, in this order, cannot be fused as engines do."""

    @abstractmethod
    def grid(
        self,
        weight: Tensor,
        *,
        search: str = "none",
        importance: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Grid:
        """Scales for `weight` (float [out, in]).

        search "none": the format's standard rule. "mse": per group, the stored scale with the least squared error,
        weighted by `importance` (float [in], ≥ 0: e.g. the diagonal of the layer's Hessian) if given, among scales
        that make every weight exact in bfloat16 (asymmetric and 8-bit integers, and weights in another dtype excepted:
        see the format). global_scale: float32 [1] shared by parts that engines fuse; formats without one
        refuse it.
        Raises CompressError for NaN or Inf in the weight, UsageError for an unknown search.
        """

    @abstractmethod
    def storable(self, step: Tensor, grid: Grid, *, search: str = "none") -> Tensor:
        """The float32 steps nearest to `step` (any shape) that could stand in `grid`, which `search` chose; 0 where the
        nearest is zero."""

    @abstractmethod
    def with_step(self, grid: Grid, step: Tensor) -> Grid:
        """`grid` with other steps, float32 [out, in / group], each of them `storable` and of the sign it had."""

    @abstractmethod
    def round(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """uint8 codes of the levels nearest to `x / step (+ zero)`, ties to even, saturating; step, zero broadcast."""

    @abstractmethod
    def value(self, codes: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """float32 (level(code) − zero) · step."""

    @abstractmethod
    def fake_quantize(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """value(round(x)) without the codes, in x's precision: GPTQ calls it once a column, so it is few operations."""

    @abstractmethod
    def pack(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        """uint8 codes [out, in] and their grid → tensors on disk by suffix."""

    @abstractmethod
    def unpack(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Grid]:
        """Inverse of `pack`. Raises CompressError naming a tensor that is missing or has a wrong dtype or shape."""

    def encode(self, weight: Tensor, **grid_options) -> dict[str, Tensor]:
        """Round-to-nearest: exactly the tensors written to disk, by suffix. Options are those of `grid`."""
        grid = self.grid(weight, **grid_options)
        groups = weight.detach().float().unflatten(1, (grid.step.shape[1], -1))
        zero = None if grid.zero is None else grid.zero[..., None]
        return self.pack(self.round(groups, grid.step[..., None], zero).flatten(1), grid)

    def decode(self, tensors: dict[str, Tensor]) -> Tensor:
        """Tensors by suffix → float32 [out, in]."""
        codes, grid = self.unpack(tensors)
        zero = None if grid.zero is None else grid.zero[..., None]
        return self.value(codes.unflatten(1, (grid.step.shape[1], -1)), grid.step[..., None], zero).flatten(1)

    def global_scale(self, weights: list[Tensor], *, search: str = "none") -> Tensor | None:
        """float32 [1] to share among parts that engines fuse (q/k/v, gate/up), by the rule that `grid` follows for
        `search`; None where the format has none."""
        return None

    @abstractmethod
    def weights_config(self) -> dict:
        """compressed-tensors QuantizationArgs fields for `config_groups.*.weights`."""

    def activations_config(self) -> dict | None:
        """QuantizationArgs fields for rounded `input_activations`; None where the format has no such scheme."""
        return None

    def input_global_scale(self, amax: Tensor | float) -> Tensor | None:
        """float32 [1] stored beside a weight with rounded inputs, from the largest calibrated one; None where not
        needed."""
        return None

    def fake_quantize_activation(self, x: Tensor, input_global_scale: Tensor | None = None) -> Tensor:
        """`x` [..., in] as the engine's kernel for rounded inputs sees it, in x's dtype."""
        raise UsageError(f"{self.name} has no rounded activations; set quantization.activations to 16bit")

    def _groups(self, weight: Tensor, search: str, global_scale: Tensor | None = None) -> Tensor:
        """Validated float32 view [out, in / group, group] of a weight. `global_scale`: refused."""
        if global_scale is not None:
            raise CompressError(f"{self.name} has no global scale")
        if search not in SEARCHES:
            raise UsageError(f"scale_search: {search!r} is not one of {', '.join(SEARCHES)}")
        if weight.dim() != 2 or not weight.is_floating_point():
            raise CompressError(f"{self.name}: needs a float [out, in] weight, not {weight.dtype} {[*weight.shape]}")
        self.check(weight.shape[1], "weight")
        return weight.detach().float().unflatten(1, (-1, self.group_size or weight.shape[1]))

    def _scale_dtype(self, weight: Tensor) -> torch.dtype:
        """Of scales that are stored in the weight's own dtype."""
        return weight.dtype if weight.dtype in SCALE_DTYPES else SCALE_DTYPES[-1]

    def _finite(self, extreme: Tensor) -> Tensor:
        """`extreme` (largest magnitudes: NaN and Inf propagate into them) after checking that it is finite."""
        if not bool(extreme.isfinite().all()):
            bad = int((~extreme.isfinite()).sum())
            raise CompressError(f"{self.name}: the weight holds NaN or Inf in {bad} of {extreme.numel()} groups")
        return extreme


def quantized_layers(names: Iterable[str]) -> dict[str, list[str]]:
    """The quantized linears among stored tensors, by what they alone have: packed codes or a scale of the weight. The
    suffixes of each, `bias` left out."""
    suffixes: dict[str, list[str]] = {}
    for name in names:
        layer, _, suffix = name.rpartition(".")
        if suffix != "bias":
            suffixes.setdefault(layer, []).append(suffix)
    return {layer: found for layer, found in suffixes.items() if {CODES[0], "weight_scale"} & {*found}}


def take(tensors: dict[str, Tensor], suffix: str, dtypes: tuple[torch.dtype, ...], dims: int) -> Tensor:
    """The tensor `suffix`, after checking dtype and number of dimensions; CompressError otherwise."""
    if suffix not in tensors:
        raise CompressError(f"{suffix} is missing; found {', '.join(sorted(tensors)) or 'nothing'}")
    tensor = tensors[suffix]
    if tensor.dtype not in dtypes or tensor.dim() != dims:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise CompressError(f"{suffix}: {dims}-dimensional {wanted} expected, found {tensor.dtype} {[*tensor.shape]}")
    return tensor


def expect_shape(tensors: dict[str, Tensor], suffix: str, shape: tuple[int, ...]) -> None:
    """CompressError unless `tensors[suffix]` has this shape."""
    if tuple(tensors[suffix].shape) != shape:
        raise CompressError(f"{suffix}: shape {[*shape]} expected, found {[*tensors[suffix].shape]}")
