r"""Certificates of transport on the line, in memory of the size of the atoms.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import EPS, Array
from otattn.distances.costs import powers
from otattn.distances.ground import PLAIN
from otattn.measures import DiscreteMeasure

__all__ = ["LINE_PAIRS", "Staircase", "by_sorting", "is_monotone", "line_potentials", "line_threshold", "tight"]

Index = NDArray[np.intp]

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
    rest = np.sign(x - y) * _difference_rest(x, y, x - y) / scale if p == 1.0 else np.zeros_like(C)
    high = np.concatenate([C[:1], np.diff(C)])
    low = np.concatenate([rest[:1], _difference_rest(C[1:], C[:-1], high[1:]) + np.diff(rest)])
    down = np.concatenate([[False], path.down])
    f, g = np.empty(mu.n), np.empty(nu.n)
    f[path.rows] = _sums(np.where(down, high, 0.0), np.where(down, low, 0.0))
    g[path.cols] = _sums(np.where(down, 0.0, high), np.where(down, 0.0, low))
    return f, g, scale


def _costs(D: Array, p: float, scale: float) -> Array:
    with np.errstate(under="ignore"):
        return powers(D / scale, p)


def _difference_rest(a: Array, b: Array, high: Array) -> Array:
    """What ``high = fl(a - b)`` lacks of ``a - b`` (Knuth)."""
    t = high - a
    return np.asarray((a - (high - t)) - (b + t))


def _sums(high: Array, low: Array) -> Array:
    """``sum_{k <= i} (high_k + low_k)`` for each i, to twice the digits before the last rounding."""
    total = np.cumsum(high)
    before = np.concatenate([[0.0], total[:-1]])
    t = total - before
    lost = (before - (total - t)) + (high - t)
    return np.asarray(total + np.cumsum(lost + low))


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
