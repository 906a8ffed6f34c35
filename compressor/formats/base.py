"""What a number format is: how weights become codes and scales, how those lie on disk, and the configuration they need.

A format is stateless and knows no model, no file and no algorithm. `quantize/` drives it through `grid` (choose the
scales), `round`/`fake_quantize` (choose the codes) and `pack` (the tensors on disk).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CompressError, UsageError

SEARCHES = ("none", "mse")
_GROUP_SIZES = (128, 64, 32, 16)


@dataclass(frozen=True)
class Grid:
    """Everything about a quantized weight [out, in] except its codes.

    step: float32 [out, in / group], the multiplier a decoder computes from the stored tensors, bit for bit;
    value = (level(code) − zero) · step. zero: float32 [out, in / group], whole numbers; None where the format is
    symmetric. stored: the scale tensors as on disk by suffix; a zero point is still unpacked: int8 [out, in / group].
    """

    step: Tensor
    zero: Tensor | None
    stored: dict[str, Tensor]


class Format(ABC):
    """One number format and its packed layout in compressed-tensors."""

    name: str
    group_size: int
    bits: int
    bits_per_weight: float  # scales included
    compression_format: str

    def check(self, in_features: int, layer: str) -> None:
        """Raise CompressError when a layer with this many inputs does not divide into whole groups."""
        if in_features % self.group_size:
            fitting = next((g for g in _GROUP_SIZES if g < self.group_size and in_features % g == 0), None)
            remedy = f"a format with groups of {fitting}" if fitting else "another format"
            raise CompressError(
                f"{layer}: in_features {in_features} is not a multiple of {self.name}'s group of {self.group_size}; "
                f"choose {remedy} or add the layer to quantization.ignore"
            )

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
        that make every weight exact in bfloat16 (asymmetric integers, and integers of weights in another dtype
        excepted: see the format). global_scale: float32 [1] shared by parts that engines fuse; formats without one
        refuse it.
        Raises CompressError for NaN or Inf in the weight, UsageError for an unknown search.
        """

    def restep(self, grid: Grid, step: Tensor) -> Grid:
        """`grid` with the steps nearest to `step` (float32 [out, in / group], > 0) that the format stores, as a scale
        search would store them; `grid` itself where its steps are too coarse to be moved."""
        return grid

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
        groups = weight.detach().float().unflatten(1, (-1, self.group_size))
        zero = None if grid.zero is None else grid.zero[..., None]
        return self.pack(self.round(groups, grid.step[..., None], zero).flatten(1), grid)

    def decode(self, tensors: dict[str, Tensor]) -> Tensor:
        """Tensors by suffix → float32 [out, in]."""
        codes, grid = self.unpack(tensors)
        zero = None if grid.zero is None else grid.zero[..., None]
        return self.value(codes.unflatten(1, (-1, self.group_size)), grid.step[..., None], zero).flatten(1)

    def global_scale(self, weights: list[Tensor], *, search: str = "none") -> Tensor | None:
        """float32 [1] to share among parts that engines fuse (q/k/v, gate/up), by the rule that `grid` follows for
        `search`; None where the format has none."""
        return None

    @abstractmethod
    def weights_config(self) -> dict:
        """compressed-tensors QuantizationArgs fields for `config_groups.*.weights`."""

    def activations_config(self) -> dict | None:
        """QuantizationArgs fields for 4-bit `input_activations`; None where the format has no such scheme."""
        return None

    def input_global_scale(self, amax: Tensor | float) -> Tensor | None:
        """float32 [1] stored beside a W4A4 weight, from the largest calibrated input; None where not needed."""
        return None

    def fake_quantize_activation(self, x: Tensor, input_global_scale: Tensor | None = None) -> Tensor:
        """`x` [..., in] as the engine's W4A4 kernel sees it, in x's dtype."""
        raise UsageError(f"{self.name} has no 4-bit activations; set quantization.activations to 16bit")

    def _groups(self, weight: Tensor, search: str) -> Tensor:
        """Validated float32 view [out, in / group, group] of a weight."""
        if search not in SEARCHES:
            raise UsageError(f"scale_search: {search!r} is not one of {', '.join(SEARCHES)}")
        if weight.dim() != 2 or not weight.is_floating_point():
            raise CompressError(f"{self.name}: needs a float [out, in] weight, not {weight.dtype} {[*weight.shape]}")
        self.check(weight.shape[1], "weight")
        return weight.detach().float().unflatten(1, (-1, self.group_size))

    def _finite(self, extreme: Tensor) -> Tensor:
        """`extreme` (largest magnitudes: NaN and Inf propagate into them) after checking that it is finite."""
        if not bool(extreme.isfinite().all()):
            bad = int((~extreme.isfinite()).sum())
            raise CompressError(f"{self.name}: the weight holds NaN or Inf in {bad} of {extreme.numel()} groups")
        return extreme


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
