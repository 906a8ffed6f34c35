"""What a proposer is to the runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from compressor.decode.law import Law


@dataclass(frozen=True)
class Proposal:
    """A chain of proposed tokens and the laws they were drawn from.

    `q` [len(tokens), V] float, already filtered by the sampling law; None says that the choice was deterministic, so
    every row of q is one-hot at its token.
    """

    tokens: tuple[int, ...]
    q: torch.Tensor | None = None


class Proposer(Protocol):
    """Proposes what may follow. Any proposer keeps the output's law exact; a poor one only costs speed."""

    def propose(self, history: list[int], k: int, law: Law, generator: torch.Generator) -> Proposal:
        """At most `k` ≥ 1 tokens after `history` (prompt and all committed tokens); fewer or none is allowed.

        A proposer that samples applies `law` to its own logits, draws from `generator`, and returns those laws as q.
        Calls need not continue one another: state kept between them must be brought in line with `history` first.
        """
        ...
