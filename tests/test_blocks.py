"""Input statistics of a block: Hessians by panels, cross terms of the two streams."""

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
    entry.finish()
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
        blocks.collect(
            block, GROUPS, hidden(1), block, hessians=True, reference=(block(x) for x in exact)
        )
