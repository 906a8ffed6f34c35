"""A proposer by name: `ngram`, `suffix`, `mtp`, `draft:FOLDER`, `medusa:FOLDER`, `eagle3:FOLDER`, or `none`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.decode.decoder import Decoder
from compressor.errors import UsageError
from compressor.proposers.base import Proposer

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
    """`KIND` or `KIND:FOLDER` for the target in folder `target`; medusa and eagle3 alone mean the target's own head in
    its folder `proposer`.

    Raises UsageError for an unknown kind, a missing folder, or a `branching` that the kind does not draft.
    """
    kind, separator, path = text.partition(":")
    if kind not in KINDS:
        raise UsageError(
            f"proposer '{text}' is unknown; one of none, ngram, suffix, mtp, draft:FOLDER, medusa:FOLDER, eagle3:FOLDER"
        )
    if branching is not None and kind not in DRAWS:
        raise UsageError(f"proposer {kind} drafts one chain, no tree; leave the branching out")
    folder = None
    if kind in WITH_FOLDER:
        folder = Path(path) if path else target / HEAD_FOLDER
        if not path and kind == "draft":
            raise UsageError("proposer draft: name the draft model's folder, as in draft:FOLDER")
        if not (folder / "config.json").is_file():
            raise UsageError(f"proposer {kind}: {folder} holds no config.json; name it as in {kind}:FOLDER")
    elif separator:
        raise UsageError(f"proposer {kind} takes no folder; leave out '{separator}{path}'")
    return Choice(kind, folder, None if branching is None else tuple(branching))


def build(choice: Choice, decoder: Decoder, target: Path, settings: Mapping[str, Any] | None = None) -> Proposer | None:
    """The proposer of `choice` for the loaded target in folder `target`.

    `settings`: keyword arguments of the n-gram and suffix proposers. Raises CompressError for a draft model or head
    that does not fit the target.
    """
    from compressor.proposers.ngram import NgramProposer
    from compressor.proposers.suffix import SuffixProposer

    if choice.kind == "none":
        return None
    if choice.kind in ("ngram", "suffix"):
        return {"ngram": NgramProposer, "suffix": SuffixProposer}[choice.kind](**(settings or {}))
    if choice.kind == "draft":
        return _draft_model(choice, decoder, target)
    if choice.kind == "mtp":
        from compressor.proposers.mtp import MtpProposer

        return MtpProposer.load(target, decoder, branching=choice.branching)
    assert choice.folder is not None
    if choice.kind == "medusa":
        from compressor.proposers.medusa import MedusaProposer

        return MedusaProposer.load(choice.folder, decoder, branching=choice.branching)
    from compressor.proposers.eagle3 import Eagle3Proposer

    return Eagle3Proposer.load(choice.folder, decoder, branching=choice.branching)


def _draft_model(choice: Choice, decoder: Decoder, target: Path) -> Proposer:
    from compressor.checkpoint.tokenizer import load_tokenizer
    from compressor.decode import engine
    from compressor.proposers.compatibility import vocabulary
    from compressor.proposers.draft_model import DraftModelProposer

    assert choice.folder is not None
    draft = engine.decoder(choice.folder, dtype=decoder.dtype)
    shared = vocabulary(
        load_tokenizer(target),
        load_tokenizer(choice.folder),
        decoder.vocab_size,
        draft.vocab_size,
        names=(str(target), str(choice.folder)),
    )
    return DraftModelProposer(draft, shared, decoder.vocab_size, branching=choice.branching)
