"""Whether one set of tokens lies inside another, decided in exact arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from otattn._files.saved import Saved
from otattn._linalg import Array
from otattn.measures.domains import Ball, Box, PointSet


@dataclass(frozen=True, eq=False)
class _Near(Saved):
    points: Array
    radius: float

    @property
    def dim(self) -> int:
        """Dimension d."""
        return int(self.points.shape[1])

    def __repr__(self) -> str:
        n, d = self.points.shape
        return f"{type(self).__name__}(n={n}, d={d}, radius={self.radius:g})"


class NearTokens(_Near):
    """All configurations whose tokens lie within ``radius`` of given ones: ``|x'_i - x_i| <= radius``.

    Attributes
    ----------
    points : ndarray (n, d)
    radius : float
        At least 0.
    """


class NearMeasure(_Near):
    """All measures of n equal atoms within ``radius`` of that of given tokens in W_2 (for sequences: place by place).

    Attributes
    ----------
    points : ndarray (n, d)
    radius : float
        At least 0.
    """

    def __repr__(self) -> str:
        n, d = self.points.shape
        return f"NearMeasure(n={n} equal atoms, d={d}, radius={self.radius:g})"


def domain_contains(outer: Any, inner: Any) -> str | None:
    """Why ``outer`` is not known to contain ``inner``; None when it does, for the floats as exact numbers.

    ``outer`` None is all of ``R^d``.
    """
    if outer is None or outer is inner or _equal(outer, inner):
        return None
    if isinstance(outer, Box) and isinstance(inner, Box) and outer.dim == inner.dim:
        inside = (outer.lower <= inner.lower).all() and (inner.upper <= outer.upper).all()
        return None if inside else "its box does not contain the box"
    if isinstance(outer, NearMeasure) and isinstance(inner, NearMeasure) and np.array_equal(outer.points, inner.points):
        return (
            None if inner.radius <= outer.radius else f"its radius is {outer.radius!r}, and {inner.radius!r} is wanted"
        )
    points, reach = _extent(inner, outer.dim if isinstance(outer, Box) else 1)
    if isinstance(outer, Ball) and points is not None:
        room = Fraction(outer.radius) - Fraction(reach)
        if room >= 0 and all(_square(x) <= room * room for x in points):
            return None
        return f"its ball of radius {outer.radius!r} does not contain the tokens"
    if isinstance(outer, Box) and points is not None and points.shape[1] == outer.dim:
        low, high = _fractions(outer.lower), _fractions(outer.upper)
        r = Fraction(reach)
        rows = (_fractions(x) for x in points)
        if all(a <= t - r and t + r <= b for x in rows for t, a, b in zip(x, low, high, strict=True)):
            return None
        return "its box does not contain the tokens"
    return f"its domain {type(outer).__name__} is not known to contain the {type(inner).__name__}"


def _equal(outer: Any, inner: Any) -> bool:
    if isinstance(outer, Ball) and isinstance(inner, Ball):
        return outer.radius == inner.radius
    return same(outer, inner)


def same(first: Any, second: Any) -> bool:
    """True when two maps or domains are of one kind and made of the same numbers."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, np.ndarray):
        return first.shape == second.shape and bool(np.array_equal(first, second))
    if isinstance(first, (tuple, list)):
        return len(first) == len(second) and all(map(same, first, second))
    if is_dataclass(first):
        return all(same(getattr(first, f.name), getattr(second, f.name)) for f in fields(first) if f.compare)
    return bool(first == second)


def _extent(inner: Any, dim: int) -> tuple[Array | None, float]:
    """Points and a radius around each whose convex hull holds the set; None when they are not known exactly."""
    if isinstance(inner, Ball):
        return np.zeros((1, dim if inner.dim is None else inner.dim)), inner.radius
    if isinstance(inner, NearTokens):
        return inner.points, inner.radius
    if isinstance(inner, PointSet):
        return inner.points, 0.0
    if isinstance(inner, Box):
        # the vertex of the largest norm
        return np.maximum(np.abs(inner.lower), np.abs(inner.upper))[None], 0.0
    return None, 0.0


def _fractions(x: Array) -> list[Fraction]:
    return [Fraction(float(t)) for t in x]


def _square(x: Array) -> Fraction:
    return sum((t * t for t in _fractions(x)), Fraction(0))
