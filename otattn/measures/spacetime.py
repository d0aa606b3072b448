"""Measures over time and space: the domain of masked (causal) attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.measures.discrete import Atoms, DiscreteMeasure

__all__ = ["SpaceTimeMeasure", "as_spacetime"]


@dataclass(frozen=True, eq=False, init=False)
class SpaceTimeMeasure(Atoms):
    """A probability measure ``sum_i w_i delta_{(t_i, x_i)}`` on ``[0, 1] x R^d``.

    Parameters
    ----------
    times : array_like (n,)
        In ``[0, 1]``; equal times are one slice.
    points : array_like (n, d)
    weights : array_like (n,), optional
        Non-negative of sum 1; uniform by default.

    Examples
    --------
    >>> SpaceTimeMeasure.from_sequence([[1.0], [2.0]]).times
    array([0.5, 1. ])
    """

    times: NDArray[np.float64]
    points: NDArray[np.float64]
    weights: NDArray[np.float64]

    def __init__(self, times: ArrayLike, points: ArrayLike, weights: ArrayLike | None = None) -> None:
        space = DiscreteMeasure(points, weights)
        t = check.vector(times, "times", size=space.n)
        if t.min() < 0.0 or t.max() > 1.0:
            raise ValueError(f"times must lie in [0, 1], received [{t.min():g}, {t.max():g}]; rescale them.")
        object.__setattr__(self, "times", check.frozen(t))
        object.__setattr__(self, "points", space.points)
        object.__setattr__(self, "weights", space.weights)

    @classmethod
    def from_sequence(cls, X: ArrayLike) -> SpaceTimeMeasure:
        """Token i of n (counted from 1) sits at time ``i / n`` with weight ``1 / n``."""
        x = check.points(X, "X")
        return cls(np.arange(1, len(x) + 1) / len(x), x)

    def space_marginal(self) -> DiscreteMeasure:
        """The marginal on R^d."""
        return DiscreteMeasure(self.points, self.weights)

    def time_marginal(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Distinct times (ascending, of positive mass) and their masses."""
        live = self.weights > 0
        t, inverse = np.unique(self.times[live], return_inverse=True)
        return t, np.asarray(
            np.bincount(inverse.ravel(), weights=self.weights[live], minlength=len(t)), dtype=np.float64
        )

    def __repr__(self) -> str:
        return f"SpaceTimeMeasure(n={self.n}, dim={self.dim}, times={len(self.time_marginal()[0])})"


def as_spacetime(mu: Any, name: str = "mu") -> SpaceTimeMeasure:
    """``mu`` itself, or the sequence of the rows of an ``(n, d)`` array; no measure without times."""
    if isinstance(mu, SpaceTimeMeasure):
        return mu
    if (hasattr(mu, "weights") or hasattr(mu, "cov")) and not hasattr(mu, "__array__"):  # a data frame has columns
        raise TypeError(
            f"{name} must be a SpaceTimeMeasure or an (n, d) sequence, received {type(mu).__name__}, "
            "whose atoms have no times; build one with SpaceTimeMeasure(times, points, weights)."
        )
    return SpaceTimeMeasure.from_sequence(check.points(mu, name))
