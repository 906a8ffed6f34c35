"""NVFP4: E2M1 elements, one E4M3 scale for 16 inputs, one float32 multiplier for the tensor (`nvfp4-pack-quantized`).

value = e2m1 · scale / global, with global = 448 · 6 / amax so that the block holding amax gets the largest scale
(NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, appendix B; compressed-tensors `generate_gparam`). With a
scale search it is the power of two below that: every weight (6 significant bits) is then exact in bfloat16, so engines
that decode to bfloat16 and to float32 run the same ones. No scale grows coarser, except of blocks whose largest value
is thousands of times smaller than the tensor's, where E4M3 turns subnormal.
"""

import torch
from torch import Tensor

from compressor.errors import CompressError, UsageError
from compressor.formats.base import Grid, expect_shape, take
from compressor.formats.fp4 import Fp4
from compressor.formats.grids import E2M1, E4M3, pack_nibbles, unpack_nibbles
from compressor.formats.search import best_candidate, group_importance

UNDERFLOW_RULES = ("compressed-tensors", "transformer-engine", "subnormal")
# E4M3 code distances from the standard scale that the search tries: eight codes are a factor of two, so this reaches
# from clipping at half the largest magnitude to mapping it to 4 (the levels near 4 and below lie closer together:
# "Four Over Six", Cook et al. 2025) and a little beyond.
SEARCH_OFFSETS = (0, -1, 1, -2, 2, -3, 3, -4, 4, -5, 5, 6)
_CT_UNDERFLOW_CODE = 32  # 0.125
_LARGEST_CODE = 126  # 448
_SMALLEST = 2.0**-9  # code 1
_TINY_STEP = 1 / torch.finfo(torch.float32).max


class Nvfp4(Fp4):
    """NVFP4. `underflow`: what a block's scale becomes when it rounds to zero in E4M3.

    "compressed-tensors": 0.125, so the block becomes zeros. "transformer-engine": stays 0 and the elements saturate
    (decoded as zeros all the same). "subnormal": the smallest positive scale 2^-9, which keeps what can be kept.
    A scale search picks among positive scales and starts from the rule's.
    """

    name = "nvfp4"
    group_size = 16
    bits_per_weight = 4.5
    compression_format = "nvfp4-pack-quantized"

    def __init__(self, underflow: str = "compressed-tensors") -> None:
        if underflow not in UNDERFLOW_RULES:
            raise UsageError(f"underflow: {underflow!r} is not one of {', '.join(UNDERFLOW_RULES)}")
        self.underflow = underflow

    def grid(
        self,
        weight: Tensor,
        *,
        search: str = "none",
        importance: Tensor | None = None,
        global_scale: Tensor | None = None,
    ) -> Grid:
        """See `Format.grid`. Standard rule: scale = E4M3(amax / 6 · global), at most 448."""
        groups = self._groups(weight, search)
        amax = self._finite(groups.abs().amax(-1))
        shared = _multiplier(amax.max(), search) if global_scale is None else _checked_global(global_scale)
        codes = (shared * (amax / E2M1.max)).clamp_(max=E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)
        standard = self._replace_underflow(codes)
        if search == "mse":
            candidates = [standard]
            candidates += [(codes.int() + d).clamp_(1, _LARGEST_CODE).to(torch.uint8) for d in SEARCH_OFFSETS]
            importance = group_importance(importance, self.group_size)
            standard = best_candidate(
                groups, importance, candidates, lambda stored: _step(stored, shared), self.fake_quantize
            )
        scale = standard.view(torch.float8_e4m3fn)
        return Grid(_step(standard, shared), None, {"weight_scale": scale, "weight_global_scale": shared})

    def restep(self, grid: Grid, step: Tensor) -> Grid:
        """See `Format.restep`: the global scale stays, a block's scale stays positive and at most 448."""
        shared = grid.stored["weight_global_scale"]
        scale = (step * shared).clamp_(_SMALLEST, E4M3.max).to(torch.float8_e4m3fn)
        return Grid(scale.float() / shared, None, {**grid.stored, "weight_scale": scale})

    def _replace_underflow(self, codes: Tensor) -> Tensor:
        if self.underflow == "transformer-engine":
            return codes
        return torch.where(codes == 0, _CT_UNDERFLOW_CODE if self.underflow == "compressed-tensors" else 1, codes)

    def round(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.round`."""
        return super().round(x, self._divisor(step))

    def fake_quantize(self, x: Tensor, step: Tensor, zero: Tensor | None = None) -> Tensor:
        """See `Format.fake_quantize`."""
        if self.underflow != "transformer-engine":
            return super().fake_quantize(x, step)
        return super().fake_quantize(x, self._divisor(step)).mul_(step > 0)

    def _divisor(self, step: Tensor) -> Tensor:
        # TransformerEngine bounds the reciprocal of a zero step by the largest float32
        return step.clamp(min=_TINY_STEP) if self.underflow == "transformer-engine" else step

    def pack(self, codes: Tensor, grid: Grid) -> dict[str, Tensor]:
        """weight_packed uint8 [out, in / 2], weight_scale float8_e4m3fn [out, in / 16], weight_global_scale f32 [1]."""
        return {"weight_packed": pack_nibbles(codes), **grid.stored}

    def unpack(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Grid]:
        """See `Format.unpack`."""
        packed = take(tensors, "weight_packed", (torch.uint8,), 2)
        scale = take(tensors, "weight_scale", (torch.float8_e4m3fn,), 2)
        shared = take(tensors, "weight_global_scale", (torch.float32,), 1)
        rows, cols = packed.shape[0], packed.shape[1] * 2
        self.check(cols, "weight_packed")
        expect_shape(tensors, "weight_scale", (rows, cols // self.group_size))
        expect_shape(tensors, "weight_global_scale", (1,))
        grid = Grid(scale.float() / shared, None, {"weight_scale": scale, "weight_global_scale": shared})
        return unpack_nibbles(packed), grid

    def global_scale(self, weights: list[Tensor], *, search: str = "none") -> Tensor:
        """float32 [1]: the smallest multiplier of the parts, i.e. that of their common largest magnitude."""
        amax = torch.stack([w.detach().abs().amax().float() for w in weights]).amax()
        return _multiplier(self._finite(amax), search)

    def weights_config(self) -> dict:
        """See `Format.weights_config`: the NVFP4 and NVFP4A16 presets."""
        return {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "group_size": self.group_size,
            "strategy": "tensor_group",
            "dynamic": False,
            "scale_dtype": "torch.float8_e4m3fn",
        }

    def activations_config(self) -> dict:
        """See `Format.activations_config`: block scales on the fly, the global scale calibrated (NVFP4 preset)."""
        return {**self.weights_config(), "dynamic": "local", "observer": "static_minmax"}

    def input_global_scale(self, amax: Tensor | float) -> Tensor:
        """float32 [1] = 448 · 6 / amax. Raises CompressError for an amax that is not positive and finite."""
        amax = torch.as_tensor(amax, dtype=torch.float32).reshape([])
        if not bool(amax.isfinite()) or not bool(amax > 0):
            raise CompressError(
                f"nvfp4: activation amax {amax.item()} gives no input_global_scale; was this layer ever calibrated?"
            )
        return _multiplier(amax)

    def fake_quantize_activation(self, x: Tensor, input_global_scale: Tensor | None = None) -> Tensor:
        """See `Format.fake_quantize_activation`. Blocks whose scale underflows become zeros.

        amax / 6 is rounded to the dtype of `x`, as compressed-tensors (and so transformers) has it: bit for bit its
        values. FP4 kernels and vLLM's emulation divide in float32, which for bfloat16 inputs gives about one block in
        thirty the neighbouring scale; in float32 all agree.
        """
        if input_global_scale is None:
            raise CompressError("nvfp4: 4-bit activations need the layer's input_global_scale")
        groups = x.unflatten(-1, (-1, self.group_size))
        local = groups.abs().amax(-1, keepdim=True) / E2M1.max
        scale = (local.float() * input_global_scale).clamp_(max=E4M3.max)
        step = scale.to(torch.float8_e4m3fn).float() / input_global_scale
        values = Fp4.fake_quantize(self, groups.float(), step.clamp(min=_TINY_STEP)).mul_(step > 0)
        return values.flatten(-2).to(x.dtype)


def _multiplier(amax: Tensor, search: str = "none") -> Tensor:
    """float32 [1] = 448 · 6 / amax; 1 where that overflows, amax being almost 0 (compressed-tensors).

    With a scale search, its power of two.
    """
    quotient = (E4M3.max * E2M1.max) / amax.float().clamp(min=torch.finfo(torch.float32).tiny)
    quotient = torch.where(quotient.isfinite(), quotient, 1.0).reshape(1)
    return torch.exp2(torch.frexp(quotient).exponent.float() - 1) if search == "mse" else quotient


def _checked_global(global_scale: Tensor) -> Tensor:
    scale = global_scale.detach().float().reshape(-1)
    if scale.numel() != 1 or not bool(scale.isfinite()) or not bool(scale > 0):
        raise CompressError(f"nvfp4: global_scale {global_scale.tolist()} is not one positive finite number")
    return scale


def _step(codes: Tensor, shared: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float() / shared
