#!/usr/bin/env python3
"""KL against bytes: formats chosen for each group of linears under several budgets, beside the same format everywhere.

    mixed_precision.py MODEL ROWS --text TEXT [--budgets 4.4 4.6 ...] [--formats int4-g64 int8 ...]
        [--uniform int4-g64 int8 ...] [--shuffled 1] [--method gptq] [--out artifacts/mixed/NAME]

Every point is a bundle that the main job makes from MODEL (a folder or hub id) with calibration ROWS (.pt or
.safetensors), its KL to MODEL measured on TEXT. What each format costs each group is measured once, by the first
budget's job; the other budgets choose from the same table. --shuffled adds as many points a budget whose choice was
made with the costs of groups of equal shape dealt out at random: what the budget gives without knowing where to spend
it. Writes OUT.json, after every point, and OUT.svg; points that OUT.json has, of the same settings, are not made again.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

from compressor import pipeline
from compressor.allocate import stage
from compressor.allocate.choose import choose
from compressor.bundle.passport import Passport
from compressor.recipe import Recipe
from compressor.ui import RichUI

BUDGETS = (4.4, 4.6, 4.8, 5.2, 5.6, 6.0, 6.5, 7.0)


def recipe(args: argparse.Namespace, quantization: dict) -> Recipe:
    """A job that measures nothing but quality."""
    return Recipe.from_dict(
        {
            "name": "mixed-precision",
            "source": {"uri": args.model},
            "quantization": {"method": args.method, **quantization},
            "calibration": {
                "kind": "tokens",
                "path": str(args.rows.resolve()),
                "rows": args.calibration_rows,
                "length": args.length,
            },
            "proposer": {"kind": "none"},
            "measure": {
                "quality": {
                    "kind": "text",
                    "path": str(args.text.resolve()),
                    "rows": args.text_rows,
                    "length": args.length,
                }
            },
        }
    )


def made(asked: Recipe) -> Passport:
    """The passport of a bundle that is made and thrown away."""
    folder = Path(tempfile.mkdtemp())
    try:
        return pipeline.run(asked, out=folder / "bundle", work=folder / "work", ui=RichUI()).passport
    finally:
        shutil.rmtree(folder)


def budget_bytes(bits: float, groups: list[dict]) -> int:
    return int(bits * sum(group["weights"] for group in groups) / 8)


def chosen(groups: list[dict], budget: int) -> list[dict]:
    """`groups` (rows of a passport's allocation) with another choice."""
    found = choose([[(option["bytes"], option["kl"]) for option in group["options"]] for group in groups], budget)
    return [{**group, "chosen": index} for group, index in zip(groups, found.indices, strict=True)]


def shuffled(groups: list[dict], seed: int) -> list[dict]:
    """`groups`, each with the costs of another of the same bytes."""
    draw, alike = random.Random(seed), {}
    for place, group in enumerate(groups):
        alike.setdefault(tuple(option["bytes"] for option in group["options"]), []).append(place)
    dealt = list(groups)
    for places in alike.values():
        for place, other in zip(places, draw.sample(places, len(places)), strict=True):
            dealt[place] = {**groups[place], "options": groups[other]["options"]}
    return dealt


def point(passport: Passport, kind: str, seconds: float, **more: object) -> dict:
    """What is plotted of one bundle."""
    (quality,) = passport.outcomes.quality
    ledger, layers = passport.ledger, passport.quantization.layers
    counts: dict[str, int] = {}
    for layer in layers:
        counts[layer.format] = counts.get(layer.format, 0) + 1
    return {
        "kind": kind,
        **more,
        "kl": quality.kl_nats,
        "perplexity": quality.quantized,
        "reference_perplexity": quality.baseline,
        "bundle_bytes": ledger.bundle_bytes,
        "quantized_bytes": ledger.quantized_bytes,
        "bits_per_weight": passport.quantization.bits_per_weight,
        "linears": counts,
        "seconds": round(seconds, 1),
    }


class Points:
    """OUT.json as it grows."""

    def __init__(self, path: Path, settings: dict):
        self.path, self.data = path, {"settings": settings, "allocation": None, "points": []}
        if path.exists():
            found = json.loads(path.read_text())
            if found["settings"] != settings:
                raise SystemExit(f"{path}: of other settings ({found['settings']}); choose another --out or remove it")
            self.data = found

    def has(self, **key: object) -> bool:
        return any(key.items() <= row.items() for row in self.data["points"])

    def add(self, row: dict) -> None:
        self.data["points"].append(row)
        print(json.dumps(row), flush=True)
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n")


def timed(asked: Recipe) -> tuple[Passport, float]:
    start = time.monotonic()
    return made(asked), time.monotonic() - start


def measure(args: argparse.Namespace, points: Points) -> None:
    """Every point that is not there yet."""
    for name in args.uniform:
        if not points.has(kind="uniform", format=name):
            passport, seconds = timed(recipe(args, {"format": name}))
            points.add(point(passport, "uniform", seconds, format=name))
    first = next(name for name in args.formats if name != "none")
    allocation = {"formats": args.formats, "rows": args.measured_rows, "measure": args.measure}
    asked = recipe(args, {"format": first, "allocation": {**allocation, "bits_per_weight": args.budgets[0]}})
    if points.data["allocation"] is None:
        passport, seconds = timed(asked)
        found = passport.quantization.allocation
        assert found is not None
        points.data["allocation"] = found.model_dump(mode="json")
        points.add(point(passport, "mixed", seconds, budget=args.budgets[0], kl_sum=found.kl_sum))
    groups = points.data["allocation"]["groups"]
    for bits in args.budgets:
        for seed in range(args.shuffled + 1):  # 0: as measured
            key = {"kind": "shuffled", "budget": bits, "seed": seed} if seed else {"kind": "mixed", "budget": bits}
            if points.has(**key):
                continue
            table = shuffled(groups, seed) if seed else groups
            picked = [
                {**group, "chosen": row["chosen"]}
                for group, row in zip(groups, chosen(table, budget_bytes(bits, groups)), strict=True)
            ]
            named = stage.settings(asked.quantization, picked)
            passport, seconds = timed(recipe(args, named.model_dump(mode="json")))
            kl_sum = sum(group["options"][group["chosen"]]["kl"] for group in picked)
            points.add(point(passport, seconds=seconds, kl_sum=kl_sum, **key))


def plot(points: list[dict], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    styles = {"mixed": ("o", "-", "chosen by KL"), "shuffled": ("x", "", "dealt at random"), "uniform": ("s", "", None)}
    for kind, (marker, line, label) in styles.items():
        rows = sorted((row for row in points if row["kind"] == kind), key=lambda row: row["quantized_bytes"])
        if not rows:
            continue
        axes.plot(
            [row["quantized_bytes"] / 1e6 for row in rows],
            [row["kl"] for row in rows],
            marker=marker,
            linestyle=line,
            label=label or "one format everywhere",
        )
        for row in rows if kind == "uniform" else []:
            place = (row["quantized_bytes"] / 1e6, row["kl"])
            axes.annotate(row["format"], place, textcoords="offset points", xytext=(5, 4), fontsize=8)
    axes.set(
        yscale="log", xlabel="bytes of the quantized linears (MB)", ylabel="KL(original ‖ quantized), nats a token"
    )
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS)
    parser.add_argument("--formats", nargs="+", default=["int4-g64", "int8"])
    parser.add_argument("--uniform", nargs="+", default=["int4-g64", "int4-g32", "nvfp4", "mxfp4", "int8"])
    parser.add_argument("--shuffled", type=int, default=0, help="points a budget with costs dealt at random")
    parser.add_argument("--method", choices=["gptq", "rtn"], default="gptq")
    parser.add_argument("--measure", choices=["cheapest", "all"], default="cheapest")
    parser.add_argument("--measured-rows", type=int, default=4, help="calibration rows that KL is measured on")
    parser.add_argument("--calibration-rows", type=int, default=128)
    parser.add_argument("--text-rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("artifacts/mixed/mixed_precision"))
    args = parser.parse_args()
    told = ("formats", "method", "measure", "measured_rows", "calibration_rows", "text_rows", "length")
    settings = {"model": Path(args.model).name, "text": args.text.name, "rows": args.rows.name}
    points = Points(args.out.with_suffix(".json"), settings | {key: getattr(args, key) for key in told})
    measure(args, points)
    plot(points.data["points"], args.out.with_suffix(".svg"))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
