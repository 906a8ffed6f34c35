"""How a job begins: what is refused before any work is done, and the source brought to this machine."""

from __future__ import annotations

import difflib
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from compressor import transform_stage
from compressor.allocate import budget
from compressor.checkpoint import source
from compressor.decode import engine
from compressor.errors import CompressError, UsageError, brief
from compressor.evals import prompts as evaluation_prompts
from compressor.models import skeleton
from compressor.proposers import load
from compressor.recipe_quantization import matches
from compressor.train import draft, head

if TYPE_CHECKING:
    from compressor.blocks import SelectedGroup
    from compressor.checkpoint.inventory import Inventory
    from compressor.models import Family
    from compressor.models.stream import BlockStream
    from compressor.pipeline import Run
    from compressor.recipe import Quantization, Recipe
    from compressor.ui import UI


def staging_folder(out: Path) -> Path:
    """Where the bundle grows: beside `out`, so that the last step is a rename."""
    return out.parent / f".{out.name}.partial"


def probe_output(out: Path) -> None:
    """Find out before the work whether a bundle can be written at `out`."""
    staging = staging_folder(out)
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        staging.rmdir()
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written ({error.strerror}); choose another folder") from None


def refuse_existing(out: Path) -> None:
    """Raise UsageError for a result that is there already, or that could not be written."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out}: exists already; choose another --out or remove it")
    probe_output(out)


def refuse_several(command: str) -> None:
    """Raise UsageError where a launcher (torchrun, accelerate) started several processes of a command that works in
    one."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1:
        raise UsageError(f"compress {command}: runs in one process, and WORLD_SIZE is {size}")


def resolve_source(recipe: Recipe, ui: UI, *, offline: bool) -> source.ResolvedSource:
    """The recipe's checkpoint on this machine, and torch on as many threads as the recipe says. Errors as
    `source.resolve`."""
    if recipe.run.threads:
        torch.set_num_threads(recipe.run.threads)
    ui.stage("source")
    return source.resolve(
        recipe.source.uri,
        revision=recipe.source.revision,
        sha256=recipe.source.sha256,
        dtype=recipe.source.dtype,
        offline=offline,
        progress=ui.note,
    )


def check_patterns(settings: Quantization, family: Family, config: Any, inventory: Inventory) -> None:
    """Refuse a pattern of `quantization.ignore` or `quantization.overrides` that no linear matches, and patterns that
    leave nothing to quantize, or nothing in `quantization.format`.

    The head and the linears of MTP modules stay as they are in any case, and may be named in `ignore`.
    """
    linears = [name for name, _, _ in family.linears(config)]
    _refuse_idle("quantization.ignore", settings.ignore, [family.head, *linears, *inventory.mtp_linears()])
    for index, entry in enumerate(settings.overrides):
        _refuse_idle(f"quantization.overrides[{index}].targets", entry.targets, linears)
        if not any(settings.overriding(name) == index for name in linears):
            raise UsageError(
                f"quantization.overrides[{index}].targets: {brief(entry.targets)} decides no linear: ignore or later "
                "entries name them all; remove it"
            )
    if all(map(settings.ignores, linears)):
        raise UsageError(f"quantization.ignore: {brief(settings.ignore)} leaves nothing to quantize; remove a pattern")
    if (settings.format, settings.activations) not in map(settings.choice, linears):
        raise UsageError(
            f"quantization.overrides: no linear is left in {settings.format} with {settings.activations} activations; "
            "state what most linears have in quantization.format and quantization.activations"
        )


def _refuse_idle(key: str, patterns: list[str], names: list[str]) -> None:
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            nearest = difflib.get_close_matches(pattern, names, n=1, cutoff=0)[0]
            raise UsageError(f"{key}: {brief(pattern)} matches no linear of this model; the nearest is {nearest!r}")


def check_shapes(group: SelectedGroup, prefix: str, shapes: list[tuple[int, ...]]) -> None:
    """Refuse linears of these [out, in] in block `prefix` that their format cannot hold. Raises CompressError."""
    fmt = group.scheme.fmt
    for name, shape in zip(group.names, shapes, strict=True):
        fmt.check(shape[1], prefix + name)
    if group.fused_as is not None:
        fmt.check_fused([shape[0] for shape in shapes], prefix + group.fused_as)


def check_source(state: Run) -> None:
    """Refuse, before any work is done, a source or a measurement that could not be finished."""
    inventory = state.inventory
    check_patterns(state.recipe.quantization, state.family, state.config, inventory)
    transform_stage.refuse_unfit(state.recipe, state.family, state.config, inventory)
    skeleton.build(state.config, state.dtype)
    asked, shapes_of_groups = state.recipe.quantization, []
    for index, groups in enumerate(state.block_groups):
        prefix = state.family.block(index)
        for group in groups:
            keys = [f"{prefix}{name}.weight" for name in group.names]
            for key in keys:
                if key not in inventory.tensors:
                    raise CompressError(f"{state.source.folder}: tensor '{key}' is missing from the shards")
            shapes_of_groups.append([inventory.tensors[key].shape for key in keys])
            for variant in budget.variants(group, asked):
                check_shapes(variant, prefix, shapes_of_groups[-1])
    if asked.allocation is not None:
        budget.check(asked, shapes_of_groups, state.dtype)
    settings = state.recipe.measure.acceptance
    if state.recipe.proposer.kind != "none":
        proposer = state.recipe.proposer
        if proposer.training is None:
            load.parse(proposer.name, state.source.folder, proposer.branching)
        elif proposer.kind == "eagle3":
            head.aux_of(state.config.num_hidden_layers, proposer.training)
        elif proposer.kind == "draft":
            draft.evenly(state.config.num_hidden_layers, proposer.training.layers)
        prompts = evaluation_prompts.acceptance_prompts(state.tokenizer, settings.prompts)
        longest = max(map(len, prompts)) + settings.max_new_tokens
        if longest > state.config.max_position_embeddings:
            raise UsageError(
                f"measure.acceptance.max_new_tokens: {settings.max_new_tokens} after the longest prompt makes "
                f"{longest} tokens, the model's context is {state.config.max_position_embeddings}"
            )


def refuse_unknown(state: Run, stream: BlockStream) -> None:
    """Raise CompressError for a tensor inside a block that the model class does not have: it would be lost."""
    for index, layer in enumerate(stream.layers):
        prefix = state.family.block(index)
        known = {prefix + name for name in layer.state_dict()}
        for name in state.inventory.tensors:
            if name.startswith(prefix) and name not in known and not re.search(engine.LEGACY_BUFFERS, name):
                kind = state.config.model_type
                raise CompressError(
                    f"{state.source.folder}: tensor '{name}' is not part of a {kind}; nothing would use it"
                )
