import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from compressor.decode import Law
from compressor.decode.sampling import ProbabilityError, draw
from compressor.errors import UsageError


def warped(law: Law, logits: torch.Tensor) -> torch.Tensor:
    """The law by transformers' own processors, in the order `generate` applies them."""
    scores = logits.double()
    if law.temperature != 1:
        scores = TemperatureLogitsWarper(law.temperature)(None, scores)
    if law.top_k is not None:
        scores = TopKLogitsWarper(law.top_k)(None, scores)
    if law.top_p < 1:
        scores = TopPLogitsWarper(law.top_p)(None, scores)
    return scores.softmax(-1)


LAWS = [Law(t, k, p) for t in (0.3, 1.0, 1.7) for k in (None, 1, 5, 10_000) for p in (0.05, 0.5, 0.9, 1.0)]


@pytest.mark.parametrize("ties", [False, True])
def test_probabilities_equal_those_of_transformers(ties):
    logits = torch.randn(50, 257, generator=torch.Generator().manual_seed(0)) * 3
    if ties:
        logits = logits.round()  # about 20 distinct values among 257 tokens: every boundary is tied
    for law in LAWS:
        assert torch.equal(law.probs(logits), warped(law, logits)), law


def test_order_of_the_filters_matters():
    """Top-p before top-k, or temperature last, keeps other tokens: the comparison above can fail."""
    logits = torch.tensor([[3.0, 2.5, 2.0, 1.0, 0.0, -1.0]])
    law = Law(temperature=2.0, top_k=3, top_p=0.6)
    swapped = TopKLogitsWarper(3)(
        None, TopPLogitsWarper(0.6)(None, TemperatureLogitsWarper(2.0)(None, logits.double()))
    )
    assert not torch.equal(law.probs(logits) > 0, swapped.softmax(-1) > 0)


def test_top_k_keeps_every_token_tied_with_the_last():
    assert Law(top_k=2).probs(torch.tensor([1.0, 3.0, 2.0, 2.0])).tolist()[0] == 0
    assert (Law(top_k=2).probs(torch.tensor([1.0, 3.0, 2.0, 2.0])) > 0).sum() == 3


def test_zero_temperature_is_the_first_of_the_largest():
    probs = Law(temperature=0, top_k=3, top_p=0.1).probs(torch.tensor([[0.0, 7.0, 7.0], [5.0, 1.0, 5.0]]))
    assert probs.dtype == torch.float64
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]


def test_forbidden_tokens_get_no_probability():
    probs = Law(top_p=0.99).probs(torch.tensor([1.0, -torch.inf, 0.5]))
    assert probs[1] == 0 and probs.sum() == pytest.approx(1)


@pytest.mark.parametrize("bad", [[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf]])
@pytest.mark.parametrize("law", [Law(), Law(temperature=0), Law(top_k=1, top_p=0.5)])
def test_unusable_logits_are_refused(bad, law):
    with pytest.raises(ProbabilityError):
        law.probs(torch.tensor(bad))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "1"},
        {"top_k": 0},
        {"top_k": 2.0},
        {"top_k": True},
        {"top_p": 0.0},
        {"top_p": 1.01},
    ],
)
def test_fields_outside_their_range_are_refused_by_name(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        Law(**fields)


def test_samples_follow_the_probabilities_and_the_seed():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64).expand(40_000, 4)
    tokens = Law().sample(probs, torch.Generator().manual_seed(1))
    counts = tokens.bincount(minlength=4) / len(tokens)
    assert counts[1] == 0
    assert torch.allclose(counts.double(), probs[0], atol=0.01)
    assert torch.equal(tokens, Law().sample(probs, torch.Generator().manual_seed(1)))
    assert not torch.equal(tokens, Law().sample(probs, torch.Generator().manual_seed(2)))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_a_token_of_zero_probability_is_never_drawn_at_the_ends(uniform):
    weights = torch.tensor([0.0, 0.0, 0.1, 0.2, 0.7, 0.0, 0.0], dtype=torch.float64)
    assert draw(weights, torch.tensor(uniform, dtype=torch.float64)) == (2 if uniform == 0 else 4)
    tiny = weights * 1e-300
    assert draw(tiny, torch.tensor(uniform, dtype=torch.float64)) == (2 if uniform == 0 else 4)


def test_rounding_up_to_the_total_still_draws_a_possible_token():
    """A uniform that rounds to 1 would run off the end of a plain inverse CDF."""
    weights = torch.tensor([0.3, 0.7, 0.0], dtype=torch.float64)
    total = weights.cumsum(-1)[-1]
    assert torch.searchsorted(weights.cumsum(-1), total.view(1), right=True).item() == 3  # the plain rule
    assert draw(weights, torch.tensor(1.0, dtype=torch.float64)) == 1


def test_sampling_from_what_is_no_distribution_is_refused():
    for bad in ([0.5, 0.4], [1.1, -0.1], [torch.nan, 1.0]):
        with pytest.raises(ProbabilityError):
            Law().sample(torch.tensor(bad, dtype=torch.float64), torch.Generator())
    with pytest.raises(ProbabilityError, match="nothing to sample"):
        draw(torch.zeros(3, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))
