"""Writing safetensors: one file atomically, or shards streamed together from part files.

Bytes depend on the tensors alone: within a file tensors lie by descending element size, then by name, which keeps
every tensor aligned to its element, and metadata keys are sorted.
"""

import contextlib
import json
import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from compressor.checkpoint.header import DTYPE_NAMES, TORCH_DTYPES, read_header
from compressor.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from compressor.errors import CompressError, naming

_CHUNK_BYTES = 8 << 20
_SHARD_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class _Item(NamedTuple):
    """A tensor to be written: where its bytes come from is a tensor, or a span of a part file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    tensor: Tensor | None = None
    part: Path | None = None
    begin: int = 0

    def chunks(self) -> Iterator[memoryview | bytes]:
        if self.tensor is not None:
            flat = self.tensor.detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data
            return
        assert self.part is not None
        with self.part.open("rb") as file:
            file.seek(self.begin)
            left = self.nbytes
            while left:
                chunk = file.read(min(_CHUNK_BYTES, left))
                if not chunk:
                    raise CompressError(f"{self.part}: became shorter while it was being read")
                left -= len(chunk)
                yield chunk


def ensure_space(path: Path | str, needed_bytes: int) -> None:
    """Raise CompressError if the file system that holds (or will hold) `path` has fewer free bytes than needed."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed_bytes:
        raise CompressError(
            f"{path}: not enough space, {needed_bytes / 1e9:.3g} GB needed and {free / 1e9:.3g} GB free; free some or "
            "choose another place"
        )


def save_atomic(path: Path | str, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write one safetensors file: temporary file, fsync, rename. The same tensors give the same bytes.

    Tensors of any shape, on any device, in a dtype of `header.TORCH_DTYPES`; tensors sharing memory are written once
    each. OSError (full disk) propagates after the temporary file is removed; an existing file is then untouched.
    """
    path = Path(path)
    items = []
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise CompressError(f"{path}: tensor {name!r} has dtype {tensor.dtype}, which safetensors cannot hold")
        nbytes = tensor.numel() * tensor.element_size()
        items.append(_Item(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), nbytes, tensor=tensor))
    temporary = path.with_name(path.name + ".tmp")
    with _removed_on_error([temporary]):
        _write(temporary, items, metadata or {})
        os.replace(temporary, path)
    _fsync_folder(path.parent)


def assemble(
    parts: Iterable[Path], out: Path | str, *, max_shard_bytes: int, metadata: dict[str, str] | None = None
) -> dict[str, str]:
    """Stream the tensors of safetensors part files into the shards of a checkpoint, plus its index.

    Shards are filled greedily in the order of `parts`, by name within a part, up to `max_shard_bytes` of tensor data
    (a larger tensor has a shard of its own): `model-0000i-of-0000N.safetensors`, or `model.safetensors` when one is
    enough; `model.safetensors.index.json` is always written, last. Memory use is one 8 MiB chunk. `metadata` goes into
    every shard, {"format": "pt"} unless given.

    Returns the weight map, tensor name to shard name.

    Raises CompressError for a tensor in two parts, a damaged part, no tensors at all, too little space, or weight files
    of another run in `out`. OSError propagates; either way no temporary file is left.
    """
    out = Path(out)
    shards = _plan_shards(list(parts), max_shard_bytes)
    total = len(shards)
    names = [SINGLE_NAME] if total == 1 else [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)]
    for stale in sorted(out.glob("model*.safetensors")):
        if _SHARD_NAME.fullmatch(stale.name) and stale.name not in names:
            raise CompressError(f"{stale}: belongs to another set of shards; write into an empty folder")
    total_bytes = sum(item.nbytes for shard in shards for item in shard)
    ensure_space(out, total_bytes)
    out.mkdir(parents=True, exist_ok=True)

    temporary = [out / f"{name}.tmp" for name in names]
    index_temporary = out / f"{INDEX_NAME}.tmp"
    weight_map = dict(sorted((item.name, name) for name, shard in zip(names, shards, strict=True) for item in shard))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    with _removed_on_error([*temporary, index_temporary]):
        for path, shard in zip(temporary, shards, strict=True):
            _write(path, shard, {"format": "pt"} if metadata is None else metadata)
            _check_opens(path, shard)
        with naming(index_temporary), index_temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(index, indent=2, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for path, name in zip([*temporary, index_temporary], [*names, INDEX_NAME], strict=True):
            os.replace(path, out / name)
    _fsync_folder(out)
    return weight_map


def _plan_shards(parts: list[Path], max_shard_bytes: int) -> list[list[_Item]]:
    origin: dict[str, Path] = {}
    shards: list[list[_Item]] = []
    filled = 0
    for part in parts:
        entries, _ = read_header(part)
        for name in sorted(entries):
            if name in origin:
                raise CompressError(f"{part}: tensor {name!r} is in {origin[name].name} as well")
            origin[name] = part
            entry = entries[name]
            if not shards or filled + entry.nbytes > max_shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(_Item(name, entry.dtype, entry.shape, entry.nbytes, part=part, begin=entry.begin))
            filled += entry.nbytes
    if not shards:
        raise CompressError("no tensors to assemble: the part files are empty")
    return shards


def _write(path: Path, items: Iterable[_Item], metadata: dict[str, str]) -> None:
    """Write and fsync a whole safetensors file under its temporary name."""
    ordered = sorted(items, key=lambda item: (-TORCH_DTYPES[item.dtype].itemsize, item.name))
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for item in ordered:
        span = [position, position + item.nbytes]
        header[item.name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": span}
        position += item.nbytes
    blob = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    blob += b" " * (-len(blob) % 8)  # the data starts on a multiple of 8, so aligned offsets are aligned in the file
    with naming(path), path.open("wb") as file:
        file.write(struct.pack("<Q", len(blob)))
        file.write(blob)
        for item in ordered:
            for chunk in item.chunks():
                file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _check_opens(path: Path, shard: list[_Item]) -> None:
    with safe_open(str(path), framework="pt", device="cpu") as file:
        if set(file.keys()) != {item.name for item in shard}:
            raise CompressError(f"{path}: the written shard does not read back; the disk may be faulty")


@contextlib.contextmanager
def _removed_on_error(paths: list[Path]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def _fsync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
