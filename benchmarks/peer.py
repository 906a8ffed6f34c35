#!/usr/bin/env python3
"""Quantize a model with llm-compressor or auto-round, for a side-by-side. The only file that knows their interfaces.

    peer.py METHOD FORMAT MODEL IDS.pt OUT [--ignore PATTERN ...] [--dtype bfloat16] [--iterations 200]
    peer.py --versions

METHOD is rtn or gptq (llm-compressor 0.14) or auto-round (0.15); FORMAT as in `quality_table.py`. IDS.pt is an int64
tensor [rows, length]. OUT becomes a compressed-tensors checkpoint in one folder. Runs with the interpreter of an
environment that holds those packages and none of this project. Where a tool has no such format this says so, on one
line, with exit code 1.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

METHODS = ("rtn", "gptq", "auto-round")
BATCH = 8
AUTO_ROUND_SIDES = 32
"""auto-round 0.15 leaves a linear unquantized in INT4 unless both its sizes are multiples of this
(`apply_layer_config_special_cases`)."""
WEIGHT_ONLY = {"act_bits": 16, "act_data_type": "float"}
"""auto-round's presets of 4-bit floats round inputs too."""
AUTO_ROUND: dict[str, dict] = {
    "int4-g64": {"scheme": "W4A16", "group_size": 64, "sym": True},
    "int4-g128": {"scheme": "W4A16", "group_size": 128, "sym": True},
    "nvfp4": {"scheme": "NVFP4", **WEIGHT_ONLY},
    "mxfp4": {"scheme": "MXFP4", **WEIGHT_ONLY},
    "nvfp4-w4a4": {"scheme": "NVFP4"},
    "mxfp4-w4a4": {"scheme": "MXFP4"},
    "fp8": {"scheme": "FPW8A16", "group_size": -1},
    "int8-w8a8": {"scheme": "INT8"},
}
PRESETS = {
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
    "nvfp4-w4a4": "NVFP4",
    "mxfp4-w4a4": "MXFP4",
    "fp8-w8a8": "FP8_DYNAMIC",
    "int8-w8a8": "INT8",
}
"""llm-compressor's names."""
WEIGHTS = {
    "int4-g64": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
    "int4-g128": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "fp8": {"num_bits": 8, "type": "float", "strategy": "channel"},
}
"""Arguments where it has no preset."""


def ignored(model, patterns: list[str]) -> list[str]:
    """Full names of the linears that a glob matches."""
    from torch import nn

    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in linears if any(fnmatchcase(name, pattern) for pattern in patterns)]


def llm_compressor(args: argparse.Namespace, model, ids, skip: list[str]) -> None:
    """Its oneshot with round-to-nearest or GPTQ, all else as it comes."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    if args.format in PRESETS:
        what: dict = {"targets": "Linear", "scheme": PRESETS[args.format]}
    elif args.format in WEIGHTS:
        weights = QuantizationArgs(symmetric=True, **WEIGHTS[args.format])
        what = {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}}
    else:
        raise SystemExit(f"llm-compressor has no format {args.format}")
    modifier = {"rtn": QuantizationModifier, "gptq": GPTQModifier}[args.method]
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    recipe = [modifier(ignore=["lm_head", *skip], **what)]
    oneshot(model=model, dataset=rows, recipe=recipe, max_seq_length=ids.shape[1], num_calibration_samples=ids.shape[0])
    model.save_pretrained(args.out, save_compressed=True)


def auto_round(args: argparse.Namespace, model, ids, tokenizer, skip: list[str]) -> None:
    """Its tuning with default settings but for the number of iterations."""
    if args.format not in AUTO_ROUND:
        raise SystemExit(f"auto-round has no format {args.format}")

    import torch
    from auto_round import AutoRound

    rows: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    tuner = AutoRound(
        model,
        tokenizer,
        iters=args.iterations,
        nsamples=ids.shape[0],
        seqlen=ids.shape[1],
        batch_size=BATCH,
        dataset=torch.utils.data.DataLoader(rows, batch_size=BATCH),
        device_map="cpu",
        ignore_layers=",".join(skip),
        **AUTO_ROUND[args.format],
    )
    inner = args.out.with_name(args.out.name + ".auto-round")
    tuner.quantize_and_save(str(inner), format="llm_compressor")
    found = {path.parent for path in inner.rglob("config.json")}
    if len(found) != 1:
        raise SystemExit(f"auto-round wrote {len(found)} checkpoints")
    shutil.move(str(found.pop()), args.out)
    shutil.rmtree(inner, ignore_errors=True)
    if AUTO_ROUND[args.format].items() >= WEIGHT_ONLY.items():
        as_weight_only(args.out / "config.json")


def as_weight_only(path: Path) -> None:
    """Take the rounding of inputs out of a config: auto-round writes that of its preset whatever it was asked for."""
    config = json.loads(path.read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    path.write_text(json.dumps(config, indent=1))


def quantize(args: argparse.Namespace) -> None:
    """Load, quantize, save with the tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids, skip = torch.load(args.ids, weights_only=True), ignored(model, args.ignore)
    if args.method == "auto-round":
        auto_round(args, model, ids, tokenizer, skip)
    else:
        llm_compressor(args, model, ids, skip)
    tokenizer.save_pretrained(args.out)


def main() -> None:
    if sys.argv[1:] == ["--versions"]:
        names = ("llmcompressor", "auto-round", "compressed-tensors", "transformers", "torch")
        print(json.dumps({name: importlib.metadata.version(name) for name in names}))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("format")
    parser.add_argument("model", type=Path)
    parser.add_argument("ids", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--iterations", type=int, default=200)
    quantize(parser.parse_args())


if __name__ == "__main__":
    main()
