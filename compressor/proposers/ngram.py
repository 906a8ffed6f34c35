"""Prompt lookup: propose what followed the latest n-gram when it occurred before. No model, no cost."""

from __future__ import annotations

from compressor.errors import UsageError
from compressor.proposers.base import NOTHING, Context, Draft


class NgramProposer:
    """vLLM's `ngram` speculation, choice for choice.

    The longest suffix of the history, between `prompt_lookup_min` and `prompt_lookup_max` tokens, that also occurs
    earlier (an occurrence may overlap the suffix); of several occurrences the earliest. The tokens after it are
    proposed: up to k, fewer where the history ends first. (vllm/v1/spec_decode/ngram_proposer.py, 0.32.)

    Raises UsageError unless 1 ≤ prompt_lookup_min ≤ prompt_lookup_max.
    """

    features: tuple[int, ...] = ()

    def __init__(self, prompt_lookup_min: int = 1, prompt_lookup_max: int = 4) -> None:
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise UsageError(
                f"prompt_lookup_min: {prompt_lookup_min} and prompt_lookup_max: {prompt_lookup_max}; "
                "need 1 ≤ prompt_lookup_min ≤ prompt_lookup_max"
            )
        self.sizes = range(prompt_lookup_min, prompt_lookup_max + 1)

    def session(self) -> NgramSession:
        return NgramSession(self.sizes)


class NgramSession:
    """One text's n-grams of the lengths `sizes`, each with its first continuation: a new token costs a few insertions
    instead of a scan of the history."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._indexed = 0  # positions of the history that are in the table
        self._continuation: dict[tuple[int, ...], int] = {}  # n-gram → position after its first occurrence

    def propose(self, context: Context) -> Draft:
        """A chain of up to `context.k` tokens, q None: the choice is deterministic, whatever the law."""
        history = context.history
        # An n-gram enters the table together with its continuation: the one that ends the history is not in it yet.
        for end in range(self._indexed, len(history)):
            for size in self._sizes:
                if size <= end:
                    self._continuation.setdefault(tuple(history[end - size : end]), end)
        self._indexed = len(history)
        for size in reversed(self._sizes):
            start = self._continuation.get(tuple(history[-size:])) if size <= len(history) else None
            if start is not None:
                return Draft(tuple(history[start : start + context.k]))
        return NOTHING
