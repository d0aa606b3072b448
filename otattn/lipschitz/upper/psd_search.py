"""The search for the multipliers of :mod:`otattn.lipschitz.upper.psd`, on sampled rows: nothing here is proved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.optimize import Bounds, minimize
from scipy.special import rel_entr

from otattn._linalg import Array
from otattn.lipschitz.upper.psd_columns import Columns
from otattn.lipschitz.upper.psd_multipliers import Multipliers

_GAPS = np.linspace(0.0, 1.0, 17)[:, None] ** 2
"""Where the gap of a row is tried, from the least possible to the largest."""
_START = np.array([0.6, 0.6, 0.55, math.log(0.3), 0.4, 1.0, 0.3])
"""``mu, nu / mu, sigma, log(xi (n - 1)), t, log zeta, phi / omega``."""
_STEP = 1e-5
"""Of the differences that stand for derivatives."""
_CLIMBS = 2
"""Rounds in which the largest rows are sought and the multipliers fitted to them."""
_ALIKE, _CHIS = (1e-2, 12.0), (0.0, 0.25, 0.45)
"""Between these ``||A|| R^2`` rows and the tokens that they see are close to each other, and chi is chosen from these."""
_LARGEST = 80
"""Rows that enter the program of the multipliers."""
_LOW = np.array([1e-3, 0.0, -3.0, -12.0, 0.0, -6.0, 1e-3])
_HIGH = np.array([1.0, 1.0, 3.0, 3.0, 0.98, 6.0, 1.0])


@dataclass(frozen=True, eq=False)
class _Rows:
    """Sampled rows that feed a column of radius r: ``z (4, count)``.

    ``gap, gamma (17, count)``: possible gaps, and the largest Gamma with them.
    """

    r: float
    z: Array
    gap: Array
    gamma: Array

    def keep(self, index: Any) -> _Rows:
        return _Rows(self.r, self.z[:, index], self.gap[:, index], self.gamma[:, index])

    def join(self, other: _Rows) -> _Rows:
        pairs = zip((self.z, self.gap, self.gamma), (other.z, other.gap, other.gamma), strict=True)
        return _Rows(self.r, *(np.hstack(pair) for pair in pairs))


@dataclass(frozen=True, eq=False)
class Plan:
    """Weights of the rows, and multipliers for each cell of r."""

    columns: Columns
    edges: Array
    multipliers: Multipliers
    rows: list[_Rows]
    high: Array
    """Of the coordinates of the multipliers."""


def _high(most_zeta: float) -> Array:
    """``_HIGH`` with the largest zeta."""
    return np.where(np.arange(_HIGH.size) == 5, math.log(most_zeta), _HIGH)


def _nothing(columns: Columns, count: int) -> Multipliers:
    """Multipliers that say nothing."""
    table = np.zeros((len(Multipliers.names()), count))
    table[Multipliers.names().index("phi")] = columns.omega
    return Multipliers(*table)


def _evaluate(columns: Columns, r: float, z: Array) -> _Rows:
    """The rows among the points ``z (4, count)`` that are possible."""
    with np.errstate(invalid="ignore"):
        value, _ = columns.off(z, z, _nothing(columns, z.shape[1]))
    z = z[:, value > -np.inf]
    box = columns.box(z, z)
    plane = columns.plane(box)
    reach = columns.reach_at(plane, box)
    least, price = columns.least_loss(box).lo, np.maximum(columns.price(box).lo, 1e-300)
    most = np.maximum(np.minimum(reach, columns.widest * price), least)
    losses = least + _GAPS * (most - least)
    cap = (columns.a * z[1]) ** 2 * columns.cap(box).hi
    gamma = np.minimum(np.maximum(reach - losses, 0.0), cap)
    gaps = np.minimum(losses / price, columns.widest)
    return _Rows(r, z, gaps, gamma)


def sample_rows(columns: Columns, r: float, count: int) -> _Rows:
    """Possible rows that feed a column of radius r, those whose terms are largest for some weights and multipliers."""
    from scipy.stats import qmc  # half a second, for those who get here

    cube = qmc.Sobol(3, seed=0).random(count).T
    h, lq = cube[0], columns.log_least_q * (1 - cube[1])
    lp = columns.a * (r * h * (2 * cube[2] - 1) - h**2) + lq
    z = np.array([np.full(count, r), h, lp, lq])
    inside = (lp <= 0) & (lp >= columns.log_least_p)
    if columns.n == 2:
        # p + q = 1
        h, p = cube[0], np.clip(cube[1], 1e-6, 1 - 1e-6)
        z = np.array([np.full(count, r), h, np.log(p), np.log1p(-p)])
        inside = np.ones(count, dtype=bool)
    rows = _evaluate(columns, r, z[:, inside])
    if rows.gamma.size == 0:
        # all rows are alike when r = 0
        z = np.array([[r], [0.0], [-math.log(columns.n)], [-math.log(columns.n)]])
        return _Rows(r, z, np.zeros_like(_GAPS), np.zeros_like(_GAPS))
    keep: set[int] = set()
    for eta, t0 in ((0.0, 1.0), (0.5, 0.0)):
        values = _Values(replace(columns, eta=eta, split=(t0, 2.0, 0.4)), rows)
        for mu in (0.0, 0.3, 0.6, 0.9):
            for sigma in (0.3, 0.5, 0.7, 1.0):
                for nu, t, zeta in ((0.0, 0.0, 0.0), (mu, 0.4, 4.0), (mu, 0.7, 1.0)):
                    what = np.array([mu, nu, sigma, 0.0, t, zeta, 1e-9, t])
                    keep.update(np.argsort(values(what, flat=True))[-16:].tolist())
    return rows.keep(np.array(sorted(keep)))


class _Values:
    """Logarithm of what each sampled row says of the column sum, as a function of the multipliers."""

    def __init__(self, columns: Columns, rows: _Rows) -> None:
        _, h, lp, lq = rows.z
        p = np.exp(lp)
        light = np.log1p(-np.minimum(p, 1 - 1e-16))
        self.n, self.d, self.bend = columns.n, columns.d, columns.a * rows.r**2
        self.logit = columns.a * h**2 - lq + lp
        along = columns.chi * (1 + self.logit / columns.a) if columns.chi else 0.0
        self.gap, self.short = rows.gap, 1 - columns.square(h) + along
        self.square, self.omega = columns.a * h**2, columns.omega
        thin = 1 + columns.omega * self.square
        split = columns.t(h) * columns.raised(columns.variance(rows.gamma, h))
        self.weight = np.log(columns.row_weight(p, rows.gamma / thin)) + np.log1p(split)
        self.odds, log_y = light - lp, _share_grid(columns.n)[-1]
        place = np.interp(lq - light, log_y, np.arange(log_y.size))
        self.below = np.minimum(place.astype(int), log_y.size - 2)
        self.above = place - self.below

    def __call__(self, what: Array, *, flat: bool = False) -> Array:
        """At multipliers ``(8,)``, or at ``(8, k)`` of them: ``(count,)`` or ``(k, count)``."""
        mu, nu, sigma, xi, t, zeta, phi, s = np.reshape(what, (8, -1, 1))
        left = np.maximum(phi - nu * (s - t), 0.0)
        kappa = mu - nu * t - phi + left
        value = (self.weight + nu[:, None] * np.log1p(zeta[:, None] * self.gap)).max(axis=1)
        value = value - nu * np.log1p(zeta * self.short) + mu * self.odds + (mu - 2 * kappa * sigma) * self.logit
        value = value + kappa * self.bend * sigma**2 + (left - nu * t) * self.square
        level = np.log(phi / self.omega) - phi / self.omega + 1
        value = value - 0.5 * nu * ((self.d - 1) * np.log1p(-(t**2)) + np.log1p(-(s**2))) - level
        if flat:
            value = value + (1 - mu) * math.log(self.n - 1)
        else:
            x, kl, _ = _share_grid(self.n)
            share = (mu - 1)[:, None] * np.log(x) - xi[:, None] / x - (mu - nu)[:, None] * kl
            share = share.max(axis=1)
            share = share[:, self.below] * (1 - self.above) + share[:, self.below + 1] * self.above
            value = value + share + xi * (self.n - 1)
        return value[0] if np.ndim(what) == 1 else value


@lru_cache(maxsize=8)
def _share_grid(n: int) -> tuple[Array, Array, Array]:
    """A grid of shares x (a column), ``kl(x|y)``, and ``log y`` of a grid of them."""
    x = np.geomspace(0.05 / n, 1 - 1e-9, 40)[:, None]
    y = np.geomspace(0.02 / n, 1 - 1e-9, 40)
    return x, rel_entr(x, y) + rel_entr(1 - x, 1 - y), np.log(y)


def _multipliers(v: Array, columns: Columns) -> Array:
    """``mu, nu, sigma, xi, t, zeta, phi, s`` from the coordinates of the search, ``(7,)`` or ``(7, k)``."""
    mu, part, sigma, log_xi, t, log_zeta, share = np.clip(v.T, _LOW, _HIGH).T
    nu, phi = mu * part, share * columns.omega
    s = np.minimum(t + phi / np.maximum(nu, 1e-9), 0.5 * (1.0 + t))
    return np.array([mu, nu, sigma, np.exp(log_xi) / (columns.n - 1), t, np.exp(log_zeta), phi, s])


def _best(columns: Columns, rows: _Rows, start: Array, high: Array, rounds: int) -> tuple[float, Array]:
    """Least maximum over the rows, and the coordinates there: a program with one inequality for each of the largest rows."""
    values = _Values(columns, rows)
    v = np.clip(start, _LOW, high)
    each = values(_multipliers(v, columns))
    best, chosen = (float(each.max()), v), np.zeros(0, dtype=int)
    bounds = Bounds(np.append(_LOW, -np.inf), np.append(high, np.inf))
    up = np.eye(len(_LOW) + 1)[-1]
    for _ in range(rounds):
        chosen = np.union1d(chosen, np.argsort(each)[-_LARGEST:])
        worst = _Values(columns, rows.keep(chosen))

        def room(x: Array, worst: _Values = worst) -> Array:
            return np.asarray(x[-1] - worst(_multipliers(x[:-1], columns)))

        def slopes(x: Array, worst: _Values = worst) -> Array:
            steps = np.where(x[:-1] + _STEP > high, -_STEP, _STEP)
            points = x[:-1, None] + np.column_stack([np.zeros(steps.size), np.diag(steps)])
            values = worst(_multipliers(points, columns))
            return np.vstack([(values[0] - values[1:]) / steps[:, None], np.ones_like(values[:1])]).T

        found = minimize(
            lambda x: float(x[-1]),
            np.append(v, each.max()),
            jac=lambda x: up,
            constraints={"type": "ineq", "fun": room, "jac": slopes},
            bounds=bounds,
            method="SLSQP",
            options={"maxiter": 40, "ftol": 1e-5},
        )
        v = np.clip(found.x[:-1], _LOW, high)
        each = values(_multipliers(v, columns))
        if each.max() < best[0]:
            best = (float(each.max()), v)
    return best


def _climb(columns: Columns, rows: _Rows, what: Array, seed: int) -> _Rows:
    """More rows, near the largest of these for the given multipliers."""
    rng = np.random.default_rng(seed)
    found = rows.keep(np.argsort(_Values(columns, rows)(what))[-16:])
    for scale in (0.1, 0.03, 0.01):
        z = np.repeat(found.z, 24, axis=1)
        z[1:] += scale * np.array([[1.0], [3.0], [3.0]]) * rng.standard_normal((3, z.shape[1]))
        z[1], z[2:] = np.clip(z[1], 1e-6, 1.0), np.clip(z[2:], columns.log_least_p, -1e-9)
        found = found.join(_evaluate(columns, rows.r, z))
        found = found.keep(np.argsort(_Values(columns, found)(what))[-16:])
    return rows.join(found)


def _own(columns: Columns, r: Array, cells: int) -> Array:
    """Sampled value of the own term at radii r."""
    q = np.geomspace(math.exp(columns.log_least_q), 1.0, cells)
    points = r[:, None], r[:, None]
    return np.asarray(columns.own(points, (q, q)).max(axis=1))


def choose(base: Columns, *, deep: bool, most_zeta: float) -> Plan:
    """Weights and multipliers that make the sampled bound small, ``zeta`` at most so much: the larger, the more boxes."""
    high = _high(most_zeta)
    if deep and _ALIKE[0] <= base.a <= _ALIKE[1]:
        trials = [replace(base, chi=chi) for chi in _CHIS]
        base = min(trials, key=lambda x: _weights(x, high, deep=False)[0])
    _, columns, radii, memory = _weights(base, high, deep=deep)
    edges = np.linspace(0.0, 1.0, 25 if deep else 9)
    nearest = [int(np.abs(radii - r).argmin()) for r in edges[1:]]
    rows = [sample_rows(columns, float(r), 2**13 if deep else 2**12) for r in edges[1:]]
    starts_at = [memory[k] for k in nearest]
    return _fit(Plan(columns, edges, _nothing(columns, len(rows)), rows, high), starts_at, range(len(rows)))


def _weights(base: Columns, high: Array, *, deep: bool) -> tuple[float, Columns, Array, list[Array]]:
    """The sampled bound, good weights, and multipliers at the radii that were tried."""
    radii = np.linspace(0.1, 1.0, 10) if deep else np.linspace(0.2, 1.0, 5)
    samples = [sample_rows(base, float(r), 2**13 if deep else 2**12) for r in radii]
    memory = [_START for _ in radii]

    def columns_at(v: Array, power: float) -> Columns:
        v = np.clip(v, -7.0, 4.0)
        split = math.exp(v[0]), 1 + math.exp(v[1]), math.exp(v[2])
        return replace(base, split=split, eta=math.exp(v[3]), omega=math.exp(v[4]), power=power)

    def loss(v: Array, power: float) -> float:
        columns = columns_at(v, power)
        own = _own(columns, radii, 200)
        worst = 0.0
        for k in range(len(radii)):
            log_off, memory[k] = _best(columns, samples[k], memory[k], high, 2 if deep else 1)
            worst = max(worst, math.exp(log_off) + own[k])
        return math.log(worst) + 0.01 * float(np.abs(v - np.clip(v, -7.0, 4.0)).sum())

    best: tuple[float, Array, float] = (math.inf, np.zeros(5), 0.0)
    starts, powers = [[0.1, 0.0, -0.9, -3.5, -1.5]], [0.0]
    if deep:
        starts += [[0.0, 1.2, -1.8, -1.5, -1.0], [0.0, 1.6, -2.6, -1.7, -3.0], [-0.3, 0.0, 0.2, -1.5, -3.0]]
        powers += [0.0, 0.0, 1.5]
    steps = np.diag([0.3, 0.5, 0.3, 1.5, 0.7])
    for k in range(len(starts) + deep):
        # the method stalls at kinks: begin again at the best
        first, power = (np.array(starts[k]), powers[k]) if k < len(starts) else best[1:]
        simplex = first + np.vstack([np.zeros(5), steps if k < len(starts) else 0.6 * steps])
        options = {"xatol": 0.03, "fatol": 2e-3, "maxiter": 40, "initial_simplex": simplex}
        found = minimize(loss, first, args=(power,), method="Nelder-Mead", options=options)
        if found.fun < best[0]:
            best = (float(found.fun), found.x, power)
    return best[0], columns_at(*best[1:]), radii, memory


def _fit(plan: Plan, starts: list[Array], cells: range | list[int]) -> Plan:
    table = np.array([getattr(plan.multipliers, key) for key in Multipliers.names()])
    all_rows = list(plan.rows)
    for k, v in zip(cells, starts, strict=True):
        rows = all_rows[k]
        for seed in range(_CLIMBS):
            _, v = min(
                (_best(plan.columns, rows, start, plan.high, 3) for start in (v, _START)), key=lambda pair: pair[0]
            )
            rows = _climb(plan.columns, rows, _multipliers(v, plan.columns), seed)
        _, v = _best(plan.columns, rows, v, plan.high, 3)
        all_rows[k], table[:, k] = rows, _multipliers(v, plan.columns)
    return replace(plan, multipliers=Multipliers(*table), rows=all_rows)


def add_rows(plan: Plan, cell: int, z: Array) -> Plan:
    """The plan with the points ``z (4, count)`` among the rows of one cell of r."""
    rows = list(plan.rows)
    old = rows[cell]
    z = z.copy()
    z[0] = old.r
    rows[cell] = old.join(_evaluate(plan.columns, old.r, z))
    return replace(plan, rows=rows)


def refine(plan: Plan, cell: int) -> Plan:
    """New multipliers for one cell of r, from its rows."""
    mu, nu, sigma, xi, t, zeta, phi, _ = (float(getattr(plan.multipliers, key)[cell]) for key in Multipliers.names())
    logs = math.log(xi * (plan.columns.n - 1)), math.log(zeta)
    coordinates = [mu, nu / max(mu, 1e-9), sigma, logs[0], t, logs[1], phi / plan.columns.omega]
    return _fit(plan, [np.clip(coordinates, _LOW, plan.high)], [cell])
