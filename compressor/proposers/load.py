"""A proposer by name: `ngram`, `suffix`, `mtp`, `draft:FOLDER`, `medusa:FOLDER`, `eagle3:FOLDER`, or `none`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import UsageError
from compressor.proposers.base import MAX_NODES, Proposer

if TYPE_CHECKING:  # recipes are checked with `misfit`, which needs no model class
    from compressor.decode.decoder import Decoder

HEAD_FOLDER = "proposer"
"""Where a bundle keeps its own head."""
WITH_FOLDER = ("draft", "medusa", "eagle3")
DRAWS = (*WITH_FOLDER, "mtp")
"""Proposers with logits of their own, which can draft trees."""
KINDS = ("none", "ngram", "suffix", *DRAWS)


@dataclass(frozen=True)
class Choice:
    """What `--proposer` asked for. `folder`: of the draft model or head."""

    kind: str
    folder: Path | None = None
    branching: tuple[int, ...] | None = None


def parse(text: str, target: Path, branching: Sequence[int] | None = None) -> Choice:
    """`KIND` or `KIND:FOLDER` for the target in folder `target`; draft, medusa and eagle3 alone mean the
    target's own, in its folder `proposer`.

    Raises UsageError for an unknown kind, a missing folder, or a `branching` that the kind does not draft or that is
    not a list of positive integers. Its size is for `check_size`.
    """
    from compressor.proposers.drafting import check_branching

    kind, separator, path = text.partition(":")
    if kind not in KINDS:
        raise UsageError(
            f"proposer '{text}' is unknown; one of none, ngram, suffix, mtp, draft:FOLDER, medusa:FOLDER, eagle3:FOLDER"
        )
    if branching is not None and kind not in DRAWS:
        raise UsageError(f"proposer {kind} drafts one chain; leave the branching out, or take {', '.join(DRAWS)}")
    folder = None
    if kind in WITH_FOLDER:
        folder = Path(path) if path else target / HEAD_FOLDER
        if not (folder / "config.json").is_file():
            raise UsageError(f"proposer {kind}: {folder} holds no config.json; name it as in {kind}:FOLDER")
    elif separator:
        raise UsageError(f"proposer {kind} takes no folder; leave out '{separator}{path}'")
    return Choice(kind, folder, check_branching(branching))


def misfit(k: int, branching: Sequence[int] | None = None) -> tuple[str, str] | None:
    """Why no draft can be `k` tokens deep, or of the shape `branching` within that depth: the key at fault
    (`num_speculative_tokens` or `branching`) and the reason with its remedy. None where it can."""
    levels = list(accumulate(branching or (), mul))  # nodes of each
    if sum(levels) > MAX_NODES:
        return "branching", f"its tree has more than the {MAX_NODES} nodes that a draft can have; lower it"
    if k > MAX_NODES:
        return "num_speculative_tokens", f"a draft can have {MAX_NODES} tokens; lower it"
    if len(levels) > k:  # those below would never be drafted
        more = f"its {len(levels)} levels are more than num_speculative_tokens (k), which is {k}"
        return "branching", f"{more}; raise that or shorten the list"
    return None


def check_size(k: int, branching: Sequence[int] | None = None) -> None:
    """Raises UsageError for a `misfit`."""
    found = misfit(k, branching)
    if found is not None:
        key, reason = found
        shown = k if branching is None or key != "branching" else ",".join(map(str, branching))
        raise UsageError(f"{key}: {shown}: {reason}")


def build(
    choice: Choice,
    decoder: Decoder,
    target: Path,
    window: Mapping[str, Any] | None = None,
    *,
    kernel: str = "auto",
) -> Proposer | None:
    """The proposer of `choice` for the loaded target in folder `target`.

    `window`: keyword arguments of `NgramProposer`, which no other kind looks at. `kernel`: of a draft model (see
    `engine.load`). Raises CompressError for a draft model or head that does not fit the target.
    """
    if choice.kind == "none":
        return None
    if choice.kind == "ngram":
        from compressor.proposers.ngram import NgramProposer

        return NgramProposer(**(window or {}))
    if choice.kind == "suffix":
        from compressor.proposers.suffix import SuffixProposer

        return SuffixProposer()
    if choice.kind == "draft":
        return _draft_model(choice, decoder, target, kernel)
    if choice.kind == "mtp":
        from compressor.proposers.mtp import MtpProposer

        return MtpProposer.load(target, decoder, branching=choice.branching)
    assert choice.folder is not None
    if choice.kind == "medusa":
        from compressor.proposers.medusa import MedusaProposer

        return MedusaProposer.load(choice.folder, decoder, branching=choice.branching)
    from compressor.proposers.eagle3 import Eagle3Proposer

    return Eagle3Proposer.load(choice.folder, decoder, branching=choice.branching)


def _draft_model(choice: Choice, decoder: Decoder, target: Path, kernel: str) -> Proposer:
    from compressor.checkpoint.tokenizer import load_tokenizer
    from compressor.decode import engine
    from compressor.proposers.compatibility import vocabulary
    from compressor.proposers.draft_model import DraftModelProposer

    assert choice.folder is not None
    draft = engine.decoder(choice.folder, dtype=decoder.dtype, kernel=kernel)
    shared = vocabulary(
        load_tokenizer(target),
        load_tokenizer(choice.folder),
        decoder.vocab_size,
        draft.vocab_size,
        names=(str(target), str(choice.folder)),
    )
    return DraftModelProposer(draft, shared, decoder.vocab_size, branching=choice.branching)
