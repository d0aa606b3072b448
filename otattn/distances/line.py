r"""Optimal transport on the line: the monotone coupling, optimal for every p >= 1 and for p = inf, and its certificates.

A plan on the line whose support is monotone (no mass goes from left to right past mass that goes from right to left:
``x < x'`` implies ``y <= y'`` on the support) is optimal between its own marginals for every cost ``h(|x - y|)`` with h
convex and increasing, and for the largest distance (p = inf). So nothing but the rounding of its cost is between the
lower and the upper value, and whether a support is monotone is seen by sorting.

Potentials come from the same fact. The costs of sorted atoms form a Monge array, ``C_ij + C_kl <= C_il + C_kj`` for ``i <= k``,
``j <= l``; along a staircase from the first pair of atoms to the last one, put ``f_i + g_j = C_ij``. For a pair (i, j) off the
staircase, say below it, the staircase runs from a cell (i', j) to a cell (i, j') with ``i' <= i``, ``j' >= j``, and adding up the
Monge inequalities of the rectangle gives ``f_i + g_j <= C_ij``. On the support of the monotone plan, which is part of such
a staircase, there is equality: f and g are optimal. They are sums of cost differences, kept to twice the digits.

References
----------
Santambrogio (2015), Optimal Transport for Applied Mathematicians, theorem 2.9; Hoffman (1963), On simple linear
programming problems (Monge arrays).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import EPS, Array
from otattn.distances.costs import PLAIN, powers
from otattn.distances.double_double import two_sum
from otattn.distances.flows import SERVED
from otattn.distances.masses import DUST
from otattn.measures import DiscreteMeasure

__all__ = [
    "LINE_PAIRS",
    "Staircase",
    "by_sorting",
    "is_monotone",
    "line_potentials",
    "line_threshold",
    "monotone_plan",
    "tight",
]

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


LINE_PAIRS = 2**16
"""Problems on the line of at most so many pairs of atoms are certified on every pair, larger ones by monotonicity."""


def by_sorting(mu: DiscreteMeasure, nu: DiscreteMeasure) -> bool:
    """True for problems on the line that are too large to look at every pair."""
    return mu.dim == 1 and mu.n * nu.n > LINE_PAIRS


@dataclass(frozen=True, eq=False)
class Staircase:
    """Cells ``(rows_k, cols_k)`` from the first pair of sorted atoms to the last one, one step at a time.

    ``down[k]`` says that cell k + 1 is one row below cell k (else one column to the right).
    """

    rows: Index
    cols: Index
    down: NDArray[np.bool_]

    @classmethod
    def of(cls, mu: DiscreteMeasure, nu: DiscreteMeasure) -> Staircase:
        """The staircase of the north-west corner rule, atoms of weight zero included.

        Any staircase gives feasible potentials; steps that rounding of the sums of weights exchanges cost no more than
        the mass between them.
        """
        first, second = (np.argsort(m.points[:, 0], kind="stable") for m in (mu, nu))
        after: tuple[NDArray[Any], NDArray[Any]]
        if mu.is_uniform and nu.is_uniform:
            after = np.arange(1, mu.n) * nu.n, np.arange(1, nu.n) * mu.n
        else:
            after = np.cumsum(mu.weights[first])[:-1], np.cumsum(nu.weights[second])[:-1]
        down = np.argsort(np.concatenate(after), kind="stable") < mu.n - 1
        i, j = (np.concatenate([[0], np.cumsum(step)]) for step in (down, ~down))
        return cls(first[i], second[j], down)


def line_potentials(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float, path: Staircase) -> tuple[Array, Array, float]:
    """Potentials of ``(|x - y| / scale)^p`` for finite p, equal to the cost on the staircase; and the scale."""
    x, y = mu.points[path.rows, 0], nu.points[path.cols, 0]
    D = np.abs(x - y)
    top = float(D.max())
    least = float(D.min(initial=top, where=D > 0.0))
    plain = top == 0.0 or (p <= 8.0 and PLAIN[0] < least and top < PLAIN[1])
    scale = 1.0 if plain else 2.0 ** (math.frexp(top)[1] - 1)
    C = _costs(D, p, scale)
    # for p = 1 all inequalities may be equalities: the costs themselves are kept to twice the digits
    rest = np.sign(x - y) * two_sum(x, -y).low / scale if p == 1.0 else np.zeros_like(C)
    steps = two_sum(C[1:], -C[:-1])
    high, low = np.concatenate([C[:1], steps.high]), np.concatenate([rest[:1], steps.low + np.diff(rest)])
    down = np.concatenate([[False], path.down])
    f, g = np.empty(mu.n), np.empty(nu.n)
    f[path.rows] = _sums(np.where(down, high, 0.0), np.where(down, low, 0.0))
    g[path.cols] = _sums(np.where(down, 0.0, high), np.where(down, 0.0, low))
    return f, g, scale


def _costs(D: Array, p: float, scale: float) -> Array:
    with np.errstate(under="ignore"):
        return powers(D / scale, p)


def _sums(high: Array, low: Array) -> Array:
    """``sum_{k <= i} (high_k + low_k)`` for each i, to twice the digits before the last rounding."""
    total = np.cumsum(high)
    before = np.concatenate([[0.0], total[:-1]])
    return np.asarray(total + np.cumsum(two_sum(before, high).low + low))


def line_threshold(mu: DiscreteMeasure, nu: DiscreteMeasure, rows: Index, cols: Index) -> tuple[Array, Array]:
    r"""For p = inf and the support of a monotone plan: indicators f and g of atoms whose mass has no room nearer.

    The longest move goes, say, from x to ``y > x``. The atoms of mu up to x hold more mass than those of nu before y (the plan
    has filled those before), so some of it goes to y or beyond, a distance of at least ``y - x``: ``f_i + g_j = 1 > 0`` just
    for ``x_i <= x`` and ``y_j >= y``.
    """
    x, y = mu.points[:, 0], nu.points[:, 0]
    moved = np.abs(x[rows] - y[cols])
    longest = np.flatnonzero(moved == moved.max())
    k = longest[np.lexsort((y[cols[longest]], x[rows[longest]]))[0]]
    side = 1.0 if y[cols[k]] >= x[rows[k]] else -1.0
    f = np.where(side * x <= side * x[rows[k]], 1.0, 0.0)
    g = np.where(side * y < side * y[cols[k]], -1.0, 0.0)
    # atoms of weight zero charge no pair
    f[mu.weights == 0.0] = g[nu.weights == 0.0] = -2.0
    return f, g


def is_monotone(mu: DiscreteMeasure, nu: DiscreteMeasure, rows: Index, cols: Index) -> bool:
    """True when ``x < x'`` implies ``y <= y'`` on the support: sorted by x, then by y, the y never decrease."""
    x, y = mu.points[rows, 0], nu.points[cols, 0]
    sorted_y = y[np.lexsort((y, x))]
    return bool((sorted_y[1:] >= sorted_y[:-1]).all())


def tight(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float, scale: float, f: Array, g: Array) -> bool:
    """``f_i + g_j = C_ij`` on the whole staircase, to the rounding of each term, and of sums to twice the digits."""
    if f.shape != (mu.n,) or g.shape != (nu.n,) or not np.isfinite(np.r_[f, g]).all():
        return False
    path = Staircase.of(mu, nu)
    C = _costs(np.abs(mu.points[path.rows, 0] - nu.points[path.cols, 0]), p, scale)
    u, v = f[path.rows], g[path.cols]
    rounding = 4.0 * EPS * (np.abs(u) + np.abs(v) + C) + len(C) * EPS**2 * float(C.max())
    return bool((np.abs(C - u - v) <= rounding).all())
