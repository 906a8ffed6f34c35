"""RMSNorm weights moved into the linears behind the norms, which are then pure normalisations.

An RMSNorm gives diag(g)·x/rms(x) with g = norm_offset + weight (Gemma stores g − 1), so that W·diag(g) behind a norm
with g = 1 is the same function (SliceGPT, Ashkboos et al., arXiv 2401.15024, section 3.1).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from compressor.models import Family
from compressor.transform.base import Change, Transform


def fold(family: Family, config, get: Callable[[str], Tensor]) -> Transform:
    """Fold every norm that feeds linears, and the final norm into the head. Norms of q and k heads and norms behind a
    linear stay. `get(name)` gives a tensor of the checkpoint as it is before this transform."""
    changes: dict[str, Change] = {}

    def move(norm: str, linears: list[str]) -> None:
        changes[norm] = lambda weight: torch.full_like(weight, 1 - family.norm_offset)

        def scale(weight: Tensor) -> Tensor:
            return weight * (get(norm).to(weight.dtype) + family.norm_offset)

        changes.update(dict.fromkeys(linears, scale))

    for index in range(config.num_hidden_layers):
        prefix = family.block(index)
        for group in family.linear_groups(config, index):
            if group.norm is not None:
                move(f"{prefix}{group.norm}.weight", [f"{prefix}{name}.weight" for name in group.names])
    move(f"{family.final_norm}.weight", [f"{family.head}.weight"])
    return Transform("norm folding", changes, unties=True)
