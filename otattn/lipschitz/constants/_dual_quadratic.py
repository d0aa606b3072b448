"""Maxima of quadratics over a box by their Lagrange duals, and the span that they live on."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import LinAlgError, cholesky, eigh
from scipy.sparse.linalg import eigsh

from otattn._linalg import EPS, Array, bordered, mid, symmetrize
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.balls import BallMatrix, proves_psd
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.constants._solve import Proposal, cvxpy_solve

_REDUCE_FROM = 48  # below this dimension the reduction costs more than it saves


def box_maximum(H: Any, b: Any, diagonal: Array) -> Any:
    r"""Upper bound of ``max z^T H z + b^T z`` over ``|z_k| <= 1``.

    For ``Q = Diag(t) - H > 0``, ``t >= 0``, the maximum is at most ``sum t + b^T Q^{-1} b / 4``. The multipliers are shifted by
    the best common constant, which also repairs infeasible ones. Eigenvalues are taken lower by their backward error; for balls,
    ``[[Q, b/2], [b^T/2, o]]`` is proved PSD, which gives ``sum t + o``.
    """
    k = len(b)
    if k == 0:
        return 0.0
    near, near_b = symmetrize(mid(H)), mid(b)
    t, rest, margin = _shift(near, near_b, diagonal)
    if not isinstance(H, BallMatrix):
        size = float(np.abs(diagonal).sum()) + k * (abs(t) + margin) + float(np.linalg.norm(b)) * np.sqrt(k)
        return float(diagonal.sum()) + k * t + rest + 16.0 * k * EPS * size
    size = float(np.abs(near).sum()) + abs(t) + rest + float(np.abs(diagonal).sum()) + float(np.abs(near_b).sum())
    form = bordered(-0.5 * (H + H.T), 0.5 * b)
    for step in (1e-14, 1e-12, 1e-10, 1e-8):
        spread, offset = diagonal + (t + step * size), rest + step * size
        if (spread < 0).any():
            break
        if proves_psd(form + np.diag(np.append(spread, offset))):
            return lift(spread).sum() + offset
    raise CertificateError("the multipliers of a quadratic could not be confirmed in balls.")


def _shift(H: Array, b: Array, diagonal: Array) -> tuple[float, float, float]:
    """The best common shift t of the multipliers, ``b^T Q^{-1} b / 4`` there, and the margin of the eigenvalues."""
    cost = float(len(b))
    w, U = np.linalg.eigh(np.diag(diagonal) - H)
    weight = (U.T @ b) ** 2 / 4.0
    margin = 8.0 * cost * EPS * float(np.abs(w).max(initial=0.0))
    w = w - margin
    low = max(-float(diagonal.min(initial=0.0)), -float(w[0]))
    live = weight > 0.0

    def slope(t: float) -> float:
        with np.errstate(divide="ignore"):
            return cost - float(np.sum(weight[live] / (w[live] + t) ** 2))

    t = low
    if live.any() and slope(low) < 0.0:
        # far enough for the sum to be resolved: a tiny b would leave t at the pole
        reach = max(float(np.sqrt(weight.sum() / cost)), 4.0 * EPS * float(np.abs(w).max()))
        high = low + reach * (1.0 + 1e-9)
        for _ in range(100):
            t = 0.5 * (low + high)
            if slope(t) < 0.0:
                low = t
            else:
                high = t
        t = high
    with np.errstate(divide="ignore"):
        return t, float(np.sum(weight[live] / (w[live] + t))), margin


def row_span(*blocks: Array) -> tuple[Array | None, float]:
    """Orthonormal basis ``(k, r)`` of the rows of the blocks, and a bound of the norm of what it misses.

    None in small dimension, or when the rows span nearly everything. A random range finder, doubled until
    the rest is rounding; the rest is measured, so nothing depends on luck.
    """
    stack = np.concatenate(blocks)
    m, k = stack.shape
    size = float(np.linalg.norm(stack))
    if k < _REDUCE_FROM or size == 0.0:
        return None, 0.0
    rng = np.random.default_rng(0)  # a fixed draw: the result depends on the data only
    floor = 8.0 * max(m, k) * EPS * size
    width = 32
    while width < 0.7 * k:
        Q = np.linalg.qr(stack.T @ rng.standard_normal((m, width)))[0]
        Q = np.linalg.qr(stack.T @ (stack @ Q))[0]
        missed = float(np.linalg.norm(stack - (stack @ Q) @ Q.T))
        if missed <= floor:
            return Q, missed + floor
        width *= 2
    return None, 0.0


def top_eigenvalue(G: Array) -> tuple[float, float]:
    """Square roots of the largest eigenvalue of a PSD matrix and of an upper bound of it.

    Large matrices: an eigenvalue from Lanczos (from below), and a Cholesky factor of ``bound I - G`` as the proof that
    nothing exceeds the bound, which is much cheaper than all eigenvalues.
    """
    k, trace = len(G), float(np.trace(G))
    if k > 300 and trace > 0.0:
        start = np.random.default_rng(0).standard_normal(k)
        low = float(eigsh(G, k=1, v0=start, return_eigenvectors=False)[0])
        # a completed factorisation proves the matrix PSD up to (k + 1) eps times its trace
        for excess in (1e-10, 1e-8, 1e-6):
            bound = low * (1.0 + excess)
            gap = -G
            gap[np.diag_indices(k)] += bound
            try:
                cholesky(gap, lower=True, overwrite_a=True, check_finite=False)
            except LinAlgError:
                continue
            return float(np.sqrt(low)), float(np.sqrt(bound + 2.0 * (k + 2) * EPS * (k * bound + trace)))
    top = max(0.0, float(eigh(G, eigvals_only=True, subset_by_index=[k - 1, k - 1])[0]))
    return float(np.sqrt(top)), float(np.sqrt(top + 16.0 * np.sqrt(k) * EPS * trace))


def triangular(M: Array) -> Array:
    """A matrix with the Gram matrix of ``M`` and at most as many rows as columns."""
    return M if M.shape[0] <= M.shape[1] else np.asarray(np.linalg.qr(M, mode="r"))


def box_sdp_constraint(diagonal: Any, H: Any, b: Any, offset: Any) -> Any:
    """The cvxpy constraint ``z^T H z + b^T z <= z^T Diag(diagonal) z + offset`` for every z."""
    import cvxpy as cp

    k = H.shape[0]
    column = cp.reshape(b, (k, 1), order="C") / 2
    block = cp.bmat([[cp.diag(diagonal) - H, -column], [-column.T, cp.reshape(offset, (1, 1), order="C")]])
    # symmetrised, because cvxpy does not see that the block is symmetric
    return (block + block.T) / 2 >> 0


def box_multipliers(H: Array, b: Array, solver: str, max_iter: int | None) -> tuple[Array, Proposal]:
    """Multipliers of ``max z^T H z + b^T z`` over ``|z_k| <= 1``, proposed by cvxpy."""
    import cvxpy as cp

    diagonal, offset = cp.Variable(len(b), nonneg=True), cp.Variable()
    problem = cp.Problem(cp.Minimize(cp.sum(diagonal) + offset), [box_sdp_constraint(diagonal, H, b, offset)])
    proposal = cvxpy_solve(problem, solver, max_iter)
    return np.asarray(diagonal.value, dtype=np.float64), proposal
