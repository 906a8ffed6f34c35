#!/usr/bin/env python3
"""Broken copies of an EAGLE-3 head, and what the export check says to each: the negative controls of `check-head`.

    head_controls.py TARGET HEAD [--json FILE]

HEAD has a passport, whose tau is what the copies are judged by. The copies: lm_head rows shuffled, all states one layer
lower or higher, final norm left out (its weight 1). Of each: greedy acceptance on the check's prompts, and the
acceptance of a first token to expect at temperature 1 on the check's texts, with its difference from the head's own in
pairs. Besides, training on states without the target's final norm: the share of its own greedy answers that they give
back, below which training refuses to start. Exits 1 where the head itself is flagged, or a broken copy is not.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from compressor.calibration.prompts import calibration_prompts, encode
from compressor.checkpoint.tokenizer import load_tokenizer
from compressor.decode import engine
from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.errors import CompressError
from compressor.train import answers, check, head, states
from compressor.train.corpus import Document
from compressor.train.passport import HeadPassport
from compressor.ui import NullUI

Break = Callable[[Path], None]
DOCUMENTS = 16


def shuffled(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    order = torch.randperm(len(tensors["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
    tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()
    save_file(tensors, folder / "model.safetensors")


def without_norm(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["norm.weight"] = torch.ones_like(tensors["norm.weight"])
    save_file(tensors, folder / "model.safetensors")


def moved(shift: int) -> Break:
    def move(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for section in (config, config.get("eagle_config", {})):
            if "eagle_aux_hidden_state_layer_ids" in section:
                ids = section["eagle_aux_hidden_state_layer_ids"]
                section["eagle_aux_hidden_state_layer_ids"] = [index + shift for index in ids]
        (folder / "config.json").write_text(json.dumps(config))

    return move


COPIES: dict[str, Break] = {
    "as it is": lambda folder: None,
    "lm_head rows shuffled": shuffled,
    "states one layer lower": moved(-1),
    "states one layer higher": moved(1),
    "final norm left out": without_norm,
}


def judge(target: Path, folder: Path, decoder: Decoder, passport: HeadPassport) -> list[dict]:
    rows: list[dict] = []
    tokenizer = load_tokenizer(target)
    prompts, texts = check.usual_prompts(tokenizer), check.texts_of(decoder, tokenizer, NullUI())
    own = None
    for name, damage in COPIES.items():
        with tempfile.TemporaryDirectory() as place:
            copy = Path(shutil.copytree(folder, Path(place) / "head"))
            damage(copy)
            finding = check.check(
                *("eagle3", copy, decoder, target, prompts),
                recorded=passport.check.tau,
                recorded_expected=passport.expected_acceptance,
                texts=texts,
            )
        found, examined = finding.measured, finding.examined
        assert examined is not None
        own = own or examined.own
        gain, error = examined.own.difference(own)
        rows.append({"copy": name, "tau": found["tau"], "conditional": found["conditional"], "fault": finding.fault})
        rows[-1] |= {"examined": examined.summary(), "gain": gain, "error": error}
        rates = " ".join("–" if rate is None else f"{rate:.3f}" for rate in found["conditional"])
        expected = f"expected at temperature 1 {examined.own.rate:.3f} ({gain:+.4f} ± {error:.4f})"
        print(
            f"{name}: acceptance {rates}, tau {found['tau']:.2f}, {expected}: {finding.fault or 'passes'}", flush=True
        )
    return rows


def teachers(target: Path, decoder: Decoder) -> list[dict]:
    """What training says to states with the target's final norm, and without."""
    tokenizer = load_tokenizer(target)
    prompts = [encode(prompt, tokenizer) for prompt in calibration_prompts()[:DOCUMENTS]]
    written = answers.Writing(decoder, prompts, max_new_tokens=32, law=Law(0.0), seed=0, stops=decoder.stops).run()
    documents = [Document(prompt + answer, len(prompt)) for prompt, answer in zip(prompts, written, strict=True)]
    rows = []
    for name, aux in (("with", ()), ("without", (len(decoder.layers),))):

        def lookup(indices, aux=aux):  # the last state before the norm stands where the normed one belongs
            found = states.read(decoder, [documents[index].tokens for index in indices], aux)
            return [state[:, : decoder.config.hidden_size] for state in found]

        fault = None
        try:
            share = head.check_teacher(decoder, documents, lookup, range(DOCUMENTS), greedy=True)
        except CompressError as error:
            fault = str(error)
            share = head.check_teacher(decoder, documents, lookup, range(DOCUMENTS), greedy=False)
        rows.append({"teacher": f"{name} final norm", "agreement": share, "fault": fault})
        print(f"teacher {name} the final norm: {share:.1%} of its own tokens: {fault or 'passes'}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    parser.add_argument("head", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    passport = HeadPassport.load(args.head)
    if passport is None:
        sys.exit(f"{args.head}: no passport; train or heal one")
    decoder = engine.decoder(args.target)
    copies, taught = judge(args.target, args.head, decoder, passport), teachers(args.target, decoder)
    if args.json:
        text = json.dumps({"recorded_tau": passport.check.tau, "copies": copies, "teachers": taught}, indent=1)
        args.json.write_text(text + "\n")
    wrong = [row for row in [*copies[1:], *taught[1:]] if row["fault"] is None]
    sys.exit(1 if wrong or copies[0]["fault"] or taught[0]["fault"] else 0)


if __name__ == "__main__":
    main()
