"""What a row of attention can be, on boxes of ``(r, h, log p, log q)``: N3 of :mod:`otattn.lipschitz.upper.psd`.

The entropies enter through tangent planes, which lie below them everywhere. With intervals for the numbers of the head
every range is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import is_interval, lift, lower, upper, xlogy
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.constants.row_spread import Spread, spread_of

SLACK = 1e-10
"""Relative slack of the conditions under which a box is called empty."""


@dataclass(frozen=True, eq=False)
class Range:
    """Numbers from ``lo`` to ``hi``, one range a box; sums and products of them hold all sums and products."""

    lo: Any
    hi: Any
    # numpy leaves an operation with a range to the range
    __array_ufunc__ = None

    @staticmethod
    def of(x: Any) -> Range:
        """A number as a range of length 0."""
        return x if isinstance(x, Range) else Range(x, x)

    def __add__(self, other: Any) -> Range:
        y = Range.of(other)
        return Range(self.lo + y.lo, self.hi + y.hi)

    def __neg__(self) -> Range:
        return Range(-self.hi, -self.lo)

    def __sub__(self, other: Any) -> Range:
        y = Range.of(other)
        return Range(self.lo - y.hi, self.hi - y.lo)

    def __mul__(self, other: Any) -> Range:
        if not isinstance(other, Range):
            x, y = self.lo * other, self.hi * other
            return Range(np.minimum(x, y), np.maximum(x, y))
        a, b, c, d = (x * y for x in (self.lo, self.hi) for y in (other.lo, other.hi))
        return Range(*(f(f(a, b), f(c, d)) for f in (np.minimum, np.maximum)))

    __radd__, __rmul__ = __add__, __mul__

    def __pow__(self, k: float) -> Range:
        """A power of a range that is not negative."""
        return Range(self.lo**k, self.hi**k)

    def exp(self) -> Range:
        """The range of the exponential."""
        low = np.exp(self.lo)
        return Range(low, low if self.hi is self.lo else np.exp(self.hi))

    def some(self, index: Any) -> Range:
        """The ranges of some boxes."""
        return Range(self.lo[index], self.hi[index])

    def size(self) -> Any:
        """The largest size of a number of the range."""
        return np.maximum(np.abs(self.lo), np.abs(self.hi))


@dataclass(frozen=True, eq=False)
class Box:
    """Boxes of rows: the ranges of r, h, log p, log q and loss, with those of p and q. A point is a box of width 0."""

    r: Range
    h: Range
    lp: Range
    lq: Range
    loss: Range
    p: Range = field(init=False)
    q: Range = field(init=False)

    def sides(self) -> tuple[Range, Range, Range]:
        """The ranges of h, log p and log q."""
        return self.h, self.lp, self.lq

    def some(self, index: Any) -> Box:
        """Some of the boxes."""
        return Box(*(x.some(index) for x in (self.r, *self.sides(), self.loss)))

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", self.lp.exp())
        object.__setattr__(self, "q", self.lq.exp())


class Plane(NamedTuple):
    """The tangent plane ``e0 + ep (p - pt) + eq (q - qt)`` of the convex ``-log q - H(P_i)``."""

    e0: Any
    ep: Any
    eq: Any
    pt: Any
    qt: Any


class Slopes(NamedTuple):
    """Ranges of the derivatives in h, log p, log q and loss."""

    h: Range
    lp: Range
    lq: Range
    loss: Range


@dataclass(frozen=True, eq=False)
class Rows:
    """The numbers of a head, and what they allow a row to be.

    Attributes
    ----------
    a, b, stretch : float
        ``||A|| R^2``; ``sup ||V C A|| / (||V|| tr C)``; ``a`` over the least eigenvalue (inf when it is zero).
    n, d : int
        Number of tokens, at least 2, and their dimension.
    """

    a: Any
    b: Any
    stretch: Any
    n: int
    d: int
    # of the gap, 1 - z(h) + chi (1 + <y, y_j>): a field of the columns
    chi = 0.0

    @property
    def exact(self) -> bool:
        """True in interval arithmetic."""
        return is_interval(self.a)

    def wrap(self, x: Any) -> Any:
        """Floats as the kind of number that the head has."""
        return lift(x) if self.exact else x

    @property
    def slack(self) -> float:
        """By how much a row may break a condition before its box is called empty."""
        return SLACK * (1 + top(self.a))

    @property
    def log_least_q(self) -> float:
        """No token gives itself less: ``<g_i, x_k - x_i> <= a (h - h^2) <= a/4``."""
        return -float(np.logaddexp(0.0, math.log(max(1, self.n - 1)) + top(self.a) / 4)) - 1e-9

    @property
    def loss(self) -> float:
        """Above what rounding can add to ``E``, a sum of terms of at most ``a`` and ``-log q``."""
        return 0.0 if self.exact else 1e-13 * (1 + self.a - self.log_least_q)

    @property
    def grain(self) -> float:
        """Above what rounding can take from ``Gamma``, a difference of terms of at most ``a^2``."""
        return 0.0 if self.exact else 1e-14 * self.a**2

    @cached_property
    def spread(self) -> Spread:
        """The largest variances of rows in one direction."""
        make = Spread if self.exact else spread_of
        return make(self.a, self.stretch, self.n, self.log_least_q)

    def square(self, r: Any) -> Any:
        """``z(r)``, the largest ``|x|^2`` when ``|A^{1/2} x| = sqrt(a) r``."""
        return np.minimum(1.0, self.stretch * r**2) if math.isfinite(top(self.stretch)) else np.ones_like(r)

    def square_slope(self, r: Range) -> Range:
        """``z'`` on ranges."""
        if not math.isfinite(top(self.stretch)):
            return Range(np.zeros_like(r.lo), np.zeros_like(r.lo))
        low = np.where(self.stretch * r.hi**2 < 1, 2 * self.stretch * r.lo, 0.0)
        return Range(low, np.where(self.stretch * r.lo**2 < 1, 2 * self.stretch * r.hi, 0.0))

    def box(self, lo: Array, hi: Array) -> Box:
        """The boxes with the corners ``lo, hi (4, count)``."""
        r, h, lp, lq = (Range(x, y) for x, y in zip(self.wrap(lo), self.wrap(hi), strict=True))
        return Box(r, h, lp, lq, Range.of(self.wrap(np.zeros(lo.shape[1]))))

    def middle(self, lo: Array, hi: Array, loss: Range) -> Box:
        """Their middles in h, log p, log q and loss."""
        h, lp, lq = (Range.of(x) for x in self.wrap(0.5 * (lo[1:] + hi[1:])))
        between = 0.5 * (np.asarray(lower(loss.lo)) + np.asarray(upper(loss.hi)))
        return Box(Range(self.wrap(lo[0]), self.wrap(hi[0])), h, lp, lq, Range.of(self.wrap(between)))

    def possible(self, box: Box) -> Any:
        """Boxes that may meet ``p + q <= 1``, ``|l_ij| <= a r h`` and ``|l_ik| <= a h`` for the other tokens k."""
        a, n, slack = self.a, self.n, self.slack
        r, h, lp, lq = box.r.hi, box.h, box.lp, box.lq
        logit = a * h**2 - lq + lp
        keep = (logit.lo <= a * r * h.hi + slack) & (logit.hi >= -a * r * h.hi - slack)
        keep = keep & (box.p.lo + box.q.lo <= 1 + slack)
        # the share of the other tokens
        rho = Range(*(np.clip(1 - x - y, 0.0, 1.0) for x, y in ((box.p.hi, box.q.hi), (box.p.lo, box.q.lo))))
        if n == 2:
            return keep & (rho.lo <= slack)
        peak = np.clip(0.5, h.lo, h.hi)
        # the slack is far above the rounding of the logarithm of n - 2
        with np.errstate(divide="ignore"):
            keep = keep & (np.log(rho.hi + slack) >= math.log(n - 2) + lq.lo - a * (h.hi + h.hi**2) - slack)
            most = math.log(n - 2) + lq.hi + a * (peak - peak**2) + slack
            return keep & (np.log(np.maximum(rho.lo - slack, 0.0)) <= most)

    def plane(self, box: Box) -> Plane:
        """The tangent plane at a point near the middle of each box, where the other tokens have a share left."""
        p0, p1, q0, q1 = (np.asarray(upper(x)) for x in (box.p.lo, box.p.hi, box.q.lo, box.q.hi))
        inward = np.minimum(0.5, 0.5 * np.clip(1 - p0 - q0, 0.0, 1.0) / np.maximum(p1 - p0 + q1 - q0, 1e-300))
        p, q = p0 + inward * (p1 - p0), q0 + inward * (q1 - q0)
        shrink = np.where(1 - p - q < 1e-14, (1 - 2e-14) / np.maximum(p + q, 0.5), 1.0)
        p, q = self.wrap(p * shrink), self.wrap(q * shrink)
        value = -np.log(q) + xlogy(p, p) + xlogy(q, q)
        if self.n == 2:
            return Plane(value, np.log(p) + 1, -1 / q + np.log(q) + 1, p, q)
        rho, others = np.maximum(1 - p - q, 1e-300), self.n - 2
        slopes = np.log(others * p / rho), -1 / q + np.log(others * q / rho)
        return Plane(value + xlogy(rho, rho / others), *slopes, p, q)

    def mean(self, plane: Plane, h: Any, p: Any, q: Any) -> Any:
        """``E`` with the plane in place of the entropies: at most ``<g_i, m_i>``. Numbers or ranges."""
        return self.a * h**2 + plane.e0 + plane.ep * (p - plane.pt) + plane.eq * (q - plane.qt)

    def mean_range(self, plane: Plane, box: Box) -> tuple[Range, Any]:
        """``E_+`` on the boxes, and where ``a h >= E`` can hold."""
        E = self.mean(plane, box.h, box.p, box.q)
        return Range(np.maximum(E.lo - self.loss, 0.0), np.maximum(E.hi, 0.0)), self.a * box.h.hi + self.slack >= E.lo

    def tilted(self, plane: Plane, box: Box) -> Range:
        """``(E - chi l_ij / 2)_+`` on the boxes, or at points."""
        half, h = 0.5 * self.chi, box.h
        E = self.mean(plane, h, box.p, box.q) - h**2 * (self.a * half) + (box.lq - box.lp) * half
        return Range(np.maximum(E.lo - self.loss, 0.0), np.maximum(E.hi, 0.0))

    @property
    def widest(self) -> float:
        """Above every gap."""
        return 1 + 2 * self.wrap(self.chi)

    def shortfall(self, box: Box) -> Range:
        """The gap that the row's own token makes, which is not negative for a row that exists."""
        short = self.signed_shortfall(box)
        return Range(np.maximum(short.lo, 0.0), np.maximum(short.hi, 0.0))

    def signed_shortfall(self, box: Box) -> Range:
        """``1 - z(h) + chi (1 + l_ij / a)``."""
        length = Range(1 - self.square(box.h.hi), 1 - self.square(box.h.lo))
        if not self.chi:  # a may be too small to divide by
            return length
        return length + ((box.h**2 * self.a - box.lq + box.lp) * (1 / self.a) + 1.0) * self.chi

    def seen(self, box: Box) -> Range:
        """``1 - p (1 - z(r)) + chi (1 - p + chi r^2 / 4 - p r^2)``, each r at its worst."""
        of_j, inner, outer = 1 - self.square(box.r.hi), self.chi * box.r.lo**2, self.chi * box.r.hi**2
        high = 1 + self.chi * (1 + 0.25 * outer)
        return Range(high - box.p.hi * (of_j + self.chi + inner), high - box.p.lo * (of_j + self.chi + inner))

    def reach_at(self, plane: Plane, at: Box) -> Any:
        """``a^2 h^2 seen - (E - chi l_ij / 2)_+^2``, Gamma without the loss, at points."""
        E = self.tilted(plane, at).lo
        return (self.a * at.h.lo) ** 2 * self.seen(at).hi - E**2

    def reach(self, plane: Plane, box: Box, at: Box, E: Range) -> Range:
        """Its range: that of its parts, and the value at the middle with the largest slopes. ``E`` is :meth:`tilted`."""
        seen = self.seen(box)
        low = (self.a * box.h.lo) ** 2 * seen.lo - E.hi**2
        high = (self.a * box.h.hi) ** 2 * seen.hi - E.lo**2
        middle, move = self.reach_at(plane, at), self.grain
        for slope, side, x in zip(self.reach_slopes(box, E, plane), box.sides(), at.sides(), strict=False):
            move = move + slope.size() * np.maximum(side.hi - x.lo, x.lo - side.lo)
        return Range(np.maximum(low, middle - move), np.minimum(high, middle + move))

    def reach_slopes(self, box: Box, E: Range, plane: Plane) -> Slopes:
        """Its slopes: ``2 a h (a seen - (2 - chi) E)`` in h, and so on."""
        a, p, q, half = self.a, box.p, box.q, 0.5 * self.chi
        ah, twice = Range(a * box.h.lo, a * box.h.hi), Range(2 * E.lo, 2 * E.hi)
        of_j = 1 - self.square(box.r.hi) + self.chi * (1 + box.r.lo**2)
        return Slopes(
            ah * (self.seen(box) * (2 * a) - twice * (2 - self.wrap(self.chi))),
            -(Range(ah.lo**2, ah.hi**2) * (p * of_j)) - twice * (p * plane.ep - half),
            -(twice * (q * plane.eq + half)),
            Range.of(np.zeros_like(p.lo)),
        )

    def price(self, box: Box) -> Range:
        """``a^2 h^2 (1 - p)``, the loss that a gap of one makes."""
        return Range((self.a * box.h.lo) ** 2 * (1 - box.p.hi), (self.a * box.h.hi) ** 2 * (1 - box.p.lo))

    def gap(self, box: Box) -> Range:
        """``loss / price``, at most one for real rows."""
        price = self.price(box)
        return Range(box.loss.lo / np.maximum(price.hi, 1e-300), box.loss.hi / np.maximum(price.lo, 1e-300))

    def gamma(self, reach: Range, box: Box) -> Range:
        """``reach - loss``, which bounds Gamma. A negative lower end says only that 0 is met."""
        return Range(reach.lo - box.loss.hi, np.maximum(reach.hi - box.loss.lo, 0.0))

    def least_loss(self, box: Box) -> Range:
        """``a^2 h^2 q`` times the gap that the token i makes: it is one of the others."""
        short = self.shortfall(box)
        return Range((self.a * box.h.lo) ** 2 * box.q.lo * short.lo, (self.a * box.h.hi) ** 2 * box.q.hi * short.hi)

    def cap(self, box: Box) -> Range:
        """The variance in one direction: ``4 x (1 - x)`` where a token's share x exceeds one half, for x = p and x = q, and
        :attr:`spread`."""
        sure = [x.lo > 0.5 for x in (box.p, box.q)]
        low, high = (
            [np.where(more, 4 * x * (1 - x), 1.0) for more, x in zip(sure, ends, strict=True)]
            for ends in ((box.p.hi, box.q.hi), (box.p.lo, box.q.lo))
        )
        most = self.largest(box)
        return Range(*(np.minimum(np.minimum(*x), most) for x in (low, high)))

    def variance(self, gamma: Any, h: Any) -> Any:
        """``Gamma / (a h)^2``, at most one."""
        return np.minimum(gamma / np.maximum((self.a * h) ** 2, 1e-300), 1.0)

    def largest(self, box: Box) -> Array:
        """The largest variance in one direction, one number a box."""
        h, lq = ((np.asarray(lower(x.lo)), np.asarray(upper(x.hi))) for x in (box.h, box.lq))
        return self.spread(h, lq)

    def evened(self, box: Box, at: Box) -> tuple[Any, Range, Slopes]:
        """``a^2 h^2`` times the largest variance of each box: at points, on boxes, its slopes."""
        most, (h0, h1), zero = self.largest(box), (box.h.lo, box.h.hi), Range.of(np.zeros_like(at.p.lo))
        square = Range((self.a * h0) ** 2 * most, (self.a * h1) ** 2 * most)
        in_h = Range(2 * self.a**2 * h0 * most, 2 * self.a**2 * h1 * most)
        return (self.a * at.h.lo) ** 2 * most, square, Slopes(in_h, zero, zero, zero)

    def capped(self, box: Box, at: Box, *, own: bool) -> tuple[Any, Range, Slopes]:
        """``4 a^2 h^2 x (1 - x)`` for a share x above one half, q if ``own`` and p else: at points, on boxes, its slopes."""
        a, h, x, y = self.a, box.h, box.q if own else box.p, at.q.lo if own else at.p.lo
        span = Range(4 * (a * h.lo) ** 2 * x.hi * (1 - x.hi), 4 * (a * h.hi) ** 2 * x.lo * (1 - x.lo))
        in_h = Range(8 * a**2 * h.lo * x.hi * (1 - x.hi), 8 * a**2 * h.hi * x.lo * (1 - x.lo))
        in_x = Range(4 * (a * h.hi) ** 2 * x.hi * (1 - 2 * x.hi), 4 * (a * h.lo) ** 2 * x.lo * (1 - 2 * x.lo))
        zero = Range.of(np.zeros_like(y))
        return 4 * (a * at.h.lo) ** 2 * y * (1 - y), span, Slopes(in_h, *((zero, in_x) if own else (in_x, zero)), zero)
