#!/usr/bin/env python3
"""KL, top-1 agreement, perplexity, bytes, seconds and memory of methods × formats, ours and other tools', on one model.

    quality_table.py MODEL --record FILE.json --judge "python JUDGE.py" --text NAME=FILE [--text ...]
        --calibration-text FILE [--separator TEXT] | --ids FILE.pt
        [--peer-python PYTHON] [--only METHOD:FORMAT ...] [--again] [--markdown] [--require 0.70]

Methods are ours: rtn (scale_search none), rtn-mse, gptq, guided, best (guided, then distillation of --steps); and
llmc-rtn, llmc-gptq (llm-compressor), auto-round, run by `peer.py` with the interpreter --peer-python. Formats are those
of `_quality.FORMATS`. Every tool quantizes the same linears on the same calibration rows, in a process of its own whose
seconds and peak memory are noted. Linears whose sizes one of the tools cannot group stay unquantized in all of them; a
format that fits no linear is left out. A bundle that holds other quantized linears than asked for counts as failed.

The record is written after every cell: a killed run goes on where it was, and only missing cells are made (--again:
those chosen are made anew). --only takes globs, as `'gptq:*'`. Without --judge nothing is made, and the record is only
printed.

JUDGE is called as JUDGE REFERENCE BUNDLE --text FILE --windows W --length L and prints one JSON object with kl_nats,
top1_agreement and ppl. A bundle that it refuses (8-bit inputs) is judged by `quality_judge.py`, and marked so.

--markdown prints the tables; --require R exits 1 unless, for every 4-bit format and text, the least KL of ours is at
most R times that of the peers.
"""

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import peer
import torch
from _process import Failed, last_line, run
from _quality import FORMATS, OURS, OWN_JUDGE, PEERS, Cell, Record, chosen, markdown, unmet
from safetensors import safe_open

from compressor import formats, models
from compressor.calibration import packing
from compressor.calibration.documents import encode_text
from compressor.checkpoint.inventory import Inventory
from compressor.checkpoint.tokenizer import load_tokenizer
from compressor.errors import CompressError
from compressor.models.skeleton import model_config

HERE = Path(__file__).resolve().parent
Shapes = dict[str, tuple[int, ...]]


def calibration_rows(text: str, tokenizer, rows: int, length: int, separator: str | None, source: str) -> torch.Tensor:
    """int64 [rows, length] from the start of a text: its documents, which `separator` parts, one after the other, with
    the tokenizer's own special tokens and an end-of-sequence token after each.

    Raises CompressError, naming `source`, for too short a text.
    """
    documents = text.split(separator) if separator else [text]
    encoded = (encode_text(document.strip(), tokenizer) for document in documents if document.strip())
    return packing.pack(encoded, rows=rows, length=length, separator=tokenizer.eos_token_id, source=source)


def linear_shapes(folder: Path) -> Shapes:
    """[out, in] of every linear in the blocks, by its full name."""
    config, _ = model_config(folder)
    tensors = Inventory.read(folder).tensors
    names = [name for name, _, _ in models.get(config.model_type).linears(config)]
    return {name: tensors[f"{name}.weight"].shape for name in names}


def misfits(name: str, shapes: Shapes) -> list[str]:
    """The linears that some tool cannot quantize in this format: those whose inputs the group does not divide, and in
    INT4 those that auto-round skips."""
    weights = formats.get(FORMATS[name].weights)
    unit = weights.group_size or 1
    sides = peer.AUTO_ROUND_SIDES if name.startswith("int4") else 1
    return [linear for linear, (out, width) in shapes.items() if width % math.lcm(unit, sides) or out % sides]


def patterns(names: list[str], shapes: Shapes) -> list[str]:
    """`names` as globs: one for a linear that is named in every block."""
    tails = {name: "*." + ".".join(name.split(".")[-2:]) for name in shapes}
    whole = {tail for tail in tails.values() if all(name in names for name in shapes if tails[name] == tail)}
    return list(dict.fromkeys(tails[name] if tails[name] in whole else name for name in names))


def quantized_linears(bundle: Path) -> set[str]:
    """The linears that a compressed-tensors checkpoint holds quantized."""
    found: set[str] = set()
    for shard in bundle.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            found |= set(formats.quantized_layers(file.keys()))
    return found


def command(cell: Cell, args: argparse.Namespace, ids: Path, kept: list[str], out: Path) -> list[str]:
    """What makes a cell's bundle at `out`; a recipe of ours is written beside it."""
    method, name = cell
    if method in PEERS:
        words = [args.peer_python, str(HERE / "peer.py"), PEERS[method], name, str(args.model), str(ids), str(out)]
        words += ["--dtype", args.dtype, "--iterations", str(args.iterations)]
        return words + [f"--ignore={pattern}" for pattern in kept]
    form, says = FORMATS[name], OURS[method]
    recipe = {
        "name": "table",
        "source": {"uri": str(args.model), "dtype": args.dtype},
        "quantization": {
            "format": form.weights,
            "activations": form.activations,
            "ignore": kept,
            **says["quantization"],
        },
        "calibration": {"kind": "tokens", "path": str(ids), "rows": args.rows, "length": args.row_length},
        "proposer": {"kind": "none"},
        "measure": {"quality": {"kind": "none"}},
    }
    if "distillation" in says:
        recipe["distillation"] = {"steps": args.steps}
    path = out.with_suffix(".yaml")
    path.write_text(json.dumps(recipe))  # JSON is YAML
    return [sys.executable, "-m", "compressor.cli", str(path), "--out", str(out)]


def make(cell: Cell, args: argparse.Namespace, ids: Path, kept: list[str], wanted: set[str]) -> dict:
    """Quantize and judge one cell; see `Record` for what is returned."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bundle"
        try:
            found = run(command(cell, args, ids, kept, out), env={"HF_HUB_OFFLINE": "1"})
        except Failed as error:
            return {"failed": str(error).replace(folder, "").replace(str(args.model), args.model.name)}
        other = quantized_linears(out) ^ wanted
        if other:
            return {"failed": f"other linears are quantized than in the other tools: {len(other)}, {min(other)} first"}
        found["bundle_bytes"] = sum(file.stat().st_size for file in out.glob("*.safetensors"))
        found["texts"] = {name: judged(args, out, file) for name, file in args.text.items()}
    return found


def judged(args: argparse.Namespace, bundle: Path, text: Path) -> dict:
    """What --judge says about a bundle on a text, or our own where it refuses; "not_judged" and the reason of both."""
    asked = ["--text", str(text), "--windows", str(args.windows), "--length", str(args.length)]
    reasons = []
    for words in (shlex.split(args.judge), [sys.executable, str(HERE / OWN_JUDGE)]):
        done = subprocess.run([*words, str(args.model), str(bundle), *asked], capture_output=True, text=True)
        try:
            said = json.loads(done.stdout.strip().splitlines()[-1]) if not done.returncode else {}
        except (ValueError, IndexError):
            said = {}
        if {"kl_nats", "top1_agreement", "ppl"} <= said.keys():
            return {key: said[key] for key in ("kl_nats", "top1_agreement", "ppl")} | {"judge": Path(words[-1]).name}
        reasons.append(last_line(done.stderr or done.stdout).replace(str(bundle), bundle.name))
    return {"not_judged": "; ".join(reasons)}


def fill(args: argparse.Namespace, record: Record, ids: torch.Tensor) -> None:
    """Make the cells that are missing."""
    shapes = linear_shapes(args.model)
    for name in FORMATS:
        unfit = misfits(name, shapes)
        record.data["kept"][name] = patterns(unfit, shapes)
        if len(unfit) == len(shapes):
            widths = ", ".join(map(str, sorted({width for _, width in shapes.values()})))
            record.data["left_out"][name] = f"no linear can be grouped so (inputs: {widths})"
    cells = chosen(args.only, record.data["left_out"])
    if not args.peer_python:
        cells = [cell for cell in cells if cell[0] not in PEERS]
    else:
        said = subprocess.run([args.peer_python, str(HERE / "peer.py"), "--versions"], capture_output=True, check=True)
        record.data["tools"] = json.loads(said.stdout)
    record.save()
    missing = record.missing(cells, args.text, again=args.again)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.pt"
        torch.save(ids, path)
        for number, cell in enumerate(missing, 1):
            kept = record.data["kept"][cell[1]]
            record.put(cell, make(cell, args, path, kept, {*shapes} - {*misfits(cell[1], shapes)}))
            print(f"{number}/{len(missing)} {':'.join(cell)} {json.dumps(record.cell(cell))}", file=sys.stderr)


def rows_of(args: argparse.Namespace) -> torch.Tensor:
    """The calibration rows, int64 [rows, length]; `args.rows` and `args.row_length` become theirs."""
    if args.ids:
        ids = torch.load(args.ids, weights_only=True)
    elif args.calibration_text:
        text, tokenizer = args.calibration_text.read_text(encoding="utf-8"), load_tokenizer(args.model)
        name = args.calibration_text.name
        ids = calibration_rows(text, tokenizer, args.rows, args.row_length or args.length, args.separator, name)
    else:
        raise SystemExit("give the calibration rows: --calibration-text FILE or --ids FILE.pt")
    args.rows, args.row_length = ids.shape
    return ids


def named_file(text: str) -> tuple[str, Path]:
    """NAME=FILE."""
    name, equals, file = text.partition("=")
    if not equals or not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE with a file that is there")
    return name, Path(file)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, number = parser.add_argument, partial(parser.add_argument, type=int)
    add("model", type=Path, help="folder of the full-precision model")
    add("--record", type=Path, required=True, help="JSON file of the cells")
    add("--name", help="of the model, in the record (default: the folder's)")
    add("--judge", help="command line")
    add("--text", type=named_file, action="append", default=[], metavar="NAME=FILE")
    add("--calibration-text", type=Path)
    add("--separator", help="between the documents of --calibration-text")
    add("--ids", type=Path, help="int64 [rows, length] instead of --calibration-text")
    add("--peer-python", help="interpreter of the peers' environment; without it only ours are made")
    add("--dtype", default="bfloat16", help="that every tool loads the model in")
    number("--rows", default=128, help="of calibration")
    number("--windows", default=32, help="of each text")
    number("--length", default=512, help="of windows")
    number("--row-length", help="of rows made from --calibration-text (default: --length)")
    number("--steps", default=60, help="of distillation in best")
    number("--iterations", default=200, help="of auto-round")
    add("--only", action="append", default=[], metavar="METHOD:FORMAT")
    add("--again", action="store_true")
    add("--markdown", action="store_true")
    add("--require", type=float, metavar="RATIO")
    args = parser.parse_args()
    args.text, args.model = dict(args.text), args.model.resolve()
    return args


def settings_of(args: argparse.Namespace, ids: torch.Tensor) -> dict:
    """What all cells of a record share: names of files, no paths."""
    made_from = args.calibration_text or args.ids
    return {
        "model": args.name or args.model.name,
        "dtype": args.dtype,
        "calibration": {"file": made_from.name, "shape": [*ids.shape], "sha256": packing.digest(ids)},
        "windows": args.windows,
        "length": args.length,
        "distillation_steps": args.steps,
        "auto_round_iterations": args.iterations,
    }


def main() -> None:
    args = arguments()
    if args.judge:
        try:
            ids = rows_of(args)
            record = Record(args.record, settings_of(args, ids), {name: file.name for name, file in args.text.items()})
            fill(args, record, ids)
        except CompressError as error:
            raise SystemExit(str(error)) from None
    elif args.record.exists():
        record = Record(args.record)
    else:
        raise SystemExit(f"{args.record}: not there; --judge makes its cells")
    if args.markdown:
        print(markdown(record))
    lines = list(unmet(record, args.require)) if args.require is not None else []
    for line in lines:
        print(line, file=sys.stderr)
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
