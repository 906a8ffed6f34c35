"""Shared fixtures."""

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # tiny tensors: a second thread costs more in barriers than it computes
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real evaluation data and reference vectors, laid beside the checkout; tests that need it skip without."""
    root = Path(os.environ.get("COMPRESS_SHARED", Path(__file__).resolve().parents[2] / "shared")) / "data"
    if not root.is_dir():
        pytest.skip(f"reference data not found at {root}; set COMPRESS_SHARED")
    return root
