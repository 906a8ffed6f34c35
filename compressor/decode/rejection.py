"""Speculative sampling's accept-or-correct step: the output law is the target's, whatever the proposer.

Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding" (2023), algorithm 1;
Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling" (2023).
"""

from collections.abc import Sequence

import torch

from compressor.decode.sampling import ProbabilityError, check_probabilities, draw

__all__ = ["ProbabilityError", "accept_or_correct", "accept_or_correct_batch"]


def accept_or_correct(
    p: torch.Tensor,
    q: torch.Tensor | None,
    proposals: Sequence[int] | torch.Tensor,
    generator: torch.Generator,
) -> tuple[int, int]:
    """(number of proposals accepted, next token) for one chain of k proposals.

    - `p` [k+1, V]: the target's laws; row i is conditioned on the prefix and proposals[:i].
    - `q` [k, V]: the laws the proposals were drawn from, or None for a deterministic proposer, whose q is one-hot at
      its proposal (accepted with probability p(x); the residual is p without x).
    - `proposals`: k token ids, drawn from the rows of q.

    Proposal i is accepted with probability min(1, p(x)/q(x)) if all before it were. The next token comes from the
    residual norm((p - q)₊) at the first rejection, or from the last row of p if every proposal survived. float64
    throughout. Raises ProbabilityError (a ValueError) for rows that are no distributions, shapes that do not fit, or
    a proposal that q cannot have produced.
    """
    p = torch.as_tensor(p)
    if p.ndim != 2:
        raise ProbabilityError(f"p: expected [k+1, V], got shape {list(p.shape)}")
    chain = torch.as_tensor(proposals, dtype=torch.long).reshape(1, -1)
    accepted, token = accept_or_correct_batch(
        p.unsqueeze(0), None if q is None else torch.as_tensor(q).unsqueeze(0), chain, generator
    )
    return int(accepted), int(token)


def accept_or_correct_batch(
    p: torch.Tensor, q: torch.Tensor | None, proposals: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`accept_or_correct` for B independent chains of the same length: p [B, k+1, V], q [B, k, V] or None,
    proposals [B, k] int64 → (accepted [B], next token [B]), both int64 on the CPU.
    """
    p, q, proposals = _checked(p, q, proposals)
    batch, length = proposals.shape
    rows = torch.arange(batch)
    # A uniform in [0, 1) is below min(1, p/q) exactly when it is below p/q, and never when p is 0.
    ratio = p[:, :length].gather(-1, proposals.unsqueeze(-1)).squeeze(-1)
    if q is not None:
        ratio = ratio / q.gather(-1, proposals.unsqueeze(-1)).squeeze(-1)
    uniform = torch.rand((batch, length), generator=generator, dtype=torch.float64)
    accepted = (uniform < ratio).long().cumprod(-1).sum(-1)
    weights = p[rows, accepted]  # the bonus row where accepted == length
    rejected = accepted < length
    if rejected.any():
        at, where = accepted[rejected], rows[rejected]
        if q is None:
            weights[where, proposals[where, at]] = 0.0
        else:
            weights[where] = (weights[where] - q[where, at]).clamp_min(0.0)
    return accepted, draw(weights, torch.rand(batch, generator=generator, dtype=torch.float64))


def _checked(
    p: torch.Tensor, q: torch.Tensor | None, proposals: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The inputs as float64 and int64 CPU tensors, refused by name where they cannot belong to one verification."""
    proposals = torch.as_tensor(proposals, dtype=torch.long, device="cpu")
    p = check_probabilities("p", p)
    batch, length = proposals.shape
    if p.ndim != 3 or p.shape[:2] != (batch, length + 1):
        raise ProbabilityError(
            f"p: {length} proposals need {length + 1} rows, one for each and one for the bonus token; "
            f"got shape {list(p.shape[1:])}"
        )
    vocabulary = p.shape[-1]
    if ((proposals < 0) | (proposals >= vocabulary)).any():
        raise ProbabilityError(f"proposals: a token id is outside the vocabulary of {vocabulary}")
    if q is not None:
        q = check_probabilities("q", q)
        if q.shape != (batch, length, vocabulary):
            raise ProbabilityError(
                f"q: expected shape {[length, vocabulary]} beside p {list(p.shape[1:])}, got {list(q.shape[1:])}"
            )
        if (q.gather(-1, proposals.unsqueeze(-1)) <= 0).any():
            raise ProbabilityError("proposals: a token has probability zero under q, so q did not propose it")
    return p, q, proposals
