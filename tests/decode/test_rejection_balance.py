"""The law of the token that a verification emits is the target's: summed over everything that can happen, not sampled.

`rejection.verify` itself is run, with its random numbers replaced by every outcome in turn.
"""

from itertools import permutations

import pytest
import torch

from compressor.decode import rejection
from compressor.proposers.base import Draft


def random_law(vocabulary: int, sharpness: float, seed: int) -> torch.Tensor:
    return (torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)).double() * sharpness).softmax(-1)


PAIRS = {
    "lecture": (
        torch.tensor([0.40, 0.30, 0.15, 0.10, 0.05], dtype=torch.float64),
        torch.tensor([0.25, 0.35, 0.20, 0.10, 0.10], dtype=torch.float64),
    ),
    "far": (random_law(8, 2.0, 3), random_law(8, 2.0, 4)),
    "equal": (random_law(8, 1.0, 5), random_law(8, 1.0, 5)),
    "disjoint": (
        torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64),
        torch.tensor([0.0, 0.0, 0.7, 0.3], dtype=torch.float64),
    ),
    "partial support": (
        torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64),
        torch.tensor([0.0, 0.6, 0.1, 0.3], dtype=torch.float64),
    ),
}


class Script:
    """Stands for the uniform of every acceptance: rejects `rejections` times, then accepts. `weight` is how likely that
    was."""

    def __init__(self, rejections):
        self.left, self.weight = rejections, 1.0

    def __lt__(self, ratio):
        accept = min(1.0, float(ratio))
        reject, self.left = self.left > 0, self.left - 1
        self.weight *= 1 - accept if reject else accept
        if self.weight == 0:
            raise Impossible
        return not reject


class Impossible(Exception):
    pass


def emitted(p, q, width, monkeypatch):
    """The law of the first token that `verify` emits for `width` candidates below the root, drawn from q without
    replacement."""
    law = torch.zeros_like(p)
    for tokens in permutations(q.nonzero().flatten().tolist(), width):
        drawn, left = 1.0, 1.0
        for token in tokens:
            drawn, left = drawn * float(q[token]) / left, left - float(q[token])
        draft = Draft(tokens, (-1,) * width, q.expand(width, -1))
        for rejections in range(width + 1):
            script, residuals = Script(rejections), []
            monkeypatch.setattr(rejection, "_uniform", lambda generator, script=script: script)
            monkeypatch.setattr(rejection, "draw", lambda p, _, seen=residuals: seen.append(p) or 0)
            try:
                path, _ = rejection.verify(draft, lambda node: p, None)
            except Impossible:
                continue
            if path:
                law[tokens[path[0]]] += drawn * script.weight
            else:
                law += drawn * script.weight * residuals[0]
    return law


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_candidates_without_replacement_balance_exactly(pair, width, monkeypatch):
    p, q = PAIRS[pair]
    width = min(width, int((q > 0).sum()))
    torch.testing.assert_close(emitted(p, q, width, monkeypatch), p, atol=1e-12, rtol=0)


@pytest.mark.parametrize("width", [1, 2])
def test_a_residual_that_is_not_subtracted_does_not_balance(width, monkeypatch):
    p, q = PAIRS["lecture"]
    monkeypatch.setattr(rejection, "_normalised", lambda weights: p)
    assert (emitted(p, q, width, monkeypatch) - p).abs().max() > 1e-2


def test_a_law_that_keeps_the_candidates_drawn_before_does_not_balance(monkeypatch):
    """q left as it was for the second candidate: the rule for chains applied to siblings."""
    p, q = PAIRS["far"]
    honest = rejection._normalised
    monkeypatch.setattr(rejection, "_normalised", lambda weights: q if (weights == q).sum() == 7 else honest(weights))
    assert (emitted(p, q, 2, monkeypatch) - p).abs().max() > 1e-3
