"""Distillation as a stage of a job: from the blocks' files to trained ones beside them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compressor.checkpoint import writer
from compressor.checkpoint.digest import sha256_file
from compressor.checkpoint.weights import Weights
from compressor.distill.loop import Distiller, Schedule
from compressor.distill.student import Block, Rates
from compressor.job import check_file
from compressor.job_tensors import calibration_ids, read
from compressor.models.skeleton import emulate_activations
from compressor.models.stream import BlockStream
from compressor.quantize.learned import LearnedScales
from compressor.ui import UI

if TYPE_CHECKING:
    from compressor.pipeline import Run

CHECKPOINT = "distill.safetensors"
STAGE = "distill"


def trained_file(state: Run, index: int) -> Path:
    """Where the trained tensors of block `index` are."""
    return state.job.path(f"trained-{index:05d}.safetensors")


def distill(state: Run) -> None:
    """Train what the blocks' files hold on the calibration rows, where the recipe says so, and keep the result where
    rows set aside do."""
    settings, size = state.recipe.distillation, state.recipe.calibration.batch_size
    if settings is None or state.job.stage(STAGE):
        return
    state.ui.stage("distill")
    ids = calibration_ids(state.job)
    started = time.monotonic()
    original = BlockStream(Weights(state.source.folder), state.config, state.dtype)
    student = BlockStream(state.weights, state.weights.config, state.dtype)
    wanted = last_states(original, ids, size, state.ui)
    student.embed(ids[:1])  # for the blocks' masks and positions
    blocks = [_open(state, student, index) for index in range(len(student))]
    training, held_out = range(len(ids) - settings.held_out), range(len(ids) - settings.held_out, len(ids))
    schedule = Schedule(
        steps=settings.steps,
        rows=min(settings.rows, len(training)),
        batch_size=min(size, settings.rows),
        rates=Rates(settings.scale_rate, settings.other_rate),
        seed=state.recipe.run.seed,
        save_every=settings.save_every,
    )
    with original.head() as teacher, student.head() as logits:
        # (a copy: autograd takes nothing that was made in inference mode)
        distiller = Distiller(blocks, lambda rows: student.embed(rows).clone(), teacher, logits, ids, wanted, schedule)
        before = distiller.loss(held_out)
        history = distiller.run(training, state.job.path(CHECKPOINT), state.ui)
        after = distiller.loss(held_out)
    record = {"before": before, "after": after, "kept": after < before, "losses": history}
    if record["kept"]:
        record["sha256"] = [_save(state, index, block) for index, block in enumerate(blocks)]
    record["seconds"] = round(time.monotonic() - started, 1)
    state.job.finish(STAGE, record)
    state.job.path(CHECKPOINT).unlink(missing_ok=True)


def parts(state: Run) -> list[Path]:
    """The files of the blocks as they go into the bundle. Raises CompressError for one that has changed since."""
    record = state.job.stage(STAGE)
    total = state.config.num_hidden_layers
    if record is None or not record["kept"]:
        return [state.job.block_file(index) for index in range(total)]
    files = [trained_file(state, index) for index in range(total)]
    for file, digest in zip(files, record["sha256"], strict=True):
        check_file(file, digest)
    return files


@torch.inference_mode()
def last_states(stream: BlockStream, ids: Tensor, batch_size: int, ui: UI) -> Tensor:
    """What leaves the last block, [rows, length, H], before the final norm."""
    states = torch.cat([stream.embed(rows) for rows in ids.split(batch_size)])
    stream.release_embedding()
    with ui.progress("original", len(stream)) as progress:
        for index in range(len(stream)):
            with stream.block(index) as layer:
                for rows in range(0, len(ids), batch_size):
                    part = slice(rows, rows + batch_size)
                    states[part] = stream.run(index, layer, states[part])
            progress.advance()
    return states


def _open(state: Run, stream: BlockStream, index: int) -> Block:
    prefix, groups = state.family.block(index), state.block_groups[index]
    layer = stream.layers[index]
    stored = read(state.job.block_file(index))
    learned, used = {}, set()
    for name, scheme in [(name, group.scheme) for group in groups for name in group.names]:
        keys = [key for key in stored if key.startswith(f"{prefix}{name}.") and not key.endswith(".bias")]
        tensors = {key.removeprefix(f"{prefix}{name}."): stored[key] for key in keys}
        learned[name] = LearnedScales(scheme.fmt, tensors, search=state.recipe.quantization.scale_search)
        used.update(keys)
        if scheme.rounds_inputs:
            emulate_activations(layer.get_submodule(name), scheme.fmt, tensors.get("input_global_scale"))
    others = {key.removeprefix(prefix): value for key, value in stored.items() if key not in used}
    return Block(layer, stream.recorders[index].arguments, learned, others, state.dtype)


def _save(state: Run, index: int, block: Block) -> str:
    """Write a trained block; the sha256 of its file."""
    path, prefix = trained_file(state, index), state.family.block(index)
    writer.save_atomic(path, {prefix + name: tensor for name, tensor in block.tensors().items()})
    return sha256_file(path)
