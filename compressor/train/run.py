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
from compressor.preflight import refuse_existing, resolve_source, staging_folder
from compressor.recipe import Recipe
from compressor.recipe_training import Heal, allowed_loss
from compressor.train import check, export, head, passport, precision
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
    process of accelerate's launcher, which share the optimizer's steps; all but the first return None. Raises
    UsageError for a recipe without a training section and for an `out` that is there already; CompressError as the
    parts do.
    """
    spec = recipe.proposer.training
    kind = recipe.proposer.kind
    if spec is None:
        raise UsageError("proposer.training: missing, and nothing else is trained; add the section")
    refuse_existing(out)
    with first_goes_ahead():
        resolved = resolve_source(recipe, ui, offline=offline)
    decoder = engine.decoder(resolved.folder, dtype=getattr(torch, recipe.source.dtype))
    if not is_first():
        place = Workplace(
            decoder, resolved.uri, resolved.folder, load_tokenizer(resolved.folder), work, recipe.run.seed, ui, resume
        )
        head.make(place, kind, spec)
        return None
    job = Job(work, recipe.to_dict(), record.environment(), resume=resume)
    try:
        target = describe(decoder, resolved.uri, resolved.folder)
        if job.stage("source") not in (None, target):
            raise UsageError(f"{work}: cannot resume, the source's files changed since it started")
        job.finish("source", target)
        tokenizer = load_tokenizer(resolved.folder)
        place = Workplace(decoder, resolved.uri, resolved.folder, tokenizer, job.work, recipe.run.seed, ui, resume)
        trained = head.make(place, kind, spec)
        found = _export(trained, place, out, kind=kind, target=target, recipe=recipe.to_dict())
    finally:
        job.close()
    shutil.rmtree(work)
    return found


def heal(
    target: Path, old: Path, out: Path, work: Path, spec: Heal, ui: UI, *, seed: int = 0, resume: bool = False
) -> HeadPassport:
    """Fine-tune the head in `old` on the answers of the quantized target in folder `target`; the result is at `out`.

    Raises UsageError for an `out` that is there already and for a `work` that holds something else.
    """
    refuse_existing(out)
    decoder = engine.decoder(target)
    module = export.load(old, decoder)
    settings = {"heal": spec.model_dump(mode="json"), "seed": seed}
    origin = passport.files(old)
    described = describe(decoder, target.name, target)
    job = Job(work, {**settings, "head": origin, "target": described}, record.environment(), resume=resume)
    try:
        # Another seed than training's: its held-out documents are new to the head.
        place = Workplace(decoder, target.name, target, load_tokenizer(target), work, seed + 1, ui, resume)
        trained = head.heal(place, module, spec)
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
        raise UsageError(
            f"precision {to}: a head in 4 bits can lose much; say with --max-loss which share of the accepted tokens "
            "it may lose"
        )
    described = passport.HeadPassport.load(old)
    if described is not None:
        passport.refuse_changed(old, described)
    decoder, prompts = engine.decoder(target), check.usual_prompts(load_tokenizer(target))
    staging = staging_folder(out)
    try:
        precision.lower(old, staging, to)
        before, after = (
            check.check("eagle3", place, decoder, target, prompts, least_first=0, ui=ui).measured
            for place in (old, staging)
        )
        precision.refuse_loss(old, to, before, after, allowed)
        found = None
        if described is not None:
            written = passport.write_lowered(
                staging, described, precision=to, allowed_loss=allowed, before=before, after=after
            )
            found = written.model_dump(mode="json")
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _rename(staging, out)
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
