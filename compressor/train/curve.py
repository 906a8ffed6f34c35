"""The training curve of a proposer as a figure: held-out acceptance against the tokens it was trained on."""

import io
import math
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from compressor.bundle.plots import COLOURS, MARKERS


def svg(history: Sequence[dict[str, Any]]) -> str:
    """SVG text; `history` as of `loop.train`. The same history gives the same bytes."""
    history = [entry for entry in history if entry["tokens"]]  # a logarithm has no place for the start
    tokens = [entry["tokens"] for entry in history]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "compressor", "font.size": 10}):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        rates: Axes = figure.add_subplot()
        for position in range(len(history[0]["conditional"])):
            rates.plot(
                tokens,
                [entry["conditional"][position] for entry in history],
                color=COLOURS[position % len(COLOURS)],
                marker=MARKERS[position % len(MARKERS)],
                markersize=4,
                label=f"acceptance at position {position + 1}",
            )
        rates.set_ylim(0, 1)
        rates.set_xscale("log", base=2)
        rates.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e6:.3g} M"))
        rates.set_xlabel("tokens trained on, repetitions counted")
        rates.set_ylabel("held-out conditional acceptance")
        cycle = rates.twinx()
        cycle.plot(tokens, [entry["tau"] for entry in history], color="black", linewidth=2, label="tokens a cycle (τ)")
        cycle.set_ylim(1, 1 + len(history[0]["conditional"]))
        cycle.set_ylabel("tokens a cycle (τ)")
        figure.legend(loc="outside lower center", ncols=2)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def last_doubling(history: Sequence[dict[str, Any]]) -> float | None:
    """How much tau rose since half of the tokens, between two looks along the logarithm of tokens; None where the first
    look came later. Within one run: the falling learning rate is part of it."""
    history = [entry for entry in history if entry["tokens"]]
    end = history[-1]
    half = end["tokens"] / 2
    before = [entry for entry in history if entry["tokens"] <= half]
    after = [entry for entry in history if entry["tokens"] > half]
    if not before:
        return None
    low, high = before[-1], after[0]
    share = math.log(half / low["tokens"]) / math.log(high["tokens"] / low["tokens"])
    return end["tau"] - (low["tau"] + share * (high["tau"] - low["tau"]))
