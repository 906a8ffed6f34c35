"""The law of whole continuations under speculation is the target's: chi-square against the float64 law of target-only
decoding, enumerated over three tokens, for every shape of draft and every law. Wrong samplers fail it, in
test_wrong_samplers.py.

Each comparison may fail by chance with probability `toys.LEVEL`; all of them together stay below 1e-6.
"""

import pytest
import tiny_models as tiny
import torch
from toys import (
    BESIDE,
    LAWS,
    LENGTH,
    PROMPT,
    SAMPLES,
    VOCABULARY,
    TableDecoder,
    TableProposer,
    continuations,
    deviates,
    law_of,
    off,
    sampled,
    table_batch,
    table_logits,
)

from compressor.decode import Adaptive, Batch, Law, Request, Runner
from compressor.decode.length import Fixed
from compressor.proposers.ngram import NgramProposer
from compressor.proposers.suffix import SuffixProposer

SHAPES = {
    "chain": TableProposer(),
    "tree": TableProposer((3, 2, 1)),
    "block-parallel chain": TableProposer(parallel=True),
    "block-parallel tree": TableProposer((2, 2), parallel=True),
    "n-gram": NgramProposer(1, 3),
    "suffix": SuffixProposer(),
}


class NoRepeats:
    """A grammar of texts in which no token follows itself, and 3 (the stop) comes only after 2."""

    def matcher(self):
        return NoRepeatsMatcher()


class NoRepeatsMatcher:
    def __init__(self):
        self.text = []

    def allowed(self, path):
        text = [*self.text, *path]
        if any(not self._may(text[:i], token) for i, token in enumerate(text)) or text[-1:] == [3]:
            return None
        return torch.tensor([self._may(text, token) for token in range(VOCABULARY)])

    def _may(self, text, token):
        return token != (text or [None])[-1] and (token != 3 or text[-1:] == [2])

    def commit(self, tokens):
        self.text += tokens


GRAMMAR = Law(temperature=1.2, repetition_penalty=1.3, grammar=NoRepeats())


def test_the_comparison_passes_the_law_itself_and_not_its_neighbour():
    law = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    assert not deviates((law * 20_000).round(), law)
    assert deviates((torch.tensor([0.53, 0.28, 0.19]) * 20_000).round(), law)
    everything = law_of(Law())
    assert len(everything) == VOCABULARY**LENGTH and abs(sum(everything.values()) - 1) < 1e-12


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_every_law_holds_for_chains_and_trees(shape, law):
    counts = sampled(table_batch(SHAPES[shape]), PROMPT, LAWS[law], LENGTH)
    assert not off(counts, law_of(LAWS[law]))
    assert off(counts, law_of(Law(temperature=1.6)))  # the comparison can tell laws apart


@pytest.mark.parametrize("shape", [None, *SHAPES])
def test_every_shape_holds_under_a_grammar_with_a_stop(shape):
    proposer = SHAPES[shape] if shape else None
    law = law_of(GRAMMAR, stops=[3])
    assert min(map(len, law)) < LENGTH  # some texts end early
    assert not off(sampled(table_batch(proposer), PROMPT, GRAMMAR, LENGTH, stops=[3]), law)


@pytest.mark.parametrize("shape", ["chain", "tree", "n-gram"])
def test_one_text_at_a_time_has_the_law_too(shape):
    runner, law, counts = Runner(TableDecoder(), SHAPES[shape], 3), LAWS["all"], {}
    for seed in range(SAMPLES):
        key = tuple(runner.generate(PROMPT, LENGTH, law, seed).token_ids)
        counts[key] = counts.get(key, 0) + 1
    assert not off(counts, law_of(law))


def test_a_text_has_its_law_in_any_company():
    """Texts of other laws, lengths and prompts join and leave beside it, and each keeps its own law."""
    counts = [{}, {}]
    laws, prompts, lengths = [Law(temperature=0.7, top_k=3), Law(temperature=1.4)], [PROMPT, [0, 1, 3]], [3, 2]
    batch = Batch(TableDecoder(), TableProposer(), Fixed(3))
    waiting = [(seed, kind) for seed in range(SAMPLES) for kind in (0, 1)][::-1]
    texts = {}
    while waiting or batch.texts:
        while waiting and len(batch.texts) < BESIDE:
            seed, kind = waiting.pop()
            texts[batch.join(Request(prompts[kind], lengths[kind], laws[kind], seed))] = kind
        for text in batch.step():
            if text.done:
                key = tuple(text.output.token_ids)
                counts[texts[text]][key] = counts[texts[text]].get(key, 0) + 1
    for kind in (0, 1):
        wanted = continuations(table_logits, prompts[kind], laws[kind], lengths[kind], VOCABULARY)
        assert not off(counts[kind], wanted)
    assert off(counts[0], law_of(laws[1]))


def test_the_same_seed_gives_the_same_text_alone_and_in_company():
    runner, law = Runner(TableDecoder(), TableProposer((2, 1)), 2), LAWS["all"]
    alone = [runner.generate(PROMPT, 12, law, seed).token_ids for seed in range(20)]
    batch = runner.batch()
    together = [batch.join(Request(PROMPT, 12, law, seed)) for seed in range(20)]
    while batch.texts:
        batch.step()
    assert [text.output.token_ids for text in together] == alone and len(set(map(tuple, alone))) > 15


@pytest.mark.parametrize("proposer", [TableProposer(), NgramProposer(1, 3)], ids=["chain", "n-gram"])
def test_an_adaptive_length_leaves_the_law(proposer):
    lengths = Adaptive(limit=3)
    law = LAWS["temperature"]
    assert not off(sampled(table_batch(proposer, length=lengths), PROMPT, law, LENGTH), law_of(law))


def test_stopping_after_a_doubtful_token_leaves_the_law():
    length, law = Fixed(3), LAWS["temperature"]
    length.confidence = 0.5
    assert not off(sampled(table_batch(TableProposer(), length=length), PROMPT, law, LENGTH), law_of(law))


# --- a real model's cache and mask ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    """A Llama of five tokens in float64 and its logits after any text."""
    model = tiny.random_model(
        "llama", std=0.5, dtype=torch.float64, vocab_size=5, hidden_size=16, intermediate_size=32, eos_token_id=None
    )
    return Runner(model).decoder


class RandomTree(TableProposer):
    def __init__(self, branching):
        generator = torch.Generator().manual_seed(4)
        super().__init__(branching, table=torch.randn(5, 5, 5, generator=generator).double())


@pytest.mark.parametrize("branching", [None, (3, 2)], ids=["chain", "tree"])
def test_a_real_model_has_its_law(small, branching):
    prompt, law = [3, 1, 4, 1, 2], Law(temperature=1.1, repetition_penalty=1.2)

    def logits_after(text):
        from compressor.decode.decoder import Feed

        return small.forward([Feed(text, small.cache(16))])[0].logits[0]

    wanted = continuations(logits_after, prompt, law, LENGTH, 5)
    counts = sampled(lambda: Batch(small, RandomTree(branching), Fixed(2)), prompt, law, LENGTH)
    assert not off(counts, wanted)
    stale = continuations(lambda text: logits_after(text[:-1]), prompt, law, LENGTH, 5)
    assert off(counts, stale)
