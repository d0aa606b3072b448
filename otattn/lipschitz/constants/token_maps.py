r"""Constants and images of the maps that move each token on its own: LayerNorm, perceptrons, gated ones.

*LayerNorm*: ``phi(x) = g o N(P x) + b``, P the projection on vectors of mean 0 (the identity for RMSNorm),
``N(y) = y / sigma``, ``sigma^2 = |y|^2 / d + eps``. ``DN(y) = (I - y y^T / (d sigma^2)) / sigma`` is symmetric with the
eigenvalues ``1 / sigma`` and ``eps / sigma^3 <= 1 / sigma``, so ``||D phi|| <= max|g| / sqrt(eps + rho^2 / d)`` where ``|P x| >=
rho`` on the hull: for a domain of centre c and radius R, ``rho = max(0, |P c| - R)``. With rho = 0 that is ``max|g| /
sqrt(eps)``: a token of equal entries is a singularity that eps alone softens, and this is where products of layers get their
size. *Image*: ``|N(y)| = |y| / sigma <= min(sqrt d, |y| / sqrt(eps))``, so the image lies in the ellipsoid of centre b with the
half axes ``|g_k|`` times that number.

*Perceptron* ``W phi(U x + b) + c``: the slopes of phi lie in ``[m, M]`` (:data:`SLOPES`), ``D = diag(phi')`` is ``(m + M)/2 + E``,
``||E|| <= (M - m)/2``: ``||W D U|| <= |m + M|/2 ||W U|| + (M - m)/2 ||W|| ||U||``, and at most ``max(|m|, |M|) ||W|| ||U||``. *Image*:
``|phi(s)| <= |s|`` for all of these phi, hence ``||W|| (||U|| R + |b|) + |c|``.

*Gated* ``W (phi(G x + g) o (U x + u)) + c``: with ``a = max_k (|G_k| R + |g_k|) >= |phi|`` and likewise ``b`` for U, ``||D|| <=
||W|| (a ||U|| + max(|m|, |M|) b ||G||)``, and the image has norm at most ``||W|| a (||U|| R + |u|) + |c|``.

"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn._linalg import norm_upper, product_error, spectral_norm_upper
from otattn.attention import LayerNorm
from otattn.attention.feed_forward import Perceptron
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, lower
from otattn.lipschitz.arithmetic.rounding import LEAST, down, least, product, top, up
from otattn.lipschitz.constants.regions import Region
from otattn.measures.domains import Ball, Domain, Ellipsoid

__all__ = ["SLOPES", "Setting", "radius_of", "token_map"]

SLOPES = {
    "relu": (0.0, 1.0),
    "gelu": (-0.1290, 1.1290),
    "gelu_tanh": (-0.1295, 1.1295),
    "silu": (-0.0999, 1.0999),
    "tanh": (0.0, 1.0),
    "identity": (1.0, 1.0),
}
"""Ranges of the slopes of activations, outward: the GELU's ends are at +-sqrt 2, ``Phi(sqrt 2) + sqrt 2 phi(sqrt 2) = 1.12890``."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What all parts share."""

    n: int | None
    p: float
    exact: bool

    def wrap(self, M: Any) -> Any:
        return BallMatrix.exact(M) if self.exact else np.asarray(M)

    def norm(self, M: Any) -> Any:
        return spectral_norm_upper(self.wrap(M))

    def length(self, v: Any) -> Any:
        return 0.0 if v is None else norm_upper(self.wrap(v))

    def of_product(self, M: Any, N: Any) -> Any:
        M, N = self.wrap(M), self.wrap(N)
        return spectral_norm_upper(M @ N) + product_error(M, N)

    def number(self, x: float) -> Any:
        return lift(x) if self.exact else x


def radius_of(value: Any) -> float:
    """A float radius that is at least the number; a ball has a positive one."""
    return max(float(np.nextafter(top(up(value)), np.inf)), LEAST)


def token_map(part: LayerNorm | Perceptron, domain: Domain, R: Any, s: Setting) -> tuple[Any, Domain]:
    """The constant of a token-wise map on a domain of largest norm R, and a domain that holds its image."""
    if isinstance(part, LayerNorm):
        return _norm(part, domain, R, s)
    value, reach = _perceptron(part, R, s)
    return value, Ball(radius_of(reach))


def _norm(part: LayerNorm, domain: Domain, R: Any, s: Setting) -> tuple[Any, Domain]:
    d = part.in_dim
    g = float(np.abs(part.gain).max())
    rho = _distance(part, domain, s)
    below = s.number(part.eps) + s.number(rho) * s.number(rho) / float(d)
    if float(lower(below)) <= 0.0:
        value: Any = 0.0 if g == 0.0 else math.inf
    else:
        value = up(s.number(g) / np.sqrt(below))
    size = up(math.sqrt(d))
    if part.eps > 0.0:
        size = min(size, top(up(R / np.sqrt(s.number(part.eps)))))
    axes = np.where(part.gain != 0.0, np.nextafter(up(size) * np.abs(part.gain), np.inf), 0.0)
    bias = np.zeros(d) if part.bias is None else part.bias
    return value, Ellipsoid(np.diag(axes), bias)


def _distance(part: LayerNorm, domain: Domain, s: Setting) -> float:
    """``|P x| >= rho`` on the hull of the domain, rounded down."""
    region = Region.of(domain, exact=s.exact)
    if region.center is None:
        return 0.0
    c = lift(region.center)  # intervals in both arithmetics: what the mean rounds is counted
    y = c - c.sum() / float(len(region.center)) if part.center else c
    away = float(lower(np.sqrt((y * y).sum()))) - top(region.radius)
    return max(0.0, down(away) if away > 0.0 else 0.0)


def _perceptron(part: Perceptron, R: Any, s: Setting) -> tuple[Any, Any]:
    U, b, W, c, G, g = part.parts
    m, M = SLOPES[part.activation]
    slope, w, u = max(abs(m), abs(M)), s.norm(W), s.norm(U)
    if G is None:
        split = product(0.5 * abs(m + M), s.of_product(W, U)) + product(0.5 * (M - m), w, u)
        return least(up(product(slope, w, u)), up(split)), product(w, product(u, R) + s.length(b)) + s.length(c)
    gate, entry = _largest_entry(G, g, R, s), _largest_entry(U, b, R, s)
    value = product(w, product(gate, u) + product(slope, entry, s.norm(G)))
    return value, product(w, gate, product(u, R) + s.length(b)) + s.length(c)


def _largest_entry(G: Any, b: Any, R: Any, s: Setting) -> Any:
    """``max_k (|G_k| R + |b_k|)``, not below."""
    rows = np.array([top(s.length(row)) for row in G])
    sizes = np.zeros(len(G)) if b is None else np.abs(b)
    return max(up(r * top(R) + float(size)) for r, size in zip(rows.tolist(), sizes, strict=True))
