"""Rows of token ids prepared elsewhere, so that several tools can be compared on the same tokens."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from compressor.calibration.local import read_bytes
from compressor.calibration.packing import first_line
from compressor.errors import CompressError, UsageError

KEY = "ids"  # name of the tensor in a safetensors file


def load(path: Any, *, rows: int, length: int) -> tuple[torch.Tensor, dict[str, Any]]:
    """The first `rows` rows, int64 [rows, length], of a saved integer tensor, and the file's description.

    ``.safetensors`` holds it under "ids"; ``.pt`` holds the tensor alone and is read with weights_only, so no pickled
    code runs. Raises UsageError for a path that is missing or of another kind; CompressError, naming the file, for
    anything but integers [≥ rows, length].
    """
    if path is not None and Path(path).suffix not in (".safetensors", ".pt"):
        raise UsageError(f"calibration.path: {path} is neither .safetensors nor .pt; save a LongTensor [rows, length]")
    data = read_bytes(path, "calibration.path")
    tensor = _from_safetensors(data, path) if Path(path).suffix == ".safetensors" else _from_pt(data, path)
    if tensor.ndim != 2 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise CompressError(f"{path}: is {tensor.dtype} {list(tensor.shape)}; token ids are integers [rows, length]")
    if tensor.shape[1] != length or tensor.shape[0] < rows:
        raise CompressError(
            f"{path}: has {tensor.shape[0]} rows of {tensor.shape[1]}, the recipe asks for {rows} of {length}; "
            "set calibration.rows and calibration.length to fit"
        )
    source = {"name": Path(path).name, "sha256": hashlib.sha256(data).hexdigest()}
    return tensor[:rows].to(torch.long).contiguous(), {"sources": [source]}


def _from_safetensors(data: bytes, path: Any) -> torch.Tensor:
    try:
        tensors = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise CompressError(f"{path}: not a readable safetensors file ({first_line(error)})") from error
    if KEY not in tensors:
        raise CompressError(f"{path}: no tensor {KEY!r}, has {sorted(tensors)}; save the ids under that name")
    return tensors[KEY]


def _from_pt(data: bytes, path: Any) -> torch.Tensor:
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CompressError(f"{path}: torch.load(weights_only=True) cannot read it; save the tensor alone") from error
    if not isinstance(value, torch.Tensor):
        raise CompressError(f"{path}: holds a {type(value).__name__}; save the LongTensor [rows, length] alone")
    return value
