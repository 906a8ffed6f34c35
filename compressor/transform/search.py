"""Which channel scales leave a linear group's output closest to the original after rounding. No model in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.formats import Format
from compressor.quantize.metrics import output_energy

ALPHAS = tuple(i / 20 for i in range(21))
"""Exponents tried (AWQ, section 3.2: a grid of 20 over [0, 1])."""
SMALLEST = 1e-4
"""Of the largest statistic: channels that see less are treated as if they saw that much."""

Quantizer = Callable[[list[Tensor], Tensor], list[Tensor]]
"""(weights [out_i, in], importance float [in]: the mean square of each input) → the weights as a decoder reads them."""


@dataclass(frozen=True)
class Smoothing:
    """scales: float32 [in], 1 where nothing is better than no scaling. alpha: the exponent that gave them, None for no
    scaling. error_before, error_after: Σ tr(E H Eᵀ) over the weights without and with the scales, E in the unscaled
    weights' coordinates, relative to Σ tr(W H Wᵀ)."""

    scales: Tensor
    alpha: float | None
    error_before: float
    error_after: float


def quantizer(fmt: Format, *, fused: bool) -> Quantizer:
    """Rounding to nearest in `fmt`. fused: engines concatenate the weights, so a global scale is common to all. By
    the format's standard rule, which is tens of times faster than a scale search."""

    def quantize(weights: list[Tensor], importance: Tensor) -> list[Tensor]:
        common = fmt.global_scale(weights) if fused else None
        return [fmt.decode(fmt.encode(weight, importance=importance, global_scale=common)) for weight in weights]

    return quantize


def output_error(weights: Sequence[Tensor], hessian: Tensor, scales: Tensor, quantize: Quantizer) -> float:
    """Σ tr(E H Eᵀ) over `weights` [out_i, in] for inputs of Hessian `hessian` [in, in], with E = Q(W·diag(s))/s − W.
    The scaled weights are rounded to the weights' dtype, as they will be stored."""
    scaled = [(weight.float() * scales).to(weight.dtype) for weight in weights]
    decoded = quantize(scaled, hessian.diagonal() / scales.square())
    return sum(output_energy(d.float() / scales - w.float(), hessian) for w, d in zip(weights, decoded, strict=True))


def best(
    weights: Sequence[Tensor],
    hessian: Tensor,
    scales_of: Callable[[float], Tensor],
    quantize: Quantizer,
    alpha: float | None = None,
) -> Smoothing:
    """The exponent of `ALPHAS` whose scales (float [in], by `scales_of`) leave the least output error; no scaling where
    none leaves less than that. A stated `alpha` is taken whatever it leaves."""
    energy = sum(output_energy(weight, hessian) for weight in weights) or 1.0
    chosen, scales = None, torch.ones(hessian.shape[0])
    before = least = output_error(weights, hessian, scales, quantize)
    for exponent in ALPHAS if alpha is None else (alpha,):
        candidate = scales_of(exponent)
        error = output_error(weights, hessian, candidate, quantize)
        if error < least or alpha is not None:
            chosen, scales, least = exponent, candidate, error
    return Smoothing(scales.float(), chosen, before / energy, least / energy)


def pool(statistic: Tensor, shared: Tensor | None, how: str) -> Tensor:
    """A statistic of each input [in], made common to the inputs of equal `shared` (int64 [in]) by "mean" or "amax"."""
    if shared is None:
        return statistic.float()
    size = int(shared.max()) + 1
    return torch.zeros(size).scatter_reduce(0, shared, statistic.float(), how, include_self=False)[shared]
