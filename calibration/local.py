"""Calibration text from a local JSON Lines file: one object a line with ``text`` or ``messages``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from compressor.calibration.documents import check_field, encode_field
from compressor.calibration.packing import pack, shuffled
from compressor.errors import CompressError, UsageError


def load(path: Any, tokenizer: Any, *, rows: int, length: int, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rows int64 [rows, length] from the file's documents in seeded order, and the source's description.

    ``messages`` (each {role, content}) is rendered with the tokenizer's chat template. Raises UsageError for a missing
    path, CompressError (file, line) for a line that is not such an object, an empty file, or too few tokens.
    """
    data = read_bytes(path, "calibration.path")
    documents = shuffled(parse(data, path), seed)
    tokens = (encode_field(value, tokenizer, f"{path} line {number}: {key}") for number, key, value in documents)
    ids = pack(tokens, rows=rows, length=length, separator=tokenizer.eos_token_id, source=str(path))
    source = {"name": Path(path).name, "sha256": hashlib.sha256(data).hexdigest()}
    return ids, {"sources": [source], "documents": len(documents)}


def read_bytes(path: Any, key: str) -> bytes:
    """The file's bytes; UsageError naming the recipe key when it is unset, missing or not readable."""
    if path is None:
        raise UsageError(f"{key}: not set; name the file to read")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{key}: cannot read {path}: {error.strerror}; name an existing file") from error


def parse(data: bytes, path: Any) -> list[tuple[int, str, Any]]:
    """(line number, field name, value) of every non-blank line of `data`, what `path` holds; errors as `load`."""
    documents: list[tuple[int, str, Any]] = []
    # Split on line feeds alone: str.splitlines would also split inside strings at U+2028.
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            value = json.loads(raw)
        except ValueError as error:  # bad JSON and bad UTF-8 alike
            raise CompressError(f"{path} line {number}: not JSON ({error}); write one object a line") from error
        key = next((k for k in ("text", "messages") if isinstance(value, dict) and k in value), None)
        if key is None:
            found = f"fields {sorted(value)}" if isinstance(value, dict) else f"a {type(value).__name__}"
            raise CompressError(f"{path} line {number}: needs a field 'text' or 'messages', has {found}")
        check_field(value[key], f"{path} line {number}: {key}")  # also of documents that the rows do not need
        documents.append((number, key, value[key]))
    if not documents:
        raise CompressError(f"{path}: the file is empty; write one JSON object with 'text' or 'messages' a line")
    return documents
