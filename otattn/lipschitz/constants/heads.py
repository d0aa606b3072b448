"""The softmax heads and the token domains as the relaxations see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import product_error
from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.constants.regions import Region
from otattn.lipschitz.constants.setting import check_sizes
from otattn.measures import Ball, Domain, Ellipsoid

__all__ = ["Round", "SoftmaxHead", "check_domain", "enclosing_round", "softmax_head"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SoftmaxHead:
    """``A (d, d)``, ``V (e, d)``, ``c (d,)`` of a softmax head, masked or not; balls in exact arithmetic.

    ``error`` and ``shift`` bound what rounding did to A and to c.
    """

    A: Any
    V: Any
    c: Any
    causal: bool
    error: float = 0.0
    shift: float = 0.0

    @property
    def d(self) -> int:
        return len(self.A)


class Round(NamedTuple):
    """The set ``{E z + center : |z| <= 1}``; ``radius >= ||E||``."""

    E: Any
    center: Array
    radius: float


def softmax_head(attention: Any, relaxation: str, *, exact: bool = False) -> SoftmaxHead:
    """The matrices of a softmax head."""
    causal = isinstance(attention, MaskedAttention)
    head = attention.attention if isinstance(attention, MaskedAttention) else attention
    if not isinstance(head, SoftmaxAttention):
        raise TypeError(
            f"{relaxation} needs one SoftmaxAttention (masked or not), received {type(attention).__name__}; "
            "treat the heads of a multi-head attention one by one and join them with relaxations.multihead."
        )
    check_sizes(head)
    wrap: Any = BallMatrix.exact if exact else np.asarray
    A, V, c = wrap(head.A), wrap(head.V), wrap(np.zeros(head.in_dim) if head.bias is None else head.bias)
    error = shift = 0.0
    if head.factors is not None and len(head.factors[0]) < head.in_dim:
        # the map runs on its factors, so they are what it is made of
        q, k, bq = head.factors
        if exact:
            A, c = wrap(k.T) @ wrap(q), c if bq is None else wrap(k.T) @ wrap(bq)
        else:
            error, shift = product_error(k.T, q), 0.0 if bq is None else product_error(k.T, bq[:, None])
    return SoftmaxHead(A, V, c, causal, error, shift)


def check_domain(domain: Any, d: int) -> None:
    """A domain of R^d."""
    if not isinstance(domain, Domain):
        raise TypeError(
            "domain must be a Ball, Ellipsoid, LayerNormDomain, Box or PointSet, received "
            f"{type(domain).__name__}; for tokens of norm at most R it is Ball(R)."
        )
    if domain.dim is not None and domain.dim != d:
        raise ValueError(f"domain must live in dimension {d}, received {domain.dim}; check the attention's matrices.")


def enclosing_round(domain: Domain, d: int, *, exact: bool = False) -> Round:
    """The domain itself when it is round, a ball around the middle of the box or of the points otherwise."""
    wrap: Any = BallMatrix.exact if exact else np.asarray
    if isinstance(domain, Ball):
        return Round(wrap(domain.radius * np.eye(d)), np.zeros(d), domain.radius)
    region = Region.of(domain, exact=exact)
    assert region.center is not None
    radius = top(region.radius)
    return Round(region.shape if isinstance(domain, Ellipsoid) else wrap(radius * np.eye(d)), region.center, radius)
