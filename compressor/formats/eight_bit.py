"""Weights in 8 bits: INT8 and FP8 with one scale an output channel, FP8 with one for each 128 × 128 block.

value = q · scale, q in [−128, 127] or an E4M3 number up to 448. On disk `weight` [out, in] int8 or float8_e4m3fn and
`weight_scale` [out, 1] or [ceil(out / 128), in / 128] in the dtype of the weight that was rounded (compressed-tensors
`int-quantized` and `float-quantized`). vLLM runs INT8 in that layout as W8A8 only: beside inputs of 16 bits the codes
lie in int32 words (`pack-quantized`), as those of INT4 do.

A searched FP8 scale of a bfloat16 weight keeps 4 significant bits: with the 4 of q every weight is then exact in
bfloat16. INT8 codes leave no room for that.
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.errors import CompressError
from compressor.formats.base import SCALE_DTYPES, Format, Grid, expect_shape, take
from compressor.formats.grids import E4M3, significant
from compressor.formats.int4 import pack_to_int32, unpack_from_int32
from compressor.formats.search import best_candidate, best_integer_grid, group_importance

BLOCK = 128
# Multiples of the standard scale tried for INT8. Clipping pays much less than in 4 bits.
INT8_RATIOS = tuple(1.004 - 0.02 * i for i in range(20))
# Multiples of the standard scale tried for FP8: where its levels lie repeats with every power of two, and clipping
# hardly ever pays.
FP8_RATIOS = tuple(1 + i / 16 for i in range(-1, 16))
_EXACT_BITS = 4
_ZERO_CODE = 128  # of INT8 codes, stored unsigned
_NAN = 0x7F  # of E4M3, either sign


class EightBit(Format):
    """What the formats of 8 bits share; one scale a row unless overridden. `largest`: the magnitude of q that the
    largest weight gets by the standard rule (compressed-tensors)."""

    bits = 8
    group_size: int | None = None
    bits_per_weight = 8.0  # and a scale a row
    type: str
    dtype: torch.dtype
    largest: float

    @abstractmethod
    def _nearest_(self, q: Tensor) -> Tensor:
        """The levels nearest to `q` (overwritten), saturating, in its dtype."""

    def _standard(self, groups: Tensor, dtype: torch.dtype) -> Tensor:
        """float32 [rows, G]: largest magnitude of each group / `largest`, as `dtype` stores it."""
        step = (self._finite(groups.abs().amax(-1)) / self.largest).to(dtype).float()
        return torch.where(step == 0, torch.finfo(dtype).eps, step)  # zeros, or an underflow (compressed-tensors)

    def storable(self, step: Tensor, grid: Grid, *, search: str = "none") -> Tensor:
        """See `Format.storable`."""
        return step.to(grid.stored["weight_scale"].dtype).float()

    def with_step(self, grid: Grid, step: Tensor) -> Grid:
        """See `Format.with_step`."""
        return Grid(step, None, {"weight_scale": step.to(grid.stored["weight_scale"].dtype)})

    def fake_quantize(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.fake_quantize`."""
        return self._nearest_(torch.div(x, step)).mul_(step)

    def pack(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        """weight [out, in] and weight_scale."""
        return {"weight": codes.view(self.dtype), **grid.stored}

    def unpack(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Grid]:
        """See `Format.unpack`."""
        weight = take(tensors, "weight", (self.dtype,), 2)
        return weight.view(torch.uint8), self._stored_grid(tensors, *weight.shape)

    def _stored_grid(self, tensors: dict[str, Tensor], rows: int, cols: int) -> Grid:
        scale = take(tensors, "weight_scale", SCALE_DTYPES, 2)
        expect_shape(tensors, "weight_scale", (rows, 1))
        return Grid(scale.float(), None, {"weight_scale": scale})

    def weights_config(self) -> dict:
        """See `Format.weights_config`: the W8A8 and FP8_DYNAMIC presets."""
        return {"num_bits": 8, "type": self.type, "symmetric": True, "strategy": "channel", "dynamic": False}

    def activations_config(self) -> dict | None:
        """See `Format.activations_config`: every row is rounded on the fly, with a scale of its own."""
        return {"num_bits": 8, "type": self.type, "symmetric": True, "strategy": "token", "dynamic": True}

    def fake_quantize_activation(self, x: Tensor, input_global_scale: Tensor | None = None) -> Tensor:
        """See `Format.fake_quantize_activation`: symmetric, scale = amax / 127.5 for INT8 and amax / 448 for FP8, of
        each row or of each group of inputs.

        Scale, quotient and product are rounded to the dtype of `x`: bit for bit what compressed-tensors
        (`calculate_qparams`, `fake_quantize`), and so transformers, computes. vLLM's kernels work in float32, and for
        INT8 divide by 127 (`scaled_int8_quant`): their inputs differ by at most one level more.
        """
        groups = x.unflatten(-1, (-1, self.group_size or x.shape[-1]))
        scale = groups.abs().amax(-1, keepdim=True) / self.largest
        scale = torch.where(scale == 0, torch.finfo(x.dtype).eps, scale)
        return self._nearest_(groups / scale).mul_(scale).flatten(-2)


class Int8(EightBit):
    """INT8, one scale an output channel. `packed`: the layout beside inputs of 16 bits."""

    name, type, dtype = "int8", "int", torch.int8
    largest = 127.5

    def __init__(self, packed: bool = False) -> None:
        self.packed = packed
        self.compression_format = "pack-quantized" if packed else "int-quantized"

    def for_inputs(self, rounded: bool) -> Format:
        """See `Format.for_inputs`."""
        return self if self.packed != rounded else Int8(packed=not rounded)

    def grid(
        self,
        weight: Tensor,
        *,
        search: str = "none",
        importance: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Grid:
        """See `Format.grid`. Standard rule (compressed-tensors): amax / 127.5."""
        groups = self._groups(weight, search, global_scale)
        dtype = self._scale_dtype(weight)
        step = self._standard(groups, dtype)
        if search == "mse":
            h = group_importance(importance, groups.shape[-1])
            step, _ = best_integer_grid(
                groups, h, (step, None), (-128, 127), lambda scale: scale.to(dtype).float(), INT8_RATIOS
            )
        return Grid(step, None, {"weight_scale": step.to(dtype)})

    def _nearest_(self, q: Tensor) -> Tensor:
        return q.round_().clamp_(-128, 127)

    def round(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.round`: code = q + 128."""
        return self._nearest_(torch.div(x, step)).add_(_ZERO_CODE).to(torch.uint8)

    def value(self, codes: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.value`."""
        return codes.float().sub_(_ZERO_CODE).mul_(step)

    def pack(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        """weight int8 [out, in], or weight_packed int32 [out, ceil(in / 4)] and weight_shape int64 [2]; and
        weight_scale [out, 1]."""
        if not self.packed:
            return super().pack(codes ^ _ZERO_CODE, grid)
        shape = torch.tensor(codes.shape, dtype=torch.int64)
        return {"weight_packed": pack_to_int32(codes, 8), **grid.stored, "weight_shape": shape}

    def unpack(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Grid]:
        """See `Format.unpack`."""
        if not self.packed:
            signed, grid = super().unpack(tensors)
            return signed ^ _ZERO_CODE, grid
        words = take(tensors, "weight_packed", (torch.int32,), 2)
        rows, cols = take(tensors, "weight_shape", (torch.int64,), 1).tolist()
        expect_shape(tensors, "weight_packed", (rows, -(-cols // 4)))
        return unpack_from_int32(words, 8, cols), self._stored_grid(tensors, rows, cols)

    def activations_config(self) -> dict | None:
        """See `EightBit.activations_config`."""
        return None if self.packed else super().activations_config()


class Fp8(EightBit):
    """FP8 (E4M3), one scale an output channel."""

    name, type, dtype = "fp8", "float", torch.float8_e4m3fn
    largest = E4M3.max
    compression_format = "float-quantized"

    def grid(
        self,
        weight: Tensor,
        *,
        search: str = "none",
        importance: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Grid:
        """See `Format.grid`. Standard rule: amax / 448."""
        groups = self._blocks(self._groups(weight, search, global_scale))
        dtype = self._scale_dtype(weight)
        step = self._standard(groups, dtype)
        if search == "mse":
            h = group_importance(importance, weight.shape[1] // groups.shape[1])
            if h is not None and h.shape[1] != groups.shape[2]:  # the same for every row of a block
                h = h.repeat(1, groups.shape[2] // h.shape[1])
            candidates = [
                self._searched(step * ratio, dtype) for ratio in sorted(FP8_RATIOS, key=lambda ratio: abs(ratio - 1))
            ]
            candidates = [torch.where(candidate > 0, candidate, step) for candidate in candidates]
            step = best_candidate(groups, h, candidates, lambda stored: stored, self.fake_quantize)
        return self._grid(step.to(dtype), len(weight))

    def _searched(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        return (significant(step, _EXACT_BITS) if dtype == torch.bfloat16 else step).to(dtype).float()

    def storable(self, step: Tensor, grid: Grid, *, search: str = "none") -> Tensor:
        """See `Format.storable`."""
        if search == "mse":
            return self._searched(step, grid.stored["weight_scale"].dtype)
        return super().storable(step, grid, search=search)

    def _blocks(self, groups: Tensor) -> Tensor:
        """[out, G, group] → the weights that share a scale, [rows, G, n]."""
        return groups

    def _grid(self, scale: Tensor, rows: int) -> Grid:
        return Grid(scale.float(), None, {"weight_scale": scale})

    def _nearest_(self, q: Tensor) -> Tensor:
        return q.copy_(q.clamp_(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn))

    def round(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.round`: the bits of the E4M3 number."""
        return torch.div(x, step).clamp_(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)

    def value(self, codes: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.value`."""
        return codes.view(torch.float8_e4m3fn).float().mul_(step)

    def unpack(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Grid]:
        """See `Format.unpack`. Raises CompressError for NaN among the codes too."""
        codes, grid = super().unpack(tensors)
        if bool(((codes & _NAN) == _NAN).any()):
            raise CompressError("weight: holds NaN")
        return codes, grid


class Fp8Block(Fp8):
    """FP8 (E4M3), one scale for each 128 × 128 block (DeepSeek-V3's); the last rows may fill a block in part."""

    name = "fp8-block128"
    group_size = BLOCK
    bits_per_weight = 8 + 16 / BLOCK**2

    def check(self, in_features: int, layer: str) -> None:
        """See `Format.check`."""
        if in_features % BLOCK:
            raise CompressError(
                f"{layer}: in_features {in_features} is not a multiple of {self.name}'s blocks of {BLOCK}; choose fp8 "
                "or add the layer to quantization.ignore"
            )

    def check_fused(self, out_features: Sequence[int], layer: str) -> None:
        """See `Format.check_fused`: a block may not reach from one part into the next."""
        if any(count % BLOCK for count in out_features[:-1]):
            raise CompressError(
                f"{layer}: out_features {', '.join(map(str, out_features))} of the parts that engines fuse, and blocks "
                f"of {BLOCK} rows do not end between them; choose fp8 or add the layers to quantization.ignore"
            )

    def _blocks(self, groups: Tensor) -> Tensor:
        padding = -len(groups) % BLOCK
        padded = torch.nn.functional.pad(groups, (0, 0, 0, 0, 0, padding))
        return padded.unflatten(0, (-1, BLOCK)).transpose(1, 2).flatten(2)

    def _grid(self, scale: Tensor, rows: int) -> Grid:
        step = scale.float().repeat_interleave(BLOCK, 0)[:rows]
        return Grid(step, None, {"weight_scale": scale})

    def with_step(self, grid: Grid, step: Tensor) -> Grid:
        """See `Format.with_step`. Rows that share a block take the step of its first row."""
        return self._grid(step[::BLOCK].to(grid.stored["weight_scale"].dtype), len(step))

    def _stored_grid(self, tensors: dict[str, Tensor], rows: int, cols: int) -> Grid:
        self.check(cols, "weight")
        scale = take(tensors, "weight_scale", SCALE_DTYPES, 2)
        expect_shape(tensors, "weight_scale", (-(-rows // BLOCK), cols // BLOCK))
        return self._grid(scale, rows)

    def weights_config(self) -> dict:
        """See `Format.weights_config`: the FP8_BLOCK preset."""
        return {**super().weights_config(), "strategy": "block", "block_structure": [BLOCK, BLOCK]}

    def activations_config(self) -> dict | None:
        """See `Format.activations_config`: 128 inputs of a row share a scale (FP8_BLOCK preset)."""
        return {**EightBit.weights_config(self), "strategy": "group", "group_size": BLOCK, "dynamic": True}
