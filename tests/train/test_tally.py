"""The tally counts the cycles that a runner would make on the same text."""

import torch

from compressor.train.tally import Tally, cycles


def board(*rows):
    return torch.tensor([[mark == "x" for mark in row] for row in rows])


def test_a_draft_begins_where_the_one_before_ended():
    counted = board("--xxxxxxxx")
    # Token 2 is the target's own. The draft from 3 gets 3 and 4 right and 5 wrong, the one from 6 nothing, the one from
    # 7 all of its three tokens; then the text is over.
    first, second, third = board("---x---x--")[0], board("----x---x-")[0], board("---------x")[0]
    tally = cycles(torch.stack([first, second, third])[:, None], counted)
    assert tally.reached.tolist() == [3, 2, 2]
    assert tally.hits.tolist() == [2, 2, 1]
    assert tally.tau == 1 + 5 / 3 and tally.conditional == [2 / 3, 1.0, 0.5]


def test_what_is_right_behind_a_mistake_or_outside_answers_does_not_count():
    right = board("xxxxxx", "xxxxxx")[:, None]
    right[0, 0, 3] = False
    assert cycles(right, board("--xxxx")).hits.tolist() == [1, 1]
    assert cycles(right, board("xx----")).hits.tolist() == [1, 0]


def test_no_answer_is_no_cycle():
    tally = cycles(board("xxx", "xxx")[:, None], board("---"))
    assert tally.reached.tolist() == [0, 0] and tally.tau == 1


def test_tallies_add_up():
    both = Tally(torch.tensor([1.0]), torch.tensor([2.0])) + Tally(torch.tensor([2.0]), torch.tensor([2.0]))
    assert both.tau == 1.75
