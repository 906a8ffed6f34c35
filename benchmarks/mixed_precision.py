#!/usr/bin/env python3
"""KL against bytes: formats chosen for each group of linears under several budgets, beside one format everywhere.

    mixed_precision.py MODEL ROWS --text TEXT [--json FILE] [--uniform int4-g64 int4-g32 int8 fp8]
        [--budgets 4.35 int4-g32 5 6 fp8 8.3] [--formats int4-g64 int4-g32 int8 none] [--shuffled 1] [--method gptq]

Every point is a bundle that the main job makes from MODEL (a folder or hub id) with calibration ROWS (.pt or
.safetensors), its KL to MODEL measured by that job on windows of TEXT. A budget is a number of bits a weight, or the
name of a uniform format: all the bytes that this one takes. What each format costs each group is measured once, by the
first budget's job; the other budgets choose from the same table. --shuffled adds as many points a budget, chosen from
the costs of groups of equal bytes dealt out at random: what a budget gives without knowing where to spend it.

Writes FILE after every point, and at the end a PNG beside it. An interrupted run goes on where it stopped: points that
FILE has, of the same settings, are not made again, and one that was begun is continued. Exits 1 where a chosen point
has not less KL than a uniform format that fits its budget, or more bytes than its budget.
"""

import argparse
import json
import math
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from _files import replace_json

from compressor import formats, pipeline
from compressor.allocate import budget, stage
from compressor.allocate.choose import choose
from compressor.bundle.passport import Passport
from compressor.errors import CompressError
from compressor.recipe import Recipe
from compressor.recipe_quantization import UNQUANTIZED
from compressor.ui import RichUI

UNIFORM = ("int4-g64", "int4-g32", "int8", "fp8")
FORMATS = ("int4-g64", "int4-g32", "int8", UNQUANTIZED)
BUDGETS = ("4.35", "int4-g32", "5", "6", "fp8", "8.3")
SETTINGS = ("formats", "method", "measure", "measured_rows", "calibration_rows", "batch_size", "text_rows", "length")
"""Arguments that all points of a file share."""


# ------------------------------------------------------------------ what is chosen


def options(groups: Sequence[dict]) -> list[list[tuple[int, float]]]:
    """(bytes, KL) of each option of each group; `groups` are rows of a passport's allocation."""
    return [[(option["bytes"], option["kl"]) for option in group["options"]] for group in groups]


def shuffled(groups: Sequence[dict], seed: int) -> list[dict]:
    """`groups`, each with the costs of one of the same bytes, dealt out at random."""
    draw, alike = random.Random(seed), {}
    for place, group in enumerate(groups):
        alike.setdefault(tuple(option["bytes"] for option in group["options"]), []).append(place)
    dealt = list(groups)
    for places in alike.values():
        for place, other in zip(places, draw.sample(places, len(places)), strict=True):
            dealt[place] = {**groups[place], "options": groups[other]["options"]}
    return dealt


def picked(groups: Sequence[dict], table: Sequence[dict], size: int) -> list[dict]:
    """`groups`, with what is chosen under `size` bytes by the costs of `table`."""
    found = choose(options(table), size)
    return [{**group, "chosen": index} for group, index in zip(groups, found.indices, strict=True)]


def refuse_unfit(groups: Sequence[dict], sizes: dict[str, int]) -> None:
    """SystemExit for budgets (bytes by name) that hold nothing, or everything."""
    least, most = (sum(extreme(size for size, _ in row) for row in options(groups)) for extreme in (min, max))
    for name, size in sizes.items():
        if not least <= size < most:
            raise SystemExit(f"--budgets: {name} is {size} bytes; the formats take from {least} to less than {most}")


# ------------------------------------------------------------------ points


def recipe(args: argparse.Namespace, quantization: dict) -> Recipe:
    """A job that measures nothing but quality."""
    calibration = {"kind": "tokens", "path": str(args.rows.resolve()), "rows": args.calibration_rows}
    text = {"kind": "text", "path": str(args.text.resolve()), "rows": args.text_rows, "length": args.length}
    return Recipe.from_dict(
        {
            "name": "mixed-precision",
            "source": {"uri": args.model},
            "quantization": {"method": args.method, **quantization},
            "calibration": calibration | {"length": args.length, "batch_size": args.batch_size},
            "proposer": {"kind": "none"},
            "measure": {"quality": text},
        }
    )


class Points:
    """FILE as it grows, and the work beside it."""

    def __init__(self, path: Path, settings: dict):
        self.path, self.work = path, path.with_suffix(".work")
        self.data: dict = {"settings": settings, "allocation": None, "points": []}
        if path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != settings:
                raise SystemExit(f"{path}: of other settings ({found['settings']}); choose another --json or remove it")
            self.data = found

    @property
    def rows(self) -> list[dict]:
        return self.data["points"]

    def find(self, key: dict) -> dict | None:
        """The point of this kind, format, budget or seed."""
        return next((row for row in self.rows if key.items() <= row.items()), None)

    def make(self, asked: Recipe, key: dict) -> tuple[Passport, float]:
        """The passport of the bundle, which is thrown away by `add`, and the seconds of this run."""
        folder, start = self.work / "-".join(map(str, key.values())), time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        bundle = folder / "bundle"  # there only when it is complete
        if not bundle.exists():
            pipeline.run(asked, out=bundle, work=folder / "work", ui=RichUI(), resume=True)
        return Passport.load(bundle), time.monotonic() - start

    def add(self, key: dict, passport: Passport, seconds: float, unquantized: int = 0, **more: object) -> None:
        """Record a point, in whose linears `unquantized` bytes are of those left as they are."""
        (quality,) = passport.outcomes.quality
        layers, ledger = passport.quantization.layers, passport.ledger
        row = key | {
            "bytes": ledger.quantized_bytes + unquantized,
            **more,
            "kl": quality.kl_nats,
            "perplexity": quality.quantized,
            "reference_perplexity": quality.baseline,
            "bundle_bytes": ledger.bundle_bytes,
            "linears": Counter(layer.format for layer in layers),
            "seconds": round(seconds, 1),
        }
        print(json.dumps(row), flush=True)
        self.rows.append(row)
        replace_json(self.path, self.data)
        shutil.rmtree(self.work)


def measure(args: argparse.Namespace, points: Points) -> None:
    """Every point that is not there yet."""
    for name in args.uniform:
        key = {"kind": "uniform", "format": name}
        if not points.find(key):
            passport, seconds = points.make(recipe(args, {"format": name}), key)
            weights = sum(math.prod(layer.shape) for layer in passport.quantization.layers)
            points.add(key, passport, seconds, weights=weights)
    count, sizes = points.rows[0]["weights"], {}
    for name in args.budgets:
        like = points.find({"kind": "uniform", "format": name})
        sizes[name] = like["bytes"] if like else budget.allowed(float(name), count)
    asked = recipe(
        args,
        {
            "format": next(name for name in args.formats if name != UNQUANTIZED),
            "allocation": {
                "formats": args.formats,
                "rows": args.measured_rows,
                "measure": args.measure,
                "bits_per_weight": 8 * next(iter(sizes.values())) / count,
            },
        },
    )
    for name, size in sizes.items():
        if points.data["allocation"] is not None:
            refuse_unfit(points.data["allocation"]["groups"], sizes)
        for seed in range(args.shuffled + 1):  # 0: by the costs as measured
            key = {"kind": "shuffled" if seed else "mixed", "budget": name, "seed": seed}
            if not points.find(key):
                chosen(args, points, asked, key, size)


def chosen(args: argparse.Namespace, points: Points, asked: Recipe, key: dict, size: int) -> None:
    """Make one point under `size` bytes; the first measures what each format costs."""
    if points.data["allocation"] is None:
        passport, seconds = points.make(asked, key)
        found = passport.quantization.allocation
        assert found is not None and found.budget_bytes == size
        points.data["allocation"] = found.model_dump(mode="json")
        groups = points.data["allocation"]["groups"]
    else:
        table = points.data["allocation"]["groups"]
        groups = picked(table, shuffled(table, key["seed"]) if key["seed"] else table, size)
        named = stage.settings(asked.quantization, groups)
        passport, seconds = points.make(recipe(args, named.model_dump(mode="json")), key)
    made = [group["options"][group["chosen"]] for group in groups]
    left = sum(option["bytes"] for option in made if option["format"] == UNQUANTIZED)
    kl_sum = sum(option["kl"] for option in made)
    points.add(key, passport, seconds, unquantized=left, budget_bytes=size, kl_sum=kl_sum)


# ------------------------------------------------------------------ what is made of them


def faults(rows: Sequence[dict]) -> list[str]:
    """What is wrong with the chosen points: each must keep to its budget, and have less KL than every uniform format
    that fits this budget, unless it is that format."""
    found, compared = [], 0
    for row in [row for row in rows if row["kind"] == "mixed"]:
        told = f"the choice at {row['budget']} ({row['bytes']} bytes, KL {row['kl']:.5f})"
        if row["bytes"] > row["budget_bytes"]:
            found.append(f"{told} takes more than its {row['budget_bytes']} bytes")
        for other in [other for other in rows if other["kind"] == "uniform"]:
            if other["bytes"] > row["budget_bytes"] or other["linears"] == row["linears"]:
                continue
            compared += 1
            if not row["kl"] < other["kl"]:
                found.append(f"{told} is not below {other['format']} ({other['bytes']} bytes, KL {other['kl']:.5f})")
    return found if compared else [*found, "no uniform format fits the budget of a choice: nothing was compared"]


def plot(rows: Sequence[dict], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    styles = {"mixed": ("o", "-", "chosen by KL"), "shuffled": ("x", "", "dealt at random"), "uniform": ("s", "", None)}
    for kind, (marker, line, label) in styles.items():
        some = sorted((row for row in rows if row["kind"] == kind), key=lambda row: row["bytes"])
        if not some:
            continue
        sizes, kls = ([row[name] for row in some] for name in ("bytes", "kl"))
        megabytes = [size / 1e6 for size in sizes]
        axes.plot(megabytes, kls, marker=marker, linestyle=line, label=label or "one format everywhere")
        for row, x in zip(some, megabytes, strict=True) if kind == "uniform" else []:
            axes.annotate(row["format"], (x, row["kl"]), textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set(yscale="log", xlabel="bytes of the blocks' linears (MB)", ylabel="KL(original ‖ quantized), nats a token")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    plt.close(figure)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--json", type=Path, default=Path("artifacts/mixed/mixed_precision.json"))
    parser.add_argument("--uniform", nargs="+", choices=formats.names(), default=UNIFORM)
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--formats", nargs="+", choices=[*formats.names(), UNQUANTIZED], default=FORMATS)
    parser.add_argument("--shuffled", type=int, default=0, help="points a budget with costs dealt at random")
    parser.add_argument("--method", choices=["gptq", "rtn"], default="gptq")
    parser.add_argument("--measure", choices=["cheapest", "all"], default="cheapest")
    parser.add_argument("--measured-rows", type=int, default=4, help="calibration rows that costs are measured on")
    parser.add_argument("--calibration-rows", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--text-rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args(argv)
    args.formats = list(args.formats)
    for name in args.budgets:
        try:
            float(name)
        except ValueError:
            if name not in args.uniform:
                parser.error(f"--budgets: {name} is neither bits a weight nor one of --uniform")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    settings = {"model": Path(args.model).name, "text": args.text.name, "rows": args.rows.name}
    points = Points(args.json, settings | {key: getattr(args, key) for key in SETTINGS})
    try:
        measure(args, points)
    except CompressError as error:
        raise SystemExit(str(error)) from None
    plot(points.rows, args.json.with_suffix(".png"))
    found = faults(points.rows)
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
