"""Scales fitted to chosen codes: no row gets worse, the scales can be stored, and the right Hessian is what helps."""

import pytest
import torch

from compressor import formats
from compressor.quantize import gptq, quantize_shared
from compressor.quantize.refit import refit, row_errors

NAMES = ["int4-g32", "int4-g32-asym", "nvfp4", "mxfp4"]


def problem(size: int = 128, outputs: int = 32):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1024, size // 4, generator=g) @ torch.randn(size // 4, size, generator=g)
    x = x + torch.randn(1024, size, generator=g)
    hessian = x.T @ x / 1024
    hessian.diagonal().add_(0.01 * hessian.diagonal().mean())
    return torch.randn(outputs, size, generator=g).bfloat16(), hessian


def rounded(weight, fmt, search):
    tensors = fmt.encode(weight, search=search)
    return tensors, *fmt.unpack(tensors)


@pytest.mark.parametrize("search", ["none", "mse"])
@pytest.mark.parametrize("name", NAMES)
def test_no_row_gets_worse_and_the_codes_stay(name, search):
    fmt, (weight, hessian) = formats.get(name), problem()
    tensors, codes, grid = rounded(weight, fmt, search)
    fitted = refit(weight.float(), codes, grid, fmt, hessian, search=search)
    packed = fmt.pack(codes, fitted)
    assert {k: (v.dtype, v.shape) for k, v in packed.items()} == {k: (v.dtype, v.shape) for k, v in tensors.items()}
    assert torch.equal(fmt.unpack(packed)[1].step, fitted.step)  # as a decoder reads them
    assert torch.equal(fmt.unpack(packed)[0], codes)
    before, after = (row_errors(weight.double(), fmt.decode(t).double(), hessian.double()) for t in (tensors, packed))
    assert bool((after <= before * (1 + 1e-6)).all())
    if name != "mxfp4":  # a power of two is too far from the next one
        assert float(after.sum()) < 0.97 * float(before.sum())
        wrong = torch.flip(hessian, (0, 1))  # negative control: the Hessian of other inputs
        other = fmt.pack(codes, refit(weight.float(), codes, grid, fmt, wrong, search=search))
        assert bool((row_errors(weight.double(), fmt.decode(other).double(), hessian.double()) > before).any())


@pytest.mark.parametrize("search", ["none", "mse"])
@pytest.mark.parametrize("name", NAMES)
def test_storable_is_the_nearest_and_leaves_a_stored_step_as_it_is(name, search):
    fmt, (weight, _) = formats.get(name), problem()
    _, _, grid = rounded(weight, fmt, search)
    assert torch.equal(fmt.storable(grid.step, grid, search=search), grid.step)
    assert torch.equal(fmt.with_step(grid, grid.step).step, grid.step)
    assert all(torch.equal(v, grid.stored[k]) for k, v in fmt.with_step(grid, grid.step).stored.items())
    wanted = grid.step.flatten()[:64] * torch.linspace(0.7, 1.4, 64)
    found = fmt.storable(wanted, grid, search=search)
    # every step that could be stored: those that a fine comb of wishes leads to
    wishes = torch.logspace(-4, 1, 40000)
    comb = fmt.storable(torch.cat([-wishes, wishes]), grid, search=search).unique()
    nearest = comb[(comb[None] - wanted[:, None]).abs().argmin(1)]
    assert torch.equal((found - wanted).abs(), (nearest - wanted).abs())
    assert bool((found != wanted).any())


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "nvfp4"])
def test_every_scale_keeps_its_sign_whatever_the_codes_ask_for(name):
    fmt, (weight, hessian) = formats.get(name), problem()
    _, codes, grid = rounded(weight, fmt, "mse")
    for goal in (weight.float(), -weight.float()):
        fitted = refit(goal, codes, grid, fmt, hessian, search="mse")
        assert torch.equal(fitted.step.sign(), grid.step.sign())
    assert bool((refit(weight.float(), codes, grid, fmt, hessian, search="mse").step != grid.step).any())
    if name == "int4-g32":
        negative = grid.step < 0
        moved = refit(weight.float(), codes, grid, fmt, hessian, search="mse").step != grid.step
        assert bool(moved[negative].any()) and bool(moved[~negative].any())


def test_a_searched_int4_scale_keeps_the_bits_that_make_weights_exact_in_bfloat16():
    fmt, (weight, hessian) = formats.get("int4-g32"), problem()
    _, codes, grid = rounded(weight, fmt, "mse")
    exact = [
        torch.equal(decoded, decoded.bfloat16().float())
        for search in ("mse", "none")
        for decoded in [fmt.decode(fmt.pack(codes, refit(weight.float(), codes, grid, fmt, hessian, search=search)))]
    ]
    assert exact == [True, False]


def test_a_group_without_codes_keeps_its_scale():
    fmt, (weight, hessian) = formats.get("int4-g32"), problem()
    weight[:, 32:64] = 0
    _, codes, grid = rounded(weight, fmt, "none")
    fitted = refit(weight.float(), codes, grid, fmt, hessian, search="none")
    assert torch.equal(fitted.step[:, 1], grid.step[:, 1]) and not torch.equal(fitted.step[:, 0], grid.step[:, 0])


@pytest.mark.parametrize("name", NAMES)
def test_gptq_with_refit_leaves_less_error_and_says_how_many_scales_it_moved(name):
    fmt, (weight, hessian) = formats.get(name), problem()
    parts = list(weight.split([20, 12]))
    plain, fitted = (
        quantize_shared(parts, fmt, method="gptq", names=["q", "k"], hessian=hessian, refit=refit)
        for refit in (False, True)
    )
    if name == "mxfp4":  # a power of two is too far from the next one
        assert fitted[0].stats["refitted_scales"] == 0 and fitted[0].error == plain[0].error
        return
    assert sum(f.error for f in fitted) < sum(p.error for p in plain)
    assert fitted[0].stats["refitted_scales"] > 0
    assert "refitted_scales" not in plain[0].stats
    again = gptq(parts[0], hessian, fmt, refit=True, global_scale=fitted[0].tensors.get("weight_global_scale"))
    assert float((fmt.decode(again) == fmt.decode(fitted[0].tensors)).float().mean()) > 0.99
