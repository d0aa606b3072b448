"""Attacks on proven numbers without an attention map: constants of a row, covariances over weights, norms on domains."""

from __future__ import annotations

from collections.abc import Callable

import mpmath as mp
import numpy as np
from ascent import ascend
from exact import exact, norm, plus, times
from outcomes import Outcome, Refused, asked, attempt, settled
from regions import Region, region

import otattn as oa

B, R = oa.bounds, oa.relaxations


def covariance(rng: np.random.Generator) -> Outcome:
    """Weights between two bounds, filled up greedily along random directions."""
    name = "relaxations.interval_simplex"
    n, d = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    y = rng.standard_normal((n, d)) * 10 ** rng.uniform(-2, 2) + rng.standard_normal(d) * rng.integers(2)
    low = rng.dirichlet(np.ones(n)) * rng.random()
    high = np.minimum(1.0, low + rng.exponential(size=n) * (1 - low.sum()))
    about = (y.tolist(), low.tolist(), high.tolist())
    return attempt(name, lambda: _covariance(name, rng, y, low, high, about), "points", about)


def _covariance(name, rng, y, low, high, about) -> Outcome:
    bound, d = asked(lambda: R.interval_simplex(y, low, high)).value, y.shape[1]
    best, where = -1.0, None
    for _ in range(60):
        room, p = 1.0 - low.sum(), low.copy()
        for j in np.argsort(-np.abs(y @ rng.standard_normal(d) + rng.standard_normal())):
            add = min(room, high[j] - low[j])
            p[j], room = p[j] + add, room - add
        if room > 1e-12:
            raise Refused("no weights")
        m = p @ y
        value = float(np.linalg.norm((y - m).T * p @ (y - m), 2))
        best, where = max((best, where), (value, p), key=lambda pair: pair[0])

    def sure():
        p, Y = exact(where), exact(y)
        p[0] += 1 - mp.fsum(p)  # exact weights of sum one, off by a rounding: not counted below
        m = [mp.fsum(a * v[c] for a, v in zip(p, Y, strict=True)) for c in range(d)]
        C = mp.matrix(
            [
                [mp.fsum(a * (v[r] - m[r]) * (v[c] - m[c]) for a, v in zip(p, Y, strict=True)) for c in range(d)]
                for r in range(d)
            ]
        )
        return max(mp.eigsy(C, eigvals_only=True)) * (1 - mp.mpf(10) ** -13)

    return settled(name, "points", bound, best, 60, sure, (*about, where.tolist()))


def _random_row(rng, t):
    """Weights, points of half diameter (or norm) at most 1 around 0, and a gradient of norm at most t."""
    n, d = int(rng.integers(1, 5)), int(rng.integers(1, 3))
    y = rng.standard_normal((n, d))
    y /= (
        np.maximum(1.0, np.linalg.norm(y, axis=1, keepdims=True))
        if rng.random() < 0.5
        else np.linalg.norm(y, axis=1, keepdims=True)
    )
    if n > 1 and rng.random() < 0.6:
        y[1:] = -y[0]
    g = t * (y[0] / max(np.linalg.norm(y[0]), 1e-9) if rng.random() < 0.6 else rng.standard_normal(d))
    g *= min(1.0, t / max(np.linalg.norm(g), 1e-300)) * (1 - 1e-15)
    w = rng.dirichlet(np.ones(n)) + 1e-9
    return n, d, y, g, w / w.sum()


def row_norm(rng: np.random.Generator) -> Outcome:
    """``bounds.row_norm(t)``: rows of two and more points, weights of any kind."""
    t = 10 ** rng.uniform(-2, 3)
    bound, best = B.row_norm(t), 0.0
    for _ in range(30):
        _, d, y, g, p = _random_row(rng, t)
        M = np.concatenate([a * (np.eye(d) + np.outer(v - p @ y, g)) for a, v in zip(p, y, strict=True)], axis=1)
        best = max(best, float(np.linalg.norm(M, 2)))
    s = min(1.0, 1 / (2 * t))  # the extremal row of the proof
    w = s + t * (1 - s * s)
    best = max(best, float(np.sqrt((1 + w * w) / 2)))

    def sure():
        T = mp.mpf(t)
        S = min(mp.mpf(1), 1 / (2 * T))
        return max(mp.mpf(best) * (1 - mp.mpf(10) ** -12), mp.sqrt((1 + (S + T * (1 - S * S)) ** 2) / 2))

    return settled("bounds.row_norm", "number", bound, best, 30, sure, t)


def hoelder(rng: np.random.Generator) -> Outcome:
    """``sup_u (E_P |B_y^T u|^{p'})^{1/p'}`` of random rows; two opposite points are swept."""
    t, p = 10 ** rng.uniform(-2, 2.5), float(rng.choice([1.0, 1.1, 1.5, 1.9, 2.0, 3.0, 8.0, np.inf]))
    bound, dual = B.hoelder_constant(t, p), np.inf if p == 1 else 1.0 if np.isinf(p) else p / (p - 1)
    best = 0.0
    shares = np.linspace(0, 1, 400)[1:-1]
    sizes = np.stack([1 + 2 * t * (1 - shares), np.abs(1 - 2 * t * shares)])
    best = float(_power_mean(sizes, np.stack([shares, 1 - shares]), dual).max())
    for _ in range(30):
        _, d, y, g, w = _random_row(rng, t)
        u = g / max(np.linalg.norm(g), 1e-300) if rng.random() < 0.5 else rng.standard_normal(d)
        u = u / max(np.linalg.norm(u), 1e-300)
        sizes = np.linalg.norm(u + ((y - w @ y) @ u)[:, None] * g, axis=1)
        best = max(best, float(_power_mean(sizes, w, dual)))
    return settled(
        "bounds.hoelder_constant", "number", bound, best, 30, lambda: mp.mpf(best) * (1 - mp.mpf(10) ** -12), (t, p)
    )


def _power_mean(sizes, w, p):
    top = np.maximum(sizes.max(0), 1e-300)
    if np.isinf(p):
        return np.where(w > 0, sizes, 0).max(0)
    return top * (w * (sizes / top) ** p).sum(0) ** (1 / p)


def density(rng: np.random.Generator) -> Outcome:
    """``bounds.density_constant(t, n)``: a row of softmax from ``L^2(mu)``, atoms of equal or of any weights."""
    t, free = 10 ** rng.uniform(-1.5, 1.3), rng.random() < 0.5
    best, count = 0.0, None if free else int(rng.integers(1, 5))
    for _ in range(40):
        n, d, y, g, w = _random_row(rng, t)
        if count is not None:
            y, w = np.resize(y, (count, d)), np.full(count, 1.0 / count)
        elif n > 1:
            w = np.full(n, np.exp(-2 * t * rng.random() * 1.2))
            w[1:] = (1 - w[0]) / (n - 1) if w[0] < 1 else w[1:]
            w /= w.sum()
        s = y @ g
        P = w * np.exp(s - s.max())
        P /= P.sum()
        M = np.concatenate(
            [a / np.sqrt(b) * (np.eye(d) + np.outer(v - P @ y, g)) for a, b, v in zip(P, w, y, strict=True)], axis=1
        )
        best = max(best, float(np.linalg.norm(M, 2)))
    bound = B.density_constant(t, count)[0]
    return settled(
        "bounds.density_constant", "number", bound, best, 40, lambda: mp.mpf(best) * (1 - mp.mpf(10) ** -12), (t, count)
    )


def cancelling(rng: np.random.Generator) -> Outcome:
    """Small domains far out, and affine maps whose offset takes their centre to what rounding leaves of zero."""
    d = int(rng.integers(1, 4))
    centre, size = rng.standard_normal(d) * 10 ** rng.uniform(0, 6), 10 ** rng.uniform(-17, -9) * rng.integers(2)
    if rng.random() < 0.5:
        lower, upper = centre - size, centre + size
        where = Region("box", {"lower": lower, "upper": upper}, d, oa.Box(lower, upper))
    else:
        E = size * rng.standard_normal((d, d))
        where = Region("ellipsoid", {"shape": E, "center": centre}, d, oa.Ellipsoid(E, centre))
    M = rng.standard_normal((int(rng.integers(1, 4)), d))
    return _norm_attacked(rng, where, M, -M @ where.domain.center, False, always=True)


def affine_norm(rng: np.random.Generator) -> Outcome:
    """``Domain.max_affine_norm`` and ``max_norm``: the norm of an affine image of a point, climbed."""
    d = int(rng.integers(1, 4))
    where = region(rng, d)
    plain = rng.random() < 0.3 and where.kind != "ball"
    M = np.eye(d) if plain else rng.standard_normal((int(rng.integers(1, 4)), d)) * 10 ** rng.uniform(-3, 3)
    c = 0 * M[:, 0] if plain or rng.random() < 0.4 else rng.standard_normal(len(M)) * 10 ** rng.uniform(-3, 3)
    return _norm_attacked(rng, where, M, c, plain)


def _norm_attacked(rng, where: Region, M, c, plain: bool, *, always: bool = False) -> Outcome:
    name = "Domain.max_affine_norm"
    bound = where.domain.max_norm if plain else where.domain.max_affine_norm(M, c)

    def value(t):
        x = where.points(t.reshape(-1, 1, where.size))[:, 0]
        return np.log(np.linalg.norm(x @ M.T + c, axis=1) + 1e-300)

    z = rng.standard_normal((24, where.size)) * rng.choice([0.5, 5.0], (24, 1))
    best = z[value(z).argmax()]
    end = ascend(value, best, 30)
    best = end if value(end[None])[0] > value(best[None])[0] else best

    def sure():
        return norm(plus(times(exact(M), where.exact(best[None])[0]), exact(c)))

    reached = float(np.exp(value(best[None])[0]))
    reached = max(reached, bound, 1e-300) if always else reached  # floats cannot tell: settle it in any case
    about = (
        where.kind,
        {k: np.asarray(v).tolist() for k, v in where.par.items()},
        M.tolist(),
        c.tolist(),
        best.tolist(),
    )
    return settled(name, where.kind, bound, reached, 25, sure, about)


SCALARS: dict[str, Callable[[np.random.Generator], Outcome]] = {
    "relaxations.interval_simplex": covariance,
    "bounds.row_norm": row_norm,
    "bounds.hoelder_constant": hoelder,
    "bounds.density_constant": density,
    "Domain.max_affine_norm": affine_norm,
}
