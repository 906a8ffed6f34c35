"""Channel scales between a linear group and what precedes it: the exact fold that AWQ and SmoothQuant share.

W·diag(s) reads x/s. The division goes into the norm before the group, or into the output rows of the linear that
produces its input (AWQ, Lin et al., arXiv 2306.00978; SmoothQuant, Xiao et al., arXiv 2211.10438).
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from compressor.errors import CompressError
from compressor.models import Family, LinearGroup
from compressor.transform.base import Change, Transform

Scales = Mapping[tuple[int, LinearGroup], Tensor]
"""float [in], positive, by block index and group."""


def channels(family: Family, config, group: LinearGroup) -> Tensor | None:
    """int64 [in]: which output row of the producer each input of the group is, where query heads share a value head
    (query head h reads value head h // repeats); None where each is its own."""
    values, size, repeats = family.value_rows(config)
    if not group.value_heads or repeats == 1:
        return None
    return torch.arange(values * size).view(values, size).repeat_interleave(repeats, 0).flatten()


def storable(norm: Tensor, offset: float, scales: Tensor) -> Tensor:
    """The scales nearest to `scales` [in] that a norm's weight takes without rounding: its dtype keeps (offset +
    weight) / s − offset only to a few digits, and what is lost there must not be lost in the linears. 1 where the
    norm's factor is zero. float32."""
    factor = norm.double() + offset
    stored = (factor / scales.double() - offset).to(norm.dtype).double() + offset
    found = factor / stored
    return torch.where((found > 0) & found.isfinite(), found, 1.0).float()


def channel_scales(family: Family, config, scales: Scales) -> Transform:
    """Multiply the input columns of each group by its scales and divide what precedes it by them.

    Raises CompressError for scales that are not positive and finite, or that differ among query heads that share a
    value head, and for a group before which nothing can take them.
    """
    changes: dict[str, list[Change]] = {}

    def add(name: str, change: Change) -> None:
        changes.setdefault(name, []).append(change)

    for (index, group), s in scales.items():
        prefix = family.block(index)
        first = f"{prefix}{group.names[0]}"
        if not bool((s.isfinite() & (s > 0)).all()):
            raise CompressError(f"{first}: channel scales must be positive and finite")
        for name in group.names:
            add(f"{prefix}{name}.weight", partial(_multiply_columns, s))
        if group.norm is not None:
            add(f"{prefix}{group.norm}.weight", partial(_divide_norm, s, family.norm_offset))
        elif group.producer is not None:
            rows = _rows(s, channels(family, config, group), first)
            for leaf in ("weight", "bias"):
                add(f"{prefix}{group.producer}.{leaf}", partial(_divide_rows, rows))
        else:
            raise CompressError(f"{first}: nothing before it can take its channel scales")
    return Transform("channel scales", {name: _chain(each) for name, each in changes.items()})


def _rows(scales: Tensor, shared: Tensor | None, name: str) -> Tensor:
    """Scales of the inputs [in] → of the producer's rows."""
    if shared is None:
        return scales
    rows = scales.new_empty(int(shared.max()) + 1)
    rows[shared] = scales
    if not torch.equal(rows[shared], scales):
        raise CompressError(f"{name}: channel scales differ among query heads that share a value head")
    return rows


def _chain(changes: list[Change]) -> Change:
    def apply(tensor: Tensor) -> Tensor:
        for change in changes:
            tensor = change(tensor)
        return tensor

    return apply


def _multiply_columns(scales: Tensor, weight: Tensor) -> Tensor:
    return weight * scales.to(weight.dtype)


def _divide_norm(scales: Tensor, offset: float, weight: Tensor) -> Tensor:
    return (weight + offset) / scales.to(weight.dtype) - offset


def _divide_rows(scales: Tensor, tensor: Tensor) -> Tensor:
    """The last rows of a weight [out, in] or bias [out] divided by `scales`."""
    changed = tensor.clone()
    rows = changed[-len(scales) :]
    rows /= scales.to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))
    return changed


def trial(family: Family, config, seed: int) -> Transform:
    """Channel scales between ½ and 2 drawn from `seed` for every group of every block: proof, before calibration finds
    the real ones, that this model's scales can be folded where its family says."""
    generator = torch.Generator().manual_seed(seed)
    values, size, _ = family.value_rows(config)
    scales = {}
    for index in range(config.num_hidden_layers):
        for group in family.linear_groups(config, index):
            inside = values * size if group.value_heads else config.intermediate_size
            drawn = 4 ** (torch.rand(config.hidden_size if group.norm else inside, generator=generator) - 0.5)
            shared = channels(family, config, group)
            scales[index, group] = drawn if shared is None else drawn[shared]
    return channel_scales(family, config, scales)
