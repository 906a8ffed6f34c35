"""A draft model in training against plain loops, and its checkpoint in the runner that serves it."""

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compressor.decode import Decoder, Law, engine
from compressor.decode.law import LawState
from compressor.errors import CompressError, UsageError
from compressor.proposers import load
from compressor.proposers.base import Context
from compressor.train import states as target_states
from compressor.train.corpus import Document
from compressor.train.draft import DraftTask, draft_config, draft_of, evenly, export_draft
from compressor.train.loop import Schedule, train
from compressor.ui import NullUI

STEPS = 3
SMALL = {"vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SMALL |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
FIVE = {"num_hidden_layers": 5}
LAYERS = {"layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")]}


def rounded(model):
    """Its weights as the checkpoint holds them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def texts(vocabulary, count=4, longest=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(torch.randint(vocabulary, (longest - 7 * i,), generator=generator).tolist(), start=3 + i)
        for i in range(count)
    ]


def by_hand(model, teacher_head, documents, states, shift=0):
    """Loss, hits and reached in loops, every chain really drafted; `shift` takes the teacher from so many places
    earlier."""
    hits, reached, losses = [0] * STEPS, [0] * STEPS, []
    for document, state in zip(documents, states, strict=True):
        tokens = document.tokens
        for place in range(document.start, len(tokens)):
            wanted = (teacher_head @ state[place - 1 - shift]).softmax(-1)
            losses.append(-float((wanted * logits_after(model, tokens[:place]).log_softmax(-1)).sum()))
        place = document.start + 1  # a runner's first token is the target's own, and so is the one after every draft
        while place < len(tokens):
            chain = tokens[:place]
            for step, token in enumerate(tokens[place : place + STEPS]):
                reached[step] += 1
                chain = [*chain, int(logits_after(model, chain).argmax())]
                if chain[-1] != token:
                    break
                hits[step] += 1
                place += 1
            place += 1
    return sum(losses) / len(losses), hits, reached


def logits_after(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "mistral"])
@torch.no_grad()
def test_loss_and_tally_equal_a_slow_count(kind):
    target = tiny.random_model(kind, **SMALL)
    draft, documents = draft_of(target, 2), texts(12)
    for document in documents:  # much of what the draft says: chains of random tokens end at once
        for place in range(document.start, len(document.tokens)):
            if place % 4:
                document.tokens[place] = int(logits_after(draft, document.tokens[:place]).argmax())
    states = target_states.read(Decoder(target), [document.tokens for document in documents], ())
    loss, tally = DraftTask(draft, target.lm_head.weight, steps=STEPS)(documents, states)
    expected, hits, reached = by_hand(draft, target.lm_head.weight, documents, states)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert tally.hits.tolist() == hits and tally.reached.tolist() == reached
    assert hits[2] > 3 and reached[2] < reached[1] < reached[0]
    shifted, _, _ = by_hand(draft, target.lm_head.weight, documents, states, shift=1)
    assert float(loss) != pytest.approx(shifted, rel=1e-3)


def toy_run(folder, shift, steps=80):
    """A random draft taught by a teacher that is sure of (t + 5) % 12 after t; `shift` hands it the states of so many
    places earlier."""
    following = (torch.arange(12) + 5) % 12
    teacher_head = torch.zeros(12, 12)
    teacher_head[following, torch.arange(12)] = 8.0
    documents = [Document([(start + 5 * i) % 12 for i in range(16)], 2) for start in range(12)]
    states = [torch.eye(12)[document.tokens].roll(shift, 0) for document in documents]
    model = AutoModelForCausalLM.from_config(draft_config(tiny.CONFIGS["llama-tied"](**SMALL), 1), dtype=torch.float32)
    task = DraftTask(model, teacher_head, steps=STEPS)
    schedule = Schedule(steps=steps, rate=0.02, warmup=5, batch_tokens=192, evaluate_every=steps // 4)
    return train(task, documents, lambda found: [states[i] for i in found], [0, 5], schedule, folder, NullUI())


def test_training_lowers_the_loss_and_a_teacher_that_is_one_place_off_ruins_acceptance(tmp_path):
    torch.manual_seed(0)
    history = toy_run(tmp_path / "right", 0)
    assert history[-1]["loss"] < 0.7 * history[1]["loss"]
    assert history[-1]["tau"] == 3.5  # 13 tokens in drafts of 3, 3, 3 and, before the end, 1
    assert toy_run(tmp_path / "off", 1)[-1]["tau"] < 1.1


@pytest.mark.parametrize(
    ("kind", "config"), [("llama", FIVE), ("llama-tied", FIVE), ("qwen3", FIVE), ("gemma3", FIVE | LAYERS)]
)
@torch.no_grad()
def test_an_exported_draft_proposes_what_the_module_says(kind, config, tmp_path):
    folder = tiny.save(tmp_path / "target", kind, **config)
    target = engine.load(folder, dtype=torch.float32)
    draft = rounded(draft_of(target, 3)).eval()
    export_draft(draft, folder, tmp_path / "draft")
    decoder = Decoder(target)
    proposer = load.build(load.parse(f"draft:{tmp_path / 'draft'}", folder), decoder, folder)
    session, other = proposer.session(), 0
    text = texts(300, longest=24)[0].tokens
    for length in range(2, len(text)):
        context = Context(text[:length], STEPS, LawState(Law(0.0), tiny.VOCABULARY), torch.Generator())
        chain = text[:length]
        for _ in range(STEPS):
            chain = [*chain, int(logits_after(draft, chain).argmax())]
        assert session.propose(context).tokens == tuple(chain[length:])
        other += int(logits_after(draft, text[: length - 1]).argmax()) != chain[length]
    assert other > 5  # the comparison would notice a shift


def test_an_exported_draft_is_a_plain_checkpoint(tmp_path):
    folder = tiny.save(tmp_path / "target", "llama-tied", **FIVE)
    draft = rounded(draft_of(engine.load(folder), 2))
    export_draft(draft, folder, tmp_path / "draft")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert loaded.dtype == torch.bfloat16 and loaded.config.architectures == ["LlamaForCausalLM"]
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(tmp_path / "draft/model.safetensors")  # no second copy
    for (name, ours), (again, theirs) in zip(draft.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == again and torch.equal(ours, theirs.float())
    assert (tmp_path / "draft/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_it_begins_with_the_targets_weights_and_can_be_trained():
    target = tiny.random_model("gemma3", **FIVE | LAYERS)
    draft = draft_of(target, 3)
    assert draft.config.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    for ours, theirs in zip(draft.model.layers, (0, 2, 4), strict=True):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, target.model.layers[theirs].state_dict()[name])
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight)
    assert all(parameter.requires_grad for parameter in draft.parameters())


def test_the_draft_of_a_quantized_target_is_not_quantized():
    target = tiny.CONFIGS["llama"](quantization_config={"quant_method": "compressed-tensors"})
    assert not hasattr(draft_config(target, 1), "quantization_config")


@pytest.mark.parametrize(("depth", "layers", "expected"), [(30, 1, [0]), (30, 4, [0, 10, 19, 29]), (4, 3, [0, 2, 3])])
def test_layers_are_spread_from_the_first_to_the_last(depth, layers, expected):
    assert evenly(depth, layers) == expected


@pytest.mark.parametrize("layers", [0, 6])
def test_more_layers_than_the_target_has_or_none_are_refused(layers):
    with pytest.raises(UsageError, match=f"layers: {layers}: a draft model takes 1 to 5"):
        draft_config(tiny.CONFIGS["llama"](**FIVE), layers)


def test_a_target_of_packed_weights_is_refused():
    target = tiny.random_model()
    Decoder(target, pack=True)
    del target.model.layers[0].mlp.up_proj.weight
    with pytest.raises(CompressError, match=r"no plain 'model\.layers\.0\.mlp\.up_proj"):
        draft_of(target, 1)


def test_a_target_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(CompressError, match="no tokenizer files"):
        export_draft(draft_of(tiny.random_model(), 1), tmp_path, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()
