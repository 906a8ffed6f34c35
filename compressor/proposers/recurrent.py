"""Heads that read the target's states: what EAGLE-3 and multi-token prediction modules have in common."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from compressor.decode.cache import SequenceCache
from compressor.decode.decoder import CHUNK
from compressor.errors import CompressError
from compressor.proposers.base import ROOT, Context, Draft
from compressor.proposers.drafting import grow
from compressor.proposers.nodes import NodeCache, Rows


class Module(Protocol):
    """A block that makes, of a state and the token after it, a state further on."""

    def __call__(self, hidden: Tensor, tokens: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """hidden [N, width], tokens int64 [N] → the states [N, width] that logits are made of, and those that are
        handed on to the next step."""
        ...

    def cache(self, capacity: int) -> SequenceCache:
        """An empty cache of its own."""
        ...


class Head(Protocol):
    modules: Sequence[Module]
    branching: tuple[int, ...] | None

    def enter(self, features: Tensor) -> Tensor:
        """The target's states [N, features] as the first module reads them."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """[N, width] → [N, V] of the target."""
        ...


class HeadSession:
    """One text. Row p of module i reads the state that module i-1 handed on at row p (of the first: the target's state
    at position p) and the embedding of token p+1+i; its logits are for token p+2+i. So the first level of a draft is
    predicted by the first module, the second by the second, and further ones by the last module, from its own states.

    Rows of committed tokens are made once, of the target's own states; those of drafted tokens are forgotten
    afterwards, accepted or not, because the states that they were made of were the head's.
    (vLLM 0.32: v1/spec_decode/llm_base_proposer.py; for several modules v1/worker/gpu/spec_decode/multi_module_mtp.)
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._caches = [NodeCache(module.cache) for module in head.modules]
        self._read = 1  # tokens of the text that the modules have seen: no state precedes the first
        # What each module handed on after the text and after every node; None where a text is too short for a row.
        self._handed: dict[int, list[Tensor | None]] = {ROOT: [None] * len(self._caches)}

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        for cache in self._caches:
            cache.forget()
        root = self._read_text(context)
        length = len(context.history)
        return grow(context, self._head.branching, root, lambda draft, nodes: self._expand(draft, nodes, length))

    def _read_text(self, context: Context) -> Tensor:
        """The new tokens, with the target's states before them; returns the logits [V] after the last."""
        new, features = context.history[self._read :], context.features
        if features is None or len(features) != len(new):
            count = 0 if features is None else len(features)
            raise CompressError(f"the proposer got {count} states of the target for {len(new)} new tokens")
        self._read = len(context.history)
        for start in range(0, len(new), CHUNK):
            state = self._read_rows(new[start : start + CHUNK], features[start : start + CHUNK])
        return self._head.logits(state)[0]

    def _read_rows(self, new: list[int], features: Tensor) -> Tensor:
        """The first module's state [1, width] after the last of `new`."""
        hidden = handed = self._head.enter(features)
        tokens = torch.tensor(new, device=hidden.device)
        before = self._handed[ROOT]
        after: list[Tensor | None] = [None] * len(before)
        tops = []
        for index, (module, cache) in enumerate(zip(self._head.modules, self._caches, strict=True)):
            if index:
                last = before[index - 1]
                hidden = handed[:-1] if last is None else torch.cat([last[None], handed[:-1]])
                tokens = tokens[len(tokens) - len(hidden) :]
            if not len(tokens):
                break
            rows = cache.text(len(tokens))
            top, handed = module(hidden, tokens, rows)
            cache.add(rows)
            after[index] = handed[-1]
            tops.append(top[-1:])
        self._handed = {ROOT: after}
        return tops[0]

    def _expand(self, draft: Draft, nodes: list[int], length: int) -> Tensor:
        """Logits [len(nodes), V] after nodes of one level, and the rows that later levels look back at."""
        depth, last = draft.depths[nodes[0]], len(self._caches) - 1
        tokens, states = [draft.tokens[node] for node in nodes], None
        for node in nodes:
            self._handed[node] = [None] * (last + 1)
        for index in range(min(depth, last), last + 1):
            source = index if depth > last else index - 1
            given = [self._handed[draft.parent(node)][source] for node in nodes]
            if given[0] is None:  # and so all of them: they are equally deep
                break
            rows = self._caches[index].nodes(draft, nodes, length - 2 - index)
            hidden = torch.stack(given)  # type: ignore[arg-type]
            top, handed = self._head.modules[index](hidden, torch.tensor(tokens, device=hidden.device), rows)
            self._caches[index].add(rows)
            for node, state in zip(nodes, handed, strict=True):
                self._handed[node][index] = state
            states = top if states is None else states
        assert states is not None  # the text has two tokens
        return self._head.logits(states)
