"""Results for a reader: tables that fit 80 columns, plain text where the output is no terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from compressor.bundle import Bundle
    from compressor.plan import Plan

WIDTH = 80


def console(file: TextIO) -> Console:
    """A console on `file`, at most 80 columns wide; without colours where it is no terminal."""
    probe = Console(file=file)
    return Console(file=file, width=min(probe.width, WIDTH) if probe.is_terminal else WIDTH, highlight=False)


def show(out: Console, header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Print one table: first column left and folded where it must be, the others right-aligned and whole."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD if out.is_terminal else None,
        pad_edge=False,
        header_style="bold" if out.is_terminal else "",
        title_style="bold" if out.is_terminal else "",
    )
    table.add_column(header[0], overflow="fold")
    for name in header[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(_literal, row))
    out.print(table)


def line(out: Console, text: str) -> None:
    """One line as it is: no markup, no wrapping."""
    out.print(text, markup=False, soft_wrap=True)


def outcome(out: Console, bundle: "Bundle") -> None:
    """Before and after of a finished bundle, then its path."""
    from compressor.bundle import summary

    show(out, ("", "before", "after", "change"), summary.rows(bundle.passport))
    line(out, f"bundle: {bundle.path}")


def plan(out: Console, made: "Plan") -> None:
    """A plan: linears by class, totals, stages with their time and memory, notes."""
    where = "on this machine" if made.source["local"] else "to be downloaded"
    line(out, f"{made.name}: {made.source['uri']} ({made.source['kind']}, {where})")
    how = f"{made.format}, {made.bits_per_weight:g} bits a weight, {made.activations} activations, {made.method}"
    line(out, f"{how}, {made.calibration_tokens} calibration tokens")
    if made.linears:
        rows = [
            (
                item.name if item.format == made.format else f"{item.name} ({item.format})",
                str(item.count),
                f"{item.out_features} × {item.in_features}",
                size(item.bytes_before),
                size(item.bytes_after),
            )
            for item in made.linears
        ]
        line(out, "")
        show(out, ("quantized linears", "count", "out × in", "before", "after"), rows)
        line(out, "")
    if made.source_bytes is not None and made.bundle_bytes is not None:
        ignored = f", {len(made.ignored)} linears ignored" if made.ignored else ""
        line(out, f"tensors: {made.tensors}, {made.parameters} parameters{ignored}")
        factor = made.source_bytes / made.bundle_bytes
        line(out, f"weights: {size(made.source_bytes)} → {size(made.bundle_bytes)} (÷ {factor:.2f})")
        line(out, "")
        costs = [(stage.name, duration(stage.seconds), size(stage.memory_bytes)) for stage in made.stages]
        show(out, ("stage (estimated)", "time", "memory"), costs)
        line(out, "")
        line(out, f"time: {duration(made.seconds)}, within about a factor of two")
        line(out, f"peak memory: {size(made.peak_memory_bytes)} ({made.peak_memory_stage})")
        line(out, f"free disk needed: {size(made.disk_bytes)}")
    for note in made.notes:
        line(out, f"note: {note}")


def inspection(out: Console, found: dict[str, Any]) -> None:
    """An inspected path: what it is, then its tensors by pattern."""
    from compressor.inspection import grouped

    line(out, f"{found['path']}: {found['kind']}, {found['architecture']}")
    sizes = ("layers", "hidden_size", "vocabulary", "parameters")
    line(out, ", ".join(f"{key.replace('_', ' ')} {found[key]}" for key in sizes if found[key] is not None))
    shares = ", ".join(f"{name} {size(count)}" for name, count in found["bytes_by_dtype"].items())
    line(out, f"tensors {len(found['tensors'])}, {size(found['bytes'])} ({shares})")
    fmt = found["format"]
    if fmt is None:
        line(out, "format: not quantized" if found["kind"] != "gguf" else "format: GGUF")
    elif fmt["name"] is None:
        line(out, f"format: {fmt['quant_method']}; {fmt['unreadable']}")
    else:
        detail = f"{fmt['bits_per_weight']:g} bits a weight, {fmt['activations']} activations"
        line(out, f"format: {fmt['name']} ({detail}), {len(fmt['ignore'])} modules ignored")
    if found["mtp_modules"] is not None:
        line(out, f"MTP modules: {', '.join(found['mtp_modules']) or 'none'}")
        line(out, f"output head: {'tied to the embedding' if found['tied'] else 'its own'}")
    line(out, "")
    rows = [
        (row["pattern"], str(row["count"]), row["dtype"], " × ".join(map(str, row["shape"])), size(row["bytes"]))
        for row in grouped(found["tensors"])
    ]
    show(out, ("tensors", "count", "dtype", "shape", "bytes"), rows)


def size(count: float | None) -> str:
    """Bytes for a reader, in decimal units."""
    if count is None:
        return "–"
    units = ("B", "kB", "MB", "GB", "TB")
    power = next((power for power in range(4) if count < 1000 ** (power + 1)), 4)
    return f"{count / 1000**power:.4g} {units[power]}"


def duration(seconds: float | None) -> str:
    """Seconds for a reader: 42 s, 3 min, 2.5 h."""
    if seconds is None:
        return "–"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _literal(text: str) -> str:
    return text.replace("[", r"\[")  # rich would read [x] as markup
