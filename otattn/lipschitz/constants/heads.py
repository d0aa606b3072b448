"""Softmax heads, and token domains enclosed by round ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from otattn._linalg import EPS, Array, norm_upper, product_error
from otattn.attention.head import Head, check_sizes, heads_of
from otattn.lipschitz.arithmetic.balls import BallMatrix, arithmetic_of
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.constants.regions import Region
from otattn.lipschitz.hypotheses import softmax
from otattn.measures import Ball, Domain, Ellipsoid


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


def gradient_error(head: Head, center: Any, size: float) -> float:
    """What rounding did to ``A x + c`` within ``size`` of the centre b, ``A b + c`` made in floats."""
    shifted = product_error(head.A, center[:, None]) + head.shift + 4.0 * EPS * float(norm_upper(head.c))
    return shifted + head.lost * (size + float(norm_upper(center)))


def enclosing_round(domain: Domain, d: int, *, exact: bool = False) -> Round:
    """The domain itself when it is round, a ball around the middle of the box or of the points otherwise."""
    wrap: Any = BallMatrix.exact if exact else np.asarray
    if isinstance(domain, Ball):
        return Round(wrap(domain.radius * np.eye(d)), np.zeros(d), domain.radius)
    region = Region.of(domain, exact=exact)
    assert region.center is not None
    radius = top(region.radius)
    return Round(region.shape if isinstance(domain, Ellipsoid) else wrap(radius * np.eye(d)), region.center, radius)
