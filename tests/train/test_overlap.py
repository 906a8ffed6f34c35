"""The share of its law that a head has in common with the target, and what is read from it."""

import pytest
import tiny_models as tiny
import torch
from tiny_heads import random_head

from compressor.decode.decoder import Decoder
from compressor.decode.law import Law, LawState
from compressor.errors import CompressError
from compressor.proposers.base import Context
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.train import export, overlap, states
from compressor.train.corpus import Document
from compressor.train.overlap import Examined, Overlap

AUX = (1, 2, 3)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(tiny.random_model(num_hidden_layers=4))


@pytest.fixture
def proposer(decoder, tmp_path):
    export.write(random_head(decoder, aux=AUX), tmp_path)
    return Eagle3Proposer.load(tmp_path, decoder)


def texts(lengths=(20, 33, 9), start=4):
    generator = torch.Generator().manual_seed(2)
    return [
        Document(torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist(), start)
        for length in lengths
    ]


def shared_in_the_runner(proposer, decoder, text, place, aux):
    """Σ min(p, q) for the token at `place`: q as a session drafts from it after the tokens before, p the target's."""
    found = states.read(decoder, [text], aux)[0]
    width = decoder.config.hidden_size
    law = LawState(Law(1.0), decoder.vocab_size)
    context = Context(text[:place], 1, law, torch.Generator().manual_seed(0), found[: place - 1, :-width])
    q = proposer.session().propose(context).q[0]
    p = decoder.logits(found[place - 1 : place, -width:])[0].double().softmax(-1)
    return float(torch.minimum(p, q).sum()), int(q.argmax()) == text[place]


@pytest.mark.parametrize("read_tokens", [1, 1024])
def test_it_is_the_rate_at_which_the_runners_draws_are_accepted(decoder, proposer, monkeypatch, read_tokens):
    monkeypatch.setattr(overlap, "READ_TOKENS", read_tokens)
    documents = texts()
    found = overlap.examine(proposer, decoder, documents)
    assert found.own.text.tolist() == [0] * 15 + [1] * 28 + [2] * 4  # the first token of an answer is not foreseen
    for shift, seen in {0: found.own, **found.moved}.items():
        aux = tuple(index + shift for index in AUX)
        pairs = [
            shared_in_the_runner(proposer, decoder, document.tokens, place, aux)
            for document in documents
            for place in range(document.start + 1, len(document.tokens))
        ]
        shared, right = zip(*pairs, strict=True)
        assert torch.allclose(seen.shared, torch.tensor(shared), atol=1e-5)
        assert seen.right.tolist() == list(right)
    assert sorted(found.moved) == [-1, 1]
    assert not torch.allclose(found.own.shared, found.moved[1].shared, atol=1e-3)


def test_states_that_the_target_does_not_have_are_not_tried(decoder, tmp_path):
    export.write(random_head(decoder, aux=(0, 2, 4)), tmp_path)
    found = overlap.examine(Eagle3Proposer.load(tmp_path, decoder), decoder, texts())
    assert found.moved == {} and found.fault is None


def of(shared, right=None, text=None):
    shared = torch.tensor(shared)
    return Overlap(shared, torch.ones_like(shared) if right is None else torch.tensor(right), torch.tensor(text))


def test_the_error_of_a_difference_takes_texts_for_the_sample():
    text = [0, 0, 1, 1, 2, 2]
    one, other = of([0.6, 0.6, 0.5, 0.5, 0.7, 0.7], text=text), of([0.4, 0.4, 0.4, 0.4, 0.4, 0.4], text=text)
    mean, error = one.beyond(other)
    # Gains of the texts: .2, .1, .3; the standard error of the mean of three equal texts is their deviation / √3.
    assert (mean, error) == pytest.approx((0.2, 0.1 / 3**0.5))


def examined(own, moved, right=1.0, shift=1):
    text = [0, 1, 2, 3]
    return Examined(AUX, of(own, [right] * 4, text), {shift: of(moved, text=text)})


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_that_are_surely_better_are_named(shift):
    fault = examined([0.80, 0.81, 0.79, 0.80], [0.83, 0.84, 0.82, 0.84], shift=shift).fault
    assert f"with eagle_aux_hidden_state_layer_ids {[index + shift for index in AUX]} its law shares 0.032" in fault


@pytest.mark.parametrize(
    "moved",
    [
        [0.80, 0.81, 0.79, 0.80],  # as good
        [0.70, 0.71, 0.69, 0.72],  # surely worse
        [0.90, 0.81, 0.89, 0.71],  # better on average, by chance
    ],
)
def test_states_that_are_not_surely_better_are_no_fault(moved):
    assert examined([0.80, 0.81, 0.79, 0.80], moved).fault is None


def test_logits_of_another_scale_are_a_fault():
    assert "a final norm or a scale of logits is missing" in examined([0.5] * 4, [0.1] * 4, right=0.75).fault
    assert examined([0.5] * 4, [0.1] * 4, right=0.7).fault is None


def test_answers_are_the_targets_own_and_begin_behind_the_prompt(decoder):
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    found = overlap.greedy_texts(decoder, prompts)
    for text, prompt in zip(found, prompts, strict=True):
        assert text.tokens[: text.start] == prompt
        logits = decoder.logits(states.read(decoder, [text.tokens], ())[0])
        assert logits.argmax(-1)[text.start - 1 : -1].tolist() == text.tokens[text.start :]


def test_prompts_that_leave_no_room_for_an_answer_are_refused(decoder):
    with pytest.raises(CompressError, match="no answer of two tokens within"):
        overlap.greedy_texts(decoder, [[5] * decoder.max_length])
