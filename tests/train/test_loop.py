"""The training loop: resumed runs are the same runs, and what goes wrong leaves a usable checkpoint."""

import errno
import math
from itertools import chain

import pytest
import torch
from torch import nn

from compressor.checkpoint import writer
from compressor.errors import CompressError, UsageError
from compressor.train import loop
from compressor.train.corpus import Document
from compressor.train.loop import Schedule, train
from compressor.train.tally import Tally
from compressor.ui import NullUI

DOCUMENTS = [Document([index % 7, *range(index % 5 + 3)], 1) for index in range(40)]
HELD_OUT = range(0, 40, 8)
SCHEDULE = Schedule(steps=12, rate=0.05, warmup=2, batch_tokens=24, evaluate_every=3, save_every=3)


class Toy(nn.Module):
    """A line through the documents' lengths. `fail_at`: the call of a training step that raises or gives NaN."""

    def __init__(self, fail_at=None, error=None):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(1, 1)
        self.calls, self.fail_at, self.error, self.seen = 0, fail_at, error, []

    def forward(self, documents, states):
        x = torch.tensor([[float(len(document.tokens))] for document in documents])
        loss = (self.line(x) - 2 * x).square().mean()
        if torch.is_grad_enabled():
            self.calls += 1
            self.seen.append([document.tokens[0] for document in documents])
            if self.calls == self.fail_at:
                if self.error is not None:
                    raise self.error
                loss = loss * math.nan
        right = torch.tensor([1 / (1 + float(loss.detach()))], dtype=torch.float64)
        return loss, Tally(right, torch.ones(1, dtype=torch.float64))


def run(task, folder, schedule=SCHEDULE, **options):
    return train(task, DOCUMENTS, lambda indices: [], HELD_OUT, schedule, folder, NullUI(), **options)


def without_time(history):
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in history]


def test_training_lowers_the_loss_and_counts_its_tokens(tmp_path):
    history = run(Toy(), tmp_path)
    assert [entry["step"] for entry in history] == [0, 3, 6, 9, 12]
    assert history[0]["loss"] is None and history[-1]["loss"] < history[1]["loss"] / 2
    assert [entry["tokens"] for entry in history] == sorted(entry["tokens"] for entry in history)


@pytest.mark.parametrize("stop_at", [1, 5, 8])
def test_a_run_that_was_stopped_goes_on_to_the_same_end(tmp_path, stop_at):
    whole = Toy()
    expected = run(whole, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(Toy(stop_at, KeyboardInterrupt()), tmp_path / "cut")
    resumed = Toy()
    history = run(resumed, tmp_path / "cut", resume=True)
    assert without_time(history) == without_time(expected)
    assert torch.equal(resumed.line.weight, whole.line.weight)


def test_a_run_stopped_between_a_look_and_a_checkpoint_tells_the_same_losses(tmp_path):
    uneven = Schedule(**{**vars(SCHEDULE), "evaluate_every": 3, "save_every": 2})
    expected = run(Toy(), tmp_path / "whole", uneven)
    with pytest.raises(KeyboardInterrupt):
        run(Toy(6, KeyboardInterrupt()), tmp_path / "cut", uneven)
    assert without_time(run(Toy(), tmp_path / "cut", uneven, resume=True)) == without_time(expected)


def test_a_gradient_that_is_not_a_number_stops_before_the_weights_are_touched(tmp_path):
    class Sharp(Toy):
        """Its loss is finite at a point where its slope is not."""

        def forward(self, documents, states):
            loss, tally = super().forward(documents, states)
            if torch.is_grad_enabled() and self.calls == 5:
                loss = loss + (self.line.weight - self.line.weight.detach()).square().sum().sqrt()
            return loss, tally

    task = Sharp()
    with pytest.raises(CompressError, match="the gradient is nan at step 5"):
        run(task, tmp_path)
    assert task.line.weight.isfinite().all()


def test_what_was_best_before_training_is_kept(tmp_path):
    class Worse(Toy):
        def forward(self, documents, states):
            loss, _ = super().forward(documents, states)
            return loss, Tally(torch.tensor([1.0 / (1 + self.calls)]).double(), torch.ones(1).double())

    task = Worse()
    before = task.line.weight.clone()
    run(task, tmp_path)
    assert torch.equal(task.line.weight, before)


def test_without_resume_the_checkpoint_is_not_taken_up(tmp_path):
    run(Toy(), tmp_path)
    again = Toy()
    run(again, tmp_path)
    assert again.calls == SCHEDULE.steps


def test_another_schedule_is_not_resumed(tmp_path):
    run(Toy(), tmp_path)
    with pytest.raises(UsageError, match="another schedule"):
        run(Toy(), tmp_path, Schedule(**{**vars(SCHEDULE), "rate": 0.01}), resume=True)


def test_a_loss_that_is_not_a_number_stops_and_names_the_checkpoint(tmp_path):
    with pytest.raises(CompressError, match=r"loss is nan at step 8; .*last\.safetensors holds the last checkpoint"):
        run(Toy(8), tmp_path)
    good = Toy()
    assert without_time(run(good, tmp_path, resume=True)) == without_time(run(Toy(), tmp_path / "whole"))


def test_a_loss_that_is_not_a_number_at_once_says_that_there_is_no_checkpoint(tmp_path):
    with pytest.raises(CompressError, match="no checkpoint yet"):
        run(Toy(1), tmp_path)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    saved = []

    def save(path, *rest):
        if len(saved) == 5:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        saved.append(path)
        return original(path, *rest)

    original = writer.save_atomic
    monkeypatch.setattr(writer, "save_atomic", save)
    with pytest.raises(OSError, match="No space left"):
        run(Toy(), tmp_path)
    monkeypatch.undo()
    assert without_time(run(Toy(), tmp_path, resume=True)) == without_time(run(Toy(), tmp_path / "whole"))


def test_a_damaged_checkpoint_is_named(tmp_path):
    run(Toy(), tmp_path)
    (tmp_path / loop.LAST).write_bytes(b"nothing")
    with pytest.raises(CompressError, match=r"last\.safetensors: not a usable checkpoint"):
        run(Toy(), tmp_path, resume=True)


def test_training_stops_when_held_out_acceptance_no_longer_rises(tmp_path):
    class Worse(Toy):
        def forward(self, documents, states):
            loss, _ = super().forward(documents, states)
            right = torch.tensor([1 / (1 + self.calls)], dtype=torch.float64)
            return loss, Tally(right, torch.ones(1, dtype=torch.float64))

    task = Worse()
    history = run(task, tmp_path, Schedule(**{**vars(SCHEDULE), "patience": 2}))
    assert [entry["step"] for entry in history] == [0, 3, 6]


def test_the_best_weights_are_kept_not_the_last(tmp_path):
    class Best(Toy):
        """Judged best after the third step."""

        kept = None

        def forward(self, documents, states):
            loss, _ = super().forward(documents, states)
            if not torch.is_grad_enabled() and self.calls == 3:
                self.kept = self.line.weight.clone()
            right = torch.tensor([1.0 if self.calls == 3 else 0.5], dtype=torch.float64)
            return loss, Tally(right, torch.ones(1, dtype=torch.float64))

    task = Best()
    run(task, tmp_path)
    assert torch.equal(task.line.weight, task.kept)


def test_an_epoch_shows_every_document_once_and_no_held_out_one(tmp_path):
    lone = [Document([index, 1, 2, 3], 1) for index in range(20)]
    task = Toy()
    schedule = Schedule(steps=8, rate=0.01, batch_tokens=8, evaluate_every=8, save_every=8)
    train(task, lone, lambda indices: [], [3, 11, 12, 13], schedule, tmp_path, NullUI())
    assert sorted(chain.from_iterable(task.seen)) == [index for index in range(20) if index not in (3, 11, 12, 13)]


def test_accumulated_batches_make_one_step(tmp_path):
    one, two = Toy(), Toy()
    wide = Schedule(steps=3, rate=0.05, warmup=1, batch_tokens=10_000, evaluate_every=3, save_every=3)
    run(one, tmp_path / "one", wide)
    run(two, tmp_path / "two", Schedule(**{**vars(wide), "accumulation": 2}))
    # The same whole-corpus batch twice has the same mean gradient.
    assert two.calls == 6 and torch.allclose(one.line.weight, two.line.weight, atol=1e-6)


@pytest.mark.parametrize("held_out", [[], range(40)])
def test_documents_to_learn_from_and_to_judge_by_are_both_needed(tmp_path, held_out):
    with pytest.raises(UsageError, match="both parts need some"):
        train(Toy(), DOCUMENTS, lambda indices: [], held_out, SCHEDULE, tmp_path, NullUI())


def test_the_rate_warms_up_and_falls_to_its_floor():
    schedule = Schedule(steps=100, rate=1.0, warmup=10, floor=0.1)
    rates = [schedule.rate_at(step) for step in range(101)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)
