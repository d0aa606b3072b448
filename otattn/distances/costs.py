"""Ground distances, as exact as from explicit differences, costs at a scale where the powers that matter neither vanish nor
overflow, and the memory that they may take.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from otattn._linalg import EPS, Array, row_norms
from otattn.distances.bottleneck import bottleneck
from otattn.errors import MemoryBudgetError

__all__ = [
    "ASSIGNMENT_BYTES",
    "DECADES",
    "MAX_BYTES",
    "SIMPLEX_BYTES",
    "blas_units",
    "check_budget",
    "ground_cost",
    "pair_distances",
    "pairwise_distances",
    "power_mean",
    "powers",
    "relative_rounding",
    "scaled_cost",
]

#: Most bytes that an exact solver may allocate (4 GiB); larger problems are refused before anything is
#: allocated.
MAX_BYTES = 4 * 2**30

#: Bytes an entry of the cost matrix: the matrix and a working copy (assignment), the arcs of the network
#: simplex as well.
ASSIGNMENT_BYTES = 16
SIMPLEX_BYTES = 64

_SAFE = (1e-100, 1e150)  # distances whose squares neither overflow nor vanish
_BLOCK = 2**21  # coordinates of pairs handled at once
_WIDE, _MANY = 32, 2**12  # dimension and pairs from which a matrix product is faster than differences
_TILE = 2**15  # entries formed at once, so that they stay in the cache
_APART = 1.99  # just below 2, for the rounding of the two sides
_RARE = 16  # a distance from gathered differences costs so many from unrolled ones, or fewer


def check_budget(n: int, m: int, bytes_per_pair: int) -> None:
    """Refuse an exact problem between ``n`` and ``m`` atoms that would take more than `MAX_BYTES`.

    Raises
    ------
    MemoryBudgetError
        With the number of bytes and what to do instead.
    """
    need = n * m * bytes_per_pair
    if need > MAX_BYTES:
        raise MemoryBudgetError(
            f"exact transport between {n} and {m} atoms must fit in {MAX_BYTES} bytes, but would take about "
            f"{need} bytes ({need / 2**30:.1f} GiB); merge duplicate atoms, subsample both measures "
            "(several times, to see the spread), or compare one-dimensional "
            "projections, which are exact by sorting at any size."
        )


def pairwise_distances(x: Array, y: Array) -> Array:
    """``|x_i - y_j|`` for ``x (n, d)`` and ``y (m, d)``, shape ``(n, m)``; relative error at most ``(d + 3)
    eps``.

    Each pair has its own scale: a pair of far points costs the near ones no digits.

    Raises
    ------
    OverflowError
        A distance is not representable in float64.
    """
    D = _by_products(x, y)
    if D is None:
        D = np.asarray(cdist(x, y))
    least, most = _SAFE
    if least < D.min() and D.max() < most:
        return D
    _explicitly(D, ~((least < D) & (most > D)), x, y)
    if not np.isfinite(D).all():
        raise OverflowError("distances must fit in float64, received points that are too far apart; rescale them.")
    return D


def _explicitly(D: Array, where: NDArray[np.bool_], x: Array, y: Array) -> None:
    """Some distances from their differences."""
    i, j = np.nonzero(where)
    step = max(1, _BLOCK // x.shape[1])
    for k in range(0, len(i), step):
        part = i[k : k + step], j[k : k + step]
        D[part] = pair_distances(x[part[0]], y[part[1]])


def _by_products(x: Array, y: Array) -> Array | None:
    r"""Distances in many dimensions by one matrix product, ``|x|^2 + |y|^2 - 2 x \cdot y`` about a common centre.

    With ``N = |x|^2 + |y|^2`` the rounding of the terms is at most ``(2 d + 1) eps N / 2`` and that of the sums
    ``eps (N + D^2) / 2``; where ``N <= 2 D^2`` the root is good to ``(d + 5/4) eps``, and to ``(d + 9/4) eps`` with the
    rounding of the centred points. Pairs that are nearer are taken from their differences; None when these are many.
    """
    if x.shape[1] < _WIDE or len(x) * len(y) < _MANY:
        return None
    if not _SAFE[0] < max(float(np.abs(x).max()), float(np.abs(y).max())) < _SAFE[1]:
        return None
    centre = 0.5 * (x.mean(axis=0) + y.mean(axis=0))
    u, v = x - centre, y - centre
    size_u, size_v = np.einsum("ij,ij->i", u, u)[:, None], np.einsum("ij,ij->i", v, v)
    D, near = np.empty((len(x), len(y))), np.empty((len(x), len(y)), dtype=bool)
    v *= -2.0
    step = max(1, _TILE // len(y))
    for k in range(0, len(x), step):
        tile, sizes = np.matmul(u[k : k + step], v.T, out=D[k : k + step]), size_u[k : k + step] + size_v
        tile += sizes
        apart = sizes <= _APART * tile
        apart &= tile >= _SAFE[0] ** 2
        np.logical_not(apart, out=near[k : k + step])
        np.sqrt(np.abs(tile), out=tile)
    if np.count_nonzero(near) * _RARE > near.size:
        return None
    _explicitly(D, near, x, y)
    return D


def pair_distances(x: Array, y: Array) -> Array:
    """``|x_k - y_k|`` row by row, without over- or underflow of the squares; inf beyond float64."""
    with np.errstate(over="ignore"):
        return row_norms(x - y)


def powers(ratio: Array, p: float) -> Array:
    """``ratio ** p`` without the cost of ``pow`` for the usual orders."""
    if p == 1.0:
        return ratio
    if p not in (2.0, 3.0):
        return np.asarray(ratio**p)
    out = ratio * ratio
    return out if p == 2.0 else np.multiply(out, ratio, out=out)


def power_mean(distances: Array, mass: Array | None, p: float) -> float:
    """``(sum_k mass_k distances_k^p / sum_k mass_k)^{1/p}`` (the plain mean without ``mass``).

    Scaled by the largest distance first, so that p = 200 is fine.
    """
    scale = float(distances.max())
    if scale in (0.0, np.inf) or np.isinf(p):
        return scale
    terms = powers(distances / scale, p)
    total = float(terms.mean() if mass is None else (mass @ terms) / mass.sum())
    return float(scale * total ** (1.0 / p))


def relative_rounding(dim: int, p: float, terms: int) -> float:
    """Relative rounding of a value evaluated on a plan: distances, powers, a sum, and the root."""
    if np.isinf(p):
        return (dim + 4) * EPS
    # pairwise and BLAS sums of non-negative terms: the error grows with the logarithm, or a vector width, of
    # the count
    return (dim + 8 + (8.0 + math.log2(terms + 1.0) + min(terms, 64)) / p) * EPS


def blas_units(dim: int) -> float:
    """Units of rounding by which distances of two machines may differ: products are summed in an order of the BLAS."""
    return 2.0 * (dim + 3.0) if dim >= _WIDE else 0.0


CAP = 1e20  # at the scale W_inf an optimal plan costs at most 1: such an entry carries less than rounding
PLAIN = (1e-35, 1e15)  # distances whose powers stay in float64 without scaling, for p <= 8
DECADES = 150.0  # powers that span at most this many keep their digits at the scale of the largest


def ground_cost(D: Array, p: float, A: list[int], B: list[int]) -> tuple[Array, float]:
    """Costs and their scale, for finite ``p``; they may take the place of ``D``, since new memory costs more than a power.

    Capping and underflow only lower a cost, so dual bounds stay valid.
    """
    top = float(D.max())
    least = float(D.min()) or float(D.min(initial=top, where=D > 0.0))
    if top == 0.0 or (p <= 8.0 and PLAIN[0] < least and top < PLAIN[1]):
        step = max(1, _TILE // D.shape[1])
        for k in range(0, len(D), step):
            D[k : k + step] = powers(D[k : k + step], p)
        return D, 1.0
    # distances so unequal that their powers leave float64: the scale that matters is then W_inf
    scale = top if p * float(np.log10(top / least)) <= DECADES else bottleneck(D, A, B).value or top
    return scaled_cost(D, p, scale), scale


def scaled_cost(D: Array, p: float, scale: float) -> Array:
    """``min((D / scale)^p, 1e20)``, or plainly ``D^p`` at scale 1."""
    if scale == 1.0:
        return powers(D, p)
    with np.errstate(over="ignore", under="ignore"):
        return np.minimum(powers(D / scale, p), CAP)
