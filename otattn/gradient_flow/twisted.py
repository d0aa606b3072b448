"""The velocity of normalised attention times its normaliser: is it the gradient field of an energy?"""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from typing import NamedTuple

import numpy as np

from otattn._linalg import Array
from otattn.attention import AttentionMap, L2Attention, SoftmaxAttention
from otattn.attention.base import Measure
from otattn.attention.jacobian import JacobianOperator
from otattn.attention.memory import blocks
from otattn.gradient_flow.known import unwrapped
from otattn.measures import SpaceTimeMeasure

__all__ = ["LogKernel", "TwistedField", "log_kernel", "twisted_field"]


def twisted_field(attention: AttentionMap, mu: Measure) -> TwistedField | None:
    """The field ``Z_i Gamma_mu(x_i)`` of softmax or L2 attention, masked or not; None for other maps.

    ``mu`` must have positive weights. A single head in MultiHeadAttention counts as the head itself.
    """
    kernel = log_kernel(unwrapped(attention.unmasked), mu.points)
    if kernel is None:
        return None
    times = mu.times if attention.causal and isinstance(mu, SpaceTimeMeasure) else None
    return TwistedField(kernel, mu.points, mu.weights, times)


class LogKernel(NamedTuple):
    """``l(x, y) = <B x, y> + alpha(x) + beta(y)`` and the values at the points: a kernel that may be symmetric."""

    B: Array
    row: Array
    column: Array
    in_query: Array
    in_key: Array
    V: Array
    values: Array


@singledispatch
def log_kernel(attention: AttentionMap, x: Array) -> LogKernel | None:
    r"""The logits of the map before they are normalised: alpha and beta at x, their gradients; None for other maps.

    A new attention map registers its own: ``log_kernel.register(NewAttention)``.
    """
    return None


@log_kernel.register
def _softmax(attention: SoftmaxAttention, x: Array) -> LogKernel:
    """With a bias c the normaliser times ``exp <c, x>``, the only factor of x that can make the kernel symmetric."""
    c = np.zeros(attention.in_dim) if attention.bias is None else attention.bias
    slope = np.broadcast_to(c, x.shape)
    values = x @ attention.V.T
    if attention.value_bias is not None:
        values += attention.value_bias
    return LogKernel(attention.A, x @ c, x @ c, slope, slope, attention.V, values)


@log_kernel.register
def _l2(attention: L2Attention, x: Array) -> LogKernel:
    Q, K = x @ attention.Q.T, x @ attention.K.T
    slopes = -2.0 * Q @ attention.Q, -2.0 * K @ attention.K
    B, V = 2.0 * attention.K.T @ attention.Q, attention.V
    return LogKernel(B, -np.sum(Q**2, axis=1), -np.sum(K**2, axis=1), *slopes, V, x @ V.T)


class TwistedField:
    r"""``F_i(X) = Z_i f_i(X) = sum_j w_j exp(l_ij) v_j``, with everything kept in logarithms.

    The logit is ``l(x, y) = <B x, y> + alpha(x) + beta(y)``: softmax has ``B = A`` and, with a bias c,
    ``alpha = beta = <c, .>``; L2 has ``B = 2 K^T Q``, ``alpha = -|Q x|^2``, ``beta = -|K y|^2``. The Jacobian is

    .. math:: D_{x_j} F_i = w_j e^{l_{ij}} [V + v_j (B x_i + \nabla\beta(x_j))^\top]
              + \delta_{ij} \sum_k w_k e^{l_{ik}} v_k (B^\top x_k + \nabla\alpha(x_i))^\top .

    F is the particle gradient of an energy iff ``w_i D_{x_j} F_i`` is symmetric. Symmetry survives a congruence,
    so block (i, j) is divided by ``(w_i w_j Z_i Z_j)^{1/2}``: for a symmetric kernel all entries are then of the
    size of the parameters, whatever the logits, and no token is drowned by one with a larger normaliser.
    """

    def __init__(self, kernel: LogKernel, points: Array, weights: Array, times: Array | None) -> None:
        self.x, self.times = points, times
        self.n, self.d = points.shape
        self.B, self.row, self.column, self.in_query, self.in_key, self.V, self.values = kernel
        half = 0.5 * np.log(weights)
        self.query, self.key = points @ self.B.T, points @ self.B
        self.log_weights = 2.0 * half
        self.log_normaliser = np.empty(self.n)
        self.span = 0.0
        top = 0.0
        for rows, L in self._logits():
            seen = np.isfinite(L)
            self.span = max(self.span, float(np.abs(L[seen]).max()))
            S = L + self.log_weights
            peak = S.max(axis=1)
            self.log_normaliser[rows] = peak + np.log(np.exp(S - peak[:, None]).sum(axis=1))
        self.offset = half - 0.5 * self.log_normaliser
        for rows, L in self._logits():
            top = max(top, float((L + self.offset[rows, None] + self.offset).max()))
        self.top = top  # of the exponents; positive only when the kernel is far from symmetric

    def _logits(self) -> Iterator[tuple[slice, Array]]:
        for rows in blocks(self.n, self.n, None):
            L = self.query[rows] @ self.x.T
            L += self.row[rows, None]
            L += self.column
            if self.times is not None:
                L[self.times[None, :] > self.times[rows, None]] = -np.inf
            yield rows, L

    def _kernels(self) -> Iterator[tuple[slice, Array, Array]]:
        """``exp(-top)`` times ``(w_i w_j)^{1/2} exp(l_ij) / (Z_i Z_j)^{1/2}``, and times ``w_j exp(l_ij) / Z_i``."""
        for rows, L in self._logits():
            P = np.exp(L + (self.log_weights - self.log_normaliser[rows, None] - self.top))
            L += self.offset[rows, None]
            L += self.offset - self.top
            yield rows, np.exp(L, out=L), P

    def jacobian(self) -> JacobianOperator:
        """The scaled Jacobian, with products in blocks of rows."""

        def jvp(v: Array) -> Array:
            moved, by_key, by_query = v @ self.V.T, np.sum(self.in_key * v, axis=1), np.sum(self.in_query * v, axis=1)
            out = np.empty_like(v)
            for rows, E, P in self._kernels():
                out[rows] = E @ moved
                E *= self.query[rows] @ v.T + by_key
                P *= v[rows] @ self.key.T + by_query[rows, None]
                E += P
                out[rows] += E @ self.values
            return out

        def vjp(g: Array) -> Array:
            out = np.zeros_like(g)
            for rows, E, P in self._kernels():
                out += E.T @ (g[rows] @ self.V)
                C = g[rows] @ self.values.T
                E *= C
                out += E.T @ self.query[rows]
                out += E.sum(axis=0)[:, None] * self.in_key
                P *= C
                out[rows] += P @ self.key
                out[rows] += P.sum(axis=1)[:, None] * self.in_query[rows]
            return out

        def dense() -> Array:
            out = np.empty((self.n, self.d, self.n, self.d))
            flat = (self.values[:, :, None] * self.key[:, None, :]).reshape(self.n, -1)
            for rows, E, P in self._kernels():
                part = E[:, None, :, None] * self.V[None, :, None, :]
                weighted = (E[:, :, None] * self.values).swapaxes(1, 2)[..., None]
                part += weighted * (self.query[rows, None, None, :] + self.in_key[None, None])
                out[rows] = part
                at = np.arange(rows.start, rows.stop)
                out[at, :, at] += (P @ flat).reshape(-1, self.d, self.d)
                out[at, :, at] += (P @ self.values)[:, :, None] * self.in_query[rows, None, :]
            return out

        return JacobianOperator(self.n, self.d, self.d, jvp=jvp, vjp=vjp, dense=dense)
