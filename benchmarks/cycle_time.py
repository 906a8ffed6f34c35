#!/usr/bin/env python3
"""Time of one cycle against the length of the history, split into what it is spent on.

    cycle_time.py MODEL [--out benchmarks/cycle_time]

Everything but attention should be flat: drafting (n-gram), the pass of the target without its attention, and
verification under a law that reads the text (repetition penalty, top-p). Writes OUT.json and OUT.svg.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from compressor.decode import Law, Runner, engine
from compressor.decode.batch import Request, Text
from compressor.decode.decoder import Decoder
from compressor.decode.layers import Attention
from compressor.proposers.ngram import NgramProposer

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
CYCLES = 30
LAW = Law(temperature=0.9, top_p=0.95, repetition_penalty=1.1)
K = 4


class Clock:
    """Adds up the time spent in methods while they are watched."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def watch(self, owner: type, method: str, name: str) -> None:
        original = getattr(owner, method)

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

        setattr(owner, method, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/cycle_time"))
    args = parser.parse_args()
    torch.set_num_threads(2)
    clock = Clock()
    clock.watch(Attention, "_attend", "attention")
    clock.watch(Decoder, "forward", "target")
    clock.watch(Text, "propose", "drafting")
    clock.watch(Text, "advance", "verification")
    decoder = engine.decoder(args.model, dtype=torch.bfloat16)
    rows: dict[str, list[float]] = {name: [] for name in ("drafting", "target", "attention", "verification")}
    generator = torch.Generator().manual_seed(0)
    for length in LENGTHS:
        batch = Runner(decoder, NgramProposer(), K).batch()
        prompt = torch.randint(100, 20_000, (length // 2,), generator=generator).tolist() * 2  # there is always a match
        text = batch.join(Request(prompt, CYCLES * (K + 1) + 20, LAW, 0, frozenset()))
        batch.step()
        cycles: dict[str, list[float]] = {name: [] for name in rows}
        for _ in range(CYCLES):
            clock.spent.clear()
            text.history[-2:] = prompt[:2]  # the proposer sees a suffix that occurred before, whatever was sampled
            batch.step()
            for name in rows:
                cycles[name].append(1e3 * clock.spent[name])
        for name, values in cycles.items():
            rows[name].append(round(median(values), 3))
        print(length, {name: values[-1] for name, values in rows.items()}, flush=True)
    rows["target without attention"] = [
        round(whole - part, 3) for whole, part in zip(rows.pop("target"), rows["attention"], strict=True)
    ]
    result = {"history": LENGTHS, "milliseconds": rows, "k": K, "cycles": CYCLES, "threads": 2}
    args.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, args.out.with_suffix(".svg"))


def plot(rows: dict[str, list[float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, values in rows.items():
        axes.plot(LENGTHS, values, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="tokens in the history", ylabel="milliseconds a cycle")
    axes.set_xticks(LENGTHS, map(str, LENGTHS))
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
