"""Orthogonal matrices of Hadamard type for any size.

A Hadamard matrix of order n has entries ±1 and H·Hᵀ = n·I; each output of a rotation by it then holds every input with
the same weight, which is what spreads outliers (QuaRot, Ashkboos et al., arXiv 2404.00456, section 3). Orders come from
Sylvester (powers of two), Paley's two constructions over the field of q elements (q + 1 for q ≡ 3 mod 4, 2·(q + 1) for
q ≡ 1 mod 4; Paley, J. Math. Phys. 12, 1933) and Kronecker products. Sizes that none of them reaches get the Kronecker
product of the largest Hadamard block that divides with a random orthogonal matrix: as dense, only less even.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from compressor.errors import UsageError

_MAX_DEGREE = 3  # fields up to p³: a polynomial of degree 2 or 3 is irreducible where it has no root
_CHUNK = 1 << 22  # elements rotated at a time, so that the float64 copies stay small


@dataclass(frozen=True)
class Factor:
    """One factor of a Kronecker product. kind: "Sylvester", "Paley I", "Paley II" or "random"; size: its order."""

    kind: str
    size: int

    def __str__(self) -> str:
        return f"{self.kind} {self.size}"


def factors(size: int) -> tuple[Factor, ...] | None:
    """The factors whose Kronecker product is a Hadamard matrix of order `size`; None where we know none."""
    if size == 1 or size & (size - 1) == 0:
        return (Factor("Sylvester", size),)
    if size % 4:
        return None
    outer = size & -size
    while outer >= 1:  # the largest power of two first: it is applied without a matrix
        kind = _paley_kind(size // outer)
        if kind:
            return ((Factor("Sylvester", outer),) if outer > 1 else ()) + (Factor(kind, size // outer),)
        outer //= 2
    for first in range(12, math.isqrt(size) + 1, 4):
        if size % first == 0 and _paley_kind(first):
            rest = factors(size // first)
            if rest is not None:
                return (*rest, Factor(_paley_kind(first) or "", first))
    return None


def largest_block(size: int) -> int:
    """The largest divisor of `size` that is the order of a Hadamard matrix we can build: 12 of 12, 4 of 172, 1 of 341.
    A block-diagonal rotation of an activation is made of such blocks."""
    return max(d for d in range(1, size + 1) if size % d == 0 and factors(d) is not None)


def _paley_kind(order: int) -> str | None:
    if order % 4 == 0 and _prime_power(order - 1):
        return "Paley I"
    if order % 4 == 0 and order // 2 % 4 == 2 and _prime_power(order // 2 - 1):
        return "Paley II"
    return None


@lru_cache
def _prime_power(q: int) -> tuple[int, int] | None:
    """(p, k) with q = pᵏ, p an odd prime and k at most 3; None otherwise."""
    if q < 3:
        return None
    p = next((d for d in range(2, math.isqrt(q) + 1) if q % d == 0), q)
    degree = round(math.log(q, p))
    return (p, degree) if p > 2 and p**degree == q and degree <= _MAX_DEGREE else None


def _elements(p: int, degree: int) -> Tensor:
    """The field's elements as polynomials: int64 [pᵏ, k], lowest coefficient first; row i is i in base p."""
    index = torch.arange(p**degree)
    return torch.stack([index // p**k % p for k in range(degree)], 1)


def _squares(p: int, degree: int) -> Tensor:
    """bool [pᵏ]: which elements of the field are squares of an element other than zero."""
    elements = _elements(p, degree)
    product = torch.zeros(p**degree, 2 * degree - 1, dtype=torch.int64)
    for i in range(degree):
        for j in range(degree):
            product[:, i + j] += elements[:, i] * elements[:, j]
    modulus = _irreducible(p, degree)
    for top in range(2 * degree - 2, degree - 1, -1):  # x^top = −(lower coefficients) · x^(top − degree)
        product[:, top - degree : top] -= product[:, top : top + 1] * modulus
    index = (product[:, :degree] % p * torch.tensor([p**k for k in range(degree)])).sum(1)
    found = torch.zeros(p**degree, dtype=torch.bool)
    found[index[1:]] = True
    return found


def _irreducible(p: int, degree: int) -> Tensor:
    """int64 [k]: the lower coefficients of a monic polynomial of this degree without a root modulo p."""
    if degree == 1:
        return torch.zeros(1, dtype=torch.int64)  # the field is the integers modulo p: nothing is reduced
    x = torch.arange(p)
    for candidate in _elements(p, degree):
        value = x**degree + sum(int(c) * x**k for k, c in enumerate(candidate))
        if not bool((value % p == 0).any()):
            return candidate
    raise AssertionError(f"no irreducible polynomial of degree {degree} modulo {p}")


def _jacobsthal(q: int) -> Tensor:
    """float64 [q, q]: χ(a − b), the quadratic character of the difference of two field elements."""
    found = _prime_power(q)
    assert found is not None
    p, degree = found
    elements = _elements(p, degree)
    weights = torch.tensor([p**k for k in range(degree)])
    difference = ((elements[:, None] - elements[None]) % p * weights).sum(2)
    character = _squares(p, degree).double() * 2 - 1
    character[0] = 0
    return character[difference]


def _paley(kind: str, order: int) -> Tensor:
    """float64 [order, order] of entries ±1."""
    q = order - 1 if kind == "Paley I" else order // 2 - 1
    core = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    core[0, 1:] = 1
    core[1:, 0] = -1 if kind == "Paley I" else 1
    core[1:, 1:] = _jacobsthal(q)
    identity = torch.eye(q + 1, dtype=torch.float64)
    if kind == "Paley I":
        return identity + core
    plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    return torch.kron(core, plus) + torch.kron(identity, minus)


def sylvester(x: Tensor) -> Tensor:
    """x [..., n] · H / √n for the Sylvester matrix H of n = 2ᵏ, which is symmetric; n·log n operations, in x's dtype.

    Raises UsageError where n is no power of two.
    """
    n = x.shape[-1]
    if n & (n - 1):
        raise UsageError(f"a fast Hadamard transform needs a power of two, not {n}")
    shape, step = x.shape, 1
    while step < n:
        pairs = x.reshape(*shape[:-1], n // (2 * step), 2, step)
        low, high = pairs.unbind(-2)
        x = torch.stack([low + high, low - high], -2).reshape(shape)
        step *= 2
    return x / math.sqrt(n)


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix Q [size, size] = diag(signs) · (F₁ ⊗ F₂ ⊗ …), kept as its factors and applied through them.

    signs: float64 [size] of ±1. construction: what was built, in words. dense: the orthogonal float64 matrix of each
    factor, None for a Sylvester one.
    """

    size: int
    signs: Tensor
    parts: tuple[Factor, ...]
    dense: tuple[Tensor | None, ...]

    @property
    def construction(self) -> str:
        return "random signs × " + " ⊗ ".join(map(str, self.parts))

    def right(self, x: Tensor) -> Tensor:
        """x · Q along the last dimension, which has `size` elements (or a multiple: each piece is rotated by itself, as
        by a block-diagonal Q). Computed in float64, returned in x's dtype."""
        return self._by_rows(x, inverse=False)

    def inverse(self, x: Tensor) -> Tensor:
        """x · Qᵀ, otherwise as `right`."""
        return self._by_rows(x, inverse=True)

    def matrix(self) -> Tensor:
        """Q, float64 [size, size]."""
        return self.right(torch.eye(self.size, dtype=torch.float64))

    def _by_rows(self, x: Tensor, inverse: bool) -> Tensor:
        if x.shape[-1] % self.size:
            raise UsageError(f"a rotation of {self.size} does not divide {x.shape[-1]} elements")
        rows = x.reshape(-1, self.size)
        result = torch.empty_like(rows)
        step = max(1, _CHUNK // self.size)
        for first in range(0, len(rows), step):
            result[first : first + step] = self._apply(rows[first : first + step].double(), inverse).to(x.dtype)
        return result.view(x.shape)

    def _apply(self, rows: Tensor, inverse: bool) -> Tensor:
        if not inverse:
            rows = rows * self.signs
        x = rows.view(len(rows), *(part.size for part in self.parts))
        for axis, dense in enumerate(self.dense, start=1):
            moved = x.movedim(axis, -1)
            moved = sylvester(moved) if dense is None else moved @ (dense.T if inverse else dense)
            x = moved.movedim(-1, axis)
        flat = x.reshape(len(rows), self.size)
        return flat * self.signs if inverse else flat


def rotation(size: int, seed: int) -> Rotation:
    """A rotation of `size` elements with signs (and what else is random in it) drawn from `seed`.

    Where no Hadamard matrix of this order can be built, the largest block that divides is multiplied (Kronecker) with a
    random orthogonal matrix of the rest, which is all there is for odd sizes; `construction` says so.
    Raises UsageError for a size that is not positive.
    """
    if size < 1:
        raise UsageError(f"a rotation needs at least 1 element, not {size}")
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    parts = factors(size)
    if parts is None:
        block = largest_block(size)
        known = factors(block) if block > 1 else ()
        parts = (*(known or ()), Factor("random", size // block))
    dense = tuple(_dense(part, generator) for part in parts)
    return Rotation(size, signs, parts, dense)


def _dense(part: Factor, generator: torch.Generator) -> Tensor | None:
    if part.kind == "Sylvester":
        return None
    if part.kind == "random":
        q, r = torch.linalg.qr(torch.randn(part.size, part.size, dtype=torch.float64, generator=generator))
        return q * r.diagonal().sign()  # the signs make it uniform over all rotations (Mezzadri, math-ph/0609050)
    return _paley(part.kind, part.size) / math.sqrt(part.size)


def hadamard(size: int) -> Tensor | None:
    """float64 [size, size] of entries ±1 with H·Hᵀ = size·I; None for an order that we cannot build."""
    parts = factors(size)
    if parts is None:
        return None
    matrices = [
        (sylvester(torch.eye(part.size, dtype=torch.float64)) * math.sqrt(part.size)).round()
        if part.kind == "Sylvester"
        else _paley(part.kind, part.size)
        for part in parts
    ]
    return reduce(torch.kron, matrices)
