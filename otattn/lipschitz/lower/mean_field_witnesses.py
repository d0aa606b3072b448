r"""Measures with two to four atoms that attain the growth of the mean-field constant.

For a light query x, its best key y and a third atom z with shares (r, q, s) of the attention of x,
``log w_i = log share_i - <g(x), X_i>``: the constant then grows like ``exp(kappa / 2)``. For A = alpha I and moderate
alpha R^2 the self block of two atoms wins, and the field's bound sigma is attained by three atoms.
"""

from __future__ import annotations

import numpy as np

from otattn._linalg import Array
from otattn.attention.head import Head
from otattn.lipschitz.lower.ascent import LOG_WEIGHT_FLOOR, Candidates
from otattn.lipschitz.lower.problem import Problem
from otattn.lipschitz.lower.singular import unit
from otattn.lipschitz.lower.witnesses import directions, field_direction, field_query, maximise_latent, opposed

_FAR_LOG_WEIGHT = -60.0
"""A query of this log-weight has no mass to speak of (e^-60 is below rounding), yet it may split."""


def _logits(problem: Problem, form: Head, latents: Array) -> Array:
    """Logits ``(m, c)`` of the first atom of each measure for all its atoms."""
    X = latents @ problem.chart.E.T
    logit = np.sum(problem.queries(form, latents[:, 0])[:, None, :] * X, axis=2)
    return np.asarray(logit if form.H is None else logit - np.sum((X @ form.H) * X, axis=2))


def _weighted(problem: Problem, form: Head, latents: Array, shares: Array) -> Candidates:
    """Log-weights for which the first atom of each measure attends to its atoms with the given shares."""
    lw = np.log(np.maximum(shares, 1e-300)) - _logits(problem, form, latents)
    lw -= lw.max(axis=1, keepdims=True)
    return Candidates(latents, np.maximum(lw, LOG_WEIGHT_FLOOR))


def three_atoms(problem: Problem, form: Head, rng: np.random.Generator, *, keep: int = 6) -> Candidates:
    """Light query x, its best key y, and a third atom; x maximises ``log |g(x)| + (max_y <g, y> - <g, x>) / 2``."""
    chart = problem.chart

    def growth(z: Array) -> Array:
        g = problem.queries(form, z)
        gap = chart.support(g)[0] - np.sum(g * (z @ chart.E.T), axis=1)
        return np.log(np.maximum(np.linalg.norm(g, axis=1), 1e-300)) + 0.5 * gap

    starts = np.concatenate([directions(chart, (form,), rng, 48), chart.sample((24,), rng)])
    x, _ = maximise_latent(growth, chart, chart.clip(starts), rng, keep=keep)
    y = chart.support(problem.queries(form, x))[1]
    gram = chart.E.T @ form.V.T @ form.V @ chart.E
    latents, shares = [], []
    for q in (0.15, 0.25, 0.4):
        for r in (0.15, 0.3, 0.5, 1.0 - q - 1e-6):
            s = 1.0 - q - r
            for third in (-y, x, -x):
                z = third.copy()
                for _ in range(8):
                    # the norm of V((1-q) y - r x - s z) is convex in z: move to the boundary along its gradient
                    pull = -((1.0 - q) * y - r * x - s * z) @ gram
                    size = np.linalg.norm(pull, axis=1, keepdims=True)
                    z = np.where(size > 0.0, pull / np.maximum(size, 1e-300), z)
                latents.append(np.stack([x, y, chart.clip(z)], axis=1))
                shares.append(np.broadcast_to([r, q, s], (len(x), 3)))
    return _weighted(problem, form, np.concatenate(latents), np.concatenate(shares))


def self_block_measures(problem: Problem, form: Head, rng: np.random.Generator, *, count: int = 24) -> Candidates:
    """Two atoms: a light x that attends to itself with share q, and a heavy z."""
    chart = problem.chart
    x, other = opposed(chart, (form,), rng, count)
    latents, shares = [], []
    scales = [(1.0, 1.0)] if chart.kind == "sphere" else [(1.0, 1.0), (0.7, 1.0), (1.0, 0.6), (0.4, 1.0)]
    for a, b in scales:
        for q in (0.2, 0.35, 0.5, 0.65, 0.8):
            latents.append(np.stack([a * x, b * other], axis=1))
            shares.append(np.broadcast_to([q, 1.0 - q], (len(x), 2)))
    return _weighted(problem, form, chart.clip(np.concatenate(latents)), np.concatenate(shares))


def field_measure(problem: Problem, form: Head, rng: np.random.Generator) -> Candidates:
    """``+-E u`` and a query of negligible mass that attends to them half and half: its field has norm sigma."""
    u = field_direction(problem, form, rng)[1]
    latents = problem.chart.clip(np.stack([field_query(problem, form, u), u, -u])[None])
    lw = _weighted(problem, form, latents, np.array([[1.0, 0.5, 0.5]])).log_weights.copy()
    lw[:, 0] = lw[:, 1:].min(axis=1) + _FAR_LOG_WEIGHT
    # the query must not attend to itself either
    logit = _logits(problem, form, latents)
    lw[:, 0] -= np.maximum(0.0, logit[:, 0] - logit[:, 1:].min(axis=1))
    return Candidates(latents, np.maximum(lw, LOG_WEIGHT_FLOOR))


def output_measures(problem: Problem, form: Head, rng: np.random.Generator, *, keep: int = 4) -> Candidates:
    r"""Witnesses for W_inf: ``+-E u`` of equal attention and a query x of negligible mass.

    The output of the query moves by ``(|s + h| + |s - h|) / 2 + |V E u| |A^T E u|`` with ``s = V^T unit(V E u)`` and
    ``h = |V E u| g(x)``.
    """
    chart = problem.chart
    u = directions(chart, (form,), rng, 64)
    u = u[rng.integers(len(u), size=512)]
    u[0] = field_direction(problem, form, rng)[1]
    x = chart.clip(np.concatenate([directions(chart, (form,), rng, 128), chart.sample((128,), rng)]))
    x = x[rng.integers(len(x), size=512)]
    image, size = unit(u @ chart.E.T @ form.V.T)
    s, h = image @ form.V, size[:, None] * problem.queries(form, x)
    value = 0.5 * (np.linalg.norm(s + h, axis=1) + np.linalg.norm(s - h, axis=1))
    value += size * np.linalg.norm(u @ chart.E.T @ form.A, axis=1)
    best = np.argsort(-value, kind="stable")[:keep]
    latents = chart.clip(np.stack([x[best], u[best], -u[best]], axis=1))
    return _weighted(problem, form, latents, np.array([[np.exp(_FAR_LOG_WEIGHT), 0.5, 0.5]]))
