"""Cell bounds of the column sums behind :mod:`otattn.lipschitz.upper.psd`: each box at its worst corner.

Boxes have the sides ``(r, h, log p, log q)``, named as there. A box is bounded at its worst corner and, to second order, by
its middle plus the largest slopes over it; the smaller of both counts. The entropies enter through tangent planes, which
lie below them everywhere. With intervals for the numbers of the head every bound is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import lower, upper, xlogy
from otattn.lipschitz.constants.cells import boxes
from otattn.lipschitz.upper.psd_multipliers import Multipliers, Tilt
from otattn.lipschitz.upper.psd_rows import Box, Range, Rows, Slopes

OWN_CELLS = 1024
"""Cells of r of the table of own terms."""
_HALVINGS = 5
"""Of the range of losses where the largest term is sought."""
_NEAR_ONE, _NEAR_ZERO = 1 - 1e-9, 1e-6
"""Slopes in p above the first and in h below the second are not used."""


@dataclass(frozen=True, eq=False)
class Columns(Rows):
    """The numbers of a head and the weights of its rows.

    Attributes
    ----------
    split : tuple of float
        ``t = (t0 (1 - h)^g + t1) |C|^power`` with ``t0 >= 0``, ``g >= 1``, ``t1 > 0``.
    eta, tau : float
        ``eta >= 0`` and ``tau > 0`` of the row weights.
    omega : float
        ``omega > 0`` of the metric ``I + (omega/a) g g^T``.
    power, chi : float
        0, or from 1 to 2: of the largest variance in the split; ``chi >= 0`` of the gap.
    """

    split: tuple[float, float, float]
    eta: float
    tau: float
    omega: float
    power: float = 0.0
    chi: float = 0.0

    @property
    def log_least_p(self) -> float:
        """Rows that give less than this to the column are counted together, by :meth:`faint`."""
        return math.log(1e-6 / self.n)

    def faint(self) -> Any:
        """What the rows of tiny p add to a column sum, at most."""
        least = np.exp(self.wrap(self.log_least_p))
        whole = (1 + self.t(self.wrap(np.zeros(1)))[0]) * (1 + self.eta) * (1 + self.a**2)
        return (self.n - 1) * least * whole * (1 + self.omega * self.a)

    def t(self, h: Any) -> Any:
        """The split at a variance of one, decreasing in h."""
        t0, g, t1 = self.split
        return t0 * np.maximum(1 - h, 0.0) ** g + t1

    def _t_slope(self, h: Any) -> Any:
        t0, g, _ = self.split
        # g >= 1, and g - 1 rounded up makes a power of a number below one smaller in size by rounding only
        base = np.maximum(1 - h, 0.0)
        power = base ** (self.wrap(g) - 1.0) if self.exact else base ** (g - 1)
        return -(self.wrap(t0) * g) * power

    def raised(self, x: Any) -> Any:
        """The power of a variance."""
        return x ** self.wrap(self.power) if self.power else np.ones_like(x)

    def split_slopes(self, gamma: Range, h: Range) -> tuple[Range, Range]:
        """Slopes of ``log(1 + t)`` in Gamma and in h, for ``Gamma`` and h in these ranges."""
        most, least = self.variance(np.maximum(gamma.hi, 0.0), h.lo), self.variance(np.maximum(gamma.lo, 0.0), h.hi)
        high, low = self.t(h.lo) * self.raised(most), self.t(h.hi) * self.raised(least)
        drop = Range(
            self._t_slope(h.lo) * self.raised(most) / (1 + low), self._t_slope(h.hi) * self.raised(least) / (1 + high)
        )
        if self.power == 0:
            return Range.of(np.zeros_like(drop.lo)), drop
        # power >= 1: a power of the variance one less is increasing; where the variance meets one the slopes may vanish
        power, bent = self.wrap(self.power), np.asarray(upper(most)) >= 1
        inner = [power * self.t(y) * x ** (power - 1.0) for y, x in ((h.hi, least), (h.lo, most))]
        scale = [np.maximum((self.a * y) ** 2, 1e-300) for y in (h.hi, h.lo)]
        start = np.where(bent, 0.0, inner[0] / scale[0] / (1 + high)), np.where(bent, 0.0, low / (1 + low))
        fall = Range(start[1] / np.maximum(h.hi, _NEAR_ZERO), high / (1 + high) / np.maximum(h.lo, _NEAR_ZERO))
        return Range(start[0], inner[1] / scale[1] / (1 + low)), drop - fall * (2 * self.power)

    def row_weight(self, p: Any, gamma: Any, most: Any = None) -> Any:
        """``c(p, Gamma)``, outward; for an interval ``[p, most]`` its largest value."""
        gamma, tau = gamma + self.grain, self.wrap(self.tau)
        most = p if most is None else most
        lean = (1 + tau) - (1 + 1 / tau) * gamma
        whole = most * (1 + gamma)
        single = (1 + 1 / tau) * gamma + np.where(lean >= 0, most, p) * lean
        return (1 + self.wrap(self.eta)) / (1 / whole + self.eta / single)

    def off(self, lo: Array, hi: Array, multipliers: Multipliers) -> tuple[Array, Array]:
        """Logarithm of the bound of ``sum_{i != j}`` on each box, without the own share; and what loosens it.

        ``multipliers`` has one entry a box.
        """
        box, tilt = self.box(lo, hi), self.tilt(multipliers, hi[0])
        plane = self.plane(box)
        _, reached = self.mean_range(plane, box)
        E = self.tilted(plane, box)
        reach = self.reach(plane, box, self.middle(lo, hi, box.loss), E)
        box = self.at_best_losses(box, reach, tilt)
        at = self.middle(lo, hi, box.loss)
        # |m| is at most the root of the second moment
        keep = self.possible(box) & reached & (reach.hi + self.slack * (1 + self.a) >= box.loss.lo)
        gamma = self.gamma(reach, box)
        # increasing in h, where Gamma is a multiple of h^2
        capped = (self.a * box.h.hi) ** 2 * self.cap(box).hi / self.metric(box.h).hi
        largest = np.minimum(self.thinned(gamma, box).hi, capped)
        value = self.at_corner(box, largest, tilt, self.widest)
        smooth = (upper(box.p.hi) < _NEAR_ONE) & (lower(box.h.lo) > _NEAR_ZERO)
        here = self.reach_at(plane, at)
        slopes = self.reach_slopes(box, E, plane)._replace(loss=Range.of(self.wrap(-np.ones(lo.shape[1]))))
        bound, moves = self.by_middle(box, at, tilt, here - at.loss.lo, gamma, slopes)
        value = np.where(smooth, np.minimum(value, bound), value)
        # the least loss in Gamma, the largest in the crowd: no slopes in h near 0
        crowd = tilt.nu * np.log1p(tilt.zeta * np.minimum(self.gap(box).hi, self.widest))
        fixed, flat = replace(box, loss=Range.of(box.loss.lo)), replace(at, loss=Range.of(box.loss.lo))
        still = tilt._replace(lure=0.0 * tilt.nu)
        slopes, gamma = slopes._replace(loss=Range.of(0.0 * reach.hi)), self.gamma(reach, fixed)
        apart, others = self.by_middle(fixed, flat, still, here - box.loss.lo, gamma, slopes)
        moves = np.where(upper(apart + crowd) < upper(bound), upper(others), upper(moves))
        value = np.where(box.p.hi < _NEAR_ONE, np.minimum(value, apart + crowd), value)
        caps: Any = [(partial(self.capped, own=own), lower(x.lo) > 0.5) for own, x in ((False, box.p), (True, box.q))]
        for cap, holds in (*caps, (self.evened, self.largest(box) < 1)):
            some = np.flatnonzero(smooth & holds)
            part, inside = box.some(some), at.some(some)
            bound, _ = self.by_middle(part, inside, Tilt(*(x[some] for x in tilt)), *cap(part, inside))
            value[some] = np.minimum(value[some], bound)
        r = box.r.hi
        steep = self.square_slope(Range.of(r)).hi + 2 * self.chi
        in_r = 2 * tilt.tail / np.maximum(r, 1e-300) + box.p.hi * (self.a * box.h.hi) ** 2 * steep / (1 + largest)
        pull = np.array([upper(in_r * (r - box.r.lo)), *moves[:3]]) + 1e-12
        return np.asarray(upper(np.where(keep, value, -np.inf))), pull

    def at_best_losses(self, box: Box, reach: Range, tilt: Tilt) -> Box:
        """The boxes with a range of the losses where the terms are at their largest."""
        least, price = self.least_loss(box), self.price(box)
        low = np.maximum(np.asarray(lower(least.lo)), 0.0)
        high = np.maximum(np.minimum(np.asarray(upper(reach.hi)), np.asarray(upper(price.hi * self.widest))), low)
        # below a loss that all rows can have, where all slopes are positive, and above one where all are negative
        below, sure = low.copy(), np.minimum(np.asarray(lower(reach.lo)), np.asarray(lower(price.lo * self.widest)))
        under = np.clip(sure, low, high)
        above, over = high.copy(), low.copy()
        for _ in range(_HALVINGS):
            trial = 0.5 * (below + under)
            up = np.asarray(lower(self.loss_slope(box, reach, tilt, trial, low).lo)) >= 0
            below, under = np.where(up, trial, below), np.where(up, under, trial)
            trial = 0.5 * (over + above)
            down = np.asarray(upper(self.loss_slope(box, reach, tilt, trial, high).hi)) <= 0
            above, over = np.where(down, trial, above), np.where(down, over, trial)
        # no loss is below the least, and one that brings Gamma just to the cap may be the best
        cap = self.cap(box).lo
        some = (lower(cap) < 1) | (self.chi > 0)
        crossing = reach.hi - (self.a * box.h.lo) ** 2 * cap
        last = np.clip(np.maximum(upper(least.hi), np.where(some, upper(crossing), 0.0)), below, high)
        return replace(box, loss=Range(self.wrap(below), self.wrap(np.maximum(above, last))))

    def loss_slope(self, box: Box, reach: Range, tilt: Tilt, loss: Array, end: Array) -> Range:
        """The derivative of the term in the loss, on boxes; for all losses up to the end in the split, which may not be concave."""
        between = Range(self.wrap(np.minimum(loss, end)), self.wrap(np.maximum(loss, end)))
        split, _ = self.split_slopes(self.gamma(reach, replace(box, loss=between)), box.h)
        box = replace(box, loss=Range.of(self.wrap(loss)))
        gamma = self.gamma(reach, box)
        to_gamma, _ = self.weight_slopes(box.p, self.thinned(gamma, box))
        by = self.metric(box.h)
        return self.crowd_slope(box, tilt) - to_gamma * Range(1 / by.hi, 1 / by.lo) - split

    def crowd_slope(self, box: Box, tilt: Tilt) -> Range:
        """The derivative of ``nu log(1 + zeta gap)`` in the loss."""
        price, pull = self.price(box), tilt.lure * tilt.zeta
        low, high = price.hi + tilt.zeta * box.loss.hi, price.lo + tilt.zeta * box.loss.lo
        return Range(pull / np.maximum(low, 1e-300), pull / np.maximum(high, 1e-300))

    def tilt(self, multipliers: Multipliers, r: Array) -> Tilt:
        """The slopes that multipliers stand for, with r at its largest."""
        mu, nu, sigma, _, t, zeta, phi, along_e = (self.wrap(getattr(multipliers, key)) for key in Multipliers.names())
        left = np.maximum(phi - nu * (along_e - t), 0.0)
        kappa = mu - nu * t - phi + left
        along = mu - 2 * kappa * sigma
        level = -0.5 * nu * ((self.d - 1) * np.log1p(-(t**2)) + np.log1p(-(along_e**2)))
        level = level - np.log(phi / self.omega) + phi / self.omega - 1
        tail = kappa * self.a * sigma**2 * self.wrap(r) ** 2
        return Tilt(mu, nu, nu, zeta, along - mu, along, along - nu * t + left, tail, level)

    def metric(self, h: Range) -> Range:
        """``1 + omega a h^2``, the square of what the metric makes of ``g``."""
        return Range(1 + self.omega * self.a * h.lo**2, 1 + self.omega * self.a * h.hi**2)

    def thinned(self, gamma: Range, box: Box) -> Range:
        """Gamma in the metric."""
        by = self.metric(box.h)
        return Range(np.minimum(gamma.lo / by.lo, gamma.lo / by.hi), np.maximum(gamma.hi / by.lo, gamma.hi / by.hi))

    def thinned_slopes(self, gamma: Range, slopes: Slopes, box: Box) -> Slopes:
        """The slopes of Gamma in the metric."""
        by = self.metric(box.h)
        inverse = Range(1 / by.hi, 1 / by.lo)
        bend = self.thinned(gamma, box) * (box.h * (2 * self.omega * self.a))
        return Slopes(*(inverse * x for x in slopes._replace(h=slopes.h - bend)))

    def at_corner(self, box: Box, gamma: Any, tilt: Tilt, most: float = math.inf) -> Any:
        """The logarithm of a term, each of its parts at its worst corner of the box.

        ``gamma`` is the largest ``Gamma`` in the metric, and no gap is above ``most``.
        """
        a, h, lp, lq = self.a, box.h, box.lp, box.lq
        logit = a * np.maximum(tilt.bow * h.lo**2, tilt.bow * h.hi**2)
        logit = logit + np.maximum(-tilt.along * lq.lo, -tilt.along * lq.hi)
        crowd = tilt.lure * np.log1p(tilt.zeta * np.minimum(self.gap(box).hi, most)) - tilt.nu * np.log1p(
            tilt.zeta * self.shortfall(box).lo
        )
        return (
            np.log(self.row_weight(box.p.lo, gamma, box.p.hi))
            + np.log1p(self.t(h.lo) * self.raised(self.variance(gamma * self.metric(h).hi, h.lo)))
            + tilt.mu * np.log1p(-np.minimum(box.p.lo, 1 - 1e-16))
            + np.maximum(tilt.lean * lp.lo, tilt.lean * lp.hi)
            + logit
            + crowd
            + tilt.tail
            + tilt.level
        )

    def term_slopes(self, box: Box, tilt: Tilt) -> Slopes:
        """Slopes of the logarithm of a term without the row weight c and the split."""
        h, p = box.h, box.p
        log_light = [tilt.lean - tilt.mu * x / np.maximum(1 - x, 1e-300) for x in (p.hi, p.lo)]
        z, pull = self.square_slope(h), tilt.nu * tilt.zeta
        short, raw = self.shortfall(box), self.signed_shortfall(box).lo  # held at zero, for no row, it has no slope
        held = (np.asarray(lower(raw)) < 0) & (self.chi > 0)
        fall = Range(np.where(held, 0.0, pull / (1 + tilt.zeta * short.hi)), pull / (1 + tilt.zeta * short.lo))
        own, turn = fall * (z - h * (2 * self.chi)), fall * (self.chi / self.a)
        # nu log(1 + zeta loss / price)
        gap, pull = self.gap(box), tilt.lure * tilt.zeta
        crowd = Range(pull * gap.lo / (1 + tilt.zeta * gap.lo), pull * gap.hi / (1 + tilt.zeta * gap.hi))
        inverse = Range(2 / np.maximum(h.hi, _NEAR_ZERO), 2 / np.maximum(h.lo, _NEAR_ZERO))
        odds = Range(p.lo / np.maximum(1 - p.lo, 1 - _NEAR_ONE), p.hi / np.maximum(1 - p.hi, 1 - _NEAR_ONE))
        in_h = h * (2 * tilt.bow * self.a) + own - crowd * inverse
        return Slopes(in_h, Range(*log_light) + crowd * odds - turn, turn - tilt.along, self.crowd_slope(box, tilt))

    def weight_slopes(self, p: Range, gamma: Range) -> tuple[Range, Range]:
        """Slopes of ``log c`` in Gamma and in ``log p``."""
        tau, g = self.wrap(self.tau), Range(np.maximum(gamma.lo, 0.0), gamma.hi + self.grain)
        up, one = 1 + 1 / tau, 1 + tau
        single = Range(one * p.lo + up * (1 - p.hi) * g.lo, one * p.hi + up * (1 - p.lo) * g.hi)
        whole = Range(p.lo * (1 + g.lo), p.hi * (1 + g.hi))
        # share of the first of the two terms of 1 / c
        share = Range(1 / (1 + self.eta * whole.hi / single.lo), 1 / (1 + self.eta * whole.lo / single.hi))
        rest = Range(1 - share.hi, 1 - share.lo)
        to_gamma = Range(
            share.lo / (1 + g.hi) + rest.lo * up * (1 - p.hi) / single.hi,
            share.hi / (1 + g.lo) + rest.hi * up * (1 - p.lo) / single.lo,
        )
        bend = Range(p.lo / single.hi, p.hi / single.lo) * Range(one - up * g.hi, one - up * g.lo)
        return to_gamma, share + rest * bend

    def by_middle(self, box: Box, at: Box, tilt: Tilt, value: Any, span: Range, slopes: Slopes) -> tuple[Any, Any]:
        """The term at the middle plus what it can rise to the sides, and that rise along each axis ``(4, count)``.

        ``value`` bounds ``Gamma`` at the middle, ``span`` holds that bound on the box, ``slopes`` its derivatives.
        """
        bent, (to_split, in_h) = span.lo < 0, self.split_slopes(span, box.h)
        thin = self.thinned_slopes(span, slopes, box)
        value, span = value / self.metric(at.h).lo, self.thinned(span, box)
        to_gamma, to_log_p = self.weight_slopes(box.p, span)
        rest, moves = self.term_slopes(box, tilt), []
        for axis, slope, raw, own in zip(Slopes._fields, thin, slopes, rest._replace(h=rest.h + in_h), strict=True):
            x = slope * to_gamma + raw * to_split
            # Gamma is zero where it is bent: its slope may vanish
            x = Range(np.where(bent, np.minimum(x.lo, 0), x.lo), np.where(bent, np.maximum(x.hi, 0), x.hi)) + own
            x = x + to_log_p if axis == "lp" else x
            side, middle = getattr(box, axis), getattr(at, axis).lo
            moves.append(x.size() * np.maximum(side.hi - middle, middle - side.lo))
        total = np.stack(moves)
        return self.at_corner(at, np.maximum(value, 0.0), tilt) + total.sum(axis=0), total

    def own(self, r: tuple[Array, Array], q: tuple[Array, Array]) -> Array:
        """Bound of ``(1 + t) c(q, Gamma_j) + (1 + 1/t) min(b tr C_j, a |C_j|)^2`` on cells of ``(r, q = P_jj)``, 0 where empty."""
        a, n = self.a, self.n
        (r0, r1), (q0, q1) = ((self.wrap(x[0]), self.wrap(x[1])) for x in (r, q))
        slack = self.slack
        peak = np.clip(0.5, r0, r1)
        with np.errstate(divide="ignore", invalid="ignore"):
            odds = np.log((1 - q1) / q1), np.log((1 - q0) / q0)
            keep = (odds[0] <= math.log(n - 1) + a * (peak - peak**2) + slack) & (
                odds[1] >= math.log(n - 1) - a * (r1 + r1**2) - slack
            )
            middle = self.wrap(np.minimum(0.5 * (q[0] + q[1]), 1 - 1e-12))
            slope = -1 / middle + np.log((n - 1) * middle / (1 - middle))
            e = -np.log(middle) + xlogy(middle, middle) + xlogy(1 - middle, (1 - middle) / (n - 1))
            E = a * r0**2 + e + np.minimum(slope * (q0 - middle), slope * (q1 - middle))
            mean = np.where(self.loss < E, np.minimum(np.maximum(E - self.loss, 0.0), a * r1) / (a * r1), 0.0)
        keep = keep & (a * r1 + slack >= E)
        spread = 1 - q0 * (1 - self.square(r1)) - mean**2
        spread = np.clip(np.minimum(spread, np.where(q0 > 0.5, 4 * q0 * (1 - q0), 1.0)), 0.0, 1.0)
        most = self.spread(r, (np.log(q[0]), np.log(q[1])))
        by = 1 + self.omega * a * r1**2
        most = np.minimum(spread, most)
        value = (1 + self.t(r0) * self.raised(most)) * self.row_weight(q0, (a * r1) ** 2 * most / by, q1) * by
        # at most b tr C and a |C|, which the split knows
        moved = np.minimum(self.b * spread, a * most)
        short = self.t(r1) * self.raised(np.maximum(moved / a, 1e-100))
        return np.asarray(upper(np.where(keep, value + (1 + 1 / short) * moved**2, 0.0)))

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


class OwnTerm:
    """Largest :meth:`Columns.own` on ranges of r, from its table."""

    def __init__(self, columns: Columns) -> None:
        # one more entry, so that every range has an end
        self.table = np.append(columns.own_table(OWN_CELLS), 0.0)

    def __call__(self, r0: Array, r1: Array) -> Array:
        """Upper bound on ``[r0, r1]``."""
        first = np.clip(np.floor(r0 * OWN_CELLS).astype(int), 0, OWN_CELLS - 1)
        last = np.clip(np.ceil(r1 * OWN_CELLS).astype(int) - 1, first, OWN_CELLS - 1)
        ends = np.stack([first.ravel(), last.ravel() + 1], axis=1).ravel()
        return np.asarray(np.maximum.reduceat(self.table, ends)[::2].reshape(first.shape))
