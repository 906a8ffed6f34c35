"""The sampling law: how logits become the distribution that tokens are actually drawn from."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from compressor.decode.sampling import ProbabilityError
from compressor.errors import UsageError


class Matcher(Protocol):
    """A grammar's state along one text."""

    def allowed(self, path: Sequence[int]) -> torch.Tensor | None:
        """bool [V], the tokens that may follow the committed text and `path`; None where the grammar forbids `path`
        itself or is complete after it."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """Make `tokens` part of the text for good."""
        ...


class Grammar(Protocol):
    """A compiled grammar (compressor.decode.grammar): which texts are allowed at all."""

    def matcher(self) -> Matcher: ...


@dataclass(frozen=True)
class Law:
    """Repetition penalty, grammar, temperature, top-k, top-p, min-p: the order and tie rules of transformers.

    - `temperature` ≥ 0; 0 is greedy: all mass on the first largest logit, `top_k`, `top_p` and `min_p` then change
      nothing.
    - `top_k` None (off) or ≥ 1. Tokens tied with the k-th largest logit all stay.
    - `top_p` in (0, 1]; 1 is off. The smallest set of most probable tokens with mass ≥ `top_p` stays; among logits tied
      at the boundary those stay that `torch.sort` puts last, as in `TopPLogitsWarper`.
    - `min_p` in [0, 1]; 0 is off. Tokens less probable than `min_p` times the most probable one are dropped.
    - `repetition_penalty` in [0.001, 1000]; 1 is off. The logit of every token that the text holds already, prompt
      included, is divided by it where positive and multiplied where negative (Keskar et al., 2019).
    - `grammar` None or a compiled grammar: tokens that it forbids after the text are dropped before anything is ranked.

    The last two depend on the text: `LawState` carries it. The same law applies to the target and to a proposer with
    logits of its own: rejection sampling is exact only if p and q are the laws that were sampled from. Raises
    UsageError naming the field for a value outside its range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not math.isfinite(self.temperature) or self.temperature < 0:
            raise UsageError(f"temperature: {self.temperature!r} is not a number ≥ 0; 0 means greedy")
        if self.top_k is not None and (
            isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1
        ):
            raise UsageError(f"top_k: {self.top_k!r} is not an integer ≥ 1; leave it null to switch it off")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise UsageError(f"top_p: {self.top_p!r} is not a number in (0, 1]; 1 switches it off")
        if not _is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise UsageError(f"min_p: {self.min_p!r} is not a number in [0, 1]; 0 switches it off")
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not 1e-3 <= penalty <= 1e3:
            raise UsageError(f"repetition_penalty: {penalty!r} is not a number in [0.001, 1000]; 1 switches it off")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def reads_text(self) -> bool:
        """Whether the law depends on the text before, beyond the logits."""
        return self.repetition_penalty != 1 or self.grammar is not None

    def probs(
        self, logits: torch.Tensor, *, seen: torch.Tensor | None = None, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`logits` [..., V] of any float dtype → probabilities [..., V], float64, on the same device.

        `seen` and `allowed`: bool [..., V], the tokens of the text and those the grammar allows; required where the law
        uses them. A logit of -inf is a forbidden token. Raises ProbabilityError for NaN, +inf, or a row with nothing
        allowed.
        """
        scores = self.scores(logits, seen=seen, allowed=allowed)
        if self.greedy:
            best = scores.argmax(-1, keepdim=True)  # the first maximum
            return torch.zeros_like(scores).scatter_(-1, best, 1.0)
        if self.temperature != 1:
            scores = self._tempered(scores)
        if self.top_k is not None:
            kth = scores.topk(min(self.top_k, scores.shape[-1])).values[..., -1:]
            scores = scores.masked_fill(scores < kth, -torch.inf)
        if self.top_p < 1:
            ascending, order = torch.sort(scores, dim=-1)  # the warper's own call: ties fall the same way
            drop = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            drop[..., -1] = False
            scores = scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
        if self.min_p > 0:
            probs = scores.softmax(-1)
            scores = scores.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), -torch.inf)
        return scores.softmax(-1)

    def scores(
        self, logits: torch.Tensor, *, seen: torch.Tensor | None = None, allowed: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`logits` [..., V] with the penalty and the grammar applied, float64: what greedy decoding takes the largest
        of. Arguments and errors as for `probs`."""
        scores = logits.to(torch.float64)
        if self.repetition_penalty != 1:
            if seen is None:
                raise ProbabilityError("repetition_penalty: the law needs the tokens of the text; use a LawState")
            penalty = self.repetition_penalty
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if self.grammar is not None:
            if allowed is None:
                raise ProbabilityError("grammar: the law needs the grammar's state; use a LawState")
            scores = scores.masked_fill(~allowed, -torch.inf)
        if not torch.isfinite(scores.amax(-1)).all():  # amax propagates NaN; -inf means that nothing is allowed
            raise ProbabilityError("logits: NaN, +inf, or a row without any allowed token")
        return scores

    def _tempered(self, scores: torch.Tensor) -> torch.Tensor:
        scaled = scores / self.temperature
        if torch.isfinite(scaled.amax(-1)).all():
            return scaled
        return (scores - scores.amax(-1, keepdim=True)) / self.temperature  # only differences count, and these fit


class LawState:
    """A law along one text: `law` after the committed tokens, and after any path drafted behind them.

    Work per call is proportional to the path, not to the text.

    Args:
        law: the sampling law.
        vocab_size: V of the logits.
        stops: ids that end the text.
    """

    def __init__(self, law: Law, vocab_size: int, stops: Collection[int] = ()) -> None:
        self.law = law
        self.stops = frozenset(stops)
        self._seen = torch.zeros(vocab_size, dtype=torch.bool) if law.repetition_penalty != 1 else None
        self._matcher = law.grammar.matcher() if law.grammar is not None else None
        self._asked: tuple[tuple[int, ...], torch.Tensor | None] | None = None  # the last path and its mask

    @property
    def greedy(self) -> bool:
        return self.law.greedy

    def begin(self, prompt: Sequence[int]) -> None:
        """The text starts with `prompt`, which a grammar does not judge."""
        self._note(prompt)

    def commit(self, tokens: Sequence[int]) -> None:
        """`tokens` have become part of the text."""
        self._note(tokens)
        if self._matcher is not None:
            self._matcher.commit(tokens)
            self._asked = None

    def _note(self, tokens: Sequence[int]) -> None:
        if self._seen is not None:
            self._seen[list(tokens)] = True

    def closed(self, path: Sequence[int]) -> bool:
        """Whether the grammar forbids the text and `path`, or is complete after it."""
        return self._matcher is not None and self._allowed(path) is None

    def _allowed(self, path: Sequence[int]) -> torch.Tensor | None:
        """The grammar's mask after `path`. A node is asked about several times in a row: whether it ends, what its law
        is."""
        assert self._matcher is not None
        if self._asked is None or self._asked[0] != tuple(path):
            self._asked = tuple(path), self._matcher.allowed(path)
        return self._asked[1]

    def ends(self, path: Sequence[int]) -> bool:
        """Whether nothing can follow the text and `path`: it stops there, or the grammar forbids or completes it."""
        if path and path[-1] in self.stops:
            return True
        return self.closed(path)

    def possible(self, logits: torch.Tensor, path: Sequence[int]) -> bool:
        """Whether the grammar leaves any token after `path` that `logits` [V] do not rule out themselves."""
        return self._matcher is None or bool((self.masks(path)["allowed"] & (logits.cpu() != -torch.inf)).any())

    def probs(self, logits: torch.Tensor, path: Sequence[int] = ()) -> torch.Tensor:
        """The law of the token after the text and `path`: `logits` [V] → float64 [V], on the CPU.

        Raises ProbabilityError as `Law.probs` does, and where the grammar allows nothing after `path`.
        """
        return self.law.probs(logits.cpu(), **self.masks(path))

    def best(self, logits: torch.Tensor, path: Sequence[int] = ()) -> int:
        """The greedy token after the text and `path`. Arguments and errors as for `probs`."""
        if not self.law.reads_text:  # no float64 copy: the order of the logits is all that counts
            largest, token = logits.max(-1)  # the first of several; NaN is larger than anything
            if not torch.isfinite(largest):
                raise ProbabilityError("logits: NaN, +inf, or a row without any allowed token")
            return int(token)
        return int(self.law.scores(logits.cpu(), **self.masks(path)).argmax(-1))

    def masks(self, path: Sequence[int]) -> dict[str, torch.Tensor]:
        """What `Law.probs` has to know of the text and `path`: `seen` and `allowed`, where it uses them."""
        masks: dict[str, torch.Tensor] = {}
        if self._seen is not None:
            masks["seen"] = self._seen
            if path:
                masks["seen"] = self._seen.clone()
                masks["seen"][list(path)] = True
        if self._matcher is not None:
            allowed = self._allowed(path)
            if allowed is None:
                raise ProbabilityError("grammar: nothing is allowed after this text")
            masks["allowed"] = allowed
        return masks


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
