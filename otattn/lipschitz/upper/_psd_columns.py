"""Cell bounds of the column sums behind :mod:`otattn.lipschitz.upper.psd`: each box at its worst corner.

Boxes have the sides ``(r, h, log p, log q)``, named as there. A box is bounded at its worst corner and, to second order, by
its middle plus the largest slopes over it; the smaller of both counts. The entropies enter through tangent planes, which
lie below them everywhere. With intervals for the numbers of the head every bound is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.lipschitz.arithmetic.intervals import is_interval, lift, upper, xlogy
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.constants.cells import boxes

__all__ = ["Columns", "Multipliers", "OwnShare"]

Array = NDArray[np.float64]
Interval = tuple[Any, Any]

_SLACK = 1e-10
"""Relative slack of the conditions under which a box is called empty."""


def _times(x: Interval, y: Interval) -> Interval:
    corners = np.stack([x[0] * y[0], x[0] * y[1], x[1] * y[0], x[1] * y[1]])
    return corners.min(axis=0), corners.max(axis=0)


def _largest(x: Interval) -> Any:
    return np.maximum(np.abs(x[0]), np.abs(x[1]))


@dataclass(frozen=True, eq=False)
class Multipliers:
    """One entry a cell of r: ``mu`` in [0, 1], any ``sigma`` (in units of r), ``xi`` > 0."""

    mu: Array
    sigma: Array
    xi: Array

    def at(self, cell: Any) -> Multipliers:
        """The entries of these cells."""
        return Multipliers(self.mu[cell], self.sigma[cell], self.xi[cell])


class OwnShare:
    """``max_x -(1-mu) log x - mu kl(x|y) + xi (n - 1 - 1/x)`` over shares x in (0, 1], as a decreasing step function of y.

    Tabulated from above: x and y run over cells, and the running maximum from the right makes it monotone.
    """

    def __init__(self, multipliers: Multipliers, n: int, *, count: int = 256, exact: bool = False) -> None:
        self.edges = np.concatenate([[0.0], np.geomspace(1e-3 / n, 1.0, count)])
        self.edges[-1] = 1.0
        y0, y1 = self.edges[:-1], self.edges[1:]
        wrap: Any = lift if exact else float
        rows = []
        for mu, xi in zip(map(wrap, multipliers.mu), map(wrap, multipliers.xi), strict=True):
            # what does not depend on y increases up to this x and decreases beyond
            turn = xi / np.maximum(1.0 - mu, 1e-300)
            x = np.geomspace(min(top(turn), 1e-2 / n), 1.0, count)[:, None]
            x[-1] = 1.0
            x0, x1 = np.concatenate([x[:1], x[:-1]]), x
            near = np.where(x1 < y0, _divergence(x1, y0, exact), 0.0)
            far = np.where(x0 > y1, _divergence(x0, y1, exact), 0.0)
            # the first cell begins at zero
            distance = np.concatenate([near[:1], np.maximum(near, far)[1:]])
            peak = np.where(np.arange(count)[:, None] > 0, np.clip(turn, x0, x1), np.minimum(turn, x1))
            best = -(1 - mu) * np.log(peak) - xi / peak - mu * distance
            rows.append(upper(best.max(axis=0) + xi * (n - 1)))
        self.table = np.maximum.accumulate(np.array(rows)[:, ::-1], axis=1)[:, ::-1]

    def __call__(self, cell: Array, share: Array) -> Array:
        """Upper bound at every y >= ``share``."""
        index = np.searchsorted(self.edges, share * (1 - 1e-12), side="right") - 1
        return np.asarray(self.table[cell, np.clip(index, 0, self.table.shape[1] - 1)])


def _divergence(x: Array, y: Array, exact: bool) -> Any:
    """``kl(x|y)``, binary."""
    p, q = (lift(x), lift(y)) if exact else (x, y)
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = xlogy(p, p / q) + xlogy(1 - p, (1 - p) / (1 - q))
    return kl if exact else np.where(np.isnan(kl), np.inf, kl)


@dataclass(frozen=True, eq=False)
class Columns:
    """The numbers of a head and the weights of its rows.

    Attributes
    ----------
    a, b, stretch : float
        ``||A|| R^2``; ``sup ||V C A|| / (||V|| tr C)``; ``a`` over the least eigenvalue (inf when it is zero).
    n : int
        Number of tokens, at least 2.
    split : tuple of float
        ``t(h) = t0 (1 - h)^g + t1`` with ``t0 >= 0``, ``g >= 1``, ``t1 > 0``.
    eta, tau : float
        ``eta >= 0`` and ``tau > 0`` of the row weights.
    """

    a: Any
    b: Any
    stretch: Any
    n: int
    split: tuple[float, float, float]
    eta: float
    tau: float

    @property
    def log_least_p(self) -> float:
        """Rows that give less than this to the column are counted together, by :meth:`faint`."""
        return math.log(1e-6 / self.n)

    @property
    def exact(self) -> bool:
        """True in interval arithmetic."""
        return is_interval(self.a)

    def _wrap(self, x: Any) -> Any:
        return lift(x) if self.exact else x

    @property
    def log_least_q(self) -> float:
        """No token gives itself less: ``<g_i, x_k - x_i> <= a (h - h^2) <= a/4``."""
        return -float(np.logaddexp(0.0, math.log(max(1, self.n - 1)) + top(self.a) / 4)) - 1e-9

    def faint(self) -> Any:
        """What the rows of tiny p add to a column sum, at most."""
        least = np.exp(self._wrap(self.log_least_p))
        return (self.n - 1) * (1 + self.t(self._wrap(np.zeros(1)))[0]) * (1 + self.eta) * least * (1 + self.a**2)

    @property
    def loss(self) -> float:
        """Above what rounding can add to ``E``, a sum of terms of at most ``a`` and ``-log q``."""
        return 0.0 if self.exact else 1e-13 * (1 + self.a - self.log_least_q)

    @property
    def grain(self) -> float:
        """Above what rounding can take from ``Gamma``, a difference of terms of at most ``a^2``."""
        return 0.0 if self.exact else 1e-14 * self.a**2

    def t(self, h: Any) -> Any:
        """The split, decreasing in h."""
        t0, g, t1 = self.split
        return t0 * np.maximum(1 - h, 0.0) ** g + t1

    def _t_slope(self, h: Any) -> Any:
        t0, g, _ = self.split
        # g >= 1, and g - 1 rounded up makes a power of a number below one smaller in size by rounding only
        base = np.maximum(1 - h, 0.0)
        power = base ** (self._wrap(g) - 1.0) if self.exact else base ** (g - 1)
        return -(self._wrap(t0) * g) * power

    def square(self, r: Any) -> Any:
        """Largest ``|x|^2`` when ``|A^{1/2} x| = sqrt(a) r``."""
        return np.minimum(1.0, self.stretch * r**2) if math.isfinite(top(self.stretch)) else np.ones_like(r)

    def _square_slope(self, r: Interval) -> Interval:
        if not math.isfinite(top(self.stretch)):
            return np.zeros_like(r[0]), np.zeros_like(r[0])
        low = np.where(self.stretch * r[1] ** 2 < 1, 2 * self.stretch * r[0], 0.0)
        return low, np.where(self.stretch * r[0] ** 2 < 1, 2 * self.stretch * r[1], 0.0)

    def row_weight(self, p: Any, gamma: Any, most: Any = None) -> Any:
        """``c(p, Gamma)``, outward; for an interval ``[p, most]`` its largest value."""
        gamma, tau = gamma + self.grain, self._wrap(self.tau)
        most = p if most is None else most
        lean = (1 + tau) - (1 + 1 / tau) * gamma
        whole = most * (1 + gamma)
        single = (1 + 1 / tau) * gamma + np.where(lean >= 0, most, p) * lean
        return (1 + self._wrap(self.eta)) / (1 / whole + self.eta / single)

    def off(self, lo: Array, hi: Array, multipliers: Multipliers) -> tuple[Array, Array]:
        """Logarithm of the bound of ``sum_{i != j}`` on each box, without the own share; and what loosens it.

        ``multipliers`` has one entry a box.
        """
        a, n = self.a, self.n
        (r0, h0, lp0, lq0), (r, h1, lp1, lq1) = self._wrap(lo), self._wrap(hi)
        p0, p1, q0, q1 = (np.exp(x) for x in (lp0, lp1, lq0, lq1))
        slack = _SLACK * (1 + top(a))
        keep = self._compatible((h0, lp0, lq0), (r, h1, lp1, lq1), slack) & (p0 + q0 <= 1 + slack)

        # E >= a h^2 + e0 + e_p (p - p_t) + e_q (q - q_t), the tangent plane at a point of the box with rest > 0
        pt, qt = (self._wrap(x) for x in _tangent_point(*(np.asarray(upper(x)) for x in (p0, p1, q0, q1))))
        e0, ep, eq = _entropy_tangent(pt, qt, n)
        E0 = a * h0**2 + e0 + np.minimum(ep * (p0 - pt), ep * (p1 - pt)) + np.minimum(eq * (q0 - qt), eq * (q1 - qt))
        E1 = a * h1**2 + e0 + np.maximum(ep * (p0 - pt), ep * (p1 - pt)) + np.maximum(eq * (q0 - qt), eq * (q1 - qt))
        keep = keep & (a * h1 + slack >= E0)
        E = np.maximum(E0 - self.loss, 0.0), np.maximum(E1, 0.0)

        # Gamma on the box, before the cap
        missing, miss_h = 1 - self.square(r), (1 - self.square(h1), 1 - self.square(h0))
        B = 1 - p1 * missing - q1 * miss_h[1], 1 - p0 * missing - q0 * miss_h[0]
        raw = (a * h0) ** 2 * B[0] - E[1] ** 2, np.maximum((a * h1) ** 2 * B[1] - E[0] ** 2, 0.0)
        cap = np.minimum(np.where(p0 > 0.5, 4 * p0 * (1 - p0), 1.0), np.where(q0 > 0.5, 4 * q0 * (1 - q0), 1.0))
        gamma = np.minimum(raw[1], (a * h1) ** 2 * cap)

        mu, sigma = self._wrap(multipliers.mu), self._wrap(multipliers.sigma)
        along = mu * (1 - 2 * sigma)
        tail = mu * a * sigma**2 * r**2
        linear = a * np.maximum(along * h0**2, along * h1**2) + np.maximum(-along * lq0, -along * lq1)
        lean = -2 * mu * sigma
        corner = (
            np.log(self.row_weight(p0, gamma, p1))
            + np.log1p(self.t(h0))
            + mu * np.log1p(-np.minimum(p0, 1 - 1e-16))
            + np.maximum(lean * lp0, lean * lp1)
            + linear
            + tail
        )

        # the middle, and slopes in h, log p, log q
        h, lp, lq = (self._wrap(0.5 * (lo[k] + hi[k])) for k in (1, 2, 3))
        half = np.stack([np.maximum(x1 - x, x - x0) for x, x0, x1 in ((h, h0, h1), (lp, lp0, lp1), (lq, lq0, lq1))])
        p, q = np.exp(lp), np.exp(lq)
        tilt = 2 * along * a
        split = self._t_slope(h0) / (1 + self.t(h1)), self._t_slope(h1) / (1 + self.t(h0))
        fixed = [
            (split[0] + np.minimum(tilt * h0, tilt * h1), split[1] + np.maximum(tilt * h0, tilt * h1)),
            (lean - mu * p1 / np.maximum(1 - p1, 1e-300), lean - mu * p0 / np.maximum(1 - p0, 1e-300)),
            (-along, -along),
        ]

        def middle(value: Array, slopes: list[Interval], span: Interval) -> tuple[Array, Array]:
            """Bound by the middle for a ``Gamma`` of this value there, these slopes, this span."""
            to_gamma, to_log_p = self._weight_slopes((p0, p1), span)
            total = []
            for axis, (slope, own) in enumerate(zip(slopes, fixed, strict=True)):
                x = _times(slope, to_gamma)
                bent = span[0] < 0  # Gamma is zero there: its slope may vanish
                x = np.where(bent, np.minimum(x[0], 0), x[0]), np.where(bent, np.maximum(x[1], 0), x[1])
                extra = to_log_p if axis == 1 else (0.0, 0.0)
                total.append((x[0] + own[0] + extra[0], x[1] + own[1] + extra[1]))
            moves = np.stack([_largest(x) for x in total]) * half
            start = np.log(self.row_weight(p, np.maximum(value, 0.0))) + np.log1p(self.t(h))
            start = start + mu * np.log1p(-np.minimum(p, 1 - 1e-16)) + lean * lp + along * (a * h**2 - lq) + tail
            return start + moves.sum(axis=0), moves

        zero = np.zeros_like(h)
        mass = self._square_slope((h0, h1))
        in_h = 2 * a * B[0] + a * h0 * q0 * mass[0] - 4 * E[1], 2 * a * B[1] + a * h1 * q1 * mass[1] - 4 * E[0]
        to_p, to_q = _times(E, _times((p0, p1), (ep, ep))), _times(E, _times((q0, q1), (eq, eq)))
        slopes = [
            _times((a * h0, a * h1), in_h),
            (-((a * h1) ** 2) * missing * p1 - 2 * to_p[1], -((a * h0) ** 2) * missing * p0 - 2 * to_p[0]),
            (-((a * h1) ** 2) * miss_h[1] * q1 - 2 * to_q[1], -((a * h0) ** 2) * miss_h[0] * q0 - 2 * to_q[0]),
        ]
        Em = np.maximum(a * h**2 + e0 + ep * (p - pt) + eq * (q - qt) - self.loss, 0.0)
        centre = (a * h) ** 2 * (1 - p * missing - q * (1 - self.square(h))) - Em**2
        bound, moves = middle(centre, slopes, raw)
        value = np.where(p1 < 1, np.minimum(corner, bound), corner)
        for axis, (x0, x1, x) in ((1, (p0, p1, p)), (2, (q0, q1, q))):
            span = 4 * (a * h0) ** 2 * x1 * (1 - x1), 4 * (a * h1) ** 2 * x0 * (1 - x0)
            slopes = [(zero, zero)] * 3
            slopes[0] = 8 * a**2 * h0 * x1 * (1 - x1), 8 * a**2 * h1 * x0 * (1 - x0)
            slopes[axis] = 4 * (a * h1) ** 2 * x1 * (1 - 2 * x1), 4 * (a * h0) ** 2 * x0 * (1 - 2 * x0)
            bound, _ = middle(4 * (a * h) ** 2 * x * (1 - x), slopes, span)
            value = np.where((x0 > 0.5) & (p1 < 1), np.minimum(value, bound), value)
        in_r = 2 * tail / np.maximum(r, 1e-300) + p1 * (a * h1) ** 2 * self._square_slope((r, r))[1] / (1 + gamma)
        pull = np.array([upper(in_r * (r - r0)), *upper(moves)]) + 1e-12
        return np.asarray(upper(np.where(keep, value, -np.inf))), pull

    def _compatible(self, lo: Any, hi: Any, slack: float) -> Any:
        """Boxes that meet ``|l_ij| <= a r h``, ``|l_ik| <= a h`` for the other tokens k."""
        a, n = self.a, self.n
        (h0, lp0, lq0), (r, h1, lp1, lq1) = lo, hi
        logit = a * h0**2 - lq1 + lp0, a * h1**2 - lq0 + lp1
        keep = (logit[0] <= a * r * h1 + slack) & (logit[1] >= -a * r * h1 - slack)
        rest = np.clip(1 - np.exp(lp1) - np.exp(lq1), 0.0, 1.0), np.clip(1 - np.exp(lp0) - np.exp(lq0), 0.0, 1.0)
        if n == 2:
            return keep & (rest[0] <= slack)
        peak = np.clip(0.5, h0, h1)
        # the slack is far above the rounding of the logarithm of n - 2
        with np.errstate(divide="ignore"):
            keep = keep & (np.log(rest[1] + slack) >= math.log(n - 2) + lq0 - a * (h1 + h1**2) - slack)
            most = math.log(n - 2) + lq1 + a * (peak - peak**2) + slack
            keep = keep & (np.log(np.maximum(rest[0] - slack, 0.0)) <= most)
        return keep

    def _weight_slopes(self, p: Interval, gamma: Interval) -> tuple[Interval, Interval]:
        """Slopes of ``log c`` in Gamma and in ``log p``."""
        tau, g = self._wrap(self.tau), (np.maximum(gamma[0], 0.0), gamma[1] + self.grain)
        up, one = 1 + 1 / tau, 1 + tau
        single = one * p[0] + up * (1 - p[1]) * g[0], one * p[1] + up * (1 - p[0]) * g[1]
        whole = p[0] * (1 + g[0]), p[1] * (1 + g[1])
        # share of the first of the two terms of 1 / c
        share = 1 / (1 + self.eta * whole[1] / single[0]), 1 / (1 + self.eta * whole[0] / single[1])
        rest = 1 - share[1], 1 - share[0]
        to_gamma = (
            share[0] / (1 + g[1]) + rest[0] * up * (1 - p[1]) / single[1],
            share[1] / (1 + g[0]) + rest[1] * up * (1 - p[0]) / single[0],
        )
        bend = _times((p[0] / single[1], p[1] / single[0]), (one - up * g[1], one - up * g[0]))
        bend = _times(rest, bend)
        return to_gamma, (share[0] + bend[0], share[1] + bend[1])

    def own(self, r: Interval, q: Interval) -> Array:
        """Bound of ``(1 + t) c(q, Gamma_j) + (1 + 1/t) (b lambda_j)^2`` on cells of ``(r, q = P_jj)``, 0 where empty."""
        a, n = self.a, self.n
        (r0, r1), (q0, q1) = ((self._wrap(x[0]), self._wrap(x[1])) for x in (r, q))
        slack = _SLACK * (1 + top(a))
        peak = np.clip(0.5, r0, r1)
        with np.errstate(divide="ignore", invalid="ignore"):
            odds = np.log((1 - q1) / q1), np.log((1 - q0) / q0)
            keep = (odds[0] <= math.log(n - 1) + a * (peak - peak**2) + slack) & (
                odds[1] >= math.log(n - 1) - a * (r1 + r1**2) - slack
            )
            middle = self._wrap(np.minimum(0.5 * (q[0] + q[1]), 1 - 1e-12))
            slope = -1 / middle + np.log((n - 1) * middle / (1 - middle))
            e = -np.log(middle) + xlogy(middle, middle) + xlogy(1 - middle, (1 - middle) / (n - 1))
            E = a * r0**2 + e + np.minimum(slope * (q0 - middle), slope * (q1 - middle))
            mean = np.where(self.loss < E, np.minimum(np.maximum(E - self.loss, 0.0), a * r1) / (a * r1), 0.0)
        keep = keep & (a * r1 + slack >= E)
        spread = 1 - q0 * (1 - self.square(r1)) - mean**2
        spread = np.clip(np.minimum(spread, np.where(q0 > 0.5, 4 * q0 * (1 - q0), 1.0)), 0.0, 1.0)
        value = (1 + self.t(r0)) * self.row_weight(q0, (a * r1) ** 2 * spread, q1)
        return np.asarray(upper(np.where(keep, value + (1 + 1 / self.t(r1)) * (self.b * spread) ** 2, 0.0)))

    def own_table(self, cells: int) -> Array:
        """The largest :meth:`own` on each of ``cells`` equal cells of r."""
        least = math.exp(self.log_least_q)
        q = np.union1d(np.geomspace(least, 1.0, 256), np.linspace(0.02, 1.0, 256))
        q[-1] = 1.0
        r = np.linspace(0.0, 1.0, cells + 1)
        return np.asarray(self.own((r[:-1, None], r[1:, None]), (q[:-1], q[1:])).max(axis=1))

    def start(self, edges: Array) -> tuple[Array, Array]:
        """Boxes that cover all rows, with the given edges of r."""
        return boxes(
            edges,
            np.linspace(0.0, 1.0, 9),
            np.linspace(self.log_least_p, 0.0, 13),
            np.linspace(self.log_least_q, 0.0, 9),
        )


def _tangent_point(p0: Array, p1: Array, q0: Array, q1: Array) -> tuple[Array, Array]:
    """A point near the middle of the box, where the masses leave something to the other tokens."""
    rest = np.clip(1 - p0 - q0, 0.0, 1.0)
    inward = np.minimum(0.5, 0.5 * rest / np.maximum(p1 - p0 + q1 - q0, 1e-300))
    p, q = p0 + inward * (p1 - p0), q0 + inward * (q1 - q0)
    shrink = np.where(1 - p - q < 1e-14, (1 - 2e-14) / np.maximum(p + q, 0.5), 1.0)
    return p * shrink, q * shrink


def _entropy_tangent(p: Any, q: Any, n: int) -> tuple[Any, Any, Any]:
    """Value and slopes of ``-log q + p log p + q log q + rest log(rest / (n - 2))``, ``rest = 1 - p - q``; convex."""
    value = -np.log(q) + xlogy(p, p) + xlogy(q, q)
    if n == 2:
        return value, np.log(p) + 1, -1 / q + np.log(q) + 1
    rest = np.maximum(1 - p - q, 1e-300)
    return (
        value + xlogy(rest, rest / (n - 2)),
        np.log((n - 2) * p / rest),
        -1 / q + np.log((n - 2) * q / rest),
    )
