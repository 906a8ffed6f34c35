"""AWQ and SmoothQuant find scales that leave less output error than plain rounding, and none where there are none."""

import pytest
import torch

from compressor import formats
from compressor.quantize.metrics import output_energy
from compressor.transform import awq as awq_file
from compressor.transform import smooth
from compressor.transform.awq import awq
from compressor.transform.search import best, output_error, quantizer
from compressor.transform.smooth import smoothquant

FMT = formats.get("int4-g32")


def problem(outliers=4, columns=64, rows=48):
    """Weights that read inputs a few of whose channels are large: what AWQ is about."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, columns, generator=generator)
    x[:, :outliers] *= 20
    weights = [torch.randn(rows, columns, generator=generator) * 0.1 for _ in range(2)]
    return weights, x.T @ x / len(x), x.abs().mean(0), x.abs().amax(0)


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4"])
def test_awq_lowers_the_error_that_outlying_inputs_cause(name):
    weights, hessian, mean, maximum = problem()
    found = awq(weights, hessian, mean, maximum, formats.get(name))
    assert 0 < found.alpha <= 1
    assert found.error_after < 0.75 * found.error_before
    assert found.scales[:4].min() > found.scales[4:].max()
    assert float(found.scales.max() * found.scales.min()) == pytest.approx(1, rel=1e-4)


def test_the_errors_are_those_of_the_rounded_weights():
    weights, hessian, mean, maximum = problem()
    found = awq(weights, hessian, mean, maximum, FMT)
    energy = sum(output_energy(weight, hessian) for weight in weights)
    plain = [FMT.decode(FMT.encode(w, search="none", importance=hessian.diagonal())) for w in weights]
    before = sum(output_energy(p - w, hessian) for p, w in zip(plain, weights, strict=True))
    assert found.error_before == pytest.approx(before / energy, rel=1e-6)
    s = found.scales
    scaled = [FMT.decode(FMT.encode(w * s, search="none", importance=hessian.diagonal() / s**2)) / s for w in weights]
    after = sum(output_energy(p - w, hessian) for p, w in zip(scaled, weights, strict=True))
    assert found.error_after == pytest.approx(after / energy, rel=1e-4)


def test_scaling_a_hessian_is_scaling_the_inputs():
    """The error in the scaled coordinates, tr(E' H/(s sᵀ) E'ᵀ), is the one that the search compares."""
    weights, hessian, *_ = problem()
    s = torch.rand(64, generator=torch.Generator().manual_seed(0)) + 0.5
    rounding = quantizer(FMT, fused=False)
    smoothed = hessian / s / s[:, None]
    inside = output_error([w * s for w in weights], smoothed, torch.ones(64), rounding)
    assert output_error(weights, hessian, s, rounding) == pytest.approx(inside, rel=1e-4)


def test_no_scaling_is_chosen_where_none_helps():
    weights, hessian, mean, maximum = problem()
    exact = lambda weights, importance: [w.float() for w in weights]  # noqa: E731 - nothing is rounded
    for algorithm in (awq, smoothquant):
        found = algorithm(weights, hessian, mean, maximum, FMT, quantize=exact)
        assert found.alpha is None and torch.equal(found.scales, torch.ones(64))
        assert found.error_after == found.error_before


def test_a_stated_exponent_is_taken_whatever_it_costs():
    weights, hessian, mean, maximum = problem(outliers=0)
    for algorithm in (awq, smoothquant):
        found = algorithm(weights, hessian, mean, maximum, FMT, alpha=1.0)
        assert found.alpha == 1.0 and not torch.equal(found.scales, torch.ones(64))


def test_smoothquant_is_its_formula_and_flattens_the_inputs():
    weights, hessian, mean, maximum = problem()
    found = smoothquant(weights, hessian, mean, maximum, FMT, alpha=0.5)
    widest = torch.cat(weights).abs().amax(0)
    torch.testing.assert_close(found.scales, maximum.sqrt() / widest.sqrt())
    spread = lambda x: float(x.max() / x.min())  # noqa: E731
    assert spread(maximum / found.scales) < spread(maximum) / 3
    searched = smoothquant(weights, hessian, mean, maximum, FMT)
    assert searched.error_after <= found.error_after and searched.error_after < 0.7 * searched.error_before


@pytest.mark.parametrize("algorithm", [awq, smoothquant])
def test_inputs_of_one_channel_get_one_scale(algorithm):
    weights, hessian, mean, maximum = problem()
    shared = torch.arange(16).repeat(4)
    found = algorithm(weights, hessian, mean, maximum, FMT, alpha=0.5, shared=shared)
    assert torch.equal(found.scales.view(4, 16), found.scales[:16].expand(4, 16))
    free = algorithm(weights, hessian, mean, maximum, FMT, alpha=0.5)
    assert not torch.equal(free.scales.view(4, 16), free.scales[:16].expand(4, 16))


def test_dead_inputs_and_weights_do_not_make_infinite_scales():
    weights, hessian, mean, maximum = problem()
    mean[5] = maximum[5] = 0
    hessian[5] = hessian[:, 5] = 0
    for weight in weights:
        weight[:, 7] = 0
    for algorithm in (awq, smoothquant):
        found = algorithm(weights, hessian, mean, maximum, FMT, alpha=1.0)
        assert bool((found.scales.isfinite() & (found.scales > 0)).all())
    assert torch.equal(awq_file.scales_for(torch.zeros(8), 0.5), torch.ones(8))
    assert torch.equal(smooth.scales_for(torch.zeros(8), torch.ones(8), 0.5), torch.ones(8))


def test_fused_parts_are_rounded_with_one_global_scale():
    nvfp4 = formats.get("nvfp4")
    weights, hessian, *_ = problem()
    weights[1] *= 7
    apart, together = (quantizer(nvfp4, fused=f)(weights, hessian.diagonal())[0] for f in (False, True))
    common = nvfp4.global_scale(weights, search="none")
    assert torch.equal(together, nvfp4.decode(nvfp4.encode(weights[0], search="none", global_scale=common)))
    assert not torch.equal(apart, together)


def test_the_best_exponent_wins():
    weights, hessian, *_ = problem()
    good = torch.ones(64)
    good[:4] = 4
    found = best(weights, hessian, lambda a: good if a == 0.25 else good.flip(0), quantizer(FMT, fused=True))
    assert found.alpha == 0.25
