"""The choice of formats under a budget, against every choice there is."""

import itertools
import random

import pytest

from compressor.allocate.choose import choose, hull, least_bytes
from compressor.errors import CompressError


def best(groups, budget):
    """The least loss of all choices within the budget, one by one."""
    losses = [
        sum(loss for _, loss in picked)
        for picked in itertools.product(*groups)
        if sum(size for size, _ in picked) <= budget
    ]
    return min(losses)


def made(seed):
    """A few groups of two to four options; some cost more bytes for more loss, as predictions may say."""
    draw = random.Random(seed)
    groups = []
    for _ in range(draw.randint(1, 5)):
        scale = 10 ** draw.uniform(-3, 0)
        count = draw.randint(2, 4)
        groups.append([(draw.randint(10, 100), scale * draw.random() ** 2) for _ in range(count)])
    least, most = (sum(extreme(size for size, _ in options) for options in groups) for extreme in (min, max))
    return groups, draw.randint(least, most)


@pytest.mark.parametrize("seed", range(300))
def test_no_choice_is_better_than_the_bound_and_the_one_found_is_within_a_step_of_the_best(seed):
    groups, budget = made(seed)
    found, least = choose(groups, budget), best(groups, budget)
    assert found.bytes == sum(options[index][0] for options, index in zip(groups, found.indices, strict=True)) <= budget
    assert found.loss == pytest.approx(sum(options[i][1] for options, i in zip(groups, found.indices, strict=True)))
    assert found.bound <= least + 1e-12 and least <= found.loss + 1e-12
    largest = max(max(loss for _, loss in options) for options in groups)
    assert found.loss <= least + largest


def test_almost_all_small_cases_are_solved_exactly():
    right = sum(choose(*made(seed)).loss <= best(*made(seed)) * (1 + 1e-9) + 1e-15 for seed in range(300))
    assert right >= 285


def test_what_the_hull_leaves_is_filled():
    """Climbing the hull alone stops at the large group, which does not fit; the small one still does."""
    groups = [[(10, 10.0), (30, 0.0)], [(10, 1.0), (15, 0.5)]]
    assert choose(groups, 35).indices == (0, 1)
    assert choose(groups, 40).indices == (1, 0)
    assert choose(groups, 45).indices == (1, 1)


def test_an_exchange_finds_what_climbing_misses():
    """The steepest step takes the room of one that saves more."""
    groups = [[(0, 1.0), (6, 0.0)], [(0, 1.5), (10, 0.0)]]
    assert choose(groups, 10).indices == (0, 1)


def test_an_option_off_the_hull_is_taken_where_it_fits():
    groups = [[(0, 10.0), (6, 5.0), (10, 0.0)]]
    assert hull(groups[0]) == [0, 2]
    assert choose(groups, 9).indices == (1,)


def test_the_hull_leaves_out_what_costs_more_for_no_less():
    assert hull([(3, 1.0), (1, 2.0), (2, 2.5), (4, 1.0), (5, 0.5)]) == [1, 0, 4]
    assert hull([(1, 2.0), (1, 1.0)]) == [1]


def test_the_price_is_what_the_next_byte_would_save():
    groups = [[(0, 8.0), (4, 0.0)], [(0, 4.0), (4, 0.0)]]
    found = choose(groups, 6)
    assert found.indices == (1, 0)
    assert (found.price, found.bound) == (1.0, 2.0)
    assert choose(groups, 8).price == 0


def test_equal_losses_cost_no_bytes_and_end():
    assert choose([[(1, 0.0), (2, 0.0)]] * 3, 6).indices == (0, 0, 0)


def test_a_budget_below_the_least_is_refused():
    groups = [[(3, 1.0), (5, 0.0)], [(4, 1.0)]]
    assert least_bytes(groups) == 7
    assert choose(groups, 7).bytes == 7
    with pytest.raises(CompressError, match="6 bytes are less than the 7 of the smallest options"):
        choose(groups, 6)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1e-3])
def test_a_loss_that_is_no_loss_is_refused(loss):
    with pytest.raises(CompressError, match="not finite or below zero"):
        choose([[(1, 1.0), (2, loss)]], 2)
