"""What the packed kernel computes, held against float32: if a torch release changes it, this is where it shows."""

import pytest
import torch

from compressor.formats.grids import significant
from compressor.kernels import int4_cpu


def weight(out=48, groups=3, group=32, *, zero=False, seed=0):
    """Codes, bfloat16-exact steps and zero points of a random weight [out, groups·group]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (out, groups * group), generator=generator, dtype=torch.uint8)
    step = (torch.rand(out, groups, generator=generator) * 0.1 + 0.01).bfloat16().float()
    zeros = torch.randint(-8, 8, (out, groups), generator=generator).float() if zero else None
    return codes, step, zeros


def inputs(width, rows=5):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("group", int4_cpu.GROUP_SIZES)
@pytest.mark.parametrize("out", [16, 48, 96])
@pytest.mark.parametrize("rows", [1, 4, int4_cpu.DECODE_ROWS - 1])
def test_symmetric_weights_are_exact_up_to_the_rounding_of_outputs(group, out, rows):
    codes, step, _ = weight(out, 3, group)
    x = inputs(3 * group, rows)
    y = int4_cpu.linear(x, int4_cpu.pack(codes, step, None, group))
    expected = int4_cpu.reference(x, codes, step, None)
    assert y.dtype == torch.bfloat16
    # one rounding to bfloat16, at most half of 2^-7 of a value; cancelled sums leave float32 accumulation error
    torch.testing.assert_close(y.float(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("group", int4_cpu.GROUP_SIZES)
def test_many_rows_run_the_bfloat16_weight_exactly(group, zero):
    codes, step, zeros = weight(48, 3, group, zero=zero)
    eye = torch.eye(3 * group)
    dense = int4_cpu.reference(eye, codes, step, zeros).T.bfloat16()
    packed = int4_cpu.pack(codes, step, zeros, group)
    assert torch.equal(int4_cpu.decode(packed), dense)
    x = inputs(3 * group, int4_cpu.DECODE_ROWS)
    assert torch.equal(int4_cpu.linear(x, packed), torch.nn.functional.linear(x, dense))
    other = int4_cpu.pack(codes ^ 1, step, zeros, group)
    assert not torch.equal(int4_cpu.decode(other), dense)


@pytest.mark.parametrize("rows", [1, int4_cpu.DECODE_ROWS])
def test_a_negative_scale_negates_its_group_exactly(rows):
    codes, step, _ = weight(48, 1, 32)
    x = inputs(32, rows)
    y, negated = (int4_cpu.linear(x, int4_cpu.pack(codes, s, None, 32)) for s in (step, -step))
    assert torch.equal(negated, -y)
    codes, step, _ = weight(48, 3, 32)
    step = significant(step, 5)  # many rows run weights rounded to bfloat16: none is
    step[:, 1].neg_()
    packed, x = int4_cpu.pack(codes, step, None, 32), inputs(96, rows)
    expected = int4_cpu.reference(x, codes, step, None)
    torch.testing.assert_close(int4_cpu.linear(x, packed).float(), expected, rtol=2**-7, atol=1e-3)
    assert not torch.allclose(expected, int4_cpu.reference(x, codes, step.abs(), None), atol=0.1)


def test_zero_points_are_off_by_a_small_fraction_of_a_step():
    codes, step, zero = weight(zero=True)
    eye = torch.eye(96).bfloat16()
    packed = int4_cpu.pack(codes, step, zero, 32)
    got = torch.cat([int4_cpu.linear(row[None], packed) for row in eye]).float().T
    wanted = int4_cpu.reference(eye, codes, step, zero).T
    error = ((got - wanted).abs() - wanted.abs() * 2**-8).clamp_min(0) / step.repeat_interleave(32, 1)
    assert 0 < error.max() < 0.028


def test_leading_dimensions_are_kept():
    codes, step, _ = weight()
    packed = int4_cpu.pack(codes, step, None, 32)
    x = inputs(96, 6)
    torch.testing.assert_close(int4_cpu.linear(x.view(2, 3, 96), packed), int4_cpu.linear(x, packed).view(2, 3, 48))


@pytest.mark.parametrize("change", ["codes", "step", "neighbour"])
def test_a_wrong_layout_is_seen(change):
    codes, step, _ = weight()
    x = inputs(96)
    expected = int4_cpu.reference(x, codes, step, None)
    if change == "codes":
        codes = codes ^ 8  # signed instead of offset codes
    elif change == "step":
        step = step.roll(1, 1)  # scales of the next group
    else:
        codes = codes.view(48, 48, 2).flip(-1).reshape(48, 96)  # nibbles swapped
    y = int4_cpu.linear(x, int4_cpu.pack(codes, step, None, 32)).float()
    assert (y - expected).abs().max() > 0.1 * expected.abs().max()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, None),
        ({"out_features": 24}, "divisible by 16, not 24"),
        ({"group_size": 16}, "no groups of 16"),
        ({"dtype": torch.float32}, "runs in float32"),
        ({"step": torch.full((48, 3), 0.1)}, "not exact in bfloat16"),
    ],
)
def test_what_it_cannot_run_is_named(settings, says):
    arguments = {"out_features": 48, "group_size": 32, "step": weight()[1], "dtype": torch.bfloat16, **settings}
    reason = int4_cpu.obstacle(**arguments)
    assert reason is None if says is None else says in reason
