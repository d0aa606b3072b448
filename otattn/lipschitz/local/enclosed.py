r"""The derivative of softmax heads in interval arithmetic, and proved upper bounds of its norms.

With ``z_j = x_j - c`` for a float centre c, queries ``q_i = W_q x_i + b``, keys ``k_j = W_k z_j``, total values ``u_j = U z_j``,
``P_ij`` proportional to ``w_j exp <q_i, k_j>`` over the atoms that row i sees and ``bar`` the mean under ``P_i``, the block of
atoms i and j is

.. math:: P_{ij} \bigl(U + (u_j - \bar u_i)(W_k^T q_i)^T\bigr) + \delta_{ij} D_i, \qquad
          D_i = \sum_j P_{ij} (u_j - \bar u_i)(k_j - \bar k_i)^T W_q ,

summed over the heads and multiplied by ``sqrt(w_i / w_j)``. Every operation is one of intervals: the exact matrix lies within a
radius R, entry by entry, of a matrix M of floats, so its norm is at most that of M
(:func:`~otattn.operators.proved_norm.proved_norm`) and ``(||R||_1 ||R||_inf)^{1/2}`` together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import cloud_centre
from otattn.attention import AttentionMap, SoftmaxAttention
from otattn.attention.base import Measure
from otattn.attention.head import FLOATS, Arithmetic, Head, heads_of
from otattn.lipschitz.arithmetic.intervals import Interval, lift, lower, upper
from otattn.operators.proved_norm import proved_norm, radius_norm

__all__ = ["enclosed_norms", "made_of_softmax"]

Array = NDArray[np.float64]
INTERVALS = Arithmetic(lift, FLOATS.orthonormal)
BLOCK_BYTES = 4 * 2**20
_EPS = float(np.finfo(np.float64).eps)


def enclosed_norms(attention: AttentionMap, mu: Measure) -> tuple[float, float]:
    """Proved upper bounds of the particle part and of the splitting part at ``mu``.

    Parameters
    ----------
    attention : softmax attention, several such heads (nested or not), masked or not
    mu : measure of n atoms; those of zero weight do not enter

    Returns
    -------
    tuple of float
        Of ``||W^{1/2} J W^{-1/2}||`` and ``max_i ||D_i||``; inf where the intervals say nothing.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # an entry without limits has an infinite radius
        return _norms(attention, mu)


def _norms(attention: AttentionMap, mu: Measure) -> tuple[float, float]:
    live = mu.weights > 0
    x, w = mu.points[live], mu.weights[live]
    seen = None
    if attention.causal:
        times = mu.times[live]  # type: ignore[union-attr]
        seen = times[None, :] <= times[:, None]
    parts = heads_of(attention, arithmetic=INTERVALS)
    # a head without values is left out
    heads = [_Head(part, x, w, seen) for part in parts if upper(abs(part.V)).any() and upper(abs(part.outer)).any()]
    if not heads:
        return 0.0, 0.0
    n, d, e = len(x), x.shape[1], heads[0].U.shape[0]
    root = None if (w == w[0]).all() else np.sqrt(lift(w)[:, None] / lift(w)[None, :])
    M, R, fields = np.empty((n, e, n, d)), np.empty((n, e, n, d)), []
    for start in range(0, n, step := max(1, BLOCK_BYTES // (8 * n * e * d))):
        rows = slice(start, min(n, start + step))
        shares = [head.rows(rows) for head in heads]
        block, field = (sum(share[1:], share[0]) for share in zip(*shares, strict=True))
        at = np.arange(rows.stop - start)
        block[at, at + start] = block[at, at + start] + field
        if root is not None:
            block = block * root[rows][:, :, None, None]
        M[rows], R[rows] = (part.transpose(0, 2, 1, 3) for part in _centred(block))
        fields.append(field)
    particle = _norm(M.reshape(n * e, n * d), R.reshape(n * e, n * d))
    return particle, _largest_field(cast(Interval, np.concatenate(fields)), particle)


def made_of_softmax(attention: AttentionMap) -> bool:
    """True for softmax attention, sums of it (nested or not), masked or not."""
    heads = heads_of(attention)
    return bool(heads) and all(isinstance(head.map, SoftmaxAttention) for head in heads)


@dataclass(frozen=True, eq=False, init=False)
class _Head:
    """One head at the atoms: total values, attention matrix, and what the blocks are made of."""

    U: Interval
    u: Interval
    k: Interval
    P: Interval
    slopes: Interval
    """``W_k^T q_i``, (n, d)."""
    Wq: Array

    def __init__(self, part: Head, x: Array, w: Array, seen: Any) -> None:
        head, U = part.map.projections(), part.total
        z = lift(x) - cloud_centre(x, w / w.sum())
        q = lift(x) @ head.Wq.T
        if head.bq is not None:
            q = q + head.bq
        k = z @ head.Wk.T
        logits = q @ k.T
        if not (w == w[0]).all():
            logits = logits + np.log(lift(w))
        top = np.where(True if seen is None else seen, upper(logits), -np.inf).max(axis=1, keepdims=True)
        E = np.exp(np.minimum(logits - top, 0.0))
        E = E if seen is None else np.where(seen, E, 0.0)
        for name, value in {
            "U": U,
            "u": z @ U.T,
            "k": k,
            "P": np.minimum(E / E.sum(axis=1, keepdims=True), 1.0),
            "slopes": q @ head.Wk,
            "Wq": head.Wq,
        }.items():
            object.__setattr__(self, name, value)

    def rows(self, rows: slice) -> tuple[Interval, Interval]:
        """``P_ij (U + ...)`` of these atoms i and all j, ``(rows, n, e, d)``, and their ``D_i``, ``(rows, e, d)``."""
        P = self.P[rows]
        u = self.u[None] - (P @ self.u)[:, None]
        k = self.k[None] - (P @ self.k)[:, None]
        weighed = P[:, :, None] * u
        field = (np.swapaxes(weighed, 1, 2) @ k) @ self.Wq
        block = P[:, :, None, None] * self.U + weighed[..., None] * self.slopes[rows][:, None, None, :]
        return block, field


def _centred(block: Interval) -> tuple[Array, Array]:
    """Middles and radii."""
    lo, hi = lower(block), upper(block)
    middle = 0.5 * lo + 0.5 * hi
    radius = np.maximum(hi - middle, middle - lo) * (1.0 + 4.0 * _EPS) + 5e-324
    return middle, np.where(np.isnan(radius), np.inf, radius)


def _norm(M: Array, R: Array) -> float:
    if not (np.isfinite(M).all() and np.isfinite(R).all()):
        return float("inf")
    return (proved_norm(M) + radius_norm(R)) * (1.0 + 2.0 * _EPS)


def _largest_field(fields: Interval, known: float) -> float:
    """The largest norm of a field, or ``known`` where all of them are at most that."""
    M, R = _centred(fields)
    sizes = np.abs(M) + R
    scale = float(sizes.max())
    if not np.isfinite(scale):
        return float("inf")
    frobenius = scale * np.sqrt(((sizes / scale) ** 2).sum(axis=(1, 2))) * (1.0 + 4.0 * (sizes[0].size + 8) * _EPS)
    for i in np.argsort(-frobenius, kind="stable"):
        if frobenius[i] <= known:
            break
        known = max(known, _norm(M[i], R[i]))
    return known
