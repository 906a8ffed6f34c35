"""The quantized model while it is trained: every block's scales, norms and biases, one block's gradients at a time.

A step runs all rows through the blocks and keeps what enters each; the way back computes a block again with gradients,
moves its parameters at once and hands the gradient of its input on. So no more than one block's activations and
gradients are alive: the price is one more forward.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from compressor.quantize.learned import Adam, LearnedScales


@dataclass(frozen=True)
class Rates:
    """What one step of the optimizer moves: a scale by about the share `scale` of itself, an element of a norm or bias
    by `other` of its tensor's root mean square (of 1, where that is 0)."""

    scale: float
    other: float

    def times(self, factor: float) -> "Rates":
        return Rates(self.scale * factor, self.other * factor)


class Block:
    """One decoder block.

    Args:
        layer: its module, parameters on meta.
        arguments: what the model calls it with beside hidden states, valid for any number of rows.
        learned: its quantized linears by name within the block.
        others: every other parameter: norms and biases, and linears that stay unquantized (those keep their values).
        dtype: dtype of the hidden states.
    """

    def __init__(
        self,
        layer: nn.Module,
        arguments: dict,
        learned: dict[str, LearnedScales],
        others: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.layer, self.learned, self.dtype = layer, learned, dtype
        self.arguments = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, arguments)  # usable by autograd
        self.fixed = {name: value for name, value in others.items() if value.dim() > 1}
        self.others = {name: value.float() for name, value in others.items() if value.dim() == 1}
        self.sizes = {name: value.square().mean().sqrt().item() or 1.0 for name, value in self.others.items()}
        self.moments = {name: Adam(value) for name, value in self.others.items()}
        self.weights = {name: linear.weight(dtype) for name, linear in learned.items()}

    def _parameters(self) -> dict[str, Tensor]:
        quantized = {f"{name}.weight": value for name, value in self.weights.items()}
        return quantized | {name: value.to(self.dtype) for name, value in self.others.items()}

    def _run(self, parameters: dict[str, Tensor], hidden: Tensor) -> Tensor:
        output = functional_call(self.layer, parameters | self.fixed, (hidden,), self.arguments)
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states [rows, length, hidden] that leave the block."""
        return self._run(self._parameters(), hidden)

    def backward(self, entering: Tensor, gradient: Tensor, batch_size: int, rates: Rates) -> Tensor:
        """Move the parameters against `gradient`, the loss's with respect to what leaves the block for `entering`
        [rows, length, hidden]; returns that with respect to `entering`. `batch_size`: rows run together."""
        leaves = {name: value.detach().requires_grad_(True) for name, value in self._parameters().items()}
        passed_on = torch.empty_like(entering)
        for start in range(0, len(entering), batch_size):
            rows = slice(start, start + batch_size)
            hidden = entering[rows].detach().requires_grad_(True)
            self._run(leaves, hidden).backward(gradient[rows])
            assert hidden.grad is not None
            passed_on[rows] = hidden.grad
        with torch.no_grad():
            self._update({name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}, rates)
        return passed_on

    def _update(self, gradients: dict[str, Tensor], rates: Rates) -> None:
        for name, linear in self.learned.items():
            linear.update(gradients.pop(f"{name}.weight"), rates.scale)
            self.weights[name] = linear.weight(self.dtype)
        for name, gradient in gradients.items():
            self.moments[name].step(self.others[name], gradient.float(), rates.other * self.sizes[name])

    def tensors(self) -> dict[str, Tensor]:
        """The block's tensors as on disk, by name within the block."""
        packed = {
            f"{name}.{suffix}": t for name, linear in self.learned.items() for suffix, t in linear.tensors().items()
        }
        return packed | {name: value.to(self.dtype) for name, value in self.others.items()} | self.fixed

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that training changes, by name: the block's own tensors."""
        for name, moments in self._moments():
            yield from ((f"{name}.first", moments.first), (f"{name}.second", moments.second))
        yield from ((f"{name}.gain", linear.gain) for name, linear in self.learned.items())
        yield from self.others.items()

    def resume(self, steps: int) -> None:
        """The tensors of `state` were filled with those after this many steps."""
        for _, moments in self._moments():
            moments.steps = steps
        self.weights = {name: linear.weight(self.dtype) for name, linear in self.learned.items()}

    def _moments(self) -> Iterator[tuple[str, Adam]]:
        yield from ((f"{name}.gain", linear.moments) for name, linear in self.learned.items())
        yield from self.moments.items()
