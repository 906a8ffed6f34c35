"""Input statistics of a block: Hessians by panels or their diagonals, cross terms of the two streams."""

import pytest
import torch

from compressor import blocks, formats
from compressor.errors import CompressError

SCHEME = formats.scheme("mxfp4", "4bit")
GROUPS = tuple(blocks.SelectedGroup((name,), scheme=SCHEME) for name in ("first", "second"))


class Block(torch.nn.Module):
    """Two linears in a row."""

    def __init__(self, size: int = 48):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (torch.nn.Linear(size, size, bias=False) for _ in range(2))
        self.requires_grad_(False)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def hidden(seed: int, size: int = 48) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 16, size, generator=g) for rows in (4, 4, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("panel", [7, 16, 1000])
def test_a_hessian_by_panels_is_the_whole_product(monkeypatch, panel, dtype):
    monkeypatch.setattr(blocks, "_PANEL", panel)
    entry = blocks.InputStatistics(torch.zeros(48, 48), 0.0)
    batches = [x.to(dtype) for x in hidden(1)]
    for x in batches:
        entry.add(x)
    rows = torch.cat(batches).double().flatten(0, 1)
    expected = (rows.T @ rows / len(rows)).float()
    half = entry.hessian / entry.tokens
    assert torch.allclose(half, expected, atol=1e-4) == (panel > 48)  # negative control: before `finish`
    entry.finish("input")
    assert torch.allclose(entry.hessian, expected, atol=1e-4)
    assert torch.equal(entry.hessian, entry.hessian.T)
    assert entry.amax == float(rows.abs().max()) and entry.tokens == len(rows)


def test_cross_terms_pair_each_input_with_that_of_the_full_precision_model():
    block, seen, exact = Block(), hidden(1), hidden(2)
    moved = []

    def reference():
        for x in exact:
            moved.append(block(x))
            yield x

    found = blocks.collect(block, GROUPS, seen, block, hessians=True, reference=reference())
    plain = blocks.collect(block, GROUPS, seen, block, hessians=True)
    assert len(moved) == len(exact)  # all of the block ran, although collecting stops at the last input
    for group, inner in zip(GROUPS, (lambda x: x, lambda x: torch.relu(block.first(x))), strict=True):
        x, wanted = (torch.cat([inner(part) for part in parts]).flatten(0, 1).double() for parts in (seen, exact))
        entry = found[group]
        assert torch.allclose(entry.cross.double(), wanted.T @ x / len(x), atol=1e-4)
        assert not torch.allclose(entry.cross.double(), x.T @ wanted / len(x), atol=1e-2)  # negative control
        assert torch.equal(entry.hessian, plain[group].hessian) and entry.amax == plain[group].amax
        assert plain[group].cross is None


def test_a_reference_that_is_not_finite_is_refused_by_name():
    block, exact = Block(), hidden(2)
    exact[1][0, 0, 0] = torch.inf
    with pytest.raises(CompressError, match="first: calibration input is not finite"):
        blocks.collect(block, GROUPS, hidden(1), block, hessians=True, reference=(block(x) for x in exact))


def test_weights_of_tokens_follow_rows_and_groups():
    block, seen, exact = Block(), hidden(1), hidden(2)
    generator = torch.Generator().manual_seed(5)
    weights = {group: torch.rand(11, 16, generator=generator) for group in GROUPS}
    reference = (block(x) for x in exact)
    found = blocks.collect(block, GROUPS, seen, block, hessians=True, reference=reference, weights=weights)
    inputs = [torch.cat(seen), torch.cat([torch.relu(block.first(x)) for x in seen])]
    others = [torch.cat(exact), torch.cat([torch.relu(block.first(x)) for x in exact])]
    for group, x, other in zip(GROUPS, inputs, others, strict=True):
        w = weights[group][..., None]
        hessian = (x * w).flatten(0, 1).T @ x.flatten(0, 1) / (11 * 16)
        cross = (other * w).flatten(0, 1).T @ x.flatten(0, 1) / (11 * 16)
        assert torch.allclose(found[group].hessian, hessian, atol=1e-4)
        assert torch.allclose(found[group].cross, cross, atol=1e-4)
        swapped = weights[GROUPS[0] if group is GROUPS[1] else GROUPS[1]][..., None]  # negative control
        assert not torch.allclose(
            found[group].hessian, (x * swapped).flatten(0, 1).T @ x.flatten(0, 1) / 176, atol=1e-4
        )


@pytest.mark.parametrize("weighted", [False, True])
def test_a_diagonal_is_that_of_the_hessian(weighted):
    block, seen, weights = Block(), hidden(1), None
    if weighted:
        generator = torch.Generator().manual_seed(5)
        weights = {group: torch.rand(11, 16, generator=generator) for group in GROUPS}
    whole = blocks.collect(block, GROUPS, seen, block, hessians=True, weights=weights)
    found = blocks.collect(block, GROUPS, seen, block, hessians=False, diagonals=True, weights=weights)
    plain = blocks.collect(block, GROUPS, seen, block, hessians=False, diagonals=True)
    for group in GROUPS:
        assert found[group].hessian is None and whole[group].diagonal is None
        assert found[group].diagonal.dtype == torch.float32
        torch.testing.assert_close(found[group].diagonal, whole[group].hessian.diagonal())
        assert torch.equal(found[group].diagonal, plain[group].diagonal) != weighted  # negative control
        assert found[group].amax == whole[group].amax and found[group].tokens == whole[group].tokens


def test_a_diagonal_of_many_rows_in_bfloat16_loses_nothing():
    entry = blocks.InputStatistics.empty(3, hessian=False, diagonal=True, amax=False, cross=False, channels=False)
    for _ in range(300):
        entry.add(torch.tensor([[1.0078125, 3.0, 256.0]] * 64, dtype=torch.bfloat16))
    entry.finish("input")
    assert entry.diagonal.tolist() == [1.0078125**2, 9.0, 65536.0]


def test_inputs_that_are_not_finite_are_refused_where_the_diagonal_alone_is_gathered():
    block, seen = Block(), hidden(1)
    seen[1][0, 0, 0] = torch.nan
    with pytest.raises(CompressError, match="first: calibration input is not finite"):
        blocks.collect(block, GROUPS[:1], seen, block, hessians=False, diagonals=True)


def test_cross_terms_of_scaled_inputs_are_those_of_the_inputs_scaled():
    scales = torch.linspace(0.5, 4, 48)
    found = [blocks.InputStatistics(*(torch.zeros(48, 48), 0.0, torch.zeros(48, 48))) for _ in range(2)]
    for entry in found:
        entry.mean, entry.largest = torch.zeros(48), torch.zeros(48)
    x, other = hidden(1)[0], hidden(2)[0]
    found[0].add(x, other)
    found[1].add(x / scales, other / scales)
    for entry in found:
        entry.finish("input")
    found[0].divide(scales)
    for name in ("hessian", "cross", "amax"):
        torch.testing.assert_close(getattr(found[0], name), getattr(found[1], name), atol=1e-4, rtol=1e-5)
