"""The headline numbers of a passport as one table, before, after and change, for report, card and command line."""

from typing import NamedTuple

from compressor.bundle.passport import Passport
from compressor.bundle.records import Acceptance

NONE = "–"
METHODS = {"gptq": "GPTQ", "rtn": "round to nearest"}


class Row(NamedTuple):
    """One line of the table; `NONE` where a cell does not apply."""

    what: str
    before: str
    after: str
    change: str = NONE


def rows(passport: Passport) -> list[Row]:
    """Bytes, bits per weight, quality, tokens a cycle, and acceptance at each position."""
    source, ledger, quantization = passport.source, passport.ledger, passport.quantization
    before = 8 * source.total_bytes / source.parameters
    after = ledger.bits_per_weight_model
    table = [
        Row(
            "Weights",
            size(ledger.original_bytes),
            size(ledger.bundle_bytes),
            ratio(ledger.original_bytes, ledger.bundle_bytes),
        ),
        Row("Bits per weight, whole model", f"{before:.2f}", f"{after:.2f}", ratio(before, after)),
        Row(f"Bits per weight, quantized linears ({quantization.formats})", NONE, f"{quantization.bits_per_weight:g}"),
    ]
    for quality in passport.outcomes.quality:
        name = f"{quality.metric.capitalize()}, {quality.name}"
        change = signed(100 * (quality.quantized / quality.baseline - 1), "%") if quality.baseline else NONE
        table.append(Row(name, f"{quality.baseline:.3f}", f"{quality.quantized:.3f}", change))
        if quality.kl_nats is not None:
            table.append(Row("KL divergence, nats a token", NONE, f"{quality.kl_nats:.4f}"))
        if quality.tv is not None:
            table.append(Row("Total variation", NONE, f"{quality.tv:.4f}"))
        if quality.top1_agreement is not None:
            table.append(Row("Same most likely token", NONE, f"{100 * quality.top1_agreement:.1f} %"))
    for task, k in tasks(passport):
        table += _acceptance(task, k, find(passport, task, k, "baseline"), find(passport, task, k, "quantized"))
    return table


def tasks(passport: Passport) -> list[tuple[str, int]]:
    """(task, k) of each acceptance measurement, in order, baseline and quantized together."""
    return list(dict.fromkeys((row.task, row.k) for row in passport.outcomes.acceptance))


def find(passport: Passport, task: str, k: int, target: str) -> Acceptance | None:
    """The acceptance row of this task, k and target; None if it was not measured."""
    wanted = (task, k, target)
    return next((r for r in passport.outcomes.acceptance if (r.task, r.k, r.target) == wanted), None)


def _acceptance(task: str, k: int, before: Acceptance | None, after: Acceptance | None) -> list[Row]:
    change = signed(100 * (after.tau / before.tau - 1), "%") if before and after else NONE
    table = [Row(f"Tokens a cycle (τ), {task}, k = {k}", tau(before), tau(after), change)]
    for position in range(k):
        first, second = rate(before, position), rate(after, position)
        difference = signed(100 * (second - first), "points") if first is not None and second is not None else NONE
        table.append(Row(f"Acceptance at position {position + 1}", percent(first), percent(second), difference))
    return table


def rate(row: Acceptance | None, position: int) -> float | None:
    """Conditional acceptance at a position (from 0); None where no cycle got there."""
    return row.conditional[position] if row and position < len(row.conditional) else None


def tau(row: Acceptance | None) -> str:
    """τ with its 95% confidence interval."""
    if row is None:
        return NONE
    return f"{row.tau:.2f}" + (f" [{row.ci95[0]:.2f},\u00a0{row.ci95[1]:.2f}]" if row.ci95 else "")


def signed(value: float, unit: str) -> str:
    return f"{value:+.1f}\u00a0{unit}".replace("-", "\u2212")


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def size(count: float) -> str:
    """Bytes in decimal units."""
    power = next((power for power in (12, 9, 6, 3) if count >= 10**power), 0)
    unit = {12: "TB", 9: "GB", 6: "MB", 3: "kB", 0: "B"}[power]
    return f"{count / 10**power:.4g} {unit}"


def ratio(before: float, after: float) -> str:
    return f"÷ {before / after:.2f}" if after else NONE
