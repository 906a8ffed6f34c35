"""What a transform is: for each tensor that it changes, how."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Transform:
    """An exact re-parametrisation of a checkpoint.

    name: as messages and passports call it. changes: by tensor name, float tensor → the tensor that takes its place, of
    the same shape and dtype. construction: which matrices it used, where it used any. unties: the head no longer
    equals the embedding afterwards.
    """

    name: str
    changes: dict[str, Change]
    construction: str | None = None
    unties: bool = False
