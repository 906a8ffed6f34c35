"""How far a quantized weight is from the original, in the units that matter to the layer's output."""

import math

import torch
from torch import Tensor

_PANEL = 256
"""Columns taken together: wide enough for products at full speed, few enough for half of them to be saved."""


def output_energy(weight: Tensor, hessian: Tensor) -> float:
    """tr(W H Wᵀ): the squared norm of the layer's output over the inputs that made H = Σ x xᵀ. W [out, in], H [in, in]
    symmetric: of every two mirrored panels one is read."""
    w, total = weight.to(hessian.dtype), 0.0
    for start in range(0, w.shape[1], _PANEL):
        panel = slice(start, start + _PANEL)
        mirrored = w[:, : panel.start] @ hessian[: panel.start, panel]
        product = (w[:, panel] @ hessian[panel, panel]).add_(mirrored, alpha=2)
        total += float(product.mul_(w[:, panel]).sum(dtype=torch.float64))
    return total


def relative_output_error(weight: Tensor, decoded: Tensor, hessian: Tensor | None) -> float:
    """tr(E H Eᵀ) / tr(W H Wᵀ) with E = decoded − W; the identity stands in for a missing H. 0 for a zero weight."""
    w, error = weight.float(), decoded.float() - weight.float()
    if hessian is None:
        noise, signal = float(error.double().square().sum()), float(w.double().square().sum())
    else:
        noise, signal = output_energy(error, hessian), output_energy(w, hessian)
    return noise / signal if signal > 0 else 0.0


def relative_diagonal_error(weight: Tensor, decoded: Tensor, diagonal: Tensor) -> float:
    """Σ h e² / Σ h w², the elements e of E = decoded − W and w of W weighed by `diagonal` h (float [in], ≥ 0), that of
    H: what `relative_output_error` would be for inputs that have nothing to do with each other."""
    root = diagonal.float().sqrt()
    return relative_output_error(weight.float() * root, decoded.float() * root, None)


def sqnr_db(weight: Tensor, decoded: Tensor) -> float:
    """10 log10(‖W‖² / ‖decoded − W‖²) in decibel; infinite for an exact copy."""
    ratio = relative_output_error(weight, decoded, None)
    return -10 * math.log10(ratio) if ratio > 0 else math.inf
