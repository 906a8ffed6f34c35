import math
import random
import sys

import pytest
import torch
from toys import Reads

from compressor.decode import Law
from compressor.decode.law import LawState
from compressor.errors import UsageError
from compressor.proposers import suffix
from compressor.proposers.base import Context
from compressor.proposers.suffix import SuffixProposer


def context(history: list[int], k: int) -> Context:
    return Context(history, k, LawState(Law(0.7), 40), torch.Generator())


def draft(history: list[int], k: int = 99, **settings) -> tuple[int, ...]:
    return SuffixProposer(**settings).session().propose(context(history, k)).tokens


def by_scanning(
    history: list[int], k: int, *, max_tree_depth, max_spec_factor, min_token_prob, max_spec_offset, latest=True
) -> list[int]:
    """The rule by brute force: every context is looked up by a scan of the whole history."""

    def ends(text):
        return [end for end in range(len(text), len(history) + 1) if history[end - len(text) : end] == text]

    sizes = [size for size in range(1, min(max_tree_depth, len(history)) + 1) if len(ends(history[-size:])) > 1]
    if not sizes:
        return []
    text, found, probability = history[-sizes[-1] :], [], 1.0
    while len(found) < min(k, math.floor(max_spec_factor * sizes[-1] + max_spec_offset + 1e-6)):
        following = [history[end] for end in ends(text) if end < len(history)]
        if not following:
            break
        latest_first = following[::-1] if latest else following
        token = max(latest_first, key=following.count)  # the first of the largest
        probability *= following.count(token) / len(following)
        if probability < min_token_prob:
            break
        found.append(token)
        text = [*text, token]
        if len(text) > max_tree_depth and len(ends(text)) > 1:
            text = text[1:]
    return found


def cases(vocabulary: int):
    rng = random.Random(vocabulary)
    for _ in range(60):
        settings = {
            "max_tree_depth": rng.choice([1, 2, 3, 5, 24]),
            "max_spec_factor": rng.choice([0.0, 0.5, 1.0, 3.0]),
            "min_token_prob": rng.choice([0.0, 0.1, 0.4, 0.9, 1.0]),
            "max_spec_offset": rng.choice([-1.0, 0.0, 0.0, 2.5]),
        }
        history = [rng.randrange(vocabulary) for _ in range(rng.randint(1, 30))]
        histories = [list(history)]
        for _ in range(8):
            history += [rng.randrange(vocabulary) for _ in range(rng.randint(1, 6))]
            histories.append(list(history))
        yield settings, rng.randint(1, 12), histories


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 6, 30])
def test_drafts_equal_a_scan_of_the_history_at_every_step(vocabulary):
    drafted = 0
    for settings, k, histories in cases(vocabulary):
        session = SuffixProposer(**settings).session()
        for history in histories:
            expected = by_scanning(history, k, **settings)
            assert list(session.propose(context(history, k)).tokens) == expected
            assert list(draft(history, k, **settings)) == expected  # from scratch
            drafted += len(expected)
    assert drafted > 100


def test_the_comparison_tells_another_rule_of_ties():
    assert any(
        list(draft(history, k, **settings)) != by_scanning(history, k, **settings, latest=False)
        for settings, k, histories in cases(3)
        for history in histories
    )


def test_the_comparison_tells_a_session_that_misses_a_token():
    session = SuffixProposer(max_spec_factor=3.0).session()
    session.propose(context([1, 2, 3, 1], 9))
    assert (
        session.propose(context([1, 2, 3, 1, 2], 9)).tokens == draft([1, 2, 3, 1, 2], max_spec_factor=3.0) == (3, 1, 2)
    )
    session._indexed += 1
    assert session.propose(context([1, 2, 3, 1, 2, 3, 1], 9)).tokens != draft(
        [1, 2, 3, 1, 2, 3, 1], max_spec_factor=3.0
    )


@pytest.mark.parametrize(
    ("history", "settings", "tokens"),
    [
        ([1, 2, 3, 9, 8, 2, 3, 7, 3, 7, 1, 2, 3], {}, (9, 8, 2)),  # the longest suffix, though 3 → 7 is more frequent
        ([3, 7, 1, 3, 7, 2, 3, 9, 4, 3], {}, (7,)),  # the most frequent continuation, as many tokens as the match has
        ([3, 7, 3, 9, 3], {}, (9,)),  # of equals the latest
        ([1, 2, 3, 1], {"max_spec_factor": 2.0}, (2, 3)),
        ([1, 2, 3, 1], {"max_spec_factor": 0.0}, ()),
        ([1, 2, 3, 1], {"max_spec_factor": 0.0, "max_spec_offset": 2.0}, (2, 3)),
        ([1, 2, 3, 1], {"max_spec_offset": -1.0}, ()),
        ([1, 2, 3, 1], {"max_spec_offset": 9.0}, (2, 3, 1)),  # where the history ends
        ([3, 7, 3, 9, 3, 8, 3], {"min_token_prob": 0.33}, (8,)),
        ([3, 7, 3, 9, 3, 8, 3], {"min_token_prob": 0.34}, ()),  # a third each
        ([5, 6, 5, 6, 5, 6, 5, 6], {"max_tree_depth": 2, "max_spec_factor": 4.0}, (5, 6) * 4),  # the context slides on
        ([1, 2, 3], {}, ()),
        ([1], {}, ()),
    ],
)
def test_what_is_drafted(history, settings, tokens):
    assert draft(history, **settings) == tokens


def test_the_probabilities_multiply():
    """1 → 4 in two of four, then 1, 4 → 8 in one of two; 1, 4, 8 occurred once and is copied to the end."""
    history = [1, 2, 3, 0, 1, 4, 0, 2, 5, 0, 1, 2, 5, 9, 1, 4, 8, 1]
    drafts = [draft(history, max_spec_factor=9.0, min_token_prob=p) for p in (0.51, 0.5, 0.26, 0.25, 0.0)]
    assert drafts == [(), (4,), (4,), (4, 8, 1), (4, 8, 1)]


def test_a_product_that_only_rounding_keeps_below_a_whole_number_counts_as_it():
    history = [*range(100), *range(100)]
    assert 0.29 * 100 < 29
    assert len(draft(history, max_tree_depth=100, max_spec_factor=0.29)) == 29


def test_a_draft_has_k_tokens_at_most():
    history = [*range(20), *range(20)]
    assert [len(draft(history, k)) for k in (1, 7, 50)] == [1, 7, 20]


def test_the_choice_is_a_deterministic_chain_and_says_so():
    found = SuffixProposer().session().propose(context([1, 2, 1], 3))
    assert found.tokens == (2,) and found.q is None and found.parents is None
    assert SuffixProposer().features == ()


def test_another_session_does_not_see_the_text():
    proposer = SuffixProposer()
    first, second = proposer.session(), proposer.session()
    assert first.propose(context([1, 2, 3, 1], 2)).tokens == (2,)
    assert second.propose(context([1, 4, 3, 1], 2)).tokens == (4,)


def test_the_defaults_are_vllms():
    proposer = SuffixProposer()
    assert (proposer.max_tree_depth, proposer.max_spec_factor, proposer.min_token_prob) == (24, 1.0, 0.1)


def work(call, code: str) -> int:
    """Lines of the file `code` that `call` executes: none of them does more than one dictionary operation."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return trace if frame.f_code.co_filename == code else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


def texts(length: int) -> dict[str, list[int]]:
    rng = random.Random(0)
    pieces = [[rng.randrange(1000) for _ in range(40)] for _ in range(10)]
    return {
        "random": [rng.randrange(4) for _ in range(length)],
        "constant": [7] * length,
        "repetitive": [token for _ in range(length // 40 + 1) for token in rng.choice(pieces)][:length],
    }


@pytest.mark.parametrize("kind", ["random", "constant", "repetitive"])
def test_a_token_costs_the_same_after_a_long_text(kind):
    most = {}
    for length in (500, 8000):
        text = texts(length + 50)[kind]
        history, session = Reads(text[:length]), SuffixProposer().session()
        session.propose(context(history, 5))
        most[length] = 0
        for token in text[length:]:
            history.append(token)
            history.count = 0
            lines = work(lambda h=history, s=session: s.propose(context(h, 5)), suffix.__file__)
            most[length] = max(most[length], lines)
            assert history.count <= 24 + 1 + 1 + 5  # a new piece for every length, the token, the draft
    bound = 24 * 30 + 100  # lines for every length of a suffix, and for the draft
    assert most[500] < bound and most[8000] < bound


def test_the_count_of_work_sees_a_rule_that_scans():
    text = texts(800)["random"]
    settings = {"max_tree_depth": 24, "max_spec_factor": 1.0, "min_token_prob": 0.1, "max_spec_offset": 0.0}
    short, long = (work(lambda n=n: by_scanning(text[:n], 5, **settings), __file__) for n in (100, 800))
    assert long > 5 * short


def nodes(session) -> int:
    count, waiting = 0, [session._suffixes[0]]
    while waiting:
        found = list(getattr(waiting.pop(), "continuations", {}).values())
        count += len(found)
        waiting += found
    return count


@pytest.mark.parametrize("kind", ["random", "constant", "repetitive"])
def test_memory_is_bounded_by_the_depth(kind):
    text = texts(3000)[kind]
    for depth in (1, 2, 24):
        session = SuffixProposer(depth).session()
        session.propose(context(text, 5))
        assert 0 < nodes(session) <= (depth + 1) * len(text)


def test_a_deeper_tree_would_break_that_bound():
    text = texts(3000)["repetitive"]
    session = SuffixProposer(24).session()
    session.propose(context(text, 5))
    assert nodes(session) > (1 + 1) * len(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_tree_depth": 0},
        {"max_tree_depth": 2.0},
        {"max_tree_depth": True},
        {"max_spec_factor": -0.1},
        {"max_spec_factor": math.inf},
        {"max_spec_factor": "1"},
        {"min_token_prob": 1.1},
        {"min_token_prob": -0.1},
        {"min_token_prob": math.nan},
        {"max_spec_offset": math.nan},
        {"max_spec_offset": None},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings):
    (name,) = settings
    with pytest.raises(UsageError, match=f"^{name}: "):
        SuffixProposer(**settings)


def test_settings_at_the_ends_of_their_ranges_are_accepted():
    SuffixProposer(1, 0, 0, -3)
    assert draft([1, 2, 1], max_spec_factor=1e308, max_spec_offset=1e308, min_token_prob=1) == (2, 1)
