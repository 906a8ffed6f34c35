"""What speculation is worth: expected tokens a cycle, speed, the best draft length, and the tax quantization pays.

`alpha` is the conditional acceptance probability of the next proposal given that all earlier ones survived: one number
for every position, or a sequence with one number a position. An average over positions is not enough: rates 0.9 and
0.5 give 2.35 tokens a cycle, their mean 0.7 gives 2.19. `k` is the number of proposed tokens, `c` the time of one draft
step over the time of one target step. Formulas: Leviathan, Kalman and Matias (2023), section 3.
"""

import math
from collections.abc import Sequence

from compressor.errors import UsageError

Rates = float | Sequence[float]


def expected_tokens(alpha: Rates, k: int) -> float:
    """E = 1 + a₁ + a₁a₂ + … + a₁…a_k, the mean number of tokens a cycle emits; 1 at k = 0, k + 1 at alpha = 1.

    Raises UsageError for rates outside [0, 1], a negative k, or a sequence with fewer than k rates.
    """
    rates = _rates(alpha, k)
    total, survival = 1.0, 1.0
    for rate in rates[:k]:
        survival *= rate
        total += survival
    return total


def speedup(alpha: Rates, k: int, c: float) -> float:
    """S = E(alpha, k) / (1 + k·c): speed over decoding with the target alone, if verifying costs one target step.

    A first-order scenario, not a runtime contract. Raises UsageError as `expected_tokens`, and for a negative c.
    """
    if not c >= 0 or math.isinf(c):
        raise UsageError(f"c: {c!r} is not a cost ratio ≥ 0 (time of one draft step over one target step)")
    return expected_tokens(alpha, k) / (1 + k * c)


def best_k(alpha: Rates, c: float, k_max: int | None = None) -> int:
    """The k in 0..k_max with the largest speedup; the smallest of equals. 0: speculation does not pay.

    `k_max` defaults to 32 for one number, and to the number of rates for a sequence.
    """
    if k_max is None:
        k_max = 32 if isinstance(alpha, int | float) else len(alpha)
    return max(range(k_max + 1), key=lambda k: (speedup(alpha, k, c), -k))


def acceptance_tax(tok_s_before: float, tok_s_after: float, tau_before: float, tau_after: float) -> dict:
    """How much of a quantization's speed gain its loss of acceptance took back.

    With r = tok_s_after/tok_s_before (speculative throughputs, tokens/s) and t = tau_after/tau_before (mean tokens a
    cycle at the same k):

    - `realized_gain` = r - 1;
    - `potential_gain` = r/t - 1, the gain had acceptance held;
    - `tax` = 1 - realized/potential, the share lost; negative where acceptance rose; None without a potential gain;
    - `verdict`: "reject" (the tax took more than half), "keep", or "no gain" (nothing there to be taxed).

    Raises UsageError for a value that is not positive and finite.
    """
    values = {
        "tok_s_before": tok_s_before,
        "tok_s_after": tok_s_after,
        "tau_before": tau_before,
        "tau_after": tau_after,
    }
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name}: {value!r} is not a positive number")
    realized = tok_s_after / tok_s_before - 1
    potential = (1 + realized) / (tau_after / tau_before) - 1
    tax = 1 - realized / potential if potential > 0 else None
    verdict = "no gain" if tax is None else "reject" if tax > 0.5 else "keep"
    return {"potential_gain": potential, "realized_gain": realized, "tax": tax, "verdict": verdict}


def _rates(alpha: Rates, k: int) -> list[float]:
    if k < 0:
        raise UsageError(f"k: {k} is negative; 0 means decoding with the target alone")
    rates = [alpha] * max(k, 1) if isinstance(alpha, int | float) else list(alpha)
    for rate in rates:
        if not isinstance(rate, int | float) or not 0 <= rate <= 1:
            raise UsageError(f"alpha: {rate!r} is not a probability")
    if len(rates) < k:
        raise UsageError(f"alpha: {len(rates)} conditional rates cannot describe k = {k} positions")
    return rates
