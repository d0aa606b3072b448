"""Small dense helpers on symmetric matrices, and norms that are rounded outward.

The norms take float64 arrays, or matrices that bring exact products of their own (``spectral_norm``,
``largest_eigenvalue``, ``norm``, ``mid``): then what comes back is proved, not rounded by a margin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "EPS",
    "FAR",
    "Array",
    "bordered",
    "cloud_centre",
    "column_of",
    "lambda_max_upper",
    "mid",
    "norm_upper",
    "polar_factor",
    "product_error",
    "psd_eigh",
    "psd_sqrt",
    "row_norms",
    "spectral_norm",
    "spectral_norm_upper",
    "symmetrize",
]

Array = NDArray[np.float64]
EPS = float(np.finfo(np.float64).eps)
FAR = 1e3
"""A mean this many times farther from most atoms than they are from each other takes three digits from them."""
_SAFE = (1e-100, 1e150)  # norms whose squares neither overflow nor vanish


def symmetrize(M: Array) -> Array:
    """``(M + M^T) / 2`` on the last two axes."""
    out: Array = 0.5 * (M + np.swapaxes(M, -1, -2))
    return out


def psd_eigh(S: Array) -> tuple[Array, Array]:
    """Eigenvalues (clipped at 0, ascending) and eigenvectors of symmetric PSD matrices, batched."""
    s, E = np.linalg.eigh(symmetrize(S))
    return np.maximum(s, 0.0), E


def psd_sqrt(S: Array) -> Array:
    """Symmetric square root of PSD matrices, batched."""
    s, E = psd_eigh(S)
    out: Array = (E * np.sqrt(s)[..., None, :]) @ np.swapaxes(E, -1, -2)
    return out


def polar_factor(M: Array) -> Array:
    """Orthogonal polar factor ``U W^T`` from the SVD ``M = U diag(s) W^T``, batched.

    In the plane it is written down: the rotation (``det M >= 0``) or reflection nearest to M.
    """
    if M.shape[-2:] == (2, 2):
        return _polar_factor_2x2(M)
    U, _, Wt = np.linalg.svd(M)
    out: Array = U @ Wt
    return out


def _polar_factor_2x2(M: Array) -> Array:
    a, b, c, d = M[..., 0, 0], M[..., 0, 1], M[..., 1, 0], M[..., 1, 1]
    # twice the projections on rotations [[x, -y], [y, x]] and on reflections [[x, y], [y, -x]]; the longer is nearer
    turn, flip = np.hypot(a + d, c - b), np.hypot(a - d, b + c)
    rotation = turn >= flip
    size = np.where(rotation, turn, flip)
    safe = np.where(size > 0.0, size, 1.0)
    x = np.where(size > 0.0, np.where(rotation, a + d, a - d) / safe, 1.0)
    y = np.where(rotation, c - b, b + c) / safe
    out = np.empty(M.shape)
    out[..., 0, 0], out[..., 1, 0] = x, y
    out[..., 0, 1], out[..., 1, 1] = np.where(rotation, -y, y), np.where(rotation, x, -x)
    return out


def row_norms(x: Array) -> Array:
    """Euclidean norms of the rows, each scaled by a power of two so that no square over- or underflows; inf only
    beyond float64.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out = np.sqrt(np.einsum("ij,ij->i", x, x))
        odd = np.flatnonzero(~((_SAFE[0] < out) & (_SAFE[1] > out)))
        if odd.size:
            part = x[odd]
            power = np.frexp(np.abs(part).max(axis=1))[1]
            unit = np.ldexp(part, -power[:, None])
            out[odd] = np.ldexp(np.sqrt(np.einsum("ij,ij->i", unit, unit)), power)
            out[odd[~np.isfinite(part).all(axis=1)]] = np.inf
    return np.asarray(out)


def cloud_centre(points: Array, shares: Array) -> Array:
    """A point near the cloud from which differences lose no digits: the mean, or the median where far atoms move the mean.

    ``shares`` are weights of sum one. Softmax attention does not see the centre, only what is lost by subtracting it:
    a mean far from most atoms leaves them the digits of its own size.
    """
    mean = np.asarray(shares @ points)
    sizes = np.abs(points).max(axis=1)
    if not sizes.max() / FAR > sizes.min():  # the usual case, at the cost of one look at the points
        return mean
    with np.errstate(over="ignore", invalid="ignore"):
        median = np.median(points, axis=0)
        near = max(float(np.median(np.abs(points - median).max(axis=1))), float(np.abs(median).max()))
        return median if float(np.abs(mean - median).max()) > FAR * near else mean


def spectral_norm(M: Array) -> float:
    """Largest singular value (0 for an empty matrix)."""
    return float(np.linalg.norm(M, 2)) if M.size else 0.0


def mid(M: Any) -> Array:
    """A float64 array near the matrix: itself for an array."""
    return M if isinstance(M, np.ndarray) else M.mid()


def spectral_norm_upper(M: Any) -> Any:
    """Largest singular value, rounded outward by the backward error of the SVD: never below the exact one."""
    if not isinstance(M, np.ndarray):
        return M.spectral_norm()
    value = spectral_norm(M)
    return _known(value * (1.0 + 8.0 * max(M.shape, default=1) * EPS) + lost_below(value, M.size))


def lost_below(value: float, operations: int = 1) -> float:
    """What so many operations may lose at a positive value near or below the normal numbers, whose digits run out there."""
    return 2e-323 * (4 + operations) if 0.0 < value < 1e-290 else 0.0


def norm_upper(x: Any) -> Any:
    """Frobenius norm, rounded outward."""
    if not isinstance(x, np.ndarray):
        return x.norm()
    size = float(np.abs(x).max(initial=0.0))
    if size == 0.0 or not np.isfinite(size):
        return _known(size)
    # a sum of squares overflows, or underflows, before the norm does
    return size * float(np.linalg.norm(x / size)) * (1.0 + (x.size + 8) * EPS) + lost_below(size)


def column_of(c: Any) -> Any:
    """A vector as a matrix of one column."""
    return c[:, None] if isinstance(c, np.ndarray) else c.column()


def bordered(Q: Any, b: Any) -> Any:
    """The matrix ``[[Q, b], [b^T, 0]]``."""
    if not isinstance(Q, np.ndarray):
        return Q.bordered(b)
    return np.block([[Q, b[:, None]], [b[None, :], np.zeros((1, 1))]])


def product_error(A: Any, B: Any) -> float:
    """An upper bound of the Frobenius norm of what rounding adds to the product ``A @ B``; 0 where products are exact.

    Each entry of a product of inner dimension k differs from the exact one by at most ``k eps`` times the product of the
    absolute values, whatever the order of summation, and by what underflows.
    """
    if not (isinstance(A, np.ndarray) and isinstance(B, np.ndarray)):
        return 0.0
    k = A.shape[-1]
    bound = np.abs(A) @ np.abs(B)
    count = np.size(bound)
    return (k + 2) * EPS * float(norm_upper(np.atleast_1d(bound))) + k * count * 1e-322


def lambda_max_upper(S: Any) -> Any:
    """Largest eigenvalue of a symmetric matrix, rounded outward by ``8 dim eps ||S||``."""
    if not isinstance(S, np.ndarray):
        return S.largest_eigenvalue()
    s = np.linalg.eigvalsh(symmetrize(S))
    return _known(float(s[-1] + 8.0 * S.shape[-1] * EPS * max(abs(s[0]), abs(s[-1]))))


def _known(value: float) -> float:
    """An upper bound of a number of which nothing is known (a nan, from entries that overflow) is inf."""
    return value if value == value else float("inf")
