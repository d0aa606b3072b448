"""Interval values with interval partial derivatives, vectorised over boxes: what a mean-value bound needs.

A jet encloses a function and its gradient over each box. ``F(x) <= F(centre) + sum_k max |d_k F| (width_k / 2)`` then
loses only second-order terms, where a bound by worst corners loses first-order ones. Rounding is not directed: the
caller adds a margin far above the few hundred units in the last place that such an expression can lose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Jet", "Pair", "variable"]

Array = NDArray[np.float64]
Pair = tuple[Array, Array]


def _product(x: Pair, y: Pair) -> Pair:
    a, b, c, d = x[0] * y[0], x[0] * y[1], x[1] * y[0], x[1] * y[1]
    return np.minimum(np.minimum(a, b), np.minimum(c, d)), np.maximum(np.maximum(a, b), np.maximum(c, d))


def _square(x: Pair) -> Pair:
    low, high = x[0] ** 2, x[1] ** 2
    return np.where((x[0] <= 0) & (x[1] >= 0), 0.0, np.minimum(low, high)), np.maximum(low, high)


@dataclass(frozen=True, eq=False)
class Jet:
    """``value`` encloses a function on each box, ``slopes[k]`` its derivative in variable k (absent: zero)."""

    value: Pair
    slopes: dict[int, Pair]

    def __add__(self, other: Jet | float | Array) -> Jet:
        if not isinstance(other, Jet):
            return Jet((self.value[0] + other, self.value[1] + other), self.slopes)
        slopes = dict(self.slopes)
        for k, (low, high) in other.slopes.items():
            slopes[k] = (slopes[k][0] + low, slopes[k][1] + high) if k in slopes else (low, high)
        return Jet((self.value[0] + other.value[0], self.value[1] + other.value[1]), slopes)

    def __neg__(self) -> Jet:
        flip = {k: (-high, -low) for k, (low, high) in self.slopes.items()}
        return Jet((-self.value[1], -self.value[0]), flip)

    def __sub__(self, other: Jet | float | Array) -> Jet:
        return self + (-other)

    def __mul__(self, other: Jet | float | Array) -> Jet:
        if not isinstance(other, Jet):
            factor = (np.asarray(other), np.asarray(other))
            return Jet(_product(self.value, factor), {k: _product(s, factor) for k, s in self.slopes.items()})
        slopes = {k: _product(s, other.value) for k, s in self.slopes.items()}
        for k, s in other.slopes.items():
            low, high = _product(s, self.value)
            slopes[k] = (slopes[k][0] + low, slopes[k][1] + high) if k in slopes else (low, high)
        return Jet(_product(self.value, other.value), slopes)

    def square(self) -> Jet:
        """The square, enclosed more tightly than a product of two independent factors."""
        double = (2 * self.value[0], 2 * self.value[1])
        return Jet(_square(self.value), {k: _product(s, double) for k, s in self.slopes.items()})

    def through(self, value: Callable[[Pair], Pair], slope: Callable[[Pair], Pair]) -> Jet:
        """The composition with a function of one variable, given the ranges of it and of its derivative."""
        rate = slope(self.value)
        return Jet(value(self.value), {k: _product(s, rate) for k, s in self.slopes.items()})

    def widened(self, slack: float) -> Jet:
        """The same up to an unknown constant of size at most ``slack``."""
        return Jet((self.value[0] - slack, self.value[1] + slack), self.slopes)

    def swings(self, widths: Array) -> Array:
        """``max |slope_k| width_k / 2``, shape of ``widths (dims, count)``; inf where a slope is undefined."""
        out = np.zeros_like(widths)
        for k, (low, high) in self.slopes.items():
            out[k] = 0.5 * widths[k] * np.maximum(np.abs(low), np.abs(high))
        return np.where(np.isfinite(out), out, np.inf)


def variable(k: int, low: Array, high: Array) -> Jet:
    """The coordinate k."""
    one = np.ones_like(low)
    return Jet((low, high), {k: (one, one)})
