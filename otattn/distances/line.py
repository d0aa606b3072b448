"""Optimal transport on the line: the monotone coupling, optimal for every p >= 1 and for p = inf."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from otattn.distances.flows import forest_flow

__all__ = ["monotone_plan"]

Plan = tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]


def monotone_plan(x: NDArray[np.float64], A: list[int], y: NDArray[np.float64], B: list[int]) -> Plan:
    """The north-west corner rule on sorted atoms: ``(rows, columns, masses)`` with at most ``n + m - 1``
    entries.

    ``x (n,)`` and ``y (m,)`` carry positive integer masses of equal sums, so that the breakpoints of the two
    quantile functions are compared exactly.
    """
    rows, cols, flows = [], [], []
    order_x, order_y = np.argsort(x, kind="stable").tolist(), np.argsort(y, kind="stable").tolist()
    i = j = 0
    left, right = A[order_x[0]], B[order_y[0]]
    while True:
        flow = min(left, right)
        rows.append(order_x[i])
        cols.append(order_y[j])
        flows.append(flow)
        left, right = left - flow, right - flow
        if left == 0:
            i += 1
            if i == len(A):
                break
            left = A[order_x[i]]
        if right == 0:
            j += 1
            right = B[order_y[j]]
    if min(A) == max(A) and min(B) == max(B):  # whole counts of atoms: nothing was rounded
        total = sum(A)
        return np.array(rows), np.array(cols), np.array([v / total for v in flows])
    plan = forest_flow(np.array(rows), np.array(cols), A, B, lambda k, is_row: np.abs(y - x[k] if is_row else x - y[k]))
    assert plan is not None  # the corner rule serves every atom exactly
    return plan
