r"""The tokens ``y_i = T_i (L x_i + b)`` of rotary heads in balls, and the matrices ``T_i L`` in intervals.

L and b hold the floats of the map times powers of two. An angle is ``length (i / n) omega``, of whose float value
the three operations leave at most ``2 eps`` in doubt: it enters as a ball of this radius.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import EPS
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import Interval
from otattn.lipschitz.near.rotary import Lift

__all__ = ["TurnedTokens", "turned_tokens"]


@dataclass(frozen=True, eq=False)
class TurnedTokens:
    """The tokens ``(n, m)``, and what turns the rows of L."""

    tokens: BallMatrix
    L: Interval
    pairs: tuple[tuple[NDArray[np.intp], NDArray[np.intp], Interval, Interval], ...]
    """For each part its first and second rows, and the cosines and sines ``(n, pairs)``."""

    def matrix(self, i: int) -> Any:
        """``T_i L``."""
        out = self.L.copy()
        for first, second, cos, sin in self.pairs:
            a, b = self.L[first], self.L[second]
            c, s = cos[i][:, None], sin[i][:, None]
            out[first], out[second] = a * c - b * s, a * s + b * c
        return out


def turned_tokens(lift: Lift, points: Any) -> TurnedTokens:
    """At tokens ``(n, d)``."""
    X = BallMatrix.exact(points)
    ones = BallMatrix.exact(np.ones((len(X), 1)))
    L = BallMatrix.exact(lift.L)
    rows = (X @ L.T + ones @ BallMatrix.exact(lift.b[None])).balls.tolist()
    parts = []
    for first, second, angles in _pairs(lift):
        # the last summand is for what underflows
        width = 2.0 * EPS * np.abs(angles) * (1.0 + 2.0 * EPS) + 1e-300
        balls = BallMatrix.between(Interval.between(angles, angles) + Interval.between(-width, width)).balls.tolist()
        cos, sin = ([[getattr(x, name)() for x in line] for line in balls] for name in ("cos", "sin"))
        for row, c, s in zip(rows, cos, sin, strict=True):
            for t, (k, l) in enumerate(zip(first, second, strict=True)):
                row[k], row[l] = row[k] * c[t] - row[l] * s[t], row[k] * s[t] + row[l] * c[t]
        make = type(X.balls)
        parts.append((first, second, BallMatrix(make(cos)).interval(), BallMatrix(make(sin)).interval()))
    return TurnedTokens(BallMatrix(type(X.balls)(rows)), Interval.exact(lift.L), tuple(parts))


def _pairs(lift: Lift) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]]:
    """The rows that are turned together, and their angles ``(n, pairs)``."""
    for part in lift.parts:
        half = part.angles.shape[1]
        if half == 0:
            continue
        k = np.arange(half)
        first, second = (2 * k, 2 * k + 1) if part.layout == "adjacent" else (k, half + k)
        yield part.rows.start + first, part.rows.start + second, part.angles
