"""Several processes of one training, as torchrun or `accelerate launch` starts them; one alone is the usual case.

What a process leaves on disk (prompts, answers, hidden states, the finished head) the first one makes, and the others
read. Every process adds its batches to every step of the optimizer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import PartialState

PATIENCE = timedelta(days=7)
"""How long processes wait for the first one, which may write answers for hours."""


def _state() -> PartialState:
    return PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)


def count() -> int:
    return _state().num_processes


def is_first() -> bool:
    """Whether this is the only process, or the one that makes what is on disk."""
    return _state().is_main_process


@contextmanager
def first_goes_ahead() -> Iterator[None]:
    """The first process runs the body, then all others. Where it fails there, they end without a word: it has said
    why."""
    if count() == 1:
        yield
        return
    if not is_first():
        if not _went_well(True):
            raise SystemExit(1)
        yield
        return
    well = False
    try:
        yield
        well = True
    finally:
        _went_well(well)


def _went_well(well: bool) -> bool:
    """What the first process says."""
    said = torch.tensor(int(well), device=_state().device)
    torch.distributed.broadcast(said, 0)
    return bool(said)
