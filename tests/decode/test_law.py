import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compressor.decode import Law
from compressor.decode.law import LawState
from compressor.decode.sampling import ProbabilityError, check_probabilities, draw
from compressor.errors import UsageError


def warped(law: Law, logits: torch.Tensor, text: list[int] | None = None) -> torch.Tensor:
    """The law by transformers' own processors, in the order `generate` applies them."""
    scores = logits.double()
    if law.repetition_penalty != 1:
        ids = torch.tensor([text] * len(scores))
        scores = RepetitionPenaltyLogitsProcessor(law.repetition_penalty)(ids, scores)
    if law.temperature != 1:
        scores = TemperatureLogitsWarper(law.temperature)(None, scores)
    if law.top_k is not None:
        scores = TopKLogitsWarper(law.top_k)(None, scores)
    if law.top_p < 1:
        scores = TopPLogitsWarper(law.top_p)(None, scores)
    if law.min_p > 0:
        scores = MinPLogitsWarper(law.min_p)(None, scores)
    return scores.softmax(-1)


LAWS = [Law(t, k, p) for t in (0.3, 1.0, 1.7) for k in (None, 1, 5, 10_000) for p in (0.05, 0.5, 0.9, 1.0)]
LAWS += [Law(t, 9, p, m) for t in (0.6, 1.4) for p in (0.7, 1.0) for m in (0.02, 0.3, 1.0)]


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


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_a_repetition_penalty_is_that_of_transformers_over_prompt_text_and_path(penalty):
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(1)) * 3
    law = Law(temperature=0.9, repetition_penalty=penalty)
    state = LawState(law, 60)
    state.begin([3, 4, 4])
    state.commit([50])
    assert torch.equal(state.probs(logits[0], [7, 50]), warped(law, logits, [3, 4, 4, 50, 7, 50])[0])
    assert torch.equal(state.probs(logits[0]), warped(law, logits, [3, 4, 4, 50])[0])  # the path was not committed
    assert not torch.equal(state.probs(logits[0], [7]), warped(law, logits, [3, 4, 4])[0])
    assert state.best(logits[0], [7]) == warped(law, logits, [3, 4, 50, 7])[0].argmax()


def test_a_law_that_reads_the_text_is_not_applied_without_it():
    with pytest.raises(ProbabilityError, match="needs the tokens of the text"):
        Law(repetition_penalty=1.2).probs(torch.zeros(5))
    with pytest.raises(ProbabilityError, match="needs the grammar's state"):
        Law(grammar=object()).probs(torch.zeros(5))


def test_a_text_ends_at_its_stops():
    state = LawState(Law(), 10, stops=[4])
    assert state.ends([1, 4]) and not state.ends([4, 1]) and not state.ends([])


def test_work_per_call_does_not_grow_with_the_text():
    """The seen tokens are one mask that is written, never rebuilt: its storage stays where it is."""
    state = LawState(Law(repetition_penalty=1.1), 100)
    state.begin(range(50))
    pointer = state.masks(())["seen"].data_ptr()
    for token in range(50, 100):
        state.commit([token])
    assert state.masks(())["seen"].data_ptr() == pointer and state.masks(())["seen"].all()


def test_top_k_keeps_every_token_tied_with_the_last():
    assert Law(top_k=2).probs(torch.tensor([1.0, 3.0, 2.0, 2.0])).tolist()[0] == 0
    assert (Law(top_k=2).probs(torch.tensor([1.0, 3.0, 2.0, 2.0])) > 0).sum() == 3


def test_zero_temperature_is_the_first_of_the_largest():
    probs = Law(temperature=0, top_k=3, top_p=0.1).probs(torch.tensor([[0.0, 7.0, 7.0], [5.0, 1.0, 5.0]]))
    assert probs.dtype == torch.float64
    assert probs.tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-310, 1e-30])
def test_a_temperature_near_zero_is_nearly_greedy_and_does_not_overflow(temperature):
    logits = torch.tensor([[500.0, -torch.inf, 499.0], [-3.0, -3.0, -800.0]])
    assert Law(temperature).probs(logits).tolist() == [[1, 0, 0], [0.5, 0.5, 0]]


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
        {"min_p": -0.1},
        {"min_p": 1.5},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-308},
        {"repetition_penalty": float("inf")},
    ],
)
def test_fields_outside_their_range_are_refused_by_name(fields):
    with pytest.raises(UsageError, match=next(iter(fields))):
        Law(**fields)


def uniforms(seed: int) -> torch.Tensor:
    return torch.rand(40_000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_samples_follow_the_probabilities_and_the_uniforms():
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=torch.float64).expand(40_000, 4)
    tokens = draw(probs, uniforms(1))
    counts = tokens.bincount(minlength=4) / len(tokens)
    assert counts[1] == 0
    assert torch.allclose(counts.double(), probs[0], atol=0.01)
    assert torch.equal(tokens, draw(probs, uniforms(1))) and not torch.equal(tokens, draw(probs, uniforms(2)))


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
            check_probabilities("p", torch.tensor(bad, dtype=torch.float64))
    with pytest.raises(ProbabilityError, match="nothing to sample"):
        draw(torch.zeros(3, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_greedy_token_is_the_first_of_the_largest_also_without_a_law_of_the_text(dtype):
    logits = torch.randn(49152, generator=torch.Generator().manual_seed(0)).to(dtype)  # bfloat16: many equal values
    logits[[40_000, 123, 9_000]] = 7.0
    assert LawState(Law(0.0), 49152).best(logits) == 123
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ProbabilityError):
            LawState(Law(0.0), 49152).best(logits.index_fill(0, torch.tensor(5), bad))
