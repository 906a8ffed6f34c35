"""Quality figures agree with their definitions and are zero for an unchanged model."""

import math

import pytest
import tiny_models as tiny
import torch

from compressor.checkpoint.weights import Weights
from compressor.measure import quality
from compressor.models.skeleton import model_config
from compressor.models.stream import BlockStream
from compressor.ui import NullUI

IDS = torch.randint(3, tiny.VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))


def compare(a, b):
    streams = []
    for folder in (a, b):
        config, _ = model_config(folder)
        streams.append(BlockStream(Weights(folder), config, torch.float32))
    with NullUI().progress("quality", 3) as progress:
        return quality.compare(*streams, IDS, batch_size=2, progress=progress)


def test_an_unchanged_model_is_at_distance_zero(tmp_path):
    folder = tiny.save(tmp_path / "a")
    result = compare(folder, folder)
    assert result["kl_nats"] == pytest.approx(0, abs=1e-7)
    assert result["tv"] == pytest.approx(0, abs=1e-6)
    assert result["top1_agreement"] == 1.0
    assert result["perplexity"] == result["perplexity_reference"]
    assert result["tokens"] == 3 * 19


def test_another_model_is_far(tmp_path):
    result = compare(tiny.save(tmp_path / "a"), tiny.save(tmp_path / "b", seed=9))
    assert result["kl_nats"] > 0.1
    assert result["top1_agreement"] < 0.9


def test_distances_follow_their_definitions():
    p, q = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]), torch.tensor([0.25, 0.35, 0.2, 0.1, 0.1])
    result = quality.distances(p.log()[None], q.log()[None], torch.tensor([1]))
    assert result["tv"] == pytest.approx(0.15)  # 1 - the lecture's overlap of 0.85
    assert result["kl"] == pytest.approx(
        sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True)), abs=1e-6
    )
    assert result["nll"] == pytest.approx(-math.log(0.35))
    assert result["nll_reference"] == pytest.approx(-math.log(0.3))
    assert result["top1"] == 0
