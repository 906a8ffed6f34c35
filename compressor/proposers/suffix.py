"""Suffix decoding: propose the most frequent continuation of the longest repeated end of the text. No model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from compressor.errors import UsageError, brief
from compressor.proposers.base import NOTHING, Context, Draft


class SuffixProposer:
    """Suffix decoding (Oliaro et al., 2024; vLLM's `suffix` method) over prompt and generated text of one session.

    The longest suffix of the history, of at most `max_tree_depth` tokens, that occurred before is the context. Its most
    frequent continuation is proposed (of equally frequent ones that which occurred last) and joins the context, and so
    on. A context longer than `max_tree_depth` loses its first token, unless it occurred only once: that is copied on.
    The draft ends

    - at min(k, floor(max_spec_factor · m + max_spec_offset)) tokens, m the length of the repeated suffix;
    - before a token with which the product of the estimated probabilities falls below `min_token_prob`, each the share
      of a token among the continuations that the context had so far;
    - where the history ends.

    Differences to Arctic Inference, vLLM's implementation: it tries every length of the suffix and takes the draft with
    the largest sum of probabilities; there `max_tree_depth` bounds suffix and draft together, and the history's end
    counts among a context's occurrences; and it also looks into earlier responses.

    Raises UsageError unless max_tree_depth ≥ 1, max_spec_factor ≥ 0, 0 ≤ min_token_prob ≤ 1, all numbers finite.
    """

    features: tuple[int, ...] = ()

    def __init__(
        self,
        max_tree_depth: int = 24,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        max_spec_offset: float = 0.0,
    ) -> None:
        if type(max_tree_depth) is not int or max_tree_depth < 1:
            raise UsageError(f"max_tree_depth: {brief(max_tree_depth)} is not an integer ≥ 1")
        if not _is_finite(max_spec_factor) or max_spec_factor < 0:
            raise UsageError(f"max_spec_factor: {brief(max_spec_factor)} is not a finite number ≥ 0")
        if not _is_finite(min_token_prob) or not 0 <= min_token_prob <= 1:
            raise UsageError(f"min_token_prob: {brief(min_token_prob)} is not a number in [0, 1]")
        if not _is_finite(max_spec_offset):
            raise UsageError(f"max_spec_offset: {brief(max_spec_offset)} is not a finite number")
        self.max_tree_depth = max_tree_depth
        self.max_spec_factor = max_spec_factor
        self.min_token_prob = min_token_prob
        self.max_spec_offset = max_spec_offset

    def session(self) -> SuffixSession:
        return SuffixSession(self)

    def limit(self, match: int, k: int) -> int:
        """Tokens that may be drafted after a repeated suffix of `match` tokens: k at most, none where not positive."""
        worth = self.max_spec_factor * match + self.max_spec_offset
        return math.floor(min(k, worth + 1e-6))  # 0.29 · 100 is 29, not 28.99…


class _Text:
    """A text that occurs in the history: a node of the trie.

    While it has occurred once (`count` 1), the history itself says what follows, from `end` on: only a repeated text
    counts its continuations.
    """

    __slots__ = ("best", "continuations", "count", "end", "followed", "shorter", "token")
    continuations: dict[int, _Text]
    followed: int  # the sum of the continuations' counts
    best: _Text  # the continuation with the largest count, of equals the latest
    shorter: _Text  # the text without its first token, repeated as well

    def __init__(self, token: int, end: int) -> None:
        self.token = token
        self.count = 1
        self.end = end

    def branch(self, shorter: _Text) -> None:
        self.continuations, self.followed, self.shorter = {}, 0, shorter

    def follow(self, token: int, end: int) -> _Text:
        """Count `token`, which ends at `end`, as a continuation of this repeated text."""
        longer = self.continuations.get(token)
        if longer is None:
            longer = self.continuations[token] = _Text(token, end)
        else:
            longer.count += 1
        self.followed += 1
        if self.followed == 1 or longer.count >= self.best.count:
            self.best = longer
        return longer


class SuffixSession:
    """One text's repeated pieces. A new token costs at most two dictionary insertions for every length of a suffix
    that is repeated, however long the history is, and all told at most max_tree_depth + 1 nodes."""

    def __init__(self, settings: SuffixProposer) -> None:
        self._settings = settings
        empty = _Text(-1, 0)
        empty.branch(empty)
        self._indexed = 0
        self._suffixes = [empty]  # the history's suffixes of 0, 1, … tokens, as long as they occurred before

    def propose(self, context: Context) -> Draft:
        """A chain of up to `context.k` tokens, q None: the choice is deterministic, whatever the law."""
        history, settings = context.history, self._settings
        for end in range(self._indexed + 1, len(history) + 1):
            self._append(history, end)
        self._indexed = len(history)

        depth = len(self._suffixes) - 1
        if depth == 0:
            return NOTHING
        text, probability, limit = self._suffixes[-1], 1.0, settings.limit(depth, context.k)
        draft: list[int] = []
        while len(draft) < limit:
            if text.count == 1:
                draft += history[text.end : text.end + limit - len(draft)]
                break
            longer = text.best
            probability *= longer.count / text.followed
            if probability < settings.min_token_prob:
                break
            draft.append(longer.token)
            if depth == settings.max_tree_depth and longer.count > 1:
                longer = text.shorter.continuations[longer.token]
            else:
                depth += 1
            text = longer
        return Draft(tuple(draft))

    def _append(self, history: Sequence[int], end: int) -> None:
        """The history has grown to `end` tokens."""
        token = history[end - 1]
        suffixes = self._suffixes[:1]
        for text in self._suffixes:
            longer = text.follow(token, end)
            if longer.count == 1 or len(suffixes) > self._settings.max_tree_depth:
                continue
            if longer.count == 2:  # repeated from now on: what followed the first time counts first
                longer.branch(suffixes[-1])
                longer.follow(history[longer.end], longer.end + 1)
            suffixes.append(longer)
        self._suffixes = suffixes


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
