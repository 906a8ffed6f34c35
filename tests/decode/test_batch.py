"""Texts beside each other: what belongs to one stays with it."""

import pytest
import tiny_models as tiny
import torch
from toys import PROMPT, VOCABULARY, TableDecoder, TableProposer, table_batch

from compressor.decode import Adaptive, Batch, Decoder, Law, Request
from compressor.decode.decoder import CHUNK, Feed
from compressor.decode.length import Fixed
from compressor.proposers.base import Draft

GREEDY = Law(temperature=0.0)


class ThreeTokens:
    """A grammar that is complete after three tokens, none of which is a stop."""

    def matcher(self):
        return ThreeTokensMatcher()


class ThreeTokensMatcher:
    def __init__(self):
        self.count = 0

    def allowed(self, path):
        return torch.ones(VOCABULARY, dtype=torch.bool) if self.count + len(path) < 3 else None

    def commit(self, tokens):
        self.count += len(tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("branching", [None, (2, 2)], ids=["chain", "tree"])
def test_a_grammar_that_is_complete_ends_the_text_without_a_stop(branching, temperature):
    law = Law(temperature=temperature, grammar=ThreeTokens())
    for proposer in (None, TableProposer(branching)):
        batch = table_batch(proposer)()
        texts = [batch.join(Request(PROMPT, 20, law, seed, frozenset())) for seed in range(20)]
        while batch.texts:
            batch.step()
        assert [(len(text.output.token_ids), text.output.stop, text.error) for text in texts] == [
            (3, "grammar", None)
        ] * 20


class FailsOnTwo(TableProposer):
    """An error that nobody foresaw, in the drafting for texts that start with 2."""

    def propose(self, context):
        if context.history[0] == 2:
            raise RuntimeError("the session broke")
        return super().propose(context)


def test_an_unforeseen_error_of_one_session_ends_its_own_text_alone():
    batch = Batch(TableDecoder(), FailsOnTwo(), Fixed(2))
    good, bad = (batch.join(Request([first, 1, 0], 12, GREEDY, 0, frozenset())) for first in (1, 2))
    while batch.texts:
        batch.step()
    assert len(good.output.token_ids) == 12 and good.error is None
    assert isinstance(bad.error, RuntimeError) and str(bad.error) == "the session broke"


def test_a_long_prompt_is_read_piece_by_piece_while_others_go_on():
    decoder = Decoder(tiny.random_model(max_position_embeddings=4 * CHUNK))
    prompt = torch.randint(3, tiny.VOCABULARY, (2 * CHUNK + 5,), generator=torch.Generator().manual_seed(0)).tolist()
    longest, original = [], decoder.forward

    def forward(feeds, features=()):
        longest.append(max(len(feed.tokens) for feed in feeds))
        return original(feeds, features)

    decoder.forward = forward
    batch = Batch(decoder)
    other = batch.join(Request(prompt[:3], 9, GREEDY, 0, frozenset()))
    text = batch.join(Request(prompt, 4, GREEDY, 0, frozenset()))
    for step in range(3):
        assert len(other.output.token_ids) == step and text.reading
        batch.step()
    assert not text.reading and text.fresh and longest == [CHUNK, CHUNK, 5]
    while batch.texts:
        batch.step()
    cache = decoder.cache(len(prompt))
    whole = original([Feed(prompt, cache)])[0].logits[0]
    assert text.output.cycles == 4 and text.output.token_ids[0] == int(whole.argmax())


class Clock:
    """A length that notes what it is told."""

    limit, confidence = 2, 0.0

    def __init__(self):
        self.told = []

    def choose(self):
        return self.limit

    def record(self, cycles, seconds):
        self.told.append((len(cycles), seconds))


def test_costs_are_those_of_a_whole_step_and_not_told_while_a_prompt_is_read():
    clock = Clock()
    batch = table_batch(TableProposer(), length=clock)()
    texts = [batch.join(Request(PROMPT, 20, GREEDY, seed, frozenset())) for seed in range(4)]
    batch.step()
    batch.step()
    drafting = sum(text.draft_seconds for text in texts)
    batch.join(Request(PROMPT, 20, GREEDY, 9, frozenset()))
    batch.step()
    assert clock.told[0] == (0, None) and clock.told[2] == (4, None)
    assert clock.told[1][0] == 4 and clock.told[1][1][0] == drafting > texts[0].draft_seconds


def test_where_drafting_for_many_costs_more_than_it_saves_an_adaptive_length_drafts_little():
    def usual(texts):
        length, chosen = Adaptive(8), []
        for _ in range(300):
            k = length.choose()
            accepted = [sum(torch.rand(k).cumsum(0) < 0) + min(k, 3) for _ in range(texts)]
            length.record([(k, int(a)) for a in accepted], (0.1 * k * texts, 1.0))
            chosen.append(k)
        return sorted(chosen[-100:])[50]

    assert usual(1) == 3 and usual(16) == 0


def test_doubt_shortens_greedy_chains_too():
    """Whatever law is in force, a chain stops after a token that the proposer itself gave less than `confidence`."""
    flat, certain = torch.zeros(4, 4, 4).double(), 50 * torch.eye(4).double().expand(4, 4, 4)
    length = Fixed(3)
    length.confidence = 0.9
    depths = {}
    for name, table in (("flat", flat), ("certain", certain)):
        for temperature in (0.0, 1.0):
            batch = Batch(TableDecoder(), Noting(depths, (name, temperature), table), length)
            batch.join(Request(PROMPT, 6, Law(temperature), 0, frozenset()))
            batch.step()
            batch.step()
    assert depths == {("flat", 0.0): 1, ("flat", 1.0): 1, ("certain", 0.0): 3, ("certain", 1.0): 3}


class Noting(TableProposer):
    def __init__(self, depths, key, table):
        super().__init__(table=table)
        self.depths, self.key = depths, key

    def propose(self, context) -> Draft:
        draft = super().propose(context)
        self.depths[self.key] = len(draft.tokens)
        return draft
