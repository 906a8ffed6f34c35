"""How often a proposer in training foresees the target, position by position."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Tally:
    """Of roots, by step: how many were `reached` (every earlier step was right), and how many were right then."""

    hits: Tensor
    reached: Tensor

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.hits + other.hits, self.reached + other.reached)

    @property
    def conditional(self) -> list[float]:
        return (self.hits / self.reached.clamp(min=1)).tolist()

    @property
    def tau(self) -> float:
        """Expected tokens a cycle if every root were as likely as any other."""
        return 1 + float((self.hits / self.reached.clamp(min=1)).cumprod(0).sum())


def chains(right: Tensor, counted: Tensor) -> Tally:
    """The tally of chains that begin at any token and go on to those behind it.

    right: bool [S, B, L], whether step s of a chain foresees a token; counted: bool [B, L], the tokens that may be part
    of a chain.
    """
    places = torch.stack([F.pad(counted, (0, step))[:, step:] for step in range(len(right))])  # by a chain's first one
    hits = torch.stack([F.pad(board, (0, step))[:, step:] for step, board in enumerate(right)])
    alive = (hits & places).cumprod(0).bool()
    reached = places & torch.cat([places[:1], alive[:-1]])
    return Tally(alive.sum((1, 2)).double(), reached.sum((1, 2)).double())
