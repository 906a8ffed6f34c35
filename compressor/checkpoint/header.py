"""The safetensors container: dtype names and the header, checked against the length of the file.

Layout (https://huggingface.co/docs/safetensors, "Format"): 8 bytes, little-endian u64, the length N of the header;
N bytes of JSON `{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}`; then the data,
with offsets relative to its first byte, without holes and without overlaps.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compressor.errors import CompressError

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

# The limit of the reference implementation; a longer "length" is the first bytes of some other file.
_MAX_HEADER_BYTES = 100_000_000


class Entry(NamedTuple):
    """One tensor of a safetensors file. `begin` and `end` are byte offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def read_header(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read and check the header of one safetensors file; no tensor data is read.

    Returns `(entries by tensor name, metadata)`. Every entry's dtype is a key of `TORCH_DTYPES`, its span matches its
    shape, and the spans cover the file exactly.

    Raises CompressError naming the file (and the tensor where there is one) for a missing, truncated, padded or
    garbled file.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            raw = _header_bytes(path, file.read(8), size)
            blob = file.read(raw)
    except FileNotFoundError:
        raise CompressError(f"{path}: no such file") from None
    data_start = 8 + raw
    table, metadata = _parse(path, blob)
    entries = {name: _entry(path, name, item, data_start) for name, item in table.items()}
    _check_coverage(path, entries, data_start, size)
    return entries, metadata


def _header_bytes(path: Path, prefix: bytes, size: int) -> int:
    if prefix == b"version ":
        raise CompressError(f"{path}: this is a git-lfs pointer, not the weights; fetch them with `git lfs pull`")
    if len(prefix) < 8:
        raise CompressError(f"{path}: truncated, {size} bytes is too short for safetensors; fetch the file again")
    (length,) = struct.unpack("<Q", prefix)
    if length > _MAX_HEADER_BYTES:
        raise CompressError(f"{path}: not a safetensors file (it states a header of {length} bytes)")
    if 8 + length > size:
        raise CompressError(
            f"{path}: truncated, its header needs {8 + length} bytes and the file has {size}; fetch the file again"
        )
    return length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate key")
    return table


def _parse(path: Path, blob: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        table = json.loads(blob.decode("utf-8"), object_pairs_hook=_unique)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CompressError(f"{path}: corrupted safetensors header ({error}); fetch the file again") from None
    if not isinstance(table, dict):
        raise CompressError(f"{path}: corrupted safetensors header (not a JSON object); fetch the file again")
    metadata = table.pop("__metadata__", None) or {}
    return table, metadata


def _entry(path: Path, name: str, item: Any, data_start: int) -> Entry:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        elements = math.prod(shape)
        integers = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        integers = False
    if not integers:
        raise CompressError(f"{path}: corrupted safetensors header (entry of tensor {name!r}); fetch the file again")
    if dtype not in TORCH_DTYPES:
        raise CompressError(f"{path}: tensor {name!r} has dtype {dtype!r}, which is not supported")
    if end - begin != elements * TORCH_DTYPES[dtype].itemsize:
        raise CompressError(
            f"{path}: tensor {name!r} of shape {list(shape)} and dtype {dtype} spans {end - begin} bytes; the header "
            "is corrupted, fetch the file again"
        )
    return Entry(dtype, shape, data_start + begin, data_start + end)


def _check_coverage(path: Path, entries: dict[str, Entry], data_start: int, size: int) -> None:
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if entry.begin != position:
            raise CompressError(f"{path}: tensor {name!r} leaves a hole or overlaps another; the file is corrupted")
        position = entry.end
    if position > size:
        raise CompressError(
            f"{path}: truncated, its tensors need {position} bytes and the file has {size}; fetch the file again"
        )
    if position < size:
        raise CompressError(f"{path}: {size - position} bytes follow the last tensor; the file is corrupted")
