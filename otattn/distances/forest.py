"""The arcs of a plan as a forest, taken apart from its leaves inward."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Peeling", "peel"]

Index = NDArray[np.intp]
Peeling = list[tuple[int, int, int]]
"""``(leaf, its neighbour, its arc)`` in an order in which each is the leaf of what is left."""


def peel(rows: Index, cols: Index, n: int, m: int) -> Peeling:
    """Take the nodes (rows ``0:n``, columns ``n:n + m``) off the forest with these arcs; the arcs of cycles stay."""
    ends, arcs = cols + n, np.arange(len(rows))
    # the one arc and the one neighbour that a leaf has left: sums without carry of all that are there
    arc, neighbour = np.zeros(n + m, dtype=np.intp), np.zeros(n + m, dtype=np.intp)
    for tail, head in ((rows, ends), (ends, rows)):
        np.bitwise_xor.at(arc, tail, arcs)
        np.bitwise_xor.at(neighbour, tail, head)
    at, to = arc.tolist(), neighbour.tolist()
    degree = np.bincount(np.concatenate([rows, ends]), minlength=n + m).tolist()
    leaves, steps = [v for v, count in enumerate(degree) if count == 1], []
    for v in leaves:
        if degree[v] != 1:
            continue
        u, k = to[v], at[v]
        steps.append((v, u, k))
        degree[v] = 0
        at[u] ^= k
        to[u] ^= v
        degree[u] = left = degree[u] - 1
        if left == 1:
            leaves.append(u)
    return steps
