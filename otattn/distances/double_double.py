"""Matrices as unevaluated sums of two float64 arrays: about 32 digits, vectorised over leading axes.

Only what the distance of covariances needs: products, differences, and a factor ``S = F F^T``. Error-free
sums and products after Knuth, Dekker and Veltkamp; see Higham (2002), Accuracy and Stability of Numerical
Algorithms, chapter 4, and Hida, Li and Bailey (2001).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otattn._linalg import Array

__all__ = ["DoubleDouble", "add", "matmul", "pivoted_factor", "transpose", "two_product", "two_sum"]

_SPLITTER = 134217729.0  # 2^27 + 1
DIGITS = 108  # bits kept of each factor of a product


class DoubleDouble(NamedTuple):
    """``high + low`` with ``low`` below half a unit in the last place of ``high``."""

    high: Array
    low: Array

    def __neg__(self) -> DoubleDouble:
        return DoubleDouble(-self.high, -self.low)

    @classmethod
    def exact(cls, values: Array) -> DoubleDouble:
        """Floats as they are."""
        return cls(values, np.zeros_like(values))


def two_sum(a: Any, b: Any) -> DoubleDouble:
    """``a + b`` as a rounded sum and its exact rest (Knuth)."""
    s = np.asarray(a + b)
    t = s - a
    return DoubleDouble(s, np.asarray((a - (s - t)) + (b - t)))


def two_product(a: Any, b: Any) -> DoubleDouble:
    """``a b`` as a rounded product and its rest, exact unless it underflows (Dekker, Veltkamp)."""
    p = np.asarray(a * b)
    ta, tb = _SPLITTER * a, _SPLITTER * b
    ah, bh = ta - (ta - a), tb - (tb - b)
    al, bl = a - ah, b - bh
    return DoubleDouble(p, np.asarray(((ah * bh - p) + ah * bl + al * bh) + al * bl))


def add(a: DoubleDouble, b: DoubleDouble) -> DoubleDouble:
    """``a + b``, entry by entry."""
    s, e = two_sum(a.high, b.high)
    return two_sum(s, e + (a.low + b.low))


def multiply(a: DoubleDouble, b: DoubleDouble) -> DoubleDouble:
    """``a * b``, entry by entry, broadcast."""
    p, e = two_product(a.high, b.high)
    return two_sum(p, e + (a.high * b.low + a.low * b.high))


def divide(a: DoubleDouble, b: DoubleDouble) -> DoubleDouble:
    """``a / b``, entry by entry, broadcast."""
    q = a.high / b.high
    r = add(a, -multiply(DoubleDouble.exact(q), b))
    return two_sum(q, (r.high + r.low) / b.high)


def transpose(a: DoubleDouble) -> DoubleDouble:
    """The last two axes swapped."""
    return DoubleDouble(np.swapaxes(a.high, -1, -2), np.swapaxes(a.low, -1, -2))


def matmul(a: DoubleDouble, b: DoubleDouble) -> DoubleDouble:
    """Matrix product over the last two axes, with an absolute error near 1e-32 of the largest row times
    column.

    Both factors are cut into slices of so few bits that float64 products of slices, and their sums, are exact
    (Ozaki, Ogita, Oishi and Rump 2012): one product of the usual kind for each order of magnitude of the
    result.
    """
    k = a.high.shape[-1]
    bits = int(53 - np.ceil(np.log2(8 * k))) // 2
    parts = -(-DIGITS // bits)
    left = _slices(a, -1, bits, parts)
    right = _slices(b, -2, bits, parts)
    total: DoubleDouble | None = None
    for level in range(parts - 1, -1, -1):  # the smallest first
        term = np.concatenate(left[: level + 1], axis=-1) @ np.concatenate(right[level::-1], axis=-2)
        total = DoubleDouble.exact(term) if total is None else _plus(total, term)
    assert total is not None
    return total


def _plus(a: DoubleDouble, b: Array) -> DoubleDouble:
    s, e = two_sum(b, a.high)
    return two_sum(s, e + a.low)


def _slices(a: DoubleDouble, axis: int, bits: int, parts: int) -> list[Array]:
    """Pieces of at most ``bits`` bits on common grids along ``axis``, whose sum is ``a`` to ``bits * parts``
    bits.
    """
    top = np.abs(a.high).max(axis=axis, keepdims=True)
    grid = np.ldexp(1.0, np.frexp(top)[1])
    rest, pieces = a.high, []
    for k in range(parts):
        grid = grid * 2.0**-bits
        magnet = 1.5 * 2.0**52 * grid  # adding and taking it away rounds to a multiple of the grid
        piece = (rest + magnet) - magnet
        rest = rest - piece
        if k == 2:  # what is left of the high part has joined the scale of the low part
            rest = rest + a.low
        pieces.append(piece)
    return pieces


def pivoted_factor(S: Array, tol: float) -> DoubleDouble:
    """``F (N, d, d)`` with ``F F^T = S`` for PSD matrices ``S (N, d, d)``, by Cholesky with diagonal
    pivoting.

    The pivots are taken relative to the diagonal of ``S``, so that a small variance beside a large one is
    kept; a remainder whose relative pivots are below ``tol`` is rounding (or negative) and is dropped.
    Columns that are not needed are 0: their number is the defect of the rank.
    """
    count, d, _ = S.shape
    rest = DoubleDouble.exact(S.copy())
    F = DoubleDouble.exact(np.zeros_like(S))
    diagonal = np.maximum(np.diagonal(S, axis1=1, axis2=2), 0.0)
    size = np.where(diagonal > 0.0, diagonal, 1.0)
    at = np.arange(count)
    for k in range(d):
        relative = np.diagonal(rest.high, axis1=1, axis2=2) / size
        pivot = relative.argmax(axis=1)
        active = relative[at, pivot] > tol
        if not active.any():
            break
        top = DoubleDouble(*(np.where(active, part[at, pivot, pivot], 1.0 - j) for j, part in enumerate(rest)))
        root = _sqrt(top)
        column = DoubleDouble(*(np.where(active[:, None], part[at, :, pivot], 0.0) for part in rest))
        column = divide(column, DoubleDouble(root.high[:, None], root.low[:, None]))
        F.high[:, :, k], F.low[:, :, k] = column
        outer = multiply(
            DoubleDouble(column.high[:, :, None], column.low[:, :, None]),
            DoubleDouble(column.high[:, None, :], column.low[:, None, :]),
        )
        rest = add(rest, -outer)
        for part in rest:  # the eliminated variable is gone exactly
            part[at[active], pivot[active], :] = 0.0
            part[at[active], :, pivot[active]] = 0.0
    return F


def _sqrt(a: DoubleDouble) -> DoubleDouble:
    s = np.sqrt(a.high)
    square = two_product(s, s)
    r = add(a, -square)
    return two_sum(s, (r.high + r.low) / (2.0 * s))
