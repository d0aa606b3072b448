"""Values that are attained: no proven bound of the same statement may lie below them. Plain numpy, from the definitions."""

from __future__ import annotations

import numpy as np

from otattn.attention import MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.containment import NearMeasure, NearTokens
from otattn.measures import Ball, Box, DiscreteMeasure, Ellipsoid, PointSet

STEP = 1e-20


def tokens(domain: object, n: int, dim: int, rng: np.random.Generator) -> np.ndarray:
    """n tokens of the domain, often at its boundary."""
    u = rng.standard_normal((n, dim))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    if rng.random() < 0.3:
        u *= rng.random((n, 1))
    if rng.random() < 0.4:  # in line, where softmax reacts most
        u = u[:1] * rng.choice([-1.0, 0.0, 0.5, 1.0], (n, 1))
    if domain is None:
        return u * 10.0 ** rng.uniform(-2.0, 2.0)
    if isinstance(domain, Ball):
        return domain.radius * u
    if isinstance(domain, Ellipsoid):
        k = domain.shape.shape[1]
        w = rng.standard_normal((n, k))
        return domain.center + (w / np.linalg.norm(w, axis=1, keepdims=True)) @ domain.shape.T
    if isinstance(domain, Box):
        share = rng.integers(0, 2, (n, dim)) if rng.random() < 0.7 else rng.random((n, dim))
        return domain.lower + share * (domain.upper - domain.lower)
    if isinstance(domain, PointSet):
        return domain.points[rng.integers(0, len(domain.points), n)]
    if isinstance(domain, NearTokens | NearMeasure):
        return domain.points + domain.radius * u
    assert isinstance(domain, DiscreteMeasure)
    return domain.points


def weights(head: SoftmaxAttention, X: np.ndarray) -> np.ndarray:
    c = 0.0 if head.bias is None else head.bias
    logits = (X @ head.A.T + c) @ X.T
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def derivative(attention: object, X: np.ndarray) -> float:
    """The norm of the Jacobian of the tokens' images, by complex steps for one softmax head."""
    masked = isinstance(attention, MaskedAttention)
    head = attention.attention if masked else attention
    if not isinstance(head, SoftmaxAttention):
        return float(np.linalg.norm(attention.jacobian(X).to_dense(), 2))
    n, d = X.shape
    c = 0.0 if head.bias is None else head.bias
    Z = X[None] + 1j * STEP * np.eye(n * d).reshape(n * d, n, d)
    logits = np.einsum("bid,bjd->bij", Z @ head.A.T + c, Z)
    if masked:
        logits = np.where(np.tri(n, dtype=bool), logits, -np.inf)
    e = np.exp(logits - logits.real.max(axis=2, keepdims=True))
    image = (e / e.sum(axis=2, keepdims=True)) @ (Z @ head.V.T)
    return float(np.linalg.norm((image.imag / STEP).reshape(n * d, -1), 2))


def _softmax(bound: Bound, X: np.ndarray) -> float:
    """What the other quantities of a softmax head are at tokens X."""
    head = bound.attention.attention if isinstance(bound.attention, MaskedAttention) else bound.attention
    c = 0.0 if head.bias is None else head.bias
    if bound.quantity == "field":
        gap = X[0] - X[-1]
        return float(np.linalg.norm(head.V @ gap) * np.linalg.norm(head.A.T @ gap)) / 4.0
    if bound.quantity == "column_exponent":
        return float((head.A @ X[0] + c) @ (X[-1] - X[0]))
    P = weights(head, X)
    if bound.quantity == "column_sum":
        return float(P.sum(axis=0).max())
    best = 0.0
    for p, x in zip(P, X, strict=True):
        y, g = X - p @ X, head.A @ x + c
        if bound.quantity == "self_entropy":
            best = max(best, float(g @ g) * float(np.linalg.eigvalsh((y * p[:, None]).T @ y)[-1]))
        else:
            row = np.hstack([q * (np.eye(len(x)) + np.outer(z, g)) for q, z in zip(p, y, strict=True)])
            best = max(best, float(np.linalg.norm(row, 2)))
    return best


def _estimate(bound: Bound, X: np.ndarray) -> float:
    """Size, slope in the token and slope in the measure of a map without a mask, at the first of the tokens X."""
    attention, (n, d) = bound.attention, X.shape
    if isinstance(attention, MaskedAttention):
        return 0.0
    if bound.quantity == "value":
        return float(np.linalg.norm(attention(X[:1], X)))
    field = attention.field_jacobian(X[:1], X)[0]
    if bound.quantity == "field":
        return float(np.linalg.norm(field, 2))
    row = attention.jacobian(X).to_dense()[: len(field)].copy()
    row[:, :d] -= field  # the query is kept
    return float(np.linalg.norm(row, 2)) * np.sqrt(n) if bound.p == 2.0 and bound.n in (None, n) else 0.0


def _is_softmax(attention: object) -> bool:
    return isinstance(attention.attention if isinstance(attention, MaskedAttention) else attention, SoftmaxAttention)


def _covariance(bound: Bound, rng: np.random.Generator) -> float:
    simplex = bound.domain
    p = simplex.lower.copy()
    for j in rng.permutation(len(p)):
        p[j] += min(simplex.upper[j] - p[j], 1.0 - p.sum())
    y = simplex.points - p @ simplex.points
    return float(np.linalg.eigvalsh((y * p[:, None]).T @ y)[-1])


def attained(bound: Bound, *, trials: int = 60) -> float:
    """The largest value found of the bounded quantity; 0 for an order other than 2."""
    rng = np.random.default_rng(7)
    if bound.quantity == "covariance":
        return max(_covariance(bound, rng) for _ in range(trials))
    if bound.quantity == "lipschitz" and bound.p != 2.0:
        return 0.0
    if bound.quantity == "pairs":  # measures that tend to the given one along the top direction
        return derivative(bound.attention, bound.domain.points)
    best, dim = 0.0, bound.attention.in_dim
    for _ in range(trials):
        n = int(rng.integers(2, 5)) if bound.n is None else min(bound.n, 12)
        if bound.n is not None and bound.n > 12 and (bound.quantity != "field" or not isinstance(bound.domain, Ball)):
            # a few different tokens, repeated
            few = tokens(bound.domain, 4, dim, rng)
            X = few[rng.integers(0, 4, bound.n)] if bound.n <= 70 else few
        else:
            X = tokens(bound.domain, n, dim, rng)
        if bound.quantity in ("lipschitz", "local"):
            best = max(best, derivative(bound.attention, X))
        elif bound.quantity in ("value", "measure") or not _is_softmax(bound.attention):
            best = max(best, _estimate(bound, X))
        else:
            best = max(best, _softmax(bound, X))
    return best


def is_sum(attention: object) -> bool:
    """Several heads, masked or not."""
    return isinstance(attention.attention if isinstance(attention, MaskedAttention) else attention, MultiHeadAttention)
