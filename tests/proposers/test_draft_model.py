from dataclasses import replace

import pytest
import slow_speculation as slow
import tiny_models as tiny
import torch
from toys import keeps_the_law

from compressor.decode import Decoder, Law, Runner
from compressor.errors import UsageError
from compressor.proposers import draft_model
from compressor.proposers.draft_model import DraftModelProposer, DraftModelSession
from compressor.proposers.nodes import NodeCache

PROMPT = [5, 9, 3, 5, 11]
SIZE = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 48, "eos_token_id": None, "bos_token_id": None}
SIZE |= {"pad_token_id": None, "tie_word_embeddings": False}
TREE = (3, 2, 1)


def models(kind="llama", draft_kind="llama", draft_vocab=24, noise=0.03, **config):
    """A target and a draft that resembles it; where the vocabularies differ, they share the ids of the smaller."""
    target = tiny.random_model(kind, seed=1, **SIZE, **config)
    draft = tiny.random_model(draft_kind, seed=1, **{**SIZE, "vocab_size": draft_vocab}, **config)
    shared = min(24, draft_vocab)
    generator = torch.Generator().manual_seed(7)
    for (name, one), (_, other) in zip(target.named_parameters(), draft.named_parameters(), strict=True):
        if one.shape == other.shape:
            other.copy_(one + noise * torch.randn(one.shape, generator=generator) * ("norm" not in name))
        else:
            other[:shared] = one[:shared]
    return target, draft


def reference(target, draft, vocabulary, **settings):
    ours, theirs = slow.Model(target), slow.Model(draft)

    def draft_logits(history, path):
        logits = torch.full((target.config.vocab_size,), -torch.inf)
        logits[:vocabulary] = theirs.logits(history + path)[:vocabulary]
        return logits

    return slow.speculate(ours.logits, draft_logits, PROMPT, **settings)


@pytest.mark.parametrize("branching", [None, TREE])
@pytest.mark.parametrize(
    "kinds", [("llama", "llama"), ("qwen3", "qwen3"), ("mistral", "mistral"), ("gemma3", "gemma3")]
)
def test_greedy_output_is_that_of_the_target_alone(kinds, branching):
    target, draft = models(*kinds)
    decoder, proposer = Decoder(target), DraftModelProposer(Decoder(draft), 24, 24, branching)
    found = Runner(decoder, proposer, 3).generate(PROMPT, 40, Law(0.0), 0, ())
    assert found.token_ids == Runner(decoder).generate(PROMPT, 40, Law(0.0), 0, ()).token_ids
    assert 0 < found.accepted < found.proposed  # drafts of both kinds were there


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("branching", [None, TREE])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_run_equals_the_slow_reference(kind, branching, temperature):
    target, draft = models(kind, kind)
    settings = {"new": 30, "k": 3, "temperature": temperature, "seed": 4}
    found = slow.run(Decoder(target), DraftModelProposer(Decoder(draft), 24, 24, branching), PROMPT, **settings)
    assert found == reference(target, draft, 24, branching=branching, **settings)
    assert sum(map(sum, found.accepted_per_position)) > 5


@pytest.mark.parametrize(("draft_vocab", "temperature"), [(32, 0.7), (16, 0.0)])
def test_ids_that_the_models_do_not_share_are_never_proposed(draft_vocab, temperature):
    common = min(24, draft_vocab)
    target, draft = models(draft_vocab=draft_vocab)
    draft.lm_head.weight[common - 2 :] = 9 * draft.lm_head.weight[:1]  # would often be the draft's first choice
    target.lm_head.weight[draft_vocab:] = 0.0  # a greedy target does not write what the draft cannot read
    settings = {"new": 30, "k": 3, "temperature": temperature, "seed": 0}
    found = slow.run(Decoder(target), DraftModelProposer(Decoder(draft), common - 2, 24), PROMPT, **settings)
    assert found == reference(target, draft, common - 2, **settings)
    assert max(token for tokens in found.proposals for token in tokens) < common - 2
    unmasked = slow.run(Decoder(target), DraftModelProposer(Decoder(draft), common, 24), PROMPT, **settings)
    assert max(token for tokens in unmasked.proposals for token in tokens) >= common - 2


def test_after_a_token_that_the_draft_cannot_read_nothing_is_proposed():
    target, draft = models(draft_vocab=16)
    proposer = DraftModelProposer(Decoder(draft), 16, 24)
    found = Runner(Decoder(target), proposer, 3).generate([5, 20, 3], 8, Law(0.0), 0, ())
    assert found.proposed == 0 and len(found.token_ids) == 8
    assert Runner(Decoder(target), proposer, 3).generate([5, 2, 3], 2, Law(0.0), 0, ()).proposed > 0


@pytest.mark.parametrize("branching", [None, TREE])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_session_that_went_through_rejections_equals_a_new_one(branching, temperature, monkeypatch):
    target, draft = models()
    twins = slow.Twins(DraftModelProposer(Decoder(draft), 24, 24, branching), draft_model, monkeypatch)
    found = Runner(Decoder(target), twins, 3).generate(PROMPT, 40, Law(temperature), 1, ())
    assert twins.worst < 1e-5 and twins.calls > 10
    assert 0 < found.accepted < found.proposed


@pytest.mark.parametrize("branching", [None, TREE])
def test_a_session_that_keeps_the_wrong_nodes_is_caught(branching, monkeypatch):
    target, draft = models()
    twins = slow.Twins(DraftModelProposer(Decoder(draft), 24, 24, branching), draft_model, monkeypatch)
    right = NodeCache.keep
    monkeypatch.setattr(NodeCache, "keep", lambda self, path: right(self, self._nodes[-len(path) :] if path else []))
    Runner(Decoder(target), twins, 3).generate(PROMPT, 20, Law(0.0), 1, ())
    assert twins.worst > 1e-2


def test_every_token_is_read_once_and_the_last_level_never(monkeypatch):
    target, draft = models()
    proposer, read = DraftModelProposer(Decoder(draft), 24, 24), []
    original = proposer.read
    monkeypatch.setattr(proposer, "read", lambda tokens, *rest: read.append(len(tokens)) or original(tokens, *rest))
    found = Runner(Decoder(target), proposer, 3).generate(PROMPT, 40, Law(0.0), 1, ())
    cycles = found.cycles - 1
    assert len(read) == 3 * cycles  # the new text and two of three levels
    rejected = sum(2 - min(sum(entry), 2) for entry in found.accepted_per_position[1:])
    whole = len(PROMPT) + 1 + found.accepted + cycles - 1  # the text that the last draft saw, and what came after
    assert sum(read) <= whole + rejected


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_prompt_read_in_pieces_gives_the_same_run(size, monkeypatch):
    target, draft = models()
    settings = {"new": 20, "k": 3, "temperature": 1.0, "seed": 4}
    pieces = slow.read_in_pieces(monkeypatch, size)
    found = slow.run(Decoder(target), DraftModelProposer(Decoder(draft), 24, 24, TREE), PROMPT, **settings)
    assert found == reference(target, draft, 24, branching=TREE, **settings)
    assert max(pieces) == size


def test_the_cache_grows_with_the_text(monkeypatch):
    target, draft = models()
    settings = {"new": 30, "k": 3, "temperature": 1.0, "seed": 2}
    wide = slow.run(Decoder(target), DraftModelProposer(Decoder(draft), 24, 24, TREE), PROMPT, **settings)
    monkeypatch.setattr("compressor.proposers.nodes.CAPACITY", 2)
    assert slow.run(Decoder(target), DraftModelProposer(Decoder(draft), 24, 24, TREE), PROMPT, **settings) == wide


def test_it_stops_where_the_draft_models_positions_end():
    target, _ = models()
    _, draft = models(max_position_embeddings=16)
    found = Runner(Decoder(target), DraftModelProposer(Decoder(draft), 24, 24), 3).generate(PROMPT, 40, Law(0.0), 0, ())
    assert len(found.token_ids) == 40
    length = len(PROMPT)
    for accepted, proposal in zip(found.accepted_per_position, found.proposals, strict=True):
        expected = min(3, max(0, 17 - length)) if length > len(PROMPT) else 0
        assert len(proposal) == expected
        length += sum(accepted) + 1
    assert found.proposals[-1] == ()


@pytest.mark.parametrize("vocabulary", [0, 25])
def test_a_vocabulary_that_does_not_fit_is_refused(vocabulary):
    draft = Decoder(models()[1])
    with pytest.raises(UsageError, match=rf"vocabulary: {vocabulary} shared ids; the draft model has 24"):
        DraftModelProposer(draft, vocabulary, 24)
    with pytest.raises(UsageError, match="branching"):
        DraftModelProposer(draft, 24, 24, (2, 0))


def test_it_asks_for_no_states_of_the_target():
    assert DraftModelProposer.features == ()


@pytest.mark.parametrize("branching", [None, TREE])
def test_its_output_has_the_targets_law(branching):
    target, draft = models(draft_vocab=20)
    proposer = DraftModelProposer(Decoder(draft), 20, 24, branching)
    assert keeps_the_law(Decoder(target), proposer, PROMPT)


def test_a_draft_model_that_claims_the_law_it_did_not_draw_from_is_caught(monkeypatch):
    """It draws from the filtered law and states the raw one."""
    honest = DraftModelSession.propose

    def raw(self, context):
        draft = honest(self, context)
        return replace(draft, q=(draft.q + 0.05).div((draft.q + 0.05).sum(-1, keepdim=True)))

    monkeypatch.setattr(DraftModelSession, "propose", raw)
    target, draft = models()
    assert not keeps_the_law(Decoder(target), DraftModelProposer(Decoder(draft), 24, 24), PROMPT)


class Only:
    """A grammar that allows one token for ever."""

    def __init__(self, token):
        self.token = token

    def matcher(self):
        return self

    def allowed(self, path):
        return torch.arange(24) == self.token

    def commit(self, tokens):
        pass


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drafted_where_the_grammar_leaves_none_of_its_tokens(temperature):
    target, draft = models(draft_vocab=20)
    runner = Runner(Decoder(target), DraftModelProposer(Decoder(draft), 20, 24), 3)
    for token, drafts in ((22, False), (7, True)):
        out = runner.generate(PROMPT, 6, Law(temperature, grammar=Only(token)), 0, ())
        assert out.token_ids == [token] * 6 and bool(out.proposed) == drafts
