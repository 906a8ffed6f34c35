"""Calibration sets: fixed-length rows of token ids that the quantizer gathers its statistics on.

Kinds (recipe key ``calibration.kind``), one file each: ``self`` (selfgen.py: the target answers the prompts shipped
here), ``jsonl`` (local.py), ``hub`` (hub.py), ``tokens`` (tokens.py: rows prepared elsewhere). Each ends in
packing.py, and the set carries the digest of its ids, so that two runs can show that they saw the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from compressor.calibration import hub, local, prompts, selfgen, tokens
from compressor.calibration.packing import check_vocabulary, digest
from compressor.errors import UsageError
from compressor.ui import UI, NullUI

__all__ = ["CalibrationSet", "build", "check_vocabulary", "digest", "prompts"]


@dataclass(frozen=True)
class CalibrationSet:
    """Token ids [rows, length] int64, their sha256 (see `packing.digest`) and how they were made (JSON values only)."""

    ids: torch.Tensor
    digest: str
    description: dict[str, Any]


def build(
    spec: Any,
    tokenizer: Any,
    *,
    seed: int,
    load_model: Callable[[], Any],
    ui: UI | None = None,
    vocab_size: int | None = None,
) -> CalibrationSet:
    """Build the calibration set that a recipe's ``calibration`` section asks for.

    Args:
        spec: attributes kind, rows, length and, by kind: path (jsonl, tokens), dataset, subset, split, column (hub),
            temperature, top_p (self).
        tokenizer: the target's transformers tokenizer.
        seed: decides document order and sampling; the same seed gives the same digest on the same machine.
        load_model: gives the target as a transformers model; called for kind ``self`` only.
        ui: shows the tokens written by the target as they come (kind ``self``).
        vocab_size: rows of the target's embedding table; default the length of the tokenizer (kind ``self`` asks
            the model).

    Raises CompressError or UsageError, one line, when the source cannot be read, holds too few tokens, or holds a token
    id that the target lacks.
    """
    if spec.kind == "self":
        ids, details = selfgen.generate_rows(
            load_model(),
            tokenizer,
            prompts.calibration_prompts(),
            rows=spec.rows,
            length=spec.length,
            temperature=spec.temperature,
            top_p=spec.top_p,
            seed=seed,
            ui=ui or NullUI(),
            task="calibration rows",
        )
    else:
        if spec.kind == "jsonl":
            ids, details = local.load(spec.path, tokenizer, rows=spec.rows, length=spec.length, seed=seed)
        elif spec.kind == "hub":
            ids, details = hub.load(spec, tokenizer, seed=seed)
        elif spec.kind == "tokens":
            ids, details = tokens.load(spec.path, rows=spec.rows, length=spec.length)
        else:
            raise UsageError(f"calibration.kind: {spec.kind!r} is unknown; choose self, jsonl, hub or tokens")
        limit = vocab_size if vocab_size is not None else len(tokenizer)
        check_vocabulary(ids, limit, f"calibration.kind {spec.kind}")
    identity = digest(ids)
    description = {
        "kind": spec.kind,
        **details,
        "seed": seed,
        "rows": ids.shape[0],
        "length": ids.shape[1],
        "digest": identity,
    }
    return CalibrationSet(ids, identity, description)
