"""A head trained on a target whose residual stream was rotated since (QuaRot, Ashkboos et al., arXiv 2404.00456; R1 of
SpinQuant, Liu et al., arXiv 2405.16406).

With the stream x replaced by x·Q the head's inputs change: the states that `fc` reads and, where it shares the target's
embedding, the embedded tokens. An RMSNorm divides by the same number before and after, but its weight does not commute
with Q, so that it moves into the linears behind it. Everything after `fc` stays the head's own, unrotated.
"""

import shutil
from pathlib import Path

import torch
from torch import Tensor

from compressor.checkpoint import writer
from compressor.checkpoint.config import CONFIG
from compressor.checkpoint.reader import SINGLE_NAME, ShardReader
from compressor.errors import UsageError, naming
from compressor.proposers.eagle3 import plain_name, read_settings

ORTHOGONAL = 1e-6
"""Largest deviation of Qᵀ·Q from the identity."""


def refuse_unturnable(head: Path) -> None:
    """Raise UsageError for an EAGLE-3 head whose weights are quantized, that has norms of its own around `fc`, or that
    shares the target's lm_head: the rotated target's would no longer fit its states."""
    settings = read_settings(head)
    if settings.fmt is not None:
        raise UsageError(f"{head}: its weights are in {settings.fmt.name}; rotate the head that it was made from")
    if settings.norm_before_fc or settings.fc_norm:
        raise UsageError(f"{head}: a head with norms before fc is not rotated")
    with ShardReader(head) as reader:
        if not any(plain_name(name) == "lm_head.weight" for name in reader.keys()):  # noqa: SIM118 - no mapping
            raise UsageError(f"{head}: it shares the target's lm_head, which R1 rotates; use transform.rotation: r2")


def counter_rotate(head: Path, out: Path, rotation: Tensor) -> None:
    """Write the EAGLE-3 head in folder `head` into `out` as it must be for a target whose residual stream x became
    x·`rotation`: float [H, H], orthogonal. In float64, rounded once to the dtype of each tensor.

    Raises UsageError for a matrix that is not orthogonal or of another width, and as `refuse_unturnable`.
    """
    refuse_unturnable(head)
    settings = read_settings(head)
    size, q = settings.target_hidden_size, rotation.double()
    if tuple(q.shape) != (size, size):
        raise UsageError(f"{head}: a rotation of {[*q.shape]}, the target's states have {size} elements")
    if float((q.T @ q - torch.eye(size, dtype=q.dtype)).abs().max()) > ORTHOGONAL:
        raise UsageError(f"{head}: the rotation is not orthogonal")
    with ShardReader(head) as reader:
        stored = {plain_name(name): name for name in reader.keys()}  # noqa: SIM118 - no mapping
        tensors = {name: reader.get(key) for name, key in stored.items()}
    changed = {"fc.weight": (tensors["fc.weight"].double().unflatten(1, (-1, size)) @ q).flatten(1)}
    if "embed_tokens.weight" not in tensors:
        norm = "midlayer.input_layernorm.weight"
        for name in (f"midlayer.self_attn.{part}_proj.weight" for part in "qkv"):
            weight = tensors[name].double()
            embedded = weight[:, :size] * tensors[norm].double() @ q
            changed[name] = torch.cat([embedded, weight[:, size:]], 1)
        changed[norm] = torch.ones_like(tensors[norm])
    out.mkdir(parents=True, exist_ok=True)
    written = {stored[name]: changed.get(name, kept).to(kept.dtype).contiguous() for name, kept in tensors.items()}
    writer.save_atomic(out / SINGLE_NAME, written, {"format": "pt"})
    with naming(out / CONFIG):
        shutil.copyfile(head / CONFIG, out / CONFIG)
