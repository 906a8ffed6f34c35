"""Keys and values of a proposer: those of the text, and behind them those of a draft that grows level by level."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compressor.decode.cache import SequenceCache
from compressor.decode.layers import Span
from compressor.proposers.base import ROOT, Draft

CAPACITY = 256
"""Positions set aside at first; doubled as the text grows."""


class Rows(Span):
    """New rows of a `NodeCache`: text, or the draft's `nodes`. `positions` int64 [count]."""

    def __init__(
        self, cache: SequenceCache, positions: list[int], nodes: Sequence[int] = (), sees: Tensor | None = None
    ) -> None:
        super().__init__(0, len(positions), cache)
        self.positions = torch.tensor(positions, device=cache.keys.device)
        self.nodes = list(nodes)
        self.sees = sees  # bool [count, length + count]; None for text, where each row sees all up to itself
        self.everywhere = self.positions  # int64 [length + count], with those of the rows in the cache

    def _mask(self, window: int | None, repeats: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
        if self.sees is None:
            return super()._mask(window, repeats, dtype, device)
        sees = self.sees
        if window is not None:
            sees = sees & (self.positions[:, None] - self.everywhere < window).cpu()
        if sees.all():
            return None
        mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)
        return mask.repeat(repeats, 1).to(device)


class NodeCache:
    """A `SequenceCache` that grows, and knows which of its last rows are nodes of the current draft.

    Rows are taken with `text` or `nodes`, written by a pass and then confirmed with `add`. A node sees the text, its
    ancestors and itself. `make(capacity)` gives an empty cache.
    """

    def __init__(self, make: Callable[[int], SequenceCache]) -> None:
        self._make = make
        self._cache = make(CAPACITY)
        self._nodes: list[int] = []

    @property
    def length(self) -> int:
        """Rows of text."""
        return self._cache.length - len(self._nodes)

    def __contains__(self, node: int) -> bool:
        return node in self._nodes

    def text(self, count: int) -> Rows:
        """Rows for the next `count` tokens of the text. Raises ValueError while the cache holds nodes."""
        if self._nodes:
            raise ValueError("the nodes of the last draft were neither kept nor forgotten")
        self._reserve(count)
        return Rows(self._cache, list(range(self.length, self.length + count)))

    def nodes(self, draft: Draft, nodes: Sequence[int], root: int) -> Rows:
        """Rows for these nodes of `draft`, whose ancestors were read before; `root` is the position of its root."""
        self._reserve(len(nodes))
        known, length = [*self._nodes, *nodes], self.length
        sees = torch.zeros(len(nodes), length + len(known), dtype=torch.bool)
        sees[:, :length] = True
        for row, node in enumerate(nodes):
            while node != ROOT:
                if node in known:
                    sees[row, length + known.index(node)] = True
                node = draft.parent(node)
        positions = [root + draft.depths[node] for node in known]
        rows = Rows(self._cache, positions[len(self._nodes) :], nodes, sees)
        rows.everywhere = torch.tensor([*range(length), *positions], device=rows.positions.device)
        return rows

    def add(self, rows: Rows) -> None:
        """A pass has written `rows`."""
        self._cache.keep(rows.count)
        self._nodes += rows.nodes

    def keep(self, path: Sequence[int]) -> None:
        """The nodes of `path` have become text; the others are forgotten."""
        slots = [self._nodes.index(node) for node in path]
        self._cache.length = self.length  # all nodes count as written and not yet kept
        self._nodes = []
        self._cache.keep(0, slots)

    def forget(self) -> None:
        """Drop the nodes of the last draft."""
        self._cache.rollback(self.length)
        self._nodes = []

    def _reserve(self, count: int) -> None:
        old = self._cache
        if old.length + count <= old.capacity:
            return
        new = self._make(max(2 * old.capacity, old.length + count))
        new.keys[:, :, : old.length] = old.keys[:, :, : old.length]
        new.values[:, :, : old.length] = old.values[:, :, : old.length]
        new.length = new.written = old.length
        self._cache = new
