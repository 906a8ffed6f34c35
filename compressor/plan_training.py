"""Memory and time of training or healing a proposer, estimated as in plan_costs."""

from compressor.plan_base import Job, Machine, Stage, make_stage
from compressor.recipe_training import Answers, Heal, Training
from compressor.train.answers import ROWS
from compressor.train.loss import ROWS as LOSS_ROWS
from compressor.train.states import READ_TOKENS, SHARD_TOKENS, token_bytes

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


def stages(job: Job, machine: Machine, spec: Training | Heal) -> list[Stage]:
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
    return make_stage(name, seconds * slowness, memory)


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
    return make_stage(name, tokens / READ_PER_SECOND * slowness, memory)


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
    return make_stage(name, seconds, memory)


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
    """The target's states that `spec` keeps on disk."""
    if spec.answers.cache == "none":
        return 0
    fp8 = spec.answers.cache_format == "fp8"
    return round(_document_tokens(spec.answers) * token_bytes(job.hidden, _aux_count(job) + 1, fp8=fp8))
