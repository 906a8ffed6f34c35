"""The search of integer grids: comparing all candidates at once chooses what one after another would."""

import pytest
import torch

from compressor.formats import search

BOUNDS = (-8, 7)


def groups():
    """float32 [12, 4, 32], with groups of zeros, of one value, on a grid (where candidates tie) and near overflow."""
    x = torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(0))
    x[0], x[1], x[2], x[3] = 0, 1, x[2].sign(), (3 * x[3]).round().clamp_(*BOUNDS)
    x[4], x[5], x[6, :, ::2] = x[4] * 1e37, x[5] * 1e-37, 0
    return x


def standard(x, symmetric):
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    step = torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15
    step = torch.where(step == 0, 1e-3, step)
    return step, None if symmetric else (BOUNDS[0] - low / step).clamp_(*BOUNDS).round_()


def one_after_another(x, h, grid, ratios):
    step, zero = grid
    explained = torch.zeros_like(step)
    for candidate in search._candidates(x, grid, BOUNDS, ratios):
        cross, energy = search._moments(x, h, search._levels(x, candidate, BOUNDS))
        gain = cross.square() / energy.clamp(min=torch.finfo(torch.float32).tiny)
        better = (gain > explained) & (cross * candidate[0] > 0)
        explained = torch.where(better, gain, explained)
        step = torch.where(better, cross / energy, step)
        zero = None if zero is None else torch.where(better, candidate[1], zero)
    return step, zero


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("symmetric", "ratios"),
    [(True, search.SIGNED_RATIOS), (True, search.INTEGER_RATIOS), (False, search.INTEGER_RATIOS)],
)
def test_comparing_all_candidates_at_once_chooses_what_one_after_another_would(symmetric, ratios, weighted):
    x = groups()
    h = torch.rand(4, 32, generator=torch.Generator().manual_seed(1)).pow(4) if weighted else None
    if h is not None:
        h[1] = 0
    grid = standard(x, symmetric)
    found = search._fit_codes(x, h, grid, BOUNDS, ratios)
    expected = one_after_another(x, h, grid, ratios)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    other = search._fit_codes(x, h, grid, BOUNDS, ratios[5:])
    assert not torch.equal(found[0], other[0])  # negative control: every candidate has its say
    assert torch.equal(found[0][0], grid[0][0])  # a group of zeros keeps the standard scale
