"""One attention head: the base of the variants with one kernel, and the Jacobian of a normalised one at its own atoms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention import memory
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.jacobian import JacobianOperator
from otattn.attention.kernels import Mass, NormalisedKernel, Projections, Values
from otattn.attention.memory import blocks

__all__ = ["NormalisedJacobian", "SingleHead", "square"]


class SingleHead(AttentionMap):
    """``Gamma_mu(x) = int k(x, y) (V y + value_bias) dmu(y)`` with a kernel that the variant gives."""

    V: Array
    maskable = True
    mass: ClassVar[Mass] = "one"

    @property
    def in_dim(self) -> int:
        return int(self.V.shape[1])

    @property
    def out_dim(self) -> int:
        return int(self.V.shape[0])

    def values(self) -> tuple[Values, ...]:
        return (Values(self.V, getattr(self, "value_bias", None), self.mass),)

    @abstractmethod
    def projections(self) -> Projections:
        """The affine maps of the head."""

    def _kernel(self, mu: Measure, times: Array | None, block_size: int | None) -> Any:
        """The weights of the atoms: normalised exponentials of the logits unless the variant says otherwise."""
        seen = getattr(mu, "times", None) if times is not None else None
        return NormalisedKernel(self.projections(), mu.points, mu.weights, times=seen, block_size=block_size)

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._kernel(mu, times, block_size).apply(x, times)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._kernel(mu, times, block_size).field(x, times)

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        return NormalisedJacobian(self._kernel(mu, times, block_size), times).operator()


def square(A: ArrayLike) -> Array:
    """The bilinear form of a head, ``(d, d)``."""
    form = check.matrix(A, "A")
    if form.shape[0] != form.shape[1]:
        raise ValueError(
            f"A must be square, (d, d), received shape {form.shape}; multiply the factors, K.T @ Q, or use from_qkv."
        )
    return form


class NormalisedJacobian:
    """Products with ``D_X f`` of a normalised kernel at its own atoms, in head space.

    With ``dS = dQ K^T + Q dK^T + dbeta``: ``df = (P o (dS - rowsum(P o dS))) V_y + P dV``.

    P is kept when it fits half the memory budget and the kernel has no ``block_size``, and computed again for
    each product otherwise.
    """

    def __init__(self, kernel: NormalisedKernel, times: Array | None) -> None:
        self.kernel, self.times = kernel, times
        self.Q = kernel.queries(kernel.y)
        n = kernel.n
        self.blocks = list(blocks(n, n, kernel.block_size))
        self.stored: list[Array] | None = None
        if kernel.block_size is None and 8 * n * n <= memory.MEMORY_BUDGET // 2:
            self.stored = [kernel.weights_of(self.Q, times, rows) for rows in self.blocks]

    def rows(self) -> Iterator[tuple[slice, Array]]:
        """The row blocks with their slices."""
        for i, rows in enumerate(self.blocks):
            yield rows, self.stored[i] if self.stored else self.kernel.weights_of(self.Q, self.times, rows)

    def row_derivatives(self, direction: Array, extra: Array | None = None) -> Iterator[tuple[slice, Array, Array]]:
        """``(rows, P, dP)`` block by block; ``extra (n,)`` is a derivative of the columns' log offsets."""
        head, K = self.kernel.head, self.kernel.K
        dQ, dK = direction @ head.Wq.T, direction @ head.Wk.T
        column = -2.0 * np.sum(K * dK, axis=1) if head.quadratic else None
        if extra is not None:
            column = extra if column is None else column + extra
        for rows, P in self.rows():
            T = dQ[rows] @ K.T
            T += self.Q[rows] @ dK.T
            if column is not None:
                T += column
            yield rows, P, _apply_softmax_derivative(P, T)

    def jvp(self, direction: Array, extra: Array | None = None) -> Array:
        """The directional derivative of the map."""
        dV = direction @ self.kernel.head.V.T
        out = np.empty((self.kernel.n, self.kernel.head.e))
        for rows, P, dP in self.row_derivatives(direction, extra):
            out[rows] = dP @ self.kernel.Vy + P @ dV
        return out

    def vjp(self, cotangent: Array) -> tuple[Array, Array]:
        """The adjoint ``(n, d)``, and the adjoint ``(n,)`` of the columns' log offsets."""
        k, head = self.kernel, self.kernel.head
        dQ = np.empty_like(self.Q)
        dK, dV = np.zeros_like(k.K), np.zeros_like(k.Vy)
        column = np.zeros(k.n)
        for rows, P in self.rows():
            T = _apply_softmax_derivative(P, cotangent[rows] @ k.Vy.T)
            dQ[rows] = T @ k.K
            dK += T.T @ self.Q[rows]
            dV += P.T @ cotangent[rows]
            column += T.sum(axis=0)
        if head.quadratic:
            dK -= 2.0 * column[:, None] * k.K
        return dQ @ head.Wq + dK @ head.Wk + dV @ head.V, column

    def column_jvp(self, direction: Array, extra: Array | None = None) -> Array:
        """The derivative ``(n,)`` of the column masses ``sum_i w_i P_ij``."""
        weights = self.kernel.weights
        moved = np.zeros(self.kernel.n)
        for rows, _, dP in self.row_derivatives(direction, extra):
            moved += weights[rows] @ dP
        return moved

    def column_vjp(self, s: Array) -> tuple[Array, Array]:
        """The adjoint of :meth:`column_jvp` for bilinear logits: tokens ``(n, d)`` and columns' log offsets ``(n,)``."""
        k, head = self.kernel, self.kernel.head
        dQ, dK, column = np.empty_like(self.Q), np.zeros_like(k.K), np.zeros(k.n)
        for rows, P in self.rows():
            T = s[None, :] - (P @ s)[:, None]
            T *= P
            T *= k.weights[rows, None]
            dQ[rows] = T @ k.K
            dK += T.T @ self.Q[rows]
            column += T.sum(axis=0)
        return dQ @ head.Wq + dK @ head.Wk, column

    def dense(self) -> Array:
        """``(n, e, n, d)`` assembled from ``P_ij (V + (v_j - o_i) g_ij^T)`` and the diagonal field part."""
        k, head = self.kernel, self.kernel.head
        out = np.empty((k.n, head.e, k.n, head.d))
        keys = 2.0 * (k.K @ head.Wk) if head.quadratic else np.zeros((1, head.d))
        for rows, P in self.rows():
            O = P @ k.Vy
            for i, Pi in zip(range(rows.start, rows.stop), P, strict=True):
                G = self.Q[i] @ head.Wk - keys
                block = (k.Vy - O[i - rows.start])[:, :, None] * G[:, None, :] + head.V
                out[i] = np.swapaxes(block * Pi[:, None, None], 0, 1)
                out[i, :, i] += (k.covariance(Pi[None]) @ head.Wq)[0]
        return out

    def operator(self) -> JacobianOperator:
        """The linear operator of these products."""
        head = self.kernel.head
        return JacobianOperator(
            self.kernel.n, head.d, head.e, jvp=self.jvp, vjp=lambda g: self.vjp(g)[0], dense=self.dense
        )


def _apply_softmax_derivative(P: Array, T: Array) -> Array:
    """``(diag P_i - P_i P_i^T) T_i`` for each row i, written over T.

    Each row is first referred to its entry at the largest weight: rounding is then relative to what the other
    atoms contribute, which vanishes for one-hot rows however large the logits are.
    """
    T -= np.take_along_axis(T, P.argmax(axis=1)[:, None], axis=1)
    T -= np.einsum("ij,ij->i", P, T)[:, None]
    T *= P
    return T
