"""The proposer of a job: a head trained on the full-precision target, healed on the quantized one, and put into the
bundle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.decode import engine
from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.decode.runner import Runner
from compressor.errors import CompressError, UsageError, naming
from compressor.evals import prompts as evaluation_prompts
from compressor.measure import acceptance
from compressor.proposers import load
from compressor.proposers.load import HEAD_FOLDER
from compressor.recipe_training import allowed_loss
from compressor.train import check, export, head, passport, precision
from compressor.train.finish import describe, finish
from compressor.train.head import Workplace
from compressor.train.rotation import counter_rotate
from compressor.transform.rotate import r1_rotation

if TYPE_CHECKING:
    import torch

    from compressor.pipeline import Run
    from compressor.recipe import Proposer

FOLDERS = {"propose": "head", "rotate": "rotated", "heal": "healed", "lower": "lowered"}
"""Of heads in the work folder, by the stage that made them."""
SUFFIXES = (".safetensors", ".json", ".yaml", ".svg", ".txt", ".model", ".jinja")
"""Of files that belong to a head or a draft model: weights, config, passport, recipe, curve, tokenizer."""


def in_bundle(spec: Proposer) -> bool:
    """Whether the proposer's files become part of the bundle: a head's do, and those of whatever was trained. A draft
    model that was there before is a checkpoint of its own."""
    return spec.kind in ("eagle3", "medusa") or spec.training is not None


def train(state: Run) -> None:
    """Train the proposer where the recipe says how, or note the files of the one it names; once."""
    spec = state.recipe.proposer
    recorded = state.job.stage("propose")
    if spec.path is not None and recorded is None:
        _take(state, Path(spec.path))
    if spec.training is None or recorded:
        return
    state.ui.stage("propose")
    decoder = engine.decoder(state.source.folder, dtype=state.dtype)
    if spec.precision != "bf16":
        precision.fitting(spec.precision, head.shape_of(decoder, spec.training).widths, "proposer.training")
    place = _workplace(state, decoder, state.source.folder, "training")
    trained = head.make(place, spec.kind, spec.training)
    _keep(state, place, trained, "propose", state.source.uri)


def rotate(state: Run) -> None:
    """Turn an EAGLE-3 head to the residual stream that R1 rotates, once. Raises as `counter_rotate`."""
    if not state.recipe.transform.rotates_stream or state.recipe.proposer.kind != "eagle3" or state.job.stage("rotate"):
        return
    made, given = state.job.path(FOLDERS["rotate"]), folder(state)
    assert given is not None  # the recipe refuses it otherwise
    shutil.rmtree(made, ignore_errors=True)
    counter_rotate(given, made, r1_rotation(state.config, state.recipe.run.seed).matrix())
    state.job.finish("rotate", {"files": passport.files(made)})


def _take(state: Run, given: Path) -> None:
    """Note the files of a proposer that was made before, and what is wrong with an EAGLE-3 head, which stays the
    user's choice; what it cannot be used for is known before the work."""
    spec = state.recipe.proposer
    found: dict[str, Any] = {"files": passport.files(given)}
    described = passport.HeadPassport.load(given)
    if described is not None:
        passport.refuse_changed(given, described)
        if described.kind != spec.kind:
            raise UsageError(
                f"proposer.kind: {spec.kind}; the passport in {given} calls it a proposer of kind {described.kind}"
            )
    if spec.precision != "bf16":
        precision.refuse_unfit(given, spec.precision)
    if spec.kind == "eagle3":
        state.ui.stage("propose")
        decoder = engine.decoder(state.source.folder, dtype=state.dtype)
        if spec.heal is not None:
            export.load(given, decoder)
        texts = check.texts_of(decoder, state.tokenizer, state.ui)
        fault = check.examine(given, decoder, texts).fault if texts else None
        if fault is not None:
            found["fault"] = f"{given.name}: {fault}"
            state.ui.note(f"{given}: {fault}; it is used as it is")
    state.job.finish("propose", found)


def heal(state: Run, staging: Path) -> None:
    """Fine-tune the head on the quantized target in `staging` where the recipe says how, once."""
    spec = state.recipe.proposer.heal
    if spec is None or state.job.stage("heal"):
        return
    decoder = engine.decoder(staging, dtype=state.dtype)
    old = folder(state, _first(state))
    assert old is not None  # the recipe refuses it otherwise
    # Another seed than training's: its held-out documents are new to the head.
    place = _workplace(state, decoder, staging, "healing", seed=state.recipe.run.seed + 1)
    healed = head.heal(place, export.load(old, decoder), spec, export.layout_of(old))
    _keep(state, place, healed, "heal", state.recipe.name, passport.files(old))


def folder(state: Run, stage: str = "propose") -> Path | None:
    """Where the proposer's files are that `stage` made; None for one that has none. Raises CompressError where they are
    no longer what was recorded."""
    spec = state.recipe.proposer
    first = stage == "propose"
    if first and spec.path is None and spec.training is None:
        return None
    place = Path(spec.path) if spec.path is not None and first else state.job.path(FOLDERS[stage])
    found = passport.files(place) if place.is_dir() else None
    if found != state.job.result(stage)["files"]:
        raise CompressError(f"{place}: missing or changed since it was recorded; remove the work folder and begin anew")
    return place


def acceptance_of(state: Run, model: torch.nn.Module, folder: Path, target: str, head: Path | None) -> dict:
    """Acceptance of the recipe's proposer, whose files are in `head`, against `model`, loaded from `folder`, on the
    evaluation prompts."""
    recipe = state.recipe
    settings, spec = recipe.measure.acceptance, recipe.proposer
    decoder = Decoder(model)
    choice = load.parse(spec.kind if head is None else f"{spec.kind}:{head}", folder, spec.branching)
    window = {"prompt_lookup_min": spec.prompt_lookup_min, "prompt_lookup_max": spec.prompt_lookup_max}
    proposer = load.build(choice, decoder, folder, window)
    token_ids = evaluation_prompts.acceptance_prompts(state.tokenizer, settings.prompts)
    with state.ui.progress(f"acceptance, {target} target", len(token_ids)) as progress:
        return acceptance.measure(
            Runner(decoder, proposer, spec.num_speculative_tokens, spec.rule),
            token_ids,
            task="evaluation prompts",
            target=target,
            k=spec.num_speculative_tokens,
            max_new_tokens=settings.max_new_tokens,
            law=Law(settings.temperature, settings.top_k, settings.top_p),
            seed=recipe.run.seed,
            progress=progress,
        )


def measure(state: Run, model: torch.nn.Module, staging: Path) -> dict:
    """Acceptance on the quantized target, before and after healing; `acceptance` is that of the head that goes into the
    bundle: the better one, in the recipe's precision."""
    entry = {"acceptance": acceptance_of(state, model, staging, "quantized", folder(state, _first(state)))}
    if state.recipe.proposer.heal is not None:
        heal(state, staging)
        healed = folder(state, "heal")
        after = acceptance_of(state, model, staging, "quantized", healed)
        if after["tau"] > entry["acceptance"]["tau"]:
            entry = {"acceptance": {**after, "head": "healed"}, "before_healing": entry["acceptance"]}
        else:
            entry["healed_in_vain"] = {**after, "head": "healed"}
    if state.recipe.proposer.precision != "bf16":
        entry |= lower(state, model, staging, entry["acceptance"])
    return entry


def lower(state: Run, model: torch.nn.Module, staging: Path, before: dict) -> dict:
    """Make the head that reached `before` anew in the recipe's precision, and measure that. Raises CompressError where
    its check loses more than the recipe allows."""
    spec, made = state.recipe.proposer, state.job.path(FOLDERS["lower"])
    chosen = folder(state, _stage(state, before))
    allowed = allowed_loss(spec.precision, spec.precision_loss)
    assert chosen is not None and allowed is not None  # the recipe refuses it otherwise
    shutil.rmtree(made, ignore_errors=True)
    precision.lower_and_check(
        *(chosen, made, spec.precision, allowed),
        decoder=Decoder(model),
        target=staging,
        tokenizer=state.tokenizer,
        ui=state.ui,
    )
    state.job.finish("lower", {"files": passport.files(made)})
    after = acceptance_of(state, model, staging, "quantized", made)
    after |= {"precision": spec.precision} | {key: before[key] for key in ("head",) if key in before}
    return {"acceptance": after, "before_lowering": before}


def _stage(state: Run, measured: dict) -> str:
    """Which made the head that was measured."""
    return "lower" if "precision" in measured else "heal" if measured.get("head") == "healed" else _first(state)


def _first(state: Run) -> str:
    """Which made the head that the quantized target begins with."""
    return "rotate" if state.job.stage("rotate") else "propose"


def put(state: Run, staging: Path) -> None:
    """Copy the head that was measured last into the bundle."""
    if not in_bundle(state.recipe.proposer):
        return
    chosen = folder(state, _stage(state, state.job.result("measure")["acceptance"]))
    assert chosen is not None  # these kinds have files
    target = staging / HEAD_FOLDER
    target.mkdir()
    for file in sorted(path for path in chosen.iterdir() if path.is_file() and path.suffix in SUFFIXES):
        with naming(target / file.name):
            shutil.copyfile(file, target / file.name)


def _workplace(state: Run, decoder: Decoder, target: Path, name: str, seed: int | None = None) -> Workplace:
    """Resumes by itself: the job has refused changed settings."""
    seed = state.recipe.run.seed if seed is None else seed
    work, k = state.job.path(name), state.recipe.proposer.num_speculative_tokens
    return Workplace(decoder, target, state.tokenizer, work, seed, state.ui, True, state.source.uri, k)


def _keep(
    state: Run,
    place: Workplace,
    trained: head.Trained,
    stage: str,
    target: str,
    healed_from: dict[str, str] | None = None,
) -> None:
    """Finish the proposer in the work folder and record it; what made it goes."""
    kept = state.job.path(FOLDERS[stage])
    finish(
        trained,
        place,
        kept,
        kind=state.recipe.proposer.kind,
        target=describe(place.decoder, target, place.target),
        recipe=state.recipe.to_dict(),
        healed_from=healed_from,
    )
    state.job.finish(stage, {"files": passport.files(kept)})
    shutil.rmtree(place.folder)  # states of gigabytes
