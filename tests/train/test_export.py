"""A head on disk: the names, shapes and settings that engines read, and the way back into training."""

import json

import pytest
import tiny_models as tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_heads import random_head

from compressor.decode.decoder import Decoder
from compressor.errors import CompressError, UsageError
from compressor.train import export


@pytest.fixture(scope="module")
def decoder():
    return Decoder(tiny.random_model(num_hidden_layers=4))


def test_the_raw_layout_has_the_names_that_vllm_loads(decoder, tmp_path):
    export.write(random_head(decoder), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 150
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["norm_before_residual"] is config["eagle_config"]["norm_before_residual"] is True
    shapes = {name: list(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert shapes == {
        "fc.weight": [64, 192],
        "midlayer.input_layernorm.weight": [64],
        "midlayer.hidden_norm.weight": [64],
        "midlayer.post_attention_layernorm.weight": [64],
        "midlayer.self_attn.q_proj.weight": [64, 128],
        "midlayer.self_attn.k_proj.weight": [32, 128],
        "midlayer.self_attn.v_proj.weight": [32, 128],
        "midlayer.self_attn.o_proj.weight": [64, 64],
        "midlayer.mlp.gate_proj.weight": [96, 64],
        "midlayer.mlp.up_proj.weight": [96, 64],
        "midlayer.mlp.down_proj.weight": [64, 96],
        "norm.weight": [64],
        "lm_head.weight": [150, 64],
        "d2t": [150],
        "t2d": [320],
    }


def test_the_vocabulary_is_stored_as_offsets_and_as_a_mask(decoder, tmp_path):
    head = random_head(decoder)
    export.write(head, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    assert torch.equal(stored["d2t"] + torch.arange(150), head.target_ids)
    assert torch.equal(stored["t2d"].nonzero()[:, 0], head.target_ids)


def test_the_speculators_layout_says_what_engines_guess_otherwise(decoder, tmp_path):
    export.write(
        random_head(decoder, norm_before_residual=False),
        tmp_path,
        layout="speculators",
        verifier="someone/target",
        architectures=["LlamaForCausalLM"],
        num_speculative_tokens=5,
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    method = config["speculators_config"]
    assert method["verifier"] == {"name_or_path": "someone/target", "architectures": ["LlamaForCausalLM"]}
    assert method["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 5}]
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_a_head_comes_back_as_it_was_written(decoder, tmp_path, layout):
    head = random_head(decoder, norm_before_residual=False)
    export.write(head, tmp_path, layout=layout)
    back = export.load(tmp_path, decoder)
    assert back.shape == head.shape and torch.equal(back.target_ids, head.target_ids)
    for name, value in head.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


def test_what_cannot_be_trained_is_refused_by_name(decoder, tmp_path):
    export.write(random_head(decoder), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = decoder.embedding.weight.detach().clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="an embedding of their own"):
        export.load(tmp_path, decoder)


def test_a_head_of_another_target_is_refused(decoder, tmp_path):
    export.write(random_head(decoder), tmp_path)
    with pytest.raises(CompressError, match="hidden_size"):
        export.load(tmp_path, Decoder(tiny.random_model(num_hidden_layers=4, hidden_size=32, head_dim=16)))
