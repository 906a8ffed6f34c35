#!/usr/bin/env python3
"""What quantizing the target took from a head, apart from what the quantized target says instead.

    head_tax.py BASELINE TARGET HEAD [--healed HEALED] --data DIR [--prompts 20] [--tokens 64] [--json FILE]

tau of two targets is measured on two sets of answers, and one may be harder to foresee whatever the head. Here both
targets also read the same answers, the baseline's: that difference, token by token, is the head's disagreement with the
quantized target. Of a draft's first token: `greedy`, the share of tokens where head and target have the same favourite;
`sampled`, the acceptance to expect at temperature 1. HEALED is the head that was fine-tuned on TARGET. DIR as of
acceptance.py. Errors are standard errors with texts as the sample.
"""

import argparse
import json
from pathlib import Path

import torch
from acceptance import encoded, questions

from compressor.decode import engine
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.train import overlap
from compressor.train.overlap import Overlap
from compressor.ui import RichUI

FIELDS = {"greedy": "agrees", "sampled": "accepted"}


def rates(found: Overlap, beside: Overlap | None) -> dict[str, dict[str, float]]:
    """Means, and the difference to `beside` on the same texts."""
    rows: dict[str, dict[str, float]] = {}
    for name, field in FIELDS.items():
        rows[name] = {"rate": float(getattr(found, field).mean())}
        if beside is not None:
            difference, error = found.difference(beside, field)
            rows[name] |= {"difference": difference, "error": error}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("baseline", "target", "head"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--healed", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    overlap.TOKENS = args.tokens
    prompts = [ids for rows in encoded(questions(args.data, args.prompts), args.baseline).values() for ids in rows]
    targets = {"baseline": engine.decoder(args.baseline), "target": engine.decoder(args.target)}
    texts = {name: overlap.greedy_texts(decoder, prompts, RichUI()) for name, decoder in targets.items()}
    found: dict[str, dict] = {}
    seen: dict[tuple[str, str, str], Overlap] = {}
    plan = [("baseline", "baseline", "head", None), ("target", "baseline", "head", ("baseline", "baseline", "head"))]
    plan += [("target", "target", "head", None)]
    if args.healed:
        plan += [("target", text, "healed", ("target", text, "head")) for text in ("baseline", "target")]
    for target, text, head, beside in plan:
        proposer = Eagle3Proposer.load(getattr(args, head), targets[target])
        seen[target, text, head] = overlap.examine(proposer, targets[target], texts[text]).own
        name = f"{head} before the {target}, answers of the {text}"
        found[name] = rates(seen[target, text, head], None if beside is None else seen[beside])
        parts = [
            f"{key} {row['rate']:.4f}" + (f" ({row['difference']:+.4f} ± {row['error']:.4f})" if beside else "")
            for key, row in found[name].items()
        ]
        print(f"{name}: {', '.join(parts)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
