"""L2 self-attention: logits are minus squared distances of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array, product_error
from otattn.attention.head import Arithmetic, Head, near_product
from otattn.attention.jacobian import finite
from otattn.attention.kernels import Projections
from otattn.attention.single_head import SingleHead
from otattn.measures import GaussianMeasure

__all__ = ["L2Attention"]


@dataclass(frozen=True, eq=False, init=False)
class L2Attention(SingleHead):
    r"""L2 self-attention, ``P(x, dy)`` proportional to ``exp(-|Q x - K y|^2) mu(dy)``.

    Parameters
    ----------
    Q, K : array_like (k, d)
        Query and key factors as they stand in the exponent; :meth:`from_qkv` takes learned ones and a scale.
    V : array_like (e, d)

    Examples
    --------
    >>> L2Attention([[1.0]], [[1.0]], [[1.0]])([[0.0]], [[-1.0], [1.0]])
    array([[0.]])

    References
    ----------
    Kim, Papamakarios, Mnih, "The Lipschitz constant of self-attention", ICML 2021.
    """

    Q: Array
    K: Array
    V: Array

    def __init__(self, Q: ArrayLike, K: ArrayLike, V: ArrayLike) -> None:
        q = check.matrix(Q, "Q")
        object.__setattr__(self, "Q", check.frozen(q))
        object.__setattr__(self, "K", check.frozen(check.matrix(K, "K", shape=q.shape)))
        object.__setattr__(self, "V", check.frozen(check.matrix(V, "V", shape=(None, q.shape[1]))))

    @classmethod
    def from_qkv(cls, Q: ArrayLike, K: ArrayLike, V: ArrayLike, *, scale: float | None = None) -> L2Attention:
        """Attention of learned factors: ``P(x, dy)`` proportional to ``exp(-scale |Q x - K y|^2) mu(dy)``.

        Parameters
        ----------
        Q, K : array_like (k, d)
        V : array_like (e, d)
        scale : float, optional
            Positive; ``1 / sqrt(k)`` by default, as for softmax attention.

        Examples
        --------
        >>> L2Attention.from_qkv([[2.0]], [[1.0]], [[1.0]], scale=0.25).Q
        array([[1.]])
        """
        q = check.matrix(Q, "Q")
        root = np.sqrt(1.0 / np.sqrt(len(q)) if scale is None else check.positive(scale, "scale"))
        return cls(root * q, root * check.matrix(K, "K", shape=q.shape), V)

    def projections(self) -> Projections:
        """The affine maps of the head: ``-|Qx - Ky|^2 = <2Qx, Ky> - |Ky|^2`` up to a term constant in y."""
        return Projections(2.0 * self.Q, self.K, self.V, quadratic=True)

    def _heads(self, arithmetic: Arithmetic) -> tuple[Head, ...]:
        Q, K = arithmetic.matrix(self.Q), arithmetic.matrix(self.K)
        head = Head.of(self, 2.0 * (K.T @ Q), self.V, arithmetic=arithmetic)
        # what rounding does to A, relative to its norm
        A, error = (head.A, 0.0) if head.exact else near_product(head.A, 2.0 * product_error(self.K.T, self.Q))
        return (replace(head, A=A, H=K.T @ K, error=error),)

    def in_coordinates(self, E: Array, left: Array) -> L2Attention:
        return L2Attention(finite(self.Q @ E), finite(self.K @ E), finite(left @ self.V @ E))

    def logits(self, x: Array, head: int = 0) -> Array:
        q, k = x @ self.Q.T, x @ self.K.T
        return np.asarray(-((q[:, None, :] - k[None, :, :]) ** 2).sum(axis=2))

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """``Gamma(x) = V (I + 2 Sigma K^T K)^{-1} (alpha + 2 Sigma K^T Q x)``: Sigma is not inverted."""
        self._check_dim(gaussian.dim)
        S = gaussian.cov
        N = np.eye(self.in_dim) + 2.0 * S @ self.K.T @ self.K
        # eigenvalues of Sigma K^T K are non-negative, so N is invertible for every PSD Sigma
        solved = np.linalg.solve(N, np.column_stack([2.0 * S @ self.K.T @ self.Q, gaussian.mean]))
        return self.V @ solved[:, :-1], self.V @ solved[:, -1]
