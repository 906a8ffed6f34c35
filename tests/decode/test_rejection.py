"""One verification, case by case: the worked example and the boundary cases of the lecture on speculation."""

from unittest.mock import patch

import pytest
import torch

from compressor.decode import rejection
from compressor.decode.rejection import accept_or_correct
from compressor.errors import CompressError
from compressor.proposers.base import Draft

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


def test_a_deterministic_proposal_is_accepted_with_the_probability_of_the_token():
    p, grid = rows(P, P.flip(0)), torch.arange(0.0005, 1, 0.001, dtype=torch.float64)
    outcomes = []
    for uniform in grid:
        with patch.object(torch, "rand", return_value=uniform):
            outcomes.append(accept_or_correct(p, None, [1], generator()))
    assert sum(count for count, _ in outcomes) / len(grid) == pytest.approx(float(P[1]), abs=2e-3)
    corrections = torch.tensor([token for count, token in outcomes if not count]).bincount(minlength=5) / len(grid)
    without = P.clone()
    without[1] = 0
    torch.testing.assert_close(corrections.double(), without, atol=2e-3, rtol=0)


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


# A tree below the root: 0 and 1 are siblings, 2 follows 1, 3 follows 2.
TREE = Draft((0, 3, 1, 2), (-1, -1, 1, 2))


def test_the_target_is_followed_down_a_tree():
    tokens = {-1: 3, 1: 1, 2: 4}
    assert rejection.follow(TREE, tokens.__getitem__) == ([1, 2], 4)
    assert rejection.follow(TREE, {-1: 2}.__getitem__) == ([], 2)
    assert rejection.follow(TREE, {-1: 0, 0: None}.__getitem__) == ([0], None)  # nothing can follow token 0


def test_laws_are_asked_for_along_the_accepted_path_alone():
    asked = []

    def law_at(node):
        asked.append(node)
        return rows([0, 0, 0, 1, 0])[0] if node == -1 else rows([0, 0, 0, 0, 1])[0]

    assert rejection.verify(TREE, law_at, generator()) == ([1], 4)
    assert asked == [-1, 1]


def entropy(p):
    return -(p[p > 0] * p[p > 0].log()).sum().item()


def test_typical_acceptance_takes_the_deepest_node_above_the_threshold():
    threshold = min(0.09, 0.3 * torch.tensor(-entropy(P)).exp().item())
    assert P[4] < threshold < P[1]
    laws = {-1: P, 0: P, 1: P, 2: P, 3: P}
    path, token = rejection.typical(TREE, laws.__getitem__, generator())
    assert path == [1, 2, 3] and 0 <= token < 5  # tokens 3, 1 and 2 are all above it
    laws[1] = rows([0.98, 0.005, 0.005, 0.005, 0.005])[0]  # token 1 is now far below, and what follows it is lost
    assert rejection.typical(TREE, laws.__getitem__, generator())[0] == [0]


def test_typical_acceptance_with_nothing_typical_is_plain_sampling():
    p = rows([0, 1.0, 0, 0, 0])[0]
    assert rejection.typical(TREE, lambda node: p, generator()) == ([], 1)
