"""Ascents to steep configurations: starts at the extremes of the domain, then L-BFGS on batched finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from definitions import along, jacobian, mean_norm, operator_norm, softmax
from problems import Problem
from scipy.optimize import minimize

STARTS = 16
"""Configurations that each attack looks at before it climbs from the steepest."""
DIFFERENCE = 1e-6
SMOOTH = 24.0
"""Order that stands for inf while climbing."""


@dataclass(frozen=True)
class Found:
    """A configuration: free coordinates, weights up to a factor, a direction, and the value there."""

    value: float
    z: np.ndarray
    w: np.ndarray
    eps: np.ndarray
    tried: int


def starts(rng, problem: Problem, count: int = STARTS):
    """Coordinates ``(B, n, k)`` and logarithms of weights ``(B, n)``: clouds, extremes, clusters, opposite tokens."""
    n, k = problem.atoms, problem.region.size
    z = rng.standard_normal((count, n, k))
    axes = _axes(problem)
    for b in range(count):
        kind = b % 8
        z[b] *= (0.3, 1.0, 5.0, 5.0, 1.0, 5.0, 2.0, 0.03)[kind]
        if kind in (3, 4):  # two opposite tokens, the rest with one of them or near the middle
            u = 5.0 * axes[int(rng.integers(len(axes)))]
            z[b] = np.where(rng.random((n, 1)) < 0.5, u, -u) if kind == 3 else 0.1 * z[b]
            z[b, 0], z[b, -1] = u, -u
        elif kind == 5:  # few positions
            z[b] = z[b, rng.integers(0, max(1, (n + 1) // 2), n)]
        elif kind == 6:  # a cluster and one token away from it
            z[b, 1:] = z[b, -1:] + 0.01 * z[b, 1:]
    lw = (
        rng.standard_normal((count, n)) * rng.choice([0.0, 1.0, 3.0], (count, 1))
        if problem.n is None
        else np.zeros((count, n))
    )
    return z, lw


def _axes(problem: Problem):
    """Unit vectors that the matrices of the map single out, where the chart is linear in the tokens."""
    k, found = problem.region.size, [np.eye(problem.region.size)[0]]
    for head in problem.map.heads:
        for M in (head.par.get("A"), head.par["V"], head.par.get("Q")):
            if M is not None and M.shape[1] == k and M.any():
                found += list(np.linalg.svd(M)[2])
    return found


def masses(lw):
    """Weights of the logarithms, none below 1e-12."""
    return softmax(np.clip(lw - lw.max(-1, keepdims=True), -25, 0))


def steepest(problem: Problem, rng, *, climbs: int = 1, iterations: int = 30) -> Found:
    """The largest local constant among starts and climbs from the best of them."""
    z, lw = starts(rng, problem)
    with np.errstate(all="ignore"):
        values, eps = _assessed(problem, z, lw)
        order = np.argsort(-values)
        out = Found(float(values[order[0]]), z[order[0]], masses(lw)[order[0]], eps[order[0]], len(z))
        for s in range(climbs if out.value > 0 else 0):
            b = order[s]
            z1, lw1 = _climb(problem, z[b], lw[b], eps[b], iterations)
            value, direction = _assessed(problem, z1[None], lw1[None])
            if value[0] > out.value:
                out = Found(float(value[0]), z1, masses(lw1), direction[0], out.tried)
            out = Found(out.value, out.z, out.w, out.eps, out.tried + 1)
    return out


def _assessed(problem: Problem, z, lw):
    """Local constants and their directions; a configuration that overflows counts for nothing."""
    w = masses(lw)
    J = jacobian(problem.map, problem.region.points(z), w)
    usable = np.isfinite(J).all(axis=(1, 2, 3, 4))
    value, eps = operator_norm(np.where(usable[:, None, None, None, None], J, 0.0), w, problem.p)
    return np.where(usable & np.isfinite(value), value, -1.0), np.nan_to_num(eps)


def _climb(problem: Problem, z, lw, eps, iterations):
    """Coordinates, direction and weights move together; the objective is ``log |D f eps| - log |eps|``."""
    n, k, d = *z.shape, problem.map.dim
    free = n if problem.n is None and n > 1 else 0
    p = SMOOTH if np.isinf(problem.p) else problem.p
    eps = eps / max(np.abs(eps).max(), 1e-300)

    def parts(t):
        return t[:, : n * k].reshape(-1, n, k), t[:, n * k : n * (k + d)].reshape(-1, n, d), t[:, n * (k + d) :]

    def value(t):
        a, e, b = parts(t)
        w = masses(b) if free else np.full((len(t), n), 1.0 / n)
        moved = along(problem.map, problem.region.points(a), w, e)
        return np.log(mean_norm(moved, w, p) + 1e-300) - np.log(mean_norm(e, w, p) + 1e-300)

    start = np.concatenate([z.ravel(), eps.ravel(), lw if free else []])
    t = ascend(value, start, iterations)
    a, _, b = parts(t[None])
    return a[0], b[0] if free else lw


def ascend(value: Callable[[Any], Any], start, iterations: int):
    """L-BFGS on central differences of a batched function ``(B, m) -> (B,)``; returns the last point."""
    m = len(start)

    def objective(t):
        v = value(np.concatenate([t[None], t + DIFFERENCE * np.eye(m), t - DIFFERENCE * np.eye(m)]))
        if not np.isfinite(v).all():
            return 1e6, np.zeros(m)
        return -v[0], -(v[1 : m + 1] - v[m + 1 :]) / (2 * DIFFERENCE)

    return minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": iterations}).x


def largest(problem: Problem, quantity: Callable[[Any, Any], Any], rng, *, iterations: int = 30):
    """The largest ``quantity(X, w)`` (batched, of tokens and weights): coordinates, weights, value, number tried."""
    z, lw = starts(rng, problem)
    n, k = z.shape[1:]

    def value(t):
        w = masses(t[:, n * k :]) if problem.n is None else np.full((len(t), n), 1.0 / n)
        return np.log(quantity(problem.region.points(t[:, : n * k].reshape(-1, n, k)), w) + 1e-300)

    with np.errstate(all="ignore"):
        t = np.concatenate([z.reshape(len(z), -1), lw if problem.n is None else lw[:, :0]], axis=1)
        v = np.nan_to_num(value(t), nan=-np.inf)
        best = t[v.argmax()]
        end = ascend(value, best, iterations)
        if not value(end[None])[0] > v.max():
            end = best
        w = masses(end[n * k :]) if problem.n is None else np.full(n, 1.0 / n)
        return end[: n * k].reshape(n, k), w, float(np.exp(value(end[None])[0])), len(z) + 1
