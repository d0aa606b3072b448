"""Adversaries of the relaxations: batches of clustered configurations climbed by projected gradient steps."""

import numpy as np

from otattn.lipschitz.lower.charts import forms_of
from otattn.lipschitz.lower.clusters import Configuration


def in_ball(x, radius):
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    return x * np.minimum(1.0, radius / np.maximum(norm, 1e-300))


def starts(A, c, batch, radius, rng):
    """Two opposite anchors and rows at 0 (T16), aligned atoms, clouds on the sphere."""
    d = len(A)
    X = in_ball(2.0 * radius * rng.standard_normal((batch, c, d)), radius) * rng.random((batch, c, 1)) ** 0.3
    _, _, Vt = np.linalg.svd(A)
    for b in range(0, batch, 3):
        u = Vt[0] if b % 2 else rng.standard_normal(d)
        u = radius * u / np.linalg.norm(u)
        X[b] = 0.1 * X[b]
        X[b, 0], X[b, -1] = u, -u if b % 4 else 0.5 * u
    return X


def climb(attention, counts, radius, rng, *, batch=24, steps=50):
    """Largest local constant found; ``counts`` are multiplicities, or None for free weights (mean-field)."""
    forms = forms_of(attention)
    free = counts is None
    c = 3 if free else len(counts)
    X = starts(attention.A, c, batch, radius, rng)
    lw = rng.uniform(-6, 0, (batch, c)) if free else np.tile(np.log(np.asarray(counts, dtype=float)), (batch, 1))
    split = np.ones(c, dtype=bool) if free else np.asarray(counts) > 1
    best = 0.0
    for k in range(steps):
        one = Configuration(forms, X, lw)
        value, u, v = one.top()
        fields = np.linalg.norm(one.fields(), 2, axis=(2, 3)) if split.any() else np.zeros((batch, c))
        best = max(best, float(value.max()), float(fields[:, split].max(initial=0.0)))
        gX, gw = one.gradient(u, v)
        size = np.abs(gX).max(axis=(1, 2), keepdims=True)
        step = 0.2 * radius * (1 - k / steps) ** 1.5 + 1e-4 * radius
        X = in_ball(X + step * gX / np.maximum(size, 1e-300), radius)
        if free:
            lw = lw + step / radius * gw / np.maximum(np.abs(gw).max(axis=1, keepdims=True), 1e-300)
    return best


def forms(rng):
    """A of norm 1: scalar, negative, skew, rank one, PSD of low rank, generic, zero, d = 1; V with e != d too."""
    g = rng.standard_normal((3, 3))
    low = np.outer(g[0], g[0]) + np.outer(g[1], g[1])
    named = {
        "identity": (np.eye(3), np.eye(3)),
        "negative": (-np.eye(2), np.eye(2)),
        "skew": (np.array([[0.0, 1.0], [-1.0, 0.0]]), np.eye(2)),
        "rank one": (np.outer(g[0], g[1]), rng.standard_normal((2, 3))),
        "low rank psd": (low, np.eye(3)),
        "generic": (g, rng.standard_normal((4, 3))),
        "zero": (np.zeros((2, 2)), np.eye(2)),
        "line": (np.array([[1.0]]), np.array([[2.0]])),
    }
    return {k: (A / max(np.linalg.norm(A, 2), 1e-300), V) for k, (A, V) in named.items()}


FORMS = forms(np.random.default_rng(5))
