"""Lazy reading of a safetensors checkpoint folder: one file, or shards with an index."""

from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressor.checkpoint.config import read_json_object
from compressor.checkpoint.header import TORCH_DTYPES, Entry, read_header
from compressor.errors import CompressError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_FINITE_CHUNK = 1 << 24


class ShardReader:
    """The tensors of a checkpoint folder by name; headers are checked at once, data is read when asked for.

    Tensors come from memory-mapped files, so `get` costs pages of the page cache and not resident memory of its own;
    clone what is to outlive the reader or be written to.

    Raises CompressError, naming the file and the tensor, when a shard is missing, truncated or corrupted, when the
    index and the shards disagree in either direction, or when a tensor is in two shards.
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self._entries: dict[str, Entry] = {}
        self._files: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        index = self.folder / INDEX_NAME
        if index.is_file():
            weight_map = _read_index(index)
            self._add_shards(sorted(set(weight_map.values())))
            self._match_index(index, weight_map)
        else:
            self._add_shards([_single_file(self.folder)])

    def _add_shards(self, names: list[str]) -> None:
        for file in names:
            if not (self.folder / file).is_file():
                raise CompressError(f"{self.folder / file}: {INDEX_NAME} lists this shard, but there is no such file")
            entries, _ = read_header(self.folder / file)
            for name, entry in entries.items():
                if name in self._entries:
                    raise CompressError(
                        f"{self.folder}: tensor {name!r} is in two shards, {self._files[name]} and {file}"
                    )
                self._entries[name], self._files[name] = entry, file

    def _match_index(self, index: Path, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            found = self._files.get(name)
            if found is None:
                raise CompressError(f"{index}: tensor {name!r} should be in {file}, but that shard does not have it")
            if found != file:
                raise CompressError(f"{index}: tensor {name!r} should be in {file}, but it is in {found}")
        # An unlisted tensor is one that loaders drop without a word, as has happened to MTP modules.
        for name, file in self._files.items():
            if name not in weight_map:
                raise CompressError(f"{index}: shard {file} holds tensor {name!r}, which the index does not list")

    def keys(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._entries)

    def files(self) -> list[str]:
        """Names of the weight files that are read, sorted."""
        return sorted(set(self._files.values()))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU, in its stored dtype and shape, backed by the memory-mapped file."""
        file = self.file_of(name)
        try:
            if file not in self._open:
                self._open[file] = safe_open(str(self.folder / file), framework="pt", device="cpu").__enter__()
            return self._open[file].get_tensor(name)
        except SafetensorError as error:
            raise CompressError(f"{self.folder / file}: cannot read tensor {name!r}: {error}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPES[self._entry(name).dtype]

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes in its file."""
        return self._entry(name).nbytes

    def file_of(self, name: str) -> str:
        """Name of the file, inside the folder, that holds the tensor."""
        self._entry(name)
        return self._files[name]

    def _entry(self, name: str) -> Entry:
        if name not in self._entries:
            raise CompressError(f"{self.folder}: there is no tensor {name!r} in this checkpoint")
        return self._entries[name]

    def close(self) -> None:
        """Drop the memory maps; tensors already handed out keep theirs alive."""
        for file in self._open.values():
            file.__exit__(None, None, None)
        self._open.clear()

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_index(index: Path) -> dict[str, str]:
    """`weight_map` of an index file: tensor name to the name of a file beside it."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CompressError(f"{index}: no `weight_map` of tensor names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CompressError(f"{index}: tensor {name!r} is mapped to {file!r}, not to a safetensors file beside it")
    single = index.parent / SINGLE_NAME
    if single.is_file() and SINGLE_NAME not in weight_map.values():
        # transformers would read the single file and engines the shards: two models in one folder.
        raise CompressError(f"{index}: does not list {SINGLE_NAME}, which is there too; remove the one that is stale")
    return weight_map


def _single_file(folder: Path) -> str:
    if (folder / SINGLE_NAME).is_file():
        return SINGLE_NAME
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise CompressError(f"{folder}: no safetensors files")
    if len(names) > 1:
        raise CompressError(f"{folder}: {len(names)} safetensors files but no {INDEX_NAME} that says what is in each")
    return names[0]


def check_finite(name: str, tensor: Tensor, file: Path | str) -> None:
    """Raise CompressError naming file and tensor if a floating-point tensor of any shape holds NaN or infinity."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    for chunk in tensor.reshape(-1).split(_FINITE_CHUNK):
        # aminmax passes NaN on and allocates nothing; it has no 8-bit float kernels.
        low, high = torch.aminmax(chunk.float() if chunk.element_size() == 1 else chunk)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            break
    else:
        return
    values = tensor.float()
    bad = ~torch.isfinite(values)
    raise CompressError(
        f"{file}: tensor {name!r} holds {int(values.isnan().sum())} NaN and {int(values.isinf().sum())} infinite "
        f"values (first at {bad.nonzero()[0].tolist()}); the checkpoint is damaged"
    )
