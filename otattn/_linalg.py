"""Small dense helpers on symmetric matrices, and norms that are rounded outward."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "lambda_max_upper",
    "polar_factor",
    "psd_eigh",
    "psd_sqrt",
    "spectral_norm",
    "spectral_norm_upper",
    "symmetrize",
]

_EPS = float(np.finfo(np.float64).eps)


def symmetrize(M: NDArray[np.float64]) -> NDArray[np.float64]:
    """``(M + M^T) / 2`` on the last two axes."""
    out: NDArray[np.float64] = 0.5 * (M + np.swapaxes(M, -1, -2))
    return out


def psd_eigh(S: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Eigenvalues (clipped at 0, ascending) and eigenvectors of symmetric PSD matrices, batched."""
    s, E = np.linalg.eigh(symmetrize(S))
    return np.maximum(s, 0.0), E


def psd_sqrt(S: NDArray[np.float64]) -> NDArray[np.float64]:
    """Symmetric square root of PSD matrices, batched."""
    s, E = psd_eigh(S)
    out: NDArray[np.float64] = (E * np.sqrt(s)[..., None, :]) @ np.swapaxes(E, -1, -2)
    return out


def polar_factor(M: NDArray[np.float64]) -> NDArray[np.float64]:
    """Orthogonal polar factor ``U W^T`` from the SVD ``M = U diag(s) W^T``, batched."""
    U, _, Wt = np.linalg.svd(M)
    out: NDArray[np.float64] = U @ Wt
    return out


def spectral_norm(M: NDArray[np.float64]) -> float:
    """Largest singular value (0 for an empty matrix)."""
    return float(np.linalg.norm(M, 2)) if M.size else 0.0


def spectral_norm_upper(M: NDArray[np.float64]) -> float:
    """Largest singular value, rounded outward by the backward error of the SVD: never below the exact one."""
    value = spectral_norm(M)
    return value * (1.0 + 8.0 * max(M.shape, default=1) * _EPS)


def lambda_max_upper(S: NDArray[np.float64]) -> float:
    """Largest eigenvalue of a symmetric matrix, rounded outward by ``8 dim eps ||S||``."""
    s = np.linalg.eigvalsh(symmetrize(S))
    return float(s[-1] + 8.0 * S.shape[-1] * _EPS * max(abs(s[0]), abs(s[-1])))
