"""The main job, stage by stage: source → transform → calibration → sensitivity → proposer → baseline → allocation →
quantize → distill → bundle → measure."""

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from compressor import blocks, formats, models, preflight, propose, record, sensitivity, transform_stage
from compressor.activations import Activations
from compressor.allocate.stage import allocate
from compressor.bundle import api as bundle_api
from compressor.bundle import signing
from compressor.calibration import build as build_calibration
from compressor.checkpoint import source, writer
from compressor.checkpoint.config import CONFIG
from compressor.checkpoint.digest import sha256_file
from compressor.checkpoint.inventory import Inventory
from compressor.checkpoint.tokenizer import load_tokenizer
from compressor.checkpoint.weights import Weights
from compressor.decode import engine
from compressor.distill import stage
from compressor.errors import CompressError, UsageError
from compressor.evals import build as build_rows
from compressor.job import Job, check_file
from compressor.job_tensors import CALIBRATION, EVALUATION, calibration_ids, load_ids
from compressor.measure import quality
from compressor.models.skeleton import model_config
from compressor.models.stream import BlockStream
from compressor.recipe import Quantization, Recipe
from compressor.transform.view import TransformedWeights
from compressor.ui import UI

CHECKSUMS = ("activations", "reference")  # what a block's record calls those of each stream of hidden states
OUTSIDE = "outside.safetensors"  # embeddings, norms, head and whatever no block owns


@dataclass
class Run:
    """Everything the stages share. Each records its result through `job`, so that a resumed run can skip it."""

    recipe: Recipe
    ui: UI
    source: source.ResolvedSource
    job: Job = field(init=False)
    quantization: Quantization = field(init=False)

    def __post_init__(self) -> None:
        self.quantization = self.recipe.quantization

    def settle(self, quantization: Quantization) -> None:
        """Quantize with these settings, in which every linear's format has been chosen, instead of the recipe's."""
        self.quantization = quantization
        for name in ("scheme", "block_groups"):
            self.__dict__.pop(name, None)

    @cached_property
    def config(self):
        config, quantization = model_config(self.source.folder)
        if quantization is not None:
            method = quantization.get("quant_method", "unknown")
            path = self.source.folder / CONFIG
            raise CompressError(f"{path}: the source is already quantized ({method}); start from full precision")
        return config

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that stay unquantized, and of calibration."""
        return getattr(torch, self.recipe.source.dtype)

    @cached_property
    def family(self) -> models.Family:
        return models.get(self.config.model_type)

    @cached_property
    def inventory(self) -> Inventory:
        return Inventory.read(self.source.folder)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.source.folder)

    @cached_property
    def weights(self) -> TransformedWeights:
        """What is quantized: the source after the recipe's rotations. Its `config` is the bundle's."""
        return transform_stage.weights(self)

    @cached_property
    def target(self) -> torch.nn.Module:
        """The full-precision target, its weights mapped from the source's files rather than copied."""
        return engine.load(self.source.folder, dtype=self.dtype)

    def release_target(self) -> None:
        self.__dict__.pop("target", None)

    @cached_property
    def scheme(self) -> formats.Scheme:
        """Of the linears that no override names."""
        return formats.scheme(self.quantization.format, self.quantization.activations)

    @cached_property
    def block_groups(self) -> list[tuple[blocks.SelectedGroup, ...]]:
        """Per block, the groups that are quantized."""
        return [
            blocks.selected(self.family.linear_groups(self.config, i), self.family.block(i), self.quantization)
            for i in range(self.config.num_hidden_layers)
        ]


OPEN = {"measure": ("proposer.precision", "proposer.precision_loss")}
"""Keys that matter to no stage before this one: a loss that was too large need not cost the training before it."""


def run(
    recipe: Recipe, *, out: Path, work: Path, ui: UI, resume: bool = False, offline: bool = False
) -> bundle_api.Bundle:
    """Do what the recipe says and return the finished, signed and verified bundle at `out`.

    Nothing appears at `out` before the bundle is complete. Work in progress is in `work`, which is removed at the end;
    after an interruption `resume` continues it. Raises CompressError or UsageError with a one-line message.
    """
    out, work = Path(out), Path(work)
    preflight.refuse_several("run")
    preflight.refuse_existing(out)
    private_key, public_key = signing.resolve_keys(recipe.bundle.private_key)
    state = Run(recipe, ui, preflight.resolve_source(recipe, ui, offline=offline))
    preflight.check_source(state)
    state.job = job = Job(work, recipe.to_dict(), record.environment(), resume=resume, open_until=OPEN)
    try:
        pin_source(state)
        transform_stage.prove(state)
        calibrate(state)
        sensitivity.weigh(state)
        propose.train(state)
        propose.rotate(state)
        baseline(state)
        state.release_target()
        allocate(state)
        quantize(state)
        stage.distill(state)
        staging = stage_bundle(state, out)
        try:
            measure(state, staging)
            propose.put(state, staging)
            bundle = record.finish_bundle(state, staging, out, private_key, public_key)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    finally:
        job.close()
    shutil.rmtree(work)
    return bundle


def pin_source(state: Run) -> None:
    """Record the source's files, or refuse to resume with other ones; make sure that the work fits on the disk."""
    files = state.source.files
    recorded = state.job.stage("source")
    if recorded and recorded["files"] != files:
        changed = sorted(k for k in recorded["files"].keys() | files if recorded["files"].get(k) != files.get(k))
        raise UsageError(f"{state.job.work}: cannot resume, source files changed: {', '.join(changed)}")
    if recorded is None:
        writer.ensure_space(state.job.work, 2 * state.inventory.total_bytes)
        state.job.finish("source", {"files": files})


def calibrate(state: Run) -> None:
    """Build the calibration rows, once."""
    if not state.recipe.quantization.needs_data or state.job.stage("calibration"):
        return
    state.ui.stage("calibration")
    spec = state.recipe.calibration
    seed = state.recipe.run.seed
    rows = build_calibration(
        spec,
        state.tokenizer,
        seed=seed,
        load_model=lambda: state.target,
        ui=state.ui,
        vocab_size=state.config.vocab_size,
    )
    writer.save_atomic(state.job.path(CALIBRATION), {"ids": rows.ids})
    state.job.finish("calibration", {"digest": rows.digest, **rows.description})


def baseline(state: Run) -> None:
    """The full-precision row of the passport: evaluation rows and the reference's own acceptance."""
    if state.job.stage("baseline"):
        return
    state.ui.stage("baseline")
    recipe = state.recipe
    entry: dict = {}
    rows = build_rows(
        recipe.measure.quality,
        state.tokenizer,
        seed=recipe.run.seed + 1,
        load_model=lambda: state.target,
        ui=state.ui,
        vocab_size=state.config.vocab_size,
    )
    if rows is not None:
        writer.save_atomic(state.job.path(EVALUATION), {"ids": rows.ids})
        entry["quality"] = {"name": rows.name, "digest": rows.digest}
    if recipe.proposer.kind != "none":
        model = state.target
        entry["acceptance"] = propose.acceptance_of(
            state, model, state.source.folder, "baseline", propose.folder(state)
        )
    state.job.finish("baseline", entry)


def quantize(state: Run) -> None:
    """Every block: calibrate, quantize, pack, save; then whatever lies outside the blocks."""
    state.ui.stage("quantize")
    job, total = state.job, state.config.num_hidden_layers
    done = 0
    while done < total and job.block(done) is not None:
        done += 1
    outside = job.stage("outside")
    if outside:
        check_file(job.path(OUTSIDE), outside["sha256"])
    if done == total and outside:
        return
    stream = BlockStream(state.weights, state.weights.config, state.dtype)
    preflight.refuse_unknown(state, stream)
    if done < total:
        sensitivity.check(state)
        flows = start_activations(state, stream, done) if state.quantization.needs_data else []
        with state.ui.progress("quantize", sum(len(groups) for groups in state.block_groups[done:])) as progress:
            for index in range(done, total):
                quantize_block(state, stream, index, flows, progress.advance)
        for flow in flows:
            flow.remove()
    if not outside:
        job.finish("outside", save_outside(state))


def start_activations(state: Run, stream: BlockStream, index: int) -> list[Activations]:
    """Calibration hidden states entering block `index`: embedded anew, or as the last finished block left them.

    With asymmetric calibration, those of the full-precision model follow those of the quantized one.
    """
    ids = calibration_ids(state.job)
    shape = (*ids.shape, stream.config.hidden_size)
    names = ("hidden", "reference") if state.recipe.quantization.asymmetric else ("hidden",)
    budget = state.recipe.run.activation_budget_bytes // len(names)
    flows = [Activations(state.job.work, shape, state.dtype, budget, name) for name in names]
    size = state.recipe.calibration.batch_size
    if index == 0:
        for flow in flows:
            flow.start()
        for first in range(0, len(ids), size):
            rows = slice(first, first + size)
            hidden = stream.embed(ids[rows])
            for flow in flows:
                flow.put(rows, hidden)
        for flow in flows:
            flow.advance()
    else:
        stream.embed(ids[:1])  # for the blocks' masks and positions
        for flow, key in zip(flows, CHECKSUMS, strict=False):
            flow.restore(index, state.job.finished_block(index - 1)[key])
    stream.release_embedding()
    return flows


def quantize_block(
    state: Run, stream: BlockStream, index: int, flows: list[Activations], advance: Callable[[], None]
) -> None:
    """Quantize one block, save its tensors, and move the calibration rows through it; those of the full-precision model
    (`flows[1:]`) before it is quantized."""
    settings, size = state.quantization, state.recipe.calibration.batch_size
    groups, prefix = state.block_groups[index], state.family.block(index)
    smoothed = state.recipe.transform.smoothing != "none" and bool(groups)
    with stream.block(index) as layer:
        statistics = {}
        exact = _move(flows[1], stream, index, layer, size) if len(flows) > 1 else None
        if flows and groups:
            batches = (hidden for _, hidden in flows[0].batches(size))
            statistics = blocks.collect(
                layer,
                groups,
                batches,
                lambda x: stream.run(index, layer, x),
                hessians=state.recipe.needs_hessians,
                diagonals=settings.weighs_inputs and not state.recipe.needs_hessians,
                channels=smoothed,
                reference=exact,
                weights=sensitivity.weights(state, index),
            )
        deque(exact or (), 0)  # what `collect` has not asked for: all of it in a block without groups
        scaled = transform_stage.smooth(state, layer, index, groups, statistics) if smoothed else []
        finished = blocks.quantize(layer, prefix, groups, statistics, settings, advance)
        tensors = {
            f"{entry.name}.{suffix}": tensor for entry in finished for suffix, tensor in entry.result.tensors.items()
        }
        replaced = {entry.name + ".weight" for entry in finished}
        for name, parameter in layer.state_dict().items():
            if prefix + name not in replaced:
                tensors[prefix + name] = parameter
        writer.save_atomic(state.job.block_file(index), tensors)
        original = state.inventory.tensors
        entry: dict = {"layers": [record.layer(done, original[done.name + ".weight"].nbytes) for done in finished]}
        if scaled:
            entry["smoothing"] = scaled
        if flows and index + 1 < len(stream):
            deque(_move(flows[0], stream, index, layer, size), 0)
            entry |= {key: flow.advance() for key, flow in zip(CHECKSUMS, flows, strict=False)}
        state.job.finish_block(index, entry)
        for flow in flows:
            flow.discard_previous()


def _move(
    flow: Activations, stream: BlockStream, index: int, layer: torch.nn.Module, size: int
) -> Iterator[torch.Tensor]:
    """Take the rows of `flow` through block `index`, a batch for each item asked for."""
    for rows, hidden in flow.batches(size):
        moved = stream.run(index, layer, hidden)
        flow.put(rows, moved)
        yield moved


def save_outside(state: Run) -> dict:
    """Copy the tensors no block owns (embeddings, norms, head, MTP modules), checked, in the bundle's dtype."""
    prefixes = tuple(state.family.block(i) for i in range(state.config.num_hidden_layers))
    weights, head = state.weights, f"{state.family.head}.weight"
    decisions, tensors = [], {}
    for name in [*weights.reader.keys(), *weights.added()]:
        if name.startswith(prefixes):
            continue
        if name == head and state.config.tie_word_embeddings and name in weights.reader:
            stored = weights.reader.get(name)
            if not torch.equal(stored, weights.reader.get(f"{state.family.embedding}.weight")):
                raise CompressError(
                    f"{weights.reader.file_of(name)}: '{name}' differs from the embedding although config.json says "
                    "tie_word_embeddings; correct the config or remove the tensor"
                )
            if not weights.untied:
                decisions.append({"what": f"{name} not written", "why": "tied to the embedding, which is saved once"})
                continue
        tensor = weights.get(name)
        tensors[name] = tensor.to(state.dtype) if tensor.is_floating_point() else tensor
    writer.save_atomic(state.job.path(OUTSIDE), tensors)
    weights.reader.close()
    return {"decisions": decisions, "sha256": sha256_file(state.job.path(OUTSIDE))}


def stage_bundle(state: Run, out: Path) -> Path:
    """Assemble shards, config and tokenizer beside `out`; the folder is renamed to `out` when all is done."""
    state.ui.stage("bundle")
    staging = preflight.staging_folder(out)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        parts = [state.job.path(OUTSIDE)]
        parts += stage.parts(state)
        writer.ensure_space(staging, sum(os.path.getsize(part) for part in parts))
        writer.assemble(parts, staging, max_shard_bytes=state.recipe.bundle.max_shard_bytes)
        record.write_config(state, staging)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return staging


def measure(state: Run, staging: Path) -> None:
    """Quality and acceptance of the quantized target, from the bundle's own files."""
    if state.job.stage("measure"):
        return
    state.ui.stage("measure")
    entry: dict = {}
    rows = state.job.result("baseline").get("quality")
    if rows:
        ids = load_ids(state.job.path(EVALUATION), rows["digest"])
        reference, candidate = (
            BlockStream(Weights(folder), config, torch.float32)
            for folder, config in ((state.source.folder, state.config), (staging, state.weights.config))
        )
        with state.ui.progress("quality", len(reference) + 1) as progress:
            entry["quality"] = quality.compare(reference, candidate, ids, progress=progress)
    model = engine.load(staging, dtype=state.dtype)
    entry["kernels"] = record.kernels(model)
    if state.recipe.proposer.kind != "none":
        entry |= propose.measure(state, model, staging)
    state.job.finish("measure", entry)
