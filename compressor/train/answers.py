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


class Writing:
    """`run` gives the answers, one a prompt and in their order, each with its stop token if it came to one.

    `advance` is told how many tokens are new. Every prompt has random numbers of its own, so that an answer does not
    depend on which others are written beside it, but for the rounding of sums. Raises CompressError for logits that
    are no distribution.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        law: Law,
        seed: int | str,
        stops: Collection[int],
        rows: int = ROWS,
        advance: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.prompts, self.max_new_tokens, self.law, self.seed = prompts, max_new_tokens, law, seed
        self.stops, self.advance = stops, advance
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # rows of one length waste no attention
        self.waiting = iter(order)
        capacity = max(map(len, prompts), default=0) + max_new_tokens
        rows = min(rows, len(prompts), max(1, CACHE_BYTES // LockStep.row_bytes(decoder, capacity)))
        self.table = LockStep(decoder, rows, capacity)
        self.answers: list[list[int]] = [[] for _ in prompts]
        self.occupant: list[int | None] = [None] * rows  # of each row of the table, the index of its prompt
        self.generators: dict[int, torch.Generator] = {}
        self.tokens = torch.zeros(rows, dtype=torch.long, device=decoder.device)

    def run(self) -> list[list[int]]:
        while self._admit() or self._busy():
            taken = self._busy()
            if taken:  # a first token may end every answer
                logits = self.table.step(self.tokens)
                self._take(taken, logits if len(taken) == len(self.occupant) else logits[taken])
        return self.answers

    def _busy(self) -> list[int]:
        return [row for row, prompt in enumerate(self.occupant) if prompt is not None]

    def _admit(self) -> bool:
        """Read prompts into free rows; whether any was."""
        free = [row for row, prompt in enumerate(self.occupant) if prompt is None]
        if len(free) < max(1, len(self.occupant) // 8):  # few prompts at a time are read slowly
            return False
        new = list(zip(free, self.waiting, strict=False))
        if not new:
            return False
        for row, prompt in new:
            self.occupant[row] = prompt
            own = random.Random(f"{self.seed}/{prompt}").getrandbits(63)
            self.generators[prompt] = torch.Generator().manual_seed(own)
        taken = [row for row, _ in new]
        self._take(taken, self.table.admit(taken, [self.prompts[prompt] for _, prompt in new]))
        return True

    def _take(self, taken: list[int], logits: Tensor) -> None:
        """Choose a token for each of the rows and note it; rows whose answer is complete become free."""
        busy = [prompt for prompt in (self.occupant[row] for row in taken) if prompt is not None]
        chosen = _choose(logits, self.law, [self.generators[prompt] for prompt in busy])
        self.tokens[taken] = chosen
        for row, prompt, token in zip(taken, busy, chosen.tolist(), strict=True):
            self.answers[prompt].append(token)
            if token in self.stops or len(self.answers[prompt]) == self.max_new_tokens:
                self.occupant[row] = None
                self.table.lengths[row] = 0
                del self.generators[prompt]
        self.advance(len(taken))


def _choose(logits: Tensor, law: Law, generators: list[torch.Generator]) -> Tensor:
    best = logits.max(-1)  # of bfloat16, a quarter of argmax's time; which of several largest is the engine's choice
    if not best.values.isfinite().all():  # max passes NaN on
        raise CompressError("self-generation: the model's logits hold NaN or infinity; check the checkpoint")
    if law.greedy:
        return best.indices
    uniform = torch.stack([torch.rand((), generator=generator, dtype=torch.float64) for generator in generators])
    return draw(law.probs(logits).cpu(), uniform).to(logits.device)
