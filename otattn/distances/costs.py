"""Ground distances, always from explicit differences, costs at a scale where the powers that matter neither vanish nor
overflow, and the memory that they may take.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.spatial.distance import cdist

from otattn._linalg import EPS, Array, row_norms
from otattn.distances.bottleneck import bottleneck
from otattn.errors import MemoryBudgetError

__all__ = [
    "ASSIGNMENT_BYTES",
    "DECADES",
    "MAX_BYTES",
    "SIMPLEX_BYTES",
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
    D = np.asarray(cdist(x, y))
    least, most = _SAFE
    if least < D.min() and D.max() < most:
        return D
    step = max(1, _BLOCK // (x.shape[1] * len(y)))
    for k in range(0, len(x), step):
        part = D[k : k + step]
        i, j = np.nonzero(~((least < part) & (most > part)))
        part[i, j] = pair_distances(x[k + i], y[j])
    if not np.isfinite(D).all():
        raise OverflowError("distances must fit in float64, received points that are too far apart; rescale them.")
    return D


def pair_distances(x: Array, y: Array) -> Array:
    """``|x_k - y_k|`` row by row, without over- or underflow of the squares; inf beyond float64."""
    with np.errstate(over="ignore"):
        return row_norms(x - y)


def powers(ratio: Array, p: float) -> Array:
    """``ratio ** p`` without the cost of ``pow`` for the usual orders."""
    if p == 1.0:
        return ratio
    return ratio * ratio if p == 2.0 else np.asarray(ratio**p)


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


CAP = 1e20  # at the scale W_inf an optimal plan costs at most 1: such an entry carries less than rounding
PLAIN = (1e-35, 1e15)  # distances whose powers stay in float64 without scaling, for p <= 8
DECADES = 150.0  # powers that span at most this many keep their digits at the scale of the largest


def ground_cost(D: Array, p: float, A: list[int], B: list[int]) -> tuple[Array, float]:
    """Costs and their scale, for finite ``p``. Capping and underflow only lower a cost, so dual bounds stay
    valid.
    """
    top = float(D.max())
    least = float(D.min(initial=top, where=D > 0.0))
    if top == 0.0 or (p <= 8.0 and PLAIN[0] < least and top < PLAIN[1]):
        return powers(D, p), 1.0
    # distances so unequal that their powers leave float64: the scale that matters is then W_inf
    scale = top if p * float(np.log10(top / least)) <= DECADES else bottleneck(D, A, B).value or top
    return scaled_cost(D, p, scale), scale


def scaled_cost(D: Array, p: float, scale: float) -> Array:
    """``min((D / scale)^p, 1e20)``, or plainly ``D^p`` at scale 1."""
    if scale == 1.0:
        return powers(D, p)
    with np.errstate(over="ignore", under="ignore"):
        return np.minimum(powers(D / scale, p), CAP)
