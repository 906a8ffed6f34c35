#!/usr/bin/env python3
"""Time and peak memory of a whole `compress` GPTQ run beside another tool's, as ratios from one run.

    gptq.py MODEL_DIR IDS.pt [--format int4-g64] [--peer "COMMAND ..."] [--json FILE]

IDS.pt is an int64 tensor [rows, length]; the peer's command must quantize the same model on the same rows. Both run
alone, one after the other, as whole processes: start, imports, reading, calibration, quantizing, writing (and, for
ours, signing and verifying). Peak memory is the largest resident set of the process. Seconds depend on the machine and
its neighbours; the ratios are what to compare.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

import torch
from _process import Failed, run

RECIPE = """
name: benchmark
source: {{uri: {model}}}
quantization: {{format: {format}, method: gptq}}
calibration: {{kind: tokens, path: {ids}, rows: {rows}, length: {length}}}
proposer: {{kind: none}}
measure: {{quality: {{kind: none}}}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("--format", default="int4-g64")
    parser.add_argument("--peer", help="command line of the other tool")
    parser.add_argument("--json", type=Path, help="write the result here too")
    args = parser.parse_args()
    try:
        result = compare(args)
    except Failed as error:
        raise SystemExit(f"failed: {error}") from None
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def compare(args: argparse.Namespace) -> dict:
    """Ours, then the peer."""
    rows, length = torch.load(args.ids, weights_only=True).shape
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        paths = {"model": args.model.resolve(), "ids": args.ids.resolve()}
        recipe.write_text(RECIPE.format(**paths, format=args.format, rows=rows, length=length))
        compress = [sys.executable, "-m", "compressor.cli", str(recipe), "--out", str(Path(folder) / "bundle")]
        result = {"format": args.format, "rows": rows, "length": length, "ours": run(compress)}
    if args.peer:
        result["peer"] = run(shlex.split(args.peer))
        result["time_ratio"] = round(result["ours"]["seconds"] / result["peer"]["seconds"], 3)
        result["memory_ratio"] = round(result["ours"]["peak_bytes"] / result["peer"]["peak_bytes"], 3)
    return result


if __name__ == "__main__":
    main()
