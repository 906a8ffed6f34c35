"""AWQ (Lin et al., arXiv 2306.00978, section 3.2): channels that see large inputs get finer steps, s = mean|x|^α."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.formats import Format
from compressor.transform.search import SMALLEST, Quantizer, Smoothing, best, pool, quantizer


def scales_for(mean: Tensor, alpha: float) -> Tensor:
    """mean|x| float [in] → scales [in] with √(largest · smallest) = 1, as the authors' code normalises them."""
    largest = float(mean.max())
    if largest == 0:
        return torch.ones_like(mean)
    s = (mean / largest).clamp(min=SMALLEST).pow(alpha)
    return s / (s.max() * s.min()).sqrt()


@torch.no_grad()
def awq(
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
    """Scales for linears that read the same input.

    Args:
        weights: float [out_i, in] each.
        hessian: float [in, in], the mean of x xᵀ; all of it weighs the errors, where the paper runs the inputs.
        mean, maximum: float [in], mean and largest |x| of each input; the latter is not used.
        fmt: what the weights will be rounded to.
        alpha: the exponent; None: searched.
        shared: int64 [in], inputs that must have one scale have one number here; None: each is free.
        quantize: rounds for the search; None: to nearest in `fmt` by its standard rule, fused.
    """
    pooled = pool(mean, shared, "mean")
    rounding = quantize or quantizer(fmt, fused=True)
    return best(weights, hessian, lambda exponent: scales_for(pooled, exponent), rounding, alpha)
