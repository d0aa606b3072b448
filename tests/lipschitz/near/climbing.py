"""The norm of a Jacobian, directions at tokens, and gradient ascent inside a ball around them."""

from __future__ import annotations

import numpy as np


def norm(attention, X):
    return float(np.linalg.norm(attention.jacobian(X).to_dense().reshape(-1, X.size), 2))


def directions(rng, shape, count):
    """Random ones, of which each third moves one token alone."""
    for k in range(count):
        D = rng.standard_normal(shape)
        if k % 3 == 0:
            D[np.arange(len(D)) != rng.integers(len(D))] = 0.0
        yield D / np.linalg.norm(D)


def climbed(attention, X, r, rng, both=False, starts=6, steps=12):
    """The largest ratio of distances that ascent finds in the ball |D| <= r."""
    best = 0.0
    for start in range(starts):
        Z = X if not both else X + r * (D := rng.standard_normal(X.shape)) / np.linalg.norm(D)
        D = np.linalg.svd(attention.jacobian(Z).to_dense().reshape(-1, X.size))[2][0].reshape(X.shape)
        D = D * (-1.0) ** start if start < 2 else rng.standard_normal(X.shape)
        for _ in range(steps):
            D = Z + D * r / np.linalg.norm(D) - X
            Y = X + D * min(1.0, r / np.linalg.norm(D))
            moved = attention.on_tokens(Y) - attention.on_tokens(Z)
            best = max(best, float(np.linalg.norm(moved) / np.linalg.norm(Y - Z)))
            D = attention.jacobian(Y).rmatvec(moved.ravel()).reshape(X.shape)
    return best
