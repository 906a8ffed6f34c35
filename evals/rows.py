"""Rows of token ids on which the quantized target is compared with its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compressor.calibration import check_vocabulary, digest, selfgen
from compressor.calibration.documents import encode_text
from compressor.calibration.local import read_bytes
from compressor.calibration.prompts import evaluation_prompts
from compressor.errors import CompressError, UsageError
from compressor.ui import UI, NullUI


@dataclass(frozen=True)
class EvalRows:
    """Token ids [rows, length] int64, a name for tables, and the ids' sha256 (`calibration.digest`)."""

    ids: torch.Tensor
    name: str
    digest: str


def build(
    spec: Any,
    tokenizer: Any,
    *,
    seed: int,
    load_model: Callable[[], Any],
    ui: UI | None = None,
    vocab_size: int | None = None,
) -> EvalRows | None:
    """Rows for a recipe's ``measure.quality`` section (attributes kind, rows, length, path); None for kind ``none``.

    ``self``: the reference answers the evaluation prompts, sampled at temperature 1 (its own law: perplexity on it is
    the reference's entropy). ``text``: windows of a UTF-8 file, evenly spaced over its tokens, as evaluations of
    WikiText-2 commonly do. `ui` and `vocab_size` as in `calibration.build`. Raises UsageError or CompressError.
    """
    if spec.kind == "none":
        return None
    if spec.kind == "self":
        ids, _ = selfgen.generate_rows(
            load_model(),
            tokenizer,
            evaluation_prompts(),
            rows=spec.rows,
            length=spec.length,
            temperature=1.0,
            top_p=1.0,
            seed=seed,
            ui=ui or NullUI(),
            task="evaluation rows",
        )
        return EvalRows(ids, "self-generated", digest(ids))
    if spec.kind != "text":
        raise UsageError(f"measure.quality.kind: {spec.kind!r} is unknown; choose self, text or none")
    ids = text_windows(spec.path, tokenizer, rows=spec.rows, length=spec.length)
    check_vocabulary(ids, vocab_size if vocab_size is not None else len(tokenizer), str(spec.path))
    return EvalRows(ids, Path(spec.path).name, digest(ids))


def text_windows(path: Any, tokenizer: Any, *, rows: int, length: int) -> torch.Tensor:
    """int64 [rows, length]: windows starting at linspace(0, tokens - length - 1, rows), rounded down; they may overlap.

    The text is read with universal newlines and tokenized as one. Raises UsageError for an unreadable path,
    CompressError for text that is not UTF-8 or shorter than length + 1 tokens.
    """
    data = read_bytes(path, "measure.quality.path")
    try:
        text = data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise CompressError(f"{path}: not UTF-8 at byte {error.start}; convert it") from error
    stream = encode_text(text, tokenizer)
    if len(stream) <= length:
        raise CompressError(
            f"{path}: has {len(stream)} tokens, a row of {length} needs {length + 1}; set a smaller length"
        )
    starts = torch.linspace(0, len(stream) - length - 1, rows).long().tolist()
    return torch.tensor([stream[start : start + length] for start in starts])
