"""Thick-restart Lanczos for the largest eigenvalue of a positive semi-definite operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.attention import base as attention_base

__all__ = ["NonFiniteError", "RitzPair", "top_eigenpair"]

Array = NDArray[Any]

LARGEST_BASIS = 80
FRESH_STEPS = 5
"""Steps from a new random vector once the Krylov space is exhausted: they show what it has missed."""


class NonFiniteError(ArithmeticError):
    """A product has left the range of its precision."""


@dataclass(frozen=True, eq=False)
class RitzPair:
    """The top Ritz pair with its estimated relative residual, the second Ritz value, the products used.

    ``settled`` is False when the iteration ran out of products.
    """

    value: float
    vector: Array
    residual: float
    second: float
    products: int
    settled: bool


class _Basis:
    """An orthonormal basis, the rows of ``V``, with the projected operator ``H``."""

    def __init__(self, start: Array, rng: np.random.Generator) -> None:
        size, itemsize = start.size, start.itemsize
        room = attention_base.MEMORY_BUDGET // (size * itemsize)
        self.capacity = min(size, max(8, min(LARGEST_BASIS, room)))
        self.V = np.empty((self.capacity + 1, size), start.dtype)
        self.H = np.zeros((self.capacity + 1, self.capacity + 1))
        self.V[0] = start / np.linalg.norm(start)
        self.count = 0  # of directions that the operator has been applied to
        self.kept = 0  # of Ritz vectors that the last restart left, whose couplings are in H
        self.rng = rng
        self.eps = float(np.finfo(start.dtype).eps)

    def absorb(self, image: Array) -> float:
        """Enter the operator's image of the newest direction; returns the norm of what is new in it."""
        j = self.count
        w = np.array(image, dtype=self.V.dtype)
        # the three terms that are not rounding first, then one pass against the whole basis
        known = range(j + 1) if j == self.kept else range(max(j - 1, 0), j + 1)
        self.H[j, j] = float(self.V[j] @ w)
        for i in known:
            w -= self.V.dtype.type(self.H[i, j]) * self.V[i]
        before = float(np.linalg.norm(w))
        for _ in range(2):
            coefficients = self.V[: j + 1] @ w
            w -= coefficients @ self.V[: j + 1]
            self.H[j, j] += float(coefficients[j])
            norm = float(np.linalg.norm(w))
            if norm > 0.5 * before:
                break
            before = norm
        self.count = j + 1
        self.next, self.norm = w, norm
        return norm

    def exhausted(self) -> bool:
        """True when the basis spans an invariant subspace (to rounding)."""
        size = float(np.abs(self.H[: self.count, : self.count]).max())
        return self.norm <= 10.0 * self.eps * size or self.count == self.V.shape[1]

    def extend(self) -> None:
        """Take what is new as the next direction."""
        j = self.count
        self.V[j] = self.next / self.norm
        self.H[j, j - 1] = self.H[j - 1, j] = self.norm

    def extend_randomly(self) -> None:
        """Take a random direction, orthogonal to an invariant subspace."""
        w = self.rng.standard_normal(self.V.shape[1]).astype(self.V.dtype)
        for _ in range(2):
            w -= (self.V[: self.count] @ w) @ self.V[: self.count]
            w /= np.linalg.norm(w)
        self.V[self.count] = w

    def ritz(self) -> tuple[Array, Array]:
        """Ritz values (ascending) and their coordinates."""
        values, coordinates = np.linalg.eigh(self.H[: self.count, : self.count])
        return values, coordinates

    def vector(self, coordinates: Array) -> Array:
        out = coordinates.astype(self.V.dtype) @ self.V[: self.count]
        return np.asarray(out / np.linalg.norm(out))

    def restart(self, values: Array, coordinates: Array, *, fresh: bool) -> None:
        """Keep the best Ritz vectors and the next direction (a random one when there is none)."""
        keep = max(1, self.capacity // 4)
        m = self.count
        best = coordinates[:, -keep:]
        self.V[:keep] = best.T.astype(self.V.dtype) @ self.V[:m]
        self.H[...] = 0.0
        self.H[:keep, :keep] = np.diag(values[-keep:])
        self.count = self.kept = keep
        if fresh:
            self.extend_randomly()
            return
        self.V[keep] = self.next / self.norm
        self.H[:keep, keep] = self.H[keep, :keep] = self.norm * best[m - 1]


def top_eigenpair(
    product: Callable[[Array], Array],
    start: Array,
    *,
    tol: float,
    max_products: int,
    rng: np.random.Generator,
    first: Array | None = None,
    min_steps: int = 1,
) -> RitzPair:
    """Lanczos from ``start`` until the residual of the top Ritz pair is at most ``tol`` times its value.

    Parameters
    ----------
    product : callable (size,) -> (size,)
        A symmetric positive semi-definite operator, in the dtype of ``start``.
    start : (size,) array
    tol : float
    max_products : int
    rng : Generator
        Of a new direction when the Krylov space is exhausted.
    first : (size,) array, optional
        The operator's image of ``start`` (of norm 1), if known.
    min_steps : int
        Steps before convergence is believed. A random start in a tight cluster has a small residual at once,
        although a top eigenvalue outside the cluster is in it with weight ``1 / size`` only; a few steps
        bring that out.

    Raises
    ------
    NonFiniteError
        A product is not finite.
    """
    basis = _Basis(start, rng)
    products, wait, fresh = 0, min_steps, False
    while True:
        if first is None:
            image = product(basis.V[basis.count])
            products += 1
        else:
            image, first = first, None
        if not np.isfinite(image).all():
            raise NonFiniteError(f"a product in {basis.V.dtype} is not finite")
        norm = basis.absorb(image)
        values, coordinates = basis.ritz()
        value = float(values[-1])
        second = float(values[-2]) if len(values) > 1 else 0.0
        residual = norm * abs(float(coordinates[-1, -1]))
        wait = max(0, wait - 1)
        done = residual <= tol * value or value <= 0.0
        exhausted = basis.exhausted()
        full = basis.count == basis.V.shape[1]
        settled = (done and wait == 0) or full or (exhausted and fresh)
        if settled or products >= max_products:
            return RitzPair(
                value=max(value, 0.0),
                vector=basis.vector(coordinates[:, -1]),
                residual=residual / value if value > 0.0 else 0.0,
                second=max(second, 0.0),
                products=products,
                settled=settled,
            )
        if exhausted:
            fresh, wait = True, FRESH_STEPS
        if basis.count == basis.capacity:
            basis.restart(values, coordinates, fresh=exhausted)
        elif exhausted:
            basis.extend_randomly()
        else:
            basis.extend()
