"""MXFP4: E2M1 elements and one power-of-two scale (E8M0) for 32 inputs (`mxfp4-pack-quantized`; OCP MX v1.0)."""

import torch
from torch import Tensor

from compressor.errors import UsageError
from compressor.formats.base import Grid, expect_shape, take
from compressor.formats.fp4 import Fp4
from compressor.formats.grids import EXPONENT_RULES, decode_e8m0, mx_exponent, pack_nibbles, unpack_nibbles
from compressor.formats.search import best_candidate, group_importance

# Exponents tried around the standard one. A step twice too large or four times too small never wins over these.
SEARCH_OFFSETS = (0, 1, -1)


class Mxfp4(Fp4):
    """MXFP4. `exponent_rule`: see `grids.mx_exponent`; a scale search starts from it."""

    name = "mxfp4"
    group_size = 32
    bits_per_weight = 4.25
    compression_format = "mxfp4-pack-quantized"

    def __init__(self, exponent_rule: str = "floor") -> None:
        if exponent_rule not in EXPONENT_RULES:
            raise UsageError(f"exponent_rule: {exponent_rule!r} is not one of {', '.join(EXPONENT_RULES)}")
        self.exponent_rule = exponent_rule

    def grid(
        self,
        weight: Tensor,
        *,
        search: str = "none",
        importance: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Grid:
        """See `Format.grid`. Standard rule: the exponent rule of this format. A block of zeros gets 2^-127."""
        groups = self._groups(weight, search, global_scale)
        codes = mx_exponent(self._finite(groups.abs().amax(-1)), self.exponent_rule)
        if search == "mse":
            candidates = [(codes.int() + d).clamp_(0, 254).to(torch.uint8) for d in SEARCH_OFFSETS]
            importance = group_importance(importance, self.group_size)
            codes = best_candidate(groups, importance, candidates, decode_e8m0, self.fake_quantize)
        return Grid(decode_e8m0(codes), None, {"weight_scale": codes})

    def storable(self, step: Tensor, grid: Grid, *, search: str = "none") -> Tensor:
        """See `Format.storable`: the nearest power of two."""
        mantissa, exponent = torch.frexp(step.float())
        return decode_e8m0((exponent + (mantissa >= 0.75) + 126).clamp_(0, 254).to(torch.uint8))

    def with_step(self, grid: Grid, step: Tensor) -> Grid:
        """See `Format.with_step`."""
        return Grid(step, None, {"weight_scale": (torch.frexp(step).exponent + 126).to(torch.uint8)})

    def pack(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        """weight_packed uint8 [out, in / 2], weight_scale uint8 E8M0 [out, in / 32]."""
        return {"weight_packed": pack_nibbles(codes), **grid.stored}

    def unpack(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Grid]:
        """See `Format.unpack`."""
        packed = take(tensors, "weight_packed", (torch.uint8,), 2)
        scale = take(tensors, "weight_scale", (torch.uint8,), 2)
        rows, cols = packed.shape[0], packed.shape[1] * 2
        self.check(cols, "weight_packed")
        expect_shape(tensors, "weight_scale", (rows, cols // self.group_size))
        return unpack_nibbles(packed), Grid(decode_e8m0(scale), None, {"weight_scale": scale})

    def weights_config(self) -> dict:
        """See `Format.weights_config`: the MXFP4 and MXFP4A16 presets."""
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "group_size": self.group_size,
            "strategy": "group",
            "dynamic": False,
            "scale_dtype": "torch.uint8",
        }

    def activations_config(self) -> dict:
        """See `Format.activations_config`: block scales on the fly (MXFP4 preset)."""
        return {**self.weights_config(), "dynamic": True}

    def fake_quantize_activation(self, x: Tensor, input_global_scale: Tensor | None = None) -> Tensor:
        """See `Format.fake_quantize_activation`.

        The "round" rule, whatever rule the weights used: it is what the engines run (compressed-tensors, and the
        "even" mode of vLLM's emulation).
        """
        groups = x.float().unflatten(-1, (-1, self.group_size))
        step = decode_e8m0(mx_exponent(groups.abs().amax(-1, keepdim=True), "round"))
        return self.fake_quantize(groups, step).flatten(-2).to(x.dtype)
