"""Calibration text from a dataset on the Hugging Face hub, streamed: only the rows that are used are fetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from compressor.calibration.documents import encode_field
from compressor.calibration.packing import first_line, pack
from compressor.errors import CompressError, UsageError

SHUFFLE_BUFFER = 1000  # rows read ahead to draw from; the stream's order is random within it only


def load(spec: Any, tokenizer: Any, *, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """Rows int64 [rows, length] from ``spec.dataset`` (subset, split), field ``spec.column``, and the description.

    The column holds strings, or lists of {role, content} that go through the chat template. Raises UsageError when no
    dataset is named, CompressError when it cannot be read (offline, unknown name or split), lacks the column, or ends
    too early.
    """
    if spec.dataset is None:
        raise UsageError("calibration.dataset: not set; name a dataset on the hub, such as user/name")
    name = f"calibration.dataset {spec.dataset}"
    counter = [0]
    documents = _documents(spec, tokenizer, name, seed, counter)
    ids = pack(documents, rows=spec.rows, length=spec.length, separator=tokenizer.eos_token_id, source=name)
    source = {"name": spec.dataset, "subset": spec.subset, "split": spec.split, "column": spec.column}
    return ids, {"sources": [source], "documents": counter[0]}


def _documents(spec: Any, tokenizer: Any, name: str, seed: int, counter: list[int]) -> Iterator[list[int]]:
    import datasets  # slow to import, and no other kind needs it
    from huggingface_hub.errors import HfHubHTTPError

    unreadable = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, HfHubHTTPError)
    try:
        stream = datasets.load_dataset(spec.dataset, spec.subset, split=spec.split, streaming=True)
        iterator = iter(stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER))
    except unreadable as error:
        raise _cannot_read(name, spec, error) from error
    while True:
        try:
            row = next(iterator, None)
        except unreadable as error:
            raise _cannot_read(name, spec, error) from error
        if row is None:
            return
        if spec.column not in row:
            raise CompressError(f"{name}: no column {spec.column!r}; set calibration.column to one of {sorted(row)}")
        counter[0] += 1
        yield encode_field(row[spec.column], tokenizer, f"{name} row {counter[0]}: {spec.column}")


def _cannot_read(name: str, spec: Any, error: BaseException) -> CompressError:
    part = f"subset {spec.subset}, split {spec.split}" if spec.subset else f"split {spec.split}"
    return CompressError(
        f"{name}: cannot read {part}: {first_line(error)}; check the name and the connection, "
        "or use calibration.kind self or jsonl"
    )
