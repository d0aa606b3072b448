"""Discrete probability measures on R^d."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn._files.saved import Saved
from otattn._linalg import row_norms

__all__ = ["Atoms", "DiscreteMeasure", "as_discrete"]

COUNT_TOL = 1e-6
"""How far ``n`` times a weight may lie from a whole number of tokens."""
DIGITS = 4.0 * float(np.finfo(np.float64).eps)
"""The same relative to the number: weights are rounded when they are made and when their sum is divided out."""


class Atoms(Saved):
    """What measures of atoms have in common: ``points (n, d)`` with ``weights (n,)``."""

    points: NDArray[np.float64]
    weights: NDArray[np.float64]

    @property
    def n(self) -> int:
        """Number of atoms."""
        return int(self.points.shape[0])

    @property
    def dim(self) -> int:
        """Dimension d of the space."""
        return int(self.points.shape[1])

    def radius(self, center: ArrayLike | None = None) -> float:
        """Largest ``|x_i - center|`` over atoms of positive weight (center 0 by default); an OverflowError beyond float64."""
        c = np.zeros(self.dim) if center is None else check.vector(center, "center", size=self.dim)
        with np.errstate(over="ignore"):
            out = float(row_norms(self.points[self.weights > 0] - c).max())
        if out == np.inf:
            raise OverflowError("the radius must fit in float64; scale the points down.")
        return out

    def pushforward(self, f: Callable[[NDArray[np.float64]], ArrayLike]) -> Self:
        """The image under a map ``(n, d) -> (n, e)`` applied to all atoms at once; weights and times are kept."""
        y = check.points(f(self.points), "f(points)")
        if len(y) != self.n:
            raise ValueError(f"f must keep the number of points, received {len(y)} images for {self.n} atoms.")
        return self._with_points(y)

    def _with_points(self, points: NDArray[np.float64]) -> Self:
        """The same weights (and times) on other atoms, kept to the bit."""
        out = copy(self)
        object.__setattr__(out, "points", check.frozen(points))
        return out

    def support(self) -> Self:
        """The same measure without its atoms of zero weight."""
        keep = self.weights > 0
        return self if keep.all() else type(self)(**{name: part[keep] for name, part in vars(self).items()})


@dataclass(frozen=True, eq=False, init=False)
class DiscreteMeasure(Atoms):
    """A probability measure ``mu = sum_i w_i delta_{x_i}`` on R^d.

    Parameters
    ----------
    points : array_like (n, d)
        Atoms; integers and half precision are widened to float64.
    weights : array_like (n,), optional
        Non-negative, of sum 1 (a sum off by at most 1e-6 is renormalised); uniform by default.

    Raises
    ------
    ValueError
        Non-finite or empty points, a wrong number of weights, negative weights, a sum further from 1.

    Examples
    --------
    >>> mu = DiscreteMeasure([[0.0], [3.0]])
    >>> mu.mean(), mu.radius()
    (array([1.5]), 3.0)
    """

    points: NDArray[np.float64]
    weights: NDArray[np.float64]

    def __init__(self, points: ArrayLike, weights: ArrayLike | None = None) -> None:
        x = check.points(points)
        w = np.full(len(x), 1.0 / len(x)) if weights is None else check.check_weights(weights, len(x))
        object.__setattr__(self, "points", check.frozen(x))
        object.__setattr__(self, "weights", check.frozen(w))

    @classmethod
    def normalized(cls, points: ArrayLike, weights: ArrayLike) -> DiscreteMeasure:
        """The measure with ``weights`` divided by their (positive) sum."""
        x = check.points(points)
        return cls(x, check.check_weights(weights, len(x), normalise=True))

    @property
    def is_uniform(self) -> bool:
        """True when all weights are equal."""
        return bool((self.weights == self.weights[0]).all())

    def mean(self) -> NDArray[np.float64]:
        """``sum_i w_i x_i``, shape ``(d,)``."""
        return np.asarray(self.weights @ self.points)

    def covariance(self) -> NDArray[np.float64]:
        """``sum_i w_i (x_i - m)(x_i - m)^T``, shape ``(d, d)``; an OverflowError beyond float64."""
        with np.errstate(over="ignore", invalid="ignore"):
            y = self.points - self.mean()
            out = np.asarray((y * self.weights[:, None]).T @ y)
        if not np.isfinite(out).all():
            raise OverflowError("the covariance must fit in float64; scale the points down.")
        return out

    def merge_duplicates(self) -> DiscreteMeasure:
        """The same measure with equal atoms merged, in order of first appearance."""
        _, first, inverse = np.unique(self.points, axis=0, return_index=True, return_inverse=True)
        mass = np.bincount(inverse.ravel(), weights=self.weights, minlength=len(first))
        order = np.argsort(first, kind="stable")
        return DiscreteMeasure(self.points[first[order]], mass[order])

    def multiplicities(self, n: int) -> NDArray[np.int64]:
        """How many of n tokens sit at each atom, ``(self.n,)``.

        Raises
        ------
        ValueError
            Some weight is no multiple of ``1/n``.
        """
        n = check.count(n, "n")
        exact = self.weights * n
        counts = np.rint(exact).astype(np.int64)
        # a weight is a float, so its multiple is known to some digits only
        allowed = np.maximum(COUNT_TOL, DIGITS * exact)
        excess = np.abs(exact - counts) - allowed
        if excess.max() > 0 or counts.sum() != n:
            worst = float(self.weights[excess.argmax()])
            raise ValueError(f"weights must be multiples of 1/{n}, received {worst!r}; choose another n.")
        return counts

    def tokens(self, n: int) -> NDArray[np.float64]:
        """The ``(n, d)`` tokens of a measure whose weights are multiples of ``1/n`` (see :meth:`multiplicities`)."""
        return np.asarray(np.repeat(self.points, self.multiplicities(n), axis=0))

    def __repr__(self) -> str:
        return f"DiscreteMeasure(n={self.n}, dim={self.dim}{', uniform' if self.is_uniform else ''})"


def as_discrete(mu: Any, name: str = "mu") -> DiscreteMeasure:
    """``mu`` itself, or the uniform measure on the rows of an ``(n, d)`` array."""
    if isinstance(mu, DiscreteMeasure):
        return mu
    gaussian = hasattr(mu, "cov") and hasattr(mu, "mean") and not hasattr(mu, "__array__")  # a data frame has both
    if isinstance(mu, (str, bytes, dict)) or gaussian:
        hint = " (its sample(n, rng) is one; two Gaussians have bures_wasserstein)" if gaussian else ""
        raise TypeError(f"{name} must be a DiscreteMeasure or an (n, d) array, received {type(mu).__name__}{hint}.")
    x = check.points(mu, name)
    out = object.__new__(DiscreteMeasure)  # checked once, under the argument's own name
    object.__setattr__(out, "points", check.frozen(x))
    object.__setattr__(out, "weights", check.frozen(np.full(len(x), 1.0 / len(x))))
    return out
