"""The proposer of a job: a head trained on the full-precision target, healed on the quantized one, and put into the
bundle."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.decode import engine
from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.decode.runner import Runner
from compressor.errors import CompressError, naming
from compressor.evals import prompts as evaluation_prompts
from compressor.measure import acceptance
from compressor.proposers import load
from compressor.proposers.load import HEAD_FOLDER
from compressor.train import export, head, passport
from compressor.train.head import Workplace

if TYPE_CHECKING:
    import torch

    from compressor.pipeline import Run
    from compressor.recipe import Proposer

TRAINED, HEALED = "head", "healed"
"""Folders of heads in the work folder."""


def in_bundle(spec: Proposer) -> bool:
    """Whether the proposer's files become part of the bundle: a head's do, and those of whatever was trained. A draft
    model that was there before is a checkpoint of its own."""
    return spec.kind in ("eagle3", "medusa") or spec.training is not None


def train(state: Run) -> None:
    """Train the proposer where the recipe says how, once."""
    spec = state.recipe.proposer.training
    if spec is None or state.job.stage("propose"):
        return
    decoder = engine.decoder(state.source.folder, dtype=state.dtype)
    trained = head.make(_workplace(state, decoder, state.source.folder, "training"), state.recipe.proposer.kind, spec)
    _keep(state, trained, "propose", TRAINED, "training")


def heal(state: Run, staging: Path) -> None:
    """Fine-tune the head on the quantized target in `staging` where the recipe says how, once."""
    spec = state.recipe.proposer.heal
    if spec is None or state.job.stage("heal"):
        return
    decoder = engine.decoder(staging, dtype=state.dtype)
    old = folder(state)
    assert old is not None  # the recipe refuses it otherwise
    healed = head.heal(_workplace(state, decoder, staging, "healing"), export.load(old, decoder), spec)
    _keep(state, healed, "heal", HEALED, "healing")


def folder(state: Run, *, healed: bool = False) -> Path | None:
    """Where the proposer's files are; None for one that has none. Raises CompressError where files of the work folder
    are no longer what was recorded."""
    spec = state.recipe.proposer
    if not healed and spec.path is not None:
        return Path(spec.path)
    if not healed and spec.training is None:
        return None
    stage, name = ("heal", HEALED) if healed else ("propose", TRAINED)
    place = state.job.path(name)
    if passport.files(place) != state.job.result(stage)["files"]:
        raise CompressError(f"{place}: changed since it was written; remove the work folder and start again")
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
    """Acceptance on the quantized target, before and after healing: `acceptance` is that of the better head."""
    entry = {"acceptance": acceptance_of(state, model, staging, "quantized", folder(state))}
    if state.recipe.proposer.heal is not None:
        heal(state, staging)
        healed = folder(state, healed=True)
        after = acceptance_of(state, model, staging, "quantized", healed)
        if after["tau"] > entry["acceptance"]["tau"]:
            entry = {"acceptance": {**after, "head": "healed"}, "before_healing": entry["acceptance"]}
        else:
            entry["healed_in_vain"] = {**after, "head": "healed"}
    return entry


def put(state: Run, staging: Path) -> None:
    """Copy the head that was found better into the bundle."""
    if not in_bundle(state.recipe.proposer):
        return
    chosen = folder(state, healed=state.job.result("measure")["acceptance"].get("head") == "healed")
    assert chosen is not None  # these kinds have files
    target = staging / HEAD_FOLDER
    target.mkdir()
    for file in sorted(path for path in chosen.iterdir() if path.is_file()):
        with naming(target / file.name):
            shutil.copyfile(file, target / file.name)


def _workplace(state: Run, decoder: Decoder, target: Path, name: str) -> Workplace:
    """Resumes by itself: the job has refused changed settings."""
    seed, work = state.recipe.run.seed, state.job.path(name)
    return Workplace(decoder, target, state.tokenizer, work, seed, state.ui, resume=True)


def _keep(state: Run, trained: head.Trained, stage: str, name: str, work: str) -> None:
    place = state.job.path(name)
    shutil.rmtree(place, ignore_errors=True)
    trained.export(place)
    state.job.finish(stage, {"facts": trained.facts, "files": passport.files(place)})
    shutil.rmtree(state.job.path(work))  # states of gigabytes
