"""Derivatives of token maps as linear operators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.sparse.linalg import LinearOperator

from otattn import _validate as check
from otattn._linalg import Array

__all__ = ["JacobianOperator", "finite"]


class JacobianOperator(LinearOperator):
    """The Jacobian ``D_X f`` of a token map ``f : (n, d) -> (n, e)``, acting on flattened tokens.

    As a matrix it has shape ``(n e, n d)``. Products are analytic; nothing of that size is stored.

    Parameters
    ----------
    n, d, e : int
        Number of tokens, dimension of tokens, dimension of values.
    jvp : callable ``(n, d) -> (n, e)``
        The directional derivative.
    vjp : callable ``(n, e) -> (n, d)``
        Its adjoint for the Euclidean inner products.
    dense : callable () -> (n, e, n, d), optional
        A direct assembly, where one is cheaper than ``n d`` products.
    method : str
        How the derivative is found: "analytic", or as :class:`FunctionAttention` says.
    error : float
        Relative error of the products beyond the rounding of float64, an estimate; 0 where the method has none.

    Examples
    --------
    >>> J = JacobianOperator(2, 1, 1, jvp=lambda v: 2.0 * v, vjp=lambda g: 2.0 * g)
    >>> J.matvec([1.0, 3.0]), J.shape
    (array([2., 6.]), (2, 2))
    """

    def __init__(
        self,
        n: int,
        d: int,
        e: int,
        *,
        jvp: Callable[[Array], Array],
        vjp: Callable[[Array], Array],
        dense: Callable[[], Array] | None = None,
        method: str = "analytic",
        error: float = 0.0,
    ) -> None:
        super().__init__(dtype=np.dtype(np.float64), shape=(n * e, n * d))
        self.method, self.error = method, error
        self.n, self.d, self.e = n, d, e
        self._jvp, self._vjp, self._dense = jvp, vjp, dense

    def jvp(self, direction: ArrayLike) -> Array:
        """``D_X f`` applied to token displacements ``(n, d)`` (or flat, ``(n d,)``); returns ``(n, e)``."""
        return _finite(self._jvp(_tokens(direction, "direction", self.n, self.d)))

    def vjp(self, cotangent: ArrayLike) -> Array:
        """The adjoint applied to ``(n, e)`` (or flat, ``(n e,)``); returns ``(n, d)``."""
        return _finite(self._vjp(_tokens(cotangent, "cotangent", self.n, self.e)))

    def _matvec(self, x: Array) -> Array:
        return self.jvp(x).reshape(-1)

    def _rmatvec(self, x: Array) -> Array:
        return self.vjp(x).reshape(-1)

    @property
    def assembled(self) -> bool:
        """True where :meth:`to_dense` takes less than a product a column."""
        return self._dense is not None

    def to_dense(self) -> Array:
        """The matrix ``(n e, n d)``; costs its memory and, unless assembled, ``n min(d, e)`` products."""
        if self._dense is not None:
            return self._dense().reshape(self.shape)
        if self.d <= self.e:
            return np.stack([self.matvec(row) for row in np.eye(self.shape[1])], axis=1)
        return np.stack([self.rmatvec(row) for row in np.eye(self.shape[0])], axis=0)

    def reweighted(self, weights: ArrayLike) -> JacobianOperator:
        """``W^{1/2} J W^{-1/2}`` with ``W = diag(weights)`` per token: the operator in ``L^2(mu)``.

        Raises
        ------
        ValueError
            A weight is not positive: drop atoms of zero weight first (``mu.support()``).
        """
        w = check.vector(weights, "weights", size=self.n)
        if not (w > 0).all():
            raise ValueError(
                f"weights must be positive, received a smallest entry of {w.min():g}; "
                "take the Jacobian at mu.support(), which drops atoms of zero weight."
            )
        root = np.sqrt(w)[:, None]
        dense = self._dense
        return JacobianOperator(
            self.n,
            self.d,
            self.e,
            jvp=lambda v: root * self._jvp(v / root),
            vjp=lambda g: self._vjp(g * root) / root,
            # as ratios of neighbouring roots, so that extreme weights neither overflow nor vanish
            dense=None if dense is None else lambda: dense() * (root / root[:, 0])[:, None, :, None],
            method=self.method,
            error=self.error,
        )


def _tokens(value: ArrayLike, name: str, n: int, width: int) -> Array:
    array = value if type(value) is np.ndarray and value.dtype == np.float64 else check.real_array(value, name)
    array = np.asarray(array, dtype=np.float64) if array.dtype.itemsize <= 8 else check.as_float_array(array, name)
    if array.shape not in ((n, width), (n * width,), (n * width, 1)):
        raise ValueError(
            f"{name} must have shape ({n}, {width}) or ({n * width},), received {array.shape}; one row a token."
        )
    return array.reshape(n, width)


def finite(values: Array, what: str = "a value of the map", fix: str = "") -> Array:
    """The values; an OverflowError where float64 cannot say them."""
    if not np.isfinite(values).all():
        fix = fix or "scale the tokens, A or V down, or use a normalised kernel (softmax)"
        raise OverflowError(f"{what} is not representable in float64; {fix}.")
    return values


def _finite(value: Array) -> Array:
    what = "a product with the Jacobian (or its direction)"
    return finite(value, what, "scale the tokens, A or the direction down")
