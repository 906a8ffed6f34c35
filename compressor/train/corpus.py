"""Documents of token ids, each a prompt and what the target answered, and their batches."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from compressor.checkpoint import writer
from compressor.errors import CompressError


@dataclass(frozen=True)
class Document:
    """`tokens`: prompt and answer; the answer begins at index `start`."""

    tokens: list[int]
    start: int


def save(path: Path, documents: Sequence[Document]) -> None:
    """One safetensors file: all tokens behind one another, where each document ends, where its answer begins."""
    tokens = torch.tensor([token for document in documents for token in document.tokens], dtype=torch.int32)
    ends = torch.tensor([len(document.tokens) for document in documents]).cumsum(0)
    starts = torch.tensor([document.start for document in documents])
    writer.save_atomic(path, {"tokens": tokens, "ends": ends, "starts": starts})


def load(path: Path) -> list[Document]:
    """What `save` wrote. Raises CompressError for a file that is not such a corpus."""
    try:
        with safe_open(path, "pt") as file:
            tokens, ends, starts = (file.get_tensor(name).tolist() for name in ("tokens", "ends", "starts"))
    except (OSError, SafetensorError) as error:
        raise CompressError(f"{path}: not a corpus of answers ({error}); remove it and start again") from None
    return [Document(tokens[begin:end], start) for begin, end, start in zip([0, *ends[:-1]], ends, starts, strict=True)]


def batches(lengths: Sequence[int], tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Every index once, in batches of at most `tokens` tokens when padded to their longest (or one document), texts of
    similar length together, in random order."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], rng.random()))
    found: list[list[int]] = []
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > tokens:
            found.append(batch)
            batch = []
        batch.append(index)
    if batch:
        found.append(batch)
    rng.shuffle(found)
    yield from found
