"""The target's states on documents: alone or together, from the disk or anew, they are the same."""

import random
from itertools import chain

import pytest
import tiny_models as tiny
import torch

from compressor.checkpoint import writer
from compressor.decode import reading
from compressor.decode.decoder import Decoder
from compressor.errors import CompressError
from compressor.train import corpus, states
from compressor.train.corpus import Document
from compressor.train.states import StateCache
from compressor.ui import NullUI


@pytest.fixture(scope="module")
def model():
    return tiny.random_model(num_hidden_layers=3)


def texts_of(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, tiny.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def test_the_states_are_those_of_transformers(model):
    (text,) = texts_of(17)
    (found,) = states.read(Decoder(model), [text], (0, 2, 3))
    inner = model.model(torch.tensor([text]), output_hidden_states=True)
    residual = []
    handles = [
        layer.register_forward_hook(lambda _, args, out: residual.append(out[0] if isinstance(out, tuple) else out))
        for layer in model.model.layers
    ]
    model.model(torch.tensor([text]))
    for handle in handles:
        handle.remove()
    expected = [inner.hidden_states[0][0], residual[1].view(17, -1), residual[2].view(17, -1)]
    expected.append(inner.last_hidden_state[0])  # after the final norm: what logits are made of
    assert torch.allclose(found, torch.cat(expected, -1), atol=1e-5)


def test_texts_read_together_are_read_as_if_alone(model):
    decoder, texts = Decoder(model), texts_of(5, 40, 1, 23)
    together = states.read(decoder, texts, (1, 3))
    for text, found in zip(texts, together, strict=True):
        assert torch.allclose(found, states.read(decoder, [text], (1, 3))[0], atol=1e-5)


def test_a_text_longer_than_one_pass_is_read_in_pieces(model, monkeypatch):
    decoder, texts = Decoder(model), texts_of(37, 9)
    whole = states.read(decoder, texts, (1,))
    monkeypatch.setattr(reading, "CHUNK", 8)
    for one, other in zip(whole, states.read(decoder, texts, (1,)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(states, "SHARD_TOKENS", 20)
    return StateCache(tmp_path / "states", [12, 7, 9, 30, 5], 2, 2)


def rows(indices, lengths=(12, 7, 9, 30, 5)):
    return [torch.full((lengths[index], 4), float(index)) for index in indices]


def test_the_cache_gives_back_each_documents_states(cache):
    cache.fill(rows, NullUI())
    assert len(cache.shards) == 4  # 12 + 7, 9, 30, 5
    for index, found in enumerate(cache([0, 1, 2, 3, 4])):
        assert torch.equal(found, rows([index])[0].bfloat16())
    assert [len(found) for found in cache([3, 0])] == [30, 12]


def noise(indices, lengths=(12, 7, 9, 30, 5)):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(lengths[index], 12, generator=generator) for index in range(len(lengths))]
    return [rows[index] * torch.tensor([100.0] * 4 + [0.01] * 4 + [1.0] * 4) for index in indices]


def test_a_cache_in_fp8_keeps_the_last_state_exactly_and_the_others_by_their_own_scale(tmp_path):
    cache = StateCache(tmp_path, [12, 7, 9, 30, 5], 4, 3, fp8=True)
    cache.fill(noise, NullUI())
    for found, wanted in zip(cache([3, 0]), noise([3, 0]), strict=True):
        assert torch.equal(found[:, -4:], wanted[:, -4:].bfloat16())
        for first in (0, 4):
            part = wanted[:, first : first + 4]
            largest = part.abs().amax(1, keepdim=True)
            assert bool(((found[:, first : first + 4] - part).abs() <= part.abs() / 12 + largest * 2.0**-9).all())
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert cache.nbytes == 63 * (2 * (4 + 2) + 8) and 0 <= size - cache.nbytes < 1000


def test_a_cache_in_another_format_is_refused(tmp_path):
    StateCache(tmp_path, [12, 7, 9, 30, 5], 4, 3, fp8=True).fill(noise, NullUI())
    with pytest.raises(CompressError, match="not the states of these documents"):
        StateCache(tmp_path, [12, 7, 9, 30, 5], 4, 3)([0])


def test_a_cache_that_was_cut_off_makes_only_what_is_missing(cache):
    cache.fill(rows, NullUI())
    (cache.folder / "states-00002.safetensors").unlink()
    asked = []
    cache.fill(lambda indices: asked.extend(indices) or rows(indices), NullUI())
    assert asked == [3]


def test_a_cache_of_other_documents_is_refused(cache):
    cache.fill(rows, NullUI())
    other = StateCache(cache.folder, [12, 8, 9, 30, 5], 2, 2)
    with pytest.raises(CompressError, match=r"states-00000\.safetensors: not the states of these documents"):
        other([0])


def test_a_disk_without_room_is_refused_before_anything_is_read(cache, monkeypatch):
    def refuse(path, needed):
        raise CompressError(f"{path}: not enough space, {needed}")

    monkeypatch.setattr(writer, "ensure_space", refuse)
    with pytest.raises(CompressError, match=f"not enough space, {63 * 4 * 2}"):
        cache.fill(lambda indices: pytest.fail("read"), NullUI())
    assert cache.nbytes == 63 * 4 * 2


def test_a_corpus_comes_back_as_it_was_saved(tmp_path):
    documents = [Document([5, 6, 7], 1), Document([8, 9], 2), Document([3, 4, 5, 6], 3)]
    corpus.save(tmp_path / "a.safetensors", documents)
    assert corpus.load(tmp_path / "a.safetensors") == documents


def test_a_damaged_corpus_is_named(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"no")
    with pytest.raises(CompressError, match=r"a\.safetensors: not a corpus"):
        corpus.load(tmp_path / "a.safetensors")


def test_batches_hold_every_document_once_within_the_size():
    lengths = [random.Random(1).randint(3, 30) for _ in range(50)] + [90]
    found = list(corpus.batches(lengths, 64, random.Random(0)))
    assert sorted(chain.from_iterable(found)) == list(range(51))
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 64
    assert found != list(corpus.batches(lengths, 64, random.Random(1)))
