"""A proposer by name, and how large its drafts may be."""

import pytest
import tiny_models as tiny
import torch

from compressor.decode import Decoder, Law, Runner, engine
from compressor.errors import CompressError, UsageError
from compressor.proposers import load
from compressor.proposers.base import MAX_NODES
from compressor.proposers.draft_model import DraftModelProposer
from compressor.proposers.ngram import NgramProposer
from compressor.proposers.suffix import SuffixProposer

LARGEST = [(64, None), (64, (1,) * 64), (64, (64,)), (2, (4, 15)), (3, (2, 2, 14)), (3, (3,)), (0, None)]
TOO_LARGE = [
    (65, None, "num_speculative_tokens"),
    (65, (2,), "num_speculative_tokens"),
    (64, (65,), "branching"),
    (65, (1,) * 65, "branching"),
    (2, (4, 16), "branching"),
    (3, (2, 2, 15), "branching"),
    (1, (2, 1), "branching"),
]


@pytest.mark.parametrize(("k", "branching"), LARGEST)
def test_a_draft_that_fits_is_no_misfit(k, branching):
    assert load.misfit(k, branching) is None
    load.check_size(k, branching)


@pytest.mark.parametrize(("k", "branching", "key"), TOO_LARGE)
def test_a_draft_that_does_not_fit_is_named_by_the_key_at_fault(k, branching, key):
    found = load.misfit(k, branching)
    assert found is not None and found[0] == key
    with pytest.raises(UsageError, match=f"^{key}: [0-9,]+: "):
        load.check_size(k, branching)


def test_the_largest_tree_runs_and_a_larger_one_would_not():
    model = Decoder(tiny.random_model())
    law, prompt = Law(temperature=0), [5, 6, 7]

    def drafted(branching):
        proposer = DraftModelProposer(model, tiny.VOCABULARY, tiny.VOCABULARY, branching)
        return max(map(len, Runner(model, proposer, 2).generate(prompt, 8, law, 0, ()).proposals))

    assert drafted((4, 15)) == MAX_NODES
    with pytest.raises(CompressError, match="a tree of 68 nodes"):
        drafted((4, 16))


def test_the_window_is_the_ngram_proposers_alone(tmp_path):
    window = {"prompt_lookup_min": 2, "prompt_lookup_max": 3}
    ngram, suffix = (load.build(load.parse(kind, tmp_path), None, tmp_path, window) for kind in ("ngram", "suffix"))
    assert isinstance(ngram, NgramProposer) and ngram.sizes == range(2, 4)
    assert isinstance(suffix, SuffixProposer)
    assert load.build(load.parse("none", tmp_path), None, tmp_path, window) is None


@pytest.mark.parametrize("kernel", ["auto", "dequantized"])
def test_a_draft_model_is_loaded_with_the_kernel_asked_for(tmp_path, monkeypatch, kernel):
    tiny.save(tmp_path)
    target, asked = engine.decoder(tmp_path, dtype=torch.float32), []
    real = engine.decoder
    monkeypatch.setattr(engine, "decoder", lambda *names, **options: asked.append(options) or real(*names, **options))
    built = load.build(load.parse(f"draft:{tmp_path}", tmp_path), target, tmp_path, kernel=kernel)
    assert isinstance(built, DraftModelProposer)
    assert asked == [{"dtype": torch.float32, "kernel": kernel}]
