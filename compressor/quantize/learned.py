"""Scales learned from gradients while the codes stay (LSQ, Esser et al., arXiv 1902.08153; the end-to-end phase of
EfficientQAT, Chen et al., arXiv 2407.11062). Where the gradients come from is the caller's business.

Codes are not learned here. Rounding with straight-through gradients was tried: on SmolLM2-135M (INT4, groups of 64) it
gained nothing on other text beside learned scales, and on least-squares problems it ends above GPTQ's error.
"""

import torch
from torch import Tensor

from compressor.formats import Format, Grid

_TINY = 1e-30


class Adam:
    """Adam (Kingma & Ba, arXiv 1412.6980) of one float32 tensor."""

    BETAS = (0.9, 0.99)

    def __init__(self, like: Tensor) -> None:
        self.steps = 0
        self.first, self.second = torch.zeros_like(like), torch.zeros_like(like)

    def step(self, value: Tensor, grad: Tensor, rate: float) -> None:
        """Move `value` in place against `grad`."""
        slow, fast = self.BETAS
        self.steps += 1
        self.first.lerp_(grad, 1 - slow)
        self.second.lerp_(grad.square(), 1 - fast)
        spread = (self.second / (1 - fast**self.steps)).sqrt_().add_(_TINY)
        value.sub_(self.first / spread, alpha=rate / (1 - slow**self.steps))


class LearnedScales:
    """One quantized linear whose scales are learned.

    Args:
        fmt: the format of `tensors`.
        tensors: the linear as it was quantized, on-disk tensors by suffix. Its codes stay.
        search: how its scales were chosen, which decides what a scale may be (`Format.storable`).

    gain: float32 [out, groups], each step relative to that of `tensors`, before it is rounded to what the format
    stores.
    """

    def __init__(self, fmt: Format, tensors: dict[str, Tensor], *, search: str) -> None:
        self.fmt, self.search = fmt, search
        self.codes, self.grid = fmt.unpack(tensors)
        self._beside = {suffix: tensor for suffix, tensor in tensors.items() if suffix.startswith("input_")}
        self.gain = torch.ones_like(self.grid.step)
        self.moments = Adam(self.gain)

    def _levels(self) -> Tensor:
        zero = None if self.grid.zero is None else self.grid.zero[..., None]
        return self.fmt.value(self.codes.unflatten(1, (self.gain.shape[1], -1)), torch.ones(1), zero)

    def _grid(self) -> Grid:
        step = self.fmt.storable(self.grid.step * self.gain, self.grid, search=self.search)
        return self.fmt.with_step(self.grid, torch.where(step.sign() == self.grid.step.sign(), step, self.grid.step))

    def weight(self, dtype: torch.dtype) -> Tensor:
        """[out, in] as a decoder of `tensors()` has it, in `dtype`."""
        return self._levels().mul_(self._grid().step[..., None]).flatten(1).to(dtype)

    def update(self, grad: Tensor, rate: float) -> None:
        """Move every scale by about the share `rate` of itself against `grad` [out, in], the loss's gradient with
        respect to the weight."""
        groups = grad.float().unflatten(1, (self.gain.shape[1], -1))
        self.moments.step(self.gain, torch.linalg.vecdot(groups, self._levels()).mul_(self.grid.step), rate)

    def tensors(self) -> dict[str, Tensor]:
        """On-disk tensors by suffix."""
        return {**self.fmt.pack(self.codes, self._grid()), **self._beside}
