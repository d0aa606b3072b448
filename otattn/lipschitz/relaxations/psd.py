r"""T19: the discrete constant of positive semi-definite forms, where rows can only look at tokens beyond themselves.

Unit ball, ``c = 0``, A symmetric PSD, ``a = ||A||``. Put ``y_i = A^{1/2} x_i / sqrt(a)``, so that ``|y_i| <= 1`` and the logits
are ``a <y_i, y_j>``; ``h_i = |y_i|``, ``|g_i| <= a h_i``, ``P`` the attention matrix, ``lam_i`` a bound of ``tr C_i``. For a fixed
column j: ``r = |y_j|``, ``u = y_j / r``, ``s_i = <y_i, u>``, ``p_i = P_ij``, ``pi_i = P_ii``, ``omega_i = (1 + t_i)(1 + |g_i|^2 lam_i)``.

**N1.** ``|V(K_i eps + C_i A eps_i)|^2 <= v^2 (1 + t_i) |K_i eps|^2 + (1 + 1/t_i) (sigma lam_i)^2 |eps_i|^2`` for ``t_i > 0`` and
``|K_i eps|^2 <= (1 + |g_i|^2 lam_i) sum_j P_ij |eps_j|^2`` (Cauchy-Schwarz), so, collecting ``|eps_j|^2``,

.. math:: \|D f\|^2 \le \max_j \; v^2 \sum_i \omega_i P_{ij} + (1 + 1/t_j)(\sigma \lambda_j)^2 ,
          \qquad t_i = t(h_i), \quad t(h) = t_0 (1-h)^q + t_1 .

**N2.** ``S = sum_{i != j} omega_i P_ij``, ``alpha_i = omega_i P_ij / S``: ``log S = E_alpha[log omega + log p] + H(alpha)``. Both
``H(alpha) <= log(n-1)`` and, by Gibbs over ``k != j`` in ``log((1 - p_i)/p_i) = log sum_k e^{l_ik - l_ij} >= H(alpha) + sum_k
alpha_k (l_ik - l_ij)`` averaged over i, ``H(alpha) <= a <ybar, y_j - ybar> - E_alpha logit p``. Take 1 - m of the first plus m of
the second and ``-|ybar|^2 <= sig^2 - 2 sig E s``: for all m in [0, 1] and sig,

.. math:: \log S \le \max_{h,s,p} (1-m)\log(n-1) + \log p - m \operatorname{logit} p + \log\omega(h,s,p)
          + m a (r s - 2\,sig\,s + sig^2) .

**N3.** In row i, ``log(pi/p) = a (h^2 - r s)``; with ``rest = 1 - p - pi`` and ``H(P) <= -p log p - pi log pi - rest log rest +
rest log(n-2)``, ``E_P l = log Z - H(P)``, ``log Z = a r s - log p``, so ``E_P l >= E := a r s - (1-p) log p + pi log pi +
rest log rest - rest log(n-2) = a r s - (1-p)(logit p + h(z) + (1-z) log(n-2))``, ``z = pi/(1-p)``. Row i can only be like that if ``E <= a h`` and ``rest <= (n-2) p e^{a(h - r s)}`` (no logit of the
row exceeds ``|g_i| <= a h``). Then ``|m_i| >= E_+/(a h)`` and ``tr C_i = E|x|^2 - |m_i|^2 <= 1 - (E_+/(a h))^2``, less
``p (1 - r^2) + pi (1 - h^2)`` when A = a I (where ``|x| = |y|``); an atom of mass ``w >= 1/2`` leaves ``4 w (1-w)``. The row j
itself is the same with one known mass: ``E = a r^2 - log w + w log w + (1-w) log(1-w) - (1-w) log(n-1)``, ``w = P_jj``,
``1 - w <= (n-1) w e^{a (r - r^2)}``.

**Bound.** ``||D f||^2 <= v^2 max_r [ S(r) + max_w { (1 + t(r)) w (1 + a^2 r^2 lam) + (1 + 1/t(r)) (sigma lam / v)^2 } ]``. Every
``t > 0``, m, sig is valid; m and sig may depend on r. The maximum over ``(r, h, s, p)`` is by branch and bound: on a cell each
term is taken at its own worst corner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import lambertw, xlog1py, xlogy

from otattn import _validate as check
from otattn.errors import CertificateError
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.relaxations._cells import Maximum, boxes, maximise
from otattn.lipschitz.relaxations._jets import Jet, Pair, variable
from otattn.lipschitz.relaxations.certificate import certify, dual_function, multiplier
from otattn.lipschitz.relaxations.regions import UnitHead, unit_head
from otattn.measures.domains import Domain

__all__ = ["psd"]

Array = NDArray[np.float64]

_SCALE = np.array([1.7, 1.2, 2.9, 9.0])
"""Widths of (r, h, s / h, logit p) over which the bound loses about as much."""

_BINS, _MASSES = 49, 33
_STARTS = {
    (4, 4): (1.47, 1.47, 0.775),
    (4, 8): (1.75, 2.0, 0.49),
    (4, 16): (3.27, 4.5, 0.446),
    (4, 64): (1.13, 2.46, 0.496),
    (9, 4): (6.2, 2.3, 0.26),
    (9, 8): (2.27, 2.19, 0.422),
    (9, 16): (1.7, 3.14, 0.296),
    (9, 64): (1.02, 12.7, 0.232),
    (25, 4): (5.04, 1.65, 0.113),
    (25, 8): (2.0, 1.89, 0.178),
    (25, 16): (1.4, 3.17, 0.187),
    (25, 64): (1.07, 6.2, 0.063),
}


def _mass(w: Array) -> Array:
    """Cells of p are cells of its logit; beyond 30 the mass is 0 or 1."""
    return np.where(w <= -30.0, 0.0, np.where(w >= 30.0, 1.0, 1.0 / (1.0 + np.exp(-np.clip(w, -30.0, 30.0)))))


def _surplus(w0: Array, w1: Array, H: Any) -> Array:
    """``max (w + H) / (1 + e^w)`` over ``[w0, w1]``: increasing up to ``w = 1 - H + W_0(e^{H-1})``, decreasing beyond."""
    w = np.clip(1.0 - H + np.real(lambertw(np.exp(H - 1.0))), w0, w1)
    return np.asarray((w + H) * _mass(-w) * (1 + 1e-13))


def _log_mass(m: Array, w0: Array, w1: Array) -> Array:
    """``max (1-m) log p + m log(1-p)``: concave in p, with its top at ``p = 1 - m``."""
    p = np.clip(1 - m, _mass(w0), _mass(w1))
    return np.asarray(xlog1py(m, -p) + xlogy(1 - m, p))


def _bell(x: Pair) -> Pair:
    """Range of the derivative ``p (1-p)`` of the mass."""
    low, high = _mass(x[0]), _mass(x[1])
    top = np.clip(0.5, low, high)
    return np.minimum(low * (1 - low), high * (1 - high)), top * (1 - top)


def _cut_exp(x: Pair) -> Pair:
    """``exp(min(x, 0))``, and a bound of its slope."""
    return np.exp(np.minimum(x[0], 0.0)), np.exp(np.minimum(x[1], 0.0))


def _most_entropy(q0: Array, q1: Array, m: int) -> Array:
    """``max h(q) + (1-q) log m`` over ``[q0, q1]``: concave with its top at ``1/(m+1)``."""
    q = np.clip(1.0 / (m + 1), q0, q1)
    return np.asarray(-xlogy(q, q) - xlogy(1 - q, 1 - q) + (1 - q) * math.log(m))


@dataclass(frozen=True, eq=False)
class _Problem:
    """``a``, n, ``ratio = sigma/v``, whether A = a I, and ``slack``, the most that a logit may be off (A = PSD + rounding)."""

    a: float
    n: int
    ratio: float
    iso: bool
    slack: float

    def spread(self, h0: Array, h1: Array, u0: Array, u1: Array, w0: Array, w1: Array, r1: Array) -> Array:
        """Upper bound of ``tr C_i`` on cells of ``h, u = r cos(y_i, y_j), logit p`` (N3); nan where no row fits."""
        a, m, e = self.a, max(self.n - 2, 1), self.slack
        p0, p1 = _mass(w0), _mass(w1)
        near = np.clip(0.5 * u1, h0, h1)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            # log of the share z = pi / (1 - p), w + a (h^2 - h u)
            share0 = w0 + a * (near**2 - near * u1) - 2 * e
            share1 = w1 + a * np.maximum(h0**2 - h0 * u0, h1**2 - h1 * u0) + 2 * e
            z0, z1 = np.exp(np.minimum(share0, 0.0)), np.exp(np.minimum(share1, 0.0))
            fits = share0 <= 1e-12
            fits &= 1 - z1 <= m * np.exp(np.minimum(w1 + a * h1 * (1 - u0) + 2 * e, 60.0)) * (1 + 1e-12)
            excess = _surplus(w0, w1, _most_entropy(z0, z1, m)) + 3 * e + 1e-12 * (1 + a)
            mean = u0 - excess / (a * np.where(excess >= 0, h0, h1))
            mean = np.where(np.isnan(mean), -1.0, mean)
            fits &= mean <= 1 + 1e-12
        lam = 1.0 - np.clip(mean, 0.0, 1.0) ** 2
        pi0 = (1 - p1) * z0
        if self.iso:
            lam = lam - p0 * (1 - r1**2) - pi0 * (1 - h1**2)
        for w in (p0, pi0):
            w = np.clip(w, 0.5, 1.0)
            lam = np.minimum(lam, 4 * w * (1 - w))
        return np.where(fits, np.clip(lam + 1e-13, 0.0, 1.0), np.nan)

    def own(self, r0: Array, r1: Array, t: Array, count: int) -> Array:
        """The row j itself: ``max_w (1 + t(r)) w (1 + a^2 r^2 lam) + (1 + 1/t(r)) (ratio lam)^2`` on cells of r."""
        a, m, e = self.a, max(self.n - 1, 1), self.slack
        logit = np.concatenate([[-40.0], np.linspace(-15, 15, count), [40.0]])
        w = _mass(logit)
        w0, w1 = w[:-1, None], w[1:, None]
        near = np.clip(0.5, r0, r1)
        with np.errstate(divide="ignore", invalid="ignore"):
            fits = 1 - w1 <= m * w1 * np.exp(np.minimum(a * (near - near**2) + 2 * e, 60.0)) * (1 + 1e-12)
            E = a * r0**2 - _surplus(logit[:-1, None], logit[1:, None], math.log(m)) - 2 * e - 1e-12 * (1 + a)
            lam = 1.0 - np.where(r1 > 0, (np.maximum(E, 0) / (a * r1 + e)) ** 2, 0.0)
        if self.iso:
            lam = lam - w0 * (1 - r1**2)
        half = np.clip(w0, 0.5, 1.0)
        lam = np.clip(np.minimum(lam, 4 * half * (1 - half)) + 1e-13, 0.0, 1.0)
        high, low = _stretch(t, r0), _stretch(t, r1)
        value = (1 + high) * w1 * (1 + (a * r1 + e) ** 2 * lam) + (1 + 1 / low) * (self.ratio * lam) ** 2
        return np.asarray(np.where(fits, value, 0.0).max(axis=0))


def _stretch(t: Array, h: Array) -> Array:
    """``t(h) = t0 (1-h)^q + t1``, decreasing in h."""
    return np.asarray(t[0] * np.maximum(1 - h, 0.0) ** t[1] + t[2])


@dataclass(frozen=True, eq=False)
class _Columns:
    """Cells of ``(r, h, s / h, logit p)``: bound of ``S(r) + own(r)``, with ``m`` and ``sig`` chosen by intervals of r."""

    problem: _Problem
    t: Array
    m: Array
    sig: Array
    own: Array

    def choice(self, r: Array) -> tuple[Array, Array]:
        """``(m, sig)``, interpolated between equally spaced radii."""
        nodes = np.linspace(0.0, 1.0, len(self.m))
        # the bound is convex in (m, m sig) at fixed r, so these are what is interpolated
        m = np.interp(r, nodes, self.m)
        return m, np.interp(r, nodes, self.m * self.sig) / np.maximum(m, 1e-300)

    def weight(self, lo: Array, hi: Array) -> Array:
        """``log(1 + |g|^2 lam)`` on each cell, nan where it is empty."""
        (r0, h0, c0, w0), (r1, h1, c1, w1) = lo, hi
        u0, u1 = np.where(c0 >= 0, r0, r1) * c0, np.where(c1 >= 0, r1, r0) * c1
        lam = self.problem.spread(h0, h1, u0, u1, w0, w1, r1)
        return np.asarray(np.log1p((self.problem.a * h1 + self.problem.slack) ** 2 * lam))

    def log_sum(self, lo: Array, hi: Array, weight: Array, m: Array, sig: Array) -> Array:
        """The bound of ``log S`` on each cell, given ``log omega``."""
        (r0, h0, c0, w0), (r1, h1, c1, w1) = lo, hi
        s0, s1 = np.where(c0 >= 0, h0, h1) * c0, np.where(c1 >= 0, h1, h0) * c1
        slope0, slope1 = r0 - 2 * sig, r1 - 2 * sig
        line = np.maximum.reduce([slope0 * s0, slope0 * s1, slope1 * s0, slope1 * s1]) + sig**2
        prior = (1 - m) * math.log(max(self.problem.n - 1, 1)) + _log_mass(m, w0, w1)
        return np.asarray(prior + weight + m * (self.problem.a * line + 2 * self.problem.slack))

    def smooth(self, lo: Array, hi: Array, m: Array, sig: Array, tangent: Array) -> tuple[Jet, Jet]:
        """Two majorants of the bound of ``log S`` that have gradients: the spread of N3, and ``4 p (1-p)``.

        ``h(z) + (1-z) log(n-2)`` is concave, so it is replaced by its tangent at the share ``tangent``: E can only fall.
        Where no row fits the majorants bound nothing, and need not.
        """
        prob, t = self.problem, self.t
        a, rest = prob.a, max(prob.n - 2, 1)
        r, h, c, w = (variable(k, lo[k], hi[k]) for k in range(4))
        p = w.through(lambda x: (_mass(x[0]), _mass(x[1])), _bell)
        q = -p + 1.0
        u, h2 = r * c, h.square()
        z = (w + (h2 - h * u) * a).widened(2 * prob.slack).through(_cut_exp, _cut_exp)
        slope = np.log((1 - tangent) / tangent) - math.log(rest)
        entropy = z * slope + (_most_entropy(tangent, tangent, rest) - slope * tangent)
        inverse = h.through(lambda x: (1 / x[1], 1 / x[0]), lambda x: (-1 / x[0] ** 2, -1 / x[1] ** 2))
        mean = u - (q * (w + entropy) + 3 * prob.slack) * inverse * (1 / a)
        square = mean.through(
            lambda x: (np.maximum(x[0], 0) ** 2, np.maximum(x[1], 0) ** 2),
            lambda x: (2 * np.maximum(x[0], 0), 2 * np.maximum(x[1], 0)),
        )
        lam, cap = -square + 1.0, p * q * 4.0
        if prob.iso:
            lam = lam - p * (-r.square() + 1.0) - q * z * (-h2 + 1.0)

        def gain(lam: Jet) -> Jet:
            return (h2 * lam * a**2).through(
                lambda x: (np.log1p(np.maximum(x[0], 0)), np.log1p(np.maximum(x[1], 0))),
                lambda x: (np.where(x[0] > 0, 1 / (1 + np.maximum(x[1], 0)), 0), 1 / (1 + np.maximum(x[0], 0))),
            )

        def fall(x0: Array, x1: Array) -> Array:
            return np.asarray(-t[0] * t[1] * (1 - x0) ** (t[1] - 1) / (1 + _stretch(t, x1)))

        factor = h.through(
            lambda x: (np.log1p(_stretch(t, x[1])), np.log1p(_stretch(t, x[0]))),
            lambda x: (np.minimum(fall(*x), fall(x[1], x[0])), np.maximum(fall(*x), fall(x[1], x[0]))),
        )
        mass = w.through(
            lambda x: (x[0] * 0 - np.inf, _log_mass(m, x[0], x[1])),
            lambda x: (1 - m - _mass(x[1]), 1 - m - _mass(x[0])),
        )
        line = (r - 2 * sig) * h * c * (a * m) + a * m * sig**2
        common = factor + mass + line + ((1 - m) * math.log(max(prob.n - 1, 1)) + 2 * m * prob.slack)
        return gain(lam) + common, gain(cap) + common

    def bound(self, lo: Array, hi: Array) -> tuple[Array, Array]:
        """Logarithm of ``S(r) + own(r)`` on each cell, ``-inf`` where no row fits: the better of corners and mean value.

        The second array says how much of the looseness each side is to blame for.
        """
        middle = 0.5 * (lo + hi)
        m, sig = self.choice(middle[0])
        weight = self.weight(lo, hi) + np.log1p(_stretch(self.t, lo[1]))
        value = np.nan_to_num(self.log_sum(lo, hi, weight, m, sig), nan=-np.inf)
        total = np.where(value > -np.inf, np.logaddexp(value, self.own_over(lo[0], hi[0])), value)
        pull = (hi - lo) / _SCALE[:, None]
        inner = (value > -np.inf) & (hi[3] - lo[3] < 1.5) & (hi[0] - lo[0] < 0.15) & (lo[1] > 0)
        if inner.any():
            args = (x[..., inner] for x in (lo, hi, m, sig, value, total, pull))
            total[inner], pull[:, inner] = self._centred(*args)
        return total, pull

    def _centred(
        self, lo: Array, hi: Array, m: Array, sig: Array, value: Array, total: Array, pull: Array
    ) -> tuple[Array, Array]:
        """``total`` and ``pull`` improved by mean values of ``log(S(r) + own(r))``, own below a line on the cell."""
        middle, widths = 0.5 * (lo + hi), hi - lo
        r, h, c, w = middle
        tangent = np.clip(np.exp(np.minimum(w + self.problem.a * h * (h - r * c), 0.0)), 1e-12, 1 - 1e-3)
        level, slope = self.own_line(lo[0], hi[0], r)
        with np.errstate(all="ignore"):
            centres = self.smooth(middle, middle, m, sig, tangent)
            boxes = self.smooth(lo, hi, m, sig, tangent)
            for k, (centre, box) in enumerate(zip(centres, boxes, strict=True)):
                # the share of S in the sum, as a range over the cell, weighs the two slopes
                swings = box.swings(widths)
                at = centre.value[1]
                reach = swings.sum(axis=0)
                half = 0.5 * widths[0] * np.abs(slope)
                low = 1 / (1 + np.exp(np.minimum(level + half - (at - reach), 50.0)))
                high = 1 / (1 + np.exp(np.clip(level - half - np.minimum(at + reach, value), -50.0, 50.0)))
                ends = [s * x + (1 - s) * slope for s in (low, high) for x in box.slopes[0]]
                swings[0] = 0.5 * widths[0] * np.max(np.abs(ends), axis=0)
                swings[1:] *= high
                centred = np.logaddexp(at, level) + swings.sum(axis=0) + 1e-9
                better = centred < total
                if k == 1:
                    better &= lo[3] >= 0  # the cap is for masses above one half
                total = np.where(better, centred, total)
                # a side that one branch does not feel still separates the branches: it keeps a part of its length
                pull = np.where(better, swings + 0.3 * widths / _SCALE[:, None], pull)
        return total, pull

    def own_line(self, r0: Array, r1: Array, r: Array) -> tuple[Array, Array]:
        """``(level, slope)``: ``log own(x) <= level + slope (x - r)`` for x in ``[r0, r1]``."""
        first, last = self._span(r0, r1)
        row, count = self.own[0], self.own.shape[1]
        slope = (row[last] - row[first]) * count / np.maximum(last - first, 1)
        level = np.full(r.shape, -np.inf)
        for step in range(int((last - first).max(initial=0)) + 1):
            k = np.minimum(first + step, last)
            edge = np.clip(np.where(slope >= 0, k, k + 1) / count, r0, r1)
            level = np.maximum(level, row[k] - slope * (edge - r))
        return level + 1e-12, slope

    def _span(self, r0: Array, r1: Array) -> tuple[Array, Array]:
        count = self.own.shape[1]
        first = np.minimum((r0 * count * (1 - 1e-15)).astype(int), count - 1)
        return first, np.clip(np.ceil(r1 * count * (1 + 1e-15)).astype(int) - 1, first, count - 1)

    def own_over(self, r0: Array, r1: Array) -> Array:
        """Largest ``log own`` over an interval of r, by a table of dyadic maxima."""
        first, last = self._span(r0, r1)
        level = np.log2(last - first + 1).astype(int)
        return np.maximum(self.own[level, first], self.own[level, last + 1 - 2**level])


def _table(values: Array) -> Array:
    """Row k holds the maxima over ``2^k`` consecutive entries."""
    rows = [values]
    while 2 ** len(rows) <= values.size:
        last, half = rows[-1], 2 ** (len(rows) - 1)
        rows.append(np.append(np.maximum(last[:-half], last[half:]), last[-half:]))
    return np.array(rows)


def _columns(prob: _Problem, t: Array, m: Array, sig: Array, *, cells: int, masses: int) -> _Columns:
    edges = np.linspace(0.0, 1.0, cells + 1)
    return _Columns(prob, t, m, sig, _table(np.log(prob.own(edges[:-1], edges[1:], t, masses))))


def _prove(columns: _Columns, tol: float, max_cells: int) -> Maximum:
    count = max(len(columns.m) - 1, 1)
    w = np.concatenate([[-40.0], np.linspace(-12.0, 12.0, 13), [40.0]])
    start = boxes(np.linspace(0, 1, count + 1), np.linspace(0, 1, 7), np.linspace(-1, 1, 9), w)
    floor = float(columns.own[0].max())
    return maximise(columns.bound, *start, tol=tol, max_cells=max_cells, floor=floor, probe=256)


class _Design:
    """Multipliers by sampling: the certified value does not depend on how good the samples are."""

    def __init__(self, prob: _Problem, radii: int) -> None:
        self.prob = prob
        self.at = np.linspace(0.0, 1.0, radii)
        h, c, w = np.linspace(0.04, 1.0, 33), np.cos(np.linspace(0.0, np.pi, 33)), np.linspace(-9.0, 7.0, _MASSES)
        grid = np.meshgrid(np.arange(radii), h, c, np.arange(w.size), indexing="ij")
        k, h, c, j = (x.ravel() for x in grid)
        points = np.array([self.at[k], h, c, w[j]])
        blank = _Columns(prob, np.ones(3), np.zeros(1), np.zeros(1), np.zeros((1, 1)))
        base = blank.weight(points, points)
        # for a mass and an s = h c (in bins), only the h of the largest weight matters
        index = (k * _BINS + np.rint((h * c + 1) * (_BINS - 1) / 2).astype(int)) * w.size + j
        order = np.argsort(index, kind="stable")
        order = order[~np.isnan(base[order])]
        self.base, self.h = base[order], h[order]
        self.slot, self.first = np.unique(index[order], return_index=True)
        self.r, self.p = self.at[:, None, None], _mass(w)
        self.s = np.linspace(-1.0, 1.0, _BINS)[:, None]

    def log_sum(self, top: Array, m: Array, sig: Array) -> Array:
        """The bound of ``log S`` at each radius, at sampled points."""
        m, sig = m[:, None, None], sig[:, None, None]
        line = self.r * self.s - 2 * sig * self.s + sig**2
        value = top + (1 - m) * np.log(self.p) + m * np.log1p(-self.p) + m * self.prob.a * line
        return np.asarray((1 - m[:, 0, 0]) * math.log(max(self.prob.n - 1, 1)) + value.max(axis=(1, 2)))

    def choose(self, t: Array) -> tuple[Array, Array, Array]:
        """``(log S, m, sig)`` by interval for the stretch t."""
        top = np.full(self.at.size * _BINS * _MASSES, -np.inf)
        top[self.slot] = np.maximum.reduceat(self.base + np.log1p(_stretch(t, self.h)), self.first)
        top = top.reshape(self.at.size, _BINS, _MASSES)
        shape = self.at.shape
        best, m, sig = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)

        def attempt(new_m: Array, new_sig: Array) -> None:
            nonlocal best, m, sig
            new_m = np.clip(new_m, 0.0, 1.0)
            value = self.log_sum(top, new_m, new_sig)
            better = value < best
            best, m, sig = np.where(better, value, best), np.where(better, new_m, m), np.where(better, new_sig, sig)

        for x in np.linspace(0.0, 1.0, 9):
            for y in np.linspace(-0.1, 0.7, 9):
                attempt(np.full(shape, x), np.full(shape, y))
        for step in (0.06, 0.03, 0.015):
            for dx in (-step, 0.0, step):
                for dy in (-step, 0.0, step):
                    attempt(m + dx, sig + dy)
        return best, m, sig

    def objective(self, log_t: Array) -> float:
        """Sampled value of the bound, in logarithm."""
        t = np.exp(np.clip(log_t, -12.0, 6.0))
        log_S, _, _ = self.choose(t)
        return float(np.log(np.exp(log_S) + self.prob.own(self.at, self.at, t, 80)).max())


def _problem(problem: Mapping[str, Any]) -> _Problem:
    ratio = float(problem["trace_sigma"]) / float(problem["v"])
    A, a = problem["A"], float(problem["a"])
    if np.any(problem["c"]):
        raise CertificateError("the offset c must be zero.")
    skew = float(np.linalg.norm(A - A.T)) / 2
    low = float(np.linalg.eigvalsh(0.5 * (A + A.T))[0])
    slack = skew + max(0.0, -low) + 16 * len(A) * 2.3e-16 * a
    if slack > 1e-10 * a:
        raise CertificateError("A must be symmetric positive semi-definite.")
    iso = float(np.linalg.norm(A - a * np.eye(len(A)))) <= 1e-13 * len(A) * a
    return _Problem(a, int(problem["n"]), ratio, iso, slack)


@dual_function("psd")
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    t = multiplier(multipliers, "t", (3,), positive=True)
    m, sig = multipliers["m"], multipliers["sig"]
    if m.ndim != 1 or m.shape != sig.shape or not ((m >= 0) & (m <= 1)).all() or not np.isfinite(sig).all():
        raise CertificateError("m must lie in [0, 1] and match sig; run the search again.")
    columns = _columns(_problem(problem), t, m, sig, cells=int(problem["radii"]), masses=int(problem["masses"]))
    found = _prove(columns, float(problem["tol"]), int(problem["max_cells"]))
    top = max(found.value, float(columns.own[0].max()))
    return float(problem["v"]) * math.exp(0.5 * top) * (1 + 1e-11)


def _first_guess(a: float, n: int) -> Array:
    """The stretch found best at the nearest ``(log a, log n)`` of a small table."""
    near = min(_STARTS, key=lambda k: abs(math.log(k[0] / a)) + abs(math.log(k[1] / n)))
    return np.array(_STARTS[near])


def psd(attention: Any, domain: Domain | float, n: int, *, effort: str = "deep") -> Bound:
    """Upper bound T19 of the Lipschitz constant of n tokens, for A symmetric positive semi-definite and no offset.

    Parameters
    ----------
    attention : SoftmaxAttention
        With A symmetric PSD to rounding, any V. A bias, or a domain whose centre is not 0, is refused.
    domain : Domain or float
        A float is the radius of a ball.
    n : int
        Number of tokens, at least 1; T19 is at its best for small n and ``||A|| R^2 <= 100``.
    effort : {"fast", "deep"}
        "fast" takes tabulated multipliers and a gap of 2 percent (about two seconds), "deep" searches for the
        multipliers first and proves within 1 percent (five to ten seconds).

    Returns
    -------
    Certificate
        Multipliers ``t (3,)`` of ``t(h) = t_0 (1-h)^{t_1} + t_2``, and ``m, sig (k,)`` at equally spaced radii.

    Raises
    ------
    ValueError
        A is not symmetric PSD, or the logits have an offset.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = psd(SoftmaxAttention([[0.0]], [[2.0]]), 1.0, 3)
    >>> bound.value == 2.0
    True
    """
    if effort not in ("fast", "deep"):
        raise ValueError(f"effort must be 'fast' or 'deep', received {effort!r}.")
    count = check.count(n, "n")
    head = unit_head(attention, domain)
    source = "otattn/lipschitz/relaxations/psd.py, T19"
    if head.v == 0.0 or count == 1 or (head.a == 0.0 and head.centred):
        # P does not depend on the tokens, or there is one token: f is linear of norm ||V||
        return Bound(head.v, "upper", source, domain=domain, n=count)
    deep = effort == "deep"
    names = ("A", "c", "a", "v", "trace_sigma")
    settings = {"radii": 512, "masses": 200, "tol": 0.02 if deep else 0.04, "max_cells": 400_000 if deep else 80_000}
    problem = {**{k: getattr(head, k) for k in names}, "n": count, **settings}
    try:
        prob = _problem(problem)
    except CertificateError as exc:
        raise ValueError(f"T19 needs symmetric PSD logits without offset on a ball around 0: {exc}") from exc
    t = _first_guess(head.a, count)
    if deep:
        sampled = _Design(prob, 11)
        simplex = np.log(t) + np.vstack([np.zeros(3), 0.3 * np.eye(3)])
        options = {"xatol": 0.02, "fatol": 1e-3, "maxiter": 45, "initial_simplex": simplex}
        t = np.exp(np.clip(minimize(sampled.objective, np.log(t), method="Nelder-Mead", options=options).x, -12.0, 6.0))
    log_S, m, sig = _Design(prob, 25).choose(t)
    sampled_value = head.v * math.sqrt(float((np.exp(log_S) + prob.own(*(np.linspace(0, 1, 25),) * 2, t, 200)).max()))
    return certify(
        "psd",
        problem=problem,
        multipliers={"t": t, "m": m, "sig": sig},
        source=source,
        solver="sampled minimax, branch and bound",
        solver_status="sampled",
        solver_value=sampled_value,
        domain=domain,
        n=count,
        details={"isotropic": prob.iso},
    )
