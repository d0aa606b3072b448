r"""From above, cheaply: how much the field of softmax heads stretches at each token.

The field of a layer is :math:`D_i = \sum_h O_h V_h C_{ih} K_h^\top Q_h` with ``C_ih`` the covariance of the tokens under the
weights ``P_ih`` that token i gives them in head h. With ``O_h = U_h R_h`` and ``Q_h^T = Y_h S_h`` (orthonormal U and Y)

.. math:: D_i = \sum_h U_h B_{ih} Y_h^\top, \qquad B_{ih} = \mathrm{Cov}_{P_{ih}}(R_h V_h x, S_h K_h x),

with ``B_ih`` of the size of a head. Hence three ceilings of the spectral norm, none of which forms a field:

- :math:`\sum_h \|B_{ih}\|_F`, which costs ``2 n^2 k^2`` operations a head;
- :math:`\sum_h \|B_{ih}^\top B_{ih}\|_F^{1/2}`, which costs ``2 k^3`` more a head and token, where the first is not enough;
- :math:`\|D_i\|_F`, whose square is :math:`\sum_{h,g} \langle B_{ih}, (U_h^\top U_g) B_{ig} (Y_g^\top Y_h)\rangle`; it costs
  ``4 k^3`` a pair of heads and token, and is found where the two are not enough.

**Rounding.** Products run in float32. Let ``W`` and ``A`` bound the rows ``R_h V_h x_j`` and ``S_h K_h x_j``, of which
the weights make averages. Weights with a relative error ``rho`` move the mean of the products by at most ``rho W A``, each of the
two means by ``rho W`` or ``rho A``; a sum of n products in arithmetic of unit u adds ``(n + 8) u W A`` to the first and as much to
the product of the two others, twice. So ``B`` is off by at most ``4 (rho + (n + 8) u) W A``, and by ``2 (W dA + A dW)`` for
rows that are off by ``dW`` and ``dA``. ``rho`` is twice the error of a logit, a sum of products of queries and keys that float64
computes, and what normalising adds. The machine epsilon stands for u, which is half of it: that is the margin for all terms of
second order. Where ``rho`` is not small (logits that float64 does not resolve), there is no ceiling.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import row_norms
from otattn.operators.layer import SoftmaxLayer

__all__ = ["field_ceilings"]

Array = NDArray[np.float64]
Single = NDArray[np.float32]
EPS = float(np.finfo(np.float64).eps)
EPS32 = float(np.finfo(np.float32).eps)
BLOCK_BYTES = 32 * 2**20
"""Of the moments of a block of tokens, and of the products of rows that they are averages of."""
WEIGHT_BYTES = 128 * 2**20
"""Of the weights of a block of tokens: with fewer rows the products of rows, formed for each block, would take the time."""
FADED = -60.0
"""Weights below ``e^-60`` of the largest one of their row count as 0: denormal numbers would slow the products down."""
WORST_WEIGHTS = 1e-2
"""Relative errors of the weights from which on nothing is said."""


class _Side(NamedTuple):
    """Rows ``R_h V_h x_j`` or ``S_h K_h x_j`` of one head, ``(n, k)``, at most ``size`` long and off by at most ``error``."""

    rows: Single
    matrix: Array | None
    """``O_h`` or ``Q_h^T``, of which R is the triangular factor; None where R is the identity."""
    size: float
    error: float

    @property
    def frame(self) -> Array:
        """The orthonormal factor, which takes longer than R and is mostly not needed."""
        return np.eye(self.rows.shape[1]) if self.matrix is None else np.linalg.qr(self.matrix)[0]


class _Head(NamedTuple):
    queries: Array
    keys: Array
    values: _Side
    pulled: _Side
    slack: float
    """What rounding may have done to ``B_ih``, in the Frobenius norm, whatever i."""


def field_ceilings(layer: SoftmaxLayer, floor: float) -> Array:
    """Upper bounds ``(n,)`` of ``||D_x Gamma_mu(x_i)||`` at the layer's tokens, in their order there; inf where there is none.

    Parameters
    ----------
    layer : SoftmaxLayer
    floor : float
        A further ceiling is found where those before exceed it.
    """
    n, scale = layer.n, layer.scale
    stacked, reach = layer.stacked(np.dtype(np.float64)), layer.reach
    heads = [_head(layer, h, stacked, reach) for h in range(len(layer.heads))]
    slack = sum(head.slack for head in heads)
    out = np.full(n, np.inf)
    if not slack < np.inf:
        return out
    entries = sum(head.values.rows.shape[1] * head.pulled.rows.shape[1] for head in heads)
    step = max(1, min(BLOCK_BYTES // (4 * entries), WEIGHT_BYTES // (8 * n)))
    frames: tuple[list[list[Single]], list[list[Single]]] | None = None
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        B = [_moments(layer, head, rows) for head in heads]
        sizes = np.array([_sizes(b) for b in B])
        first = scale * (sizes.sum(axis=0) + slack)
        left = np.flatnonzero(first > floor)
        if left.size:
            finer = np.sum([_alone(b[left], size[left]) for b, size in zip(B, sizes, strict=True)], axis=0)
            first[left] = np.minimum(first[left], scale * (finer + slack))
            left = left[first[left] > floor]
        if left.size and len(heads) > 1:
            frames = _frames(heads) if frames is None else frames
            joint = _joint([b[left] for b in B], sizes[:, left], frames)
            first[left] = np.minimum(first[left], scale * (joint + slack))
        out[rows] = first * (1.0 + 1e3 * EPS)
    return out


def _head(layer: SoftmaxLayer, h: int, stacked: Array, reach: float) -> _Head:
    """One head, in the units of the layer; ``reach`` bounds the norms of the tokens."""
    q, k, v = (stacked[part] for part in layer.heads[h].parts)
    queries, keys, values = layer.queries(h), layer.keys(h), layer.values(h)
    W = None if layer.outputs is None else layer.outputs[:, layer.heads[h].values]
    long_q, long_k = _longest(queries), _longest(keys)
    unit = (layer.d + 4) * EPS  # of a product with tokens, or with centred ones
    lost_q, lost_k, lost_v = (unit * (3.0 * float(np.linalg.norm(M)) * reach + long_q) for M in (q, k, v))
    logit = lost_q * long_k + long_q * lost_k + (k.shape[0] + 4) * EPS * long_q * long_k
    rho = 2.0 * logit + (layer.n + 8) * EPS + 2.0 * EPS32
    left, right = _side(values, W, lost_v), _side(keys, q.T, lost_k)
    slack = 4.0 * (rho + (layer.n + 8) * EPS32) * left.size * right.size
    slack += 2.0 * (left.size * right.error + left.error * right.size)
    return _Head(queries, keys, left, right, slack if rho <= WORST_WEIGHTS else np.inf)


def _side(rows: Array, matrix: Array | None, lost: float) -> _Side:
    """``R x_j`` with ``matrix = frame R``, for rows ``x_j`` that are off by at most ``lost``."""
    if matrix is None:
        return _Side(rows.astype(np.float32), None, _longest(rows), lost)
    R = np.asarray(np.linalg.qr(matrix, mode="r"))
    moved, size = rows @ R.T, float(np.linalg.norm(matrix))
    # the backward error of the factorisation and of the product
    error = size * (lost + 4.0 * (matrix.size + 8) * EPS * _longest(rows))
    return _Side(moved.astype(np.float32), matrix, _longest(moved) + error, error)


def _longest(rows: Array) -> float:
    return float(row_norms(rows).max(initial=0.0)) * (1.0 + 1e-6)


def _moments(layer: SoftmaxLayer, head: _Head, rows: slice) -> Single:
    """``B_ih`` for a block of tokens, ``(m, k, k')``."""
    P = head.queries[rows] @ head.keys.T
    if layer.column is not None:
        P += layer.column
    if layer.visible is not None:
        P[np.arange(layer.n) >= layer.visible[rows, None]] = -np.inf
    P -= P.max(axis=1, keepdims=True)
    P[FADED > P] = -np.inf
    np.exp(P, out=P)
    P /= P.sum(axis=1, keepdims=True)
    p = P.astype(np.float32)
    w, a = head.values.rows, head.pulled.rows
    (n, k), width = w.shape, a.shape[1]
    B = np.empty((len(p), k, width), np.float32)
    columns = max(1, BLOCK_BYTES // (4 * n * width))
    for c in range(0, k, columns):
        products = w[:, c : c + columns, None] * a[:, None, :]
        B[:, c : c + columns] = (p @ products.reshape(n, -1)).reshape(len(p), -1, width)
    B -= (p @ w)[:, :, None] * (p @ a)[:, None, :]
    return B


def _sizes(B: Single) -> Array:
    """Frobenius norms from above; what vanished below float32 (of squares, and of the entries themselves) is added."""
    squares = np.einsum("iab,iab->ia", B, B).sum(axis=1, dtype=np.float64)
    lost = 4.0 * B[0].size * float(np.finfo(np.float32).tiny)
    return np.asarray(np.sqrt(squares * (1.0 + (B.shape[2] + 4) * EPS32) ** 2 + lost))


def _alone(B: Single, sizes: Array) -> Array:
    """``||B_i^T B_i||_F^{1/2}`` from above, as ``||B||^4 <= sum_j s_j(B)^4``; the product is off by ``(k + 4) u |B|^2``."""
    G = np.swapaxes(B, 1, 2) @ B
    unit = (B.shape[1] + 4) * EPS32
    return np.asarray(np.sqrt(_sizes(G) + unit * sizes**2))


def _frames(heads: list[_Head]) -> tuple[list[list[Single]], list[list[Single]]]:
    """``U_g^T U_h`` and ``Y_g^T Y_h`` by g and h."""
    out = []
    for frames in ([head.values.frame for head in heads], [head.pulled.frame for head in heads]):
        joined, ends = np.concatenate(frames, axis=1), np.cumsum([F.shape[1] for F in frames])[:-1]
        gram = (joined.T @ joined).astype(np.float32)
        out.append([np.split(rows, ends, axis=1) for rows in np.split(gram, ends)])
    return out[0], out[1]


def _joint(B: list[Single], sizes: Array, frames: tuple[list[list[Single]], list[list[Single]]]) -> Array:
    """``||sum_h U_h B_ih Y_h^T||_F`` from above, for each token.

    The term of g and h is ``<U_g^T U_h B_ih, B_ig Y_g^T Y_h>``, off by at most ``unit |U_g^T U_h| |B_ih| |B_ig| |Y_g^T Y_h|``
    (Frobenius norms).
    """
    turned = [np.ascontiguousarray(b.transpose(1, 0, 2)) for b in B]  # (k, m, k'): both products are one matrix product
    total, off = (sizes**2).sum(axis=0), np.zeros(sizes.shape[1])
    for h in range(len(B)):
        for g in range(h):
            left, right = frames[0][g][h], frames[1][g][h]
            x = (left @ turned[h].reshape(len(turned[h]), -1)).reshape(len(left), -1, turned[h].shape[2])
            y = turned[g] @ right
            total += 2.0 * np.einsum("aib,aib->ai", x, y).sum(axis=0, dtype=np.float64)
            unit = (sum(left.shape) + 2 * sum(right.shape) + 16) * EPS32
            size = (float(np.linalg.norm(left)) + 1e-9) * (float(np.linalg.norm(right)) + 1e-9)
            off += 2.0 * unit * size * sizes[h] * sizes[g]
    return np.asarray(np.sqrt(np.maximum(total, 0.0) + off))
