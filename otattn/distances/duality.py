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

__all__ = ["c_transform", "feasible_pair", "reduced_costs", "small_potentials", "support_slack", "tight_potentials"]

_BLOCK = 2**22  # entries handled at once, so that temporaries stay near 32 MB


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


def feasible_pair(C: Array, g: Array) -> tuple[Array, Array]:
    """Feasible potentials from ``g``: the c-transform of ``g``, then that of the result."""
    f = c_transform(C, g)
    return f, c_transform(C.T, f)


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


def small_potentials(
    C: Array,
    rows: NDArray[np.intp],
    cols: NDArray[np.intp],
    start: Array | None = None,
    *,
    max_sweeps: int = 64,
) -> Array:
    """Column potentials ``g`` tight on a plan's support, by Bellman-Ford from ``start`` (0 by default).

    Shortest paths from zero have the size of the costs that the plan pays, also when the cloud is much
    larger; those of a simplex basis may have the size of the cloud, and then lose the digits of a small
    distance. They settle in as many sweeps as the longest shortest path has steps; a plan that is not optimal
    has a negative cycle and never settles, so the sweeps are limited and the result is only a candidate.

    ``rows`` is ascending and meets every row.
    """
    g = np.zeros(C.shape[1]) if start is None else start.copy()
    paid = C[rows, cols]
    first = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    step = max(1, _BLOCK // C.shape[1])
    before = np.full(len(C), -np.inf)
    for _ in range(max_sweeps):
        f = np.maximum.reduceat(paid - g[cols], first)
        moved = np.flatnonzero(f != before)  # what the others ask for is in g already
        new, before = g.copy(), f
        for k in range(0, len(moved), step):
            part = moved[k : k + step]
            some = C if len(part) == len(C) else C[part]
            np.minimum(new, (some - f[part, None]).min(axis=0), out=new)
        change = float((g - new).max())
        g = new
        if change <= 4e-16 * float(np.abs(g).max()):
            break
    return g


def tight_potentials(C: Array, rows: NDArray[np.intp], cols: NDArray[np.intp], g: Array) -> Array:
    """Column potentials tight on a forest, each tree from its ``g`` at one column: those of a simplex, less its rounding.

    A simplex updates its potentials pivot by pivot; along the tree each is one difference away from the next.
    """
    n, out = C.shape[0], np.concatenate([np.zeros(C.shape[0]), g]).tolist()
    at: list[list[tuple[int, float]]] = [[] for _ in out]
    for i, j, cost in zip(rows.tolist(), cols.tolist(), C[rows, cols].tolist(), strict=True):
        at[i].append((j + n, cost))
        at[j + n].append((i, cost))
    seen = [False] * len(out)
    for root in range(n, len(out)):
        stack = [] if seen[root] else [root]
        seen[root] = True
        while stack:
            u = stack.pop()
            for v, cost in at[u]:
                if not seen[v]:
                    seen[v] = True
                    out[v] = cost - out[u]
                    stack.append(v)
    return np.array(out[n:])
