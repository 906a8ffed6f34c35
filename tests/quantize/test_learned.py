"""Learned codes and scales: they start as they were rounded, follow gradients, and end as tensors on disk."""

import pytest
import torch

from compressor import formats
from compressor.quantize import rtn
from compressor.quantize.learned import Adam, Learned, Rates

FORMATS = ["int4-g32", "int4-g32-asym", "nvfp4", "mxfp4"]
RATES = Rates(rounding=0.02, scale=2e-3, other=1e-3)


def weight(seed=0, shape=(24, 64)):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16() * 0.1


def learned(name, w):
    fmt = formats.get(name)
    tensors = rtn(w, fmt)
    return fmt, tensors, Learned(fmt, tensors, w)


@pytest.mark.parametrize("name", FORMATS)
def test_learning_starts_from_exactly_the_tensors_it_is_given(name):
    fmt, tensors, linear = learned(name, weight())
    again = linear.tensors()
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[key], tensors[key]) for key in tensors)
    assert torch.equal(fmt.decode(again), fmt.decode(tensors))
    assert torch.equal(linear.weight(torch.float32), fmt.decode(tensors))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_that_were_not_the_nearest_are_kept_at_the_start(name):
    fmt = formats.get(name)
    tensors = rtn(weight(), fmt)
    linear = Learned(fmt, tensors, weight() + 0.1 * weight(seed=1))
    assert torch.equal(fmt.decode(linear.tensors()), fmt.decode(tensors))


@pytest.mark.parametrize("name", FORMATS)
def test_following_the_gradient_of_an_output_error_lowers_it(name):
    w = weight()
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(2)) @ torch.diag(torch.linspace(0.1, 3, 64))
    x = x + x[:, :1] * 2
    hessian = x.T @ x / 200
    fmt, tensors, linear = learned(name, w)

    def error(decoded):
        difference = decoded - w.float()
        return float((difference @ hessian * difference).sum())

    first = error(fmt.decode(tensors))
    for step in range(150):
        linear.update((linear.weight(torch.float32) - w.float()) @ hessian, RATES.times(1 - step / 150))
    assert error(fmt.decode(linear.tensors())) < 0.6 * first
    assert torch.equal(fmt.decode(linear.tensors()), linear.weight(torch.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_against_the_gradient_the_error_grows(name):
    w = weight()
    fmt, tensors, linear = learned(name, w)
    for _ in range(50):
        linear.update(w.float() - linear.weight(torch.float32), RATES)
    assert (fmt.decode(linear.tensors()) - w.float()).norm() > 1.05 * (fmt.decode(tensors) - w.float()).norm()


def test_a_saturated_code_comes_back_within_one_level():
    fmt, _, linear = learned("int4-g32", weight())
    far = torch.full((24, 64), -1.0)
    for _ in range(100):
        linear.update(far, Rates(1.0, 0.0, 0.0))
    assert linear.z.max() <= 7.5
    assert bool((linear.weight(torch.float32) == 7 * linear.grid.step.repeat_interleave(32, 1)).all())


def test_scales_stay_positive_and_storable():
    for name in ("int4-g32", "nvfp4"):
        fmt, _, linear = learned(name, weight())
        for _ in range(60):
            linear.update(linear._levels(linear.z).flatten(1), Rates(0.0, 0.05, 0.0))
        decoded = fmt.decode(linear.tensors())
        assert bool(decoded.isfinite().all())
        assert bool((fmt.unpack(linear.tensors())[1].step > 0).all())


def test_the_input_scale_of_a_w4a4_layer_is_kept():
    fmt = formats.get("nvfp4")
    tensors = {**rtn(weight(), fmt), "input_global_scale": torch.tensor([3.0])}
    assert torch.equal(Learned(fmt, tensors, weight()).tensors()["input_global_scale"], torch.tensor([3.0]))


def test_adam_without_sharing_is_torchs():
    start = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    ours, theirs = start.clone(), torch.nn.Parameter(start.clone())
    adam, reference = Adam(ours), torch.optim.Adam([theirs], lr=0.01, betas=Adam.BETAS, eps=1e-30)
    for step in range(5):
        grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(step + 1))
        theirs.grad = grad.clone()
        reference.step()
        adam.step(ours, grad.clone(), 0.01)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_tensor_without_gradient_does_not_move():
    value = torch.ones(2, 4)
    Adam(value, shared=True).step(value, torch.zeros(2, 4), 0.1)
    assert torch.equal(value, torch.ones(2, 4))
