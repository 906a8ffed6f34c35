"""Learned scales: they start as they were found, follow gradients, and end as tensors that the format stores."""

import pytest
import torch

from compressor import formats
from compressor.quantize import rtn
from compressor.quantize.learned import Adam, LearnedScales

FORMATS = ["int4-g32", "int4-g32-asym", "nvfp4"]


def weight(seed=0):
    return torch.randn(24, 64, generator=torch.Generator().manual_seed(seed)).bfloat16() * 0.1


def learned(name):
    fmt = formats.get(name)
    tensors = rtn(weight(), fmt)
    return fmt, tensors, LearnedScales(fmt, tensors, search="mse")


def error(decoded):
    return float((decoded - weight().float()).square().sum())


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_learning_starts_from_exactly_the_tensors_it_is_given(name):
    fmt, tensors, linear = learned(name)
    again = linear.tensors()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key].float(), tensors[key].float()) for key in tensors)
    assert torch.equal(linear.weight(torch.float32), fmt.decode(tensors))


@pytest.mark.parametrize("name", FORMATS)
def test_scales_that_are_off_find_back_and_codes_stay(name):
    fmt, tensors, linear = learned(name)
    best = error(fmt.decode(tensors))
    linear.gain *= 1.3
    assert error(linear.weight(torch.float32)) > 2 * best
    for step in range(200):
        linear.update(linear.weight(torch.float32) - weight().float(), 0.01 * (1 - step / 200))
    end = linear.tensors()
    assert torch.equal(fmt.unpack(end)[0], fmt.unpack(tensors)[0])
    assert error(fmt.decode(end)) < 1.1 * best
    assert torch.equal(fmt.decode(end), linear.weight(torch.float32))


def test_negative_scales_are_learned_as_positive_ones_are():
    fmt, tensors, linear = learned("int4-g32")
    negative = fmt.unpack(tensors)[1].step < 0
    assert bool(negative.any()) and not bool(negative.all())
    for _ in range(50):
        linear.update(linear.weight(torch.float32) - 1.2 * weight().float(), 0.01)
    step = fmt.unpack(linear.tensors())[1].step
    assert torch.equal(step < 0, negative)
    grown = step / fmt.unpack(tensors)[1].step
    assert float(grown[negative].mean()) == pytest.approx(1.2, abs=0.05)
    assert float(grown[~negative].mean()) == pytest.approx(1.2, abs=0.05)


@pytest.mark.parametrize("name", FORMATS)
def test_along_the_gradient_the_error_grows(name):
    fmt, tensors, linear = learned(name)
    for _ in range(50):
        linear.update(weight().float() - linear.weight(torch.float32), 0.01)
    assert error(fmt.decode(linear.tensors())) > 2 * error(fmt.decode(tensors))


def test_a_power_of_two_moves_only_when_the_next_one_is_nearer():
    fmt, tensors, linear = learned("mxfp4")
    linear.gain *= 1.2
    assert torch.equal(fmt.decode(linear.tensors()), fmt.decode(tensors))
    linear.gain *= 1.5
    assert torch.equal(fmt.decode(linear.tensors()), 2 * fmt.decode(tensors))


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_that_would_reach_zero_or_the_other_sign_stays(name):
    fmt, tensors, linear = learned(name)
    linear.gain[:] = 0.0
    linear.gain[0] = -1.0
    assert torch.equal(fmt.decode(linear.tensors()), fmt.decode(tensors))


def test_the_input_scale_of_a_w4a4_layer_is_kept():
    fmt = formats.get("nvfp4")
    tensors = {**rtn(weight(), fmt), "input_global_scale": torch.tensor([3.0])}
    assert torch.equal(LearnedScales(fmt, tensors, search="mse").tensors()["input_global_scale"], torch.tensor([3.0]))


def test_adam_is_torchs():
    start = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    ours, theirs = start.clone(), torch.nn.Parameter(start.clone())
    adam, reference = Adam(ours), torch.optim.Adam([theirs], lr=0.01, betas=Adam.BETAS, eps=1e-30)
    for step in range(5):
        theirs.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(step + 1))
        reference.step()
        adam.step(ours, theirs.grad, 0.01)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_what_has_no_gradient_does_not_move():
    value = torch.ones(2, 4)
    Adam(value).step(value, torch.zeros(2, 4), 0.1)
    assert torch.equal(value, torch.ones(2, 4))
