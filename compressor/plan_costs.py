"""Memory and time of a job, estimated: formulas over sizes, with throughputs measured on this machine.

All of it is derived, none of it measured on the job itself; expect a factor of two either way in time.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compressor.calibration.selfgen import BATCH, MAX_NEW_TOKENS, USUAL_NEW_TOKENS
from compressor.formats import Format
from compressor.quantize import gptq
from compressor.recipe import Recipe
from compressor.recipe_training import Answers, Heal, Training
from compressor.train.answers import ROWS
from compressor.train.loss import ROWS as LOSS_ROWS
from compressor.train.states import READ_TOKENS, SHARD_TOKENS

PROCESS_BYTES = 450_000_000
"""Resident set of Python with torch and transformers loaded and a tokenizer open, before any weight."""
MEMORY_SLACK = 1.25
"""What the C allocator keeps beyond what is in use: observed resident sets over the sums below."""
PROMPT_TOKENS = 60
"""Tokens of a self-generation prompt with its chat template, on average."""
LAYER_STEP_SECONDS = 0.4e-3
"""Interpreter and dispatch time of one decoder layer for one forward call on a CPU, beside its arithmetic."""
EVALUATION_BATCH = 4
"""Rows that the quality measurement runs together."""
REFERENCE_FLOPS = 5.5e11
"""bf16 FLOP/s, as `Machine` measures them, of the two cores where the three speeds below were measured."""
REFERENCE_PARAMETERS = 135e6
ANSWERED_PER_SECOND, READ_PER_SECOND = 700, 2000
"""Tokens of a training's answers written, and tokens read for their states, by a target of `REFERENCE_PARAMETERS`."""
PASS_SECONDS = 2.2 / 3 / (4096 * 10e6)
"""Forward and backward of one token through one weight: 3 passes of 4096 tokens, 10 million weights, took 2.2 s."""
TRAINING_PROMPT_TOKENS, ANSWERED_SHARE = 75, 0.9
"""Tokens of a training's prompt on average, and the share of `max_new_tokens` that an answer takes."""
SELF_WRITTEN_TOKENS = 64
"""Tokens written for each prompt that the target writes itself, those left out included."""


@dataclass(frozen=True)
class Group:
    """Linears of one block that read the same input; shapes are [out, in] each."""

    block: int
    prefix: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]

    @property
    def in_features(self) -> int:
        return self.shapes[0][1]

    @property
    def out_features(self) -> int:
        return sum(out for out, _ in self.shapes)


@dataclass(frozen=True)
class Job:
    """The sizes memory and time follow from. Parameters are counts; itemsize is the bytes of an unquantized one."""

    recipe: Recipe
    groups: list[Group]
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    kv_width: int
    parameters: int
    block_parameters: int
    blocks_parameters: int
    source_bytes: int
    bundle_bytes: int
    itemsize: int
    calibration_tokens: int

    @property
    def activation_bytes(self) -> int:
        return self.calibration_tokens * self.hidden * self.itemsize

    @property
    def dense_bytes(self) -> int:
        return self.parameters * self.itemsize


@dataclass(frozen=True)
class Machine:
    """Measured throughputs: FLOP/s of bf16 and float32 matrix products, bytes/s of reading memory, seconds of one GPTQ
    column (fixed part and part per output), seconds of the scale search per weight."""

    bf16_flops: float
    float32_flops: float
    memory_bytes_per_second: float
    column_seconds: float
    column_seconds_per_output: float
    search_seconds_per_weight: float


@dataclass(frozen=True)
class Stage:
    """One stage of the job. memory: what is in use at its peak, bytes; memory_bytes: their sum with `MEMORY_SLACK`.

    A mapped model counts where a step reads all of it. Pages that a block-by-block stage has passed also show in the
    resident set, but the system takes them back when it needs them.
    """

    name: str
    seconds: float
    memory: dict[str, int]
    memory_bytes: int


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
        found += _training(job, machine, recipe.proposer.training)
    if recipe.proposer.kind != "none":
        found.append(_acceptance("baseline acceptance", job, machine, job.source_bytes, mapped=True))
    found.append(_quantization(job, machine))
    if quality.kind != "none":
        found.append(_quality(job, machine))
    if recipe.proposer.kind != "none":
        packed = recipe.quantization.format.startswith("int4")  # what CPUs have a packed kernel for
        weight_bytes = job.bundle_bytes if packed else job.dense_bytes
        found.append(_acceptance("quantized acceptance", job, machine, weight_bytes, mapped=False))
    if recipe.proposer.heal is not None:
        found += _training(job, machine, recipe.proposer.heal)
        found.append(_acceptance("healed acceptance", job, machine, weight_bytes, mapped=False))
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
    return _stage(name, batches * MAX_NEW_TOKENS * step, memory)


def _acceptance(name: str, job: Job, machine: Machine, weight_bytes: int, *, mapped: bool) -> Stage:
    """One prompt at a time; a cycle checks k + 1 positions, and none of the drafts need be accepted."""
    spec, k = job.recipe.measure.acceptance, job.recipe.proposer.num_speculative_tokens
    cycles = spec.prompts * spec.max_new_tokens
    memory = {
        "mapped model" if mapped else "quantized model": weight_bytes,
        "key-value cache": job.layers * job.kv_width * (spec.max_new_tokens + 512) * job.itemsize,
        "logits": 3 * (k + 1) * job.vocabulary * 8,
    }
    return _stage(name, cycles * _step_seconds(job, machine, k + 1, weight_bytes), memory)


def _quantization(job: Job, machine: Machine) -> Stage:
    """Per block: two forwards, the Hessians, and for every input a factorization and a sweep over its columns.

    Memory: the current block, its largest group in float32 four times over (weight, result, errors, decoded), one
    Hessian [in, in] float32 per distinct input of the block plus four of the largest for its factorization, the
    calibration rows in the source's dtype up to the budget, and one batch's activations.
    """
    recipe = job.recipe
    gptq_used = recipe.quantization.method == "gptq"
    seconds = 0.0
    hessians: dict[int, int] = {}
    for group in job.groups:
        width, outputs = group.in_features, group.out_features
        seconds += width * outputs * machine.search_seconds_per_weight
        if recipe.quantization.needs_hessians:
            hessians[group.block] = hessians.get(group.block, 0) + 4 * width**2
            seconds += 2 * job.calibration_tokens * width**2 / machine.bf16_flops
        if not gptq_used:
            continue
        seconds += (4 / 3 * width**3 + outputs * width**2) / machine.float32_flops
        seconds += width * (machine.column_seconds + outputs * machine.column_seconds_per_output)
    spec = recipe.calibration
    if job.calibration_tokens:
        seconds += 2 * _forward_seconds(job, machine.bf16_flops, job.calibration_tokens, spec.length)
        seconds += 2 * job.layers * spec.rows / spec.batch_size * LAYER_STEP_SECONDS
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
    return _stage("quantize", seconds, memory)


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
    return _stage("quality", seconds, memory)


def _training(job: Job, machine: Machine, spec: Training | Heal) -> list[Stage]:
    """The target answers prompts and its states on them are read; then a head learns them, or a head is healed."""
    suffix = " (healing)" if isinstance(spec, Heal) else ""
    slower = REFERENCE_FLOPS / machine.bf16_flops
    target = slower * job.parameters / REFERENCE_PARAMETERS
    return [
        _answers("prompts and answers" + suffix, job, spec.answers, target),
        _states("hidden states" + suffix, job, spec, target),
        _fit("training" + suffix, job, spec, slower, target),
    ]


def _answers(name: str, job: Job, spec: Answers, slowness: float) -> Stage:
    """Prompts are read, answers written `ROWS` at a time. Memory: the rectangular cache, the largest twofold prompt."""
    written = spec.count * (ANSWERED_SHARE * spec.max_new_tokens + spec.self_written * SELF_WRITTEN_TOKENS)
    seconds = written / ANSWERED_PER_SECOND + spec.count * TRAINING_PROMPT_TOKENS / READ_PER_SECOND
    rows = min(ROWS, spec.count)
    memory = {
        "mapped model": job.source_bytes,
        "key-value cache": job.layers
        * job.kv_width
        * rows
        * (2 * TRAINING_PROMPT_TOKENS + spec.max_new_tokens)
        * job.itemsize,
        "logits": 3 * rows * job.vocabulary * 4,
    }
    return _stage(name, seconds * slowness, memory)


def _states(name: str, job: Job, spec: Training | Heal, slowness: float) -> Stage:
    """One pass over the documents; without a cache only over the held-out ones, the others are read as they train.

    Memory: a shard of states twice over while it is put together.
    """
    cached = spec.answers.cache == "disk"
    tokens = _document_tokens(spec.answers) * (1 if cached else spec.answers.held_out / spec.answers.count)
    shard = min(tokens, SHARD_TOKENS) if cached else READ_TOKENS
    memory = {
        "mapped model": job.source_bytes,
        "states": int(2 * shard * _state_width(job) * 2),
        "one batch": READ_TOKENS * (2 * job.hidden + 3 * job.intermediate) * 4,
    }
    return _stage(name, tokens / READ_PER_SECOND * slowness, memory)


def _fit(name: str, job: Job, spec: Training | Heal, slower: float, slowness: float) -> Stage:
    """The optimizer's steps, and a look at the held-out documents every so often: forward, a third of a step's work.

    Memory: weights, gradients, Adam's two moments and the best weights in float32; a batch's states; the loss's logits.
    """
    weights, passes, outputs = _trained(job, spec)
    plan = spec.optimization
    batch = plan.batch_tokens * plan.accumulation
    looks = plan.steps // plan.evaluate_every + 1
    judged = looks * spec.answers.held_out * _document_tokens(spec.answers) / spec.answers.count
    seconds = (plan.steps * batch + judged / 3) * passes * weights * PASS_SECONDS * slower
    if spec.answers.cache == "none":
        seconds += (plan.steps * batch + judged) / READ_PER_SECOND * slowness
    memory = {
        "mapped model": job.source_bytes,
        "what is trained": 5 * 4 * weights,
        "states": plan.batch_tokens * _state_width(job) * (2 + 4),
        "passes": passes * plan.batch_tokens * (8 * job.hidden + 4 * job.intermediate) * 4,
        "logits": 4 * 4 * LOSS_ROWS * outputs,
    }
    return _stage(name, seconds, memory)


def _trained(job: Job, spec: Training | Heal) -> tuple[int, int, int]:
    """(weights, passes over them a step, outputs) of what is trained; the head that is healed is taken for usual."""
    kind = job.recipe.proposer.kind
    form = job.recipe.proposer.training or Training()
    hidden, outputs = job.hidden, min(form.draft_vocab_size, job.vocabulary)
    if kind == "medusa":
        return form.heads * hidden * (hidden + outputs), 1, outputs
    if kind == "draft":
        blocks = job.blocks_parameters * min(form.layers, job.layers) // job.layers
        return blocks + job.vocabulary * hidden, 1, job.vocabulary
    attention = hidden * (3 * hidden + 2 * job.kv_width)  # q, k and v read token and state side by side
    block = attention + 3 * hidden * job.intermediate
    return _aux_count(job) * hidden**2 + block + hidden * outputs, spec.unroll, outputs


def _aux_count(job: Job) -> int:
    """States beside the last that an eagle3 head reads; of a finished head, not looked at, the usual 3."""
    proposer = job.recipe.proposer
    if proposer.kind != "eagle3":
        return 0
    aux = proposer.training.aux if proposer.training is not None else None
    return 3 if aux is None else len(aux)


def _state_width(job: Job) -> int:
    return (_aux_count(job) + 1) * job.hidden


def _document_tokens(spec: Answers) -> float:
    return spec.count * (TRAINING_PROMPT_TOKENS + ANSWERED_SHARE * spec.max_new_tokens)


def state_bytes(job: Job, spec: Training | Heal) -> int:
    """The target's states that `spec` keeps on disk in bfloat16."""
    return round(_document_tokens(spec.answers) * _state_width(job) * 2) if spec.answers.cache == "disk" else 0


def _stage(name: str, seconds: float, memory: dict[str, int]) -> Stage:
    memory = {"process": PROCESS_BYTES, **memory}
    return Stage(name, seconds, memory, int(MEMORY_SLACK * sum(memory.values())))


def disk_bytes(job: Job) -> int:
    """Free space needed beside the source: the work folder's blocks, the bundle, and activations between two blocks;
    and the states of training or of healing, whichever are more, for each are removed when their head is there.

    Without the states at least the twofold source that a run insists on before it starts.
    """
    proposer = job.recipe.proposer
    states = [state_bytes(job, spec) for spec in (proposer.training, proposer.heal) if spec is not None]
    return max(2 * job.source_bytes, 2 * job.bundle_bytes + 2 * job.activation_bytes) + max(states, default=0)
