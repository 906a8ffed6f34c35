"""Several processes of one training, as `accelerate launch` or torchrun starts them; one alone is the usual case.

What a process leaves on disk (prompts, answers, hidden states, the finished head) the first one makes, and the others
read. Only the optimizer's steps are shared.
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


def is_first() -> bool:
    """Whether this is the only process, or the one that makes what is on disk."""
    return _state().is_main_process


@contextmanager
def first_goes_ahead() -> Iterator[None]:
    """The first process runs the body, then all others."""
    with _state().main_process_first():
        yield
