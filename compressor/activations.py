"""Hidden states between two blocks: in memory up to a budget, beyond it in mapped files; always resumable."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from compressor.errors import CompressError, naming

_CHUNK = 1 << 24  # bytes hashed or copied at a time


class Activations:
    """The calibration set's hidden states [rows, length, hidden] on their way through the model.

    ``NAME-00007.bin`` in the work folder holds what enters block 7. With `spill` the tensors live in those files
    (mapped), otherwise in memory with the file as a checkpoint. Either way a killed run finds its last block's input.

    Args:
        folder: the work folder.
        shape: [rows, length, hidden].
        dtype: dtype of the hidden states, normally bfloat16.
        budget: bytes that may stay in memory.
        name: tells two streams in one folder apart.
    """

    def __init__(
        self, folder: Path, shape: tuple[int, int, int], dtype: torch.dtype, budget: int, name: str = "hidden"
    ):
        self.folder, self.shape, self.dtype, self.name = Path(folder), shape, dtype, name
        self.count = shape[0] * shape[1] * shape[2]
        self.nbytes = self.count * dtype.itemsize
        self.spill = self.nbytes > budget
        self.index = 0
        self.current: torch.Tensor | None = None
        self.following: torch.Tensor | None = None

    def _file(self, index: int) -> Path:
        return self.folder / f"{self.name}-{index:05d}.bin"

    def _mapped(self, path: Path) -> torch.Tensor:
        return torch.from_file(str(path), shared=True, size=self.count, dtype=self.dtype).view(self.shape)

    def _create(self, path: Path) -> torch.Tensor:
        with naming(path), open(path, "wb") as file:
            # Reserve the blocks now: writing to a mapped sparse file on a full disk kills the process.
            os.posix_fallocate(file.fileno(), 0, self.nbytes)
        return self._mapped(path)

    def start(self) -> None:
        """Make room for the hidden states that enter block 0, to be written with `put`, then `advance`."""
        self.index = -1
        self._prepare()

    def _prepare(self) -> None:
        if self.spill:
            self.following = self._create(self._file(self.index + 1))
        elif self.following is None:
            # in memory a batch's output may overwrite its input: the file keeps the last complete state
            self.following = self.current if self.current is not None else torch.empty(self.shape, dtype=self.dtype)

    def batches(self, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """(row slice, hidden states [≤ size, length, hidden]) in order."""
        assert self.current is not None
        for first in range(0, self.shape[0], size):
            rows = slice(first, min(first + size, self.shape[0]))
            yield rows, self.current[rows]

    def put(self, rows: slice, hidden: torch.Tensor) -> None:
        """Write a batch of what enters the next block."""
        if self.following is None:
            self._prepare()
        assert self.following is not None
        self.following[rows] = hidden

    def advance(self) -> int:
        """The batches put are complete: they become current. Returns the checksum that `restore` asks for."""
        assert self.following is not None
        self.index += 1
        self.current, self.following = self.following, None
        if not self.spill:
            path = self._file(self.index)
            temporary = path.with_suffix(".tmp")
            try:
                with naming(temporary), open(temporary, "wb") as file:
                    file.write(self.current.view(torch.uint8).numpy().data.cast("B"))
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            os.replace(temporary, path)
        return self._checksum()

    def discard_previous(self) -> None:
        """Remove the file of the block before the current one, once the manifest no longer needs it."""
        self._file(self.index - 1).unlink(missing_ok=True)

    def restore(self, index: int, checksum: int) -> None:
        """Take up what enters block `index`. Raises CompressError if the file is missing or damaged."""
        path = self._file(index)
        if not path.exists() or path.stat().st_size != self.nbytes:
            raise CompressError(f"{path}: missing or incomplete; remove the work folder and start again")
        mapped = self._mapped(path)
        self.index, self.following = index, None
        self.current = mapped if self.spill else mapped.clone()
        if self._checksum() != checksum:
            raise CompressError(f"{path}: damaged since it was written; remove the work folder and start again")

    def _checksum(self) -> int:
        assert self.current is not None
        data = self.current.view(torch.uint8).view(-1).numpy().data
        value = 0
        for first in range(0, self.nbytes, _CHUNK):
            value = zlib.crc32(data[first : first + _CHUNK], value)
        return value

    def remove(self) -> None:
        """Delete the files."""
        self.current = self.following = None
        for path in self.folder.glob(f"{self.name}-*"):
            path.unlink()
