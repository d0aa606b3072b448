"""Optimal transport on the line: the monotone coupling, optimal for every p >= 1 and for p = inf."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.distances.flows import SERVED
from otattn.distances.masses import DUST

__all__ = ["monotone_plan"]

Index = NDArray[np.intp]
Plan = tuple[Index, Index, Array]


def monotone_plan(x: Array, A: list[int], y: Array, B: list[int]) -> Plan:
    """The north-west corner rule on sorted atoms: ``(rows, columns, masses)`` with at most ``n + m - 1``
    entries.

    ``x (n,)`` and ``y (m,)`` carry positive integer masses of equal sums, so that the breakpoints of the two
    quantile functions are compared exactly. Flows within the rounding of the weights on both of their sides are
    no transport (see `flows`): the line is cut there, and the weights of each part are balanced by a common factor.
    """
    first, second = np.argsort(x, kind="stable"), np.argsort(y, kind="stable")
    if min(A) == max(A) and min(B) == max(B):  # whole counts of atoms: nothing was rounded
        return _equal_shares(first, second)
    a, b = [A[i] for i in first.tolist()], [B[j] for j in second.tolist()]
    rows, cols, flows = _corner(a, b)
    parts = _parts(rows, cols, flows, a, b)
    total = sum(a)
    if len(parts) == 1:
        return first[rows], second[cols], np.array([v / total for v in flows])
    found = [_balanced(part, a, b, total) for part in parts]
    i, j = (np.array([v for one in found for v in one[k]], dtype=np.intp) for k in (0, 1))
    return first[i], second[j], np.concatenate([one[2] for one in found])


def _equal_shares(order_x: Index, order_y: Index) -> Plan:
    """The corner rule for equal weights on each side, in units of ``1 / (n m)``: whole numbers."""
    n, m = len(order_x), len(order_y)
    ends = np.union1d(np.arange(1, n + 1) * m, np.arange(1, m + 1) * n)
    starts = np.concatenate([[0], ends[:-1]])
    return order_x[starts // m], order_y[starts // n], (ends - starts) / (n * m)


def _corner(a: list[int], b: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Rows, columns and flows in the order of the line; equal sums."""
    rows, cols, flows = [], [], []
    i = j = 0
    left, right = a[0], b[0]
    while True:
        flow = min(left, right)
        rows.append(i)
        cols.append(j)
        flows.append(flow)
        left, right = left - flow, right - flow
        if left == 0:
            i += 1
            if i == len(a):
                return rows, cols, flows
            left = a[i]
        if right == 0:
            j += 1
            right = b[j]


Part = tuple[int, int, int, int]
"""``(i0, j0, i1, j1)``: the rows ``[i0, i1)`` and columns ``[j0, j1)`` of a stretch of the line."""


def _parts(rows: list[int], cols: list[int], flows: list[int], a: list[int], b: list[int]) -> list[Part]:
    """The line cut at flows within the rounding of all the mass before and of all the mass behind them.

    A stretch whose two sides differ by more than rounding (a few atoms that are lighter than the rounding of the
    others) is not cut off: its flows stay what they are.
    """
    sums = [0, *accumulate(a)], [0, *accumulate(b)]
    total = sums[0][-1]
    cuts = [(0, 0)]
    for k in range(1, len(flows) - 1):
        if flows[k] * DUST > total:
            continue
        # before this flow are its row (and the columns before) when the row began earlier, else its column
        i, j = rows[k] + (rows[k - 1] == rows[k]), cols[k] + (cols[k - 1] == cols[k])
        before, behind = max(sums[0][i], sums[1][j]), total - min(sums[0][i], sums[1][j])
        if flows[k] * DUST <= min(before, behind) and _even(cuts[-1], (i, j), sums):
            cuts.append((i, j))
    cuts.append((len(a), len(b)))
    while len(cuts) > 2 and not _even(cuts[-2], cuts[-1], sums):
        del cuts[-2]
    return [(*start, *end) for start, end in pairwise(cuts)]


def _even(start: tuple[int, int], end: tuple[int, int], sums: tuple[list[int], list[int]]) -> bool:
    """Both sides hold the same mass between two cuts, to the accuracy to which every marginal is met."""
    s, t = (mass[e] - mass[i] for mass, i, e in zip(sums, start, end, strict=True))
    return min(s, t) > 0 and abs(s - t) * SERVED <= min(s, t)


def _balanced(part: Part, a: list[int], b: list[int], total: int) -> tuple[list[int], list[int], Array]:
    """The corner rule on a part, its columns scaled to the mass of its rows, over the ``total`` of all rows."""
    i, j, k, m = part
    s, t = sum(a[i:k]), sum(b[j:m])
    rows, cols, flows = _corner([v * t for v in a[i:k]], [v * s for v in b[j:m]])
    unit = total * t
    return [i + r for r in rows], [j + c for c in cols], np.array([v / unit for v in flows])
