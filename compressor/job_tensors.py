"""Tensors that one stage of a job leaves for another."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from compressor.calibration import digest
from compressor.errors import CompressError
from compressor.job import CHANGED, Job

CALIBRATION, EVALUATION = "calibration.safetensors", "evaluation.safetensors"


def load_ids(path: Path, expected: str) -> torch.Tensor:
    """Token rows saved by an earlier stage. Raises CompressError if they are no longer what was recorded."""
    # a file that cannot be read gets the error below
    with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:
        ids = file.get_tensor("ids")
        if digest(ids) == expected:
            return ids
    raise CompressError(f"{path}: {CHANGED}")


def calibration_ids(job: Job) -> torch.Tensor:
    """The calibration rows, int64 [rows, length], once that stage has finished. Raises as `load_ids`."""
    return load_ids(job.path(CALIBRATION), job.result("calibration")["digest"])


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file. Raises CompressError for one that is missing or damaged."""
    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, OSError):
        raise CompressError(f"{path}: {CHANGED}") from None
