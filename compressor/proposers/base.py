"""What a proposer is to the runner: drafts of what may follow, in the shape of a chain or a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from compressor.decode.law import LawState

ROOT = -1
"""The parent of a draft's first nodes: the last committed token."""
FINAL = -1
"""The target's state after its final norm, as an entry of `Proposer.features`."""
MAX_NODES = 64
"""Nodes a draft may have: room for them is set aside in every cache."""


@dataclass(frozen=True)
class Draft:
    """Proposed tokens: a tree whose root is the last committed token. A chain is the tree without branches.

    - `tokens`: n ids; a node comes after its parent, siblings in the order they were drawn, and no two of them equal.
    - `parents`: the index of each node's parent, `ROOT` for the first level; None for a chain.
    - `q` [n, V] float: row i is the law that was in force at node i's parent, filtered by the sampling law, *before*
      any sibling was taken out of it; siblings are drawn from it one after the other without replacement. None says
      that every node was chosen deterministically, given the text before it.

    Whether a node exists may depend on the text and on everything drawn before it, never on its own token or a later
    one: a drawn token that is thrown away again, or put in another place, changes the law.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...] | None = None
    q: torch.Tensor | None = None

    def parent(self, node: int) -> int:
        return node - 1 if self.parents is None else self.parents[node]

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Nodes by parent, in drawing order."""
        found: dict[int, list[int]] = {}
        for node in range(len(self.tokens)):
            found.setdefault(self.parent(node), []).append(node)
        return found

    @cached_property
    def depths(self) -> list[int]:
        """Distance of every node from the root: 1 for the first level."""
        depths: list[int] = []
        for node in range(len(self.tokens)):
            parent = self.parent(node)
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Token ids from the first level down to `node`; empty for `ROOT`."""
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parent(node)
        return tokens[::-1]


NOTHING = Draft(())


@dataclass(frozen=True)
class Context:
    """What a session may know when it drafts.

    - `history`: prompt and all committed tokens. The list grows from call to call and belongs to the runner.
    - `k` ≥ 1: the depth of the draft at most; a shallower one or none is allowed.
    - `law`: the sampling law after `history`; `law.probs(logits, path)` applies it to the proposer's own logits after
      the drafted `path`, `law.ends(path)` says that nothing can follow.
    - `generator`: where all of a session's random numbers come from.
    - `features` [m, width]: the states the proposer asked for (`Proposer.features`, side by side) of those positions
      that were committed since the session's last call: one for each token of the history but the last, all told.
    - `confidence`: a chain stops after a token that its own law gave less than this.
    """

    history: list[int]
    k: int
    law: LawState
    generator: torch.Generator
    features: torch.Tensor | None = None
    confidence: float = 0.0


class Session(Protocol):
    """A proposer's state for one text."""

    def propose(self, context: Context) -> Draft:
        """What may follow `context.history`. Between two calls the history grows by what was accepted and corrected:
        state about rejected drafts must be forgotten first."""
        ...


class Proposer(Protocol):
    """Proposes what may follow. Any proposer keeps the output's law exact; a poor one only costs speed."""

    @property
    def features(self) -> Sequence[int]:
        """States of the target it reads: k for the residual stream after k layers (0: embeddings), `FINAL`."""
        ...

    def session(self) -> Session: ...
