"""How often a proposer in training foresees the target: what a runner would count on the same greedy texts."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Tally:
    """Of drafts, by position: how many `reached` it (every token before was right), and how many were right then."""

    hits: Tensor
    reached: Tensor

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.hits + other.hits, self.reached + other.reached)

    @property
    def conditional(self) -> list[float]:
        return (self.hits / self.reached.clamp(min=1)).tolist()

    @property
    def tau(self) -> float:
        """Tokens a cycle, of cycles with a draft."""
        return 1 + float(self.hits.sum() / self.reached[0].clamp(min=1))


def cycles(right: Tensor, counted: Tensor) -> Tally:
    """The cycles of a runner that writes the answers: each draft begins behind the token with which the one before
    ended, the first behind the answer's first token, which is the target's own.

    right: bool [S, B, L], whether position s of a draft foresees a token; counted: bool [B, L], the tokens of answers,
    one run a row.
    """
    hits = torch.stack([F.pad(board & counted, (0, step))[:, step:] for step, board in enumerate(right)])
    accepted = hits.cumprod(0).sum(0).tolist()  # of a draft that begins with this token
    wins, drafts = [0] * len(right), [0] * len(right)  # numbers, not tensors: there is one update a cycle
    for row, inside in zip(accepted, counted, strict=True):
        places = inside.nonzero()[:, 0].tolist()
        end = places[-1] + 1 if places else 0
        place = places[0] + 1 if places else 0
        while place < end:
            for step in range(row[place]):
                wins[step] += 1
            for step in range(min(row[place] + 1, end - place, len(right))):
                drafts[step] += 1
            place += row[place] + 1
    return Tally(torch.tensor(wins, dtype=torch.float64), torch.tensor(drafts, dtype=torch.float64))
