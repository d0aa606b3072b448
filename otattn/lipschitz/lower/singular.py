"""Largest singular vectors: of batches of small matrices, and of one matrix known by its products."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.sparse.linalg import LinearOperator, svds

from otattn._linalg import Array


def unit(x: Array) -> tuple[Array, Array]:
    """Rows divided by their norms (zero rows stay), and the norms."""
    size = np.linalg.norm(x, axis=-1)
    return x / np.maximum(size, 1e-300)[..., None], size


def leading_pairs(M: Array, *, exact: bool) -> tuple[Array, Array, Array]:
    """Largest singular values ``(B,)`` of ``M (B, m, k)``, as ``|M v|``, with left ``(B, m)`` and right ``(B, k)`` vectors.

    Without ``exact`` the vectors of nearly equal singular values may be mixed.
    """
    wide = M.shape[1] <= M.shape[2]
    # scaled first: the square of an entry e^{400} would overflow
    scale = np.maximum(np.abs(M).max(axis=(1, 2)), 1e-300)[:, None, None]
    N = M / scale
    T = np.swapaxes(N, 1, 2)
    gram = N @ T if wide else T @ N
    squaring = not exact and gram.shape[1] > 12
    vec = _dominant(gram) if squaring else np.linalg.eigh(gram)[1][:, :, -1]
    image, value = unit(np.einsum("bm,bmn->bn" if wide else "bn,bmn->bm", vec, N))
    u, v = (vec, image) if wide else (image, vec)
    return value * scale[:, 0, 0], u, v


def _dominant(G: Array) -> Array:
    """Unit vectors of the largest eigenvalues of PSD matrices ``(B, N, N)``, by repeated squaring.

    Several times faster than a full decomposition; eigenvalues closer than 1e-3 may be mixed.
    """
    H = G / np.maximum(np.trace(G, axis1=1, axis2=2), 1e-300)[:, None, None]
    for _ in range(13):
        H = H @ H
        H /= np.maximum(np.trace(H, axis1=1, axis2=2), 1e-300)[:, None, None]
        # of trace one and Frobenius norm one: rank one
        if (np.sum(H * H, axis=(1, 2)) > 1.0 - 1e-13).all():
            break
    column = np.argmax(np.sum(H * H, axis=1), axis=1)
    return unit(np.take_along_axis(H, column[:, None, None], axis=2)[:, :, 0])[0]


def leading_direction(
    forward: Callable[[Array], Array], backward: Callable[[Array], Array], rows: int, columns: int, *, tol: float
) -> Array:
    """The right singular vector of the largest singular value, by Lanczos iteration; any vector for the zero matrix."""
    v0 = np.cos(np.arange(columns) ** 2.0)
    probe = forward(v0)
    if not probe.any():
        return v0
    operator = LinearOperator((rows, columns), matvec=forward, rmatvec=backward, dtype=np.float64)
    start = v0 if columns <= rows else probe
    return np.asarray(svds(operator, k=1, v0=start, tol=tol, maxiter=10_000, return_singular_vectors="vh")[2][0])
