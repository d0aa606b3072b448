r"""The norm of the Jacobian of softmax heads at given tokens, from the Gram matrix on its output side.

``J_ij = P_ij (V + y_ij g_i^T) + [i = j] F_i``, so with ``s_il = sum_j P_ij P_lj`` and ``z_il = sum_j P_ij P_lj y_ij`` the
blocks of ``J J^T`` are

``s_il V V^T + (V g_l) z_li^T + z_il (V g_i)^T + <g_i, g_l> sum_j P_ij P_lj y_ij y_lj^T
+ P_li F_i (V + y_li g_l^T)^T + P_il (V + y_il g_i^T) F_l^T + [i = l] F_i F_i^T``,

size ``n e`` whatever the dimension d, and for several heads the sum over pairs of heads, output matrices
outside. ``lambda_max`` is proved by a Cholesky factor of ``lambda I - J J^T``.

Rounding. With ``b_i = |V|_F + max_j |y_ij| |g_i|`` and ``f_i = |F_i|_F`` the absolute values of the terms of a block
sum to at most ``s_il b_i b_l + P_li f_i b_l + P_il b_i f_l + [i = l] f_i^2`` in Frobenius norm, a relative error of which bounds
that of the block; the Frobenius norm of these n x n numbers is added to ``lambda_max``. The errors of P, y, g, V, F move J by
a matrix of blocks of norm at most
``dP_ij (v + Y_ij G_i) + (P_ij + dP_ij)(dV + dy_i G_i + Y_ij dg_i) + [i = j] dF_i``, whose spectral norm is added.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper, spectral_norm_upper
from otattn.lipschitz.arithmetic.largest_eigenvalue import largest_eigenvalue
from otattn.lipschitz.near.head import HeadAtTokens, rounding

__all__ = ["LARGEST_GRAM", "LARGEST_PRODUCTS", "fits", "jacobian_norm", "output_norms", "row_grams", "with_outputs"]

Array = NDArray[np.float64]
Row = Callable[[HeadAtTokens, HeadAtTokens, int], Array]
LARGEST_GRAM = 8192
"""Rows of the largest Gram matrix that is factorised: 512 MB, and as much again for its factor."""
LARGEST_PRODUCTS = 16384
"""Rows of the largest Gram matrix that is formed: 2 GB; between the two its norm has a stated probability."""


def fits(heads: list[HeadAtTokens], largest: int = LARGEST_GRAM) -> bool:
    """Whether the Gram matrices of the heads have at most so many rows."""
    W = heads[0].W
    return heads[0].n * (len(heads[0].V) if W is None else len(W)) <= largest


def jacobian_norm(heads: list[HeadAtTokens]) -> tuple[float, float]:
    """``||J||`` of the sum of the heads as the floats give it, and an upper bound of it."""
    n, heads = heads[0].n, [h.levered for h in heads]
    G = with_outputs(heads, _row)
    eps = rounding(heads)
    lost, moved = np.zeros((n, n)), np.zeros((n, n))
    norms = output_norms(heads)
    for h, w in zip(heads, norms, strict=True):
        size, field = _sizes(h)
        for other, u in zip(heads, norms, strict=True):
            size2, field2 = _sizes(other)
            term = (h.P @ other.P.T) * size[:, None] * size2 + other.P.T * field[:, None] * size2
            lost += w * u * (term + h.P * size[:, None] * field2 + np.diag(field * field2))
        moved += w * _moved(h)
    low, high = largest_eigenvalue(G)
    value = np.sqrt(high**2 + eps * float(norm_upper(lost))) + float(spectral_norm_upper(moved))
    return low, float(value) * (1.0 + eps)


def output_norms(heads: list[HeadAtTokens]) -> list[float]:
    """Frobenius norms of the output matrices, 1 where there is none."""
    return [1.0 if h.W is None else float(norm_upper(h.W)) for h in heads]


def with_outputs(heads: list[HeadAtTokens], row: Row) -> Array:
    """The lower triangle of ``sum_ab W_a B_ab W_b^T`` for blocks ``row(a, b, i) = (B_ab)_il``, l <= i: ``(i + 1, e_a, e_b)``."""
    n, size = heads[0].n, len(heads[0].V if heads[0].W is None else heads[0].W)
    G = np.zeros((n, size, n, size))
    for i in range(n):
        for a in heads:
            part: Array | None = None
            for b in heads:
                block = row(a, b, i) if b.W is None else row(a, b, i) @ b.W.T
                part = block if part is None else part + block
            assert part is not None
            G[i, :, : i + 1] += np.swapaxes(part if a.W is None else a.W @ part, 0, 1)
    return G.reshape(n * size, n * size)


def _row(a: HeadAtTokens, b: HeadAtTokens, i: int, first: int = 0) -> Array:
    """``(J_a J_b^T)_il`` for first <= l <= i."""
    past = slice(first, i + 1)
    P, g, y = b.P[past], b.g[past], b.y[past]
    pq = a.P[i] * P
    out = pq.sum(axis=1)[:, None, None] * (a.V @ b.V.T)
    z = np.einsum("lj,ljf->lf", pq, y)  # sum_j P_ij P_lj y_lj
    out += (g @ a.V.T)[:, :, None] * z[:, None, :]
    out += (pq @ a.y[i])[:, :, None] * (b.V @ a.g[i])
    out += (g @ a.g[i])[:, None, None] * np.matmul((a.P[i][:, None] * a.y[i]).T, P[:, :, None] * y)
    # the field of row i against the column i of the other rows, and the other way round
    out += P[:, i, None, None] * (a.field[i] @ b.V.T)
    out += (P[:, i, None] * (g @ a.field[i].T))[:, :, None] * y[:, i, None, :]
    out += a.P[i, past, None, None] * (a.V @ np.swapaxes(b.field[past], 1, 2))
    out += (a.P[i, past, None] * a.y[i, past])[:, :, None] * (b.field[past] @ a.g[i])[:, None, :]
    out[-1] += a.field[i] @ b.field[i].T
    return np.asarray(out)


def row_grams(heads: list[HeadAtTokens], scale: float = 1.0, residual: Array | None = None) -> Array:
    """``(n, D, D)``: matrices above ``J_i J_i^T``, ``J_i`` the rows of token i of ``scale`` times the sum of the heads.

    With ``residual`` a matrix ``(D, d)`` that token i itself passes through is added to ``J_i``. The errors of the floats move ``J_i``
    by a matrix of norm at most m, and ``(B + M)(B + M)^T <= (1 + t) B B^T + (1 + 1/t) m^2``, t = 1e-6.
    """
    heads = [h.levered for h in heads]
    n, eps, norms = heads[0].n, rounding(heads), output_norms(heads)
    outs = [h.W for h in heads]
    size = len(heads[0].V if outs[0] is None else outs[0])
    out = np.zeros((n, size, size))
    lost, moved = np.zeros(n), np.zeros(n)
    for h, w in zip(heads, norms, strict=True):
        b, f = _sizes(h)
        lost += w * (np.sqrt((h.weights**2).sum(axis=1)) * b + f)
        moved += w * np.sqrt((_moved(h) ** 2).sum(axis=1))
    for i in range(n):
        own = np.zeros((size, heads[0].g.shape[1]))
        for a, W in zip(heads, outs, strict=True):
            part = np.zeros((len(a.V), size))
            for b_, U in zip(heads, outs, strict=True):
                block = _row(a, b_, i, i)[0]
                part += block if U is None else block @ U.T
            out[i] += part if W is None else W @ part
            mine = a.P[i, i] * (a.V + np.outer(a.y[i, i], a.g[i])) + a.field[i]
            own += mine if W is None else W @ mine
        out[i] *= scale**2
        if residual is not None:
            cross = scale * own @ residual.T
            out[i] += cross + cross.T + residual @ residual.T
    size_I = 0.0 if residual is None else float(norm_upper(residual))
    more = eps * (abs(scale) * lost + size_I) ** 2 * 1.000002 + 1.000002e6 * (scale * moved) ** 2
    out = 0.5000005 * (out + np.swapaxes(out, 1, 2))
    out[:, np.arange(size), np.arange(size)] += more[:, None]
    return out


def _sizes(h: HeadAtTokens) -> tuple[Array, Array]:
    G, Y, _ = h.sizes
    return h.size_V + Y.max(axis=1) * G, np.linalg.norm(h.field, axis=(1, 2)) * (1.0 + rounding([h]))


def _moved(h: HeadAtTokens) -> Array:
    G, Y, _ = h.sizes
    change = h.dP * (h.v + Y * G[:, None])
    change += h.weights * (h.dV + (h.dy * G)[:, None] + Y * h.dg[:, None])
    change[np.diag_indices(h.n)] += h.dfield
    return change
