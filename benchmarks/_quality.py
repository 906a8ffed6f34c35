"""The table of `quality_table.py`: which cells there are, their record on disk, and what is printed of it."""

import json
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from _files import replace_json


class Format(NamedTuple):
    """A row: what a recipe calls the weights and the inputs."""

    weights: str
    activations: str = "16bit"
    four_bit: bool = True
    """Of the 4-bit formats, which `--require` is about."""


FORMATS = {
    "int4-g64": Format("int4-g64"),
    "int4-g128": Format("int4-g128"),
    "nvfp4": Format("nvfp4"),
    "mxfp4": Format("mxfp4"),
    "nvfp4-w4a4": Format("nvfp4", "4bit"),
    "mxfp4-w4a4": Format("mxfp4", "4bit"),
    "fp8": Format("fp8", four_bit=False),
    "fp8-w8a8": Format("fp8", "8bit", four_bit=False),
    "int8-w8a8": Format("int8", "8bit", four_bit=False),
}
OURS: dict[str, dict] = {
    "rtn": {"quantization": {"method": "rtn", "scale_search": "none"}},
    "rtn-mse": {"quantization": {"method": "rtn"}},
    "gptq": {"quantization": {"method": "gptq"}},
    "guided": {"quantization": {"method": "gptq", "guided": True, "damping": 0.05}},
    "best": {"quantization": {"method": "gptq", "guided": True, "damping": 0.05}, "distillation": {}},
}
"""Columns of this project: what a recipe says."""
PEERS = {"llmc-rtn": "rtn", "llmc-gptq": "gptq", "auto-round": "auto-round"}
"""Columns of other tools: what `peer.py` calls the method."""
METHODS = (*OURS, *PEERS)
OWN_JUDGE = "quality_judge.py"
"""What asks this project's own evaluation, where the judge that was named refuses a bundle."""

Cell = tuple[str, str]
"""(method, format)."""


class Record:
    """The JSON file of one model: `settings`, which all cells share; `texts`, names of files; `tools`, versions;
    `left_out`, formats and why; `kept`, per format the linears that stay unquantized, as patterns; `cells`, by method
    and format.

    A cell is {"failed": reason}, or seconds, cpu_seconds, peak_bytes, bundle_bytes and, under `texts`, what was found
    on each text: kl_nats, top1_agreement, ppl and who was the `judge`; {"not_judged": reason} where none could say.
    """

    def __init__(self, path: Path, settings: dict | None = None, texts: dict[str, str] | None = None):
        """Read `path` if it is there; its texts and `texts` together are those of the table.

        Raises SystemExit where `settings` (None: whatever they were) or the file of a text are not those that its cells
        were made with.
        """
        self.path = path
        self.data: dict = {"settings": settings, "texts": {}, "tools": {}, "left_out": {}, "kept": {}, "cells": {}}
        if path.exists():
            self.data = json.loads(path.read_text())
            if settings is not None:
                self._refuse_changed(self.data["settings"], settings)
            self._refuse_changed(self.data["texts"], self.data["texts"] | (texts or {}), "text ")
        self.data["texts"] |= texts or {}

    def _refuse_changed(self, old: dict, new: dict, kind: str = "") -> None:
        for key in old | new:
            if old.get(key) != new.get(key) and not (kind and key not in old):
                raise SystemExit(
                    f"{self.path}: its cells were made with {kind}{key} {old.get(key)!r}, not {new.get(key)!r}; "
                    "name another --record, or remove it"
                )

    @property
    def texts(self) -> list[str]:
        """Names of the texts."""
        return list(self.data["texts"])

    def cell(self, cell: Cell) -> dict | None:
        """What is known of a cell."""
        return self.data["cells"].get(cell[0], {}).get(cell[1])

    def put(self, cell: Cell, found: dict) -> None:
        """Note a cell, on disk at once."""
        self.data["cells"].setdefault(cell[0], {})[cell[1]] = found
        self.save()

    def save(self) -> None:
        """Write the file."""
        replace_json(self.path, self.data)

    def missing(self, cells: Iterable[Cell], texts: Iterable[str], *, again: bool = False) -> list[Cell]:
        """Which of `cells` are still to be made: those never finished, those without one of the `texts`; all with
        `again`. A cell that failed is finished."""
        wanted = set(texts)
        return [
            cell
            for cell in cells
            if again or (known := self.cell(cell)) is None or ("failed" not in known and wanted - {*known["texts"]})
        ]


def chosen(patterns: list[str], left_out: Iterable[str]) -> list[Cell]:
    """The cells that one of the patterns METHOD:FORMAT names (all without patterns), format by format. Raises
    SystemExit for a pattern without a colon, or that names none."""
    cells = [(method, name) for name in FORMATS for method in METHODS]
    for pattern in patterns:
        if ":" not in pattern or not any(_named(pattern, cell) for cell in cells):
            raise SystemExit(
                f"--only {pattern}: names no cell; write METHOD:FORMAT, of {', '.join(METHODS)} "
                f"and {', '.join(FORMATS)}"
            )
    picked = [cell for cell in cells if not patterns or any(_named(pattern, cell) for pattern in patterns)]
    return [cell for cell in picked if cell[1] not in left_out]


def _named(pattern: str, cell: Cell) -> bool:
    method, _, name = pattern.partition(":")
    return fnmatchcase(cell[0], method) and fnmatchcase(cell[1], name)


def figure(record: Record, cell: Cell, text: str, key: str = "kl_nats") -> Any:
    """What the judge found of one cell; None where there is nothing."""
    return ((record.cell(cell) or {}).get("texts", {}).get(text) or {}).get(key)


class Ratio(NamedTuple):
    """The least KL of this project, that of the peers, and whose they are."""

    ours: float
    our_method: str
    peer: float
    peer_method: str

    @property
    def value(self) -> float:
        """Ours by theirs: below 1 is better. Infinite where the peer's is 0."""
        return self.ours / self.peer if self.peer else float("inf")


def ratio(record: Record, name: str, text: str) -> Ratio | None:
    """Of one format on one text; None where either side has no figure."""
    sides = []
    for methods in (OURS, PEERS):
        found = [(kl, method) for method in methods if (kl := figure(record, (method, name), text)) is not None]
        if not found:
            return None
        sides.append(min(found))
    return Ratio(*sides[0], *sides[1])


def unmet(record: Record, limit: float) -> Iterator[str]:
    """What keeps the 4-bit formats from a ratio of at most `limit` on every text, one line each. A figure that is
    missing does, too; a format that the model's sizes leave out does not."""
    names = [name for name, form in FORMATS.items() if form.four_bit and name not in record.data["left_out"]]
    if not names:
        yield "no 4-bit format fits this model"
    for name in names:
        for text in record.texts:
            found = ratio(record, name, text)
            if found is None:
                yield f"{name} on {text}: not measured on both sides"
            elif not found.value <= limit:
                yield f"{name} on {text}: {found.value:.3f}, more than {limit:g}"


def markdown(record: Record) -> str:
    """A table of KL and perplexity for each text, one of seconds and memory, and what is left out."""
    data = record.data
    names = [name for name in FORMATS if any(record.cell((method, name)) for method in METHODS)]
    blocks = []
    for text, file in data["texts"].items():
        lines = [f"KL in nats a token / perplexity / top-1 agreement on {text} (`{file}`)", ""]
        lines += _head("format", *METHODS, "best of ours / best peer")
        for name in names:
            lines.append(_row(name, *(_quality(record, (m, name), text) for m in METHODS), _ratio(record, name, text)))
        blocks.append("\n".join(lines))
    lines = ["Seconds / CPU seconds / peak memory in MB / size of the bundle in kB", "", *_head("format", *METHODS)]
    blocks.append("\n".join([*lines, *(_row(name, *(_cost(record, (m, name)) for m in METHODS)) for name in names)]))
    notes = [
        f"- {name}: unquantized in every tool: {', '.join(kept)}"
        for name, kept in data["kept"].items()
        if kept and name in names
    ]
    notes += [f"- {name}: left out; {reason}" for name, reason in data["left_out"].items()]
    notes += list(_gaps(record, names))
    if any(_own(record, (m, n), t) for m in METHODS for n in names for t in data["texts"]):
        notes.append("- \\* judged by this project's own evaluation: the other judge refused the bundle")
    return "\n\n".join([*blocks, "\n".join(notes)] if notes else blocks)


def _head(*titles: str) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _row(*columns: str) -> str:
    return f"| {' | '.join(columns)} |"


def _quality(record: Record, cell: Cell, text: str) -> str:
    kl, ppl, top1 = (figure(record, cell, text, key) for key in ("kl_nats", "ppl", "top1_agreement"))
    if kl is None:
        return "–"
    found = ratio(record, cell[1], text)
    number = f"{kl:.5f}"
    if found and cell[0] in (found.our_method, found.peer_method):
        number = f"**{number}**"
    return f"{number} / {ppl:.2f} / {top1:.1%}" + ("\\*" if _own(record, cell, text) else "")


def _ratio(record: Record, name: str, text: str) -> str:
    found = ratio(record, name, text)
    return "–" if found is None else f"{found.value:.2f} ({found.our_method} / {found.peer_method})"


def _cost(record: Record, cell: Cell) -> str:
    known = record.cell(cell)
    if known is None or "seconds" not in known:
        return "–"
    numbers = known["seconds"], known["cpu_seconds"], known["peak_bytes"] / 1e6, known["bundle_bytes"] / 1e3
    return " / ".join(f"{number:.0f}" for number in numbers)


def _own(record: Record, cell: Cell, text: str) -> bool:
    return figure(record, cell, text, "judge") == OWN_JUDGE


def _gaps(record: Record, names: list[str]) -> Iterator[str]:
    """A line for every cell that failed or was not judged."""
    for name in names:
        for method in METHODS:
            known = record.cell((method, name)) or {}
            if "failed" in known:
                yield f"- {method}, {name}: no figure; {known['failed']}"
            for text, found in known.get("texts", {}).items():
                if "not_judged" in found:
                    yield f"- {method}, {name}, {text}: not judged; {found['not_judged']}"
