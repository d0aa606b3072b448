"""The search for the multipliers of :mod:`otattn.lipschitz.upper.psd`, on sampled rows: nothing here is proved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.optimize import minimize
from scipy.special import rel_entr

from otattn._linalg import Array
from otattn.lipschitz.upper.psd_columns import Columns, Multipliers
from otattn.lipschitz.upper.psd_rows import Range


_GAPS = np.linspace(0.0, 1.0, 17)[:, None] ** 2
"""Where the gap of a row is tried, from the least possible to the largest."""
_START = np.array([0.6, 0.6, 0.55, math.log(0.3), 0.4, 1.0])
"""``mu, nu / mu, sigma, log(xi (n - 1)), t, log zeta``."""
_STEPS = np.array([-0.1, -0.2, 0.1, -0.6, 0.15, 0.7])
_LOW = np.array([0.0, 0.0, -3.0, -12.0, 0.0, -6.0])
_HIGH = np.array([1.0, 1.0, 3.0, 3.0, 0.98, 3.0])


@dataclass(frozen=True, eq=False)
class _Rows:
    """Sampled rows that feed a column of radius r: ``z (4, count)``.

    ``gap, gamma (17, count)``: possible gaps, and the largest Gamma with them.
    """

    r: float
    z: Array
    gap: Array
    gamma: Array

    def keep(self, index: Array) -> _Rows:
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


def _evaluate(columns: Columns, r: float, z: Array) -> _Rows:
    """The rows among the points ``z (4, count)`` that are possible."""
    with np.errstate(invalid="ignore"):
        value, _ = columns.off(z, z, Multipliers(*np.zeros((6, z.shape[1]))))
    z = z[:, value > -np.inf]
    box = columns.box(z, z)
    plane = columns.plane(box)
    reach = columns.reach_at(plane, box)
    least, most = columns.gaps(box, Range.of(reach))
    low = np.clip(least.lo, 0.0, 1.0)
    gaps = low + _GAPS * (np.clip(most.hi, low, 1.0) - low)
    cap = (columns.a * z[1]) ** 2 * columns.cap(box)
    gamma = np.minimum(np.maximum(reach - columns.price(box).lo * gaps, 0.0), cap)
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
                    keep.update(np.argsort(values(mu, nu, sigma, None, t, zeta))[-16:].tolist())
    return rows.keep(np.array(sorted(keep)))


class _Values:
    """Logarithm of what each sampled row says of the column sum, as a function of the multipliers."""

    def __init__(self, columns: Columns, rows: _Rows) -> None:
        _, h, lp, lq = rows.z
        p = np.exp(lp)
        light = np.log1p(-np.minimum(p, 1 - 1e-16))
        self.n, self.d, self.bend = columns.n, columns.d, columns.a * rows.r**2
        self.gap, self.short = rows.gap, 1 - columns.square(h)
        self.weight = np.log(columns.row_weight(p, rows.gamma)) + np.log1p(columns.t(h))
        self.square = columns.a * h**2
        self.logit = self.square - lq + lp
        self.odds, self.log_share = light - lp, lq - light

    def __call__(self, mu: float, nu: float, sigma: float, xi: float | None, t: float, zeta: float) -> Array:
        pull = mu - nu * t
        value = (self.weight + nu * np.log1p(zeta * self.gap)).max(axis=0) - nu * np.log1p(zeta * self.short)
        value = value + mu * self.odds + (mu - 2 * pull * sigma) * self.logit + pull * self.bend * sigma**2
        value = value - nu * t * self.square - 0.5 * nu * self.d * math.log1p(-(t**2))
        if xi is None:
            return np.asarray(value + (1 - mu) * math.log(self.n - 1))
        x, log_y, kl = _share_grid(self.n)
        share = ((mu - 1) * np.log(x) - xi / x - (mu - nu) * kl).max(axis=0) + xi * (self.n - 1)
        return np.asarray(value + np.interp(self.log_share, log_y, share))


@lru_cache(maxsize=8)
def _share_grid(n: int) -> tuple[Array, Array, Array]:
    """Grids of shares x (a column) and of ``log y``, and ``kl(x|y)``."""
    x = np.geomspace(0.05 / n, 1 - 1e-9, 40)[:, None]
    y = np.geomspace(0.02 / n, 1 - 1e-9, 40)
    return x, np.log(y), rel_entr(x, y) + rel_entr(1 - x, 1 - y)


def _multipliers(v: Array, n: int) -> Array:
    """``mu, nu, sigma, xi, t, zeta`` from the coordinates of the search."""
    mu, part, sigma, log_xi, t, log_zeta = np.clip(v, _LOW, _HIGH)
    return np.array([mu, mu * part, sigma, math.exp(log_xi) / (n - 1), t, math.exp(log_zeta)])


def _best(columns: Columns, rows: _Rows, start: Array, steps: int) -> tuple[float, Array]:
    """Least maximum over the rows, and the coordinates there."""
    values = _Values(columns, rows)

    def loss(v: Array) -> float:
        outside = float(np.abs(v - np.clip(v, _LOW, _HIGH)).sum())
        return float(values(*_multipliers(v, columns.n)).max()) + outside

    # inward
    steps_in = np.where(start + _STEPS > _HIGH, -_STEPS, np.where(start + _STEPS < _LOW, -_STEPS, _STEPS))
    simplex = start + np.vstack([np.zeros(6), np.diag(steps_in)])
    options = {"xatol": 2e-3, "fatol": 5e-4, "maxiter": steps, "initial_simplex": simplex, "adaptive": True}
    found = minimize(loss, start, method="Nelder-Mead", options=options)
    return float(found.fun), np.clip(found.x, _LOW, _HIGH)


def _own(columns: Columns, r: Array, cells: int) -> Array:
    """Sampled value of the own term at radii r."""
    q = np.geomspace(math.exp(columns.log_least_q), 1.0, cells)
    points = r[:, None], r[:, None]
    return np.asarray(columns.own(points, (q, q)).max(axis=1))


def choose(base: Columns, *, deep: bool) -> Plan:
    """Weights and multipliers that make the sampled bound small."""
    radii = np.linspace(0.1, 1.0, 10 if deep else 7)
    samples = [sample_rows(base, float(r), 2**13 if deep else 2**12) for r in radii]
    memory = [_START for _ in radii]

    def columns_at(v: Array) -> Columns:
        v = np.clip(v, -7.0, 4.0)
        return replace(base, split=(math.exp(v[0]), 1 + math.exp(v[1]), math.exp(v[2])), eta=math.exp(v[3]))

    def loss(v: Array) -> float:
        columns = columns_at(v)
        own = _own(columns, radii, 200)
        worst = 0.0
        # the worst radii first: the others seldom matter
        for k in order:
            log_off, memory[k] = _best(columns, samples[k], memory[k], 25)
            sums[k] = math.exp(log_off) + own[k]
            worst = max(worst, sums[k])
        return math.log(worst) + 0.01 * float(np.abs(v - np.clip(v, -7.0, 4.0)).sum())

    order = list(range(len(radii)))
    sums = np.zeros(len(radii))
    best: tuple[float, Array] = (math.inf, np.zeros(4))
    starts = (
        [[0.1, 0.0, -0.9, -3.5], [0.0, 1.2, -1.8, -1.5], [0.0, 1.6, -2.6, -1.7]] if deep else [[0.1, 0.0, -0.9, -3.5]]
    )
    steps = np.diag([0.3, 0.5, 0.3, 1.5])
    for k in range(len(starts) + deep):
        # the method stalls at kinks: begin again at the best
        first = np.array(starts[k]) if k < len(starts) else best[1]
        simplex = first + np.vstack([np.zeros(4), steps if k < len(starts) else -0.6 * steps * (-1) ** k])
        options = {"xatol": 0.03, "fatol": 2e-3, "maxiter": 40 if deep else 25, "initial_simplex": simplex}
        found = minimize(loss, first, method="Nelder-Mead", options=options)
        if found.fun < best[0]:
            best = (float(found.fun), found.x)
    columns = columns_at(best[1])
    edges = np.linspace(0.0, 1.0, 33 if deep else 17)
    nearest = [int(np.abs(radii - r).argmin()) for r in edges[1:]]
    rows = [sample_rows(columns, float(r), 2**13 if deep else 2**12) for r in edges[1:]]
    starts_at = [memory[k] for k in nearest]
    return _fit(Plan(columns, edges, Multipliers(*np.zeros((6, len(rows)))), rows), starts_at, range(len(rows)))


def _fit(plan: Plan, starts: list[Array], cells: range | list[int]) -> Plan:
    table = np.array([getattr(plan.multipliers, key) for key in Multipliers.names()])
    for k, start in zip(cells, starts, strict=True):
        least, v = _best(plan.columns, plan.rows[k], start, 120)
        # the method stalls at kinks: begin again at the best, and where nothing was known
        for again in (v, _START):
            other, w = _best(plan.columns, plan.rows[k], again, 120)
            if other < least:
                least, v = other, w
        table[:, k] = _multipliers(v, plan.columns.n)
    return replace(plan, multipliers=Multipliers(*table))


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
    mu, nu, sigma, xi, t, zeta = (float(getattr(plan.multipliers, key)[cell]) for key in Multipliers.names())
    coordinates = [mu, nu / max(mu, 1e-9), sigma, math.log(xi * (plan.columns.n - 1)), t, math.log(zeta)]
    return _fit(plan, [np.clip(coordinates, _LOW, _HIGH)], [cell])
