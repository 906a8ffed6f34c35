"""Linears that read the same input, run as one product where their weights allow it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compressor.kernels import bf16_cpu, int8_cpu


class Linear:
    """x → the outputs of `modules` side by side.

    With `pack`, plain bfloat16 linears on the CPU become one weight in the CPU's own layout, and the modules' weights
    are released; 8-bit ones become one layer; anything else (other formats, dtypes, devices) is called as it is.
    """

    def __init__(self, modules: Sequence[Any], *, pack: bool = False) -> None:
        self.modules = list(modules)
        self.packed: bf16_cpu.PackedBf16 | None = None
        if pack and all(type(module) is nn.Linear and bf16_cpu.fits(module.weight) for module in modules):
            biases = [module.bias for module in modules]
            bias = torch.cat(biases) if all(b is not None for b in biases) else None
            if bias is not None or all(b is None for b in biases):
                self.packed = bf16_cpu.pack(torch.cat([module.weight for module in modules]), bias)
                for module in modules:
                    module.weight = module.bias = None  # type: ignore[assignment]
                self.modules = []
        elif pack and all(type(module) is int8_cpu.Int8Linear for module in modules):
            joined = int8_cpu.join(self.modules)
            self.modules = self.modules if joined is None else [joined]

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] → [N, sum of out]."""
        if self.packed is not None:
            return bf16_cpu.linear(x, self.packed)
        if len(self.modules) == 1:
            return self.modules[0](x)
        return torch.cat([module(x) for module in self.modules], -1)
