"""The bottleneck distance W_inf: the least threshold below which all the mass can be moved.

A threshold t is feasible when the arcs with ``D_ij <= t`` carry a plan. When it is not, potentials of the 0/1
cost ``[D > t]`` (for uniform weights, a set that violates Hall's condition) charge mass to arcs above t, and
prove that the distance is at least the smallest ``D_ij`` with ``f_i + g_j > 0``. Costs 0 and 1 keep the
simplex's potentials integer, so feasibility is decided without rounding in the costs, and exact flows decide
it without rounding in the masses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from otattn._linalg import Array
from otattn.distances.flows import Support, network_simplex
from otattn.errors import ConvergenceError

__all__ = ["Bottleneck", "bottleneck", "witnessed_threshold"]

Index = NDArray[np.intp]
Attempt = Support | tuple[Array, Array]  # a plan, or potentials that rule the threshold out


@dataclass(frozen=True, eq=False)
class Bottleneck:
    """The least feasible threshold with a plan that attains it and potentials that prove it least."""

    value: float
    rows: Index
    cols: Index
    mass: Array
    f: Array
    g: Array


def witnessed_threshold(D: Array, f: Array, g: Array) -> float:
    """The smallest ``D_ij`` with ``f_i + g_j > 0``: a plan of positive dual value must use such an arc."""
    charged = np.add.outer(f, g) > 0.0
    return float(D.min(initial=np.inf, where=charged))


def bottleneck(D: Array, A: list[int], B: list[int]) -> Bottleneck:
    """Bottleneck of ``D (n, m)`` for positive integer masses of equal sums.

    Bisection over the sorted distinct entries; every infeasible threshold also lifts the lower end to the
    value that its violated set proves, so that the last one is the certificate.
    """
    uniform = D.shape[0] == D.shape[1] and min(A) == max(A) and min(B) == max(B)
    attempt = _match if uniform else _transport
    nearest_row, nearest_col = D.min(axis=1), D.min(axis=0)
    f, g = np.zeros(len(A)), np.zeros(len(B))
    if nearest_row.max() >= nearest_col.max():  # some atom must travel at least to its nearest target
        f[nearest_row.argmax()] = 1.0
    else:
        g[nearest_col.argmax()] = 1.0
    levels = np.unique(D)
    low = int(np.searchsorted(levels, max(nearest_row.max(), nearest_col.max())))
    high = len(levels) - 1
    plan: Support | None = None
    jump = True  # try the proved lower end every second time: it is often the answer
    while plan is None or low < high:
        middle = low if jump else (low + high) // 2
        jump = not jump
        found = attempt(D, float(levels[middle]), A, B)
        if len(found) == 3:
            high, plan = middle, found
        else:
            f, g = found
            low = int(np.searchsorted(levels, witnessed_threshold(D, f, g)))
            if low > high:
                raise ConvergenceError(
                    f"a threshold of {levels[middle]:g} must be feasible or provably too small, but the "
                    "simplex gave neither; drop atoms of negligible weight."
                )
    return Bottleneck(float(levels[low]), *plan, f, g)


def _match(D: Array, t: float, A: list[int], B: list[int]) -> Attempt:
    """A perfect matching below ``t``, or indicators of rows and (negative) of their too few neighbours."""
    near = t >= D
    n = len(D)
    partner = maximum_bipartite_matching(csr_array(near), perm_type="column")
    if (partner >= 0).all():
        return np.arange(n), partner.astype(np.intp), np.full(n, 1.0 / n)
    # König: rows and columns that alternating paths from an unmatched row reach
    owner = np.full(n, -1)
    owner[partner[partner >= 0]] = np.flatnonzero(partner >= 0)
    rows, cols = partner < 0, np.zeros(n, dtype=bool)
    fresh = np.flatnonzero(rows)
    while fresh.size:
        reached = near[fresh].any(axis=0) & ~cols
        cols |= reached
        fresh = owner[reached]
        rows[fresh] = True
    return rows.astype(np.float64), -cols.astype(np.float64)


def _transport(D: Array, t: float, A: list[int], B: list[int]) -> Attempt:
    """A plan below ``t``, or integer potentials of the cost ``[D > t]`` whose dual value is positive."""
    far = (t < D).astype(np.float64)
    (rows, cols, mass), _, v = network_simplex(far, A, B)
    if not far[rows, cols].any():
        return rows, cols, mass
    g = np.rint(v - v[0])
    f = (far - g).min(axis=1)
    return f, (far - f[:, None]).min(axis=0)
