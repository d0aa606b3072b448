"""Random attention maps, domains and configurations, climbed to steep ones: what bounds must survive."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn.attention import (
    ExponentialAttention,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    SigmoidAttention,
    SoftmaxAttention,
)
from otattn.measures import Ball, Box, DiscreteMeasure, Ellipsoid, LayerNormDomain, PointSet, SpaceTimeMeasure

KINDS = ("softmax", "l2", "pointwise", "heads")


def matrices(d, e, rng):
    """Scalar, negative, skew, symmetric, rank-one, PSD, zero or generic A of log-uniform norm, and V."""
    A = rng.standard_normal((d, d))
    A = {
        0: np.eye(d),
        1: -np.eye(d),
        2: A - A.T,
        3: A + A.T,
        4: np.outer(A[0], A[-1]),
        5: A @ A.T,
        6: 0.0 * A,
    }.get(int(rng.integers(9)), A)
    norm = np.linalg.norm(A, 2)
    A = A if norm == 0 else A / norm * np.exp(rng.uniform(-2.0, 3.0))
    V = np.eye(d) if e == d and rng.random() < 0.3 else rng.standard_normal((e, d))
    return A, V * (rng.random() > 0.03)


def attention_map(kind, d, e, rng):
    A, V = matrices(d, e, rng)
    if kind == "softmax":
        return SoftmaxAttention(A, V, bias=2.0 * rng.standard_normal(d) if rng.random() < 0.4 else None)
    if kind == "l2":
        k = int(rng.integers(1, 4))
        Q = rng.standard_normal((k, d)) * np.exp(rng.uniform(-1.5, 1.0))
        K = Q if rng.random() < 0.4 else rng.standard_normal((k, d)) * np.exp(rng.uniform(-1.5, 1.0))
        return L2Attention(Q, K, V)
    if kind == "pointwise":
        variant = (SigmoidAttention, ReLUAttention, LinearAttention, ExponentialAttention)[int(rng.integers(4))]
        return variant(0.2 * A, V)
    kinds = [str(rng.choice(KINDS[:3], p=[0.7, 0.15, 0.15])) for _ in range(int(rng.integers(1, 4)))]
    outputs = None if rng.random() < 0.3 else [rng.standard_normal((3, e)) for _ in kinds]
    return MultiHeadAttention([attention_map(k, d, e, rng) for k in kinds], outputs)


def random_domain(d, rng):
    k = int(rng.integers(5))
    if k == 1:
        return Ellipsoid(
            rng.standard_normal((d, int(rng.integers(1, d + 1)))), rng.standard_normal(d) * rng.integers(2)
        )
    if k == 2 and d > 1:
        return LayerNormDomain(np.exp(0.5 * rng.standard_normal(d)), 0.5 * rng.standard_normal(d))
    if k == 3:
        centre, half = rng.standard_normal(d) * rng.integers(3), rng.random(d)
        return Box(centre - half, centre + half)
    if k == 4:
        return PointSet(rng.standard_normal((int(rng.integers(1, 7)), d)))
    return Ball(float(np.exp(rng.uniform(-1.0, 1.0))), d)


def pull(domain, X):
    """Points of the domain's convex hull; a climb on a point set stays where it is."""
    if isinstance(domain, PointSet):
        return None
    if isinstance(domain, Ellipsoid):  # the LayerNorm sphere too: the bounds hold on its hull
        z = np.linalg.lstsq(domain.shape, (X - domain.center).T, rcond=None)[0]
        z /= np.maximum(1.0, np.linalg.norm(z, axis=0))
        return (domain.shape @ z).T + domain.center
    return domain.project(X)


def extreme_points(domain, n, d, rng):
    """Points of the domain's boundary, often in few positions or pulled inside."""
    if isinstance(domain, Ball):
        X = rng.standard_normal((n, d))
        X *= domain.radius / np.linalg.norm(X, axis=1, keepdims=True)
    elif isinstance(domain, Box):
        X = np.where(rng.random((n, d)) < 0.5, domain.lower, domain.upper)
    elif isinstance(domain, Ellipsoid):
        z = rng.standard_normal((n, domain.shape.shape[1]))
        X = z / np.linalg.norm(z, axis=1, keepdims=True) @ domain.shape.T + domain.center
    else:
        X = domain.points[rng.integers(len(domain.points), size=n)]
    if rng.random() < 0.3:
        X = X[rng.integers(0, min(n, 3), size=n)]
    elif rng.random() < 0.3:
        # two antipodal points, the first token alone
        centre = getattr(domain, "center", np.zeros(d))
        X = np.repeat((2.0 * centre - X[:1]) if not isinstance(domain, PointSet) else X[:1], n, axis=0)
        X[0] = 2.0 * centre - X[0] if not isinstance(domain, PointSet) else domain.points[-1]
    if rng.random() < 0.4 and not isinstance(domain, PointSet):
        centre = getattr(domain, "center", np.zeros(d))
        X = centre + (X - centre) * rng.random((n, 1)) ** 0.3
    return X


@dataclass
class Configuration:
    attention: Any
    domain: Any
    p: float
    uniform: bool
    points: np.ndarray
    weights: np.ndarray
    value: float

    @property
    def n(self):
        return len(self.points)

    def measure(self):
        return _measure(self.attention, self.points, self.weights)


def _measure(attention, X, w):
    if attention.causal:
        return SpaceTimeMeasure(np.arange(1, len(X) + 1) / len(X), X, w)
    return DiscreteMeasure(X, w)


def steepness(attention, mu, p):
    """The norm of the Jacobian on ``L^p(mu)``, from below (exact for p = 2)."""
    w = mu.weights
    J = attention.jacobian(mu).to_dense().reshape(mu.n, -1, mu.n, mu.dim)
    if p == 2.0:
        return weighted_norm(J, w)
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        if p == 1.0:
            # one atom moves, along the direction that the fixed point of a convex maximum finds
            return max(_sum_of_norms(J[:, :, j, :] * w[:, None, None] / w[j], rng) for j in range(mu.n))
        if np.isinf(p):
            return max(_sum_of_norms(J[i].transpose(1, 2, 0), rng) for i in range(mu.n))
        return _power(J, w, p, rng)


def weighted_norm(J, w):
    """Largest singular value of ``W^{1/2} J W^{-1/2}`` for blocks ``(n, e, n, d)``."""
    root = np.sqrt(w)
    n, e, _, d = J.shape
    return float(np.linalg.norm((J * root[:, None, None, None] / root[:, None]).reshape(n * e, n * d), 2))


def _sum_of_norms(B, rng):
    """``max_u sum_k |B_k u|`` for ``B (m, r, c)``, from below."""
    best = 0.0
    for _ in range(3):
        u = rng.standard_normal(B.shape[2])
        for _ in range(12):
            u = u / np.linalg.norm(u)
            y = B @ u
            r = np.linalg.norm(y, axis=1)
            best = max(best, float(r.sum()))
            u = np.einsum("kr,krc->c", y / np.maximum(r, 1e-300)[:, None], B)
            if not np.linalg.norm(u) > 0:
                break
    return best


def _power(J, w, p, rng):
    """The nonlinear power method for the norm from ``L^p(w)`` to itself: every iterate is a lower value."""
    best, q = 0.0, p / (p - 1.0)
    for _ in range(2):
        x = rng.standard_normal((J.shape[2], J.shape[3]))
        for _ in range(15):
            size = float((w @ np.linalg.norm(x, axis=1) ** p) ** (1.0 / p))
            if not 0 < size < np.inf:
                break
            x = x / size
            y = np.einsum("iejd,jd->ie", J, x)
            r = np.linalg.norm(y, axis=1, keepdims=True)
            best = max(best, float((w @ r[:, 0] ** p) ** (1.0 / p)))
            scale = max(float(r.max()), 1e-300)
            z = w[:, None] * (y / scale) * np.maximum(r / scale, 1e-300) ** (p - 2.0)
            g = np.einsum("iejd,ie->jd", J, z) / w[:, None]
            s = np.linalg.norm(g, axis=1, keepdims=True)
            s_max = float(s.max())
            if not s_max > 0:
                break
            x = (g / s_max) * np.maximum(s / s_max, 1e-300) ** (q - 2.0)
    return best


def climb(attention, domain, n, p, *, uniform, rng, steps=20):
    """A configuration that random steps have made steep; its intermediate ones count as attacks as well."""
    d = attention.in_dim
    X = extreme_points(domain, n, d, rng)
    w = np.full(n, 1.0 / n)
    if not uniform:
        w = rng.dirichlet(np.full(n, 0.4)) + 1e-9
        w /= w.sum()
    best, size = steepness(attention, _measure(attention, X, w), p), 0.5
    for _ in range(0 if isinstance(domain, PointSet) else steps):
        Y = pull(domain, X + size * rng.standard_normal(X.shape) * (rng.random((n, 1)) < 0.5))
        v = w
        if not uniform:
            v = np.maximum(w * np.exp(2.0 * size * rng.standard_normal(n)), 1e-12)
            v = v / v.sum()
        value = steepness(attention, _measure(attention, Y, v), p)
        if value > best:
            best, X, w = value, Y, v
        else:
            size *= 0.9
    return Configuration(attention, domain, p, uniform, X, w, best)


def configurations(seed, count, *, steps=20):
    """``count`` climbed configurations over every kind, mask, domain, order and size."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        d, e = int(rng.integers(1, 5)), int(rng.integers(1, 5))
        kind = str(rng.choice(KINDS, p=[0.5, 0.2, 0.15, 0.15]))
        attention = attention_map(kind, d, e, rng)
        if rng.random() < 0.3:
            attention = MaskedAttention(attention)
        p = float(rng.choice([2.0, 2.0, 2.0, 1.0, 1.3, 1.8, 3.0, 8.0, np.inf]))
        n = int(rng.integers(1, 9))
        uniform = bool(rng.random() < 0.6)
        yield climb(attention, random_domain(d, rng), n, p, uniform=uniform, rng=rng, steps=steps)
