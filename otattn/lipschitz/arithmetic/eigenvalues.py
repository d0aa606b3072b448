r"""Largest eigenvalues of symmetric matrices of intervals, proved by a factorisation in float64 that nobody has to trust.

Let M be a float matrix and c a float. Any lower triangular L of floats, wherever it comes from, gives
``c I - M = L L^T + E``, hence ``lambda_max(M) <= c + ||E||``. L comes from LAPACK; E is computed, and its error counted: with k
summands, in any order and with or without fused operations, ``|fl(L L^T) - L L^T| <= k eps |L| |L|^T`` entry by entry (as for
the products of :mod:`~otattn.lipschitz.arithmetic._interval_kernels`), and the norm of this symmetric non-negative matrix is at
most its largest row sum, ``|L| (|L|^T 1)``. A matrix S within ``spread`` of M in Frobenius norm has its largest eigenvalue
within ``spread`` of that of M.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.linalg import LinAlgError, cholesky

from otattn._linalg import EPS, Array, norm_upper
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.intervals import Interval

__all__ = ["Symmetric", "largest_eigenvalue", "proves_bound"]

_BLOCK = 512
_LADDER = (1.0, 8.0, 64.0, 4096.0)
"""Multiples of the usual backward error that are tried as the margin of an eigenvalue."""
_SUMS = 1.0 + 1e-6
"""Covers the rounding of sums of squares of up to ``2^28`` floats."""
_LOST = 1e-150
"""Norm of what underflows in matrices with entries of at most about one."""


class Symmetric:
    """A large symmetric matrix: floats of which the lower triangle is read, and a Frobenius norm of what they are off."""

    def __init__(self, k: int) -> None:
        self.mid: Array = np.zeros((k, k))
        self.spread = 0.0
        """Upper bound of the norm of the difference from the exact matrix."""

    def put(self, rows: slice, columns: slice, block: Interval) -> None:
        """A block of the lower triangle."""
        mid, rad = _centred(block)
        self.mid[rows, columns] = mid
        self.spread = math.hypot(self.spread, 1.5 * float(norm_upper(rad))) * (1.0 + 4.0 * EPS)

    def largest_at_most(self, bound: float) -> bool:
        """Whether the largest eigenvalue is proved to be at most ``bound``."""
        if not self.mid.any() and self.spread == 0.0:
            return bound >= 0.0
        return proves_bound(self.mid, self.spread, bound)


def _centred(S: Interval) -> tuple[Array, Array]:
    mid = 0.5 * S.lo + 0.5 * S.hi
    return mid, np.maximum(mid - S.lo, S.hi - mid) * (1.0 + 4.0 * EPS)


def largest_eigenvalue(S: Any) -> float:
    """An upper bound of the largest eigenvalue of a symmetric matrix of intervals, above it by rounding only.

    Meant for matrices that are positive semidefinite, or have no negative entry.
    """
    mid, rad = _centred(S)
    mid, rad = 0.5 * (mid + mid.T), np.maximum(rad, rad.T) + EPS * np.abs(mid - mid.T)
    if not (mid.any() or rad.any()):
        return 0.0
    if not (np.isfinite(mid).all() and np.isfinite(rad).all()):
        return math.inf
    spread = float(norm_upper(rad))
    w = np.linalg.eigvalsh(mid)
    size = float(np.abs(w).max())
    for factor in _LADDER:
        bound = float(w[-1]) + factor * (4.0 * (len(w) + 8) * EPS * size + 1.5 * spread)
        if proves_bound(mid, spread, bound):
            return bound
    raise CertificateError(
        f"the largest eigenvalue {w[-1]:.17g} of a matrix of size {len(w)} could not be confirmed; please report it."
    )


def proves_bound(M: Array, spread: float, bound: float) -> bool:
    """Whether every symmetric matrix within ``spread`` of M (its lower triangle) has no eigenvalue above ``bound``, proved."""
    if not (0.0 < bound < math.inf and spread < bound and float(np.abs(M).max()) < 1e6 * bound):
        return False
    power = math.frexp(bound)[1]
    M, limit = np.ldexp(M, -power), math.ldexp(bound, -power)
    room = math.ldexp(spread, -power) * (1.0 + EPS) + _LOST
    k = len(M)
    diagonal = np.diag(M).copy()
    for factor in (1.0, 8.0, 64.0):
        c = limit - 1.25 * room - factor * (k + 8) * EPS
        N = -M
        N[np.diag_indices(k)] = c - diagonal
        try:
            # the transpose is in Fortran's order, whose upper triangle is the lower one of N
            L = np.asarray(cholesky(N.T, lower=False, overwrite_a=True, check_finite=False)).T
        except LinAlgError:
            return False
        if math.fsum((c, room, _residual(M, c, L))) * (1.0 + 2.0 * EPS) <= limit:
            return True
    return False


def _residual(M: Array, c: float, L: Array) -> float:
    """An upper bound of ``||c I - M - L L^T||``, the lower triangles of M and L given and the upper one of L zero."""
    k = len(M)
    square = 0.0
    for a in range(0, k, _BLOCK):
        b = min(a + _BLOCK, k)
        E = L[a:b, :b] @ L[:b, :b].T
        here = np.arange(b - a)
        E[here, a + here] -= c
        E += M[a:b, :b]
        E[:, a:] = np.tril(E[:, a:])
        square += 2.0 * float(np.square(E).sum())
    sizes = np.abs(L)
    rows = sizes @ sizes.sum(axis=0)
    # the two subtractions: eps of the result of each
    near = 2.0 * EPS * (abs(c) + float(rows.max())) + math.sqrt(square) * EPS
    return (math.sqrt(square) + (k + 4) * EPS * float(rows.max()) * (1.0 + 4.0 * k * EPS) + near) * _SUMS + _LOST
