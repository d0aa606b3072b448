r"""One row for any A and V: K and C together on two tokens, and what the row's logits leave of them.

Unit ball, lengths of logits over ``a = ||A||``, values over ``||V||``: below ``||A|| <= 1``, ``||V|| <= 1``, ``g_i = A x_i``, and the
logits are ``a <g_i, x_k>``. ``eps`` has token norms ``e_k``; for row i let ``e = e_i`` and ``s^2`` be the two largest squares of the
others'. ``R_i = |V (K_i eps + a C_i A eps_i)|`` with ``K_i eps = sum_j P_ij (I + a (x_j - m_i) g_i^T) eps_j``.

**Vertices.** For a unit u let ``w = V^T u``, ``b = <w, m_i>``. As ``sum_j P_ij (<w, x_j> - b) = 0``,

.. math:: \langle u, V(K_i\epsilon + aC_iA\epsilon_i)\rangle = \sum_j P_{ij}\bigl\{\langle w,\epsilon_j\rangle
          + a(\langle w,x_j\rangle - b)(\langle g_i,\epsilon_j\rangle + \langle A^Tx_j,\epsilon_i\rangle)\bigr\},

linear in the weights on ``{p >= 0, sum p = 1, sum p_j <w, x_j> = b}``. With ``L_i = max_k <g_i, x_k>``, ``a <g_i, m_i> >= a L_i -
tau`` (:mod:`otattn.lipschitz.constants.self_logit`; its argument holds for every token in place of i). So for each ``lambda >= 0`` the
linear ``lambda B``, ``B = tau + a <g_i, sum p_j x_j> - a L_i``, is non-negative at ``P_i``; added, it makes ``R_i`` at most the
largest value at a vertex: at most two tokens j, k, weights p and ``q = 1 - p``, mean ``m = p x_j + q x_k``, ``d = x_j - x_k``,
``|d| <= 2`` and ``pq |d|^2 = p|x_j|^2 + q|x_k|^2 - |m|^2 <= 1 - |m|^2 =: z^2``. Both tokens have logits of at most ``a L_i``:
with omega the weight of the lower, ``B <= tau - omega a |<g_i, d>|`` and ``B <= tau``; and ``B <= tau + a (<g_i, m> - l)`` for every l
at or below the own logit ``<g_i, x_i>``.

**Without token i**, ``gamma = |g_i|`` in ``[gamma_0, gamma_1]``, ``rho = |p - q|``. As for
:func:`~otattn.lipschitz.constants.rows.row_norm`, the part of K is at most ``s ((1 + w^2)/2)^{1/2}``, ``w = rho + 2pq a gamma
|Vd|``, and at most ``s phi(a gamma)``; the part of C is ``a pq |Vd| |A^Td| e``.

*Plain.* ``|Vd| <= |d|``, ``|Vd| |A^Td| <= vartheta |d|^2`` (``vartheta`` of the field part, at most 1), ``2pq |d| <= sqrt(1 - rho^2)
z`` and Cauchy-Schwarz: at most ``F(|m|)`` with ``beta = 1``, ``sigma = vartheta`` in

.. math:: F(r) = s\sqrt{1 + \tfrac12\beta^2a^2\gamma_1^2(1 - r^2)} + a\sigma(1 - r^2) e .

*Tied.* Write ``d = d' + kappa g_i/gamma``, d' orthogonal to ``g_i``: there the forms of :mod:`otattn.lipschitz.forms.frontier` have
the bounds ``beta^2, delta^2, y_s``. Then

- ``|Vd| <= beta |d| + |kappa|``, and the part of K grows at most by ``s 2pq a gamma |kappa| / sqrt 2`` over that with ``beta |d|``;
- ``|Vd| |A^Td| <= |d| (min(beta, delta) |d| + |kappa|)``: sigma is the minimum, plus ``P |kappa|`` with ``P = 2``;
- or, with ``mu >= ||M_s||`` and ``|<d', M_s g_i>| <= mu |d'| gamma / 2`` (d' and ``g_i`` are orthogonal, M_s is PSD): ``|Vd| |A^Td|
  <= <d, M_s d> <= y_s |d|^2 + |kappa| (mu |d'| + (mu - y_s) |kappa|)``: ``sigma = y_s`` and ``P = 2 sqrt(mu^2 + (mu - y_s)^2)``.

By the soft lemma d itself has the share ``c = kappa^2/|d|^2`` along ``g_i``:

- for a line of M_s: ``|Vd| |A^Td| <= min(vartheta |d|^2, y |d|^2 + lambda kappa^2)``: ``sigma = y <= vartheta``, and as the lesser of
  two numbers is below their geometric mean, ``P = 2 min(lambda, (lambda (vartheta - y))^{1/2})`` (``|d| <= 2``);
- for one of ``V^T V``: ``|Vd| <= min(|d|, (y |d|^2 + lambda kappa^2)^{1/2})``, the second convex in kappa and ``|d|`` at ``kappa^2 =
  |d|^2 (1 - y)/lambda``: below the chord, ``beta = y^{1/2}``, plus ``N |kappa|`` with ``N = (lambda (1 - beta)/(1 + beta))^{1/2}`` (1
  for the beta above).

As ``pq = omega (1 - omega)`` the terms in kappa are at most ``omega (1 - omega) a gamma |kappa| (sqrt2 N s + P e / gamma_0)`` (the
first only if beta is used), and ``lambda_1 omega a gamma |kappa|`` pays for them when ``1 - omega <= h`` and ``lambda_1 = h (sqrt2 N
s + P e / gamma_0)``: at most ``F(|m|)`` with these beta, sigma. The other vertices have ``rho > t = 2h - 1``: there, from the plain
bounds with ``4pq = 1 - rho^2`` and ``|d| <= 2``,

.. math:: s\sqrt{\tfrac12(1 + w_t^2)} + a\vartheta(1 - t^2)e, \qquad w_t = \max_{\rho\ge t}\{\rho + a\gamma_1(1 - \rho^2)\} .

*Own logit.* Let ``l = c gamma_1`` be at or below ``<g_i, x_i>``, c in [0, 1]. ``<g_i, m> <= gamma_1 |m|``, so for ``lambda_2 >= 0``
these vertices, with the pay, are at most ``max_r {F(r) + lambda_2 a gamma_1 min(r - c, 0)} + lambda tau``, ``lambda`` at least
``lambda_1 + lambda_2`` (more costs only tau). F is concave and decreases: for any r in [0, 1], ``lambda_2 = -F'(r)/(a gamma_1)`` gives
``N = F(r') + lambda_2 a gamma_1 (r' - c) + lambda tau``, ``r' = min(r, c)``. Where the own logit may be negative c is 0.

**With token i**: :mod:`otattn.lipschitz.forms.own_pairs`, plus ``lambda tau``; ``e_k <= s``.

**Apart.** ``R_i <= (e^2 + s^2)^{1/2} min(sqrt(1 + a^2 gamma_1^2 L/2), phi(a gamma_1)) + a vartheta L e``, ``L = 1 - (l - tau/a)_+^2 /
gamma_1^2 >= 1 - |m_i|^2 >= tr C_i``: F for K alone, its lambda the slope at ``r = (l - tau/a)_+ / gamma_1``, any two tokens.

**Cells.** Each bound increases in e and s with its multipliers fixed, and is homogeneous of degree 1 with them: the corner bounds a
cell of directions ``(s, e)``. The bound of a row is the largest over the cells of gamma.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import like, lower, upper
from otattn.lipschitz.certificate import multiplier
from otattn.lipschitz.constants.rows import row_norm
from otattn.lipschitz.forms.frontier import BALANCES, Frontier
from otattn.lipschitz.forms.own_pairs import OwnPairs

SHARES = (0.65, 0.8, 1.0)
"""The numbers h."""
LINES = np.array([0.03, 0.3])
"""Tilts of the lines."""
FIELDS = 2 + BALANCES.size
"""Bounds of the part of C: plain, that of beta and delta, those of ``M_s``; then one a line."""


def choices() -> Array:
    """Admissible ``(beta, bound of C, h)``, the plain one first; beta none, that of the lemma, or one a line."""
    hard, lines = range(FIELDS), range(LINES.size)
    tied = [(b, f) for b in (0, 1) for f in hard if b or f] + [(b, FIELDS + k) for k in lines for b in (0, 2 + k)]
    tied += [(2 + k, 0) for k in lines]
    return np.array([(0.0, 0.0, 1.0), *((b, f, h) for b, f in tied for h in SHARES)])


@dataclass(frozen=True, eq=False)
class Cells:
    """What is known of the rows on each cell of ``gamma = |g| / a``: arrays with one entry a cell, floats or intervals.

    ``a`` a float or an interval, in which case every result is an interval; ``c`` and ``spread`` are c and L of the proof,
    ``beta`` and ``toll`` (N of the proof) ``(2 + LINES, cells)``, ``sigma`` and ``price`` ``(FIELDS + LINES, cells)``.
    """

    a: Any
    tau: float
    gamma: tuple[Array, Array]
    c: Any
    spread: Any
    beta: Any
    toll: Any
    sigma: Any
    price: Any

    @classmethod
    def of(cls, a: Any, tau: float, edges: Array, low: Any, field: float, frontier: Frontier) -> Cells:
        """``low`` bounds ``a <g_i, x_i>`` on each cell, from below; ``field`` is vartheta. Empty cells are left out."""
        g0, g1 = edges[:-1], edges[1:]
        live = ~(lower(low) > upper(like(g1, a) * a) * (1.0 + 1e-12))  # a nan is no empty cell
        g0, g1, low = g0[live], g1[live], low[live]
        x = like(g1, a) * a
        c = np.minimum(np.maximum(low, 0.0) / x, 1.0)
        spread = 1.0 - np.minimum(np.maximum(low - tau, 0.0) / x, 1.0) ** 2
        bounds = like(frontier.at(g0), a)
        beta, delta = (np.minimum(np.sqrt(x), 1.0) for x in (bounds[0], bounds[1]))
        mu = like(frontier.norms[2:, None], a) + 0.0 * bounds[2:]
        one = 0.0 * beta + 1.0
        sigma = np.concatenate([(field * one)[None], np.minimum(beta, delta)[None], bounds[2:]])
        price = np.concatenate(
            [(0.0 * one)[None], (2.0 * one)[None], 2.0 * np.hypot(mu, np.maximum(mu - bounds[2:], 0.0))]
        )
        y, slope = (like(x, a) for x in frontier.least(g0, LINES, field, values=False)[:2])
        sigma = np.minimum(np.concatenate([sigma, y]), field)
        lacking = np.maximum(field - sigma[FIELDS:], 0.0)
        price = np.concatenate([price, 2.0 * np.minimum(slope, np.sqrt(slope * lacking))])
        y, slope = (like(x, a) for x in frontier.least(g0, LINES, 1.0, values=True)[:2])
        root = np.minimum(np.sqrt(y), 1.0)
        toll = np.concatenate([(0.0 * one)[None], one[None], np.sqrt(slope * (1.0 - root) / (1.0 + root))])
        beta = np.concatenate([one[None], beta[None], root])
        return cls(a, tau, (g0, g1), c, spread, beta, toll, sigma, price)

    def select(self, index: Array) -> Cells:
        """Some of the cells."""
        g0, g1 = self.gamma
        return Cells(
            self.a,
            self.tau,
            (g0[index], g1[index]),
            self.c[index],
            self.spread[index],
            self.beta[:, index],
            self.toll[:, index],
            self.sigma[:, index],
            self.price[:, index],
        )

    def apart(self, e: Any, s: Any) -> Any:
        """K and C each for itself."""
        x = self.a * like(self.gamma[1], self.a)
        root = np.minimum(np.sqrt(1.0 + 0.5 * x**2 * self.spread), row_norm(x))
        return np.sqrt(e * e + s * s) * root + self.a * self.sigma[0] * self.spread * e

    def vertices(self, e: Any, s: Any, choice: Array, r: Array) -> tuple[Any, Any]:
        """``lambda_1 + lambda_2``, and ``N - lambda tau`` with it, for a choice and an r each of shape ``(directions, cells)``."""
        a, cells = self.a, np.arange(self.gamma[0].size)
        table = choices()[choice]
        tied, form, h = table[..., 0].astype(int), table[..., 1].astype(int), like(table[..., 2], a)
        g0, g1, r = (like(x, a) for x in (np.where(self.gamma[0] > 0.0, self.gamma[0], 1e-300), self.gamma[1], r))
        beta, toll = self.beta[tied, cells], self.toll[tied, cells]
        sigma, price = self.sigma[form, cells], self.price[form, cells]
        first = h * (np.sqrt(like(2.0, a)) * s * toll + price * e / g0)
        square = 0.5 * (beta * a * g1) ** 2
        root = np.sqrt(1.0 + square * (1.0 - r * r))
        second = r * (s * square / root + 2.0 * a * sigma * e) / (a * g1)
        held = np.minimum(r, self.c)
        top = np.sqrt(1.0 + square * (1.0 - held * held))
        top = np.where(upper(r) > 0.0, top, np.minimum(top, row_norm(a * g1)))
        value = s * top + a * sigma * (1.0 - held * held) * e + second * a * g1 * (held - self.c)
        t = 2.0 * h - 1.0
        far = np.minimum(np.maximum(t, 0.5 / (a * g1)), 1.0)
        w = far + a * g1 * (1.0 - far * far)
        side = s * np.sqrt(0.5 * (1.0 + w * w)) + a * self.sigma[0] * (1.0 - t * t) * e
        plain = (tied == 0) & (form == 0)
        return first + second, np.where(plain, value, np.maximum(value, side))


@dataclass(frozen=True, eq=False)
class VertexRows:
    """Bounds of a row at the corners of cells of directions ``(s, e)``, down."""

    cells: Cells
    pairs: OwnPairs
    e: Any
    s: Any
    levels: Array

    @classmethod
    def of(cls, cells: Cells, pairs: OwnPairs, angles: Array, levels: Array) -> VertexRows:
        """The corners of the cells between ``angles`` in ``[0, pi/2]``; lambda is one of ``levels``."""
        if angles.ndim != 1 or angles.size < 2 or angles[0] != 0.0 or angles[-1] != math.pi / 2:
            raise ValueError(f"angles must increase from 0 to pi/2, received {angles!r}.")
        if not (np.diff(angles) > 0).all() or levels.ndim != 1 or not (np.diff(levels) > 0).all() or levels[0] != 0.0:
            raise ValueError(f"angles must increase, levels too, from 0; received {angles!r} and {levels!r}.")
        e, s = (like(x, cells.a) for x in (np.sin(angles[1:])[:, None], np.cos(angles[:-1])[:, None]))
        return cls(cells, pairs, e, s, levels)

    @cached_property
    def paired(self) -> Any:
        """Values ``(directions, levels)`` of the vertices with token i, without ``lambda tau``."""
        return self.pairs.values(self.e, self.s, self.cells.a, self.levels)

    def row(self, choice: Array, r: Array, level: Array) -> Any:
        """Bounds ``(directions, cells)`` with the multipliers of each."""
        need, value = self.cells.vertices(self.e, self.s, choice, r)
        lam = self.levels[level]
        own = self.paired[np.arange(level.shape[0])[:, None], level]
        both = np.maximum(value, own) + like(lam, self.cells.a) * self.cells.tau
        both = np.where(upper(need) <= lam, both, np.inf)
        return np.minimum(both, self.cells.apart(self.e, self.s))

    def proved(self, multipliers: Mapping[str, Array]) -> Array:
        """The bound of each direction, outward, from stored ``choice``, ``radii`` and ``level``."""
        down, across = len(self.e), self.cells.gamma[0].size
        choice = _integers(multipliers, "choice", (down, across), len(choices()))
        level = _integers(multipliers, "level", (down, across), self.levels.size)
        radii = multiplier(multipliers, "radii", (down, across), sign=True)
        if (radii > 1.0).any():
            raise ValueError(f"radii must be at most 1, received {radii.max()}.")
        return np.asarray(upper(self.row(choice, radii, level))).max(axis=1)


def _integers(multipliers: Mapping[str, Array], name: str, shape: tuple[int, ...], count: int) -> Array:
    """Indices below ``count``."""
    value = multiplier(multipliers, name, shape, sign=True)
    if not ((value == np.floor(value)) & (value < count)).all():
        raise ValueError(f"{name} must be integers below {count}, received {value!r}.")
    return value.astype(int)
