"""The target's hidden states on documents, kept in shards on disk or read anew."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from compressor import formats
from compressor.checkpoint import writer
from compressor.decode.decoder import FINAL, Decoder
from compressor.decode.reading import batches_of, pieces
from compressor.errors import CompressError
from compressor.ui import UI

DTYPE = torch.bfloat16
FP8 = formats.get("fp8")
SHARD_TOKENS = 65536
READ_TOKENS = 4096
"""Tokens that the target reads in one pass."""


def token_bytes(hidden: int, count: int, *, fp8: bool) -> int:
    """Of a token's `count` states on disk."""
    low = (count - 1) * (hidden + DTYPE.itemsize) if fp8 else (count - 1) * hidden * DTYPE.itemsize
    return low + hidden * DTYPE.itemsize


def read(decoder: Decoder, texts: Sequence[Sequence[int]], aux: Sequence[int]) -> list[Tensor]:
    """The states [n, (len(aux) + 1) · hidden] of each text: those of `aux` side by side, then the one after the final
    norm. Texts are read together without padding."""
    caches = [decoder.cache(len(text)) for text in texts]
    found: list[list[Tensor]] = [[] for _ in texts]
    for i, out in pieces(decoder, texts, caches, (*aux, FINAL)):
        assert out.features is not None
        found[i].append(out.features)
    return [torch.cat(parts) for parts in found]


class StateCache:
    """States on disk: shards of whole documents, made once, resumable shard by shard, and mapped when they are read.

    Args:
        folder: of the shards; made if missing.
        lengths: tokens of each document.
        hidden, count: elements of a state, and states of a token.
        fp8: keep all but the last state, of which the target's distribution is made, as E4M3 numbers with a scale a
            state. Otherwise everything is bfloat16.

    `nbytes` is what it takes. Raises CompressError, before anything is written, where the disk has no room for it, and
    for shards that do not hold the states of these documents.
    """

    def __init__(self, folder: Path, lengths: Sequence[int], hidden: int, count: int, *, fp8: bool = False) -> None:
        self.folder, self.lengths, self.hidden, self.fp8 = Path(folder), list(lengths), hidden, fp8
        self.width = hidden * count
        self.nbytes = sum(self.lengths) * token_bytes(hidden, count, fp8=fp8)
        self._place: list[tuple[int, int]] = []  # shard, first row in it
        self.shards: list[list[int]] = [[]]
        rows = 0
        for index, length in enumerate(self.lengths):
            if rows and rows + length > SHARD_TOKENS:
                self.shards.append([])
                rows = 0
            self._place.append((len(self.shards) - 1, rows))
            self.shards[-1].append(index)
            rows += length
        self._open: dict[int, dict[str, Tensor]] = {}

    def fill(self, read: Callable[[list[int]], list[Tensor]], ui: UI) -> None:
        """Make what is missing; `read` gives the states of documents by index."""
        self.folder.mkdir(parents=True, exist_ok=True)
        missing = [shard for shard in range(len(self.shards)) if not self._file(shard).exists()]
        if not missing:
            return
        tokens = sum(self.lengths[index] for shard in missing for index in self.shards[shard])
        writer.ensure_space(self.folder, tokens * self.nbytes // sum(self.lengths))
        with ui.progress("hidden states", tokens) as bar:
            for shard in missing:
                found: list[dict[str, Tensor]] = []
                for batch in batches_of([self.lengths[index] for index in self.shards[shard]], READ_TOKENS):
                    states = torch.cat(read([self.shards[shard][i] for i in batch])).to(DTYPE)
                    found.append(self._encode(states))
                    bar.advance(sum(self.lengths[self.shards[shard][i]] for i in batch))
                writer.save_atomic(
                    self._file(shard), {name: torch.cat([part[name] for part in found]) for name in found[0]}
                )

    def __call__(self, indices: Sequence[int]) -> list[Tensor]:
        """The states [n, width] of documents."""
        found = []
        for index in indices:
            shard, first = self._place[index]
            if shard not in self._open:
                self._open[shard] = self._load(shard)
            rows = slice(first, first + self.lengths[index])
            found.append(self._decode({name: kept[rows] for name, kept in self._open[shard].items()}))
        return found

    def _encode(self, states: Tensor) -> dict[str, Tensor]:
        """States [n, width] → the shard's tensors, a row a token."""
        if not self.fp8:
            return {"states": states}
        if not bool(states.isfinite().all()):
            raise CompressError("hidden states: NaN or Inf among the target's; fp8 cannot keep them, nor a head learn")
        low = FP8.encode(states[:, : -self.hidden].reshape(-1, self.hidden))
        last = states[:, -self.hidden :].contiguous()
        return {"states": last, **{name: kept.view(len(states), -1) for name, kept in low.items()}}

    def _decode(self, kept: dict[str, Tensor]) -> Tensor:
        """Inverse of `_encode`, for some of its rows."""
        if not self.fp8:
            return kept["states"]
        low = {"weight": kept["weight"].view(-1, self.hidden), "weight_scale": kept["weight_scale"].view(-1, 1)}
        return torch.cat([FP8.decode(low).to(DTYPE).view(len(kept["states"]), -1), kept["states"]], -1)

    def _load(self, shard: int) -> dict[str, Tensor]:
        rows = sum(self.lengths[index] for index in self.shards[shard])
        wanted = {name: kept.shape[1] for name, kept in self._encode(torch.zeros(1, self.width, dtype=DTYPE)).items()}
        with suppress(OSError, SafetensorError):  # a file that cannot be read gets the error below
            kept = load_file(self._file(shard))
            if {name: tuple(found.shape) for name, found in kept.items()} == {
                name: (rows, columns) for name, columns in wanted.items()
            }:
                return kept
        raise CompressError(f"{self._file(shard)}: not the states of these documents; remove {self.folder}")

    def _file(self, shard: int) -> Path:
        return self.folder / f"states-{shard:05}.safetensors"
