"""Codes and scales as real numbers that gradients move: learned rounding (AutoRound, Cheng et al., arXiv 2309.05516)
with learned steps (LSQ, Esser et al., arXiv 1902.08153). Where the gradients come from, one block or the whole model,
is the caller's business.

A weight is step · level(round(z)), z in units of the step, so that a scale can move without moving codes. Rounding
passes gradients straight through: ∂weight/∂z = step, ∂weight/∂step = level.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.formats import Format, Grid

_HALVINGS = 5
_BEYOND = 1e4  # levels: past the end of every grid
_TINY = 1e-30


@dataclass(frozen=True)
class Rates:
    """What one step of the optimizer moves: z by about `rounding` levels, a step by the share `scale`, and whatever
    else is learned (norms, biases) by `other`."""

    rounding: float
    scale: float
    other: float

    def times(self, factor: float) -> "Rates":
        return Rates(self.rounding * factor, self.scale * factor, self.other * factor)


class Adam:
    """Adam (Kingma & Ba, arXiv 1412.6980) of one tensor; with `shared`, one second moment for its last dimension
    (Adam-mini, Zhang et al., arXiv 2406.16793) and a first moment in bfloat16: 2 bytes an element instead of 8."""

    BETAS = (0.9, 0.99)

    def __init__(self, like: Tensor, *, shared: bool = False) -> None:
        self.shared, self.steps = shared, 0
        self.first = torch.zeros_like(like, dtype=torch.bfloat16 if shared else torch.float32)
        self.second = torch.zeros_like(like[..., :1] if shared else like, dtype=torch.float32)

    def step(self, value: Tensor, grad: Tensor, rate: float) -> None:
        """Move `value` (float32, in place) against `grad` (float32, overwritten)."""
        slow, fast = self.BETAS
        self.steps += 1
        square = grad.square()
        self.second.lerp_(square.mean(-1, keepdim=True) if self.shared else square, 1 - fast)
        self.first.lerp_(grad.to(self.first.dtype), 1 - slow)
        spread = (self.second / (1 - fast**self.steps)).sqrt_().add_(_TINY)
        value.sub_(torch.div(self.first, spread, out=grad), alpha=rate / (1 - slow**self.steps))


class Learned:
    """One quantized linear while it is learned.

    Args:
        fmt: the format of `tensors`.
        tensors: the linear as it was quantized, on-disk tensors by suffix. Learning starts from exactly these codes.
        weight: float [out, in], what was rounded: it says which neighbour each code is closest to.
        search: how the scales of `tensors` were chosen, which decides what a scale may be (`Format.storable`).

    z: float32 [out, G, group], levels before rounding. gain: float32 [out, G], the step relative to that of `tensors`,
    before it is rounded to what the format stores.
    """

    def __init__(self, fmt: Format, tensors: dict[str, Tensor], weight: Tensor, search: str = "mse") -> None:
        self.search = search
        self.fmt, self.kept = fmt, {k: v for k, v in tensors.items() if k.startswith("input_")}
        codes, self.grid = fmt.unpack(tensors)
        self._one = torch.ones(1)
        self._zero = None if self.grid.zero is None else self.grid.zero[..., None]
        step = self.grid.step[..., None]
        self.low, self.high = (self._levels(torch.full_like(step, end)) for end in (-_BEYOND, _BEYOND))
        levels = fmt.value(codes.unflatten(1, (-1, fmt.group_size)), self._one, self._zero)
        self.z = self._within(levels, weight.detach().float().unflatten(1, (-1, fmt.group_size)) / step)
        self.gain = torch.ones_like(self.grid.step)
        self.moments = {"z": Adam(self.z, shared=True), "gain": Adam(self.gain)}

    def _levels(self, z: Tensor) -> Tensor:
        return self.fmt.fake_quantize(z.clone(), self._one, self._zero)

    def _within(self, levels: Tensor, wanted: Tensor) -> Tensor:
        """As far from `levels` towards `wanted` (all, half, a quarter … of the way) as still rounds to `levels`."""
        z, part = levels.clone(), self._clamp(wanted) - levels
        missing = torch.ones_like(z, dtype=torch.bool)
        for _ in range(_HALVINGS):
            tried = levels + part
            fits = missing & (self._levels(tried) == levels)
            z = torch.where(fits, tried, z)
            missing &= ~fits
            part = part / 2
        return z

    def _clamp(self, z: Tensor) -> Tensor:
        """At most half a level past the ends of the grid, so that a saturated code can find its way back."""
        return torch.minimum(torch.maximum(z, self.low - 0.5, out=z), self.high + 0.5, out=z)

    def _grid(self) -> Grid:
        step = self.fmt.storable(self.grid.step * self.gain, self.grid, search=self.search)
        return self.fmt.with_step(self.grid, torch.where(step > 0, step, self.grid.step))

    def weight(self, dtype: torch.dtype) -> Tensor:
        """[out, in] as a decoder of `tensors()` has it, in `dtype`."""
        return self._levels(self.z).mul_(self._grid().step[..., None]).flatten(1).to(dtype)

    def update(self, grad: Tensor, rates: Rates) -> None:
        """One step against `grad` [out, in], the loss's gradient with respect to the weight."""
        grad = grad.float().unflatten(1, (-1, self.fmt.group_size))
        scaled = torch.linalg.vecdot(grad, self._levels(self.z)).mul_(self.grid.step)
        self.moments["z"].step(self.z, grad.mul_(self._grid().step[..., None]), rates.rounding)
        self.moments["gain"].step(self.gain, scaled, rates.scale)
        self._clamp(self.z)

    def tensors(self) -> dict[str, Tensor]:
        """On-disk tensors by suffix."""
        codes = self.fmt.round(self.z, self._one, self._zero).flatten(1)
        return {**self.fmt.pack(codes, self._grid()), **self.kept}
