import pytest

from compressor.decode.length import PROBE_EVERY, Adaptive, Fixed
from compressor.errors import UsageError
from compressor.measure import economics


def settled(
    rate: float, *, draft: float, target: float = 1.0, per_token: float = 0.0, limit: int = 8, cycles: int = 400
):
    """An adaptive length after a run with conditional acceptance `rate` and these costs, and what it chose last."""
    length, credit, chosen = Adaptive(limit), [0.0] * limit, []
    for _ in range(cycles):
        k = length.choose()
        accepted = 0
        while accepted < k:  # the rate itself instead of chance: every position accepts when its credit is full
            credit[accepted] += rate
            if credit[accepted] < 1:
                break
            credit[accepted] -= 1
            accepted += 1
        length.record([(k, accepted)], (draft * k, target + per_token * k))
        chosen.append(k)
    usual = chosen[-3 * PROBE_EVERY :]
    return length, sorted(usual)[len(usual) // 2]


@pytest.mark.parametrize(("rate", "cost"), [(0.8, 0.1), (0.6, 0.1), (0.9, 0.05), (0.5, 0.3)])
def test_it_finds_a_depth_whose_speed_is_near_the_best(rate, cost):
    _, chosen = settled(rate, draft=cost)
    speeds = [economics.speedup(rate, k, cost) if k else 1.0 for k in range(9)]
    assert speeds[chosen] > 0.95 * max(speeds)
    assert max(speeds) == economics.speedup(rate, economics.best_k(rate, cost, 8), cost)


def test_it_stops_drafting_where_nothing_is_accepted_and_looks_again_now_and_then():
    length, chosen = settled(0.02, draft=0.3)
    assert chosen == 0
    later = [length.choose() for _ in range(PROBE_EVERY)]
    assert later.count(length.limit) == 1


def test_free_and_certain_drafts_are_as_deep_as_allowed():
    assert settled(0.98, draft=0.0)[1] >= 7


def test_verification_that_costs_by_the_token_makes_drafts_shorter():
    assert settled(0.8, draft=0.0, per_token=0.5)[1] < settled(0.8, draft=0.0)[1]


def test_confidence_is_the_price_of_one_more_token():
    length, _ = settled(0.8, draft=0.2)
    length.choose()
    assert 0.1 < length.confidence < 0.9
    cheap, _ = settled(0.8, draft=0.01)
    cheap.choose()
    assert cheap.confidence < length.confidence


def test_bad_numbers_are_refused():
    with pytest.raises(UsageError, match="-1 is negative"):
        Fixed(-1)
    with pytest.raises(UsageError, match="0 is not positive"):
        Adaptive(0)
