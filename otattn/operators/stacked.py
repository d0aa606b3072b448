"""The products of a fused Jacobian at few tokens: equal heads side by side, in arrays that lie one token a column.

For some hundred tokens the matrices of one head are so small that what surrounds a product takes as long as the product. Here
each step is one call for all heads, and nothing is cut into blocks: the weights ``P`` of all heads are kept. The formulas are those
of :mod:`otattn.operators.fused`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.attention import memory as attention_memory
from otattn.operators.layer import FEW_TOKENS, SoftmaxLayer
from otattn.operators.streaming import FLOOR
from otattn.operators.threads import single_blas_thread

__all__ = ["StackedHeads", "StackedProducts", "can_be_stacked"]

Array = NDArray[Any]


def can_be_stacked(layer: SoftmaxLayer, dtype: np.dtype[Any]) -> bool:
    """True for several heads of one size that share the output, at few tokens, in float32.

    In float64, and for one head, the products themselves take the time.
    """
    heads, n = layer.heads, layer.n
    alike = len({(head.k, head.e) for head in heads}) == 1
    fits = len(heads) * n * n * dtype.itemsize <= attention_memory.MEMORY_BUDGET
    return n <= FEW_TOKENS and alike and layer.coupled and fits and dtype == np.float32


class StackedHeads:
    """``b`` softmax kernels of one size and what their derivatives need; buffers are shared between calls.

    Parameters
    ----------
    Q, K, V : (b, k, n), (b, k, n), (b, e, n) arrays
        Queries (scaled), centred keys and values, a token a column.
    column : (n,) array or None
        Log weights of the atoms, up to a constant.
    visible : (n,) int array or None
        Row i sees the columns ``0:visible[i]``.
    """

    def __init__(self, Q: Array, K: Array, V: Array, column: Array | None, visible: Array | None) -> None:
        (b, k, n), e, dtype = Q.shape, V.shape[1], Q.dtype
        self.k, self.e, self.Q, self.K = k, e, Q, K
        self.left, self.right = np.empty((b, 2 * k, n), dtype), np.empty((b, 2 * k, n), dtype)
        self.left[:, k:], self.right[:, :k] = Q, K
        self.V = np.ones((b, e + 1, n), dtype)
        """The last row 1: it takes ``<g, O>``, and sums of rows, through a matrix product."""
        self.V[:, :e] = V
        self.P = _weights(Q, K, column, visible)
        self.O = np.matmul(V, np.swapaxes(self.P, 1, 2))
        self.T, self.values, self.g = np.empty_like(self.P), np.empty_like(self.V), np.empty_like(self.V)

    def forward(self, dQ: Array, dK: Array, dV: Array) -> Array:
        """``do``, ``(b, e, n)``."""
        k, e, T = self.k, self.e, self.T
        self.left[:, :k], self.right[:, k:] = dQ, dK
        np.matmul(np.swapaxes(self.left, 1, 2), self.right, out=T)
        T *= self.P
        np.matmul(self.V, np.swapaxes(T, 1, 2), out=self.values)
        out = np.matmul(dV, np.swapaxes(self.P, 1, 2))
        out += self.values[:, :e]
        out -= self.O * self.values[:, e:]
        return out

    def backward(self, g: Array, Q: Array, K: Array, V: Array) -> None:
        """The adjoint at ``g (b, e, n)``, into ``Q``, ``K`` and ``V``."""
        e, T = self.e, self.T
        self.g[:, :e] = g
        np.negative(np.einsum("bin,bin->bn", g, self.O), out=self.g[:, e])
        np.matmul(np.swapaxes(self.g, 1, 2), self.V, out=T)
        T *= self.P
        np.matmul(self.K, np.swapaxes(T, 1, 2), out=Q)
        np.matmul(self.Q, T, out=K)
        np.matmul(self.g[:, :e], self.P, out=V)


def _weights(Q: Array, K: Array, column: Array | None, visible: Array | None) -> Array:
    """``P``, ``(b, n, n)``; in float32 weights below ``e^-60`` of the largest one of their row are 0."""
    P = np.matmul(np.swapaxes(Q, 1, 2), K)
    n = P.shape[2]
    if column is not None:
        P += column
    if visible is not None:
        P[:, np.arange(n) >= visible[:, None]] = -np.inf
    P -= P.max(axis=2, keepdims=True)
    if P.dtype == np.float32 and P.min() < FLOOR:
        P[P < FLOOR] = -np.inf
    np.exp(P, out=P)
    P /= P.sum(axis=2, keepdims=True)
    return np.asarray(P)


class StackedProducts:
    """``J``, ``J^T`` and ``J^T J`` of a layer in L^2(mu), in units of the layer's scale.

    As :class:`~otattn.operators.products.HeadProducts`, for what :func:`can_be_stacked`. Not to be called from two threads
    at once.
    """

    stored = True

    def __init__(self, layer: SoftmaxLayer, dtype: np.dtype[Any]) -> None:
        self.layer, self.dtype = layer, dtype
        every, n = range(len(layer.heads)), layer.n
        k, e = layer.heads[0].k, layer.heads[0].e
        Q, K, V = (
            np.stack([part(h).T.astype(dtype) for h in every]) for part in (layer.queries, layer.keys, layer.values)
        )
        column = None if layer.column is None else layer.column.astype(dtype)
        self.heads = StackedHeads(Q, K, V, column, layer.visible)
        stacked = layer.stacked(dtype)
        # all queries, all keys, all values
        self.W = np.concatenate([stacked[layer.heads[h].parts[part]] for part in range(3) for h in every])
        self.turned = np.ascontiguousarray(self.W.T)
        self.root = None if layer.root is None else layer.root.astype(dtype).T
        assert layer.outputs is not None
        self.outputs = layer.outputs.astype(dtype)
        self._mixing: Array | None = None
        ends = len(every) * k, 2 * len(every) * k
        self.wide = np.empty((layer.width, n), dtype)
        q, key, v = np.split(self.wide, ends)
        self.parts = q.reshape(-1, k, n), key.reshape(-1, k, n), v.reshape(-1, e, n)

    def jvp(self, x: Array) -> Array:
        """``J x`` for ``(n, d)``."""
        y = self.outputs @ self._forward(x)
        return np.asarray((y if self.root is None else y * self.root).T)

    def vjp(self, g: Array) -> Array:
        """``J^T g`` for ``(n, e)``."""
        turned = g.T if self.root is None else g.T * self.root
        return self._backward(self.outputs.T @ turned)

    def gram(self, x: Array) -> Array:
        """``J^T J x`` for ``(n, d)``."""
        g = self._mixed(self._forward(x))
        return self._backward(g if self.root is None else g * self.root**2)

    def _mixed(self, o: Array) -> Array:
        """``W^T W o``; the square of W saves up to half of each product but costs ``E / n`` products to form."""
        W = self.outputs
        if self._mixing is None:
            if not (W.shape[1] < 2 * W.shape[0] and 8 * self.layer.n > W.shape[0]):
                return np.asarray(W.T @ (W @ o))
            self._mixing = W.T @ W
        return np.asarray(self._mixing @ o)

    def _forward(self, x: Array) -> Array:
        """The joined outputs of the heads, a token a column."""
        turned = x.T if self.root is None else x.T / self.root
        np.matmul(self.W, turned, out=self.wide)
        with single_blas_thread():
            return self.heads.forward(*self.parts).reshape(-1, self.layer.n)

    def _backward(self, g: Array) -> Array:
        with single_blas_thread():
            self.heads.backward(g.reshape(len(self.heads.P), -1, self.layer.n), *self.parts)
        y = self.turned @ self.wide
        return np.asarray((y if self.root is None else y / self.root).T)
