"""Rotations fused into the weights: R1 of the residual stream and R2 of the value heads.

QuaRot (Ashkboos et al., arXiv 2404.00456, section 4) and SpinQuant (Liu et al., arXiv 2405.16406, section 3.1). Hidden
states are rows: the stream x becomes x·Q, so that a linear that reads it becomes W·Q and one that writes it Qᵀ·W
(and its bias Qᵀ·b). An engine notices nothing: nothing is rotated when the model runs.
"""

from torch import Tensor

from compressor.errors import UsageError
from compressor.models import Family
from compressor.transform.base import Change, Transform
from compressor.transform.hadamard import Rotation, rotation


def left(q: Rotation, tensor: Tensor) -> Tensor:
    """Qᵀ · W for a weight [out, in], Qᵀ · b for a bias [out]; Q is repeated along a longer diagonal."""
    return q.right(tensor.mT).mT if tensor.dim() == 2 else q.right(tensor)


def refuse_r1(family: Family, config) -> None:
    """Raise UsageError for a family whose residual stream cannot be rotated without a change of the function."""
    if family.post_norms:
        raise UsageError(
            f"transform.rotation: R1 cannot be folded into {config.model_type}: its {' and '.join(family.post_norms)} "
            "scale what the linears write into the residual stream, channel by channel; use r2"
        )


def r1_rotation(config, seed: int) -> Rotation:
    """The rotation that `r1` applies to the stream."""
    return rotation(config.hidden_size, seed)


def r1(family: Family, config, seed: int) -> Transform:
    """Rotate the residual stream. The norms must have been folded (`norms.fold`) before. Raises as `refuse_r1`."""
    refuse_r1(family, config)
    q = r1_rotation(config, seed)
    changes: dict[str, Change] = {f"{family.embedding}.weight": q.right, f"{family.head}.weight": q.right}
    for index in range(config.num_hidden_layers):
        for group in family.linear_groups(config, index):
            for name in group.names:
                full = family.block(index) + name
                if group.norm is not None:
                    changes[f"{full}.weight"] = q.right
                if group.writes_residual:
                    changes[f"{full}.weight"] = changes[f"{full}.bias"] = lambda tensor: left(q, tensor)
    return Transform("R1", changes, q.construction, unties=True)


def r2(family: Family, config, seed: int) -> Transform:
    """Rotate what the value heads write and o_proj reads, one rotation a block shared by its heads: attention mixes
    positions, not the elements of a head. Block i draws from `seed` + 1 + i."""
    values, size, _ = family.value_rows(config)
    changes: dict[str, Change] = {}
    construction = ""
    for index in range(config.num_hidden_layers):
        q = rotation(size, seed + 1 + index)
        construction = q.construction

        def rotate_values(tensor: Tensor, q: Rotation = q) -> Tensor:
            rows = values * size  # the last ones, where q and k lie in the same matrix
            changed = tensor.clone()
            changed[-rows:] = left(q, tensor[-rows:])
            return changed

        for group in family.linear_groups(config, index):
            if group.value_heads:
                prefix = family.block(index)
                changes |= {f"{prefix}{name}.weight": q.right for name in group.names}
                changes[f"{prefix}{group.producer}.weight"] = changes[f"{prefix}{group.producer}.bias"] = rotate_values
    return Transform("R2", changes, f"{construction} a head")
