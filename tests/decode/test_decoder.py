"""The decoder against transformers' own forward, family by family, and texts of a pass against each text alone."""

import pytest
import tiny_models as tiny
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, MixtralConfig

from compressor.decode import Decoder
from compressor.decode.decoder import FINAL, Feed
from compressor.decode.linear import Linear
from compressor.errors import CompressError, UsageError
from compressor.kernels import bf16_cpu

IDS = torch.randint(3, tiny.VOCABULARY, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def logits(decoder, ids=IDS, features=()):
    return decoder.forward([Feed(ids, decoder.cache(len(ids)), rows=len(ids))], features)[0]


@torch.inference_mode()
def theirs(model, ids=IDS, **options):
    return model(torch.tensor([ids]), **options)


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_every_family_gives_the_logits_of_transformers(kind):
    model = tiny.random_model(kind)
    torch.testing.assert_close(logits(Decoder(model)).logits, theirs(model).logits[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_in_bfloat16_it_is_as_near_to_float32_as_transformers(kind):
    exact = theirs(tiny.random_model(kind, dtype=torch.bfloat16).float()).logits[0]
    model = tiny.random_model(kind, dtype=torch.bfloat16)
    other = theirs(model).logits[0]
    error = (other - exact).norm()
    for pack in (False, True):
        ours = logits(Decoder(model, pack=pack)).logits
        assert (ours - exact).norm() < 1.3 * error
        assert (ours - other).norm() < 2e-2 * other.norm()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_scaled_rotary_embeddings_are_those_of_transformers(rope):
    model = tiny.random_model("llama", rope_parameters={"rope_theta": 10000.0, **rope})
    plain = logits(Decoder(tiny.random_model("llama"))).logits
    ours = logits(Decoder(model)).logits
    torch.testing.assert_close(ours, theirs(model).logits[0], atol=2e-5, rtol=1e-4)
    assert (ours - plain).abs().max() > 1e-3


def test_a_rotary_embedding_that_changes_with_the_text_is_refused():
    model = tiny.random_model("llama", rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(CompressError, match="rope_type 'dynamic' changes with the length"):
        Decoder(model)


@pytest.mark.parametrize("config", [GraniteConfig, MixtralConfig])
def test_a_family_that_only_looks_like_a_known_one_is_refused(config):
    """Granite's block has the names of Llama's, and scales its residuals."""
    model = AutoModelForCausalLM.from_config(config(**tiny.SHAPE))
    with pytest.raises(CompressError, match=config.model_type):
        Decoder(model)


@pytest.mark.parametrize("config", [{}, {"layer_types": ["sliding_attention", "full_attention"]}])
def test_a_window_that_the_family_does_not_have_is_not_applied(config):
    """transformers' Llama ignores the key; its attention is full."""
    model = tiny.random_model("llama", sliding_window=8, **config)
    torch.testing.assert_close(logits(Decoder(model)).logits, theirs(model).logits[0], atol=2e-5, rtol=1e-4)
    mistral = [logits(Decoder(tiny.random_model("mistral", sliding_window=size))).logits for size in (8, None)]
    assert not torch.allclose(*mistral, atol=1e-2)  # which does have it


def test_attention_to_later_tokens_is_refused():
    with pytest.raises(CompressError, match="use_bidirectional_attention"):
        Decoder(tiny.random_model("gemma3", use_bidirectional_attention=True))


def test_a_cache_that_memory_has_no_room_for_is_refused():
    decoder = Decoder(tiny.random_model("llama"))
    with pytest.raises(UsageError, match=r"a cache of 1000000000000 tokens takes .* GiB, .*lower max_new_tokens"):
        decoder.cache(10**12)
    assert decoder.cache(10).capacity == 10


def test_features_are_the_residual_stream_after_so_many_layers():
    model = tiny.random_model("llama")
    states = theirs(model, output_hidden_states=True).hidden_states
    found = logits(Decoder(model), features=(0, 1, FINAL)).features
    wanted = torch.cat([states[0][0], states[1][0], states[-1][0]], -1)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found[:, :64], states[1][0], atol=1e-2)  # one layer off would show


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral"])
def test_texts_of_a_pass_do_not_see_each_other(kind):
    decoder = Decoder(tiny.random_model(kind))
    started = decoder.cache(64)
    decoder.forward([Feed(IDS[:20], started)])
    started.keep(20)
    feeds = [
        Feed(IDS[:13], decoder.cache(64), rows=13),
        Feed([IDS[20]], started),
        Feed(IDS[5:9], decoder.cache(64), (-1, -1, 0), 4),
    ]
    together = decoder.forward(feeds)
    for feed, result in zip(feeds, together, strict=True):
        alone = decoder.forward([feed])[0]
        torch.testing.assert_close(result.logits, alone.logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together[1].logits[0], logits(decoder, IDS[:21]).logits[-1], atol=1e-5, rtol=1e-5)


def test_packing_takes_the_weights_and_changes_only_the_rounding():
    model = tiny.random_model("qwen2", dtype=torch.bfloat16)  # its projections have biases
    query = model.model.layers[0].self_attn.q_proj
    fits = bf16_cpu.fits(query.weight)
    plain = logits(Decoder(model)).logits
    packed = Decoder(model, pack=True)
    assert (query.weight is None) == fits  # a CPU without bfloat16 products runs the weights as they are
    assert (logits(packed).logits - plain).norm() / plain.norm() < 2e-2


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
def test_linears_run_together_give_their_outputs_side_by_side(rows):
    first, second = (nn.Linear(64, out).to(torch.bfloat16) for out in (48, 16))
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    wanted = torch.cat([bf16_cpu.reference(x, linear.weight, linear.bias) for linear in (first, second)], 1)
    flipped = wanted.flip(1)
    ours = Linear([first, second], pack=True)(x)
    torch.testing.assert_close(ours, wanted, atol=1e-2, rtol=2e-2)
    assert not torch.allclose(ours, flipped, atol=1e-2, rtol=2e-2)


def test_a_recurrent_layer_is_refused():
    model = tiny.random_model("llama")
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(CompressError, match="linear_attention layers cannot be rolled back"):
        Decoder(model)


def test_the_model_says_where_texts_end():
    model = tiny.random_model("llama")
    assert Decoder(model).stops == {2}
    model.generation_config.eos_token_id = [2, 9]
    assert Decoder(model).stops == {2, 9}
    assert isinstance(model.config, LlamaConfig)
