"""How many tokens to draft: a fixed number, or the number that the run itself shows to pay.

Whatever decides, it decides before a token is drawn, from what lies in the past: so both keep the output's law.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from compressor.errors import UsageError

DECAY = 0.98
"""Weight of the past at each cycle: about the last fifty count."""
PRIOR_RATE, PRIOR_WEIGHT = 0.7, 4.0
"""Every position starts as if it had been accepted this often in so many cycles."""
PROBE_EVERY = 32
"""A full-length draft now and then shows whether the text has become easier; a short one in between keeps the slope of
the costs known, which cycles of one depth alone would not show."""
WARM_UP = 4
"""Cycles that probe, full and short in turn, before anything is chosen."""


class Length(Protocol):
    """Chooses the depth of the next draft."""

    limit: int
    """It never asks for more."""
    confidence: float
    """Drafts stop after a token that its own proposer gave less than this (`Context.confidence`)."""

    def choose(self) -> int: ...

    def record(self, cycles: Sequence[tuple[int, int]], seconds: tuple[float, float] | None) -> None:
        """One step of all texts: the levels drafted and accepted of each, and the time that all drafting and the
        target's pass took together; None where the pass also read a prompt."""
        ...


class Fixed:
    """Always `k`. Raises UsageError for a negative number."""

    confidence = 0.0

    def __init__(self, k: int) -> None:
        if k < 0:
            raise UsageError(f"num_speculative_tokens: {k} is negative; 0 switches speculation off")
        self.limit = k

    def choose(self) -> int:
        return self.limit

    def record(self, cycles: Sequence[tuple[int, int]], seconds: tuple[float, float] | None) -> None:
        pass


@dataclass
class _Line:
    """seconds ≈ base + slope·tokens, by least squares with a fading memory."""

    n: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        for name, value in (("n", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, DECAY * getattr(self, name) + value)

    def at(self, x: float) -> float:
        spread = self.n * self.xx - self.x * self.x
        slope = max((self.n * self.xy - self.x * self.y) / spread, 0.0) if spread > 1e-9 * self.n * self.xx else 0.0
        return max((self.y - slope * self.x) / self.n + slope * x, 0.0) if self.n else 0.0


@dataclass
class Adaptive:
    """The depth with the most expected tokens a second, by this run's own acceptance and cost.

    Expected tokens of depth k are 1 + Σ Π a_i over the conditional acceptance rates seen at each position; seconds are
    a line through the measured passes of the target plus one through the measured drafting of a step, all texts of a
    batch together (compressor.measure.economics states the formulas). `confidence` is the acceptance below which one
    more drafted token costs more time than it saves at the current rate.
    """

    limit: int = 8
    confidence: float = 0.0
    _accepted: list[float] = field(default_factory=list)
    _reached: list[float] = field(default_factory=list)
    _draft: _Line = field(default_factory=_Line)
    _target: _Line = field(default_factory=_Line)
    _cycles: int = 0

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise UsageError(f"num_speculative_tokens: at most {self.limit} is not positive")
        self._accepted = [PRIOR_RATE * PRIOR_WEIGHT] * self.limit
        self._reached = [PRIOR_WEIGHT] * self.limit

    def choose(self) -> int:
        self._cycles += 1
        probe = self._probe()
        if probe is not None:
            self.confidence = 0.0
            return probe
        tokens, reach, best, best_rate = 1.0, 1.0, 0, 0.0
        for k in range(self.limit + 1):
            if k:
                reach *= self._accepted[k - 1] / self._reached[k - 1]
                tokens += reach
            rate = tokens / max(self._seconds(k), 1e-9)
            if rate > best_rate:
                best, best_rate = k, rate
        one_more = self._seconds(best + 1) - self._seconds(best)
        self.confidence = min(0.9, max(0.0, one_more * best_rate))
        return best

    def _probe(self) -> int | None:
        """The depth to try for the sake of knowing, in the cycles that do."""
        phase = self._cycles % PROBE_EVERY
        if self._cycles <= WARM_UP:
            return self.limit if self._cycles % 2 else 1
        return {1: self.limit, PROBE_EVERY // 2: 1}.get(phase)

    def _seconds(self, k: int) -> float:
        return self._target.at(k + 1) + (self._draft.at(k) if k else 0.0)

    def record(self, cycles: Sequence[tuple[int, int]], seconds: tuple[float, float] | None) -> None:
        for drafted, accepted in cycles:
            for i in range(min(accepted + 1, drafted, self.limit)):
                self._accepted[i] = DECAY * self._accepted[i] + (i < accepted)
                self._reached[i] = DECAY * self._reached[i] + 1
        if seconds is None or not cycles:
            return
        depth = sum(drafted for drafted, _ in cycles) / len(cycles)
        self._target.add(depth + 1, seconds[1])
        if depth:
            self._draft.add(depth, seconds[0])
