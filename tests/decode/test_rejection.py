"""One verification, case by case: the worked example and the boundary cases of the lecture on speculation."""

from unittest.mock import patch

import pytest
import torch

from compressor.decode import rejection
from compressor.decode.rejection import accept_or_correct
from compressor.errors import CompressError

P = torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05], dtype=torch.float64)
Q = torch.tensor([0.25, 0.35, 0.20, 0.10, 0.10], dtype=torch.float64)


def rows(*vectors) -> torch.Tensor:
    return torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in vectors])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_overlap_residual_and_balance_of_the_worked_example():
    overlap = torch.minimum(P, Q)
    assert overlap.sum().item() == pytest.approx(0.85)
    assert overlap.sum().item() == pytest.approx(1 - 0.5 * (P - Q).abs().sum().item())
    # The only residual mass is at token 0: every rejection is corrected to it.
    outcomes = [(x, accept_or_correct(rows(P, P), Q[None], [x], generator(s))) for x in (1, 2, 4) for s in range(40)]
    rejected = [token for _, (count, token) in outcomes if count == 0]
    assert rejected and set(rejected) == {0}


def test_a_token_the_target_prefers_is_always_accepted():
    assert all(accept_or_correct(rows(P, P), Q[None], [0], generator(s))[0] == 1 for s in range(200))


def test_equal_laws_never_reject():
    chain = [0, 4, 2]
    for seed in range(200):
        count, token = accept_or_correct(P.expand(4, 5), P.expand(3, 5), chain, generator(seed))
        assert count == 3 and 0 <= token < 5


def test_the_bonus_token_comes_from_the_last_row():
    for seed in range(50):
        assert accept_or_correct(rows([1, 0], [1, 0], [0, 1]), rows([1, 0], [1, 0]), [0, 0], generator(seed)) == (2, 1)


def test_nothing_after_the_first_rejection_counts():
    p = rows([0, 1, 0], [1, 0, 0], [0, 0, 1])
    q = rows([1, 0, 0], [1, 0, 0])
    for seed in range(50):  # the second proposal would be accepted, the first cannot be
        assert accept_or_correct(p, q, [0, 0], generator(seed)) == (0, 1)


def test_a_token_the_proposer_cannot_emit_comes_back_through_the_residual():
    p, q = rows([0.5, 0.5], [1, 0]), rows([1.0, 0.0])
    results = {accept_or_correct(p, q, [0], generator(seed)) for seed in range(100)}
    assert results == {(1, 0), (0, 1)}


def test_a_tiny_residual_is_still_a_law():
    p, q = rows([1 - 1e-14, 1e-14], [1, 0]), rows([1.0, 0.0])
    with patch.object(torch, "rand", return_value=torch.tensor(1 - 2.0**-53, dtype=torch.float64)):
        assert accept_or_correct(p, q, [0], generator()) == (0, 1)


def test_a_zero_draw_does_not_accept_what_the_target_excludes():
    p, q = rows([0.0, 1.0], [0.5, 0.5]), rows([1.0, 0.0])
    with patch.object(torch, "rand", return_value=torch.tensor(0.0, dtype=torch.float64)):
        assert accept_or_correct(p, q, [0], generator()) == (0, 1)
        assert accept_or_correct(p, None, [0], generator()) == (0, 1)


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.999, 1 - 2.0**-53])
def test_a_deterministic_proposer_equals_a_one_hot_law(uniform):
    p = rows(P, P.flip(0), P)
    one_hot = torch.nn.functional.one_hot(torch.tensor([1, 3]), 5).double()
    with patch.object(torch, "rand", return_value=torch.tensor(uniform, dtype=torch.float64)):
        assert accept_or_correct(p, None, [1, 3], generator()) == accept_or_correct(p, one_hot, [1, 3], generator())


def test_a_residual_without_the_proposal_never_repeats_it():
    p = rows([0.9, 0.05, 0.05], [1, 0, 0])
    rejected = [accept_or_correct(p, None, [0], generator(seed)) for seed in range(300)]
    assert {token for count, token in rejected if count == 0} == {1, 2}


def test_no_proposals_is_plain_sampling():
    assert accept_or_correct(rows([0, 0, 1]), None, [], generator()) == (0, 2)
    assert accept_or_correct(rows([0, 0, 1]), torch.empty(0, 3), [], generator()) == (0, 2)


def test_the_same_seed_gives_the_same_answer_and_float32_laws_are_taken():
    p, q = torch.softmax(torch.randn(4, 50), -1), torch.softmax(torch.randn(3, 50), -1)
    assert accept_or_correct(p, q, [1, 2, 3], generator(5)) == accept_or_correct(p, q, [1, 2, 3], generator(5))


@pytest.mark.parametrize(
    ("p", "q", "proposals", "says"),
    [
        (rows([0.5, 0.6], [1, 0]), rows([1.0, 0.0]), [0], "p: probabilities sum to 1.1"),
        (rows([0.5, 0.5], [1, 0]), rows([0.9, 0.0]), [0], "q: probabilities sum to 0.9"),
        (rows([0.5, 0.5], [0.999, 0]), rows([1.0, 0.0]), [0], "p: probabilities sum"),
        (rows([1.5, -0.5], [1, 0]), rows([1.0, 0.0]), [0], "p: a probability is negative"),
        (rows([torch.nan, 1.0], [1, 0]), rows([1.0, 0.0]), [0], "p: a probability is NaN"),
        (rows([0.5, 0.5], [1, 0]), rows([torch.inf, 0.0]), [0], "q: a probability is NaN or infinite"),
        (rows([0.5, 0.5], [1, 0]), rows([1.0, 0.0]), [1], "probability zero under q"),
        (rows([0.5, 0.5], [1, 0]), rows([1.0, 0.0]), [2], "outside the vocabulary"),
        (rows([0.5, 0.5], [1, 0]), None, [-1], "outside the vocabulary"),
        (rows([0.5, 0.5]), rows([1.0, 0.0]), [0], "1 proposals need 2 rows"),
        (rows([0.5, 0.5], [1, 0]), rows([1.0, 0.0, 0.0]), [0], "q: expected shape"),
        (rows([0.5, 0.5], [1, 0]), rows([1.0, 0.0], [1, 0]), [0], "q: expected shape"),
        (torch.tensor([0.5, 0.5]), None, [], "p: expected"),
        (torch.empty(1, 0), None, [], "expected probabilities over a vocabulary"),
    ],
)
def test_malformed_input_is_refused_not_repaired(p, q, proposals, says):
    with pytest.raises(ValueError, match=says) as caught:
        accept_or_correct(p, q, proposals, generator())
    assert isinstance(caught.value, CompressError | rejection.ProbabilityError)
