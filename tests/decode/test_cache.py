"""A cache after rollback is the cache of a fresh prefill, on every kind of attention layer."""

import pytest
import tiny_models as tiny
import torch
from transformers import AutoModelForCausalLM

from compressor.decode.cache import INITIAL_CAPACITY, KVCache

KINDS = ["llama", "mistral", "gemma3", "qwen3"]  # mistral: all layers slide over 8 tokens; gemma3: every second one


@pytest.fixture(params=KINDS)
def model(request):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.CONFIGS[request.param](), dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, tiny.VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def run(model, ids, cache=None):
    return model(input_ids=ids, cache=cache, use_cache=cache is not None).logits


@pytest.mark.parametrize(("kept", "rejected"), [(5, 3), (20, 4), (12, 11)])
def test_rollback_equals_a_fresh_prefill(model, kept, rejected):
    prefix, wrong, right = tokens(kept), tokens(rejected, 1), tokens(6, 2)
    cache = KVCache()
    run(model, torch.cat([prefix, wrong], 1), cache)
    cache.rollback(kept)
    assert cache.get_seq_length() == kept
    continued = run(model, right, cache)
    fresh = run(model, torch.cat([prefix, right], 1))[:, kept:]
    torch.testing.assert_close(continued, fresh, atol=1e-5, rtol=1e-5)


def test_repeated_cycles_stay_equal_to_no_cache_at_all(model):
    text, cache = tokens(40), KVCache()
    at = 10
    run(model, text[:, :at], cache)
    for step in range(6):
        run(model, tokens(4, 10 + step), cache)  # a draft that is rejected altogether
        cache.rollback(at)
        logits = run(model, text[:, at : at + 5], cache)
        torch.testing.assert_close(logits, run(model, text[:, : at + 5])[:, at:], atol=1e-5, rtol=1e-5)
        at += 5


def test_a_stale_cache_is_seen(model):
    prefix, wrong, right = tokens(20), tokens(4, 1), tokens(6, 2)
    cache = KVCache()
    run(model, torch.cat([prefix, wrong], 1), cache)
    stale = run(model, right, cache)
    fresh = run(model, torch.cat([prefix, right], 1))[:, 20:]
    assert (stale - fresh).abs().max() > 1e-2


def test_a_window_that_forgets_would_be_seen():
    """Sliding layers that keep only their window lose what rollback has to bring back."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny.CONFIGS["mistral"](), dtype=torch.float32).eval()
    prefix, wrong, right = tokens(20), tokens(6, 1), tokens(4, 2)
    cache = KVCache()
    run(model, torch.cat([prefix, wrong], 1), cache)
    cache.rollback(20)
    with torch.inference_mode():
        for layer in cache.layers:  # all that a window of 8 would still hold after 26 tokens
            layer.keys[:, :, : 26 - 7].zero_()
            layer.values[:, :, : 26 - 7].zero_()
    fresh = run(model, torch.cat([prefix, right], 1))[:, 20:]
    assert not torch.allclose(run(model, right, cache), fresh, atol=1e-5)


def test_buffers_grow_geometrically_and_keep_their_contents():
    cache = KVCache()
    states = torch.randn(1, 2, 3 * INITIAL_CAPACITY, 4)
    capacities = set()
    for start in range(0, states.shape[2], 7):
        part = states[:, :, start : start + 7]
        keys, values = cache.update(part, -part, 0)
        capacities.add(cache.layers[0].keys.shape[2])
    assert torch.equal(keys, states) and torch.equal(values, -states)
    assert capacities == {INITIAL_CAPACITY, 2 * INITIAL_CAPACITY, 4 * INITIAL_CAPACITY}


@pytest.mark.parametrize("length", [-1, 6])
def test_rolling_back_to_what_is_not_there_is_refused(length):
    cache = KVCache()
    cache.update(torch.zeros(1, 1, 5, 2), torch.zeros(1, 1, 5, 2), 0)
    with pytest.raises(ValueError, match="holds 5"):
        cache.rollback(length)
