"""Memory and time of a job, estimated: formulas over sizes, with throughputs measured on this machine.

All of it is derived, none of it measured on the job itself; expect a factor of two either way in time.
"""

import time
from collections.abc import Callable

import torch

from compressor import plan_learning, plan_training
from compressor.calibration.selfgen import BATCH, MAX_NEW_TOKENS, USUAL_NEW_TOKENS
from compressor.formats import Format
from compressor.plan_base import Job, Machine, Stage, make_stage
from compressor.quantize import gptq

PROMPT_TOKENS = 60
"""Tokens of a self-generation prompt with its chat template, on average."""
LAYER_STEP_SECONDS = 0.4e-3
"""Interpreter and dispatch time of one decoder layer for one forward call on a CPU, beside its arithmetic."""
EVALUATION_BATCH = 4
"""Rows that the quality measurement runs together."""


def measure_machine(fmt: Format, search: str, threads: int | None = None) -> Machine:
    """Time small products, a read, a GPTQ sweep and a scale search: about 0.3 s altogether.

    Products and reads use `threads` (default: torch's choice). Sweep and search use one: their operations are too small
    to gain much from more, and on a busy machine waiting for the others would be all that is measured.
    """
    usual = torch.get_num_threads()
    buffer = torch.ones(8_000_000)
    weight = torch.linspace(-1, 1, 128 * 1024).view(128, 1024)
    try:
        torch.set_num_threads(threads or usual)
        bf16_flops, float32_flops = _product_flops(torch.bfloat16), _product_flops(torch.float32)
        bytes_per_second = buffer.nbytes / _best_of(lambda: buffer.sum())
        torch.set_num_threads(1)
        few, many = _column_seconds(fmt, 64), _column_seconds(fmt, 1024)
        search_seconds = _best_of(lambda: fmt.grid(weight, search=search)) / weight.numel()
    finally:
        torch.set_num_threads(usual)
    per_output = max((many - few) / (1024 - 64), 0.0)
    return Machine(
        bf16_flops=bf16_flops,
        float32_flops=float32_flops,
        memory_bytes_per_second=bytes_per_second,
        column_seconds=max(few - 64 * per_output, 0.0),
        column_seconds_per_output=per_output,
        search_seconds_per_weight=search_seconds,
    )


def _product_flops(dtype: torch.dtype, size: int = 768) -> float:
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best_of(lambda: a @ b)


def _column_seconds(fmt: Format, outputs: int, columns: int = 128) -> float:
    """GPTQ of [outputs, columns], a column; `columns` is a multiple of every group."""
    weight = torch.linspace(-1, 1, outputs * columns).view(outputs, columns)
    return _best_of(lambda: gptq(weight, torch.eye(columns), fmt, search="none")) / columns


def _best_of(work: Callable[[], object], repeats: int = 2) -> float:
    """Shortest of a few runs, seconds, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


def _step_seconds(job: Job, machine: Machine, rows: int, weight_bytes: int) -> float:
    """One decoding step of `rows` sequences: dispatch, plus reading the weights or multiplying, whichever is longer."""
    reading = weight_bytes / machine.memory_bytes_per_second
    multiplying = 2 * job.parameters * rows / machine.bf16_flops
    return job.layers * LAYER_STEP_SECONDS + max(reading, multiplying)


def _forward_seconds(job: Job, flops: float, tokens: int, length: int) -> float:
    """`tokens` through all blocks in rows of `length`: 2 FLOP a weight, and attention's two products."""
    attention = 4 * job.layers * job.hidden * tokens * length
    return (2 * job.blocks_parameters * tokens + attention) / flops


def stages(job: Job, machine: Machine) -> list[Stage]:
    """Every stage the recipe asks for, in order."""
    recipe = job.recipe
    found = []
    if job.calibration_tokens and recipe.calibration.kind == "self":
        found.append(_generation("calibration rows", job, machine, job.calibration_tokens))
    quality = recipe.measure.quality
    if quality.kind == "self":
        found.append(_generation("evaluation rows", job, machine, quality.rows * quality.length))
    if recipe.proposer.training is not None:
        found += plan_training.stages(job, machine, recipe.proposer.training)
    if recipe.quantization.guided:
        found.append(plan_learning.sensitivity(job, machine, _forward_seconds))
    if recipe.proposer.kind != "none":
        found.append(_acceptance("baseline acceptance", job, machine, job.source_bytes, mapped=True))
    if recipe.quantization.allocation is not None:
        found.append(plan_learning.allocation(job, machine, _forward_seconds))
    found.append(_quantization(job, machine))
    if recipe.distillation is not None:
        found.append(plan_learning.distillation(job, machine, _forward_seconds))
    if quality.kind != "none":
        found.append(_quality(job, machine))
    if recipe.proposer.kind != "none":
        packed = all(group.scheme.fmt.name.startswith("int") for group in job.groups)  # CPUs have a kernel for these
        weight_bytes = job.bundle_bytes if packed else job.dense_bytes
        found.append(_acceptance("quantized acceptance", job, machine, weight_bytes, mapped=False))
    if recipe.proposer.heal is not None:
        found += plan_training.stages(job, machine, recipe.proposer.heal)
        found.append(_acceptance("healed acceptance", job, machine, weight_bytes, mapped=False))
    if recipe.proposer.precision != "bf16":
        found.append(_acceptance("acceptance of the rounded head", job, machine, weight_bytes, mapped=False))
    return found


def _generation(name: str, job: Job, machine: Machine, tokens: int) -> Stage:
    """The target, mapped whole, answers prompts in batches until there are `tokens`; each batch runs to its longest.

    Memory: the cache of keys and values twice, for it grows by concatenation. Time adds reading the cache, half full on
    average, and eight passes over the logits for the draw.
    """
    answers = -(-tokens // (PROMPT_TOKENS + USUAL_NEW_TOKENS))
    batches = -(-answers // BATCH)
    batch = -(-answers // batches)
    cache = job.layers * job.kv_width * batch * (PROMPT_TOKENS + MAX_NEW_TOKENS) * job.itemsize
    logits = batch * job.vocabulary * 4
    step = _step_seconds(job, machine, batch, job.source_bytes)
    step += (cache / 2 + 8 * logits) / machine.memory_bytes_per_second
    memory = {"mapped model": job.source_bytes, "key-value cache": 2 * cache, "logits": 6 * logits}
    return make_stage(name, batches * MAX_NEW_TOKENS * step, memory)


def _acceptance(name: str, job: Job, machine: Machine, weight_bytes: int, *, mapped: bool) -> Stage:
    """One prompt at a time; a cycle checks k + 1 positions, and none of the drafts need be accepted."""
    spec, k = job.recipe.measure.acceptance, job.recipe.proposer.num_speculative_tokens
    cycles = spec.prompts * spec.max_new_tokens
    memory = {
        "mapped model" if mapped else "quantized model": weight_bytes,
        "key-value cache": job.layers * job.kv_width * (spec.max_new_tokens + 512) * job.itemsize,
        "logits": 3 * (k + 1) * job.vocabulary * 8,
    }
    return make_stage(name, cycles * _step_seconds(job, machine, k + 1, weight_bytes), memory)


def _quantization(job: Job, machine: Machine) -> Stage:
    """Per block: two forwards, the Hessians, and for every input a factorization and a sweep over its columns.
    Asymmetric calibration adds a forward and a cross term beside each Hessian, refitted scales a sweep. Without
    Hessians a scale search squares and sums the inputs: three passes over them in float32.

    Memory: the current block, its largest group in float32 four times over (weight, result, errors, decoded), one
    Hessian [in, in] float32 per distinct input of the block plus four of the largest for its factorization, the
    calibration rows in the source's dtype up to the budget, and one batch's activations.
    """
    recipe = job.recipe
    gptq_used = recipe.quantization.method == "gptq"
    streams = 2 if recipe.quantization.asymmetric else 1
    sweeps = 2 if recipe.quantization.refit else 1
    seconds = 0.0
    hessians: dict[int, int] = {}
    for group in job.groups:
        width, outputs = group.in_features, group.out_features
        seconds += width * outputs * machine.search_seconds_per_weight
        if recipe.needs_hessians:
            hessians[group.block] = hessians.get(group.block, 0) + streams * 4 * width**2
            seconds += streams * 2 * job.calibration_tokens * width**2 / machine.bf16_flops
        elif recipe.quantization.weighs_inputs:
            seconds += 3 * 4 * job.calibration_tokens * width / machine.memory_bytes_per_second
        if not gptq_used:
            continue
        seconds += (4 / 3 * width**3 + outputs * width**2) / machine.float32_flops
        seconds += sweeps * width * (machine.column_seconds + outputs * machine.column_seconds_per_output)
    spec = recipe.calibration
    if job.calibration_tokens:
        forwards = 1 + streams
        seconds += forwards * _forward_seconds(job, machine.bf16_flops, job.calibration_tokens, spec.length)
        seconds += forwards * job.layers * spec.rows / spec.batch_size * LAYER_STEP_SECONDS
    batch_tokens = min(spec.batch_size, spec.rows) * spec.length if job.calibration_tokens else 0
    largest = max((group.in_features * group.out_features for group in job.groups), default=0)
    widest = max((group.in_features for group in job.groups), default=0)
    memory = {
        "current block": job.block_parameters * job.itemsize,
        "largest group in float32": 4 * 4 * largest,
        "Hessians": max(hessians.values(), default=0) + (4 * 4 * widest**2 if gptq_used else 0),
        "calibration activations": min(job.activation_bytes, recipe.run.activation_budget_bytes),
        "one batch": batch_tokens * (2 * job.hidden + 3 * job.intermediate) * 4,
    }
    return make_stage("quantize", seconds, memory)


def _quality(job: Job, machine: Machine) -> Stage:
    """Reference and quantized model side by side in float32, one block of each at a time, then both heads."""
    spec = job.recipe.measure.quality
    tokens = spec.rows * spec.length
    head = job.vocabulary * job.hidden
    seconds = 2 * _forward_seconds(job, machine.float32_flops, tokens, spec.length)
    seconds += 2 * 2 * tokens * head / machine.float32_flops
    seconds += 8 * tokens * job.vocabulary * 4 / machine.memory_bytes_per_second
    memory = {
        "two heads, or two blocks": 2 * 4 * max(head, job.block_parameters),
        "hidden states": 2 * 4 * tokens * job.hidden,
        "one batch": EVALUATION_BATCH * spec.length * (2 * job.hidden + 3 * job.intermediate) * 4,
        "logits": 6 * 4 * min(spec.length, 2048) * job.vocabulary,
    }
    return make_stage("quality", seconds, memory)


def disk_bytes(job: Job) -> int:
    """Free space needed beside the source: the work folder's blocks (distilled ones too), the bundle, and activations
    between two blocks; and the states of training or of healing, whichever are more, for each are removed when their
    head is there.

    Without the states at least the twofold source that a run insists on before it starts.
    """
    proposer = job.recipe.proposer
    states = [plan_training.state_bytes(job, spec) for spec in (proposer.training, proposer.heal) if spec is not None]
    trained = job.bundle_bytes if job.recipe.distillation is not None else 0
    working = 2 * job.bundle_bytes + trained + 2 * job.activation_bytes
    return max(2 * job.source_bytes, working) + max(states, default=0)
