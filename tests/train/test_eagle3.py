"""What is trained is what is run: the unrolled module gives the draft laws of the exported head in our runner."""

import pytest
import tiny_models as tiny
import torch
from tiny_heads import random_head

from compressor.decode.decoder import Decoder
from compressor.decode.law import Law, LawState
from compressor.proposers.base import Context
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.train import eagle3, export, states
from compressor.train.corpus import Document
from compressor.train.eagle3_task import Eagle3Task

STEPS = 3


@pytest.fixture(scope="module")
def decoder():
    return Decoder(tiny.random_model(num_hidden_layers=4))


def text_of(length, seed=2):
    return torch.randint(3, tiny.VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def drafted(folder, decoder, text):
    """The draft of the exported head after `text`: its tokens and the law of each."""
    proposer = Eagle3Proposer.load(folder, decoder)
    features = states.read(decoder, [text], proposer.features)[0][:-1, : -decoder.config.hidden_size]
    context = Context(
        history=text,
        k=STEPS,
        law=LawState(Law(1.0), decoder.vocab_size),
        generator=torch.Generator().manual_seed(3),
        features=features,
    )
    draft = proposer.session().propose(context)
    return draft, features


@pytest.mark.parametrize("norm_before_residual", [True, False])
@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_every_step_gives_the_law_that_the_runner_drafts_from(decoder, tmp_path, layout, norm_before_residual):
    head = random_head(decoder, norm_before_residual=norm_before_residual)
    export.write(head, tmp_path, layout=layout)
    text = text_of(12)
    draft, features = drafted(tmp_path, decoder, text)
    tokens = torch.tensor([[*text[1:], *draft.tokens[:-1]]])
    with torch.no_grad():
        found = head(features[None], tokens, STEPS)
    for step, state in enumerate(found):
        logits = torch.full((decoder.vocab_size,), -torch.inf)
        logits[head.target_ids] = head.lm_head(state[0, -1])
        assert torch.allclose(logits.softmax(-1).double(), draft.q[step], atol=1e-5), step


def test_a_step_that_forgot_its_own_rows_would_be_seen(decoder, tmp_path, monkeypatch):
    """Control: without the rows that a root drafted itself the later laws differ."""
    head = random_head(decoder)
    export.write(head, tmp_path)
    text = text_of(12)
    draft, features = drafted(tmp_path, decoder, text)
    original = eagle3._attend
    monkeypatch.setattr(eagle3, "_attend", lambda queries, earlier: original(queries, earlier[:1]))
    tokens = torch.tensor([[*text[1:], *draft.tokens[:-1]]])
    with torch.no_grad():
        found = head(features[None], tokens, STEPS)
    logits = torch.full((decoder.vocab_size,), -torch.inf)
    logits[head.target_ids] = head.lm_head(found[2][0, -1])
    assert not torch.allclose(logits.softmax(-1).double(), draft.q[2], atol=1e-3)


def documents_and_states(decoder, head, lengths=(20, 33, 9)):
    documents = [Document(text_of(length, seed=length), 4) for length in lengths]
    return documents, states.read(decoder, [document.tokens for document in documents], head.shape.aux)


def task_of(decoder, head):
    weight = decoder.head.modules[0].weight[head.target_ids].detach()
    return Eagle3Task(head, weight, steps=STEPS, decay=0.8)


def test_a_batch_is_its_documents_one_by_one(decoder):
    """Padding and neighbours change nothing: the loss is the mean over all tokens, the tallies add up."""
    head = random_head(decoder)
    task = task_of(decoder, head)
    documents, found = documents_and_states(decoder, head)
    loss, tally = task(documents, found)
    counts = [len(document.tokens) - document.start for document in documents]
    alone = [task([document], [state]) for document, state in zip(documents, found, strict=True)]
    mean = sum(count * float(part[0].detach()) for count, part in zip(counts, alone, strict=True)) / sum(counts)
    assert float(loss.detach()) == pytest.approx(mean, rel=1e-5)
    assert tally.reached.tolist() == sum(part[1].reached for part in alone).tolist()
    assert tally.hits.tolist() == sum(part[1].hits for part in alone).tolist()


def test_loss_and_tally_are_those_of_plain_loops(decoder):
    head = random_head(decoder)
    task = task_of(decoder, head)
    documents, found = documents_and_states(decoder, head)
    total, count, reached, hits = 0.0, 0, [0] * STEPS, [0] * STEPS
    with torch.no_grad():
        for document, state in zip(documents, found, strict=True):
            tokens, width = document.tokens, decoder.config.hidden_size
            target_logits = state[:, -width:] @ task.teacher_head.T
            count += len(tokens) - document.start
            following_draft = document.start + 1  # where the next draft begins: the first token is the target's own
            for root in range(len(tokens) - 2):
                following = torch.tensor([[*tokens[1 : root + 1 + STEPS], *[0] * STEPS]])
                draft = head(state[None, : root + 1, :-width], following, STEPS)
                drafts = alive = root + 2 == following_draft
                for step in range(STEPS):
                    place = root + 2 + step
                    if not document.start <= place < len(tokens):
                        alive = False
                        continue
                    logits = head.lm_head(draft[step][0, root])
                    label = task.draft_ids[tokens[place]]
                    if label >= 0:
                        wanted = target_logits[place - 1].softmax(-1)
                        total -= 0.8**step * float((wanted * logits.log_softmax(-1)).sum())
                    if alive:
                        reached[step] += 1
                        alive = bool(logits.argmax() == label)
                        hits[step] += alive
                        following_draft += alive
                following_draft += drafts
    loss, tally = task(documents, found)
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-4)
    assert tally.reached.tolist() == reached and tally.hits.tolist() == hits


def test_only_the_head_learns(decoder):
    head = random_head(decoder)
    names = {name for name, value in task_of(decoder, head).named_parameters() if value.requires_grad}
    assert names == {f"head.{name}" for name in dict(head.named_parameters())}
    assert not any("embedding" in name for name in names)
