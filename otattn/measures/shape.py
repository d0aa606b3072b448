"""The middle of a set of points."""

from __future__ import annotations

import numpy as np

from otattn._linalg import Array

__all__ = ["enclosing_center"]


def enclosing_center(x: Array) -> Array:
    """Centre of a nearly smallest enclosing ball (Badoiu-Clarkson steps; any centre is valid)."""
    b = 0.5 * (x.min(axis=0) + x.max(axis=0))
    best, radius = b, float(np.linalg.norm(x - b, axis=1).max())
    for k in range(1, 200):
        far = np.linalg.norm(x - b, axis=1)
        i = int(far.argmax())
        if far[i] < radius:
            best, radius = b, float(far[i])
        b = b + (x[i] - b) / (k + 1.0)
    return np.asarray(best)
