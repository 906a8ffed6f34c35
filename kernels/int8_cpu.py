"""torch's product of bfloat16 rows with an int8 weight on CPUs, for the few rows of a draft.

It reads half the bytes of a bfloat16 weight: at one row of SmolLM2's head shapes it takes 0.3 to 0.7 of the time of
the product in `bf16_cpu` on two AVX-512 cores. Its time grows with every row, so that from `DENSE_ROWS` on the codes,
which bfloat16 holds exactly, are multiplied densely and the scale is applied to the product.

torch 2.13 checks nothing: with a number of inputs that 16 does not divide the kernel reads behind the rows' ends. Any
multiple of 16 gave the right product with 1 to 100 outputs and 1 to 15 rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OP = "aten::_weight_int8pack_mm"
DTYPE = torch.bfloat16
IN_MULTIPLE = 16
DENSE_ROWS = 16


def obstacle(in_features: int, dtype: torch.dtype, step: Tensor | None = None) -> str | None:
    """Why the kernel cannot run activations of `dtype` on a CPU, so many in a row, or would round these float32 `step`s
    of the weight; None where it can."""
    if not hasattr(torch.ops.aten, OP.removeprefix("aten::")):
        return f"this torch ({torch.__version__}) has no {OP}"
    if dtype != DTYPE:
        return f"{OP} is used in bfloat16 only, and the model runs in {str(dtype).removeprefix('torch.')}"
    if in_features % IN_MULTIPLE:
        return f"{OP} needs in_features divisible by {IN_MULTIPLE}, not {in_features}"
    if step is not None and not torch.equal(step.to(DTYPE).float(), step):
        return f"{OP} takes bfloat16 scales, and this layer's are not exact in bfloat16"
    return None


def fits(in_features: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel runs activations of `dtype` on `device`, so many in a row."""
    return device.type == "cpu" and obstacle(in_features, dtype) is None


class Int8Linear(nn.Module):
    """y = x·(weight · scale)ᵀ + bias: weight int8 [out, in], scale [out], rounded to bfloat16 as the kernel takes it,
    bias bfloat16 [out] or None."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.contiguous(), persistent=False)
        self.register_buffer("scale", scale.to(DTYPE).contiguous(), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] bfloat16 → [..., out]; products are summed in float32."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if len(rows) < DENSE_ROWS:
            y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale)
        else:
            y = F.linear(rows, self.weight.to(DTYPE)) * self.scale
        y = y.reshape(*x.shape[:-1], len(self.scale))
        return y if self.bias is None else y + self.bias


def pack(codes: Tensor, step: Tensor, bias: Tensor | None = None) -> Int8Linear:
    """The layer of uint8 codes q + 128 [out, in] and steps [out, 1], the bias bfloat16 [out] or None."""
    return Int8Linear((codes ^ 128).view(torch.int8), step[:, 0], bias)


def join(linears: list[Int8Linear]) -> Int8Linear | None:
    """One layer with the outputs of all side by side; None where only some have a bias."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if biases and len(biases) < len(linears):
        return None
    weight, scale = (torch.cat([getattr(linear, name) for linear in linears]) for name in ("weight", "scale"))
    return Int8Linear(weight, scale, torch.cat(biases) if biases else None)
