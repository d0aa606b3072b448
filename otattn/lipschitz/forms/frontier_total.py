r"""The sum of the squared rows of a displacement, over its three largest norms.

``R_i <= v G(e_i, s_i)`` for rows of :mod:`otattn.lipschitz.forms.vertex_rows`, ``s_i^2`` the two largest squares of the other norms;
``R_i <= v H_i`` for those of :mod:`otattn.lipschitz.forms.entropic_rows`, H_i convex in ``e_i``. Let ``e_1 >= e_2 >= e_3 >= ...``,
``r^2 = e_1^2 + e_2^2`` and ``f_i = e_i/r``: ``f_1 = cos(theta)``, ``f_2 = sin(theta)``, and over r (G and H are homogeneous) ``s_1^2 =
f_2^2 + f_3^2``, ``s_2^2 = f_1^2 + f_3^2``, ``s_i = 1`` for the others. The first three rows know each other; the other norms are
at most ``f_4``, which is at most ``f_3``, and as all squares sum to 1, ``sum_{i > 3} f_i^2 = 1/r^2 - 1 - f_3^2 >= f_4^2``. As
``sum_{i > 2} f_i^2 = (1 - r^2)/r^2``, for every ``mu >= 0``, with ``M_i = min(G(f_i, s_i), H_i)^2``

.. math:: \frac{\|Df\,\epsilon\|^2}{v^2} \le r^2 \Bigl[M_1 + M_2 + \{M_3 - \mu f_3^2\} + (n-3)\max_{0\le f\le f_4}
          \{M(f) - \mu f^2\}\Bigr] + \mu (1 - r^2) .

**Evaluation.** On a box of ``(r, theta, f_3)`` the bracket is bounded for all r at once; what is then left of r is linear in ``r^2``:
an end of the box bounds it. G is a table over cells of directions ``f/s``: ``G(f, s) <= max(f/f_c, s/s_c) G_c``, ``(f_c, s_c)`` the
corner of any cell, in the cell of ``(f, s)`` little more than G. The braces (for three tokens ``mu = 0``, and r tells ``f_3``) are
bounded on the range of ``f_3``, and on each of a few parts ``[f, f']`` of ``[0, f_4]``:

- with ``s = 1``, f on a cell runs from ``tan(theta_0)`` to ``tan(theta_1)``: the largest ``G_c^2 max(tan(theta_1)/f_c, 1/s_c)^2 - mu
  tan^2(theta_0)`` of the cells that the part meets;
- H lies below its chord, whose square less ``mu f^2`` is at most ``mu (f' - f)^2 / 4`` above the larger of its ends.

The maximum is a branch and bound: all else is monotone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array
from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.constants.cells import Maximum, boxes, maximise
from otattn.lipschitz.forms.entropic_rows import EntropicRows

MAX_CELLS = 400_000
_PARTS = 6
"""Parts of ``[0, f_4]``."""
_CHUNK = 128
"""Boxes at a time."""
_WIDE = 0.02
"""Larger boxes are bounded by fewer entropic cells."""


@dataclass(frozen=True, eq=False)
class Part:
    """``count`` rows with own norms between ``ends (parts + 1, boxes)``: H there, G for each part ``(parts, boxes, mu)``."""

    count: int
    ends: Array
    H: Array
    G: Array

    def braces(self, mu: Any, pick: Any, wrap: Any) -> Any:
        """The largest of the braces, times ``count``; ``pick`` takes G for this mu."""
        square, f = wrap(self.H) ** 2, wrap(self.ends)
        ends_of = square - mu * f**2
        chord = np.maximum(ends_of[:-1], ends_of[1:]) + 0.25 * mu * (f[1:] - f[:-1]) ** 2
        return self.count * np.minimum(chord, wrap(pick(self.G))).max(axis=0)


@dataclass(frozen=True, eq=False)
class Total:
    """The maximum over ``(r, theta, e_3/r)`` from a table of vertex rows and the cells of entropic ones."""

    n: int
    angles: Array
    rows: Array
    mu: Array
    exact: bool
    entropic: EntropicRows

    @property
    def corners(self) -> tuple[Array, Array]:
        """Largest e and s of each cell of directions."""
        return np.sin(self.angles[1:]), np.cos(self.angles[:-1])

    @cached_property
    def others(self) -> Array:
        """``max_c`` of the braces over runs of cells ``(first, last, mu)``, by G."""
        wrap = lift if self.exact else np.asarray
        ce, cs = self.corners
        low, high = (np.cos(wrap(x)) for x in (self.angles[:-1], self.angles[1:]))
        with np.errstate(divide="ignore", over="ignore"):
            most = np.maximum(np.sin(wrap(self.angles[1:])) / high / ce, 1.0 / wrap(cs))
            each = upper((wrap(self.rows) * most) ** 2 - wrap(self.mu)[:, None] * (1.0 / low**2 - 1.0)).T
        each = np.where(np.isnan(each), np.inf, each)
        runs = np.full((self.rows.size, *each.shape), -np.inf)
        for first in range(self.rows.size):
            runs[first, first:] = np.maximum.accumulate(each[first:], axis=0)
        return runs

    def cell(self, e: Array, s: Array) -> Array:
        """The cell of a direction, or its neighbour by rounding."""
        found = np.searchsorted(self.angles, np.arctan2(e, s), side="right") - 1
        return np.clip(found, 0, self.rows.size - 1)

    def row(self, e: Any, s: Any, cell: Array) -> Any:
        """``G^2``, by any cell: the multiple of the corner is at least ``(e, s)``."""
        ce, cs = self.corners
        return (np.maximum(e / ce[cell], s / cs[cell]) * self.rows[cell]) ** 2

    def bound(self, lo: Array, hi: Array) -> Array:
        """Logarithm of the bound of the square on boxes, ``-inf`` where one is empty."""
        found = np.empty(lo.shape[1])
        wide = (hi - lo).max(axis=0, initial=0.0) > _WIDE
        # intervals cost by the call, floats by the number
        step = 4 * _CHUNK if self.exact else _CHUNK
        for which, rows in ((wide, self.entropic.coarse), (~wide, self.entropic)):
            order = np.flatnonzero(which)
            order = order[np.argsort(_curve(0.5 * (lo + hi)[:, order]), kind="stable")]
            for k in range(0, order.size, step):
                at = order[k : k + step]
                found[at] = self._bound(lo[:, at], hi[:, at], rows)
        return found

    def _bound(self, lo: Array, hi: Array, entropic: EntropicRows) -> Array:
        wrap: Any = lift if self.exact else np.asarray
        (r0, t0, x0), (r1, t1, x1) = ([wrap(x) for x in end] for end in (lo, hi))
        # over r: e_1, e_2, the largest e_3 and e_4, the squares of the others
        one, two, rem = np.cos(t0), np.sin(t1), np.maximum((1.0 - r0) * (1.0 + r0), 0.0) / r0**2
        high = wrap(upper(np.minimum(np.minimum(x1, two), np.sqrt(rem))))
        # a difference of floats keeps no digits below its rounding, and its root has half as many
        left = np.maximum(rem - x0**2, 0.0) + (0.0 if self.exact else 16.0 * EPS * (rem + x0**2))
        fourth = wrap(upper(np.minimum(high, np.sqrt(left))))
        value = self._others((one, two, high), np.minimum(lo[2], upper(high)), fourth, left, (r0, r1), entropic)
        with np.errstate(divide="ignore"):
            found = upper(np.log(value))
        # e_3 <= e_2, and it is the largest of n - 2 norms whose squares sum to 1 - r^2
        most, least, second = 1.0 - lo[0] ** 2, 1.0 - hi[0] ** 2, np.sin(hi[1])
        empty = least > (self.n - 2) * (hi[0] * np.minimum(hi[2], second)) ** 2 + 1e-12
        if self.n > 3:
            empty |= ((lo[0] * lo[2]) ** 2 > most + 1e-12) | (lo[2] > second + 1e-12)
        return np.where(empty, -np.inf, found)

    def _others(
        self, largest: tuple[Any, ...], low: Array, fourth: Any, left: Any, r: tuple[Any, Any], rows: EntropicRows
    ) -> Any:
        """The bound with the best mu; over r, ``low`` is the least third norm, ``left`` what the squares after it sum to."""
        wrap: Any = lift if self.exact else np.asarray
        one, two, three = largest
        k = self.n - 3
        first: Any = 0.0 * one
        known = [(one, two, three), (two, one, three), (three, one, two)]
        for own, *most in known[: 2 if k else 3]:
            s = np.sqrt(most[0] ** 2 + most[1] ** 2)
            H = rows.row(upper(own)[None], most, fourth, left, k)[0]
            first = first + np.minimum(self.row(own, s, self.cell(upper(own), upper(s))), wrap(H) ** 2)
        if not k:
            return np.maximum(*(x * x * first for x in r))
        f = np.stack([low, upper(three)])
        parts = [Part(1, f, rows.row(f, (one, two), fourth, left, k), self._runs(f))]
        f = upper(fourth) * np.linspace(0.0, 1.0, _PARTS + 1)[:, None]
        parts.append(Part(k, f, rows.row(f, largest, fourth, left, k - 1), self._runs(f)))

        def total(mu: Any, pick: Any, first: Any, r: tuple[Any, ...], wrap: Any) -> Any:
            value = sum((part.braces(mu, pick, wrap) for part in parts), first)
            return np.maximum(*(x * x * value + mu * np.maximum((1.0 - x) * (1.0 + x), 0.0) for x in r))

        plain = upper(first), tuple(upper(x) for x in r), np.asarray
        values = [total(mu, lambda G, j=j: G[:, :, j], *plain) for j, mu in enumerate(self.mu.tolist())]
        best = np.array(values).argmin(axis=0)
        chosen = best[None, :, None]
        return total(wrap(self.mu[best]), lambda G: np.take_along_axis(G, chosen, axis=2)[:, :, 0], first, r, wrap)

    def _runs(self, f: Array) -> Array:
        """``others`` of the cells that the parts between f meet, and of their neighbours."""
        at = np.array([self.cell(x, np.ones(x.size)) for x in f])
        return np.asarray(self.others[np.maximum(at[:-1] - 1, 0), np.minimum(at[1:] + 1, self.rows.size - 1)])

    def cover(self) -> tuple[Array, Array]:
        """Boxes of ``(r, theta, e_3 / r)``."""
        least = math.sqrt(2.0 / self.n) * (1.0 - 1e-12)
        ratio = np.linspace(0.0, np.nextafter(math.sqrt(0.5), 1.0), 9)  # e_3 <= e_2 <= e_1
        if self.n == 3:
            ratio = ratio[[-1, -1]]  # the first two norms tell the third
        return boxes(np.linspace(least, 1.0, 9), np.linspace(0.0, np.nextafter(math.pi / 4, 1.0), 9), ratio)

    def maximum(self, tol: float) -> Maximum:
        """The largest bound of a box, in logarithms."""
        return maximise(self.bound, *self.cover(), tol=tol, max_cells=MAX_CELLS)


def _curve(x: Array) -> Array:
    """Places of points ``(dims, count)`` along a curve through the unit cube: near ones have near places."""
    cells, place = (x * 1024.0).astype(int), np.zeros(x.shape[1], dtype=int)
    for bit in range(10):
        for k, axis in enumerate(cells):
            place |= ((axis >> bit) & 1) << (len(x) * bit + k)
    return place
