"""Whether a proposer on disk still drafts for a target as well as its passport says, an EAGLE-3 head also from the
states and with the logits that it was trained with: the check after every export."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.decode.runner import Runner
from compressor.errors import CompressError
from compressor.evals.prompts import acceptance_prompts
from compressor.measure import acceptance
from compressor.proposers import load
from compressor.proposers.base import Proposer
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.train import overlap
from compressor.train.overlap import Examined
from compressor.ui import UI, NullUI

PROMPTS, TOKENS, K = 8, 32, 3
"""What a check measures: greedy answers of so many tokens to so many prompts."""
TEXTS = 24
"""Prompts whose answers an EAGLE-3 head is examined on (compressor.train.overlap)."""
LEAST_SHARE = 0.8
"""Of the recorded tokens beyond one a cycle: another machine's rounding moves them by a few percent."""
LEAST_OF_HELD_OUT = 0.5
"""Of the held-out acceptance in training, the share that an exported head must reach on the first prompts of the same
documents: a few dozen drafts may be harder than all of them."""
LEAST_AFTER_TRAINING = 0.02
"""Acceptance of the first token that a proposer must reach even where training itself came to nothing."""
LEAST_FIRST = 0.15
"""Acceptance of the first token below which a head without a record is taken for damaged: guessing the most frequent
tokens gives a few percent."""


Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Finding:
    """`measured`: see `acceptance.measure`. `fault`: why the head is not what it should be, None where it is.
    `examined`: an EAGLE-3 head's overlap with the target, where that was asked for."""

    measured: dict[str, Any]
    fault: str | None
    examined: Examined | None = None


def usual_prompts(tokenizer: Any) -> Prompts:
    """What a head's passport is about: evaluation prompts of the package."""
    return acceptance_prompts(tokenizer, PROMPTS)


def more_prompts(tokenizer: Any) -> Prompts:
    """What a head is examined on."""
    return acceptance_prompts(tokenizer, TEXTS)


def measure(proposer: Proposer, decoder: Decoder, prompts: Prompts, ui: UI | None = None) -> dict[str, Any]:
    """Acceptance on greedy answers of `TOKENS` tokens."""
    with (ui or NullUI()).progress("head check", len(prompts)) as progress:
        return acceptance.measure(
            Runner(decoder, proposer, K),
            prompts,
            task="head check",
            target="baseline",
            k=K,
            max_new_tokens=TOKENS,
            law=Law(temperature=0.0),
            seed=0,
            progress=progress,
        )


def check(
    kind: str,
    folder: Path,
    decoder: Decoder,
    target: Path,
    prompts: Prompts,
    *,
    recorded: float | None = None,
    least_first: float = LEAST_FIRST,
    examine_on: Prompts = (),
    ui: UI | None = None,
) -> Finding:
    """Load the proposer of `kind` in `folder` for the target and compare its tau with the one `recorded` for it;
    without one, the acceptance of its first token with `least_first`. An EAGLE-3 head is also examined on the target's
    answers to the prompts `examine_on`.

    Errors as `compressor.proposers.load.build`.
    """
    proposer = load.build(load.Choice(kind, folder), decoder, target)
    assert proposer is not None
    measured = measure(proposer, decoder, prompts, ui)
    examined = None
    if examine_on and kind == "eagle3":
        examined = examine(folder, decoder, target, examine_on, ui or NullUI())
    faults = [_drafting_fault(measured, recorded, least_first), examined.fault if examined is not None else None]
    return Finding(measured, "; ".join(fault for fault in faults if fault is not None) or None, examined)


def examine(folder: Path, decoder: Decoder, target: Path, prompts: Prompts, ui: UI) -> Examined | None:
    """The overlap of the EAGLE-3 head in `folder` on the target's answers to `prompts`; None, and a note, where there
    are none. Errors as `compressor.proposers.load.build`."""
    proposer = load.build(load.Choice("eagle3", folder), decoder, target)
    assert isinstance(proposer, Eagle3Proposer)
    texts = overlap.greedy_texts(decoder, prompts, ui)
    if not texts:
        ui.note(f"{folder}: not examined: the target answers none of {len(prompts)} prompts with two tokens or more")
        return None
    return overlap.examine(proposer, decoder, texts)


def _drafting_fault(measured: dict[str, Any], recorded: float | None, least_first: float) -> str | None:
    if recorded is None:
        first = measured["conditional"][0] or 0.0
        if first >= least_first:
            return None
        return (
            f"its first token is accepted {first:.1%} of the time, {least_first:.1%} is the least to expect: "
            "untrained, damaged, or of another target"
        )
    if measured["tau"] - 1 >= LEAST_SHARE * (recorded - 1):
        return None
    return f"tau is {measured['tau']:.2f}, {recorded:.2f} is recorded: other weights, or another target"


def least_after(held_out: float) -> float:
    """The first token's acceptance to expect of a proposer that reached `held_out` in training."""
    return max(LEAST_AFTER_TRAINING, LEAST_OF_HELD_OUT * held_out)


def refuse(folder: Path, finding: Finding) -> None:
    """Raise CompressError for a head with a fault."""
    if finding.fault is not None:
        raise CompressError(f"{folder}: {finding.fault}")
