"""INT4 in groups along the input, symmetric or with a zero point: compressed-tensors `pack-quantized`.

value = (q − zero) · scale with q in [−8, 7], stored as q + 8, eight codes to an int32 word, element i at bits 4i. The
scale has the weight's own dtype; zero points are packed the same way along the output dimension.

A searched symmetric scale may be negative, which gives −8, the level beyond 7, to a group's largest positive value (as
llama.cpp's Q4_0 does). On Gaussian groups of 64 that leaves 10 % less squared error, for no bytes.

A searched symmetric bfloat16 scale keeps 5 significant bits: with at most 3 of |q| every weight is then exact in
bfloat16, and an engine that decodes to bfloat16 runs the same weights as one that multiplies codes in float32. That
costs about 1.5 % of squared error; 8 bits would save it.
"""

import torch
from torch import Tensor

from compressor.formats.base import SCALE_DTYPES, Format, Grid, expect_shape, take
from compressor.formats.grids import pack_nibbles, significant, unpack_nibbles
from compressor.formats.search import INTEGER_RATIOS, SIGNED_RATIOS, best_integer_grid, group_importance

_LOW, _HIGH = -8, 7
_EXACT_BITS = 5


def pack_to_int32(codes: Tensor, bits: int) -> Tensor:
    """Unsigned uint8 codes [rows, cols] of 4 or 8 bits → int32 [rows, ceil(cols · bits / 32)], zero-padded."""
    padding = -codes.shape[1] % (32 // bits)
    octets = torch.nn.functional.pad(codes, (0, padding))
    octets = pack_nibbles(octets) if bits == 4 else octets
    return octets.flatten().view(torch.int32).view(len(codes), -1)


def unpack_from_int32(words: Tensor, bits: int, cols: int) -> Tensor:
    """Inverse of `pack_to_int32`: uint8 codes [rows, cols]."""
    octets = words.flatten().view(torch.uint8).view(len(words), -1)
    return (unpack_nibbles(octets) if bits == 4 else octets)[:, :cols]


class Int4(Format):
    """INT4 with one scale (and, if not symmetric, one zero point) for each `group_size` inputs."""

    GROUP_SIZES = (32, 64, 128)
    group_size: int
    bits = 4
    compression_format = "pack-quantized"

    def __init__(self, group_size: int, symmetric: bool = True) -> None:
        self.group_size = group_size
        self.symmetric = self.negative_scales = symmetric
        self.name = f"int4-g{group_size}" + ("" if symmetric else "-asym")
        self.bits_per_weight = 4 + (16 if symmetric else 20) / group_size

    def grid(
        self,
        weight: Tensor,
        *,
        search: str = "none",
        importance: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Grid:
        """See `Format.grid`. Standard rule (compressed-tensors): amax / 7.5, or (max − min) / 15 with zero in range."""
        groups = self._groups(weight, search, global_scale)
        dtype = self._scale_dtype(weight)
        # a group of zeros, or one whose scale underflows its dtype, takes the dtype's epsilon (compressed-tensors)
        epsilon = torch.finfo(dtype).eps

        def store(scale: Tensor) -> Tensor:
            return self._stored(scale, dtype, search)

        low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
        self._finite(torch.maximum(-low, high))
        if self.symmetric:
            step = store(torch.maximum(-low, high) / ((_HIGH - _LOW) / 2))
            step, zero = torch.where(step == 0, epsilon, step), None
        else:
            step = store((high - low) / (_HIGH - _LOW))
            step = torch.where(step == 0, epsilon, step)
            zero = (_LOW - low / step).clamp_(_LOW, _HIGH).round_()
        if search == "mse":
            h = group_importance(importance, self.group_size)
            ratios = SIGNED_RATIOS if self.negative_scales else INTEGER_RATIOS
            step, zero = best_integer_grid(groups, h, (step, zero), (_LOW, _HIGH), store, ratios)
        stored = {"weight_scale": step.to(dtype)}
        if zero is not None:
            stored["weight_zero_point"] = zero.to(torch.int8)
        return Grid(step, zero, stored)

    def _stored(self, scale: Tensor, dtype: torch.dtype, search: str) -> Tensor:
        exact = search == "mse" and self.symmetric and dtype == torch.bfloat16
        return (significant(scale, _EXACT_BITS) if exact else scale).to(dtype).float()

    def storable(self, step: Tensor, grid: Grid, *, search: str = "none") -> Tensor:
        """See `Format.storable`."""
        return self._stored(step, grid.stored["weight_scale"].dtype, search)

    def with_step(self, grid: Grid, step: Tensor) -> Grid:
        """See `Format.with_step`."""
        return Grid(step, grid.zero, {**grid.stored, "weight_scale": step.to(grid.stored["weight_scale"].dtype)})

    def round(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.round`: code = q + 8."""
        q = torch.div(x, step)
        if zero is not None:
            q = q.add_(zero)
        return q.round_().clamp_(_LOW, _HIGH).sub_(_LOW).to(torch.uint8)

    def value(self, codes: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.value`."""
        q = codes.float().add_(_LOW)
        return (q if zero is None else q.sub_(zero)).mul_(step)

    def fake_quantize(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.fake_quantize`."""
        q = torch.div(x, step)
        if zero is None:
            return q.round_().clamp_(_LOW, _HIGH).mul_(step)
        return q.add_(zero).round_().clamp_(_LOW, _HIGH).sub_(zero).mul_(step)

    def pack(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        """weight_packed int32 [out, ceil(in / 8)], weight_scale [out, in / g], weight_shape int64 [2] and, with zero
        points, weight_zero_point int32 [ceil(out / 8), in / g]."""
        tensors = {
            "weight_packed": pack_to_int32(codes, 4),
            "weight_scale": grid.stored["weight_scale"],
            "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
        if not self.symmetric:
            zero = (grid.stored["weight_zero_point"].int() - _LOW).to(torch.uint8)
            tensors["weight_zero_point"] = pack_to_int32(zero.T, 4).T.contiguous()
        return tensors

    def unpack(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Grid]:
        """See `Format.unpack`."""
        words = take(tensors, "weight_packed", (torch.int32,), 2)
        scale = take(tensors, "weight_scale", SCALE_DTYPES, 2)
        rows, cols = take(tensors, "weight_shape", (torch.int64,), 1).tolist()
        self.check(cols, "weight_shape")
        expect_shape(tensors, "weight_packed", (rows, -(-cols // 8)))
        expect_shape(tensors, "weight_scale", (rows, cols // self.group_size))
        stored, zero = {"weight_scale": scale}, None
        if not self.symmetric:
            packed = take(tensors, "weight_zero_point", (torch.int32,), 2)
            expect_shape(tensors, "weight_zero_point", (-(-rows // 8), scale.shape[1]))
            zero = unpack_from_int32(packed.T, 4, rows).T.float().add_(_LOW)
            stored["weight_zero_point"] = zero.to(torch.int8)
        return unpack_from_int32(words, 4, cols), Grid(scale.float(), zero, stored)

    def weights_config(self) -> dict:
        """See `Format.weights_config`: the W4A16 and W4A16_ASYM presets with this group size."""
        return {
            "num_bits": 4,
            "type": "int",
            "symmetric": self.symmetric,
            "group_size": self.group_size,
            "strategy": "group",
            "dynamic": False,
        }
