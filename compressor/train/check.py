"""Whether a proposer on disk still drafts for a target as well as its passport says, an EAGLE-3 head also from the
states that it was trained with: the check after every export."""

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
from compressor.train.corpus import Document
from compressor.train.eagle3 import Eagle3Head
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


def texts_of(decoder: Decoder, tokenizer: Any, ui: UI) -> list[Document]:
    """What an EAGLE-3 head is examined on: the target's answers. Raises as `overlap.greedy_texts`; tells of a target
    that gives none."""
    texts = overlap.greedy_texts(decoder, acceptance_prompts(tokenizer, TEXTS), ui)
    if not texts:
        ui.note("the head is not examined: no prompt leaves room for an answer, or none has two tokens")
    return texts


def fitting(prompts: Prompts, decoder: Decoder) -> Prompts:
    """The prompts that leave room for an answer of `TOKENS`. Raises CompressError where none does."""
    room = overlap.fitting(prompts, decoder, TOKENS)
    if not room:
        raise CompressError(
            f"the target has {decoder.max_length} positions; the shortest prompt that a head is checked with and its "
            f"answer take {min(map(len, prompts)) + TOKENS}"
        )
    return room


def measure(proposer: Proposer, decoder: Decoder, prompts: Prompts, ui: UI | None = None) -> dict[str, Any]:
    """Acceptance on greedy answers of `TOKENS` tokens. Raises as `fitting`."""
    room = fitting(prompts, decoder)
    with (ui or NullUI()).progress("head check", len(room)) as progress:
        return acceptance.measure(
            Runner(decoder, proposer, K),
            room,
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
    recorded_expected: float | None = None,
    least_first: float = LEAST_FIRST,
    texts: Sequence[Document] = (),
    ui: UI | None = None,
) -> Finding:
    """Load the proposer of `kind` in `folder` for the target and compare its tau with the one `recorded` for it;
    without one, the acceptance of its first token with `least_first`. An EAGLE-3 head is also examined on `texts`, and
    what is found compared with `recorded_expected`.

    Errors as `compressor.proposers.load.build` and `fitting`.
    """
    proposer = load.build(load.Choice(kind, folder), decoder, target)
    assert proposer is not None
    examined = examine(folder, decoder, texts) if texts and kind == "eagle3" else None
    measured = measure(proposer, decoder, prompts, ui)
    faults = [_drafting_fault(measured, recorded, least_first)]
    if examined is not None:
        faults += [_expected_fault(examined, recorded_expected), examined.fault]
    return Finding(measured, "; ".join(fault for fault in faults if fault is not None) or None, examined)


def examine(folder: Path, decoder: Decoder, texts: Sequence[Document]) -> Examined:
    """The overlap of the EAGLE-3 head in `folder` on `texts`. Errors as `Eagle3Proposer.load`; CompressError for one
    whose logits are NaN."""
    try:
        return overlap.examine(Eagle3Proposer.load(folder, decoder), decoder, texts)
    except CompressError as error:
        raise CompressError(f"{folder}: {error}") from None


def _drafting_fault(measured: dict[str, Any], recorded: float | None, least_first: float) -> str | None:
    if not measured["drafts"]:
        return "nothing was drafted: the target's answers end with their first token, so the head cannot be judged"
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


def _expected_fault(examined: Examined, recorded: float | None) -> str | None:
    if recorded is None or examined.own.rate >= LEAST_SHARE * recorded:
        return None
    return (
        f"at temperature 1 the target would accept {examined.own.rate:.3f} of its first tokens, {recorded:.3f} is "
        "recorded: other weights, a missing norm, or another target"
    )


def refuse_other_law(folder: Path, head: Eagle3Head, decoder: Decoder, texts: Sequence[Document]) -> None:
    """Raise CompressError where the head in `folder` does not draft as the module does that it was written from."""
    found = overlap.shared(head, Eagle3Proposer.load(folder, decoder), decoder, texts)
    if not found >= overlap.LEAST_SAME:
        raise CompressError(
            f"{folder}: its law shares {found:.3f} with that of the head that was trained, {overlap.LEAST_SAME} is the "
            "least that rounding explains; the export is wrong"
        )


def least_after(held_out: float) -> float:
    """The first token's acceptance to expect of a proposer that reached `held_out` in training."""
    return max(LEAST_AFTER_TRAINING, LEAST_OF_HELD_OUT * held_out)


def refuse(folder: Path, finding: Finding) -> None:
    """Raise CompressError for a head with a fault."""
    if finding.fault is not None:
        raise CompressError(f"{folder}: {finding.fault}")
