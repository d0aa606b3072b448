"""Derivatives of token maps as linear operators."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator

__all__ = ["JacobianOperator"]

Array = NDArray[np.float64]


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
    ) -> None:
        super().__init__(dtype=np.dtype(np.float64), shape=(n * e, n * d))
        self.n, self.d, self.e = n, d, e
        self._jvp, self._vjp, self._dense = jvp, vjp, dense

    def jvp(self, direction: Array) -> Array:
        """``D_X f`` applied to token displacements ``(n, d)``; returns ``(n, e)``."""
        return self._jvp(np.asarray(direction, dtype=np.float64).reshape(self.n, self.d))

    def vjp(self, cotangent: Array) -> Array:
        """The adjoint applied to ``(n, e)``; returns ``(n, d)``."""
        return self._vjp(np.asarray(cotangent, dtype=np.float64).reshape(self.n, self.e))

    def _matvec(self, x: Array) -> Array:
        return self.jvp(x).reshape(-1)

    def _rmatvec(self, x: Array) -> Array:
        return self.vjp(x).reshape(-1)

    def to_dense(self) -> Array:
        """The matrix ``(n e, n d)``; costs its memory and, without a direct assembly, ``n min(d, e)`` products."""
        if self._dense is not None:
            return self._dense().reshape(self.shape)
        if self.d <= self.e:
            return np.stack([self.matvec(row) for row in np.eye(self.shape[1])], axis=1)
        return np.stack([self.rmatvec(row) for row in np.eye(self.shape[0])], axis=0)

    def reweighted(self, weights: Array) -> JacobianOperator:
        """``W^{1/2} J W^{-1/2}`` with ``W = diag(weights)`` per token: the operator in ``L^2(mu)``; weights positive."""
        root = np.sqrt(weights)[:, None]
        dense = self._dense
        return JacobianOperator(
            self.n,
            self.d,
            self.e,
            jvp=lambda v: root * self._jvp(v / root),
            vjp=lambda g: self._vjp(g * root) / root,
            dense=None if dense is None else lambda: dense() * root[:, None, None] / root,
        )
