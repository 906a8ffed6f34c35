"""Acceptance of a proposer by a target, counted from the runner's own cycles."""

from collections.abc import Sequence

import numpy as np

from compressor.decode.law import Law
from compressor.decode.runner import Output, Runner
from compressor.errors import UsageError
from compressor.ui import Progress

BOOTSTRAP_SAMPLES = 2000


def measure(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    *,
    task: str,
    target: str,
    k: int,
    max_new_tokens: int,
    law: Law,
    seed: int,
    progress: Progress | None = None,
) -> dict:
    """Generate after every prompt (prompt i with seed `seed + i`) and summarise the cycles.

    `target` is "baseline" or "quantized"; `k` must be the runner's number of speculative tokens; `progress` is advanced
    once a prompt. Returns the entry described at `summarize` with `task`, `target` and `k` in front. Raises UsageError
    without prompts, without a proposer, or where `k` disagrees with the runner.
    """
    if not prompts:
        raise UsageError(f"acceptance of '{task}': no prompts")
    if runner.proposer is None:
        raise UsageError(f"acceptance of '{task}': the runner has no proposer, so there is nothing to accept")
    if k != runner.num_speculative_tokens:
        raise UsageError(f"acceptance of '{task}': k = {k}, but the runner proposes {runner.num_speculative_tokens}")
    outputs = []
    for index, prompt in enumerate(prompts):
        outputs.append(runner.generate(prompt, max_new_tokens, law, seed + index))
        if progress is not None:
            progress.advance()
    return {"task": task, "target": target, "k": k, **summarize(outputs, k, seed)}


def summarize(outputs: Sequence[Output], k: int, seed: int) -> dict:
    """Rates and mean length over all cycles of `outputs`.

    - `conditional` [k]: accepted / reached at each position. A position is reached where a token was proposed for it
      and every earlier one was accepted; None where that never happened.
    - `unconditional` [k]: accepted at each position / drafts, the per-position rate that vLLM's counters give.
    - `tau`: 1 + accepted/cycles, tokens per pass of the target. All cycles count, also those without a proposal and
      the one that reads the prompt: this is the ratio that throughput sees.
    - `cycles`, `drafts` (cycles with a proposal), `proposed`, `accepted` (tokens).
    - `ci95` [2]: 95% interval of tau, a percentile bootstrap that resamples whole prompts, because cycles of one text
      are not independent. With a single output its cycles are resampled instead.
    """
    entries = [entry for output in outputs for entry in output.accepted_per_position]
    drafts = sum(1 for entry in entries if entry)
    hits = [sum(entry[i] for entry in entries if len(entry) > i) for i in range(k)]
    reached = [sum(1 for entry in entries if len(entry) > i and all(entry[:i])) for i in range(k)]
    accepted = sum(hits)
    return {
        "conditional": [h / r if r else None for h, r in zip(hits, reached, strict=True)],
        "unconditional": [h / drafts if drafts else None for h in hits],
        "tau": 1 + accepted / len(entries),
        "cycles": len(entries),
        "drafts": drafts,
        "proposed": sum(len(entry) for entry in entries),
        "accepted": accepted,
        "ci95": _interval(outputs, seed),
    }


def _interval(outputs: Sequence[Output], seed: int) -> list[float]:
    if len(outputs) > 1:
        counts = np.array([(output.accepted, output.cycles) for output in outputs], dtype=np.float64)
    else:
        counts = np.array([(sum(entry), 1) for entry in outputs[0].accepted_per_position], dtype=np.float64)
    picks = np.random.default_rng(seed).integers(len(counts), size=(BOOTSTRAP_SAMPLES, len(counts)))
    totals = counts[picks].sum(1)
    low, high = np.quantile(1 + totals[:, 0] / totals[:, 1], [0.025, 0.975])
    return [float(low), float(high)]
