"""Potentials of a plan by shortest paths: along all arcs, and for a matching mostly along those that matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array

__all__ = ["matching_potentials", "small_potentials"]

Index = NDArray[np.intp]

_BLOCK = 2**22  # entries handled at once, so that temporaries stay near 32 MB
_SETTLED = 4e-16  # relative to the potentials: their rounding
_TILE = 2**15  # entries whose rows are searched at once: they stay in the cache
_SMALL_SWEEPS = 8  # sweeps over the arcs kept, for each that there may be over all: they end also on a negative cycle


def small_potentials(
    C: Array,
    rows: Index,
    cols: Index,
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
        if change <= _SETTLED * float(np.abs(g).max()):
            break
    return g


def matching_potentials(C: Array, partner: Index, *, max_sweeps: int) -> Array:
    """Column potentials ``g`` tight on the plan ``i -> partner[i]`` of ``C (n, n)``, by few sweeps over all arcs.

    Here the rows start from zero: ``f`` falls until ``f_i <= C_ij - g_j`` for all arcs, where ``g`` makes each pair
    tight. A sweep over all arcs keeps the best arc of each row, and those kept settle among themselves before the next
    (policy iteration): the paths are paths along arcs, so the end is that of Bellman and Ford.
    """
    n = len(C)
    rows, paid = np.arange(n), C[np.arange(n), partner]
    f, g, arc, least = np.zeros(n), np.empty(n), np.empty(n, dtype=np.intp), np.empty(n)
    kept, costs = np.empty((0, n), dtype=np.intp), np.empty((0, n))
    step, budget = max(1, _TILE // n), _SMALL_SWEEPS * max_sweeps
    for _ in range(max_sweeps):
        g[partner] = paid - f
        for k in range(0, n, step):
            room = C[k : k + step] - g
            arc[k : k + step] = best = room.argmin(axis=1)
            least[k : k + step] = room[rows[: len(best)], best]
        f, settled = _lowered(f, least)
        if settled or budget == 0:
            break
        kept, costs = np.vstack([kept, arc]), np.vstack([costs, C[rows, arc]])
        while not settled and budget > 0:
            g[partner] = paid - f
            f, settled = _lowered(f, (costs - g[kept]).min(axis=0))
            budget -= 1
    g[partner] = paid - f
    return g


def _lowered(f: Array, other: Array) -> tuple[Array, bool]:
    """The smaller of both, and whether that is ``f`` to rounding."""
    new = np.minimum(f, other)
    return new, float((f - new).max()) <= _SETTLED * float(np.abs(new).max())
