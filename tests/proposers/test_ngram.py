import random

import pytest
import torch
from toys import Reads

from compressor.decode import Law
from compressor.decode.law import LawState
from compressor.errors import UsageError
from compressor.proposers.base import Context
from compressor.proposers.ngram import NgramProposer


def context(history: list[int], k: int) -> Context:
    return Context(history, k, LawState(Law(0.7), 40), torch.Generator())


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
        session = proposer.session()
        history = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 25))]
        for _ in range(10):
            expected = by_scanning(history, smallest, largest, k)
            assert list(session.propose(context(history, k)).tokens) == expected
            assert list(proposer.session().propose(context(history, k)).tokens) == expected
            proposed += bool(expected)
            history += [rng.randrange(vocabulary) for _ in range(rng.randint(1, 4))]
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
    assert NgramProposer(*window).session().propose(context(history, 3)).tokens == tokens


def test_the_latest_match_would_be_another_choice():
    """The comparison above can tell vLLM's rule from its common variant."""
    history = [2, 3, 7, 1, 2, 3, 9, 1, 2, 3]
    assert by_scanning(history, 1, 2, 3) != history[6:9]


def test_the_choice_is_a_deterministic_chain_and_says_so():
    draft = NgramProposer().session().propose(context([1, 2, 1], 3))
    assert draft.tokens == (2, 1) and draft.q is None and draft.parents is None


def test_the_proposer_asks_for_no_states_of_the_target():
    assert NgramProposer().features == ()


def test_another_session_does_not_see_the_text():
    proposer = NgramProposer()
    first, second = proposer.session(), proposer.session()
    assert first.propose(context([1, 2, 3, 1], 2)).tokens == (2, 3)
    assert second.propose(context([1, 2, 4, 1], 2)).tokens == (2, 4)
    assert first.propose(context([1, 2, 3, 1, 2], 2)).tokens == (3, 1)  # the first session goes on where it was


def test_a_call_reads_the_new_tokens_only():
    rng = random.Random(0)
    history, session = Reads(rng.randrange(30) for _ in range(50)), NgramProposer().session()
    reads = []
    for length in [50, 51, 5000, 5001]:
        history.extend(rng.randrange(30) for _ in range(length - len(history)))
        history.count = 0
        session.propose(context(history, 3))
        reads.append(history.count)
    assert reads[0] > 150 and reads[2] > 10_000  # the count sees a text that is read for the first time
    assert max(reads[1], reads[3]) <= 2 * (1 + 2 + 3 + 4) + 3  # the new n-grams, the suffixes, the draft


@pytest.mark.parametrize("window", [(0, 3), (3, 2), (-1, -1)])
def test_an_impossible_window_is_refused(window):
    with pytest.raises(UsageError, match="prompt_lookup_min"):
        NgramProposer(*window)
