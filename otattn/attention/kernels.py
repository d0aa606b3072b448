"""The two kinds of interaction behind the attention maps, evaluated in row blocks.

Both have logits ``l(x, y) = <q(x), k(y)> + beta(y)`` with ``q(x) = W_q x + b_q`` and ``k(y) = W_k y + b_k`` in head
space (k columns), so no d x d product is formed. The normalised kind (softmax, L2, Sinkhorn) weighs atoms by
``P_ij proportional to w_j exp l_ij``; the pointwise kind weighs them by ``w_j h(l_ij)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otattn.attention import base
from otattn.attention.jacobian import JacobianOperator

__all__ = ["Head", "NormalisedKernel", "PointwiseKernel"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Head:
    """The affine maps of one head: ``q = W_q x + b_q``, ``k = W_k y``, values ``V y + b_v``.

    ``quadratic`` adds ``-|k(y)|^2`` to the logit (then ``q = 2 (Q x - shift)``, ``k = K y - shift``: L2 attention).
    """

    Wq: Array
    Wk: Array
    V: Array
    bq: Array | None = None
    bv: Array | None = None
    quadratic: bool = False

    @property
    def d(self) -> int:
        return int(self.V.shape[1])

    @property
    def e(self) -> int:
        return int(self.V.shape[0])


def _blocks(m: int, n: int, block_size: int | None, width: int = 4) -> Iterator[slice]:
    """Slices of the m rows such that ``width`` arrays of ``rows x n`` fit the memory budget."""
    rows = block_size or max(1, min(m, base.MEMORY_BUDGET // (8 * width * max(n, 1))))
    for start in range(0, m, rows):
        yield slice(start, min(m, start + rows))


class _Kernel:
    """Queries, keys and values of one head at a measure, shared by both kinds."""

    def __init__(self, head: Head, y: Array, weights: Array, times: Array | None, block_size: int | None) -> None:
        self.head, self.y, self.weights, self.times, self.block_size = head, y, weights, times, block_size
        self.n = len(y)

    def _hidden(self, times: Array | None, rows: slice) -> NDArray[np.bool_] | None:
        """Which (row, atom) pairs the mask hides: atoms later than the row."""
        if times is None:
            return None
        assert self.times is not None
        return np.asarray(self.times[None, :] > times[rows, None])

    def _field_rows(self, m: int) -> Iterator[slice]:
        width = self.head.e + self.head.Wk.shape[0] + 2
        return _blocks(m, self.n, self.block_size, width)


class NormalisedKernel(_Kernel):
    """``P_ij = w_j exp(l_ij + offset_j) / sum`` over the atoms that row i sees.

    Keys, values and (for L2) queries are shifted by their means: the softmax does not see it, and it removes the
    cancellation of clouds far from the origin. Atoms of zero weight have ``P_ij = 0`` whatever their logits.
    """

    def __init__(
        self,
        head: Head,
        y: Array,
        weights: Array,
        *,
        times: Array | None = None,
        offset: Array | None = None,
        block_size: int | None = None,
    ) -> None:
        super().__init__(head, y, weights, times, block_size)
        live = weights > 0
        # differences first, products after: no digits are lost for clouds far from the origin
        centre = weights[live] @ y[live]
        self.K = (y - centre) @ head.Wk.T
        self.Vy = (y - centre) @ head.V.T
        self.key_shift, self.value_shift = head.Wk @ centre, head.V @ centre
        with np.errstate(divide="ignore"):
            self.column = np.log(weights)
        if head.quadratic:
            self.column = self.column - np.sum(self.K**2, axis=1)
        if offset is not None:
            self.column = self.column + offset
        self.column[~live] = -np.inf

    def queries(self, x: Array) -> Array:
        """``q(x)``, in the shifted frame of the keys for L2."""
        q = x @ self.head.Wq.T
        if self.head.quadratic:
            return q - 2.0 * self.key_shift
        return q if self.head.bq is None else q + self.head.bq

    def attention_rows(self, Q: Array, times: Array | None, rows: slice) -> Array:
        """The block ``P[rows]`` for queries Q."""
        S = Q[rows] @ self.K.T
        S += self.column
        hidden = self._hidden(times, rows)
        if hidden is not None:
            S[hidden] = -np.inf
        top = S.max(axis=1, keepdims=True)
        if np.isneginf(top).any():
            raise ValueError(
                "every row must see an atom of positive weight; a masked row sees none that is not later than it."
            )
        S -= top
        np.exp(S, out=S)
        S /= S.sum(axis=1, keepdims=True)
        return S

    def log_normaliser(self, x: Array) -> Array:
        """``log sum_j w_j exp(l(x_i, y_j) + offset_j)`` for softmax logits in the original (unshifted) frame."""
        Q = self.queries(x)
        out = np.empty(len(x))
        for rows in _blocks(len(x), self.n, self.block_size):
            S = Q[rows] @ self.K.T
            S += self.column
            top = S.max(axis=1)
            out[rows] = top + np.log(np.exp(S - top[:, None]).sum(axis=1))
        return out + Q @ self.key_shift

    def apply(self, x: Array, times: Array | None) -> Array:
        Q = self.queries(x)
        out = np.empty((len(x), self.head.e))
        for rows in _blocks(len(x), self.n, self.block_size):
            out[rows] = self.attention_rows(Q, times, rows) @ self.Vy
        out += self.value_shift
        return out if self.head.bv is None else out + self.head.bv

    def field(self, x: Array, times: Array | None) -> Array:
        """``D_x Gamma``: ``sum_j P_ij (v_j - o_i) (k_j - kbar_i)^T W_q``, centred row by row."""
        Q = self.queries(x)
        out = np.empty((len(x), self.head.e, self.head.d))
        for rows in self._field_rows(len(x)):
            P = self.attention_rows(Q, times, rows)
            out[rows] = self._covariance(P) @ self.head.Wq
        return out

    def _covariance(self, P: Array) -> Array:
        """``sum_j P_ij (v_j - o_i)(k_j - kbar_i)^T`` for each row, ``(m, e, k)``."""
        dv = self.Vy[None] - (P @ self.Vy)[:, None]
        dv *= P[:, :, None]
        dk = self.K[None] - (P @ self.K)[:, None]
        return np.asarray(np.swapaxes(dv, 1, 2) @ dk)

    def jacobian(self, times: Array | None) -> JacobianOperator:
        return _NormalisedJacobian(self, times).operator()


class _NormalisedJacobian:
    """Products with ``D_X f`` of a normalised kernel at its own atoms (head-space form, row blocks).

    With ``dS = dQ K^T + Q dK^T + dbeta``: ``df = (P o (dS - rowsum(P o dS))) V_y + P dV``.
    """

    def __init__(self, kernel: NormalisedKernel, times: Array | None) -> None:
        self.kernel, self.times = kernel, times
        self.Q = kernel.queries(kernel.y)
        n = kernel.n
        self.blocks = list(_blocks(n, n, kernel.block_size))
        self.stored: list[Array] | None = None
        if 8 * n * n <= base.MEMORY_BUDGET // 2:
            self.stored = [kernel.attention_rows(self.Q, times, rows) for rows in self.blocks]
        self.O = np.concatenate([P @ kernel.Vy for _, P in self.rows()])

    def rows(self) -> Iterator[tuple[slice, Array]]:
        for i, rows in enumerate(self.blocks):
            yield rows, self.stored[i] if self.stored else self.kernel.attention_rows(self.Q, self.times, rows)

    def key_direction(self, direction: Array) -> tuple[Array, Array, Array, Array | None]:
        head, K = self.kernel.head, self.kernel.K
        dK = direction @ head.Wk.T
        dbeta = -2.0 * np.sum(K * dK, axis=1) if head.quadratic else None
        return direction @ head.Wq.T, dK, direction @ head.V.T, dbeta

    def logit_block(self, rows: slice, dQ: Array, dK: Array, dcolumn: Array | None) -> Array:
        dS = dQ[rows] @ self.kernel.K.T
        dS += self.Q[rows] @ dK.T
        if dcolumn is not None:
            dS += dcolumn
        return dS

    def jvp(self, direction: Array, extra: Array | None = None) -> Array:
        """The directional derivative; ``extra (n,)`` is a further derivative of the columns' log offsets."""
        dQ, dK, dV, dcolumn = self.key_direction(direction)
        if extra is not None:
            dcolumn = extra if dcolumn is None else dcolumn + extra
        out = np.empty((self.kernel.n, self.kernel.head.e))
        for rows, P in self.rows():
            T = self.logit_block(rows, dQ, dK, dcolumn)
            T *= P
            r = T.sum(axis=1, keepdims=True)
            out[rows] = T @ self.kernel.Vy + P @ dV - r * self.O[rows]
        return out

    def vjp(self, cotangent: Array, extra: bool = False) -> tuple[Array, Array | None]:
        """The adjoint; with ``extra`` also the adjoint of the columns' log offsets."""
        k, head = self.kernel, self.kernel.head
        dot = np.sum(cotangent * self.O, axis=1, keepdims=True)
        dQ = np.empty_like(self.Q)
        dK, dV = np.zeros_like(k.K), np.zeros_like(k.Vy)
        column = np.zeros(k.n)
        for rows, P in self.rows():
            T = cotangent[rows] @ k.Vy.T
            T -= dot[rows]
            T *= P
            dQ[rows] = T @ k.K
            dK += T.T @ self.Q[rows]
            dV += P.T @ cotangent[rows]
            if head.quadratic or extra:
                column += T.sum(axis=0)
        if head.quadratic:
            dK -= 2.0 * column[:, None] * k.K
        return dQ @ head.Wq + dK @ head.Wk + dV @ head.V, column if extra else None

    def dense(self) -> Array:
        """``(n, e, n, d)`` assembled from ``P_ij (V + (v_j - o_i) g_ij^T)`` and the diagonal field part."""
        k, head = self.kernel, self.kernel.head
        out = np.empty((k.n, head.e, k.n, head.d))
        for rows, P in self.rows():
            for i, Pi in zip(range(rows.start, rows.stop), P, strict=True):
                g = self.Q[i] @ head.Wk
                G = g[None] if not head.quadratic else g[None] - 2.0 * (k.K @ head.Wk)
                block = (k.Vy - self.O[i])[:, :, None] * G[:, None, :] + head.V
                out[i] = np.swapaxes(block * Pi[:, None, None], 0, 1)
                out[i, :, i] += (k._covariance(Pi[None]) @ head.Wq)[0]
        return out

    def operator(self) -> JacobianOperator:
        head = self.kernel.head
        return JacobianOperator(
            self.kernel.n, head.d, head.e, jvp=self.jvp, vjp=lambda g: self.vjp(g)[0], dense=self.dense
        )


@dataclass(frozen=True)
class Pointwise:
    """A scalar function h of the logit with its derivative, both vectorised."""

    value: Callable[[Array], Array]
    derivative: Callable[[Array], Array]


class PointwiseKernel(_Kernel):
    """Weights ``w_j h(l_ij)`` without normalisation."""

    def __init__(
        self,
        head: Head,
        h: Pointwise,
        y: Array,
        weights: Array,
        *,
        times: Array | None = None,
        block_size: int | None = None,
    ) -> None:
        super().__init__(head, y, weights, times, block_size)
        # atoms of zero weight never enter, not even through an overflow of h
        self.K = np.where(weights[:, None] > 0, y @ head.Wk.T, 0.0)
        self.Vy = np.where(weights[:, None] > 0, y @ head.V.T, 0.0)
        self.h = h

    def _weighted(self, f: Callable[[Array], Array], Q: Array, times: Array | None, rows: slice) -> Array:
        S = Q[rows] @ self.K.T
        hidden = self._hidden(times, rows)
        if hidden is not None:
            S[hidden] = 0.0  # what is not seen must not overflow either
        H = f(S)
        H *= self.weights
        if hidden is not None:
            H[hidden] = 0.0
        return H

    def apply(self, x: Array, times: Array | None) -> Array:
        Q = x @ self.head.Wq.T
        out = np.empty((len(x), self.head.e))
        for rows in _blocks(len(x), self.n, self.block_size):
            out[rows] = self._weighted(self.h.value, Q, times, rows) @ self.Vy
        return out

    def field(self, x: Array, times: Array | None) -> Array:
        Q = x @ self.head.Wq.T
        out = np.empty((len(x), self.head.e, self.head.d))
        for rows in self._field_rows(len(x)):
            H = self._weighted(self.h.derivative, Q, times, rows)
            values = np.swapaxes(H[:, :, None] * self.Vy, 1, 2)
            out[rows] = (values @ self.K) @ self.head.Wq
        return out

    def jacobian(self, times: Array | None) -> JacobianOperator:
        head, n = self.head, self.n
        Q = self.y @ head.Wq.T
        blocks = list(_blocks(n, n, self.block_size))

        def jvp(direction: Array) -> Array:
            dQ, dK, dV = direction @ head.Wq.T, direction @ head.Wk.T, direction @ head.V.T
            out = np.empty((n, head.e))
            for rows in blocks:
                T = dQ[rows] @ self.K.T
                T += Q[rows] @ dK.T
                T *= self._weighted(self.h.derivative, Q, times, rows)
                out[rows] = T @ self.Vy + self._weighted(self.h.value, Q, times, rows) @ dV
            return out

        def vjp(cotangent: Array) -> Array:
            dQ, dK, dV = np.empty_like(Q), np.zeros_like(self.K), np.zeros_like(self.Vy)
            for rows in blocks:
                T = cotangent[rows] @ self.Vy.T
                T *= self._weighted(self.h.derivative, Q, times, rows)
                dQ[rows] = T @ self.K
                dK += T.T @ Q[rows]
                dV += self._weighted(self.h.value, Q, times, rows).T @ cotangent[rows]
            return dQ @ head.Wq + dK @ head.Wk + dV @ head.V

        def dense() -> Array:
            out = np.empty((n, head.e, n, head.d))
            G = Q @ head.Wk
            for rows in blocks:
                H = self._weighted(self.h.value, Q, times, rows)
                D = self._weighted(self.h.derivative, Q, times, rows)
                part = H[:, None, :, None] * head.V[None, :, None, :]
                part += (D[:, :, None] * self.Vy).swapaxes(1, 2)[..., None] * G[rows, None, None, :]
                out[rows] = part
            field = self.field(self.y, times)
            out[np.arange(n), :, np.arange(n)] += field
            return out

        return JacobianOperator(n, head.d, head.e, jvp=jvp, vjp=vjp, dense=dense)


