"""Medusa heads in training against plain loops, and their checkpoint in the runner that serves them."""

import json
from itertools import pairwise

import pytest
import tiny_models as tiny
import torch

from compressor.decode import Decoder, Law, Runner
from compressor.decode.law import LawState
from compressor.errors import UsageError
from compressor.proposers.base import Context
from compressor.proposers.medusa import MedusaProposer
from compressor.train import states as target_states
from compressor.train.corpus import Document
from compressor.train.loop import Schedule, train
from compressor.train.medusa import MedusaHeads, MedusaTask, export_medusa
from compressor.ui import NullUI

VOCABULARY, HIDDEN, COUNT = 12, 32, 3
SIZE = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48}
SIZE |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
KEPT = torch.tensor([0, 1, 3, 4, 6, 7, 8, 11])
KINDS = {  # how the heads are made
    "own outputs": {},
    "two layers": {"layers": 2},
    "one output": {"shared": True},
    "reduced": {"shared": True, "target_ids": KEPT},
}
NEXT = torch.tensor([5, 8, 0, 9, 1, 10, 2, 4, 11, 7, 6, 3])
"""A permutation of all tokens in one cycle: the toy target writes NEXT[t] after t."""


@pytest.fixture(scope="module")
def target():
    return tiny.random_model("llama", seed=1, **SIZE)


@pytest.fixture(scope="module")
def toy():
    """A target whose state is the embedding of its token alone, and which is sure of the next one."""
    model = tiny.random_model("llama", seed=1, **SIZE)
    for block in model.model.layers:
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    model.model.embed_tokens.weight.copy_(torch.nn.init.orthogonal_(torch.empty(HIDDEN, HIDDEN))[:VOCABULARY])
    model.model.norm.weight.fill_(1)
    model.lm_head.weight[NEXT] = 2 * model.model.embed_tokens.weight
    return model


def made(model, kind="own outputs", seed=0):
    """Heads of random weights, which bfloat16 can hold."""
    heads = MedusaHeads(model.lm_head.weight, COUNT, **KINDS[kind])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            parameter.copy_(parameter.bfloat16())
    return heads


def texts(count=4, longest=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest - 7 * i for i in range(count)]
    return [
        Document(torch.randint(VOCABULARY, (length,), generator=generator).tolist(), start=3 + i)
        for i, length in enumerate(lengths)
    ]


def logits(heads, state, index):
    weight = heads.lm_heads[0 if heads.shared else index].weight
    return weight @ heads(state[None], index)[0]


def foreseen(heads, state, index):
    return int(heads.target_ids[logits(heads, state, index).argmax()])


def by_hand(heads, teacher_head, documents, states, decay, shift=0):
    """Loss, hits and reached in loops; `shift` takes the teacher from so many places earlier."""
    hits, reached, losses, count = [0] * COUNT, [0] * COUNT, [], 0
    for document, state in zip(documents, states, strict=True):
        tokens, first = document.tokens, max(document.start, COUNT + 1)
        for place in range(first, len(tokens)):
            count += 1
            wanted = (teacher_head @ state[place - 1 - shift]).softmax(-1)
            for index in range(COUNT):
                if tokens[place] in heads.target_ids:
                    found = logits(heads, state[place - 2 - index], index).log_softmax(-1)
                    losses.append(-(decay**index) * float((wanted * found).sum()))
        place = first + 1  # a runner's first token is the target's own, and so is the one after every draft
        while place < len(tokens):
            start = place
            for index, token in enumerate(tokens[start : start + COUNT]):
                reached[index] += 1
                if foreseen(heads, state[start - 2], index) != token:
                    break
                hits[index] += 1
                place += 1
            place += 1
    return sum(losses) / count, hits, reached


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_loss_and_tally_equal_a_slow_count(kind, target):
    heads, documents, decoder = made(target, kind), texts(), Decoder(target)
    for document in documents:  # much of what the heads say: random tokens are hardly ever a head's
        for place in range(COUNT + 1, len(document.tokens)):
            if place % 8:
                (state,) = target_states.read(decoder, [document.tokens[:place]], ())
                document.tokens[place] = foreseen(heads, state[place - 2 - place % 3], place % 3)
    states = target_states.read(decoder, [document.tokens for document in documents], ())
    teacher_head = target.lm_head.weight[heads.target_ids]
    loss, tally = MedusaTask(heads, teacher_head, decay=0.7)(documents, states)
    expected, hits, reached = by_hand(heads, teacher_head, documents, states, 0.7)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert tally.hits.tolist() == hits and tally.reached.tolist() == reached
    assert hits[2] > 3 and reached[2] < reached[1] < reached[0]
    shifted, _, _ = by_hand(heads, teacher_head, documents, states, 0.7, shift=1)
    assert float(loss) != pytest.approx(shifted, rel=1e-3)


def test_states_beside_the_final_one_change_nothing(target):
    documents = texts()
    states = target_states.read(Decoder(target), [document.tokens for document in documents], (0, 1))
    task = MedusaTask(made(target), target.lm_head.weight, decay=0.7)
    loss, tally = task(documents, states)
    alone, same = task(documents, [state[:, -HIDDEN:] for state in states])
    assert loss == alone and torch.equal(tally.hits, same.hits)


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_a_text_too_short_for_all_heads_teaches_nothing(length, target):
    task = MedusaTask(made(target), target.lm_head.weight, decay=0.7)
    loss, tally = task([Document([4] * length, 1)], [torch.ones(length, HIDDEN)])
    assert float(loss.detach()) == 0 and tally.reached.tolist() == [0, 0, 0] and tally.tau == 1


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_exported_heads_propose_what_the_module_foresees(kind, target, tmp_path):
    heads, decoder = made(target, kind), Decoder(target)
    export_medusa(heads, tmp_path / "heads")
    session = MedusaProposer.load(tmp_path / "heads", decoder).session()
    text = texts()[0].tokens
    (states,) = target_states.read(decoder, [text], ())
    said = [tuple(foreseen(heads, state, index) for index in range(COUNT)) for state in states]
    for length in range(2, len(text)):
        law = LawState(Law(0.0), VOCABULARY)
        context = Context(text[:length], COUNT, law, torch.Generator(), states[: length - 1])
        assert session.propose(context).tokens == said[length - 2]
    # The comparison would notice another state, and heads in another order.
    assert sum(one != other for one, other in pairwise(said)) > 10
    assert sum(tokens[:-1] != tokens[1:] for tokens in said) > 10


def runs(start, count):
    tokens = [start]
    while len(tokens) < count:
        tokens.append(int(NEXT[tokens[-1]]))
    return tokens


def trained(toy, kind, folder, steps=120):
    documents = [Document(runs(start, 20), 2) for start in range(VOCABULARY)]
    states = target_states.read(Decoder(toy), [document.tokens for document in documents], ())
    heads = MedusaHeads(toy.lm_head.weight, COUNT, **KINDS[kind])
    task = MedusaTask(heads, toy.lm_head.weight[heads.target_ids], decay=0.8)
    schedule = Schedule(steps=steps, rate=0.02, warmup=5, batch_tokens=240, evaluate_every=steps // 4)
    picked = [0, 5]
    history = train(task, documents, lambda found: [states[i] for i in found], picked, schedule, folder, NullUI())
    return heads, history


def accepted(model, folder):
    """Drafted tokens that the target accepts, as a share."""
    decoder = Decoder(model)
    found = Runner(decoder, MedusaProposer.load(folder, decoder), COUNT).generate([4, 1], 40, Law(0.0), 0, ())
    assert found.token_ids == runs(1, 41)[1:]
    return found.accepted / found.proposed


@pytest.mark.parametrize("kind", ["own outputs", "one output"])
def test_trained_heads_are_accepted_and_heads_one_level_off_are_not(kind, toy, tmp_path):
    heads, history = trained(toy, kind, tmp_path / "run")
    assert history[-1]["loss"] < 0.7 * history[1]["loss"]
    assert max(entry["tau"] for entry in history) > 0.9 * (1 + COUNT)
    export_medusa(heads, tmp_path / "heads")
    assert accepted(toy, tmp_path / "heads") > 0.9
    heads.blocks = torch.nn.ModuleList([*heads.blocks[1:], heads.blocks[0]])
    heads.lm_heads = torch.nn.ModuleList([*heads.lm_heads[1:], heads.lm_heads[0]])
    export_medusa(heads, tmp_path / "heads")
    assert accepted(toy, tmp_path / "heads") < 0.1


def test_untrained_heads_say_what_the_target_says_next(toy, tmp_path):
    heads = MedusaHeads(toy.lm_head.weight, COUNT)
    state = target_states.read(Decoder(toy), [[7]], ())[0][0]
    assert [foreseen(heads, state, index) for index in range(COUNT)] == [int(NEXT[7])] * COUNT
    export_medusa(heads, tmp_path / "heads")
    assert accepted(toy, tmp_path / "heads") == 0


def test_a_reduced_vocabulary_is_written_as_the_engine_reads_it(target, tmp_path):
    export_medusa(made(target, "reduced"), tmp_path / "heads")
    config = json.loads((tmp_path / "heads" / "config.json").read_text())
    assert (config["vocab_size"], config["truncated_vocab_size"], config["original_lm_head"]) == (12, 8, True)


def test_separate_outputs_of_a_reduced_vocabulary_are_refused(target):
    with pytest.raises(UsageError, match="one output matrix"):
        MedusaHeads(target.lm_head.weight, COUNT, target_ids=KEPT)
