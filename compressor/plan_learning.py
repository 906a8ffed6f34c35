"""Time and memory of what runs the whole model to learn from it: token weights, allocation and distillation."""

from collections import Counter
from collections.abc import Callable

from compressor.distill.loss import TOKENS
from compressor.formats import UNROUNDED
from compressor.plan_base import Job, Machine, Stage, make_stage

Forward = Callable[[Job, float, int, int], float]
"""Seconds of (job, FLOP/s, tokens, length) through all blocks."""


def _head_seconds(
    job: Job, machine: Machine, tokens: int, products: float, passes: float, flops: float | None = None
) -> float:
    """`products` with the head's table, at `flops` or else in bf16, and `passes` over float32 logits."""
    multiplying = products * 2 * tokens * job.vocabulary * job.hidden / (flops or machine.bf16_flops)
    return multiplying + passes * tokens * job.vocabulary * 4 / machine.memory_bytes_per_second


def sensitivity(job: Job, machine: Machine, forward: Forward) -> Stage:
    """One row at a time forward and back to the inputs alone: as much again. All activations of a row are kept."""
    length = job.recipe.calibration.length
    seconds = 2 * forward(job, machine.bf16_flops, job.calibration_tokens, length)
    seconds += _head_seconds(job, machine, job.calibration_tokens, 2, 6)
    memory = {
        "mapped model": job.source_bytes,
        "activations of a row": job.layers * length * (12 * job.hidden + 6 * job.intermediate) * job.itemsize,
        "logits": 3 * 4 * length * job.vocabulary,
        "token weights": len(job.groups) * job.calibration_tokens * 4,
    }
    return make_stage("sensitivity", seconds, memory)


def allocation(job: Job, machine: Machine, forward: Forward) -> Stage:
    """In float32: the original twice; for every group a Hessian and a rounding in each format; and for every KL that is
    measured half the blocks, on average, and the head. A product with the head for the original is shared by a block.

    Memory: hidden states of all that a block's groups make, one block, the head, the Hessians of a block.
    """
    recipe, spec = job.recipe, job.recipe.quantization.allocation
    assert spec is not None
    tokens, length = spec.rows * recipe.calibration.length, recipe.calibration.length
    candidates = [candidate for candidate in recipe.quantization.candidates if candidate is not None]
    rounded = sum(activations != UNROUNDED for _, activations in candidates)
    each = len(candidates) if spec.measure == "all" else min(rounded + 1, len(candidates))
    runs = each * len(job.groups)
    seconds = (2 + runs / 2) * forward(job, machine.float32_flops, tokens, length)
    seconds += _head_seconds(job, machine, tokens, runs + job.layers, 4 * runs, machine.float32_flops)
    hessians: dict[int, int] = {}
    for group in job.groups:
        hessians[group.block] = hessians.get(group.block, 0) + 4 * group.in_features**2
        seconds += 2 * (tokens + len(candidates) * group.out_features) * group.in_features**2 / machine.float32_flops
        seconds += len(candidates) * group.weights * machine.search_seconds_per_weight
    variants = each * max(Counter(group.block for group in job.groups).values(), default=0)
    batch_tokens = min(recipe.calibration.batch_size, spec.rows) * length
    memory = {
        "states of a block's groups": (3 + variants) * tokens * job.hidden * 4,
        "current block, or head": 4 * max(job.block_parameters, job.vocabulary * job.hidden),
        "largest group in float32": 4 * 4 * max((group.weights for group in job.groups), default=0),
        "Hessians": max(hessians.values(), default=0),
        "one batch": batch_tokens * (2 * job.hidden + 3 * job.intermediate) * 4,
        "logits": 6 * 4 * TOKENS * job.vocabulary,
    }
    return make_stage("allocation", seconds, memory)


def distillation(job: Job, machine: Machine, forward: Forward) -> Stage:
    """The original's states once; then a step is a forward, that forward again, and back to inputs and weights: four.

    Memory: the quantized model decoded in `source.dtype` and its codes, the original's last states on all rows, what
    enters each block for the rows of a step, one block's gradients.
    """
    spec, recipe = job.recipe.distillation, job.recipe
    assert spec is not None
    tokens = min(spec.rows, recipe.calibration.rows) * recipe.calibration.length
    seconds = forward(job, machine.bf16_flops, job.calibration_tokens, recipe.calibration.length)
    step = 4 * forward(job, machine.bf16_flops, tokens, recipe.calibration.length)
    step += _head_seconds(job, machine, tokens, 3, 10)
    step += 12 * job.blocks_parameters * 4 / machine.memory_bytes_per_second  # decoding, and the scales' gradients
    memory = {
        "decoded model": job.dense_bytes,
        "codes": job.blocks_parameters,
        "scales and their moments": 16
        * sum(group.weights // (group.scheme.fmt.group_size or group.in_features) for group in job.groups),
        "the original's states": job.calibration_tokens * job.hidden * job.itemsize,
        "states of a step": job.layers * tokens * job.hidden * job.itemsize,
        "one block": 3 * 4 * job.block_parameters + tokens * (12 * job.hidden + 6 * job.intermediate) * job.itemsize,
        "logits": 6 * 4 * TOKENS * job.vocabulary,
    }
    return make_stage("distill", seconds + spec.steps * step, memory)
