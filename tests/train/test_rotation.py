"""A target with a rotated residual stream, and the head that must follow it."""

import copy

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import random_head

from compressor.decode.decoder import Decoder
from compressor.decode.law import Law
from compressor.decode.runner import Runner
from compressor.errors import UsageError
from compressor.proposers.eagle3 import Eagle3Proposer
from compressor.proposers.nodes import NodeCache
from compressor.train import export, precision, states
from compressor.train.rotation import counter_rotate

HIDDEN = 64
TEXT = list(range(5, 30))


@pytest.fixture(scope="module")
def model():
    found = tiny.random_model(num_hidden_layers=4, tie_word_embeddings=False)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, value in found.named_parameters():
            if "norm" in name:
                value.copy_(0.5 + torch.rand(value.shape, generator=generator))
    return found


@pytest.fixture(scope="module")
def rotation():
    return torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(5)).double()).Q


@pytest.fixture(scope="module")
def rotated(model, rotation):
    """The same function, with x·Q in place of x between the layers."""
    found = copy.deepcopy(model)
    with torch.no_grad():

        def reads(linear, norm):
            linear.weight.copy_(linear.weight.double() * norm.weight.double() @ rotation)

        def writes(linear):
            linear.weight.copy_(rotation.T @ linear.weight.double())

        found.model.embed_tokens.weight.copy_(found.model.embed_tokens.weight.double() @ rotation)
        for layer in found.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
                reads(linear, layer.input_layernorm)
            for linear in (mlp.gate_proj, mlp.up_proj):
                reads(linear, layer.post_attention_layernorm)
            writes(attention.o_proj)
            writes(mlp.down_proj)
            layer.input_layernorm.weight.fill_(1)
            layer.post_attention_layernorm.weight.fill_(1)
        reads(found.lm_head, found.model.norm)
        found.model.norm.weight.fill_(1)
    return found


@pytest.fixture(scope="module", params=["vllm", "speculators"])
def head(model, request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    export.write(random_head(Decoder(model)), folder, layout=request.param)
    return folder


def float32(folder):
    """The same head with its tensors in float32, so that rounding hides nothing."""
    found = load_file(folder / "model.safetensors")
    save_file({k: v.float() if v.is_floating_point() else v for k, v in found.items()}, folder / "model.safetensors")
    return folder


def drafts(model, folder):
    """What the head proposes along a text, and the states that it reads."""
    decoder = Decoder(model)
    proposer = Eagle3Proposer.load(folder, decoder)
    runner = Runner(decoder, proposer, 3)
    output = runner.generate(TEXT, 24, Law(temperature=0.0), 0)
    return output.token_ids, output.accepted_per_position, logits(proposer, decoder)


def logits(proposer, decoder):
    (read,) = states.read(decoder, [TEXT], proposer.features)
    module = proposer.modules[0]
    rows = NodeCache(module.cache).text(len(TEXT) - 1)
    found, _ = module(proposer.enter(read[:-1, : 3 * HIDDEN]), torch.tensor(TEXT[1:]), rows)
    return proposer.logits(found)


def test_a_counter_rotated_head_drafts_for_the_rotated_target_as_before(model, rotated, rotation, head, tmp_path):
    counter_rotate(float32(head), tmp_path / "rotated", rotation)
    tokens, accepted, before = drafts(model, head)
    again, accepted_again, after = drafts(rotated, tmp_path / "rotated")
    assert (tokens, accepted) == (again, accepted_again)
    known = before.isfinite()
    assert torch.allclose(before[known], after[known], atol=1e-3)
    _, _, unchanged = drafts(rotated, head)  # the silent collapse
    assert not torch.allclose(before[known], unchanged[known], atol=0.5)


def test_a_head_with_its_own_embedding_keeps_reading_that(model, rotated, rotation, head, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "config.json").write_text((head / "config.json").read_text())
    tensors = load_file(float32(head) / "model.safetensors")
    save_file(
        tensors | {"embed_tokens.weight": model.model.embed_tokens.weight.detach().clone()}, own / "model.safetensors"
    )
    counter_rotate(own, tmp_path / "rotated", rotation)
    before, after = drafts(model, own)[2], drafts(rotated, tmp_path / "rotated")[2]
    known = before.isfinite()
    assert torch.allclose(before[known], after[known], atol=1e-3)


def test_what_cannot_be_rotated_is_refused(rotation, head, tmp_path):
    with pytest.raises(UsageError, match=r"a rotation of \[32, 32\], the target's states have 64 elements"):
        counter_rotate(head, tmp_path / "x", rotation[:32, :32])
    with pytest.raises(UsageError, match="not orthogonal"):
        counter_rotate(head, tmp_path / "x", rotation * 1.01)
    precision.lower(head, tmp_path / "low", "int8")
    with pytest.raises(UsageError, match="its weights are in int8; rotate the head that it was made from"):
        counter_rotate(tmp_path / "low", tmp_path / "x", rotation)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "config.json").write_text((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}, shared / "model.safetensors"
    )
    with pytest.raises(UsageError, match="it shares the target's lm_head, which R1 rotates"):
        counter_rotate(shared, tmp_path / "x", rotation)
    assert not (tmp_path / "x").exists()
