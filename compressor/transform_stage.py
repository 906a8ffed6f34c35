"""The job's transforms: the source as rotated, the proof that it is the same function, and channel scales block by
block."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from compressor.errors import UsageError
from compressor.train.rotation import refuse_unturnable
from compressor.transform import check, norms, rotate, scales
from compressor.transform.awq import awq
from compressor.transform.base import Transform
from compressor.transform.search import quantizer
from compressor.transform.smooth import smoothquant
from compressor.transform.view import TransformedWeights

if TYPE_CHECKING:
    from compressor.blocks import InputStatistics, SelectedGroup
    from compressor.checkpoint.inventory import Inventory
    from compressor.models import Family
    from compressor.pipeline import Run
    from compressor.recipe import Recipe

ALGORITHMS = {"awq": awq, "smoothquant": smoothquant}


def refuse_unfit(recipe: Recipe, family: Family, config: Any, inventory: Inventory) -> None:
    """Raise UsageError where the recipe's R1 cannot be folded into this model, or something beside it would be left
    reading a stream that was rotated under it."""
    if not recipe.transform.rotates_stream:
        return
    rotate.refuse_r1(family, config)
    if inventory.mtp_modules:
        raise UsageError(
            f"transform.rotation: R1 would leave the MTP modules ({', '.join(inventory.mtp_modules)}) reading an "
            "unrotated stream; use r2"
        )
    if recipe.proposer.kind == "eagle3" and recipe.proposer.path is not None:
        refuse_unturnable(Path(recipe.proposer.path))


def weights(state: Run) -> TransformedWeights:
    """The source after the recipe's rotations, in the bundle's dtype; without any, the source as it is."""
    spec, family, config, seed = state.recipe.transform, state.family, state.config, state.recipe.run.seed
    plain = TransformedWeights(state.source.folder, family, config, [])
    transforms: list[Transform] = []
    if spec.rotates_stream:
        transforms += [norms.fold(family, config, plain.get), rotate.r1(family, config, seed)]
    if spec.rotates_heads:
        transforms.append(rotate.r2(family, config, seed))
    return TransformedWeights(state.source.folder, family, config, transforms, state.dtype)


def prove(state: Run) -> None:
    """The stage `transform`: the rotations, and trial channel scales where smoothing will find others, leave the logits
    as they are; once. Raises CompressError as `check.check`."""
    spec, seed = state.recipe.transform, state.recipe.run.seed
    if (spec.rotation == "none" and spec.smoothing == "none") or state.job.stage("transform"):
        return
    state.ui.stage("transform")
    rotated, config = state.weights, state.config
    transforms = list(rotated.transforms)
    if spec.smoothing != "none":
        transforms.append(scales.trial(state.family, config, seed))
    view = TransformedWeights(rotated.folder, state.family, config, transforms)
    found = check.check(view, config, check.token_rows(config.vocab_size, seed))
    entry: dict[str, Any] = {
        "transforms": [{"name": t.name, "construction": t.construction} for t in transforms],
        "max_logit_difference": found.max_logit_difference,
        "dtype": found.dtype,
        "tokens": found.tokens,
    }
    if rotated.untied:
        entry["untied_bytes"] = config.vocab_size * config.hidden_size * state.dtype.itemsize
    state.job.finish("transform", entry)


@torch.no_grad()
def smooth(
    state: Run,
    layer: nn.Module,
    index: int,
    groups: Sequence[SelectedGroup],
    statistics: dict[SelectedGroup, InputStatistics],
) -> list[dict]:
    """Find channel scales for every group of block `index`, in order of execution, and fold them into `layer` and
    `statistics` in place. Returns a JSON row a group: its linears, the exponent (None: not scaled) and the relative
    output error of its weights rounded to nearest, before and after."""
    spec, family, prefix = state.recipe.transform, state.family, state.family.block(index)
    rows = []
    for group in groups:
        seen = statistics[group]
        assert seen.hessian is not None and seen.mean is not None and seen.largest is not None
        found = ALGORITHMS[spec.smoothing](
            [layer.get_parameter(f"{name}.weight") for name in group.names],
            seen.hessian,
            seen.mean,
            seen.largest,
            group.scheme.fmt,
            alpha=spec.alpha,
            shared=scales.channels(family, state.config, group),
            quantize=quantizer(group.scheme.fmt, fused=group.fused_as is not None),
        )
        rows.append(
            {
                "linears": [prefix + name for name in group.names],
                "alpha": found.alpha,
                "error_before": found.error_before,
                "error_after": found.error_after,
            }
        )
        if found.alpha is None:
            continue
        s = found.scales
        if group.norm is not None:
            s = scales.storable(layer.get_parameter(f"{group.norm}.weight"), family.norm_offset, s)
        folded = scales.channel_scales(family, state.config, {(index, group): s})
        changed = {
            name: folded.changes[prefix + name](parameter.float()).to(parameter.dtype)
            for name, parameter in layer.named_parameters()
            if prefix + name in folded.changes
        }
        layer.load_state_dict(changed, strict=False, assign=True)  # their memory may be the source's file
        seen.divide(s)
    layer.requires_grad_(False)
    return rows


def decisions(state: Run) -> list[dict]:
    """What the passport says of the transforms."""
    entry = state.job.stage("transform")
    if entry is None:
        return []
    names = [f"{t['name']} ({t['construction']})" if t["construction"] else t["name"] for t in entry["transforms"]]
    proof = f"logits differ by at most {entry['max_logit_difference']:.2g} in {entry['dtype']} before rounding"
    made = [{"what": f"transformed: {', '.join(names)}", "why": f"the recipe asks for it; {proof}"}]
    if "untied_bytes" in entry:
        made.append(
            {
                "what": f"{state.family.head}.weight written beside the embedding, {entry['untied_bytes']} bytes more",
                "why": "R1 folds the final norm into the head alone; config.json says tie_word_embeddings false",
            }
        )
    blocks = range(state.config.num_hidden_layers)
    rows = [row for index in blocks for row in state.job.finished_block(index).get("smoothing", [])]
    if rows:
        before, after = (sum(row[key] for row in rows) / len(rows) for key in ("error_before", "error_after"))
        scaled = sum(row["alpha"] is not None for row in rows)
        made.append(
            {
                "what": f"{state.recipe.transform.smoothing}: {scaled} of {len(rows)} groups of linears scaled",
                "why": f"relative output error, rounded to nearest: {before:.4g} before, {after:.4g} after, on average",
            }
        )
    return made
