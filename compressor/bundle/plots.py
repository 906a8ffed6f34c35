"""The report's figures as SVG text that takes its colours for text and axes from the page around it."""

import io
import re
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from compressor.bundle.passport import Passport
from compressor.bundle.records_quantization import Layer
from compressor.bundle.summary import size

# Okabe and Ito's palette without its black and yellow: told apart by the colour-blind, visible on white and on black.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c")
MARKERS = "osD^vPX"
_INK = "#010203"  # stands for the page's text colour until the SVG is written
_RULE = "#010204"  # the same, faint
_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "compressor",  # element ids are the same every time
    "font.size": 10,
    **{key: _INK for key in ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")},
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.(.+)$")


def layer_errors(passport: Passport) -> str | None:
    """Relative error by block on a log axis, one colour and marker a linear class; None without any error."""
    series = _by_class(passport.quantization.layers)
    if not series:
        return None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for number, (name, points) in enumerate(series.items()):
            blocks, errors = zip(*sorted(points), strict=True)
            axes.plot(
                blocks,
                errors,
                label=name,
                color=COLOURS[number % len(COLOURS)],
                marker=MARKERS[(number + number // len(COLOURS)) % len(MARKERS)],  # pairs repeat after 49 classes
                markersize=4,
                linewidth=1.2,
            )
        axes.set_yscale("log")
        axes.set_xlabel("block")
        axes.set_ylabel(passport.quantization.error_name)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y", color=_RULE, linewidth=0.6)
        figure.legend(loc="outside lower center", ncols=min(len(series), 4))
        return _svg(figure, "errors")


def _by_class(layers: list[Layer]) -> dict[str, list[tuple[int, float]]]:
    """{linear class: [(block, error)]}. An error of 0 has no place on a log axis."""
    series: dict[str, list[tuple[int, float]]] = {}
    for layer in layers:
        match = _BLOCK.search(layer.name)
        if match and layer.stated_error:
            series.setdefault(match[2], []).append((int(match[1]), layer.stated_error))
    short = {name: name.rpartition(".")[2] for name in series}
    unique = len(set(short.values())) == len(short)
    return {short[name] if unique else name: points for name, points in series.items()}


def byte_ledger(passport: Passport) -> str:
    """Two bars: the original's bytes, and the bundle's as codes, scales and unquantized tensors."""
    ledger = passport.ledger
    parts = {
        "codes": (ledger.quantized_bytes - ledger.scales_bytes, COLOURS[0]),
        "scales": (ledger.scales_bytes, COLOURS[1]),
        "not quantized": (ledger.unquantized_bytes, COLOURS[2]),
    }
    scale, unit = _unit(max(ledger.original_bytes, ledger.bundle_bytes))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.2, 1.9), layout="constrained")
        axes: Axes = figure.add_subplot()
        axes.barh("original", ledger.original_bytes / scale, color=COLOURS[6], height=0.6)
        left = 0.0
        for name, (count, colour) in parts.items():
            label = f"{name} {size(count)}"
            axes.barh("bundle", count / scale, left=left, color=colour, height=0.6, label=label)
            left += count / scale
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.tick_params(axis="y", length=0)
        figure.legend(loc="outside lower center", ncols=3)
        return _svg(figure, "bytes")


def _unit(largest: int) -> tuple[float, str]:
    return next(
        (10.0**power, unit) for power, unit in ((9, "GB"), (6, "MB"), (3, "kB"), (0, "B")) if largest >= 10**power
    )


def _svg(figure: Figure, name: str) -> str:
    """The <svg> element alone: no date, no size or font of its own, and ids that two figures on a page do not share."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' (?:width|height)="[^"]*pt"', "", text, count=2)
    text = re.sub(r"\s*font-family:[^;\"]*;?", "", text)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace(_INK, "currentColor").replace(_RULE, "var(--rule)")
