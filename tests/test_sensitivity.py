"""Tokens are weighed by how much the model's answer would feel an error at them."""

import pytest
import tiny_models as tiny
import torch

from compressor import sensitivity
from compressor.decode import engine
from compressor.decode.sampling import draw
from compressor.errors import CompressError
from compressor.ui import NullUI

GROUP = {"model.layers.0.mlp.down_proj": ["model.layers.0.mlp.down_proj"]}


def model(tmp_path, family="llama"):
    return engine.load(tiny.save(tmp_path / family, family), dtype=torch.float32)


def ids(rows=3, length=12):
    return torch.randint(3, tiny.VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))


def weights(target, rows, groups=GROUP, seed=0):
    return sensitivity.token_weights(target, groups, rows, seed=seed, ui=NullUI())


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "qwen3"])
def test_every_token_gets_a_weight_and_their_mean_is_one(tmp_path, family):
    found = weights(model(tmp_path, family), ids())["model.layers.0.mlp.down_proj"]
    assert found.shape == (3, 12)
    assert bool((found > 0).all())
    assert found.mean().item() == pytest.approx(1, rel=1e-5)


def test_weights_are_the_squared_gradients_of_the_drawn_tokens(tmp_path):
    target, rows = model(tmp_path), ids(rows=1)
    linear = target.get_submodule("model.layers.0.mlp.down_proj")
    seen = []
    with torch.enable_grad():
        handle = linear.register_forward_hook(lambda m, i, o: seen.append(o.requires_grad_(True)) or o)
        logits = target(input_ids=rows).logits[0]
        handle.remove()
        law = logits.detach().softmax(-1)
        drawn = draw(law, torch.rand(len(law), generator=torch.Generator().manual_seed(0)))[:, None]
        loss = -logits.log_softmax(-1).gather(1, drawn).sum()
        (gradient,) = torch.autograd.grad(loss, seen[0])
    wanted = gradient[0].square().sum(-1)
    found = weights(target, rows)["model.layers.0.mlp.down_proj"][0]
    assert torch.allclose(found, wanted / wanted.mean(), rtol=1e-4)


def test_a_group_adds_what_its_linears_say(tmp_path):
    target, rows = model(tmp_path), ids()
    gate, up = "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"
    apart = weights(target, rows, {gate: [gate], up: [up]})
    together = weights(target, rows, {"both": [gate, up]})["both"]
    rest = together - together.mean()
    mix = torch.stack([(apart[gate] - 1).flatten(), (apart[up] - 1).flatten()], 1)
    assert torch.linalg.lstsq(mix, rest.flatten()[:, None]).residuals.sum() < 1e-6


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path):
    target, rows = model(tmp_path), ids()
    (first,), (again,), (other,) = (weights(target, rows, seed=seed).values() for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_no_hook_is_left_behind(tmp_path):
    target = model(tmp_path)
    weights(target, ids())
    assert not target.get_submodule("model.layers.0.mlp.down_proj")._backward_hooks


def test_logits_that_are_not_finite_are_refused(tmp_path):
    target = model(tmp_path)
    target.get_submodule("model.layers.1.mlp.up_proj").weight.data[0, 0] = float("nan")
    with pytest.raises(CompressError, match="logits are not finite"):
        weights(target, ids())


def test_gradients_that_are_all_zero_are_refused_by_name(tmp_path):
    target = model(tmp_path)
    target.model.layers[1].mlp.down_proj.weight.data.zero_()
    name = "model.layers.1.mlp.up_proj"
    with pytest.raises(CompressError, match="up_proj"):
        weights(target, ids(), {name: [name]})
