"""End-to-end distillation: calibration rows through the whole quantized model, its logits against the original's."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressor.checkpoint import writer
from compressor.distill.loss import Logits, kl, kl_gradient
from compressor.distill.student import Block, Rates
from compressor.errors import CompressError
from compressor.ui import UI

WARMUP = 10
"""Steps in which the rates rise; they then fall along a cosine to `FLOOR` of themselves."""
FLOOR = 0.02


@dataclass(frozen=True)
class Schedule:
    """How long and how fast: `steps` of the optimizer over `rows` rows each, `batch_size` of them run together, a
    checkpoint every `save_every`."""

    steps: int
    rows: int
    batch_size: int
    rates: Rates
    seed: int
    save_every: int

    def rates_at(self, step: int) -> Rates:
        """Of step 0, 1, …"""
        fall = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.rates.times(min(1.0, (step + 1) / WARMUP) * (FLOOR + (1 - FLOOR) * fall))

    def rows_at(self, step: int, count: int) -> list[int]:
        """Which of `count` rows a step sees: every epoch all of them, in an order that depends on seed and epoch."""
        places = range(step * self.rows, (step + 1) * self.rows)
        orders = {}
        for epoch in {place // count for place in places}:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            orders[epoch] = torch.randperm(count, generator=generator).tolist()
        return [orders[place // count][place % count] for place in places]


@dataclass
class Distiller:
    """A quantized model and the original's answers.

    embed: ids int64 [rows, length] → hidden states that enter block 0. teacher, student: see `loss.Logits`. ids int64
    [rows, length]; wanted [rows, length, H]: what leaves the original's last block for them.
    """

    blocks: Sequence[Block]
    embed: Callable[[Tensor], Tensor]
    teacher: Logits
    student: Logits
    ids: Tensor
    wanted: Tensor
    schedule: Schedule

    def loss(self, rows: Sequence[int]) -> float:
        """KL(original ‖ quantized) in nats a token on these rows."""
        total = 0.0
        for part in torch.tensor(rows).split(self.schedule.batch_size):
            hidden = self.embed(self.ids[part])
            for block in self.blocks:
                hidden = block.forward(hidden)
            total += kl(self.teacher, self.student, self.wanted[part], hidden) * len(part)
        return max(0.0, total / len(rows))  # rounding may leave less than nothing

    def step(self, rows: Sequence[int], rates: Rates) -> float:
        """Move every block's parameters; returns an estimate of the loss before."""
        chosen, size = torch.tensor(rows), self.schedule.batch_size
        entering = [self.embed(self.ids[chosen])]
        for block in self.blocks:
            entering.append(torch.cat([block.forward(part) for part in entering[-1].split(size)]))
        loss, gradient = kl_gradient(self.teacher, self.student, self.wanted[chosen], entering.pop())
        for block in reversed(self.blocks):
            gradient = block.backward(entering.pop(), gradient, size, rates)
        if not (math.isfinite(loss) and bool(gradient.isfinite().all())):
            raise CompressError("distillation: loss or gradient is not finite; lower distillation's rates")
        return loss

    def run(self, rows: Sequence[int], checkpoint: Path, ui: UI) -> list[float]:
        """All steps over the rows with these indices, from `checkpoint` on if it exists; the losses, step by step."""
        history = self._restore(checkpoint)
        schedule = self.schedule
        with ui.progress("distill", schedule.steps - len(history)) as progress:
            for step in range(len(history), schedule.steps):
                places = schedule.rows_at(step, len(rows))
                history.append(self.step([rows[place] for place in places], schedule.rates_at(step)))
                progress.advance()
                if (step + 1) % schedule.save_every == 0 and step + 1 < schedule.steps:
                    self._save(checkpoint, history)
        return history

    def _state(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": tensor for i, block in enumerate(self.blocks) for name, tensor in block.state()}

    def _save(self, path: Path, history: list[float]) -> None:
        writer.save_atomic(path, self._state(), {"history": json.dumps(history)})

    def _restore(self, path: Path) -> list[float]:
        if not path.exists():
            return []
        try:
            with safe_open(path, "pt") as file:
                history = json.loads(file.metadata()["history"])
                for name, tensor in self._state().items():
                    tensor.copy_(file.get_tensor(name))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError):
            raise CompressError(f"{path}: damaged; remove it, and training starts again") from None
        for block in self.blocks:
            block.resume(len(history))
        return history
