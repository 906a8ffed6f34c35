"""Engines that take turns at every prompt, so that what the machine does besides meets all of them alike; and what a
cycle of our runner is spent on."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from compressor.decode import Decoder, Law, Runner
from compressor.decode.length import Length
from compressor.proposers.base import Proposer

GREEDY = Law(temperature=0.0)

Run = dict[str, float]
"""One answer: `tokens`, `seconds`, `decode_seconds` (after the first token), and what else an engine counts."""
Engine = Callable[[list[list[int]], int], list[Run]]
"""Answers prompts (token ids) by at most so many tokens each."""


def timing(tokens: int, start: float, first: float, end: float) -> Run:
    return {"tokens": tokens, "seconds": end - start, "decode_seconds": end - first}


def rates(runs: list[Run]) -> dict[str, float]:
    """Tokens a second over one round of a set."""
    decoded = sum(run["tokens"] - 1 for run in runs)
    return {
        "decode": decoded / sum(run["decode_seconds"] for run in runs),
        "total": sum(run["tokens"] for run in runs) / sum(run["seconds"] for run in runs),
    }


def take_turns(
    engines: Mapping[str, Engine], sets: Mapping[str, list[list[int]]], tokens: int, rounds: int
) -> Iterator[tuple[int, str, dict[str, list[Run]]]]:
    """(round, set, runs of every engine), set by set. Round -1 warms up, on the first prompt of each set."""
    for number in range(-1, rounds):
        for name, rows in sets.items():
            runs: dict[str, list[Run]] = {key: [] for key in engines}
            for ids in rows if number >= 0 else rows[:1]:
                for key, run in engines.items():
                    runs[key] += run([ids], tokens)
            yield number, name, runs


class Watched:
    """A draft's length as `of` chooses it, with a note of what each cycle took: (drafting, the target's pass) in
    seconds."""

    def __init__(self, of: Length) -> None:
        self.of, self.limit = of, of.limit
        self.parts: list[tuple[float, float]] = []

    @property
    def confidence(self) -> float:
        return self.of.confidence

    def choose(self) -> int:
        return self.of.choose()

    def record(self, cycles: Sequence[tuple[int, int]], seconds: tuple[float, float] | None) -> None:
        self.of.record(cycles, seconds)
        if seconds is not None:  # None: the pass read the prompt
            self.parts.append(seconds)


def watched(decoder: Decoder, proposer: Proposer | None, of: Length) -> Engine:
    """Our runner, greedy; each run also has its cycles after the first token, the tokens drafted and accepted in them,
    and the seconds of the first draft, which reads the prompt, of the later ones, and of the target's passes."""
    length = Watched(of)
    runner = Runner(decoder, proposer, length)

    def run(rows: list[list[int]], tokens: int) -> list[Run]:
        runs = []
        for ids in rows:
            length.parts.clear()
            start, first = time.perf_counter(), 0.0
            for step in runner.stream(ids, tokens, GREEDY, 0):
                first, output = first or time.perf_counter(), step[1]
            runs.append(timing(len(output.token_ids), start, first, time.perf_counter()))
            drafting = [seconds for seconds, _ in length.parts]
            runs[-1] |= {"cycles": len(length.parts), "accepted": output.accepted, "drafted": output.proposed}
            runs[-1] |= {"first_draft": sum(drafting[:1]), "later_drafts": sum(drafting[1:])}
            runs[-1] |= {"passes": sum(seconds for _, seconds in length.parts)}
        return runs

    return run


def terms(alone: list[Run], fast: list[Run]) -> dict[str, float]:
    """Where the time of `fast` goes in units of a step of the target `alone`, over the runs of one round.

    - `k`: drafted tokens a cycle. `E`: verified tokens a cycle, with those that the length limit cuts from the end;
      `kept`: without them.
    - A cycle takes 1 + k·c + v + h steps. `c`: a drafted token; `v`: the pass over a draft beyond that over one token;
      `h`: the rest, which is the bookkeeping of a cycle beyond that of a step, and `reading`, the proposer's reading of
      the prompt, spread over the cycles of the answer.
    - `S_by_terms` = E / (1 + k·c + v + h), and `S`, the rate of `fast` by that of `alone`.
    """

    def total(runs: list[Run], key: str) -> float:
        return sum(run[key] for run in runs)

    cycles, steps = total(fast, "cycles"), total(alone, "cycles")
    later = cycles - sum(run["cycles"] > 0 for run in fast)
    if not later or not steps:
        raise SystemExit("the answers are too short to time a cycle; allow more tokens")
    step, one = total(alone, "decode_seconds") / steps, total(alone, "passes") / steps
    cycle, verify = total(fast, "decode_seconds") / cycles, total(fast, "passes") / cycles
    draft = total(fast, "later_drafts") / later  # the first one also reads the prompt
    reading = (total(fast, "first_draft") - draft * (cycles - later)) / cycles
    k = total(fast, "drafted") / cycles
    found = {"k": k, "E": 1 + total(fast, "accepted") / cycles, "kept": (total(fast, "tokens") - len(fast)) / cycles}
    found |= {"c": draft / k / step, "v": (verify - one) / step, "h": (cycle - draft - verify - step + one) / step}
    found |= {"reading": reading / step, "milliseconds_a_step": 1e3 * step}
    found["S_by_terms"] = found["E"] / (1 + k * found["c"] + found["v"] + found["h"])
    found |= {"tokens_per_second_alone": rates(alone)["decode"], "tokens_per_second": rates(fast)["decode"]}
    return found | {"S": found["tokens_per_second"] / found["tokens_per_second_alone"]}
