"""Samplers that are wrong in one place fail the comparison of test_exactness.py, at the same level."""

from dataclasses import replace

import pytest
import torch
from toys import DRAFT, LAWS, LENGTH, PROMPT, TARGET, TableProposer, law_of, off, sampled, table_batch

from compressor.decode import Law, rejection
from compressor.decode.cache import SequenceCache
from compressor.proposers.base import Draft


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
