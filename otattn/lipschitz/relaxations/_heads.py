"""The softmax heads and the token domains as the relaxations see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import spectral_norm_upper
from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.lipschitz.relaxations._quadratic import EPS
from otattn.lipschitz.setting import check_sizes
from otattn.measures import Ball, Box, Domain, Ellipsoid, PointSet

__all__ = ["Round", "SoftmaxHead", "check_domain", "enclosing_round", "softmax_head"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SoftmaxHead:
    """``A (d, d)``, ``V (e, d)``, ``c (d,)`` of a softmax head, masked or not."""

    A: Array
    V: Array
    c: Array
    causal: bool

    @property
    def d(self) -> int:
        return len(self.A)


@dataclass(frozen=True, eq=False)
class Round:
    """The set ``{E z + center : |z| <= 1}``; ``radius >= ||E||``."""

    E: Array
    center: Array
    radius: float


def softmax_head(attention: Any, relaxation: str) -> SoftmaxHead:
    """The matrices of a softmax head."""
    causal = isinstance(attention, MaskedAttention)
    head = attention.attention if isinstance(attention, MaskedAttention) else attention
    if not isinstance(head, SoftmaxAttention):
        raise TypeError(
            f"{relaxation} needs one SoftmaxAttention (masked or not), received {type(attention).__name__}; "
            "treat the heads of a multi-head attention one by one and join them with relaxations.multihead."
        )
    check_sizes(head)
    c = np.zeros(head.in_dim) if head.bias is None else head.bias
    return SoftmaxHead(np.asarray(head.A), np.asarray(head.V), c, causal)


def check_domain(domain: Any, d: int) -> None:
    """A domain of R^d."""
    if not isinstance(domain, Domain):
        raise TypeError(
            "domain must be a Ball, Ellipsoid, LayerNormDomain, Box or PointSet, received "
            f"{type(domain).__name__}; for tokens of norm at most R it is Ball(R)."
        )
    if domain.dim is not None and domain.dim != d:
        raise ValueError(f"domain must live in dimension {d}, received {domain.dim}; check the attention's matrices.")


def enclosing_round(domain: Domain, d: int) -> Round:
    """The domain itself when it is round, a ball around the middle of the box or of the points otherwise."""
    if isinstance(domain, Ball):
        return Round(domain.radius * np.eye(d), np.zeros(d), domain.radius)
    if isinstance(domain, Ellipsoid):
        return Round(np.asarray(domain.shape), np.asarray(domain.center), spectral_norm_upper(domain.shape))
    if isinstance(domain, Box):
        radius = float(np.linalg.norm(domain.half_widths)) * (1.0 + 4 * d * EPS)
        return Round(radius * np.eye(d), domain.center, radius)
    if isinstance(domain, PointSet):
        center = _middle(domain.points)
        radius = float(np.linalg.norm(domain.points - center, axis=1).max()) * (1.0 + 4 * d * EPS)
        return Round(radius * np.eye(d), center, radius)
    raise TypeError(f"no ball is known around a {type(domain).__name__}; give a Ball that contains it.")


def _middle(points: Array) -> Array:
    """Near the centre of the smallest enclosing ball (Badoiu and Clarkson: step to the farthest point)."""
    center = np.asarray(points.mean(axis=0))
    for k in range(1, 200):
        far = points[np.linalg.norm(points - center, axis=1).argmax()]
        center = center + (far - center) / (k + 1)
    return center
