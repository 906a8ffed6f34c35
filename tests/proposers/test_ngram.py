import random

import pytest
import torch

from compressor.decode import Law
from compressor.errors import UsageError
from compressor.proposers.ngram import NgramProposer


def by_scanning(history: list[int], smallest: int, largest: int, k: int) -> list[int]:
    """vLLM's rule by brute force: the longest suffix seen before, its earliest occurrence, what followed it."""
    for size in range(largest, smallest - 1, -1):
        suffix = history[-size:]
        for start in range(len(history) - size):
            if len(suffix) == size and history[start : start + size] == suffix:
                return history[start + size : start + size + k]
    return []


@pytest.mark.parametrize("vocabulary", [1, 2, 4, 30])
def test_proposals_equal_a_scan_of_the_history_at_every_step(vocabulary):
    rng = random.Random(vocabulary)
    proposed = 0
    for _ in range(60):
        smallest = rng.randint(1, 3)
        largest, k = rng.randint(smallest, 5), rng.randint(1, 5)
        proposer = NgramProposer(smallest, largest)
        history = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 25))]
        for _ in range(10):
            expected = by_scanning(history, smallest, largest, k)
            assert list(proposer.propose(history, k).tokens) == expected
            proposed += bool(expected)
            history = history + [rng.randrange(vocabulary) for _ in range(rng.randint(1, 4))]
    assert proposed > 50


@pytest.mark.parametrize(
    ("history", "window", "tokens"),
    [
        ([1, 2, 3, 9, 1, 2, 3], (1, 4), (9, 1, 2)),  # the longest match wins ...
        ([2, 3, 7, 1, 2, 3, 9, 1, 2, 3], (1, 2), (7, 1, 2)),  # ... and of equals the earliest
        ([2, 3, 7, 1, 2, 3, 9, 1, 2, 3], (1, 3), (9, 1, 2)),
        ([5, 5, 5], (1, 4), (5,)),  # a match may overlap the suffix; the history's end cuts the proposal
        ([1, 2, 3, 4], (1, 4), ()),
        ([1, 2, 3, 1], (2, 4), ()),  # one token is too short a match
        ([7], (1, 4), ()),
    ],
)
def test_which_match_is_taken(history, window, tokens):
    assert NgramProposer(*window).propose(history, 3).tokens == tokens


def test_the_latest_match_would_be_another_choice():
    """The comparison above can tell vLLM's rule from its common variant."""
    history = [2, 3, 7, 1, 2, 3, 9, 1, 2, 3]
    assert by_scanning(history, 1, 2, 3) != history[6:9]


def test_the_choice_is_deterministic_and_says_so():
    proposal = NgramProposer().propose([1, 2, 1], 3, Law(0.7), torch.Generator())
    assert proposal.q is None and proposal.tokens == (2, 1)


def test_another_text_does_not_see_the_last_one():
    proposer = NgramProposer()
    assert proposer.propose([1, 2, 3, 1], 2).tokens == (2, 3)
    assert proposer.propose([1, 2, 4, 1], 2).tokens == (2, 4)
    assert proposer.propose([1], 2).tokens == ()
    assert proposer.propose([9, 8, 9], 5).tokens == (8, 9)


@pytest.mark.parametrize("window", [(0, 3), (3, 2), (-1, -1)])
def test_an_impossible_window_is_refused(window):
    with pytest.raises(UsageError, match="prompt_lookup_min"):
        NgramProposer(*window)
