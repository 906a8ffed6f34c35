"""Calibration activations survive a killed run, in memory or spilled."""

import errno
import os

import pytest
import torch

from compressor.activations import Activations
from compressor.errors import CompressError

SHAPE = (5, 4, 8)


def flow(folder, budget):
    return Activations(folder, SHAPE, torch.bfloat16, budget)


def fill(activations, value):
    for first in range(0, 5, 2):
        rows = slice(first, min(first + 2, 5))
        activations.put(rows, torch.full((rows.stop - rows.start, 4, 8), value, dtype=torch.bfloat16))
    return activations.advance()


@pytest.fixture(params=[0, 1 << 20], ids=["spilled", "in memory"])
def budget(request):
    return request.param


def test_batches_return_what_was_put(tmp_path, budget):
    x = flow(tmp_path, budget)
    x.start()
    fill(x, 1.0)
    for rows, hidden in x.batches(2):
        x.put(rows, hidden * 3)
    x.advance()
    assert x.index == 1
    assert torch.equal(torch.cat([h for _, h in x.batches(2)]), torch.full(SHAPE, 3.0, dtype=torch.bfloat16))


def test_a_second_process_restores_the_last_complete_state(tmp_path, budget):
    x = flow(tmp_path, budget)
    x.start()
    fill(x, 1.0)
    checksum = fill(x, 2.0)
    x.put(slice(0, 2), torch.zeros(2, 4, 8, dtype=torch.bfloat16))  # killed in the middle of the next block
    again = flow(tmp_path, budget)
    again.restore(1, checksum)
    assert torch.equal(torch.cat([h for _, h in again.batches(3)]), torch.full(SHAPE, 2.0, dtype=torch.bfloat16))


def test_a_damaged_file_is_refused(tmp_path, budget):
    x = flow(tmp_path, budget)
    x.start()
    checksum = fill(x, 1.0)
    path = tmp_path / "hidden-00000.bin"
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with pytest.raises(CompressError, match=r"hidden-00000\.bin: damaged"):
        flow(tmp_path, budget).restore(0, checksum)
    path.write_bytes(data[:-1])
    with pytest.raises(CompressError, match=r"hidden-00000\.bin: missing or incomplete"):
        flow(tmp_path, budget).restore(0, checksum)


def test_both_modes_hold_the_same_bytes(tmp_path):
    checksums = []
    for name, budget in (("a", 0), ("b", 1 << 20)):
        (tmp_path / name).mkdir()
        x = flow(tmp_path / name, budget)
        x.start()
        checksums.append(fill(x, 1.5))
    assert checksums[0] == checksums[1]
    assert (tmp_path / "a/hidden-00000.bin").read_bytes() == (tmp_path / "b/hidden-00000.bin").read_bytes()


def test_a_full_disk_is_reported_before_anything_is_mapped(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        flow(tmp_path, 0).start()


def test_remove_leaves_nothing(tmp_path, budget):
    x = flow(tmp_path, budget)
    x.start()
    fill(x, 1.0)
    x.remove()
    assert list(tmp_path.iterdir()) == []
