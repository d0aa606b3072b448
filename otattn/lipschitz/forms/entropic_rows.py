r"""One row for any A and V: what the row's own token takes of its mass, and what that says of the logits.

Unit ball, lengths of logits over ``a = ||A||``, values over ``||V||``: below ``||A|| <= 1``, ``||V|| <= 1``, ``g = A x_i``, ``gamma =
|g|``, ``X = a gamma``. Row i has weights p on its own token, ``q = 1 - p`` on the others, these with law Q, entropy ``eta = H(Q)`` and
mean y; ``d = x_i - y``, ``m = p x_i + q y``. The displacement has token norms ``e = |eps_i|`` and ``e_j``.

**Entropy.** ``log Z = a<g, x_i> - log p = a<g, m> + H(P)`` and ``H(P) = -p log p - q log q + q eta``, so

.. math:: a\langle g, d\rangle = \operatorname{logit} p + \eta, \qquad a\langle g, m\rangle = a\langle g, x_i\rangle - E, \quad
          E = q(\operatorname{logit} p + \eta).

With ``l <= a<g, x_i>`` (:mod:`otattn.lipschitz.constants.self_logit`), ``tr C_i <= 1 - |m|^2 <= L = 1 - ((l - E)_+ / X)^2``.

**Own block.** ``C_i = p q d d^T + q C_Q`` with ``tr C_Q <= 1 - |y|^2``, and ``x_i - m = q d``. The part of row i in ``eps_i`` is
``V(p eps_i + a p q d (<g, eps_i> + <A^T d, eps_i>) + a q C_Q A eps_i)``, at most ``e O``,

.. math:: O = p + a\bigl\{pq\,|Vd|\,|Ax_i + A^Td| + q\vartheta(1 - |y|^2)\bigr\},

vartheta that of the field part. A *member* ``(c, nu >= 0, xi, w_1, w_2)`` bounds the braces: with pi at or above ``p q`` and q

.. math:: W = w_1 + w_2 + 2\lambda_{\max}(F - \operatorname{diag}(w_1, w_2))_+, \quad F = \tfrac\pi2\bigl(c|Vd|^2
          + |Ax_i + A^Td|^2/c\bigr) - q\vartheta|y|^2 - \nu\langle Ax_i, d\rangle + \xi|Ax_i|^2

as a form in ``(x_i, y)``, they are at most ``q vartheta + W + nu (logit p + eta)/a - xi gamma^2``.

**Others.** For a unit u, ``w = V^T u``, ``N_j = |w + a<w, x_j - m> g|``: ``sum_k P_ik N_k^2 = |w|^2 + X^2 w^T C_i w <= Omega = 1 + X^2
L``. The part in the other tokens is at most ``sum P_ij N_j e_j <= (Omega q sum Q_j e_j^2)^{1/2}``. For one of them,
``|<w, x_j - m>|^2 <= L (1 - P_ij)/P_ij`` gives ``P_ij N_j <= kappa``, the maximum of ``r + X (L r (1 - r))^{1/2}`` over ``r <= q``: so
the largest norm may be lowered from ``e_1`` to z at the price ``(e_1 - z) kappa``.

**Gibbs.** ``beta sum Q_j e_j^2 + H(Q) <= log sum_{j != i} exp(beta e_j^2)`` for every ``beta > 0``: with ``e_j`` known, eta bounds the
mean of the squares. Of norms below ``e_3`` whose squares sum to at most ``rem`` the exponentials less one sum to at most
``(rem/e_3^2)(exp(beta e_3^2) - 1)`` (convexity).

**Cells.** On a cell of p, of eta and of gamma take E, L, Omega, kappa and O at their largest: ``R_i <= e O + (e_1 - z) kappa +
(Omega q S)^{1/2}``, S the Gibbs bound of the mean square at the least eta. Cells in which ``l - E > X`` are empty. E is concave in p:
its tangent at the upper end bounds it; on the last cell ``E <= q (log(1/q) + eta)``, increasing for ``q <= 1/e``. A row is bounded by
the largest of the cells; it is convex in e.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize

from otattn._linalg import EPS, Array, lambda_max_upper
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, like, lower, upper, xlogy
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.certificate import multiplier
from otattn.lipschitz.forms.frontier import Frontier
from otattn.lipschitz.forms.own_pairs import PairForms

_COARSE = [0.0, 0.004, 0.015, 0.04, 0.08, 0.12, 0.17, 0.22, 0.28, 0.34, 0.4, 0.47, 0.54, 0.62, 0.7, 0.8, 0.9, 1.0]
MASSES = np.interp(np.arange(35.0), np.arange(0.0, 35.0, 2.0), _COARSE)
"""Cells of p."""
GAMMA = np.linspace(0.0, 1.0, 97)
"""Cells of gamma."""
ENTROPIES = 30
"""Cells of eta."""
PLANS = (
    *((1.0, xi, (0.0, 0.1, 0.2, 0.35, 0.55, 0.8)) for xi in (-0.4, 0.0, 0.2, 0.4, 0.7, 1.1)),
    *((share, xi, (0.0, 0.2, 0.5)) for share in (0.75, 0.5, 0.3) for xi in (0.15, 0.4, 0.8)),
)
"""Triples of ``theta/vartheta``, xi and values of nu."""
HEAVIEST = np.linspace(0.0, 1.0, 21)
"""Cells of r."""
INVERSE_TEMPERATURES = np.geomspace(0.5, 80.0, 12)
"""Values of beta."""
LOWERED = (0.0, 0.3, 0.6, 1.0)
"""Where z stands between the second norm and the first."""
_FAR = 6.0
"""Logarithms of c and of ``w_1/w_2`` are sought up to this size."""
_SLACK = 2e-3
"""Cells within this of another are merged with it."""


@dataclass(frozen=True, eq=False)
class OwnBlocks:
    """Members ``(cell of p, theta, c, nu, xi, w_1, w_2)`` and the W that they prove."""

    members: Array
    W: Array

    @classmethod
    def of(cls, A: Any, V: Any, multipliers: Mapping[str, Array]) -> OwnBlocks:
        """The W of each member."""
        members = multiplier(multipliers, "blocks", (len(multipliers["blocks"]), 7))
        cell = members[:, 0]
        good = (cell == np.floor(cell)) & (cell >= 0.0) & (cell < MASSES.size - 1) & (members[:, 2] > 0.0)
        good &= (members[:, [1, 3, 5, 6]] >= 0.0).all(axis=1) & ((cell < MASSES.size - 2) | (members[:, 3] == 0.0))
        if not good.all() or set(cell.tolist()) != set(range(MASSES.size - 1)):
            raise ValueError(
                "blocks must be rows (cell, theta, c, nu, xi, w_1, w_2), c > 0, theta, nu, w_1, w_2 >= 0, nu = 0 in the last "
                "cell, with each cell of p."
            )
        forms, d = PairForms(A, V), len(A)
        out = []
        for at, theta, c, nu, xi, w1, w2 in members.tolist():
            F = _form(forms, int(at), theta, c, nu, xi) - np.diag(np.repeat([w1, w2], d))
            excess = top(lambda_max_upper(F))
            if isinstance(F, BallMatrix):
                out.append(top(lift(w1) + w2 + 2.0 * np.maximum(lift(0.0), lift(excess))))
            else:
                # entries are sums of d products of numbers of at most these sizes
                size = 2.0 * c + 5.0 / c + 2.0 * nu + abs(xi) + theta + w1 + w2
                out.append((w1 + w2 + 2.0 * (max(0.0, excess) + 64.0 * d * EPS * size)) * (1.0 + 8.0 * EPS))
        return cls(members, np.array(out))

    @classmethod
    def found(cls, A: Array, V: Array, field: float) -> OwnBlocks:
        """For each cell of p and each plan members with nearly the least W."""
        forms, rows = PairForms(A, V), []
        for share, xi, leads in PLANS:
            starts = dict.fromkeys(leads, np.zeros(2))
            for at in range(MASSES.size - 1):
                near = np.zeros(2)
                for nu in leads if at < MASSES.size - 2 else leads[:1]:
                    # every second cell takes over what the one before has found
                    start = starts[nu] if at % 2 else near
                    row, near = _least(forms, at, share * field, nu, xi, start, search=at % 2 == 0)
                    starts[nu] = near
                    rows.append(row)
        return cls.of(A, V, {"blocks": np.array(rows)})

    def take(self, index: Array) -> OwnBlocks:
        """The members at ``index``."""
        return OwnBlocks(self.members[index], self.W[index])


def _ends(at: int) -> tuple[float, float]:
    """``q`` and ``p q`` at their largest on a cell of p."""
    p0, p1 = MASSES[at], MASSES[at + 1]
    p = min(max(p0, 0.5), p1)
    return float(1.0 - p0), float(p * (1.0 - p)) * (1.0 + 2.0 * EPS)


def _form(forms: PairForms, at: int, theta: float, c: float, nu: float, xi: float) -> Any:
    """F on a cell of p."""
    q, pi = _ends(at)
    d = len(forms.own) // 2
    other = np.diag(np.repeat([0.0, q * theta * (1.0 - 4.0 * EPS)], d))
    return pi * forms.form(1.0, 0.0, c, 0.0) - nu * forms.lead + xi * forms.own - other


def _least(
    forms: PairForms, at: int, theta: float, nu: float, xi: float, start: Array, *, search: bool
) -> tuple[list[float], Array]:
    """The member with nearly the least W, and where the search for c and for the share of ``w_1`` ended."""
    d = len(forms.own) // 2

    def scaled(z: Array) -> tuple[float, float]:
        z = np.clip(z, -_FAR, _FAR)
        share = 1.0 / (1.0 + math.exp(-z[1]))
        root = 1.0 / np.sqrt(np.repeat([share, 1.0 - share], d))
        F = _form(forms, at, theta, math.exp(z[0]), nu, xi)
        return max(0.0, float(np.linalg.eigvalsh(root[:, None] * F * root)[-1])), share

    options = {"xatol": 5e-3, "fatol": 1e-5, "maxfev": 60}
    end = minimize(lambda z: scaled(z)[0], start, method="Nelder-Mead", options=options).x if search else start
    end = np.clip(end, -_FAR, _FAR)
    W, share = scaled(end)
    return [at, theta, math.exp(end[0]), nu, xi, W * share, W * (1.0 - share)], end


@dataclass(frozen=True, eq=False)
class Sight:
    """What is known of the rows on the cells of gamma between ``GAMMA``: columns ``(cells, 1)``, floats or intervals.

    ``low`` bounds ``a <g, x_i>`` from below, ``field`` is vartheta, ``forms`` are the bounds of the frontier ``(forms, cells, 1)`` and
    ``norms`` those of ``||M_s||``; ``varied`` bounds the variance of logits.
    """

    a: Any
    n: int
    low: Any
    field: float
    forms: Any
    norms: Array
    varied: float

    @classmethod
    def of(cls, a: Any, n: int, low: Any, field: float, frontier: Frontier) -> Sight:
        """``low`` has one entry a cell."""
        forms = like(frontier.at(GAMMA[:-1])[:, :, None], a)
        return cls(a, n, low[:, None], field, forms, frontier.norms[2:], varentropy(n - 1))

    @property
    def gamma(self) -> tuple[Any, Any]:
        """Ends of the cells."""
        return like(GAMMA[:-1, None], self.a), like(GAMMA[1:, None], self.a)

    def beyond(self, theta: Any) -> Any:
        """omega of the proof for each theta ``(members, 1, 1)``, on the cells."""
        c = self.along(like(self.varied, self.a))
        root = np.sqrt(c)
        beta, delta = (np.minimum(np.sqrt(x), 1.0) for x in self.forms[:2])
        lines = [(beta * delta, (beta + delta) * root, c), (delta, root, 0.0 * c), (beta, root, 0.0 * c)]
        lines += [(y, 2.0 * np.sqrt(y * c * mu), c * mu) for y, mu in zip(self.forms[2:], self.norms.tolist(), strict=True)]
        best = np.maximum(self.field - theta, 0.0) + 0.0 * c
        for slope, bend, level in lines:
            free = np.maximum(np.maximum(theta - slope, 0.5 * bend), 1e-300)
            omega = np.where(2.0 * (theta - slope) >= bend, level + bend**2 / (4.0 * free), slope - theta + bend + level)
            best = np.minimum(best, omega)
        return np.maximum(best, 0.0)

    def along(self, varied: Any) -> Any:
        """The variance along g of logits of this variance."""
        return np.minimum(varied / (self.a * np.maximum(GAMMA[:-1, None], 1e-9)) ** 2, 1.0)


@dataclass(frozen=True, eq=False)
class EntropicRows:
    """Cells that bound every row: ``R <= e own + (e_1 - z) cap + root S(entropy)^{1/2}``, arrays with one entry a cell, outward.

    ``used`` are the members of the own blocks that decide.
    """

    entropy: Array
    own: Array
    cap: Array
    root: Array
    used: Array

    @classmethod
    def of(cls, sight: Sight, blocks: OwnBlocks) -> EntropicRows:
        """The cells of p, eta and gamma."""
        eta = entropies(sight.n)
        found = [_cells(sight, blocks, at) for at in range(MASSES.size - 1)]
        table = np.concatenate([x for x, _ in found], axis=1)
        for group in (True, False):
            parts = [np.flatnonzero(table[0] == x) for x in eta[:-1]] if group else [np.arange(table.shape[1])]
            table = table[:, np.concatenate([k[_undominated(table[:, k])] for k in parts])]
            table[1:] *= 1.0 + 1.01 * _SLACK
        return cls(*table, np.unique(np.concatenate([x for _, x in found])))

    def row(self, e: Array, one: Any, two: Any, third: Any, rem: Any, others: int) -> Array:
        """Bounds ``(levels, boxes)`` for own norms ``e (levels, boxes)``; ``one >= two``, the ``others`` below ``third``.

        The squares of the others sum to at most ``rem``. Where there is no second norm, ``two = 0`` counts no token.
        """
        kinds, which = np.unique(self.entropy, return_inverse=True)
        floor, rest = np.maximum(upper(two), upper(third)), np.full((self.own.size, e.shape[1]), np.inf)
        for share in LOWERED:
            z = np.minimum(floor + share * np.maximum(upper(one) - floor, 0.0), upper(one))
            S = np.sqrt(upper(_gibbs(like(z, one) ** 2, two, third, rem, others, kinds)))
            np.minimum(rest, upper(one - z) * self.cap[:, None] + S[which] * self.root[:, None], out=rest)
        return np.array([(x * self.own[:, None] + rest).max(axis=0) for x in e]) * (1.0 + 8.0 * EPS)


def _gibbs(first: Any, two: Any, third: Any, rem: Any, others: int, kinds: Array) -> Any:
    """Bounds ``(kinds, boxes)`` of the mean square at these least entropies."""
    second, low = two**2, third**2
    best: Any = first + 0.0 * kinds[:, None]
    for beta in INVERSE_TEMPERATURES.tolist():
        rise = np.exp(beta * low) - 1.0
        share = np.minimum(rem / np.maximum(low, 1e-9), float(others))
        total = np.exp(beta * first) + np.where(upper(two) > 0.0, np.exp(beta * second), 0.0) + others + share * rise
        best = np.minimum(best, (np.log(total) - like(kinds[:, None], first)) / beta)
    return np.maximum(best, 0.0)


def entropies(n: int) -> Array:
    """Ends of the cells of eta, the last at or above ``log(n - 1)``."""
    return np.append(np.linspace(0.0, math.log(n - 1.0), ENTROPIES + 1)[:-1], top(np.log(lift(n - 1.0))))


def varentropy(m: int) -> float:
    """The largest variance of ``log Q`` over laws Q on m atoms, outward."""
    s = np.linspace(-40.0, 40.0, 16_001)
    near = np.minimum(np.abs(s[:-1]), np.abs(s[1:])) * (np.sign(s[:-1]) == np.sign(s[1:]))
    far = np.maximum(np.abs(lift(s[:-1]) + np.log(lift(m - 1.0))), np.abs(lift(s[1:]) + np.log(lift(m - 1.0))))
    half = np.exp(0.5 * lift(near)) + np.exp(-0.5 * lift(near))
    return float(upper((far / half) ** 2).max())


def _cells(sight: Sight, blocks: OwnBlocks, at: int) -> tuple[Array, Array]:
    """Columns ``(entropy, own, cap, root)`` of the cells of eta and gamma on one of p, and the members that decide."""
    a, n, low, (g0, g1), eta = sight.a, sight.n, sight.low, sight.gamma, entropies(sight.n)
    p0, p1 = (like(x, a) for x in MASSES[at : at + 2])
    high, one = like(eta[1:], a), like(1.0, a)
    q, X = one - p0, a * g1
    if MASSES[at + 1] < 1.0:
        logit = np.log(p1) - np.log(one - p1)
        E = (one - p1) * (logit + high) + (p1 - p0) * np.maximum(logit + high - one / p1, 0.0)
    else:
        logit, E = 0.0, q * (high - np.log(q))
    excess = np.maximum(low - E, 0.0)
    L = np.maximum(1.0 - (excess / X) ** 2, 0.0)
    T = X * X * _seen(sight, L, _own_varied(at, eta, a) + q * sight.varied)
    omega = np.sqrt(1.0 + T)
    cap = _heaviest(at, q, eta, n, T)
    index = np.flatnonzero(blocks.members[:, 0] == at)
    theta, nu, xi = (like(x[:, None, None], a) for x in blocks.members[index][:, [1, 3, 4]].T)
    braces = q * (theta + sight.beyond(theta)) + like(blocks.W[index][:, None, None], a)
    own = upper(p1 + a * (braces - np.minimum(xi * g0**2, xi * g1**2)) + nu * (logit + high))
    live = lower(low - E) <= upper(X) * (1.0 + 1e-12)
    values = [np.maximum(own.min(axis=0), 0.0), upper(cap), upper(np.sqrt(q) * omega)]
    each = np.array([np.broadcast_to(x, live.shape) * (1.0 + 8.0 * EPS) for x in values])
    each = np.where(live, each, -np.inf)
    # of the cells of gamma those that no other exceeds in all three; of equals the first
    over = (each[:, None] >= each[:, :, None]).all(axis=0)
    same = over & over.transpose(1, 0, 2)
    before = np.tri(len(over), k=-1, dtype=bool)[:, :, None]
    live &= ~((over & ~same) | (same & before)).any(axis=1)
    least = np.broadcast_to(eta[:-1], live.shape)
    return np.array([least[live], *each[:, live]]), index[np.unique(own.argmin(axis=0))]


def _own_varied(at: int, eta: Array, a: Any) -> Any:
    """A bound of ``p q (logit p + eta)^2`` on a cell of p, for each of eta."""
    p0, p1 = (like(x, a) for x in MASSES[at : at + 2])
    low, high = like(eta[:-1], a), like(eta[1:], a)
    if MASSES[at] == 0.0:
        return p1 * np.maximum(np.log(p1) ** 2, high**2)
    if MASSES[at + 1] == 1.0:
        return like(1e6, a) + 0.0 * high  # no bound: along g it is at most 1
    first, last = (np.log(p) - np.log(1.0 - p) for p in (p0, p1))
    middle = like(min(max(float(MASSES[at]), 0.5), float(MASSES[at + 1])), a)
    return middle * (1.0 - middle) * np.maximum(np.abs(first + low), np.abs(last + high)) ** 2


def _seen(sight: Sight, L: Any, varied: Any) -> Any:
    """A bound of ``w^T C_i w``."""
    along = sight.along(varied)
    beta = np.minimum(sight.forms[0], 1.0)
    tied = (np.sqrt(beta * L) + np.sqrt(np.maximum(1.0 - beta, 0.0) * along)) ** 2
    return np.where(beta * (L + along) <= L, np.minimum(tied, L), L)


def _heaviest(at: int, q: Any, eta: Array, n: int, T: Any) -> Any:
    """The largest kappa of the cells of r, ``T = X^2 L`` on a cell of p."""
    p = min(max(float(MASSES[at]), 0.5), float(MASSES[at + 1]))
    own = -xlogy(like(p, T), like(p, T)) - xlogy(1.0 - like(p, T), 1.0 - like(p, T))
    worst: Any = 0.0 * T
    for r0, r1 in itertools.pairwise(HEAVIEST.tolist()):
        if r0 >= float(upper(q)):
            break
        middle = like(min(max(0.5, r0), r1), T)
        gap = np.maximum(1.0 + np.log(like(r1, T)) + own + q * like(eta[1:], T), 0.0)
        spread = T * middle * (1.0 - middle)
        kappa = 0.5 * (np.sqrt(spread) + np.sqrt(4.0 * like(r1, T) ** 2 * gap + spread))
        # Q with an atom of at least r0/q
        share = r0 / float(upper(q))
        most = math.inf
        if share > 1.0 / (n - 1.0):
            atom = like(share, T)
            most = float(upper(-xlogy(atom, atom) - xlogy(1.0 - atom, 1.0 - atom) + (1.0 - atom) * np.log(like(n - 2.0, T))))
        worst = np.where(most * (1.0 + 1e-12) >= eta[:-1], np.maximum(worst, kappa), worst)
    return worst


def _undominated(table: Array) -> Array:
    """Columns ``(entropy, own, cap, root)`` such that each has one among them of no higher entropy and values no lower but for the slack."""
    signed = table * np.array([-1.0, 1.0, 1.0, 1.0])[:, None]
    raised = signed.copy()
    raised[1:] *= 1.0 + _SLACK
    order = np.argsort(-signed.sum(axis=0), kind="stable")
    kept: list[int] = []
    for k in order.tolist():
        if not kept or not (raised[:, kept] >= signed[:, k : k + 1]).all(axis=0).any():
            kept.append(k)
    return np.array(sorted(kept), dtype=int)
