"""Byte for byte against vectors produced by TransformerEngine, compressed-tensors, microxcaling and torchao."""

import json

import pytest
import torch

from compressor import formats
from compressor.formats import grids
from compressor.formats.int4 import pack_to_int32, unpack_from_int32

INPUTS = ("stories260K_l0_w1_16x64", "gaussian_outliers_16x64", "edge_10x64")
ELEMENTS = {
    "fp4_e2m1": grids.E2M1,
    "fp6_e2m3": grids.E2M3,
    "fp6_e3m2": grids.E3M2,
    "fp8_e4m3": grids.E4M3,
    "fp8_e5m2": grids.E5M2,
}


def from_bits(bits: list[str]) -> torch.Tensor:
    return torch.tensor([int(b, 16) for b in bits], dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.fixture(scope="module")
def vectors(shared_data):
    return json.loads((shared_data / "fp4_mx_reference_vectors" / "vectors.json").read_text())


@pytest.fixture(scope="module")
def literals(shared_data):
    return json.loads((shared_data / "fp4_mx_reference_vectors" / "literal_vectors_from_tests.json").read_text())


def weight(vectors, name: str) -> torch.Tensor:
    return from_bits(vectors["inputs"][name]["f32_bits"]).reshape(vectors["inputs"][name]["shape"])


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(("source", "rule"), [("nvfp4_ct", "compressed-tensors"), ("nvfp4_te", "transformer-engine")])
def test_nvfp4_matches_both_reference_encoders(vectors, name, source, rule):
    tensors = formats.get("nvfp4", underflow=rule).encode(weight(vectors, name))
    expected = vectors[source][name]
    assert tensors["weight_scale"].view(torch.uint8).flatten().tolist() == expected["scale_e4m3_codes"]
    assert tensors["weight_packed"].flatten().tolist() == expected["packed_u8"]
    if source == "nvfp4_ct":
        assert torch.equal(tensors["weight_global_scale"], from_bits([expected["global_scale_bits"]]))


def test_the_underflow_rules_differ_on_the_edge_rows_only(vectors):
    for name in INPUTS:
        default, other = (formats.get("nvfp4", **o) for o in ({}, {"underflow": "transformer-engine"}))
        a, b = default.encode(weight(vectors, name)), other.encode(weight(vectors, name))
        same = torch.equal(a["weight_packed"], b["weight_packed"])
        assert same == (name != "edge_10x64")
        # either way such a block decodes to zeros
        assert torch.equal(default.decode(a), other.decode(b))


@pytest.mark.parametrize("name", INPUTS)
def test_mxfp4_floor_rule_matches_microxcaling_rounding_ties_to_even(vectors, name):
    fmt = formats.get("mxfp4")
    tensors = fmt.encode(weight(vectors, name))
    assert tensors["weight_scale"].flatten().tolist() == vectors["mx"]["fp4_e2m1"][name]["scale_e8m0_codes"]
    expected = from_bits(vectors["mx_even"]["fp4_e2m1"][name]["dequant_f32_bits"])
    assert fmt.decode(tensors).flatten().view(torch.int32).tolist() == expected.view(torch.int32).tolist()


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("name", INPUTS)
def test_mx_elements_differ_from_the_ties_away_rule_at_exact_ties_only(vectors, element, name):
    grid, groups = ELEMENTS[element], weight(vectors, name).unflatten(1, (-1, 32))
    codes = grids.mx_exponent(groups.abs().amax(-1), "floor", grid)
    assert codes.flatten().tolist() == vectors["mx"][element][name]["scale_e8m0_codes"]
    scaled = groups / grids.decode_e8m0(codes)[..., None]
    ours = grid.decode(grid.encode(scaled)).flatten()
    step = grids.decode_e8m0(codes)[..., None].expand_as(scaled).flatten()
    even, away = (from_bits(vectors[rule][element][name]["dequant_f32_bits"]) for rule in ("mx_even", "mx"))
    assert torch.equal(ours * step, even)
    differing = even != away
    # where the two rules disagree the input lies exactly between their two answers
    middle = (even.double() + away.double()) / 2 / step.double()
    assert torch.equal(middle[differing], scaled.flatten().double()[differing])
    assert bool(differing.any()) == (name == "edge_10x64" and element != "fp8_e5m2")


def test_ceil_rule_matches_torchao_rceil(literals):
    cases = literals["torchao_to_mx_rceil_e4m3_block32"]["cases"]
    checked = 0
    for case in cases:
        if case["expect_scale_e8m0"] is None:  # the NaN block: a weight with NaN is refused
            continue
        integer, real = (
            (torch.int32, torch.float32) if case["input_dtype"] == "float32" else (torch.int16, torch.bfloat16)
        )
        x = torch.tensor(case["input_bits"]).to(integer).view(real).float()
        code = grids.mx_exponent(x.abs().amax(), "ceil", grids.E4M3)
        assert [int(code)] == case["expect_scale_e8m0"]
        assert grids.E4M3.encode(x / grids.decode_e8m0(code)).tolist() == case["expect_e4m3_codes"]
        checked += 1
    assert checked == len(cases) - 1


def test_fp6_rounding_matches_torchao(literals):
    pairs = literals["torchao_fp6_e3m2_rounding"]["pairs"]
    assert grids.E3M2.encode(torch.tensor([p[0] for p in pairs])).tolist() == [p[1] for p in pairs]


def test_round_rule_matches_compressed_tensors_powers_of_two(literals):
    case = literals["ct_round_to_power_2_bf16"]
    amax = torch.tensor(case["inputs"]).bfloat16().abs()
    power = grids.decode_e8m0(grids.mx_exponent(amax, "round") + grids.E2M1.emax)
    expected = torch.tensor(case["expected"]).abs()
    # the table prints 2^-5 as 0.0312
    assert torch.equal(power, torch.where(expected == 0.0312, 2.0**-5, expected))
    floor = grids.decode_e8m0(grids.mx_exponent(amax, "floor") + grids.E2M1.emax)
    assert not torch.equal(floor, power)


def test_e2m1_boundaries_match_compressed_tensors(literals):
    case = literals["ct_cast_to_fp4"]
    assert grids.round_e2m1_(torch.tensor(case["inputs"])).tolist() == case["expected"]


@pytest.mark.parametrize("name", ["pack_to_int32", "pack_to_int32_8bit"])
def test_integer_packing_matches_compressed_tensors(vectors, name):
    case = vectors["int4_ct"][name]
    bits = case["num_bits"]
    codes = (torch.tensor(case["input"]).reshape(case["shape"]) + (1 << (bits - 1))).to(torch.uint8)
    words = pack_to_int32(codes, bits)
    assert list(words.shape) == case["packed_shape"] and words.flatten().tolist() == case["packed_int32"]
    assert torch.equal(unpack_from_int32(words, bits, codes.shape[1]), codes)
