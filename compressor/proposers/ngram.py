"""Prompt lookup: propose what followed the latest n-gram when it occurred before. No model, no cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from compressor.errors import UsageError
from compressor.proposers.base import Proposal

if TYPE_CHECKING:
    from compressor.decode.law import Law


class NgramProposer:
    """vLLM's `ngram` speculation, choice for choice.

    The longest suffix of the history, between `prompt_lookup_min` and `prompt_lookup_max` tokens, that also occurs
    earlier (an occurrence may overlap the suffix); of several occurrences the earliest. The tokens after it are
    proposed: up to k, fewer where the history ends first. (vllm/v1/spec_decode/ngram_proposer.py, 0.32.)

    Every n-gram's first continuation is kept in a table, so a new token costs a few insertions instead of a scan of the
    history. Raises UsageError unless 1 ≤ prompt_lookup_min ≤ prompt_lookup_max.
    """

    def __init__(self, prompt_lookup_min: int = 1, prompt_lookup_max: int = 4) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise UsageError(
                f"prompt_lookup_min: {prompt_lookup_min} and prompt_lookup_max: {prompt_lookup_max}; "
                "need 1 ≤ prompt_lookup_min ≤ prompt_lookup_max"
            )
        self.sizes = range(prompt_lookup_min, prompt_lookup_max + 1)
        self._indexed: list[int] = []
        self._continuation: dict[tuple[int, ...], int] = {}  # n-gram → position after its first occurrence

    def propose(
        self, history: list[int], k: int, law: Law | None = None, generator: torch.Generator | None = None
    ) -> Proposal:
        """Up to `k` tokens after `history`, q None: the choice is deterministic, whatever the law."""
        self._index(history)
        for size in reversed(self.sizes):
            start = self._continuation.get(tuple(history[-size:])) if size <= len(history) else None
            if start is not None:
                return Proposal(tuple(history[start : start + k]))
        return Proposal(())

    def _index(self, history: list[int]) -> None:
        """Bring the table in line with `history`: extend it, or start over where `history` is another text."""
        if history[: len(self._indexed)] != self._indexed:
            self._indexed, self._continuation = [], {}
        for end in range(len(self._indexed), len(history)):
            # The n-grams that end before position `end` have a continuation from now on.
            for size in self.sizes:
                if size <= end:
                    self._continuation.setdefault(tuple(history[end - size : end]), end)
        self._indexed += history[len(self._indexed) :]
