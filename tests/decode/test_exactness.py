"""The law of whole continuations under speculation is the target's: chi-square against the float64 law of target-only
decoding, enumerated over three tokens, for every shape of draft and every law; and wrong samplers fail.

Each comparison may fail by chance with probability `toys.LEVEL`; all of them together stay below 1e-6. A wrong sampler
must fail at that same level.
"""

from dataclasses import replace

import pytest
import tiny_models as tiny
import torch
from toys import (
    BESIDE,
    DRAFT,
    PROMPT,
    SAMPLES,
    TARGET,
    VOCABULARY,
    TableDecoder,
    TableProposer,
    continuations,
    deviates,
    off,
    sampled,
    table_batch,
    table_logits,
)

from compressor.decode import Adaptive, Batch, Law, Request, Runner, rejection
from compressor.decode.cache import SequenceCache
from compressor.decode.length import Fixed
from compressor.proposers.base import Draft
from compressor.proposers.ngram import NgramProposer
from compressor.proposers.suffix import SuffixProposer

LENGTH = 3
LAWS = {
    "temperature": Law(temperature=0.8),
    "top-k": Law(temperature=1.3, top_k=3),
    "top-p": Law(temperature=1.3, top_p=0.85),
    "min-p": Law(temperature=1.2, min_p=0.15),
    "repetition penalty": Law(temperature=1.1, repetition_penalty=1.8),
    "all": Law(temperature=1.2, top_k=3, top_p=0.95, min_p=0.02, repetition_penalty=1.4),
}
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


def law_of(law, stops=()):
    return continuations(table_logits, PROMPT, law, LENGTH, VOCABULARY, stops)


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


# --- wrong samplers ---------------------------------------------------------------------------------------------------


class Wrapped(TableProposer):
    """A table proposer whose finished draft goes through `change(draft, context)`."""

    def __init__(self, change, **options):
        super().__init__(**options)
        self.change = change

    def propose(self, context):
        return self.change(super().propose(context), context)


def caught(proposer, law, **options) -> bool:
    return off(sampled(table_batch(proposer, **options), PROMPT, law, LENGTH), law_of(law))


def raw_q(draft, context):
    """Claims the unfiltered law while the tokens were drawn from the filtered one."""
    text = [*context.history[-1:], *draft.tokens]
    before = [context.history[-2], *text]
    rows = [torch.softmax(DRAFT[before[i], text[i]] / 1.3, -1) for i in range(len(draft.tokens))]
    return replace(draft, q=torch.stack(rows))


def drops_the_doubtful(draft, context):
    """Throws drawn tokens away for being improbable: what is left was not drawn from q."""
    keep = 0
    while keep < len(draft.tokens) and draft.q[keep, draft.tokens[keep]] > 0.45:
        keep += 1
    return Draft(draft.tokens[:keep], q=draft.q[:keep]) if keep else Draft(())


@pytest.mark.parametrize("change", [raw_q, drops_the_doubtful], ids=lambda f: f.__name__)
def test_a_draft_that_misstates_its_law_is_caught(change):
    assert caught(Wrapped(change), Law(temperature=1.3, top_k=2))
    assert not caught(Wrapped(lambda draft, context: draft), Law(temperature=1.3, top_k=2))


@pytest.mark.parametrize("branching", [None, (3, 2)], ids=["chain", "tree"])
def test_a_residual_that_is_not_subtracted_is_caught(monkeypatch, branching):
    def unsubtracted(draft, law_at, generator):
        path, node = [], -1
        while True:
            p = law_at(node)
            for child in draft.children.get(node, []):
                token = draft.tokens[child]
                if torch.rand((), generator=generator) < p[token] / draft.q[child, token]:
                    path.append(child)
                    node = child
                    break
            else:
                return path, int(torch.multinomial(p, 1, generator=generator))

    monkeypatch.setattr(rejection, "verify", unsubtracted)
    assert caught(TableProposer(branching), LAWS["temperature"])


def test_a_tree_verified_by_the_rule_for_chains_is_caught(monkeypatch):
    """Every candidate judged as if it were the first: q is not reduced by the siblings drawn before."""
    rule = rejection._normalised
    state = {}

    def forgets(weights):
        # the residual of p is kept, the renormalised q is replaced by the q that the first sibling was drawn from
        kept = rule(weights)
        state["calls"] = state.get("calls", 0) + 1
        return state["q"] if state["calls"] % 2 == 0 else kept

    def chain_rule(draft, law_at, generator):
        def law(node):
            state.update(calls=0, q=draft.q[draft.children[node][0]] if node in draft.children else None)
            return law_at(node)

        return original(draft, law, generator)

    original = rejection.verify
    monkeypatch.setattr(rejection, "_normalised", forgets)
    monkeypatch.setattr(rejection, "verify", chain_rule)
    assert caught(TableProposer((3, 2, 1)), LAWS["temperature"])


def test_candidates_put_in_another_order_after_drawing_are_caught(monkeypatch):
    """The second candidate has the law of q without the first only in the order of drawing."""
    import compressor.proposers.drafting as drafting

    honest = drafting._children

    def ranked(context, logits, path, width):
        tokens, law = honest(context, logits, path, width)
        return sorted(tokens, key=lambda token: float(law[token])), law

    monkeypatch.setattr(drafting, "_children", ranked)
    assert caught(TableProposer((3, 2, 1)), LAWS["temperature"])


def test_a_drawn_draft_may_be_verified_as_a_fixed_one():
    """A draw from p that happens to be in the draft is a draw from p: less is accepted, nothing is lost."""
    claims_certainty = Wrapped(lambda draft, context: replace(draft, q=None), branching=(2, 2))
    assert not caught(claims_certainty, LAWS["temperature"])


@pytest.mark.parametrize("branching", [None, (2,)], ids=["chain", "tree"])
def test_a_cache_that_keeps_rejected_tokens_is_caught(monkeypatch, branching):
    def keeps_all(self, prefix, extra=()):
        self.length = self.written

    poor = TableProposer(branching, table=-TARGET)
    assert not caught(poor, LAWS["temperature"])
    monkeypatch.setattr(SequenceCache, "keep", keeps_all)
    assert caught(poor, LAWS["temperature"])


def test_laws_that_ignore_the_drafted_path_are_caught(monkeypatch):
    from compressor.decode.law import LawState

    honest = LawState.masks
    monkeypatch.setattr(LawState, "masks", lambda self, path: honest(self, ()))
    assert caught(TableProposer(), LAWS["repetition penalty"])


def test_typical_acceptance_is_lossy():
    assert caught(TableProposer(), LAWS["temperature"], rule="typical")


# --- the mathematics of one position ----------------------------------------------------------------------------------


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


def emitted(p, q, width):
    """The law of the token that `verify` emits, exactly: over all candidate sequences and all outcomes of its draws."""
    law = torch.zeros_like(p)

    def candidates(chosen, probability, left):
        if len(chosen) == width or not (left > 0).any():
            judge(chosen, 0, probability, p, q)
            return
        for token in left.nonzero().flatten().tolist():
            rest = left.clone()
            rest[token] = 0
            share = float(left[token] / left.sum())
            candidates([*chosen, token], probability * share, rest)

    def judge(chosen, at, probability, residual, q_left):
        if probability == 0:
            return
        if at == len(chosen):
            law.add_(probability * residual)
            return
        token = chosen[at]
        accept = min(1.0, float(residual[token] / q_left[token]))
        law[token] += probability * accept
        if accept < 1:
            after = (residual - q_left).clamp_min(0)
            reduced = q_left.clone()
            reduced[token] = 0
            judge(
                chosen,
                at + 1,
                probability * (1 - accept),
                after / after.sum(),
                reduced / reduced.sum() if reduced.sum() > 0 else reduced,
            )

    candidates([], 1.0, q)
    return law


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_rejection_without_replacement_balances_exactly(pair, width):
    """The sum over all candidate sets of the rule's outcomes is p itself, not only in samples."""
    p, q = PAIRS[pair]
    torch.testing.assert_close(emitted(p, q, width), p, atol=1e-12, rtol=0)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_implementation_follows_that_rule(pair):
    p, q = PAIRS[pair]
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(len(p))
    width = min(3, int((q > 0).sum()))
    for _ in range(SAMPLES):
        left, chosen = q.clone(), []
        for _ in range(width):
            chosen.append(int(torch.multinomial(left, 1, generator=generator)))
            left[chosen[-1]] = 0
        draft = Draft(tuple(chosen), (-1,) * width, q.expand(width, -1))
        path, token = rejection.verify(draft, lambda node: p, generator)
        counts[chosen[path[0]] if path else token] += 1
    assert not deviates(counts, p)


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
