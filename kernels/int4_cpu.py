"""torch's packed INT4 matrix product for CPUs, beside its reference.

Found by experiment on torch 2.13 (tests/kernels/test_int4_cpu.py holds it to each of these):

- value = (code - 8)·scale + offset, computed in float32; products are accumulated in float32 and rounded once, to the
  activations' dtype.
- scales and offsets have the activations' dtype. float32 activations work but run a scalar loop some 20 times slower
  than a dense product, so this project uses the kernel in bfloat16 only.
- out_features must divide by 16; the groups are 32, 64, 128 or 256 inputs long.
- The packed layout depends on the machine's vector width: it is made at load time and never stored.
- Its time grows with every row, that of a dense product hardly: from about `DECODE_ROWS` on, decoding the weight for
  each call and multiplying densely is faster (2 to 3 times at 128 rows of [1536, 576] on two cores). Prompts run that
  way, with the very weights and product of an engine that decodes to bfloat16; single tokens and the few rows of a
  verification run packed.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

OP = "aten::_weight_int4pack_mm_for_cpu"
DTYPE = torch.bfloat16
GROUP_SIZES = (32, 64, 128, 256)
OUT_MULTIPLE = 16
DECODE_ROWS = 32
_ZERO_CODE = 8


@dataclass(frozen=True)
class PackedInt4:
    """One weight [out, in] as the kernel reads it.

    words: uint8 [out, in / 2], in the machine's own order. scales_and_offsets: bfloat16 [in / group, out, 2].
    halves: int8 [out, in / group, group / 2], signed codes for `decode`: element i of a group in the low nibble and
    element i + group / 2 in the high one, so that both are written in one piece. zeros: int8 [out, in / group, 1] or
    None.
    """

    words: Tensor
    scales_and_offsets: Tensor
    halves: Tensor
    zeros: Tensor | None
    group_size: int


def obstacle(out_features: int, group_size: int, step: Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run a weight with these float32 `step`s [out, in / group]; None where it can."""
    if not hasattr(torch.ops.aten, OP.removeprefix("aten::")):
        return f"this torch ({torch.__version__}) has no {OP}"
    if dtype != DTYPE:
        return f"{OP} is fast in bfloat16 only, and the model runs in {str(dtype).removeprefix('torch.')}"
    if group_size not in GROUP_SIZES:
        return f"{OP} has no groups of {group_size}"
    if out_features % OUT_MULTIPLE:
        return f"{OP} needs out_features divisible by {OUT_MULTIPLE}, not {out_features}"
    if not torch.equal(step.to(DTYPE).float(), step):
        return f"{OP} takes bfloat16 scales, and this layer's are not exact in bfloat16"
    return None


def pack(codes: Tensor, step: Tensor, zero: Tensor | None, group_size: int) -> PackedInt4:
    """uint8 codes 0..15 [out, in] of values (code - 8 - zero)·step, with step and zero float32 [out, in / group].

    The offset -zero·step is rounded to bfloat16, so with a zero point the kernel's weights are off by up to
    2⁻⁸·|zero·step|, less than 2.8% of a quantization step. Without one they are exact.
    """
    offset = torch.zeros_like(step) if zero is None else -zero * step
    scales_and_offsets = torch.stack([step.T, offset.T], -1).to(DTYPE).contiguous()
    words = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32).contiguous(), 1)
    low, high = (codes.to(torch.int8) - _ZERO_CODE).unflatten(1, (step.shape[1], 2, -1)).unbind(2)
    halves = (low & 15) | (high << 4)
    zeros = None if zero is None else zero.to(torch.int8)[..., None]
    return PackedInt4(words, scales_and_offsets, halves, zeros, group_size)


def decode(weight: PackedInt4) -> Tensor:
    """The weight, bfloat16 [out, in]: (code - 8 - zero)·step rounded once."""
    rows, groups, half = weight.halves.shape
    dense = torch.empty(rows, groups, 2, half, dtype=DTYPE)
    steps = weight.scales_and_offsets[..., 0].T[..., None]
    for part, signed in enumerate(((weight.halves << 4) >> 4, weight.halves >> 4)):
        torch.mul(signed if weight.zeros is None else signed - weight.zeros, steps, out=dense[:, :, part])
    return dense.view(rows, -1)


def linear(x: Tensor, weight: PackedInt4, bias: Tensor | None = None) -> Tensor:
    """x [..., in] bfloat16 → x·Wᵀ + bias [..., out] bfloat16."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    if len(rows) >= DECODE_ROWS:
        return F.linear(x, decode(weight), bias)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, weight.words, weight.group_size, weight.scales_and_offsets)
    y = y.reshape(*x.shape[:-1], -1)
    return y if bias is None else y + bias


def reference(x: Tensor, codes: Tensor, step: Tensor, zero: Tensor | None) -> Tensor:
    """What `linear` should give, in float32: x [..., in], codes [out, in], step and zero [out, in / group]."""
    groups = codes.float().sub(_ZERO_CODE).unflatten(1, (step.shape[1], -1))
    if zero is not None:
        groups = groups - zero[..., None]
    return F.linear(x.float(), (groups * step[..., None]).flatten(1))
