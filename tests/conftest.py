"""Shared fixtures."""

import os
from pathlib import Path

import pytest
import tiny_models as tiny
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


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """A folder of this test's own for signing keys: nobody's real ones are read or made."""
    monkeypatch.setenv("COMPRESS_KEYS", str(tmp_path / "keys"))


@pytest.fixture
def rows(tmp_path):
    """File of calibration rows for a tiny model."""
    return tiny.save_rows(tmp_path)
