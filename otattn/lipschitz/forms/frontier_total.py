r"""The sum of the squared rows of a displacement, over its three largest norms.

``R_i <= v G(e_i, s_i)`` for rows of :mod:`otattn.lipschitz.forms.vertex_rows`, ``s_i^2`` the two largest squares of the other norms;
``R_i <= v H_i`` for those of :mod:`otattn.lipschitz.forms.entropic_rows`, H_i convex in ``e_i``. With ``e_1 >= e_2 >= e_3 >= ...``,
``s_1^2 = e_2^2 + e_3^2``, ``s_2^2 = e_1^2 + e_3^2``, and ``s_i^2 = e_1^2 + e_2^2 =: r^2`` for the others, whose norms are at most
``e_3`` and whose squares sum to ``1 - r^2``. For every ``mu >= 0``

.. math:: \frac{\|Df\,\epsilon\|^2}{v^2} \le \sum_{i \le 2} \min(G(e_i, s_i), H_i)^2
          + (n-2)\max_{0\le e\le e_3} \{\min(G(e, r), H(e))^2 - \mu e^2\} + \mu (1 - r^2) .

**Evaluation.** G is a table over cells of directions ``e/s``: ``G(e, s) <= max(e/e_c, s/s_c) G_c`` with ``(e_c, s_c)`` the corner
of any cell, in the cell of ``(e, s)`` little more than G. The braces are bounded on each of a few parts ``[f, f']`` of ``[0, e_3]``:

- with s fixed, e on a cell runs from ``s tan(theta_0)`` to ``s tan(theta_1)``: the largest ``r^2 (G_c^2 max(tan(theta_1)/e_c,
  1/s_c)^2 - mu tan^2(theta_0))`` of the cells that the part meets;
- H lies below its chord, whose square less ``mu e^2`` is at most ``mu (f' - f)^2 / 4`` above the larger of its ends.

The maximum over ``e_1 = r cos(theta)``, ``e_2 = r sin(theta)``, ``e_3`` is a branch and bound: every term is monotone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.constants.cells import Maximum, boxes, maximise
from otattn.lipschitz.forms.entropic_rows import EntropicRows

MAX_CELLS = 400_000
_PARTS = 6
"""Parts of ``[0, e_3]``."""
_CHUNK = 128
"""Boxes at a time."""


@dataclass(frozen=True, eq=False)
class Total:
    """The maximum over ``(r, theta, e_3)`` from a table of vertex rows and the cells of entropic ones."""

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
        """``max_c`` of the braces for ``r = 1`` over runs of cells ``(first, last, mu)``, by G."""
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
        order = np.argsort(_curve(0.5 * (lo + hi)), kind="stable")
        # intervals cost by the call, floats by the number
        step = 4 * _CHUNK if self.exact else _CHUNK
        found = np.empty(order.size)
        for k in range(0, order.size, step):
            at = order[k : k + step]
            found[at] = self._bound(lo[:, at], hi[:, at])
        return found

    def _bound(self, lo: Array, hi: Array) -> Array:
        wrap: Any = lift if self.exact else np.asarray
        (r0, t0, x0), (r1, t1, x1) = ([wrap(x) for x in end] for end in (lo, hi))
        # over r: e_1, e_2, the largest e_3 and e_4, the squares of the others
        one, two, rem = np.cos(t0), np.sin(t1), np.maximum((1.0 - r0) * (1.0 + r0), 0.0) / r0**2
        high = wrap(upper(np.minimum(np.minimum(x1, two), np.sqrt(rem))))
        left = np.maximum(rem - x0**2, 0.0)
        fourth = wrap(upper(np.minimum(high, np.sqrt(left))))
        value = self._others((one, two, high), np.minimum(lo[2], upper(high)), fourth, left, (r0, r1))
        with np.errstate(divide="ignore"):
            found = upper(np.log(value))
        # e_3 <= e_2, and it is the largest of n - 2 norms whose squares sum to 1 - r^2
        most, least, second = 1.0 - lo[0] ** 2, 1.0 - hi[0] ** 2, np.sin(hi[1])
        empty = least > (self.n - 2) * (hi[0] * np.minimum(hi[2], second)) ** 2 + 1e-12
        empty |= ((lo[0] * lo[2]) ** 2 > most + 1e-12) | (lo[2] > second + 1e-12)
        return np.where(empty, -np.inf, found)

    def _others(self, largest: tuple[Any, Any, Any], low: Array, fourth: Any, left: Any, r: tuple[Any, Any]) -> Any:
        """The bound with the best mu."""
        wrap: Any = lift if self.exact else np.asarray
        one, two, three = largest
        k = self.n - 3
        two_rows: Any = 0.0 * one
        for own, other in ((one, two), (two, one)):
            s = np.sqrt(other**2 + three**2)
            H = self.entropic.row(upper(own)[None], (other, three), fourth, left, k)[0]
            two_rows = two_rows + np.minimum(self.row(own, s, self.cell(upper(own), upper(s))), wrap(H) ** 2)
        third = np.stack([low, upper(three)])
        parts = [(1, third, self.entropic.row(third, (one, two), fourth, left, k))]
        if k:
            crowd = upper(fourth) * np.linspace(0.0, 1.0, _PARTS + 1)[:, None]
            parts.append((k, crowd, self.entropic.row(crowd, largest, fourth, left, k - 1)))
        pieces = []
        for count, f, H in parts:
            # the cells that a part meets, and their neighbours
            at = np.array([self.cell(x, np.ones(x.size)) for x in f])
            first, last = np.maximum(at[:-1] - 1, 0), np.minimum(at[1:] + 1, self.rows.size - 1)
            pieces.append((count, f, H, self.others[first, last]))

        def total(mu: Any, pick: Any, wrap: Any) -> Any:
            value = wrap(upper(two_rows)) if wrap is np.asarray else two_rows
            for count, f, H, G in pieces:
                f, square = wrap(f), wrap(H) ** 2
                ends_of = square - mu * f**2
                chord = np.maximum(ends_of[:-1], ends_of[1:]) + 0.25 * mu * (f[1:] - f[:-1]) ** 2
                value = value + count * np.minimum(chord, wrap(pick(G))).max(axis=0)
            # linear in r^2
            ends_of = [(wrap(upper(x)) if wrap is np.asarray else x) ** 2 * (value - mu) + mu for x in r]
            return np.maximum(*ends_of)

        plain = [total(mu, lambda G, j=j: G[:, :, j], np.asarray) for j, mu in enumerate(self.mu.tolist())]
        best = np.array(plain).argmin(axis=0)
        return total(wrap(self.mu[best]), lambda G: np.take_along_axis(G, best[None, :, None], axis=2)[:, :, 0], wrap)

    def cover(self) -> tuple[Array, Array]:
        """Boxes of ``(r, theta, e_3 / r)``."""
        least = math.sqrt(2.0 / self.n) * (1.0 - 1e-12)
        ratio = np.linspace(0.0, np.nextafter(math.sqrt(0.5), 1.0), 9)  # e_3 <= e_2 <= e_1
        return boxes(np.linspace(least, 1.0, 9), np.linspace(0.0, np.nextafter(math.pi / 4, 1.0), 9), ratio)

    def maximum(self, tol: float) -> Maximum:
        """The largest bound of a box, in logarithms."""
        return maximise(self.bound, *self.cover(), tol=tol, max_cells=MAX_CELLS)


def _curve(x: Array) -> Array:
    """Places of points ``(dims, count)`` along a curve through the unit cube: near ones have near places."""
    cells, place = (x * 64.0).astype(int), np.zeros(x.shape[1], dtype=int)
    for bit in range(6):
        for k, axis in enumerate(cells):
            place |= ((axis >> bit) & 1) << (len(x) * bit + k)
    return place
