from types import SimpleNamespace

import pytest

from compressor.decode import Law, Output
from compressor.errors import UsageError
from compressor.measure.acceptance import measure, summarize
from compressor.proposers.ngram import NgramProposer


def output(*entries) -> Output:
    return Output(accepted_per_position=[tuple(entry) for entry in entries])


FIRST = output((), (1, 1, 0), (1, 0, 0), (0, 0, 0), (), (1,))
SECOND = output((), (1, 1, 1), (0, 0))


def test_rates_are_counts_over_the_right_cycles():
    result = summarize([FIRST, SECOND], 3, seed=0)
    assert result["cycles"] == 9 and result["drafts"] == 6 and result["proposed"] == 15 and result["accepted"] == 7
    # position 0: reached by all six drafts; 1: by the three that got past 0 and proposed it; 2: by two
    assert result["conditional"] == [4 / 6, 2 / 3, 1 / 2]
    assert result["unconditional"] == [4 / 6, 2 / 6, 1 / 6]  # accepted at the position / drafts, as vLLM counts
    assert result["tau"] == 1 + 7 / 9
    low, high = result["ci95"]
    assert low <= result["tau"] <= high


def test_a_position_never_reached_has_no_rate():
    result = summarize([output((), (0, 0))], 2, seed=0)
    assert result["conditional"] == [0.0, None]
    assert summarize([output((), ())], 2, seed=0) | {"ci95": None} == {
        "conditional": [None, None],
        "unconditional": [None, None],
        "tau": 1.0,
        "cycles": 2,
        "drafts": 0,
        "proposed": 0,
        "accepted": 0,
        "ci95": None,
    }


def test_the_interval_is_seeded_and_knows_how_much_was_seen():
    few, many = [FIRST, SECOND] * 2, [FIRST, SECOND] * 50
    width = lambda outputs, seed: (lambda ci: ci[1] - ci[0])(summarize(outputs, 3, seed)["ci95"])  # noqa: E731
    assert width(few, 1) == width(few, 1)
    assert width(many, 0) < width(few, 0) / 3


def test_prompts_are_resampled_whole():
    """Ten prompts of which five accept everything and five nothing say less than their 200 cycles seem to."""
    good, bad = output((), *[(1,)] * 20), output((), *[(0,)] * 20)
    low, high = summarize([good] * 5 + [bad] * 5, 1, seed=0)["ci95"]
    assert high - low > 0.4


class Recorder:
    proposer, num_speculative_tokens = NgramProposer(), 3

    def __init__(self):
        self.calls = []

    def generate(self, *arguments):
        self.calls.append(arguments)
        return [FIRST, SECOND][len(self.calls) - 1]


def call(runner, **changes):
    settings = {"task": "chat", "target": "quantized", "k": 3, "max_new_tokens": 8, "law": Law(0.0), "seed": 7}
    prompts = changes.pop("prompts", [[1, 2], [3]])
    return measure(runner, prompts, **{**settings, **changes})


def test_every_prompt_runs_with_its_own_seed():
    runner, ticks = Recorder(), []
    result = call(runner, progress=SimpleNamespace(advance=lambda n=1: ticks.append(n)))
    assert runner.calls == [([1, 2], 8, Law(0.0), 7), ([3], 8, Law(0.0), 8)] and ticks == [1, 1]
    assert result == {"task": "chat", "target": "quantized", "k": 3, **summarize([FIRST, SECOND], 3, 7)}


def test_a_measurement_of_nothing_is_refused():
    with pytest.raises(UsageError, match="no prompts"):
        call(Recorder(), prompts=[])
    with pytest.raises(UsageError, match="proposes 3"):
        call(Recorder(), k=2)
    runner = Recorder()
    runner.proposer = None
    with pytest.raises(UsageError, match="no proposer"):
        call(runner)
