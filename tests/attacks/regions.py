"""Token domains from free coordinates: the same points in floats, in batches, and in exact numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mpmath as mp
import numpy as np
from exact import exact, norm, plus, times

import otattn as oa

KINDS = ("ball", "ball", "ellipsoid", "layernorm", "box", "points")


@dataclass(frozen=True)
class Region:
    """A domain of the library with a chart of its convex hull: ``(..., n, size)`` coordinates to ``(..., n, d)`` points."""

    kind: str
    par: dict[str, Any]
    size: int
    domain: Any

    def points(self, z):
        """Points of the hull; coordinates of norm 1 (or entries of modulus 1) and beyond give its boundary."""
        p = self.par
        if self.kind == "box":
            s = np.clip(z, -1, 1)
            return p["lower"] * (1 - s) / 2 + p["upper"] * (1 + s) / 2
        if self.kind == "points":
            share = z**2
            return (share / share.sum(-1, keepdims=True)) @ p["points"]
        if self.kind == "around":
            return p["center"] + p["radius"] * _unit(z)
        if self.kind == "layernorm":
            z = z - z.mean(-1, keepdims=True)
            return p["gain"] * np.sqrt(z.shape[-1]) * _unit(z) + p["bias"]
        return p["radius"] * _unit(z) if self.kind == "ball" else _unit(z) @ p["shape"].T + p["center"]

    def holds(self, X, tol=1e-9):
        """Whether tokens lie in the hull, to ``tol`` of its size (flat ones: in their span)."""
        p = self.par
        size = tol * (1e-300 + max(np.abs(np.asarray(v)).max() for v in p.values()))
        if self.kind == "ball":
            return bool((np.linalg.norm(X, axis=1) <= p["radius"] + size).all())
        if self.kind == "box":
            return bool((p["lower"] - size <= X).all() and (p["upper"] + size >= X).all())
        if self.kind == "points":
            return bool((np.linalg.norm(X[:, None] - p["points"], axis=2).min(1) <= size).all())
        d = X.shape[1]
        E = p["shape"] if self.kind == "ellipsoid" else p["gain"][:, None] * np.sqrt(d) * (np.eye(d) - 1.0 / d)
        y = (X - p["bias" if self.kind == "layernorm" else "center"]).T
        z = np.linalg.lstsq(E, y, rcond=1e-12)[0]
        return bool((np.linalg.norm(z, axis=0) <= 1 + 1e-6).all() and np.abs(E @ z - y).max() <= 100 * size)

    def exact(self, z):
        """The points of one configuration ``(n, size)`` without rounding."""
        return [self._exact(exact(row), i) for i, row in enumerate(np.asarray(z))]

    def _exact(self, z, i):
        p = {key: exact(value) for key, value in self.par.items()}
        if self.kind == "box":
            s = [max(mp.mpf(-1), min(mp.mpf(1), t)) for t in z]
            return [lo * (1 - t) / 2 + hi * (1 + t) / 2 for lo, hi, t in zip(p["lower"], p["upper"], s, strict=True)]
        if self.kind == "points":
            if len(z) == 1:
                return p["points"][0]
            total = mp.fsum(t * t for t in z)
            columns = list(zip(*p["points"], strict=True))
            return [mp.fsum(t * t * c for t, c in zip(z, column, strict=True)) / total for column in columns]
        if self.kind == "layernorm":
            mean = mp.fsum(z) / len(z)
            z = [t - mean for t in z]
        top = max(mp.mpf(1), norm(z))
        z = [t / top for t in z]
        if self.kind == "layernorm":
            root = mp.sqrt(len(z))
            return [g * root * t + b for g, t, b in zip(p["gain"], z, p["bias"], strict=True)]
        if self.kind == "ball":
            return [p["radius"] * t for t in z]
        if self.kind == "around":
            return [c + p["radius"] * t for c, t in zip(p["center"][i], z, strict=True)]
        return plus(times(p["shape"], z), p["center"])


def _unit(z):
    return z / np.maximum(1, np.linalg.norm(z, axis=-1, keepdims=True))


def ball(radius, d):
    """The centred ball."""
    return Region("ball", {"radius": radius}, d, oa.Ball(radius))


def around(X, rho):
    """One ball around each token: configurations near ``X``; no domain of its own."""
    return Region("around", {"center": X, "radius": rho}, X.shape[1], None)


def region(rng, d, kinds=KINDS):
    """A random domain: off centre half of the time, of every size, now and then flat or a single point."""
    kind = str(rng.choice(kinds))
    scale = 10 ** rng.uniform(-0.7, 0.7) * (10 ** rng.uniform(-3, 3) if rng.random() < 0.15 else 1.0)
    centre = scale * (rng.random() < 0.5) * rng.standard_normal(d) * 10 ** rng.uniform(-1, 1)
    flat = rng.random() < 0.15
    if kind == "layernorm" and d > 1:
        gain = scale * np.exp(0.5 * rng.standard_normal(d)) * np.where(flat & (np.arange(d) == 0), 0.0, 1.0)
        return Region(
            kind, {"gain": gain, "bias": centre}, d, oa.LayerNormDomain(gain, centre if centre.any() else None)
        )
    if kind == "ellipsoid":
        E = scale * rng.standard_normal((d, int(rng.integers(1, d + 1)))) * (0.0 if flat and d == 1 else 1.0)
        return Region(kind, {"shape": E, "center": centre}, E.shape[1], oa.Ellipsoid(E, centre))
    if kind == "box":
        half = scale * np.exp(rng.standard_normal(d)) * (rng.random(d) < 0.5 if flat else 1.0)
        lower, upper = centre - half, centre + half
        return Region(kind, {"lower": lower, "upper": upper}, d, oa.Box(lower, upper))
    if kind == "points":
        points = scale * rng.standard_normal((1 if flat else int(rng.integers(2, 5)), d)) + centre
        return Region(kind, {"points": points}, len(points), oa.PointSet(points))
    return ball(scale, d)
