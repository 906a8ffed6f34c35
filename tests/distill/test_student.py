"""A block under distillation: the way back is autograd's, and every parameter moves against its gradient."""

import pytest
import tiny_models as tiny
import torch
from torch.func import functional_call

from compressor import formats
from compressor.checkpoint.weights import Weights
from compressor.distill.student import Block, Rates
from compressor.models import skeleton
from compressor.models.stream import BlockStream
from compressor.quantize import rtn
from compressor.quantize.learned import LearnedScales

FMT = formats.get("int4-g32")


def block(tmp_path, family="llama", activations=False):
    folder = tiny.save(tmp_path / family, family)
    config, _ = skeleton.model_config(folder)
    stream = BlockStream(Weights(folder), config, torch.float32)
    ids = torch.randint(3, tiny.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
    hidden = stream.embed(ids).clone()
    names = [name for group in stream.family.linear_groups(config, 0) for name in group.names]
    with stream.block(0) as layer:
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    learned = {name: LearnedScales(FMT, rtn(state.pop(f"{name}.weight"), FMT), search="mse") for name in names}
    if activations:
        for name in names:
            skeleton.emulate_activations(layer.get_submodule(name), formats.get("mxfp4"), None)
    return Block(layer, stream.recorders[0].arguments, learned, state, torch.float32), hidden


@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "qwen2", "qwen3"])
def test_the_gradient_that_is_passed_on_is_autograds(tmp_path, family):
    student, hidden = block(tmp_path, family)
    weights = {f"{name}.weight": linear.weight(torch.float32) for name, linear in student.learned.items()}
    leaf = hidden.clone().requires_grad_(True)
    output = functional_call(student.layer, weights | student.others, (leaf,), student.arguments)
    output = output[0] if isinstance(output, tuple) else output
    assert torch.allclose(output, student.forward(hidden), atol=1e-6)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    output.backward(gradient)
    for size in (1, 2, 3):
        assert torch.allclose(student.backward(hidden, gradient, size, Rates(0.0, 0.0)), leaf.grad, atol=1e-5)


def test_scales_and_norms_move_so_that_the_block_comes_closer(tmp_path):
    student, hidden = block(tmp_path)
    goal = student.forward(hidden)
    for linear in student.learned.values():
        linear.gain *= 1.1
    student.others = {name: value + 0.1 for name, value in student.others.items()}
    student.resume(0)
    first = (student.forward(hidden) - goal).square().mean()
    for _ in range(60):
        student.backward(hidden, student.forward(hidden) - goal, 2, Rates(2e-3, 2e-3))
    assert (student.forward(hidden) - goal).square().mean() < 0.2 * first


def test_along_the_gradient_it_goes_away(tmp_path):
    student, hidden = block(tmp_path)
    goal = student.forward(hidden) + 0.1
    first = (student.forward(hidden) - goal).square().mean()
    for _ in range(20):
        student.backward(hidden, goal - student.forward(hidden), 2, Rates(2e-3, 2e-3))
    assert (student.forward(hidden) - goal).square().mean() > first


def test_rounded_inputs_pass_their_gradients_on(tmp_path):
    student, hidden = block(tmp_path, activations=True)
    plain, _ = block(tmp_path / "plain")
    assert not torch.equal(student.forward(hidden), plain.forward(hidden))
    gradient = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    passed, other = (b.backward(hidden, gradient, 3, Rates(0.0, 0.0)) for b in (student, plain))
    assert torch.cosine_similarity(passed.flatten(), other.flatten(), 0) > 0.95


def test_linears_that_are_not_quantized_stay(tmp_path):
    student, hidden = block(tmp_path)
    name, linear = next(iter(student.learned.items()))
    others = student.others | {f"{name}.weight": linear.weight(torch.float32)}
    rest = {key: value for key, value in student.learned.items() if key != name}
    partly = Block(student.layer, student.arguments, rest, others, torch.float32)
    before = partly.fixed[f"{name}.weight"].clone()
    partly.backward(hidden, torch.ones_like(hidden), 3, Rates(0.1, 0.1))
    assert torch.equal(partly.tensors()[f"{name}.weight"], before)
