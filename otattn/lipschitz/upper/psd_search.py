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


@dataclass(frozen=True, eq=False)
class _Rows:
    """Sampled rows that feed a column of radius r: ``z (4, count)`` and their ``Gamma``."""

    r: float
    z: Array
    gamma: Array

    def keep(self, index: Array) -> _Rows:
        return _Rows(self.r, self.z[:, index], self.gamma[index])


@dataclass(frozen=True, eq=False)
class Plan:
    """Weights of the rows, and multipliers for each cell of r."""

    columns: Columns
    edges: Array
    multipliers: Multipliers
    rows: list[_Rows]


def _evaluate(columns: Columns, r: float, z: Array) -> _Rows:
    """The rows among the points ``z`` that are possible."""
    plain = replace(columns, eta=0.0)
    zero = np.zeros(z.shape[1])
    value, _ = plain.off(z, z, Multipliers(zero, zero, zero))
    live = value > -np.inf
    z, value = z[:, live], value[live]
    return _Rows(r, z, np.expm1(value - np.log1p(columns.t(z[1])) - z[2]))


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
        return _Rows(r, np.array([[r], [0.0], [-math.log(columns.n)], [-math.log(columns.n)]]), np.zeros(1))
    keep: set[int] = set()
    for eta, t0 in ((0.0, 1.0), (0.5, 0.0)):
        weights = replace(columns, eta=eta, split=(t0, 2.0, 0.4))
        values = _Values(weights, rows)
        for mu in (0.0, 0.3, 0.6, 0.9):
            for sigma in (0.3, 0.5, 0.7, 1.0):
                keep.update(np.argsort(values(mu, sigma))[-20:].tolist())
    return rows.keep(np.array(sorted(keep)))


class _Values:
    """Logarithm of what each sampled row says of the column sum, as a function of the multipliers."""

    def __init__(self, columns: Columns, rows: _Rows) -> None:
        _, h, lp, lq = rows.z
        p = np.exp(lp)
        light = np.log1p(-np.minimum(p, 1 - 1e-16))
        self.n, self.bend = columns.n, columns.a * rows.r**2
        self.weight = np.log(columns.row_weight(p, rows.gamma)) + np.log1p(columns.t(h))
        self.logit = columns.a * h**2 - lq + lp
        self.odds, self.log_share = light - lp, lq - light

    def __call__(self, mu: float, sigma: float, xi: float | None = None) -> Array:
        value = self.weight + mu * (self.odds + (1 - 2 * sigma) * self.logit) + mu * self.bend * sigma**2
        if xi is None:
            return np.asarray(value + (1 - mu) * math.log(self.n - 1))
        x, log_y, kl = _share_grid(self.n)
        share = ((mu - 1) * np.log(x) - xi / x - mu * kl).max(axis=0) + xi * (self.n - 1)
        return np.asarray(value + np.interp(self.log_share, log_y, share))


@lru_cache(maxsize=8)
def _share_grid(n: int) -> tuple[Array, Array, Array]:
    """Grids of shares x (a column) and of ``log y``, and ``kl(x|y)``."""
    x = np.geomspace(0.05 / n, 1 - 1e-9, 40)[:, None]
    y = np.geomspace(0.02 / n, 1 - 1e-9, 40)
    return x, np.log(y), rel_entr(x, y) + rel_entr(1 - x, 1 - y)


def _best(columns: Columns, rows: _Rows, start: Array, steps: int) -> tuple[float, Array]:
    """Least maximum over the rows, and ``(mu, sigma, log(xi (n - 1)))`` there."""
    values = _Values(columns, rows)

    def loss(v: Array) -> float:
        mu = min(max(v[0], 0.0), 1.0)
        xi = math.exp(min(max(v[2], -12.0), 3.0)) / (columns.n - 1)
        return float(values(mu, v[1], xi).max()) + 10 * abs(v[0] - mu)

    simplex = start + np.array([[0, 0, 0], [-0.1, 0, 0], [0, 0.1, 0], [0, 0, -0.6]])
    options = {"xatol": 2e-3, "fatol": 5e-4, "maxiter": steps, "initial_simplex": simplex}
    found = minimize(loss, start, method="Nelder-Mead", options=options)
    v = np.array([min(max(found.x[0], 0.0), 1.0), found.x[1], min(max(found.x[2], -12.0), 3.0)])
    return float(found.fun), v


def _own(columns: Columns, r: Array, cells: int) -> Array:
    """Sampled value of the own term at radii r."""
    q = np.geomspace(math.exp(columns.log_least_q), 1.0, cells)
    points = r[:, None], r[:, None]
    return np.asarray(columns.own(points, (q, q)).max(axis=1))


def choose(base: Columns, *, deep: bool) -> Plan:
    """Weights and multipliers that make the sampled bound small."""
    radii = np.linspace(0.1, 1.0, 10 if deep else 7)
    samples = [sample_rows(base, float(r), 2**13 if deep else 2**12) for r in radii]
    memory = [np.array([0.6, 0.55, math.log(0.3)]) for _ in radii]

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
    return _fit(Plan(columns, edges, Multipliers(*np.zeros((3, len(rows)))), rows), starts_at, range(len(rows)))


def _fit(plan: Plan, starts: list[Array], cells: range | list[int]) -> Plan:
    mu, sigma, xi = (x.copy() for x in (plan.multipliers.mu, plan.multipliers.sigma, plan.multipliers.xi))
    for k, start in zip(cells, starts, strict=True):
        _, v = _best(plan.columns, plan.rows[k], start, 60)
        mu[k], sigma[k], xi[k] = v[0], v[1], math.exp(v[2]) / (plan.columns.n - 1)
    return replace(plan, multipliers=Multipliers(mu, sigma, xi))


def add_rows(plan: Plan, cell: int, z: Array) -> Plan:
    """The plan with the points ``z (4, count)`` among the rows of one cell of r."""
    rows = list(plan.rows)
    old = rows[cell]
    z = z.copy()
    z[0] = old.r
    new = _evaluate(plan.columns, old.r, z)
    rows[cell] = _Rows(old.r, np.hstack([old.z, new.z]), np.concatenate([old.gamma, new.gamma]))
    return replace(plan, rows=rows)


def refine(plan: Plan, cell: int) -> Plan:
    """New multipliers for one cell of r, from its rows."""
    m = plan.multipliers
    start = np.array([m.mu[cell], m.sigma[cell], math.log(m.xi[cell] * (plan.columns.n - 1))])
    return _fit(plan, [start], [cell])
