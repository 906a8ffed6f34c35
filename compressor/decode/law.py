"""The sampling law: how logits become the distribution that tokens are actually drawn from."""

import math
from dataclasses import dataclass

import torch

from compressor.decode.sampling import ProbabilityError, check_probabilities, draw
from compressor.errors import UsageError


@dataclass(frozen=True)
class Law:
    """Temperature, then top-k, then top-p: the order and the tie rules of transformers' logits warpers.

    - `temperature` ≥ 0; 0 is greedy: all mass on the first largest logit, `top_k` and `top_p` then change nothing.
    - `top_k` None (off) or ≥ 1. Tokens tied with the k-th largest logit all stay.
    - `top_p` in (0, 1]; 1 is off. The smallest set of most probable tokens with mass ≥ `top_p` stays; among logits tied
      at the boundary those stay that `torch.sort` puts last, as in `TopPLogitsWarper`.

    The same law applies to the target and to a proposer with logits of its own: rejection sampling is exact only if
    p and q are the laws that were sampled from. Raises UsageError naming the field for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise UsageError(f"temperature: {self.temperature!r} is not a number ≥ 0; 0 means greedy")
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1
        ):
            raise UsageError(f"top_k: {self.top_k!r} is not an integer ≥ 1; leave it null to switch it off")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise UsageError(f"top_p: {self.top_p!r} is not a number in (0, 1]; 1 switches it off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` [..., V] of any float dtype → probabilities [..., V], float64, on the same device.

        A logit of -inf is a forbidden token. Raises ProbabilityError for NaN, +inf, or a row with nothing allowed.
        """
        scores = logits.to(torch.float64)
        peak = scores.amax(-1)
        if not torch.isfinite(peak).all():  # amax propagates NaN; -inf means that the whole row is forbidden
            raise ProbabilityError("logits: NaN, +inf, or a row without any allowed token")
        if self.greedy:
            best = scores.argmax(-1, keepdim=True)  # the first maximum
            return torch.zeros_like(scores).scatter_(-1, best, 1.0)
        if self.temperature != 1:
            scores = scores / self.temperature
        if self.top_k is not None:
            kth = scores.topk(min(self.top_k, scores.shape[-1])).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if self.top_p < 1:
            ascending, order = torch.sort(scores, dim=-1)  # the warper's own call: ties fall the same way
            drop = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            drop[..., -1] = False
            scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
        return scores.softmax(-1)

    def sample(self, probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """`probs` [..., V] → token ids [...], int64. Raises ProbabilityError for a row that is no distribution."""
        probs = check_probabilities("probs", probs)
        return draw(probs, torch.rand(probs.shape[:-1], generator=generator, dtype=torch.float64))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
