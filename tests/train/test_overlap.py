"""The share of its law that a head has in common with the target, and what is read from it."""

import pytest
import tiny_models as tiny
import torch
from tiny_heads import random_head

from compressor.decode.decoder import Decoder
from compressor.decode.law import Law, LawState
from compressor.errors import CompressError, UsageError
from compressor.proposers.base import Context
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.train import export, overlap, states
from compressor.train.corpus import Document
from compressor.train.overlap import Examined, Overlap
from compressor.ui import NullUI

AUX = (1, 2, 3)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(tiny.random_model(num_hidden_layers=4))


def texts(lengths=(20, 33, 9), start=4):
    generator = torch.Generator().manual_seed(2)
    return [
        Document(torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist(), start)
        for length in lengths
    ]


def in_the_runner(proposer, decoder, text, place, aux):
    """Of the token at `place`: Σ min(p, q), and whether p and q have one favourite; q as a session drafts from it after
    the tokens before, p the target's."""
    found = states.read(decoder, [text], aux)[0]
    width = decoder.config.hidden_size
    law = LawState(Law(1.0), decoder.vocab_size)
    context = Context(text[:place], 1, law, torch.Generator().manual_seed(0), found[: place - 1, :-width])
    q = proposer.session().propose(context).q[0]
    p = decoder.logits(found[place - 1 : place, -width:])[0].double().softmax(-1)
    return torch.stack([torch.minimum(p, q).sum(), (p.argmax() == q.argmax()).double()])


@pytest.mark.parametrize("size", [150, tiny.VOCABULARY])
@pytest.mark.parametrize("read_tokens", [1, 1024])
def test_it_is_the_rate_at_which_the_runners_draws_are_accepted(decoder, tmp_path, monkeypatch, read_tokens, size):
    monkeypatch.setattr(overlap, "READ_TOKENS", read_tokens)
    export.write(random_head(decoder, aux=AUX, size=size), tmp_path)
    proposer, documents = Eagle3Proposer.load(tmp_path, decoder), texts()
    found = overlap.examine(proposer, decoder, documents)
    assert found.own.text.tolist() == [0] * 15 + [1] * 28 + [2] * 4  # the first token of an answer is not foreseen
    for shift, seen in {0: found.own, **found.moved}.items():
        aux = tuple(index + shift for index in AUX)
        wanted = [
            in_the_runner(proposer, decoder, document.tokens, place, aux)
            for document in documents
            for place in range(document.start + 1, len(document.tokens))
        ]
        columns = torch.stack([seen.accepted, seen.agrees], -1)
        assert torch.allclose(columns.double(), torch.stack(wanted), atol=1e-5)
    assert sorted(found.moved) == [-1, 1]
    assert not torch.allclose(found.own.accepted, found.moved[1].accepted, atol=1e-3)


def test_states_that_the_target_does_not_have_are_not_tried(decoder, tmp_path):
    export.write(random_head(decoder, aux=(0, 2, 4)), tmp_path)
    found = overlap.examine(Eagle3Proposer.load(tmp_path, decoder), decoder, texts())
    assert found.moved == {} and found.fault is None


def of(accepted, text):
    accepted = torch.tensor(accepted)
    return Overlap(accepted, torch.ones_like(accepted), torch.tensor(text))


def test_the_error_of_a_difference_takes_texts_for_the_sample():
    text = [0, 0, 0, 1, 2, 2]
    one, other = of([0.6, 0.6, 0.6, 0.3, 0.7, 0.7], text), of([0.4] * 6, text)
    # Gains: .2 three times, -.1 once, .3 twice: .183 on average. The texts' sums lie .05, -.283 and .233 beyond that.
    squares = 0.05**2 + (17 / 60) ** 2 + (14 / 60) ** 2
    assert one.difference(other) == pytest.approx((11 / 60, (squares * 3 / 2) ** 0.5 / 6))


def test_one_text_has_no_error():
    assert of([0.6, 0.7], [0, 0]).difference(of([0.4, 0.4], [0, 0]))[1] == torch.inf


OWN = [0.80, 0.81, 0.79, 0.80, 0.80, 0.81, 0.79, 0.80]


def examined(moved, shift=1, own=OWN):
    text = list(range(len(own)))
    return Examined(AUX, of(own, text), {shift: of(moved, text)})


@pytest.mark.parametrize("shift", [-1, 1])
def test_states_that_are_surely_better_are_named(shift):
    better = [value + gain for value, gain in zip(OWN, [0.03, 0.04] * 4, strict=True)]
    fault = examined(better, shift).fault
    moved = [index + shift for index in AUX]
    assert f"with eagle_aux_hidden_state_layer_ids {moved} the target would accept 0.035" in fault


NO_FAULT = {
    "as good": OWN,
    "surely worse": [value - 0.05 for value in OWN],
    "better on average, by chance": [value + gain for value, gain in zip(OWN, [0.2, -0.15] * 4, strict=True)],
    "surely better, by next to nothing": [value + gain for value, gain in zip(OWN, [0.003, 0.004] * 4, strict=True)],
    "not a number": [float("nan")] * 8,
}


@pytest.mark.parametrize("moved", NO_FAULT.values(), ids=NO_FAULT)
def test_states_that_are_not_surely_better_are_no_fault(moved):
    assert examined(moved).fault is None


def test_few_texts_say_nothing_about_states():
    own = OWN[:7]
    assert examined([value + 0.03 for value in own], own=own).fault is None


def test_a_head_that_the_target_hardly_ever_accepts_is_a_fault():
    assert "it is damaged" in examined([0.01] * 8, own=[0.019] * 8).fault
    assert examined([0.01] * 8, own=[0.021] * 8).fault is None


def test_one_text_has_no_error_in_json():
    found = Examined(AUX, of([0.5, 0.6], [0, 0]), {1: of([0.4, 0.4], [0, 0])}).summary()
    assert found["layers+1"]["error"] is None and found["layers+1"]["gain"] == pytest.approx(-0.15)


def test_a_head_whose_states_overflow_is_refused(decoder, tmp_path):
    head = random_head(decoder, aux=AUX)
    with torch.no_grad():
        head.fc.weight.mul_(1e38)
    export.write(head, tmp_path)
    with pytest.raises(CompressError, match="NaN or infinite"):
        overlap.examine(Eagle3Proposer.load(tmp_path, decoder), decoder, texts())


DAMAGE = {
    "a norm of another size": lambda head: head.norm.weight.mul_(0.2),
    "shuffled rows": lambda head: head.lm_head.weight.copy_(head.lm_head.weight.flip(0)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_export_shares_its_law_with_what_was_trained_and_a_damaged_one_does_not(decoder, tmp_path, damage):
    head, documents = random_head(decoder, aux=AUX), texts()
    export.write(head, tmp_path)
    proposer = Eagle3Proposer.load(tmp_path, decoder)
    assert overlap.shared(head, proposer, decoder, documents) > 0.999
    with torch.no_grad():
        DAMAGE[damage](head)
    assert overlap.shared(head, proposer, decoder, documents) < overlap.LEAST_SAME


def test_the_export_is_given_the_states_that_it_names(decoder, tmp_path):
    head = random_head(decoder, aux=AUX)
    export.write(head, tmp_path)
    proposer = Eagle3Proposer.load(tmp_path, decoder)
    proposer.features = (0, 1, 2)
    assert overlap.shared(head, proposer, decoder, texts()) < overlap.LEAST_SAME


def test_ids_of_another_tokenizer_are_refused(decoder):
    with pytest.raises(UsageError, match="outside the model's vocabulary of"):
        overlap.greedy_texts(decoder, [[5, decoder.vocab_size]], NullUI())


def test_answers_are_the_targets_own_and_begin_behind_the_prompt(decoder):
    prompts = [[5, 6, 7], [8, 9, 10, 11]]
    found = overlap.greedy_texts(decoder, prompts, NullUI())
    for text, prompt in zip(found, prompts, strict=True):
        assert text.tokens[: text.start] == prompt
        logits = decoder.logits(states.read(decoder, [text.tokens], ())[0])
        assert logits.argmax(-1)[text.start - 1 : -1].tolist() == text.tokens[text.start :]


def test_prompts_that_leave_no_room_for_an_answer_are_left_out(decoder):
    fits, too_long = [5] * (decoder.max_length - overlap.TOKENS), [5] * (decoder.max_length - overlap.TOKENS + 1)
    (found,) = overlap.greedy_texts(decoder, [too_long, fits], NullUI())
    assert found.start == len(fits)
