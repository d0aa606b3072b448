"""Kantorovich duality on a cost matrix: c-transforms that are feasible to the last bit, and the gap they
leave.

Potentials ``f (n,)``, ``g (m,)`` are feasible when ``f_i + g_j <= C_ij``. For a plan P and feasible
potentials, ``sum_ij P_ij C_ij - sum_ij P_ij (f_i + g_j) = sum_ij P_ij slack_ij`` bounds how far P is from the
optimum between its own marginals. The gap is summed from the slacks on the support of P, so it has no
cancellation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.distances.double_double import two_sum
from otattn.distances.forest import Peeling, peel

__all__ = ["c_transform", "reduced_costs", "support_slack", "tight_potentials"]

_BLOCK = 2**15  # entries handled at once, so that they stay in the cache


def c_transform(C: Array, g: Array) -> Array:
    """``f_i = min_j (C_ij - g_j)`` rounded down, so that ``f_i + g_j <= C_ij`` holds exactly for the stored
    floats.
    """
    step = max(1, _BLOCK // max(1, C.shape[1]))
    f = np.empty(len(C))
    for k in range(0, len(C), step):
        np.min(C[k : k + step] - g, axis=1, out=f[k : k + step])
    # rounding is monotone: the minimum of the rounded differences is the rounded minimum, at most half an ulp
    # too high (a difference rounds to 0 only when it is 0, so a minimum of 0 is exact)
    return np.where(f == 0.0, 0.0, np.nextafter(f, -np.inf))


def support_slack(
    C: Array,
    f: Array,
    g: Array,
    rows: NDArray[np.intp],
    cols: NDArray[np.intp],
) -> Array:
    """``C_ij - f_i - g_j`` on the support, with the sum ``f_i + g_j`` taken without rounding."""
    u, v = f[rows], g[cols]
    s, low = two_sum(u, v)
    return np.asarray((C[rows, cols] - s) - low)


def reduced_costs(C: Array, f: Array, g: Array, *, cap: float = np.inf) -> Array:
    """``min(max(C - f - g, 0), cap)``: the same optimal plans as ``C`` (when none of them uses a capped
    entry).
    """
    R = C - f[:, None]
    R -= g
    return np.clip(R, 0.0, cap, out=R)


def tight_potentials(
    C: Array, rows: NDArray[np.intp], cols: NDArray[np.intp], g: Array, peeling: Peeling | None = None
) -> Array:
    """Column potentials tight on a forest, each tree from its ``g`` at one column: those of a simplex, less its rounding.

    A simplex updates its potentials pivot by pivot; along the tree each is one difference away from the next. ``peeling`` is
    that of the forest, if it is known.
    """
    n, m = C.shape
    out, cost = np.concatenate([np.zeros(n), g]).tolist(), C[rows, cols].tolist()
    known = [False] * (n + m)
    for v, u, k in reversed(peel(rows, cols, n, m) if peeling is None else peeling):
        if not known[u]:  # what its tree ended with
            known[u] = True
            if u < n:
                out[u] = cost[k] - out[v]
                known[v] = True
                continue
        known[v] = True
        out[v] = cost[k] - out[u]
    return np.array(out[n:])
