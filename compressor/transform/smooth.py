"""SmoothQuant (Xiao et al., arXiv 2211.10438, equation 4): s = max|x|^α / max|w|^(1 − α) moves outliers of the inputs
into the weights, the more the larger α is."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.formats import Format
from compressor.transform.search import SMALLEST, Quantizer, Smoothing, best, pool, quantizer


def scales_for(maximum: Tensor, weight_maximum: Tensor, alpha: float) -> Tensor:
    """max|x| and max|w| of each input, float [in] → scales [in]. An input that is always zero, or that no weight reads,
    counts as the smallest one."""
    top, widest = float(maximum.max()), float(weight_maximum.max())
    if top == 0 or widest == 0:
        return torch.ones_like(maximum)
    x, w = maximum.clamp(min=SMALLEST * top), weight_maximum.clamp(min=SMALLEST * widest)
    return x.pow(alpha) / w.pow(1 - alpha)


@torch.no_grad()
def smoothquant(
    weights: Sequence[Tensor],
    hessian: Tensor,
    mean: Tensor,
    maximum: Tensor,
    fmt: Format,
    *,
    alpha: float | None = None,
    shared: Tensor | None = None,
    quantize: Quantizer | None = None,
) -> Smoothing:
    """Scales for linears that read the same input; arguments as `awq`, of the statistics `mean` is not used.

    The paper fixes α for a model; here the one with the least output error of the rounded weights is taken. That error
    does not see the rounding of inputs: where inputs are rounded too, a stated `alpha` (0.5 is usual) makes the trade.
    """
    widest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    x, w = pool(maximum, shared, "amax"), pool(widest, shared, "amax")
    rounding = quantize or quantizer(fmt, fused=True)
    return best(weights, hessian, lambda exponent: scales_for(x, w, exponent), rounding, alpha)
