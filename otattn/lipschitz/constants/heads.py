"""Softmax heads, and token domains enclosed by round ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otattn._linalg import Array
from otattn.attention.head import Head, check_sizes, heads_of
from otattn.lipschitz.arithmetic.balls import BallMatrix, arithmetic_of
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.constants.regions import Region
from otattn.lipschitz.hypotheses import softmax
from otattn.measures import Ball, Domain, Ellipsoid

__all__ = ["Round", "check_domain", "enclosing_round", "softmax_head"]


class Round(NamedTuple):
    """The set ``{E z + center : |z| <= 1}``; ``radius >= ||E||``."""

    E: Any
    center: Array
    radius: float


def softmax_head(attention: Any, *, masked: bool | None = None, exact: bool = False) -> Head:
    """The head of a softmax attention; ``masked`` None accepts both kinds, True or False only that kind."""
    why = softmax(masked)(attention, None, None, 2.0)
    if why is not None:
        raise ValueError(f"{why}; otattn.theorems(attention, ...) lists the theorems that apply to it.")
    check_sizes(attention)
    return heads_of(attention, arithmetic=arithmetic_of(exact))[0]


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
