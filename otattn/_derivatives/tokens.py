"""What a function of the caller sees: a measure in the arrays of its library, or the tokens that stand for one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._derivatives.library import Library

__all__ = ["Atoms", "PlacedTokens", "Tokens", "multiplicities"]

Array = NDArray[np.float64]
MOST_TOKENS = 4096
"""Weights of a map of tokens are multiples of 1/N for some N up to this."""


class Atoms(NamedTuple):
    """A measure in the arrays of another library (or complex ones): what a function sees while it is differentiated."""

    points: Any
    weights: Any
    times: Any = None

    @property
    def n(self) -> int:
        """Number of atoms."""
        return int(self.points.shape[0])

    @property
    def dim(self) -> int:
        """Dimension of the space."""
        return int(self.points.shape[1])

    def mean(self) -> Any:
        """``sum_i w_i x_i``."""
        return self.weights @ self.points


class Tokens(NamedTuple):
    """The tokens that stand for a measure: which atom each of them is, and the first token of each atom."""

    atoms: NDArray[np.int64]
    first: NDArray[np.int64]


class PlacedTokens(NamedTuple):
    """Tokens that follow the atoms: token k is atom ``atoms[k]``, displaced with it or against it."""

    points: Array
    atoms: NDArray[np.int64]
    first: NDArray[np.int64]
    signs: Array

    def tokens(self, library: Library, z: Any) -> Any:
        """The tokens when the atoms are at z."""
        if (self.signs > 0).all():
            return z[self.atoms]
        start, signs = library.constant(self.points), library.constant(self.signs)
        return start[self.atoms] + signs * (z - start)[self.atoms]

    def gather(self, v: Array) -> Array:
        """Displacements of the tokens from those of the atoms."""
        return np.asarray(self.signs * v[self.atoms])

    def scatter(self, g: Array, e: int) -> Array:
        """The adjoint of reading the first token of each atom, then of :meth:`gather`'s index."""
        out = np.zeros((len(self.atoms), e))
        out[self.first] = g
        return out

    def collect(self, g: Array) -> Array:
        """The adjoint of :meth:`gather`."""
        out = np.zeros_like(self.points)
        np.add.at(out, self.atoms, self.signs * g)
        return out


def multiplicities(weights: Array) -> NDArray[np.int64]:
    """The fewest tokens at each atom that give these weights."""
    if (weights == weights[0]).all():
        return np.ones(len(weights), dtype=np.int64)
    for total in range(len(weights), MOST_TOKENS + 1):
        exact = total * weights
        counts = np.rint(exact)
        if counts.min() >= 1 and np.abs(exact - counts).max() <= 1e-6:
            return counts.astype(np.int64)
    raise ValueError(
        f"weights must be positive multiples of 1/N, N <= {MOST_TOKENS}, for a function of tokens, received a smallest one of "
        f"{weights.min():.3g}; give a number n of tokens, or write the function as (x, mu) -> values."
    )
