"""Hadamard matrices of every order that is promised, and rotations of every size."""

import pytest
import torch

from compressor.errors import UsageError
from compressor.transform import hadamard as h

ORDERS = (1, 2, 4, 12, 20, 28, 36, 44, 52, 60, 76, 96, 100, 128, 144, 244, 344, 576, 1152, 1536)


@pytest.mark.parametrize("size", ORDERS)
def test_a_hadamard_matrix_has_entries_of_one_size_and_orthogonal_rows(size):
    matrix = h.hadamard(size)
    assert set(matrix.unique().tolist()) <= {-1.0, 1.0}
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, 6, 92, 172, 341])
def test_orders_without_a_construction_are_told(size):
    """92 and 172 do exist, by constructions that are not built here."""
    assert h.hadamard(size) is None


@pytest.mark.parametrize(
    ("size", "construction"),
    [
        (64, "Sylvester 64"),
        (128, "Sylvester 128"),
        (576, "Sylvester 16 ⊗ Paley II 36"),
        (1536, "Sylvester 128 ⊗ Paley I 12"),
        (3584, "Sylvester 128 ⊗ Paley I 28"),
        (172, "Sylvester 4 ⊗ random 43"),
        (341, "random 341"),
        (184, "Sylvester 8 ⊗ random 23"),
    ],
)
def test_a_rotation_is_orthogonal_and_says_how_it_was_made(size, construction):
    rotation = h.rotation(size, seed=1)
    assert rotation.construction == f"random signs × {construction}"
    q = rotation.matrix()
    error = (q @ q.T - torch.eye(size, dtype=torch.float64)).abs().max()
    assert error < 1e-12
    if "random " not in construction:
        torch.testing.assert_close(q.abs(), torch.full_like(q, size**-0.5))
    assert not torch.allclose(q, q.T), "the signs must make Q differ from its transpose, or a mistaken one goes unseen"


@pytest.mark.parametrize("size", [8, 36, 172, 341])
def test_applying_the_factors_is_multiplying_by_the_matrix(size):
    rotation = h.rotation(size, seed=2)
    x = torch.randn(3, 5, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(rotation.right(x), x @ rotation.matrix())
    torch.testing.assert_close(rotation.inverse(x), x @ rotation.matrix().T)
    torch.testing.assert_close(rotation.inverse(rotation.right(x)), x)


def test_a_longer_row_is_rotated_piece_by_piece():
    rotation = h.rotation(12, seed=0)
    x = torch.randn(2, 36, dtype=torch.float64)
    torch.testing.assert_close(rotation.right(x), x @ torch.block_diag(*[rotation.matrix()] * 3))
    with pytest.raises(UsageError, match="a rotation of 12 does not divide 30 elements"):
        rotation.right(x[:, :30])


def test_rows_are_taken_in_pieces_without_a_difference(monkeypatch):
    # multiples of 6 come out as whole numbers, which rounding to float32 finds whatever the order of the sums; the
    # large first ones keep them from 0, beside which an error of 1e-16 would not round away
    rotation, x = h.rotation(36, seed=0), 6.0 * torch.randint(-9, 10, (50, 36))
    x[:, 0] = 6.0 * 1000
    whole = rotation.right(x)
    monkeypatch.setattr(h, "_CHUNK", 100)
    assert torch.equal(rotation.right(x), whole)
    assert not torch.equal(rotation.right(x.roll(1, 0)), whole)  # negative control
    assert whole.dtype == torch.float32


def test_the_seed_decides():
    assert torch.equal(h.rotation(172, 5).matrix(), h.rotation(172, 5).matrix())
    assert not torch.equal(h.rotation(172, 5).matrix(), h.rotation(172, 6).matrix())
    assert not torch.equal(h.rotation(64, 5).matrix(), h.rotation(64, 6).matrix())


@pytest.mark.parametrize(("size", "block"), [(172, 4), (341, 1), (576, 576), (1376, 1376), (22, 2)])
def test_the_largest_block_of_a_block_diagonal_rotation(size, block):
    assert h.largest_block(size) == block


def test_the_fast_transform_is_the_matrix_and_needs_a_power_of_two():
    x = torch.randn(3, 32, dtype=torch.float64)
    torch.testing.assert_close(h.sylvester(x), x @ h.hadamard(32) / 32**0.5)
    with pytest.raises(UsageError, match="a power of two, not 12"):
        h.sylvester(torch.ones(12))
