#!/usr/bin/env python3
"""How far a bundle is from its reference on a text, by this project's own evaluation, 8-bit and 4-bit inputs included.

    quality_judge.py REFERENCE BUNDLE --text FILE [--windows 32] [--length 512]

Prints one JSON object: kl_nats, tv, top1_agreement, ppl_reference, ppl, tokens. Windows are evenly spaced over the
tokenized text. Weights and arithmetic are float32; inputs are rounded as engines do it. BUNDLE is a compressed-tensors
checkpoint, whoever made it, of a scheme that this project knows.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from compressor.checkpoint.tokenizer import load_tokenizer
from compressor.checkpoint.weights import Weights
from compressor.errors import CompressError
from compressor.evals.rows import text_windows
from compressor.measure import quality
from compressor.models.skeleton import model_config
from compressor.models.stream import BlockStream
from compressor.ui import NullUI


def judge(reference: Path, bundle: Path, text: Path, count: int, length: int) -> dict:
    """What is printed."""
    ids = text_windows(text, load_tokenizer(reference), rows=count, length=length)
    target, candidate = (
        BlockStream(Weights(folder), model_config(folder)[0], torch.float32) for folder in (reference, bundle)
    )
    with NullUI().progress("quality", len(target) + 1) as progress:
        found = quality.compare(target, candidate, ids, progress=progress)
    return {{"perplexity": "ppl", "perplexity_reference": "ppl_reference"}.get(k, k): v for k, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    try:
        print(json.dumps(judge(args.reference, args.bundle, args.text, args.windows, args.length)))
    except (CompressError, OSError) as error:
        sys.exit(f"{args.bundle}: {error}")


if __name__ == "__main__":
    main()
