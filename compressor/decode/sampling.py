"""Probability vectors: checked, never repaired, and sampled so that a token of zero probability cannot come out."""

import torch

from compressor.errors import CompressError

SUM_TOLERANCE = 1e-6
"""How far the sum of a probability vector may be from 1: room for a float32 softmax, not for a missing token."""


class ProbabilityError(CompressError, ValueError):
    """A vector that is not a probability distribution, or a pair of them that cannot belong together."""


def check_probabilities(name: str, probs: torch.Tensor) -> torch.Tensor:
    """`probs` [..., V] as float64 on the CPU, refused unless every row is a distribution.

    Raises ProbabilityError naming `name` for NaN or infinite entries, negative entries, an empty vocabulary, or a row
    whose sum differs from 1 by more than `SUM_TOLERANCE`. Nothing is clipped or renormalised: a malformed row is a bug
    in the sampler that made it, and repairing it would change the law silently.
    """
    probs = torch.as_tensor(probs).to(device="cpu", dtype=torch.float64)
    if probs.ndim == 0 or probs.shape[-1] == 0:
        raise ProbabilityError(f"{name}: expected probabilities over a vocabulary, got shape {list(probs.shape)}")
    if probs.numel() == 0:
        return probs
    sums = probs.sum(-1)
    if not torch.isfinite(sums).all():  # a NaN or an infinity anywhere in a row shows in its sum
        raise ProbabilityError(f"{name}: a probability is NaN or infinite")
    if (probs.amin(-1) < 0).any():
        raise ProbabilityError(f"{name}: a probability is negative ({probs.min().item():.3g})")
    error = (sums - 1).abs()
    if error.max() > SUM_TOLERANCE:
        worst = sums.flatten()[error.argmax()].item()
        raise ProbabilityError(f"{name}: probabilities sum to {worst:.9g}, not 1")
    return probs


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF samples: `weights` [..., V] (need not sum to 1), `uniform` [...] in [0, 1) → token ids [...]. Both
    float64 where each probability must be exact; float32 where draws are many and only their average matters.

    The weights are not normalised; the uniform is stretched to their total instead, so a residual of mass 1e-14 is
    sampled as exactly as one of mass 1. The chosen token is the first whose cumulative weight exceeds the target: its
    own weight is then positive, also for `uniform` = 0, and because the target is kept below the total also where
    `uniform * total` rounds up to it. Runs on the CPU, where cumsum is sequential and therefore monotone.

    Raises ProbabilityError for a row with no positive weight.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[..., -1]
    if not (total > 0).all():
        raise ProbabilityError("nothing to sample from: every remaining token has probability zero")
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target.unsqueeze(-1), right=True).squeeze(-1)
