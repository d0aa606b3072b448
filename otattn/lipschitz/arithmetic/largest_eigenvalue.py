r"""The largest eigenvalue of a large positive semidefinite matrix, from both sides, and that of small ones from above.

From below: Lanczos. From above: a Cholesky factorisation of ``b I - G`` that runs to its end in float64 is the exact one of a
matrix within ``(k + 1) eps (k b + tr G)`` of it in norm (Higham, *Accuracy and Stability of Numerical Algorithms*, theorem 10.3,
``|| |R^T| |R| || <= |R|_F^2``), so that ``lambda_max(G) <= b + 2 (k + 2) eps (k b + tr G)``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cholesky
from scipy.linalg.blas import dsymv
from scipy.sparse.linalg import LinearOperator, eigsh

from otattn._linalg import EPS
from otattn.operators import spectral_norm_bounds

__all__ = ["FAILURE", "largest_eigenvalue", "likely_largest", "small_top"]

Array = NDArray[np.float64]
_DENSE = 300
FAILURE = 1e-9
"""Probability, over the random starts, that one large norm is above its bound."""


def largest_eigenvalue(G: Array, accuracy: float = 1e-9) -> tuple[float, float]:
    """Square roots of a value of the largest eigenvalue and of an upper bound, larger by about ``accuracy``.

    Of G, positive semidefinite up to rounding, the lower triangle is read. It is overwritten.
    """
    k = len(G)
    trace = float(np.abs(np.trace(G)))
    if not np.isfinite(trace):
        return float("nan"), float("inf")
    if k <= _DENSE or trace == 0.0:
        w = np.linalg.eigvalsh(G) if k else np.zeros(1)
        value = max(float(w[-1]), 0.0)
        return float(np.sqrt(value)), float(np.sqrt(value + 16.0 * k * EPS * float(np.abs(w).max())))
    F = G.T  # the same memory in Fortran's order, whose upper triangle is read

    def times(x: Array) -> Array:
        return np.asarray(dsymv(1.0, F, x))

    start = np.random.default_rng(0).standard_normal(k)
    operator = LinearOperator((k, k), matvec=times, dtype=np.float64)
    low = float(eigsh(operator, k=1, v0=start, tol=0.1 * accuracy, return_eigenvectors=False)[0])
    excess = accuracy
    diagonal = np.diag(G).copy()
    np.negative(G, out=G)
    while excess < 1.0:
        bound = low * (1.0 + excess)
        G[np.diag_indices(k)] = bound - diagonal
        try:
            # the factor is written into a copy: a failure leaves G as it is for the next trial
            cholesky(F, lower=False, overwrite_a=False, check_finite=False)
        except LinAlgError:
            excess *= 100.0
            continue
        return float(np.sqrt(max(low, 0.0))), float(np.sqrt(bound + 2.0 * (k + 2) * EPS * (k * bound + trace)))
    return float(np.sqrt(max(low, 0.0))), float(np.sqrt(trace) * (1.0 + k * EPS))


def likely_largest(G: Array, failure: float) -> tuple[float, float]:
    """The same for a matrix that is too large to be factorised: the bound fails with probability ``failure``."""
    F, k = G.T, len(G)

    def times(x: Array) -> Array:
        return np.asarray(dsymv(1.0, F, np.ascontiguousarray(x).ravel()))

    operator = LinearOperator((k, k), matvec=times, rmatvec=times, dtype=np.float64)
    low, high, _ = spectral_norm_bounds(operator, failure=failure, tol=2e-2)
    return float(np.sqrt(low)), float(np.sqrt(high))


def small_top(S: Array) -> float:
    """An upper bound of the largest eigenvalue of a symmetric matrix, by the backward error of all eigenvalues."""
    w = np.linalg.eigvalsh(0.5 * (S + S.T))
    return float(w[-1] + 8.0 * len(w) * EPS * np.abs(w).max(initial=0.0))
