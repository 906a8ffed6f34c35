"""`compress train`, `heal` and `lower-head`: from a recipe, or a target and a head, to a checked head on disk."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from compressor import record
from compressor.checkpoint.tokenizer import load_tokenizer
from compressor.decode import engine
from compressor.errors import UsageError
from compressor.job import Job
from compressor.preflight import refuse_existing, refuse_several, resolve_source, staging_folder
from compressor.recipe import Recipe
from compressor.recipe_training import STATE_LOSS, Heal, allowed_loss
from compressor.train import export, head, passport, precision
from compressor.train.finish import describe, finish
from compressor.train.head import Trained, Workplace
from compressor.train.passport import HeadPassport
from compressor.train.processes import first_goes_ahead, is_first
from compressor.ui import UI


def train(
    recipe: Recipe, out: Path, work: Path, ui: UI, *, resume: bool = False, offline: bool = False
) -> HeadPassport | None:
    """Train the head that `proposer.training` describes for the full-precision target, and put it at `out`.

    `work` keeps answers, states and checkpoints until then; an interrupted run goes on with `resume`. Called in every
    process of a launcher, each of which adds its batches to every step; all but the first return None. Raises
    UsageError for a recipe without a training section and for an `out` that is there already; CompressError as the
    parts do.
    """
    spec = recipe.proposer.training
    kind = recipe.proposer.kind
    if spec is None:
        raise UsageError("proposer.training: missing, and nothing else is trained; add the section")
    with first_goes_ahead():
        if is_first():
            refuse_existing(out)
        resolved = resolve_source(recipe, ui, offline=offline)
    decoder = engine.decoder(resolved.folder, dtype=getattr(torch, recipe.source.dtype))
    target = describe(decoder, resolved.uri, resolved.folder)
    with first_goes_ahead():
        job = _begin(work, recipe, target, resume) if is_first() else None
    tokenizer, k = load_tokenizer(resolved.folder), recipe.proposer.num_speculative_tokens
    place = Workplace(decoder, resolved.folder, tokenizer, work, recipe.run.seed, ui, resume, resolved.uri, k)
    try:
        trained = head.make(place, kind, spec)
        if job is None:
            return None
        found = _export(trained, place, out, kind=kind, target=target, recipe=recipe.to_dict())
    finally:
        if job is not None:
            job.close()
    shutil.rmtree(work)
    return found


def _begin(work: Path, recipe: Recipe, target: dict[str, Any], resume: bool) -> Job:
    """The work folder of a training. Raises UsageError for one that was begun with other files of the source."""
    job = Job(work, recipe.to_dict(), record.environment(), resume=resume)
    if job.stage("source") not in (None, target):
        job.close()
        raise UsageError(f"{work}: cannot resume, the source's files changed since it started")
    job.finish("source", target)
    return job


def heal(
    target: Path, old: Path, out: Path, work: Path, spec: Heal, ui: UI, *, seed: int = 0, resume: bool = False
) -> HeadPassport:
    """Fine-tune the head in `old` on the answers of the quantized target in folder `target`; the result is at `out`.

    Raises UsageError for an `out` that is there already and for a `work` that holds something else.
    """
    refuse_several("heal")
    refuse_existing(out)
    decoder = engine.decoder(target)
    module = export.load(old, decoder)
    settings = {"heal": spec.model_dump(mode="json"), "seed": seed}
    origin = passport.files(old)
    described = describe(decoder, target.name, target)
    job = Job(work, {**settings, "head": origin, "target": described}, record.environment(), resume=resume)
    try:
        # Another seed than training's: its held-out documents are new to the head.
        place = Workplace(decoder, target, load_tokenizer(target), work, seed + 1, ui, resume, target.name)
        trained = head.heal(place, module, spec, export.layout_of(old))
        found = _export(trained, place, out, kind="eagle3", target=described, recipe=settings, healed_from=origin)
    finally:
        job.close()
    shutil.rmtree(work)
    return found


def lower(target: Path, old: Path, out: Path, to: str, loss: float | None, ui: UI) -> dict[str, Any]:
    """Put the EAGLE-3 head in `old` at `out` with its linears in a lower precision, after measuring both on the target
    in folder `target`: {before, after, files, passport}, the last None where `old` has none.

    Raises UsageError for 4 bits without an allowed `loss` and for an `out` that is there already, CompressError for a
    head that loses more.
    """
    refuse_existing(out)
    allowed = allowed_loss(to, loss)
    if allowed is None:
        raise UsageError(f"precision {to}: {STATE_LOSS}; say it with --max-loss")
    described = HeadPassport.load(old)
    if described is not None and described.kind != "eagle3":
        raise UsageError(f"{old}: its passport calls it a proposer of kind {described.kind}; an EAGLE-3 head is needed")
    precision.refuse_unfit(old, to)
    decoder, tokenizer = engine.decoder(target), load_tokenizer(target)
    staging = staging_folder(out)
    try:
        before, after = precision.lower_and_check(
            old, staging, to, allowed, decoder=decoder, target=target, tokenizer=tokenizer, ui=ui
        )
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _rename(staging, out)
    written = HeadPassport.load(out)
    found = None if written is None else written.model_dump(mode="json")
    return {"before": before, "after": after, "files": passport.files(out), "passport": found}


def _export(trained: Trained, place: Workplace, out: Path, **described: Any) -> HeadPassport:
    """Finish the proposer beside `out`, and rename it."""
    staging = staging_folder(out)
    found = finish(trained, place, staging, **described)
    _rename(staging, out)
    return found


def _rename(staging: Path, out: Path) -> None:
    if out.exists():
        out.rmdir()  # empty: checked before the work began
    os.replace(staging, out)
