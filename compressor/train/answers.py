"""What the target answers to prompts: the text that a proposer learns to foresee."""

import random
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.decode.lockstep import LockStep
from compressor.decode.sampling import draw
from compressor.errors import CompressError

CACHE_BYTES = 8_000_000_000
"""What the keys and values of all rows take at most: of larger models fewer texts are written at a time."""
ROWS = 192
"""Texts written at a time: more are hardly faster on a CPU, and the cache grows."""


def write(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    law: Law,
    seed: int | str,
    stops: Collection[int],
    rows: int = ROWS,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[list[int]]:
    """The answers, one a prompt and in their order, each with its stop token if it came to one.

    `advance` is told how many tokens are new. Every prompt has random numbers of its own, so that an answer does not
    depend on which others are written beside it, but for the rounding of sums. Raises CompressError for logits that
    are no distribution.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # rows of one length waste no attention
    waiting = iter(order)
    capacity = max(map(len, prompts), default=0) + max_new_tokens
    rows = min(rows, len(prompts), max(1, CACHE_BYTES // LockStep.row_bytes(decoder, capacity)))
    table = LockStep(decoder, rows, capacity)
    answers: list[list[int]] = [[] for _ in prompts]
    occupant: list[int | None] = [None] * rows
    generators: dict[int, torch.Generator] = {}
    tokens = torch.zeros(rows, dtype=torch.long, device=decoder.device)

    def admit() -> bool:
        """Read prompts into free rows; whether any was."""
        free = [row for row in range(rows) if occupant[row] is None]
        if len(free) < max(1, rows // 8):  # few prompts at a time are read slowly
            return False
        new = [(row, prompt) for row, prompt in zip(free, waiting, strict=False)]
        if not new:
            return False
        for row, prompt in new:
            occupant[row] = prompt
            generators[prompt] = torch.Generator().manual_seed(random.Random(f"{seed}/{prompt}").getrandbits(63))
        taken = [row for row, _ in new]
        take(taken, table.admit(taken, [prompts[prompt] for _, prompt in new]))
        return True

    def take(taken: list[int], logits: Tensor) -> None:
        """Choose a token for each of the rows and note it; rows whose answer is complete become free."""
        busy = [occupant[row] for row in taken]
        chosen = _choose(logits, law, [generators[prompt] for prompt in busy if prompt is not None])
        tokens[taken] = chosen
        for row, prompt, token in zip(taken, busy, chosen.tolist(), strict=True):
            assert prompt is not None
            answers[prompt].append(token)
            if token in stops or len(answers[prompt]) == max_new_tokens:
                occupant[row] = None
                table.lengths[row] = 0
                del generators[prompt]
        advance(len(taken))

    while admit() or any(prompt is not None for prompt in occupant):
        taken = [row for row in range(rows) if occupant[row] is not None]
        if taken:  # a first token may end every answer
            logits = table.step(tokens)
            take(taken, logits if len(taken) == rows else logits[taken])
    return answers


def _choose(logits: Tensor, law: Law, generators: list[torch.Generator]) -> Tensor:
    best = logits.max(-1)  # of bfloat16, a quarter of argmax's time; which of several largest is the engine's choice
    if not best.values.isfinite().all():  # max passes NaN on
        raise CompressError("self-generation: the model's logits hold NaN or infinity; check the checkpoint")
    if law.greedy:
        return best.indices
    uniform = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
    return draw(law.probs(logits).cpu(), uniform).to(logits.device)
