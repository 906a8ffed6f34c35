"""Linears that read one input: shared factorization and scales, the errors reported, refusals by name."""

import math

import pytest
import torch

from compressor import formats
from compressor.errors import CompressError, UsageError
from compressor.quantize import gptq, quantize_shared, rtn
from compressor.quantize.metrics import output_energy, relative_diagonal_error, relative_output_error, sqnr_db

NAMES = ["layers.0.q", "layers.0.k", "layers.0.v"]


def inputs(cols: int = 64, rows: int = 512) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randn(rows, cols // 4, generator=g) @ torch.randn(cols // 4, cols, generator=g) + torch.randn(
        rows, cols, generator=g
    )


def weights(cols: int = 64) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return [scale * torch.randn(rows, cols, generator=g).bfloat16() for rows, scale in ((48, 1.0), (16, 0.3), (16, 2))]


@pytest.mark.parametrize("name", ["int4-g64", "int4-g32-asym", "nvfp4", "mxfp4"])
def test_solving_together_equals_solving_each_alone_with_the_common_global_scale(name):
    fmt, x = formats.get(name), inputs()
    hessian = x.T @ x
    results = quantize_shared(weights(), fmt, method="gptq", hessian=hessian, names=NAMES)
    common = fmt.global_scale(weights(), search="mse")
    for weight, result in zip(weights(), results, strict=True):
        alone = gptq(weight, hessian, fmt, global_scale=common)
        assert set(alone) == set(result.tensors)
        same = fmt.decode(alone) == fmt.decode(result.tensors)
        assert float(same.float().mean()) > 0.999  # a product of other height may round differently
        assert all(torch.equal(alone[k], result.tensors[k]) for k in alone if k != "weight_packed")


def test_fused_parts_share_a_global_scale_and_unfused_parts_do_not():
    fmt = formats.get("nvfp4")
    for method, hessian in (("rtn", None), ("gptq", inputs().T @ inputs())):
        fused, apart = (
            [
                r.tensors["weight_global_scale"].item()
                for r in quantize_shared(weights(), fmt, method=method, hessian=hessian, names=NAMES, fused=fused)
            ]
            for fused in (True, False)
        )
        assert len(set(fused)) == 1 and len(set(apart)) == 3 and fused[0] == min(apart)


def test_the_reported_error_is_that_of_the_layer_output():
    fmt, x = formats.get("int4-g64"), inputs()
    hessian = x.T @ x
    for method in ("rtn", "gptq"):
        for weight, result in zip(
            weights(), quantize_shared(weights(), fmt, method=method, hessian=hessian, names=NAMES), strict=True
        ):
            exact, rounded = x @ weight.float().T, x @ fmt.decode(result.tensors).T
            expected = float((rounded - exact).square().sum() / exact.square().sum())
            assert result.error == pytest.approx(expected, rel=1e-3)
            noise = (fmt.decode(result.tensors) - weight.float()).square().sum() / weight.float().square().sum()
            assert result.sqnr_db == pytest.approx(-10 * math.log10(float(noise)), abs=1e-3)


def test_gptq_has_a_lower_output_error_and_rtn_a_higher_weight_accuracy():
    fmt, hessian = formats.get("int4-g64"), inputs().T @ inputs()
    solved, rounded = (quantize_shared(weights(), fmt, method=m, hessian=hessian, names=NAMES) for m in ("gptq", "rtn"))
    assert all(a.error < b.error for a, b in zip(solved, rounded, strict=True))
    assert all(a.sqnr_db < b.sqnr_db for a, b in zip(solved, rounded, strict=True))
    assert solved[0].stats["method"] == "gptq" and solved[0].stats["damping"] == 0.01
    assert solved[0].stats["precision"] == "float32" and solved[0].stats["dead_inputs"] == 0


def test_rounding_uses_the_hessians_diagonal_for_its_search_only():
    fmt, hessian = formats.get("int4-g64"), inputs().T @ inputs() * torch.outer(*[torch.linspace(0.01, 3, 64)] * 2)
    weight = weights()[0]
    with_it = quantize_shared([weight], fmt, method="rtn", hessian=hessian, names=NAMES[:1])[0]
    without = quantize_shared([weight], fmt, method="rtn", names=NAMES[:1])[0]
    expected = rtn(weight, fmt, importance=hessian.diagonal())
    assert all(torch.equal(with_it.tensors[k], expected[k]) for k in expected)
    assert with_it.error < relative_output_error(weight, fmt.decode(without.tensors), hessian)
    plain = quantize_shared([weight], fmt, method="rtn", hessian=hessian, names=NAMES[:1], search="none")[0]
    assert all(torch.equal(v, fmt.encode(weight)[k]) for k, v in plain.tensors.items())


@pytest.mark.parametrize("name", ["int4-g64", "int4-g64-asym", "int8", "fp8", "nvfp4", "mxfp4"])
def test_rounding_with_the_diagonal_alone_gives_the_same_tensors_and_names_its_error_otherwise(name):
    fmt, hessian = formats.get(name), inputs().T @ inputs() * torch.outer(*[torch.linspace(0.01, 3, 64)] * 2)

    def rounded(**given):
        return quantize_shared(weights(), fmt, method="rtn", names=NAMES, **given)

    whole, alone, turned = (
        rounded(**given)
        for given in ({"hessian": hessian}, {"diagonal": hessian.diagonal()}, {"diagonal": hessian.diagonal().flip(0)})
    )
    for weight, a, b in zip(weights(), whole, alone, strict=True):
        assert a.tensors.keys() == b.tensors.keys()
        assert all(torch.equal(a.tensors[k], b.tensors[k]) for k in a.tensors)
        assert a.diagonal_error is None and b.error is None and a.sqnr_db == b.sqnr_db
        noise, diagonal = (fmt.decode(b.tensors) - weight.float()).square(), hessian.diagonal()
        expected = (noise * diagonal).sum() / (weight.float().square() * diagonal).sum()
        assert b.diagonal_error == pytest.approx(float(expected), rel=1e-4)
    other = [not torch.equal(fmt.decode(a.tensors), fmt.decode(b.tensors)) for a, b in zip(whole, turned, strict=True)]
    assert any(other)  # negative control: the diagonal matters


@pytest.mark.parametrize("name", ["int4-g64", "int4-g64-asym", "nvfp4", "mxfp4"])
def test_results_do_not_depend_on_threads_or_on_autograd(name):
    fmt, x = formats.get(name), inputs()
    weight = torch.randn(2048, 64, generator=torch.Generator().manual_seed(2)).bfloat16()  # several chunks of a search

    def tensors(w: torch.Tensor) -> dict[str, torch.Tensor]:
        return quantize_shared([w], fmt, method="gptq", hessian=x.T @ x, names=["w"])[0].tensors

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = tensors(weight)
        torch.set_num_threads(3)
        several = tensors(torch.nn.Parameter(weight))
        with torch.inference_mode():
            inferred = tensors(weight.clone())
    finally:
        torch.set_num_threads(before)
    for other in (several, inferred):
        assert all(torch.equal(single[k], other[k]) for k in single if k != "weight_packed")
        assert float((fmt.decode(single) == fmt.decode(other)).float().mean()) > 0.999
        assert not any(t.requires_grad for t in other.values())


def test_metrics_of_exact_and_zero_weights():
    weight = weights()[0].float()
    assert relative_output_error(weight, weight, None) == 0 and sqnr_db(weight, weight) == math.inf
    assert relative_output_error(torch.zeros(2, 4), torch.zeros(2, 4), None) == 0
    assert relative_output_error(weight, torch.zeros_like(weight), inputs().T @ inputs()) == pytest.approx(1)
    apart = torch.linspace(0.1, 2, 64)
    assert relative_diagonal_error(weight, weight.bfloat16(), apart) == 0  # bfloat16 already
    assert relative_diagonal_error(weight, weight.round(), apart) == pytest.approx(
        relative_output_error(weight, weight.round(), apart.diag()), rel=1e-4
    )
    assert output_energy(torch.ones(1, 2), torch.tensor([[2.0, 1.0], [1.0, 2.0]])) == 6


@pytest.mark.parametrize("width", [200, 256, 600])
def test_output_energy_reads_one_of_two_mirrored_panels(width):
    rows, weight = torch.randn(700, width, dtype=torch.float64), torch.randn(5, width, dtype=torch.float64)
    hessian = rows.T @ rows
    energy = float((rows @ weight.T).square().sum())
    assert output_energy(weight, hessian) == pytest.approx(energy)
    below = hessian.tril(-256)  # below the panels on the diagonal, whatever they begin at
    assert output_energy(weight, hessian - below) == pytest.approx(energy)  # never read
    assert width <= 256 or output_energy(weight, hessian - below.T) != pytest.approx(energy)


def test_a_zero_layer_is_quantized_to_zeros():
    for name in ("int4-g64", "int4-g64-asym", "nvfp4", "mxfp4"):
        fmt, hessian = formats.get(name), inputs().T @ inputs()
        for method in ("rtn", "gptq"):
            zero = torch.zeros(8, 64, dtype=torch.bfloat16)
            result = quantize_shared([zero], fmt, method=method, hessian=hessian, names=["z"])[0]
            assert bool((fmt.decode(result.tensors) == 0).all()) and result.error == 0


def test_refusals_name_the_layer_at_fault():
    fmt, hessian = formats.get("int4-g64"), inputs().T @ inputs()
    bad = weights()
    bad[1][3, 5] = torch.inf
    with pytest.raises(CompressError, match=r"layers\.0\.k: the weight holds NaN or Inf"):
        quantize_shared(bad, fmt, method="rtn", names=NAMES)
    with pytest.raises(CompressError, match=r"layers\.0\.q: in_features 64 .* group of 128"):
        quantize_shared(weights(), formats.get("int4-g128"), method="rtn", names=NAMES)
    with pytest.raises(CompressError, match=r"layers\.0\.q: GPTQ needs the Hessian"):
        quantize_shared(weights(), fmt, method="gptq", names=NAMES)
    with pytest.raises(CompressError, match=r"layers\.0\.q: GPTQ needs the Hessian"):
        quantize_shared(weights(), fmt, method="gptq", diagonal=hessian.diagonal(), names=NAMES)
    with pytest.raises(CompressError, match=r"layers\.0\.q: 64 inputs, but a Hessian of 32"):
        quantize_shared(weights(), fmt, method="rtn", diagonal=hessian.diagonal()[:32], names=NAMES)
    with pytest.raises(CompressError, match=r"layers\.0\.q: 64 inputs, but a Hessian of 32"):
        quantize_shared(weights(), fmt, method="gptq", hessian=hessian[:32, :32], names=NAMES)
    with pytest.raises(CompressError, match=r"layers\.0\.q: the Hessian is empty"):
        quantize_shared(weights(), fmt, method="gptq", hessian=torch.zeros(64, 64), names=NAMES)
    with pytest.raises(UsageError, match="method: 'awq' is not one of gptq, rtn"):
        quantize_shared(weights(), fmt, method="awq", names=NAMES)


@pytest.mark.parametrize("name", ["int4-g64", "nvfp4"])
def test_a_weight_that_rounds_to_infinity_is_named(name):
    largest = torch.finfo(torch.bfloat16).max
    fmt, weight = formats.get(name), (torch.linspace(-1, 1, 16 * 64).reshape(16, 64) * largest).bfloat16()
    with pytest.raises(CompressError, match=f"w: {name} rounds its largest weight, .*, to infinity"):
        quantize_shared([weight], fmt, method="rtn", names=["w"])
    quantize_shared([weight / 8], fmt, method="rtn", names=["w"])
