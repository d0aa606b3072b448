"""The derivative of a function of arrays at a point, and the check of one that was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from otattn.errors import MemoryBudgetError

__all__ = ["Derivative", "Method", "checked", "unit_directions"]

Array = NDArray[np.float64]
Product = Callable[[Array], Array]
Method = Literal["given", "torch", "jax", "complex step", "central differences"]
MATRIX_BYTES = 2**29
"""A derivative known by its columns (or rows) only is written out as a matrix for its adjoint, up to this size."""
AGREEMENT = 1e-4
"""Relative: how far given derivatives may lie from differences of the values, and from one another's adjoint. A wrong
formula is wrong by much more; differences across a kink, or of float32 values, by less."""


@dataclass(frozen=True)
class Derivative:
    """The derivative of ``f : (n, d) -> (m, e)`` at a point.

    Attributes
    ----------
    shape, out_shape : (n, d), (m, e)
    columns, rows : callables or None
        ``v -> J v`` and ``g -> J^T g``; at least one of them.
    method : str
        "given", "torch", "jax", "complex step" or "central differences".
    error : float
        Relative error of a product beyond the rounding of float64, estimated along a random direction; 0 where the method has none.
    """

    shape: tuple[int, int]
    out_shape: tuple[int, int]
    columns: Product | None
    rows: Product | None
    method: Method
    error: float = 0.0

    def jvp(self, v: Array) -> Array:
        """``J v``."""
        if self.columns is not None:
            return self.columns(v)
        return (self.matrix @ v.reshape(-1)).reshape(self.out_shape)

    def vjp(self, g: Array) -> Array:
        """``J^T g``."""
        if self.rows is not None:
            return self.rows(g)
        return (self.matrix.T @ g.reshape(-1)).reshape(self.shape)

    @cached_property
    def matrix(self) -> Array:
        """The matrix ``(m e, n d)``, one product a column or a row.

        Raises
        ------
        MemoryBudgetError
            It would take more than 512 MB.
        """
        size, out = int(np.prod(self.shape)), int(np.prod(self.out_shape))
        if 8 * size * out > MATRIX_BYTES:
            raise MemoryBudgetError(
                f"a product with the adjoint of a function known by {self.method} needs its matrix, {out} by {size}, "
                f"{8 * size * out:,} bytes, allowed are {MATRIX_BYTES:,}; give both jvp and vjp, write the function in torch or "
                "jax, or take fewer tokens."
            )
        if self.columns is not None:
            return np.stack([self.columns(e).reshape(-1) for e in unit_directions(self.shape)], axis=1)
        assert self.rows is not None
        return np.stack([self.rows(e).reshape(-1) for e in unit_directions(self.out_shape)], axis=0)


def unit_directions(shape: tuple[int, int]) -> NDArray[np.float64]:
    """The unit vectors of the space of arrays of a shape, ``(size, *shape)``."""
    return np.eye(int(np.prod(shape))).reshape(-1, *shape)


def checked(given: Derivative, difference: Product) -> Derivative:
    """A derivative of the caller, compared with differences of the values and with its own adjoint in random directions.

    Raises
    ------
    ValueError
        They disagree; the message says by how much.
    """
    rng = np.random.default_rng(0)
    v, g = rng.standard_normal(given.shape), rng.standard_normal(given.out_shape)
    expected = difference(v)
    if given.columns is not None:
        gap, size = float(np.linalg.norm(given.jvp(v) - expected)), float(np.linalg.norm(expected))
        if not gap <= AGREEMENT * max(size, 1e-8):
            raise ValueError(
                "jvp must be the derivative of function along a direction, received one that differs from differences of its "
                f"values by {gap:.3g} of {size:.3g}; correct it, or leave it out."
            )
    if given.rows is not None:
        left, right = float(np.sum(g * expected)), float(np.sum(given.vjp(g) * v))
        size = float(np.linalg.norm(g) * np.linalg.norm(expected))
        if not abs(left - right) <= AGREEMENT * max(size, 1e-8):
            raise ValueError(
                f"vjp must be the adjoint of the derivative of function, received one with <g, J v> = {left:.6g} and "
                f"<vjp(g), v> = {right:.6g}; correct it, or leave it out."
            )
    return given
