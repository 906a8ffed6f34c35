"""Documents of any length → rows of one length, without padding, in an order that a seed decides."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable
from typing import TypeVar

import torch

from compressor.errors import CompressError

T = TypeVar("T")


def shuffled(items: Iterable[T], seed: int) -> list[T]:
    """A new list with the items in the order of ``random.Random(seed).shuffle``."""
    order = list(items)
    random.Random(seed).shuffle(order)
    return order


def pack(
    documents: Iterable[list[int]],
    *,
    rows: int,
    length: int,
    separator: int | None,
    ends: Collection[int] = (),
    source: str,
) -> torch.Tensor:
    """Concatenate documents and cut the stream into int64 [rows, length]; the rest is dropped.

    `separator` (the end-of-sequence id; None when the tokenizer has none) follows every document that does not already
    end in it or in one of `ends`. The iterable is read only as far as needed. Raises CompressError, naming `source` and
    how many rows there would be, when the stream is too short.
    """
    needed = rows * length
    stream: list[int] = []
    count = 0
    for document in documents:
        if not document:
            continue
        count += 1
        stream += document
        if separator is not None and document[-1] != separator and document[-1] not in ends:
            stream.append(separator)
        if len(stream) >= needed:
            return torch.tensor(stream[:needed], dtype=torch.long).view(rows, length)
    raise CompressError(
        f"{source}: {count} documents with {len(stream)} tokens fill {len(stream) // length} of {rows} rows of "
        f"{length}; give more text, or set fewer rows or a smaller length"
    )


def digest(ids: torch.Tensor) -> str:
    """sha256 (hex) over the shape as text, such as ``[128, 512]``, then the ids as little-endian int64."""
    values = ids.to(device="cpu", dtype=torch.long).contiguous().numpy().astype("<i8", copy=False)
    return hashlib.sha256(str(list(ids.shape)).encode() + values.tobytes()).hexdigest()


def check_vocabulary(ids: torch.Tensor, vocab_size: int, source: str) -> None:
    """Refuse, by CompressError naming the first such id, ids that have no row in an embedding table of `vocab_size`."""
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.numel():
        raise CompressError(
            f"{source}: token id {int(wrong[0])} is outside the model's vocabulary of {vocab_size}: wrong tokenizer"
        )


def first_line(error: BaseException) -> str:
    """The first non-empty line of an exception's message, or its type's name: for one-line errors."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
