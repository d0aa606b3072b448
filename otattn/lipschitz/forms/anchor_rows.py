r"""One row for ``A = -alpha I``: the row of a token that others use as a far anchor is dead.

Unit ball, notation of :mod:`otattn.lipschitz.forms.negative_identity`: ``a = alpha R^2``, logits ``l_ik = -a <x_i, x_k>``,
``g_i = -a x_i``, and ``c_i = max_k -<x_i, x_k>``, so that the largest logit of row i is ``a c_i``. ``R_i = |V (K_i eps + C_i A
eps_i)|``, ``v = ||V||``.

**Vertices.** For a unit u let ``w = V^T u``, ``b = <w, m_i>``. As ``sum_j P_ij (<w, x_j> - b) = 0``,

.. math:: \langle u, V(K_i\epsilon + C_iA\epsilon_i)\rangle = \sum_j P_{ij}\bigl\{\langle w,\epsilon_j\rangle
          + (\langle w,x_j\rangle - b)(\langle g_i,\epsilon_j\rangle - a\langle x_j,\epsilon_i\rangle)\bigr\},

which is linear in the weights on ``{p >= 0, sum p = 1, sum p_j <w, x_j> = b}``. For every token k, ``<g_i, m_i> = l_ik - log
P_ik - H(P_i) >= l_ik - tau`` (the entropy is at most that of ``P_ik`` and the rest evenly shared). So for each ``lambda >= 0``
the linear function ``lambda (tau + <g_i, sum p_j x_j> - a c_i)`` is non-negative at ``P_i``; added, it makes ``R_i`` at most
the largest value at a vertex. A vertex has at most two tokens j, k, with weights p and ``q = 1 - p``, mean ``m = p x_j + q
x_k`` and ``d = x_j - x_k``; b is its own.

*Without token i.* The part of K is at most ``v s [(1 + (|p-q| + 2pq |d||g_i|)^2)/2]^{1/2}``, ``s^2 = e_j^2 + e_k^2``, as in the
proof of ``row_norm``. With ``pq |d|^2 = p|x_j|^2 + q|x_k|^2 - |m|^2 <= 1 - |m|^2 =: z^2`` and ``2pq|d| <= sqrt(1 - (p-q)^2)
z``, Cauchy-Schwarz gives ``v s sqrt(1 + a^2 z^2/2)``. The part of C is ``pq <w,d> <A^T d, eps_i>``, at most ``v a z^2 e_i``.
The logits of the vertex are at most ``a c_i`` and ``<g_i, m> <= a|m|``. With F concave and decreasing in ``r = |m|``,

.. math:: N = \max_{0\le r\le 1} \{ F(r) + \lambda a \min(r - c_i, 0) \} + \lambda\tau, \qquad
          F(r) = s\sqrt{1 + \tfrac12 a^2(1 - r^2)} + a (1 - r^2) e_i ,

s now from the two largest norms of the other tokens. For any r in [0, 1], ``lambda = -F'(r)/a`` gives ``N <= F(r') + lambda (a
(r' - c_i) + tau)``, ``r' = min(r, c_i)``, when ``c_i >= 0`` (the maximum stands at r, or at the kink). ``r = 0``, ``lambda =
0`` serves every ``c_i``.

*Token i and another k.* With the weight p on i, ``h = |x_i|`` and ``y = <x_i, x_k>``, the value is at most v times

.. math:: p e_i + q e_k + pq a |x_i - x_k| (|2 x_i - x_k| e_i + h e_k) - \lambda a \{p (c_i + h^2) + q (c_i + y)\} + \lambda\tau .

At fixed y both lengths increase with ``|x_k|``, so ``|x_k| = 1``; everything decreases with y, which is at least ``-c_i``; and
``h >= c_i``. So ``y = -max(c_i, 0)`` at worst, the last bracket is at least ``p (c_i + h^2)``, and with ``H = h^2 >= c_i^2``
the lengths are ``|d|^2 = 1 + H + 2c_i``, ``|2x_i - x_k|^2 = 1 + 4H + 4c_i``. At fixed p this is concave in H (geometric means
of affine functions), so tangents in H bound it on cells and the ends of each cell are worst; over p it is a quadratic: its
maximum is in closed form. Call S the maximum.

**Rows.** ``R_i <= v max(N, S)`` for every lambda, and ``R_i <= v (s_i sqrt(1 + a^2 L_i/2) + a L_i e_i)`` with ``L_i = 1 -
((c_i)_+ - tau/a)_+^2`` and ``s_i^2`` the two largest squares of all norms: the argument above for K alone, at ``r = (c_i -
tau/a)_+``, and ``tr C_i <= 1 - |m_i|^2 <= L_i`` as ``a |m_i| >= <g_i, m_i> >= a c_i - tau``. ``phi(a)`` may replace the root.

**Cells.** R increases in ``e = e_i`` and in s, and is homogeneous of degree 1 in them, so the corner bounds a cell of
directions; on a cell of c the lower end is taken where c is subtracted, the upper end where it is added. ``e_k <= s`` in S and
``s_i^2 <= e^2 + s^2``.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import like
from otattn.lipschitz.constants.rows import row_norm
from otattn.lipschitz.constants.self_logit import entropy_gap

_HEIGHTS = 6
"""Cells of ``H = |x_i|^2``; the error of a tangent is of second order."""


@dataclass(frozen=True, eq=False)
class AnchorRows:
    """``R / v`` of a token at the corners of cells: directions ``(s, e)`` down, cells of c across.

    ``a`` a float or an interval, in which case every result is an interval.
    """

    a: Any
    tau: float
    e: Array
    s: Array
    levels: Array

    @classmethod
    def of(cls, a: Any, n: int, angles: Array, levels: Array) -> AnchorRows:
        """The corners of the cells between ``angles`` in ``[0, pi/2]``; c lies between ``levels``, or in ``[-1, 0]``."""
        for name, x, most in (("angles", angles, math.pi / 2), ("levels", levels, 1.0)):
            if x.ndim != 1 or x.size < 2 or x[0] != 0.0 or x[-1] != most or not (np.diff(x) > 0).all():
                raise ValueError(f"{name} must increase from 0 to {most}, received {x!r}.")
        return cls(a, entropy_gap(n), np.sin(angles[1:])[:, None], np.cos(angles[:-1])[:, None], levels)

    @cached_property
    def ends(self) -> tuple[Any, Any]:
        """Lower ends, 0 for ``c < 0``, and upper ends of the cells of c."""
        return like(np.append(0.0, self.levels[:-1]), self.a), like(self.levels, self.a)

    def free(self, r: Any) -> Any:
        """``F(r)`` of the proof."""
        z2 = 1.0 - r * r
        return self.s * np.sqrt(1.0 + 0.5 * self.a**2 * z2) + self.a * z2 * self.e

    def vertices(self, r: Array) -> Any:
        """``max(N, S)`` with the multiplier of the radius r, one for each corner."""
        c0, _ = self.ends
        a, tau, r = self.a, self.tau, like(r, self.a)
        lam = r * (0.5 * a * self.s / np.sqrt(1.0 + 0.5 * a**2 * (1.0 - r * r)) + 2.0 * self.e)
        held = np.minimum(r, c0)
        return np.maximum(self.free(held) + lam * (a * (held - c0) + tau), self.paired(lam) + lam * tau)

    def paired(self, lam: Any) -> Any:
        """``S - lam tau``: the vertices that token i shares with another."""
        c0, c1 = self.ends
        a, e, s, best = self.a, self.e, self.s, 0.0 * lam
        grid = np.linspace(0.0, 1.0, _HEIGHTS + 1)
        for t0, t1 in itertools.pairwise(grid.tolist()):
            H0, H1 = (c0**2 + (1.0 - c0**2) * t for t in (t0, t1))
            H = 0.5 * (H0 + H1)
            X, Z = 1.0 + 2.0 * c1 + H, 1.0 + 4.0 * c1 + 4.0 * H
            one, two = np.sqrt(X * Z), np.sqrt(X * H)
            M = a * (e * one + s * two)
            slope = 0.5 * a * (e * (Z + 4.0 * X) / one + s * (X + H) / two)
            for end in (H0, H1):
                best = np.maximum(best, _peak(e - lam * a * (c0 + end), s, M + slope * (end - H)))
        return best

    def row(self, r: Array) -> Any:
        """The least of the bounds of the row."""
        c0, _ = self.ends
        a, (e, s) = self.a, (like(x, self.a) for x in (self.e, self.s))
        L = 1.0 - np.maximum(c0 - self.tau / a, 0.0) ** 2
        crude = np.minimum(np.sqrt(1.0 + 0.5 * a**2 * L), row_norm(a)) * np.sqrt(e**2 + s**2) + a * L * e
        return np.minimum(self.vertices(r), crude)

    def radii(self) -> Array:
        """Radii r that make ``vertices`` small: it is unimodal in r, and any r is valid."""
        shape = (self.e.size, self.levels.size)
        best, at = np.full(shape, np.inf), np.zeros(shape)
        steps = [(0.0 * at, x) for x in np.linspace(0.0, 1.0, 11)]
        steps.append((np.maximum(self.ends[0] - self.tau / self.a, 0.0) + 0.0 * at, 0.0))

        def attempt(start: Array, step: float) -> None:
            nonlocal best, at
            r = np.clip(start + step, 0.0, 1.0)
            found = self.vertices(r)
            best, at = np.minimum(found, best), np.where(found < best, r, at)

        for start, step in steps:
            attempt(start, step)
        for step in (0.05, 0.025, 0.012, 0.006, 0.003):
            start = at
            attempt(start, step)
            attempt(start, -step)
        at[:, 0] = 0.0  # a negative c has no kink
        return at


def _peak(u: Any, w: Any, M: Any) -> Any:
    """``max_p p u + (1-p) w + p (1-p) M`` over [0, 1], for ``M > 0``."""
    d = u - w
    return np.where(np.abs(d) < M, 0.5 * (u + w) + 0.25 * M + d * d / (4.0 * M), np.maximum(u, w))
