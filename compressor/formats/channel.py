"""Weights in 8 bits with one scale an output channel: compressed-tensors `int-quantized` and `float-quantized`.

value = q · scale, q in [-127, 127] or an E4M3 number up to 448; `weight` [out, in] int8 or float8_e4m3fn and
`weight_scale` [out, 1] in the dtype of the weight that was rounded. Engines run both as W8A8: they also round every
input row, with a scale of its own. Here inputs keep their dtype.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressError
from compressor.formats.base import expect_shape, take

_SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Channel:
    """One of `FORMATS`. `largest`: of |q|."""

    name: str
    type: str
    dtype: torch.dtype
    largest: float
    compression_format: str

    def encode(self, weight: Tensor) -> dict[str, Tensor]:
        """Round to nearest: the tensors on disk, by suffix, of a float weight [out, in]. Raises CompressError for NaN
        or Inf in it."""
        extreme = weight.detach().float().abs().amax(1, keepdim=True)
        if not bool(extreme.isfinite().all()):
            raise CompressError(f"{self.name}: the weight holds NaN or Inf")
        scale = (extreme / self.largest).to(weight.dtype)
        scale = torch.where(scale == 0, torch.finfo(weight.dtype).eps, scale)  # a channel of zeros
        q = (weight.detach().float() / scale.float()).clamp(-self.largest, self.largest)
        return {"weight": (q if self.dtype.is_floating_point else q.round()).to(self.dtype), "weight_scale": scale}

    def decode(self, tensors: dict[str, Tensor]) -> Tensor:
        """Tensors by suffix → float32 [out, in]. Raises CompressError for one that is missing, of another dtype or
        shape."""
        weight, scale = self.unpack(tensors)
        return weight.float() * scale.float()

    def unpack(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """q [out, in] and scale [out, 1], checked as by `decode`."""
        weight = take(tensors, "weight", (self.dtype,), 2)
        scale = take(tensors, "weight_scale", _SCALE_DTYPES, 2)
        expect_shape(tensors, "weight_scale", (len(weight), 1))
        return weight, scale

    def weights_config(self) -> dict[str, Any]:
        """compressed-tensors QuantizationArgs of the weights."""
        return {"num_bits": 8, "type": self.type, "symmetric": True, "strategy": "channel", "dynamic": False}

    def activations_config(self) -> dict[str, Any]:
        """QuantizationArgs of the inputs, rounded row by row."""
        return {"num_bits": 8, "type": self.type, "symmetric": True, "strategy": "token", "dynamic": True}


FORMATS = {
    "int8": Channel("int8", "int", torch.int8, 127.0, "int-quantized"),
    "fp8": Channel("fp8", "float", torch.float8_e4m3fn, 448.0, "float-quantized"),
}
