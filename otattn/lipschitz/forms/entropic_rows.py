r"""One row for any A and V: what its own token takes of the mass, and what that says of its logits.

Unit ball, lengths of logits over ``a = ||A||``, values over ``||V||``: below ``||A|| <= 1``, ``||V|| <= 1``, ``g = A x_i``, ``gamma =
|g|``, ``X = a gamma``. Row i has weights p on its own token and ``q = 1 - p`` on the others, these with law Q, entropy ``eta = H(Q)``,
mean y and covariance C_Q; ``d = x_i - y``, ``m = p x_i + q y``. The displacement has token norms ``e = |eps_i|`` and ``e_j``.

**Entropy.** ``log Z = a<g, x_i> - log p = a<g, m> + H(P)`` and ``H(P) = -p log p - q log q + q eta``, so

.. math:: a\langle g, d\rangle = \operatorname{logit} p + \eta, \qquad a\langle g, m\rangle = a\langle g, x_i\rangle - E, \quad
          E = q(\operatorname{logit} p + \eta).

With l at or below ``a<g, x_i>`` (:mod:`otattn.lipschitz.constants.self_logit`): ``tr C_i <= 1 - |m|^2 <= L = 1 - ((l - E)_+ /
X)^2``. And ``a<g, x_k> = log P_ik + log Z``: along ``g/gamma``, C_Q has the variance ``c = nu_Q/X^2`` and C_i ``nu_P/X^2``, nu the
variances of ``log Q`` and ``log P_i``, ``nu_P = q nu_Q + p q (logit p + eta)^2``.

**Varentropy.** ``nu_Q`` is at most its maximum over laws on ``n - 1`` atoms with entropies near eta
(:mod:`otattn.lipschitz.arithmetic.entropy`).

**Own block.** ``C_i = p q d d^T + q C_Q``, ``t = tr C_Q <= 1 - |y|^2``, ``x_i - m = q d``. The part of row i in ``eps_i``,
``V(p eps_i + a p q d (<g, eps_i> + <A^T d, eps_i>) + a q C_Q A eps_i)``, is at most ``e O``,

.. math:: O = p + a\bigl\{pq\,|Vd|\,|Ax_i + A^Td| + q f\bigr\}, \qquad f = \|V C_Q A\| .

``f <= vartheta t`` (field part), and with the bounds ``beta^2, delta^2, y_s`` orthogonal to g of
:mod:`otattn.lipschitz.forms.frontier`, ``mu = ||M_s||``: ``f <= (beta t^{1/2} + c^{1/2}) (delta t^{1/2} + c^{1/2})``, each factor
also at most ``t^{1/2}``; and ``f <= tr(M_s C_Q) <= ((y_s t)^{1/2} + (mu c)^{1/2})^2``. For any theta hence ``f <= theta t + omega``,
omega the maximum of a quadratic in ``t^{1/2}``. By the soft lemma ``f <= tr(M_s C_Q) <= y t + lambda c`` for each of its lines, and as
``t <= 1``, ``omega = (y - theta)_+ + lambda c`` will do. The braces are at most ``q (theta + omega) + W + nu (logit p + eta)/a - xi
gamma^2`` by the members of :mod:`otattn.lipschitz.forms.own_blocks`.

**Others.** For a unit u, ``w = V^T u``, ``v_j = x_j - m``, ``N_j = |w + a<w, v_j> g|``: ``sum_k P_ik N_k^2 = |w|^2 + X^2 w^T C_i w
<= Omega = 1 + X^2 lam``, lam at most L and, as w has at most beta across g, ``(beta L^{1/2} + (1 - beta^2)^{1/2}
(nu_P/X^2)^{1/2})^2`` where this increases up to beta. By the soft lemma for ``V^T V``, ``w^T C_i w <= tr(V^T V C_i)`` is at most ``y L
+ lambda nu_P/X^2``, too. The part in the other tokens is at most ``sum P_ij N_j e_j <= (Omega q sum Q_j e_j^2)^{1/2}``.

*Without the own token.* It is also at most ``q (T sum Q_j e_j^2)^{1/2}``, ``T = sum Q_j N_j^2``. As ``v_j = (x_j - y) - p d``, and
with ``g' = g/gamma``, w' the part of w across g, ``l = logit p + eta`` (``<g', d> = l/X``),

.. math:: T = |w - ap\langle w,d\rangle g|^2 + X^2w^TC_Qw = |w'|^2 + w^TKw, \qquad K = (g' - pXd)(g' - pXd)^T + X^2C_Q .

Here ``<g', K g'> = (1 - pl)^2 + nu_Q =: k`` and ``tr K = 1 - 2pl + X^2 (t + p^2 |d|^2)``. As ``tr C_i = pq |d|^2 + q t <= L`` and
``t <= L_Q = 1 - ((l_i - l)_+/X)^2``, ``l_i`` at or below ``a<g, x_i> = a<g, y> + l``: ``q^2 (t + p^2 |d|^2) <= q (p L + q min(q L_Q,
L))``. ``|w'| <= beta``. So T is at most the maximum of ``(k^{1/2} cos + (tr K - k)^{1/2} sin)^2 + sin^2`` over the angles with ``sin
<= beta``, a form in two variables, and at most ``beta^2 + y tr K + lambda k`` by the soft lemma.

*The largest norm.* A token of weight r has ``r <w, v>^2 <= lam (1 - r)``, ``r |v|^2 <= L (1 - r)`` and ``a<g, v> = log r + H(P)``. So
``r N <= r + X (lam r (1 - r))^{1/2}``, and as ``I + b v^T`` has the norm ``(|b||v| + (4 (1 + <b, v>) + |b|^2 |v|^2)^{1/2})/2``,

.. math:: r N \le \tfrac12\bigl(T^{1/2} + (4 r^2 (1 + \log r + H(P))_+ + T)^{1/2}\bigr), \qquad T = X^2 L r(1 - r) .

With kappa the largest of the smaller bounds over r, the largest norm ``e_1`` may be lowered to z at the price ``(e_1 - z) kappa``. An
atom ``r/q`` leaves Q an entropy of at most ``h(r/q) + (1 - r/q) log(n - 2)``.

**Mean square.** With the ``e_j`` known, eta bounds ``S = sum Q_j e_j^2`` (:func:`~otattn.lipschitz.arithmetic.entropy.mean_square`).

**Cells.** On a cell of p, eta and gamma take everything at its largest: ``R_i <= e O + (e_1 - z) kappa + root S^{1/2}``, S at the
least eta. Cells with ``l - E > X`` are empty. E is concave in p: its tangent at the upper end bounds it; on the
last cell ``E <= q (log(1/q) + eta)``, increasing for ``q <= 1/e``. A row is bounded by the largest of the cells, which is convex in e.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array
from otattn.lipschitz.arithmetic.entropy import entropies, mean_square, varentropies, varentropy
from otattn.lipschitz.arithmetic.intervals import is_interval, like, lower, upper, xlogy
from otattn.lipschitz.forms.frontier import TILTS, Frontier
from otattn.lipschitz.forms.own_blocks import MASSES, OwnBlocks

GAMMA = np.linspace(0.0, 1.0, 193)
"""Cells of gamma."""
HEAVIEST = np.linspace(0.0, 1.0, 61)
"""Cells of r."""
LOWERED = (0.0, 0.3, 0.6, 1.0)
"""Where z stands between the second norm and the first."""
_SLACK = 6e-3
"""Cells within this of another are merged with it."""
_COARSE = 2e-2
"""The same for large boxes."""


@dataclass(frozen=True, eq=False)
class Sight:
    """What is known of the rows on the cells of gamma between ``GAMMA``: columns ``(cells, 1)``, floats or intervals.

    ``low`` bounds ``a <g, x_i>`` from below, ``field`` is vartheta, ``forms`` are the bounds of the frontier ``(forms, cells, 1)`` and
    ``norms`` those of ``||M_s||``; ``varied`` bounds the variance of logits on each cell of eta. ``values`` and ``both`` are lines
    ``(y, lambda)`` of the soft lemma, for ``V^T V`` and for the ``M_s``, ``(2, TILTS, cells, 1)``.
    """

    a: Any
    n: int
    low: Any
    field: float
    forms: Any
    norms: Array
    varied: Array
    values: Array
    both: Array

    @classmethod
    def of(cls, a: Any, n: int, low: Any, field: float, frontier: Frontier) -> Sight:
        """``low`` has one entry a cell."""
        forms = like(frontier.at(GAMMA[:-1])[:, :, None], a)
        varied = np.minimum(varentropies(n - 1, entropies(n)), varentropy(n - 1))
        values, both = (
            np.array(frontier.least(GAMMA[:-1], TILTS, norm, values=one)[:2])[..., None]
            for norm, one in ((1.0, True), (field, False))
        )
        return cls(a, n, low[:, None], field, forms, frontier.norms[2:], varied, values, both)

    @property
    def gamma(self) -> tuple[Any, Any]:
        """Ends of the cells."""
        return like(GAMMA[:-1, None], self.a), like(GAMMA[1:, None], self.a)

    def beyond(self, theta: Any) -> Any:
        """omega of the proof for each theta ``(members, 1, 1)``, on the cells of gamma and eta."""
        c = self.along(like(self.varied, self.a))
        root = np.sqrt(c)
        beta, delta = (np.minimum(np.sqrt(x), 1.0) for x in self.forms[:2])
        lines = [(beta * delta, (beta + delta) * root, c), (delta, root, 0.0 * c), (beta, root, 0.0 * c)]
        lines += [
            (y, 2.0 * np.sqrt(y * c * mu), c * mu) for y, mu in zip(self.forms[2:], self.norms.tolist(), strict=True)
        ]
        best = np.maximum(self.field - theta, 0.0) + 0.0 * c
        for slope, bend, level in lines:
            free = np.maximum(np.maximum(theta - slope, 0.5 * bend), 1e-300)
            omega = np.where(
                2.0 * (theta - slope) >= bend, level + bend**2 / (4.0 * free), slope - theta + bend + level
            )
            best = np.minimum(best, omega)
        for y, slope in zip(*(like(x, self.a) for x in self.both), strict=True):
            best = np.minimum(best, np.maximum(y - theta, 0.0) + slope * c)
        return np.maximum(best, 0.0)

    def along(self, varied: Any) -> Any:
        """The variance along g of logits of this variance."""
        return np.minimum(varied / (self.a * np.maximum(GAMMA[:-1, None], 1e-9)) ** 2, 1.0)


@dataclass(frozen=True, eq=False)
class EntropicRows:
    """Cells that bound every row: ``R <= e own + (e_1 - z) cap + root S(entropy)^{1/2}``, arrays with one entry a cell, outward."""

    entropy: Array
    own: Array
    cap: Array
    root: Array

    @classmethod
    def of(cls, sight: Sight, blocks: OwnBlocks) -> EntropicRows:
        """The cells of p, eta and gamma."""
        table, _ = every_cell(sight, blocks)
        parts = [_merged(table[:, table[0] == x], _SLACK) for x in np.unique(table[0])]
        return cls(*_merged(np.concatenate(parts, axis=1), _SLACK))

    def row(self, e: Array, most: Sequence[Any], next_one: Any, rem: Any, others: int) -> Array:
        """Bounds ``(levels, boxes)`` for own norms ``e (levels, boxes)``; the largest others ``most``, in order.

        The ``others`` are below ``next_one``, their squares sum to at most ``rem``.
        """
        inputs, whole = (*most, next_one, rem), np.arange(self.own.size)
        # a bound for the largest norms of all boxes holds on each: cells where it is small are done with
        widest = [like(np.array([upper(x).max()]), x) for x in inputs]
        above = e.max(axis=1)[:, None] * self.own + self._rest(whole, widest, others)[:, 0]
        least = [np.array([upper(x).min()]) for x in inputs]
        below = e.min(axis=1)[:, None] * self.own + self._rest(whole, least, others)[:, 0]
        live = above > below.max(axis=1, keepdims=True)
        done = np.where(live, 0.0, above).max(axis=1)
        index = np.flatnonzero(live.any(axis=0))
        rest, found = self._rest(index, inputs, others), np.repeat(done[:, None], e.shape[1], axis=1)
        for k, at in enumerate(live[:, index]):
            if at.any():
                np.maximum(found[k], (self.own[index[at], None] * e[k] + rest[at]).max(axis=0), out=found[k])
        return found * (1.0 + 8.0 * EPS)

    @cached_property
    def coarse(self) -> EntropicRows:
        """Fewer and larger cells that bound every row too."""
        return EntropicRows(*_merged(np.array([self.entropy, self.own, self.cap, self.root]), _COARSE))

    def _rest(self, index: Any, inputs: Sequence[Any], others: int) -> Array:
        """Bounds ``(index, boxes)`` of the part of the others, by some of the cells."""
        kinds, which = np.unique(self.entropy[index], return_inverse=True)
        *most, next_one, rem = inputs
        one, floor = most[0], np.maximum(upper(most[1]), upper(next_one))
        rest = np.full((index.size, floor.size), np.inf)
        for share in LOWERED:
            z = np.minimum(floor + share * np.maximum(upper(one) - floor, 0.0), upper(one))
            S = np.sqrt(mean_square([like(z, one), *most[1:]], next_one, rem, others, kinds))
            each = S[which]
            each *= self.root[index, None]
            if (lowered := upper(one - z)).any():
                each += lowered * self.cap[index, None]
            np.minimum(rest, each, out=rest)
        return rest


def every_cell(sight: Sight, blocks: OwnBlocks) -> tuple[Array, Array]:
    """Columns ``(entropy, own, cap, root)`` of the cells of p, eta and gamma, and the members of the blocks that decide."""
    theta, place = np.unique(blocks.members[:, 1], return_inverse=True)
    omega = sight.beyond(like(theta[:, None, None], sight.a))
    found = [_cells(sight, blocks, at, (omega, place)) for at in range(MASSES.size - 1)]
    return np.concatenate([x for x, _ in found], axis=1), np.unique(np.concatenate([x for _, x in found]))


def _cells(sight: Sight, blocks: OwnBlocks, at: int, beyond: tuple[Any, Any]) -> tuple[Array, Array]:
    """Those of the cells of eta and gamma on one of p.

    ``beyond`` are the omega, and which of them each member has.
    """
    a, low, (g0, g1), eta = sight.a, sight.low, sight.gamma, entropies(sight.n)
    p0, p1 = (like(x, a) for x in MASSES[at : at + 2])
    high, one = like(eta[1:], a), like(1.0, a)
    q, X = one - p0, a * g1
    if MASSES[at + 1] < 1.0:
        logit = np.log(p1) - np.log(one - p1)
        E = (one - p1) * (logit + high) + (p1 - p0) * np.maximum(logit + high - one / p1, 0.0)
    else:
        logit, E = 0.0, q * (high - np.log(q))
    excess = np.maximum(low - E, 0.0)
    L = np.maximum(1.0 - (excess / X) ** 2, 0.0) + (0.0 if is_interval(a) else 64.0 * EPS)
    tied = X * X * _seen(sight, L, _own_varied(at, eta, a) + q * sight.varied)
    root = np.sqrt(q * (1.0 + tied))
    if 0 < at < MASSES.size - 2:
        root = np.minimum(root, np.sqrt(_apart(sight, at, L)))
    cap = _heaviest(at, q, eta, sight.n, X * X * L, tied)
    index = np.flatnonzero(blocks.members[:, 0] == at)
    theta, nu, xi = (like(x[:, None, None], a) for x in blocks.members[index][:, [1, 3, 4]].T)
    omegas, place = beyond
    braces = q * (theta + omegas[place[index]]) + like(blocks.W[index][:, None, None], a)
    own = upper(p1 + a * (braces - np.minimum(xi * g0**2, xi * g1**2)) + nu * (logit + high))
    live = ~(lower(low - E) > upper(X) * (1.0 + 1e-12))  # a nan is no empty cell
    values = [np.maximum(own.min(axis=0), 0.0), upper(cap), upper(root)]
    each = np.array([np.broadcast_to(x, live.shape) * (1.0 + 8.0 * EPS) for x in values])
    each = np.where(live, each, -np.inf)
    # of the cells of gamma those that no other exceeds in all three; of equals the first
    over: Any = np.all(each[:, None] >= each[:, :, None], axis=0)
    same = over & over.transpose(1, 0, 2)
    before = np.tri(len(over), k=-1)[:, :, None] > 0.0
    live &= ~np.any((over & ~same) | (same & before), axis=1)
    least = np.broadcast_to(eta[:-1], live.shape)
    return np.array([least[live], *each[:, live]]), index[np.unique(own.argmin(axis=0))]


def _own_varied(at: int, eta: Array, a: Any) -> Any:
    """A bound of ``p q (logit p + eta)^2`` on a cell of p, for each of eta."""
    p0, p1 = (like(x, a) for x in MASSES[at : at + 2])
    low, high = like(eta[:-1], a), like(eta[1:], a)
    if MASSES[at] == 0.0:
        return p1 * np.maximum(np.log(p1) ** 2, high**2)
    if MASSES[at + 1] == 1.0:
        return like(1e6, a) + 0.0 * high  # far above p q (logit p + eta)^2 < (3 + log n)^2 / 20: no limit
    first, last = (np.log(p) - np.log(1.0 - p) for p in (p0, p1))
    middle = like(min(max(float(MASSES[at]), 0.5), float(MASSES[at + 1])), a)
    return middle * (1.0 - middle) * np.maximum(np.abs(first + low), np.abs(last + high)) ** 2


def _seen(sight: Sight, L: Any, varied: Any) -> Any:
    """A bound of ``w^T C_i w``."""
    along = sight.along(varied)
    beta = np.minimum(sight.forms[0], 1.0)
    tied = (np.sqrt(beta * L) + np.sqrt(np.maximum(1.0 - beta, 0.0) * along)) ** 2
    lam = np.where(beta * (L + along) <= L, np.minimum(tied, L), L)
    for y, slope in zip(*(like(x, sight.a) for x in sight.values), strict=True):
        lam = np.minimum(lam, y * L + slope * along)
    return lam


def _apart(sight: Sight, at: int, L: Any) -> Any:
    """A bound of ``q^2 T`` on a cell of p that has no end at 0 or 1, for each of eta."""
    a, low, X, one = sight.a, sight.low, sight.a * sight.gamma[1], like(1.0, sight.a)
    p0, p1 = (like(x, a) for x in MASSES[at : at + 2])
    eta, q0, q1 = like(entropies(sight.n), a), one - p0, one - p1
    first, last = (np.log(p) - np.log(q) + h for p, q, h in ((p0, q0, eta[:-1]), (p1, q1, eta[1:])))
    least, most = np.minimum(p0 * first, p1 * first), np.maximum(p0 * last, p1 * last)
    lost = 0.0 if is_interval(a) else 64.0 * EPS
    LQ = np.maximum(1.0 - (np.maximum(low - last, 0.0) / X) ** 2, 0.0) + lost
    middle = like(min(max(float(MASSES[at]), 0.5), float(MASSES[at + 1])), a)
    free = 1.0 - 2.0 * least
    trace = np.maximum(q0 * q0 * free, q1 * q1 * free)
    trace = trace + X * X * (middle * (1.0 - middle) * L + q0 * q0 * np.minimum(q0 * LQ, L))
    trace = np.maximum(trace, 0.0) + lost * (1.0 + X * X)
    along = q0 * q0 * (np.maximum((1.0 - least) ** 2, (1.0 - most) ** 2) + sight.varied)
    nearest = np.maximum(np.maximum(1.0 - most, least - 1.0), 0.0)
    rest = np.maximum(trace - (q1 * nearest) ** 2, 0.0)
    # the largest of (along^{1/2} cos + rest^{1/2} sin)^2 + q^2 sin^2, and it at the largest sine
    total, square = q0 * q0 + along + rest, np.minimum(sight.forms[0], 1.0)
    best = 0.5 * (total + np.sqrt(np.maximum(total**2 - 4.0 * q0 * q0 * along, 0.0) + 16.0 * EPS * total**2))
    cosine, sine = np.sqrt(np.maximum(1.0 - square, 0.0)), np.sqrt(square)
    end = (np.sqrt(along) * cosine + np.sqrt(rest) * sine) ** 2 + q0 * q0 * square
    rises = (q0 * q0 + rest - along) * sine * cosine + np.sqrt(along * rest) * (1.0 - 2.0 * square)
    best = np.where(lower(rises) > 0.0, np.minimum(best, end), best)
    for y, slope in zip(*(like(x, a) for x in sight.values), strict=True):
        best = np.minimum(best, q0 * q0 * square + y * trace + slope * along)
    return best


def _heaviest(at: int, q: Any, eta: Array, n: int, T: Any, tied: Any) -> Any:
    """kappa, the largest over the cells of r; ``T = X^2 L``, ``tied = X^2 lam``, on a cell of p."""
    p = like(min(max(float(MASSES[at]), 0.5), float(MASSES[at + 1])), T)
    own = -xlogy(p, p) - xlogy(1.0 - p, 1.0 - p)
    worst: Any = 0.0 * T
    for r0, r1 in itertools.pairwise(HEAVIEST.tolist()):
        if r0 >= float(upper(q)):
            break
        middle, r = like(min(max(0.5, r0), r1), T), like(r1, T)
        gap = np.maximum(1.0 + np.log(r) + own + q * like(eta[1:], T), 0.0)
        spread = T * middle * (1.0 - middle)
        kappa = 0.5 * (np.sqrt(spread) + np.sqrt(4.0 * r * r * gap + spread))
        kappa = np.minimum(kappa, r + np.sqrt(tied * middle * (1.0 - middle)))
        # Q has an atom of at least r0/q
        share, most = r0 / float(upper(q)), math.inf
        if share > 1.0 / (n - 1.0):
            atom = like(share * (1.0 - 4.0 * EPS), T)
            rest = -xlogy(atom, atom) - xlogy(1.0 - atom, 1.0 - atom) + (1.0 - atom) * np.log(like(n - 2.0, T))
            most = float(upper(rest)) + 1e-12
        worst = np.where(most >= eta[:-1], np.maximum(worst, kappa), worst)
    return worst


def _merged(table: Array, slack: float) -> Array:
    """Columns ``(entropy, own, cap, root)``, fewer: the largest of those that one among them exceeds but for the slack."""
    signed = table * np.array([-1.0, 1.0, 1.0, 1.0])[:, None]
    raised = signed * (1.0 + slack * np.array([0.0, 1.0, 1.0, 1.0])[:, None])
    left = np.argsort(-signed.sum(axis=0), kind="stable")
    merged: list[Array] = []
    while left.size:
        inside = (raised[:, left[0], None] >= signed[:, left]).all(axis=0)
        inside[0] = True  # a nan, too
        merged.append(signed[:, left[inside]].max(axis=1))
        left = left[~inside]
    return np.reshape(merged, (-1, 4)).T * np.array([-1.0, 1.0, 1.0, 1.0])[:, None]
