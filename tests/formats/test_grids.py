"""The low-bit number grids against tables that two other libraries agree on, and as properties."""

import json

import pytest
import torch

from compressor.errors import CompressError, UsageError
from compressor.formats import grids
from compressor.formats.grids import E2M1, E2M3, E3M2, E4M3, E5M2

ELEMENTS = (E2M1, E2M3, E3M2, E4M3, E5M2)


def from_bits(bits: list[str]) -> torch.Tensor:
    return torch.tensor([int(b, 16) for b in bits], dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.fixture(scope="module")
def tables(shared_data):
    return json.loads((shared_data / "lowbit_float_tables" / "decode_tables.json").read_text())["tables"]


def numbers(table: list) -> torch.Tensor:
    return torch.tensor([float(v) for v in table])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0).view(torch.int32), b.nan_to_num(0).view(torch.int32)
    )


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_every_code_decodes_to_the_tabled_value(element, tables):
    expected = numbers(tables[element.name])
    decoded = element.decode(torch.arange(1 << element.bits, dtype=torch.uint8))
    assert same_bits(decoded, expected)
    assert not same_bits(decoded, -expected)


def test_e8m0_decodes_to_the_tabled_powers_of_two(tables):
    decoded = grids.decode_e8m0(torch.arange(256, dtype=torch.uint8))
    assert same_bits(decoded, numbers(tables["float8_e8m0fnu"]))


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_encoding_rounds_to_nearest_even_and_saturates_as_tabled(element, shared_data):
    path = shared_data / "lowbit_float_tables" / "encode_rne_sat_vectors.json"
    vectors = json.loads(path.read_text())["vectors"][element.name]
    assert element.encode(from_bits(vectors["f32_bits"])).tolist() == vectors["codes"]


def test_mx_exponents_are_not_a_cast_to_e8m0(shared_data):
    cast = json.loads((shared_data / "lowbit_float_tables" / "e8m0_mldtypes_cast.json").read_text())
    amax = from_bits(cast["f32_bits"])
    scale = grids.decode_e8m0(grids.mx_exponent(amax, "floor"))
    inside = (amax >= 2.0**-124) & amax.isfinite()  # below, the code saturates at 0
    assert int(inside.sum()) > 900
    # floor never exceeds amax / 4 and is within a factor of two below it; a nearest cast of amax / 4 would exceed it
    assert bool((scale * 4 <= amax)[inside].all()) and bool((scale * 8 > amax)[inside].all())
    nearest = grids.decode_e8m0(torch.tensor(cast["codes"], dtype=torch.uint8))
    assert bool((nearest > amax)[inside].any())


@pytest.mark.parametrize("element", ELEMENTS, ids=lambda e: e.name)
def test_encoding_returns_the_code_of_every_value_on_the_grid(element):
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    finite = element.decode(codes).isfinite()
    assert torch.equal(element.encode(element.decode(codes))[finite], codes[finite])


def test_ties_go_to_the_even_code_and_overflow_saturates():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.1, 1e30, torch.inf])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0])
    assert torch.equal(E2M1.decode(E2M1.encode(ties)), expected)
    assert torch.equal(grids.round_e2m1_(ties.clone()), expected)
    assert torch.equal(grids.round_e2m1_(-ties), -expected)
    away_from_zero = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert not torch.equal(grids.round_e2m1_(ties[:7].clone()), away_from_zero)


def test_the_fast_e2m1_path_agrees_with_the_general_one():
    x = torch.linspace(-8, 8, 100_003).mul(torch.rand(100_003, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(grids.round_e2m1_(x.clone()), E2M1.decode(E2M1.encode(x)))
    assert torch.equal(grids.encode_e2m1_(x.clone()), E2M1.encode(x))
    assert grids.encode_e2m1_(torch.tensor([-0.0, 0.0, -0.1])).tolist() == [0, 0, 8]


def test_nan_is_refused_where_there_is_no_code_for_it():
    nan = torch.tensor([1.0, torch.nan])
    assert E4M3.encode(nan).tolist() == [56, 127]
    for element in (E2M1, E2M3, E3M2):
        with pytest.raises(CompressError, match="no code for NaN"):
            element.encode(nan)


def test_nibbles_round_trip_with_the_even_column_low():
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 1)
    packed = grids.pack_nibbles(codes)
    assert packed[0, :2].tolist() == [0x10, 0x32]
    assert torch.equal(grids.unpack_nibbles(packed), codes)


@pytest.mark.parametrize(
    ("amax", "floor", "round_up", "ceil"),
    [(4.0, 0, 0, 0), (6.0, 0, 0, 0), (6.9, 0, 0, 1), (7.0, 0, 1, 1), (7.99, 0, 1, 1), (8.0, 1, 1, 1), (12.01, 1, 1, 2)],
)
def test_exponent_rules_differ_only_above_the_largest_element(amax, floor, round_up, ceil):
    got = [int(grids.mx_exponent(torch.tensor([amax]), rule)) - 127 for rule in grids.EXPONENT_RULES]
    assert got == [floor, round_up, ceil]


def test_exponents_stay_inside_e8m0():
    extremes = torch.tensor([0.0, 1e-45, 1e-38, torch.finfo(torch.float32).max])
    for rule in grids.EXPONENT_RULES:
        codes = grids.mx_exponent(extremes, rule)
        assert codes.tolist()[:2] == [0, 0] and int(codes.max()) < 255
    with pytest.raises(UsageError, match="'nearest' is not one of floor, round, ceil"):
        grids.mx_exponent(extremes, "nearest")
