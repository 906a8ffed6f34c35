"""The training loop of every proposer: any module that gives a loss and a tally on documents. It resumes."""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from compressor.checkpoint import writer
from compressor.errors import CompressError, UsageError
from compressor.train import corpus
from compressor.train.corpus import Document
from compressor.train.tally import Tally
from compressor.ui import UI

LAST, BEST = "last.safetensors", "best.safetensors"
CLIP = 1.0
"""Largest norm of the gradient."""
BETAS = (0.9, 0.95)

States = Callable[[Sequence[int]], list[Tensor]]
"""Indices of documents → the target's states on each."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    - `steps`: of the optimizer. `rate`: the largest learning rate, after `warmup` steps; it then falls to `floor` of
      itself along half a cosine.
    - `batch_tokens`: of a batch, padding included; `accumulation`: batches a step.
    - `evaluate_every`: steps between two looks at the held-out documents; `patience`: of those looks, all below the
      best tau, after which training stops, None for never. `save_every`: steps between checkpoints.
    """

    steps: int
    rate: float
    warmup: int = 50
    floor: float = 0.02
    weight_decay: float = 0.0
    batch_tokens: int = 4096
    accumulation: int = 1
    evaluate_every: int = 200
    patience: int | None = None
    save_every: int = 200
    seed: int = 0

    def rate_at(self, step: int) -> float:
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.rate * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)


def train(
    task: nn.Module,
    documents: Sequence[Document],
    states: States,
    held_out: Sequence[int],
    schedule: Schedule,
    folder: Path,
    ui: UI,
    *,
    resume: bool = False,
) -> list[dict[str, Any]]:
    """Train the parameters of `task` that require a gradient and leave the best state, by held-out tau, in them.

    `task(documents, states)` gives the loss and a `Tally`. `folder` keeps the last and the best checkpoint. Returns the
    history: one entry a look at the held-out documents, {step, tokens, loss, conditional, tau, seconds}, where `tokens`
    counts those trained on so far, with repetitions; the first is from before the first step and has no loss (None).
    Called by every process of a launcher: each step takes `accumulation` batches of every one.

    Raises CompressError for a loss or a gradient that is not finite, OSError for a disk that is full; the last
    checkpoint then stands.
    """
    return _Training(task, documents, states, held_out, schedule, Path(folder), ui).run(resume)


class _Training:
    def __init__(
        self,
        task: nn.Module,
        documents: Sequence[Document],
        states: States,
        held_out: Sequence[int],
        schedule: Schedule,
        folder: Path,
        ui: UI,
    ) -> None:
        self.accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),
            mixed_precision="bf16",
            gradient_accumulation_steps=schedule.accumulation,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],  # embedding and output are frozen
        )
        self.documents, self.states, self.schedule, self.folder, self.ui = documents, states, schedule, folder, ui
        kept = set(held_out)
        self.held_out = sorted(kept)
        self.training = [index for index in range(len(documents)) if index not in kept]
        if not self.training or not self.held_out:
            raise UsageError(f"training: {len(documents)} documents, {len(kept)} held out; both parts need some")
        self.named = {name: value for name, value in task.named_parameters() if value.requires_grad}
        optimizer = torch.optim.AdamW(
            self.named.values(), lr=schedule.rate, betas=BETAS, weight_decay=schedule.weight_decay, fused=True
        )
        self.task, self.optimizer = self.accelerator.prepare(task, optimizer)
        self.last, self.best = folder / LAST, folder / BEST
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.history: list[dict[str, Any]] = []
        self.losses: list[float] = []
        """Of the steps since the last look."""

    def run(self, resume: bool) -> list[dict[str, Any]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        if resume and self.last.is_file():
            self._load(self.last)
        schedule = self.schedule
        started = time.monotonic() - self.seconds
        batches = self._batches()
        if self.step == 0:
            self._look()  # what is fine-tuned may have been best as it came
        with self.ui.progress("training", schedule.steps) as bar:
            bar.advance(self.step)
            while self.step < schedule.steps and not self._stale():
                self.losses.append(self._update([next(batches) for _ in range(schedule.accumulation)]))
                self.step += 1
                self.seconds = time.monotonic() - started
                bar.advance()
                if self.step % schedule.evaluate_every == 0 or self.step == schedule.steps:
                    self._look()
                if self.step % schedule.save_every == 0 or self.step == schedule.steps:
                    self._save(self.last)
        self.accelerator.wait_for_everyone()
        self._load(self.best, weights_only=True)
        self.accelerator.unwrap_model(self.task, keep_fp32_wrapper=False)  # it casts to bfloat16 otherwise, for good
        return self.history

    def _batches(self) -> Iterator[list[int]]:
        """This process's batches from the current step on, for ever: one order an epoch."""
        share, place = self.accelerator.num_processes, self.accelerator.process_index
        lengths = [len(self.documents[index].tokens) for index in self.training]
        skip, epoch = self.step * self.schedule.accumulation * share, 0
        while True:
            rng = random.Random(f"{self.schedule.seed}/{epoch}")
            found = list(corpus.batches(lengths, self.schedule.batch_tokens, rng))
            found += (found * share)[: -len(found) % share]
            for number, batch in enumerate(found):
                if skip:
                    skip -= 1
                elif number % share == place:
                    yield [self.training[i] for i in batch]
            epoch += 1

    def _update(self, batches: list[list[int]]) -> float:
        """One step of the optimizer; returns the mean loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.rate_at(self.step)
        total = 0.0
        for batch in batches:
            with self.accelerator.accumulate(self.task):
                loss, _ = self._apply(batch)
                value, tokens = self._over_processes(loss, batch)
                if not math.isfinite(value):
                    raise CompressError(
                        f"training: the loss is {value} at step {self.step + 1}; {self._usable()}; lower the rate"
                    )
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self._clip()
                self.optimizer.step()
                self.optimizer.zero_grad()
            total += value / len(batches)
            self.tokens += tokens
        return total

    def _over_processes(self, loss: Tensor, batch: Sequence[int]) -> tuple[float, int]:
        """The mean loss and the number of tokens of this batch and of those that other processes work on meanwhile."""
        own = [float(loss.detach()), float(sum(len(self.documents[i].tokens) for i in batch))]
        sums = self.accelerator.reduce(torch.tensor(own, dtype=torch.float64, device=loss.device), "sum").tolist()
        return sums[0] / self.accelerator.num_processes, int(sums[1])

    def _clip(self) -> None:
        norm = self.accelerator.clip_grad_norm_(self.named.values(), CLIP)
        if norm is not None and not math.isfinite(float(norm)):
            raise CompressError(
                f"training: the gradient is {float(norm)} at step {self.step + 1}; {self._usable()}; lower the rate"
            )

    def _apply(self, batch: Sequence[int]) -> tuple[Tensor, Tally]:
        with self.accelerator.autocast():
            return self.task([self.documents[i] for i in batch], self.states(batch))

    @torch.no_grad()
    def _look(self) -> None:
        """Add an entry to the history, and keep the weights if they are the best so far."""
        loss = sum(self.losses) / len(self.losses) if self.losses else None
        self.losses = []
        lengths = [len(self.documents[index].tokens) for index in self.held_out]
        tallies = [
            self._apply([self.held_out[i] for i in batch])[1]
            for batch in corpus.batches(lengths, self.schedule.batch_tokens, random.Random(0))
        ]
        tally = sum(tallies[1:], tallies[0])
        self.history.append(
            {
                "step": self.step,
                "tokens": self.tokens,
                "loss": loss,
                "conditional": tally.conditional,
                "tau": tally.tau,
                "seconds": round(self.seconds, 1),
            }
        )
        shown = " ".join(f"{rate:.3f}" for rate in tally.conditional)
        lost = "" if loss is None else f"loss {loss:.3f}, "
        self.ui.note(f"step {self.step}: {lost}held-out acceptance {shown}, tau {tally.tau:.3f}")
        if tally.tau == max(entry["tau"] for entry in self.history):
            self._save(self.best, weights_only=True)

    def _stale(self) -> bool:
        """Whether the last `patience` looks brought nothing."""
        patience = self.schedule.patience
        if patience is None or len(self.history) <= patience:
            return False
        taus = [entry["tau"] for entry in self.history]
        return max(taus[-patience:]) < max(taus[:-patience])

    def _usable(self) -> str:
        return f"{self.last} holds the last checkpoint" if self.last.is_file() else "there is no checkpoint yet"

    def _save(self, path: Path, *, weights_only: bool = False) -> None:
        """One safetensors file, replaced as a whole; what is no tensor is JSON in its metadata."""
        if not self.accelerator.is_main_process:
            return
        tensors = {f"weights.{name}": value.detach() for name, value in self.named.items()}
        if not weights_only:
            for name, value in self.named.items():
                for key, part in self.optimizer.state[value].items():
                    tensors[f"optimizer.{key}.{name}"] = part
        state = {
            "schedule": asdict(self.schedule),
            "processes": self.accelerator.num_processes,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "history": self.history,
            "losses": self.losses,
        }
        writer.save_atomic(path, tensors, {"state": json.dumps(state)})

    def _load(self, path: Path, *, weights_only: bool = False) -> None:
        try:
            with safe_open(path, "pt") as file:
                state = json.loads(file.metadata()["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise CompressError(f"{path}: not a usable checkpoint ({error}); remove {path.parent}") from None
        if not weights_only and state["schedule"] != asdict(self.schedule):
            raise UsageError(f"{path}: was trained with another schedule; train anew, or with the same one")
        before, now = state.get("processes", 1), self.accelerator.num_processes
        if not weights_only and before != now:
            raise UsageError(f"{path}: was trained by {before} processes, this run has {now}; start as many")
        with torch.no_grad():
            for name, value in self.named.items():
                value.copy_(tensors.pop(f"weights.{name}").to(value.device))
        if weights_only:
            return
        for full, tensor in tensors.items():
            _, key, name = full.split(".", 2)
            self.optimizer.state[self.named[name]][key] = tensor.to(self.named[name].device)
        self.step, self.tokens, self.history = state["step"], state["tokens"], state["history"]
        self.seconds, self.losses = state["seconds"], state["losses"]
