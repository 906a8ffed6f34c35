"""A cache after rollback or rearrangement holds what a fresh pass over the same text would have written."""

import pytest
import tiny_models as tiny
import torch

from compressor.decode.cache import SequenceCache
from compressor.decode.decoder import Decoder, Feed

KINDS = ["llama", "mistral", "gemma3", "qwen3"]  # mistral: all layers slide over 8 tokens; gemma3: every second one


@pytest.fixture(params=KINDS)
def decoder(request):
    return Decoder(tiny.random_model(request.param, std=0.2))


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, tiny.VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(decoder, ids, cache=None, parents=None):
    """Logits of all `ids`; the cache's valid part is left as it was."""
    cache = decoder.cache(256) if cache is None else cache
    return decoder.forward([Feed(ids, cache, parents, len(ids))])[0].logits


def same(cache, decoder, text) -> bool:
    """Whether `cache` holds `text` as a fresh pass writes it, to 1e-5."""
    fresh = decoder.cache(256)
    run(decoder, text, fresh)
    n = len(text)
    return cache.length == n and all(
        torch.allclose(a[:, :, :n], b[:, :, :n], atol=1e-5, rtol=1e-5)
        for a, b in ((cache.keys, fresh.keys), (cache.values, fresh.values))
    )


@pytest.mark.parametrize(("kept", "rejected"), [(5, 3), (20, 4), (12, 11)])
def test_rollback_equals_a_fresh_prefill(decoder, kept, rejected):
    prefix, wrong, right = tokens(kept), tokens(rejected, 1), tokens(6, 2)
    cache = decoder.cache(256)
    run(decoder, prefix + wrong, cache)
    cache.keep(kept)
    assert same(cache, decoder, prefix)
    continued = run(decoder, right, cache)
    torch.testing.assert_close(continued, run(decoder, prefix + right)[kept:], atol=1e-5, rtol=1e-5)


def test_repeated_cycles_stay_equal_to_no_cache_at_all(decoder):
    text, cache = tokens(40), decoder.cache(256)
    run(decoder, text[:10], cache)
    cache.keep(10)
    for step, at in enumerate(range(10, 40, 5)):
        run(decoder, tokens(4, 10 + step), cache)
        cache.keep(0)  # a draft that is rejected altogether
        logits = run(decoder, text[at : at + 5], cache)
        torch.testing.assert_close(logits, run(decoder, text[: at + 5])[at:], atol=1e-5, rtol=1e-5)
        cache.keep(5)
    assert same(cache, decoder, text)


# A tree below the prefix's last token: 0 and 1 are siblings, 2 and 3 follow 1, 4 follows 0, 5 follows 3.
PARENTS = [-1, -1, 1, 1, 0, 3]


def test_every_node_of_a_tree_sees_its_own_path_alone(decoder):
    prefix, nodes, cache = tokens(12), tokens(6, 1), decoder.cache(256)
    run(decoder, prefix[:-1], cache)
    cache.keep(len(prefix) - 1)
    logits = run(decoder, [prefix[-1], *nodes], cache, PARENTS)
    for path in ([0], [1], [1, 2], [1, 3], [0, 4], [1, 3, 5]):
        alone = run(decoder, prefix + [nodes[i] for i in path])[-1]
        torch.testing.assert_close(logits[1 + path[-1]], alone, atol=1e-5, rtol=1e-5)
    as_chain = run(decoder, [prefix[-1], *nodes], cache)
    assert (as_chain[-1] - logits[-1]).abs().max() > 1e-2  # without the mask a node sees its siblings


@pytest.mark.parametrize("path", [[], [0], [1, 2], [1, 3, 5], [0, 4]])
def test_an_accepted_path_of_a_tree_equals_a_fresh_prefill(decoder, path):
    prefix, nodes, cache = tokens(12), tokens(6, 1), decoder.cache(256)
    run(decoder, prefix[:9], cache)
    cache.keep(9)
    run(decoder, prefix[9:] + nodes, cache, PARENTS)
    cache.keep(3, [3 + node for node in path])
    assert same(cache, decoder, prefix + [nodes[node] for node in path])


def test_keeping_another_path_is_seen(decoder):
    prefix, nodes, cache = tokens(12), tokens(6, 1), decoder.cache(256)
    run(decoder, prefix + nodes, cache, PARENTS)
    cache.keep(12, [12 + 0, 12 + 4])
    assert not same(cache, decoder, [*prefix, nodes[1], nodes[2]])


def test_a_stale_cache_is_seen(decoder):
    prefix, wrong, right = tokens(20), tokens(4, 1), tokens(6, 2)
    cache = decoder.cache(256)
    run(decoder, prefix + wrong, cache)
    cache.keep(24)
    stale = run(decoder, right, cache)
    assert (stale - run(decoder, prefix + right)[20:]).abs().max() > 1e-2


def test_a_window_that_forgets_would_be_seen():
    """Sliding layers that keep only their window lose what rollback has to bring back."""
    decoder = Decoder(tiny.random_model("mistral"))
    prefix, wrong, right = tokens(20), tokens(6, 1), tokens(4, 2)
    cache = decoder.cache(64)
    run(decoder, prefix + wrong, cache)
    cache.keep(20)
    cache.keys[:, :, : 26 - 7].zero_()  # all that a window of 8 would still hold after 26 tokens
    cache.values[:, :, : 26 - 7].zero_()
    assert not torch.allclose(run(decoder, right, cache), run(decoder, prefix + right)[20:], atol=1e-5)


def test_memory_is_set_aside_once():
    cache = SequenceCache(2, 3, 4, 50, dtype=torch.float32)
    pointer = cache.keys.data_ptr()
    for _ in range(10):
        keys, values = cache.write(1, torch.ones(3, 5, 4), torch.ones(3, 5, 4))
        cache.keep(5)
    assert cache.keys.data_ptr() == pointer == keys.data_ptr() - cache.keys[1].storage_offset() * 4
    assert values.shape == (3, 50, 4) and cache.nbytes == 2 * 2 * 3 * 50 * 4 * 4
    with pytest.raises(ValueError, match="holds 50 positions, and 51"):
        cache.write(0, torch.ones(3, 1, 4), torch.ones(3, 1, 4))


@pytest.mark.parametrize("length", [-1, 6])
def test_rolling_back_to_what_is_not_there_is_refused(length):
    cache = SequenceCache(1, 1, 2, 8, dtype=torch.float32)
    cache.write(0, torch.zeros(1, 5, 2), torch.zeros(1, 5, 2))
    cache.keep(5)
    with pytest.raises(ValueError, match="holds 5"):
        cache.rollback(length)


@pytest.mark.parametrize(("prefix", "extra"), [(6, []), (-1, []), (2, [1]), (2, [5]), (0, [-1])])
def test_keeping_what_was_not_written_is_refused(prefix, extra):
    cache = SequenceCache(1, 1, 2, 8, dtype=torch.float32)
    cache.write(0, torch.zeros(1, 5, 2), torch.zeros(1, 5, 2))
    with pytest.raises(ValueError, match="5 were written"):
        cache.keep(prefix, extra)
