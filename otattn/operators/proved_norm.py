"""The largest singular value of a float64 matrix from above, proved by a Cholesky factorisation whose errors are counted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.sparse.linalg import ArpackError, eigsh

from otattn._linalg import EPS, Array

__all__ = ["proved_norm", "radius_norm"]

SMALL = 64
"""Gram matrices up to this side are decomposed for the trial value, larger ones iterated."""
TRIALS = 60
"""Factorisations tried, each twice as far above the last; the first succeeds where the trial value was good."""


def proved_norm(M: Array) -> float:
    r"""An upper bound of the largest singular value of the matrix of floats ``M``, all rounding counted.

    With ``S = M^T M`` (of the smaller side N; m is the larger side) and a trial value lambda a little above its
    largest eigenvalue, ``H = lambda I - S`` is factorised; where that succeeds,

    .. math:: \|M\|^2 \le \lambda + \epsilon\lambda + \gamma_m \min(\|M\|_F^2, \|M\|_1 \|M\|_\infty) + \gamma_N \operatorname{tr} H .

    Proof. An entry of the float product differs from that of S by at most ``gamma_m (|M|^T |M|)_ij``, in any order of
    summation, fused or not, and ``|| |M|^T |M| || <= || |M| ||^2`` is at most either of the two in the minimum. The
    diagonal of H rounds by ``eps lambda`` at most. A factorisation that runs to its end gives ``R^T R = H + E`` with
    ``|E_ij| <= gamma_{N+1} |R|^T |R|``, and the columns of R have squared norms at most ``H_ii / (1 - gamma_{N+1})``:
    so ``||E|| <= gamma_{N+1} / (1 - gamma_{N+1}) tr H``, and ``H >= -||E||``. Here ``gamma_k = (k + 8) eps``, twice
    and more of what the rounding unit gives, for reciprocals of pivots that a BLAS multiplies with. The matrix is
    scaled by a power of two so that its largest entry is near 1, and what then underflows is added.

    Raises
    ------
    OverflowError
        An entry is not finite.

    References
    ----------
    Higham, "Accuracy and Stability of Numerical Algorithms", 2002, sections 3.5 and 10.1. Rump, "Verification of
    positive definiteness", BIT 46 (2006).

    Examples
    --------
    >>> import numpy as np
    >>> round(proved_norm(np.array([[3.0, 0.0], [4.0, 0.0]])), 9)
    5.0
    """
    size = float(np.abs(M).max(initial=0.0))
    if not math.isfinite(size):
        raise OverflowError("the matrix must have finite entries; scale its data down.")
    if size == 0.0:
        return 0.0
    power = math.frexp(size)[1]
    Z = np.ldexp(M if M.shape[0] >= M.shape[1] else M.T, -power)
    value = math.sqrt(_largest(Z)) * (1.0 + 4.0 * EPS)
    try:
        out = math.ldexp(value, power)
    except OverflowError:
        return math.inf
    return out if out > 1e-300 else out + 5e-324  # the rounding of a subnormal


def _largest(Z: Array) -> float:
    """An upper bound of the largest eigenvalue of ``Z^T Z``, for entries of at most 1."""
    m, N = Z.shape
    S = Z.T @ Z
    sizes = np.abs(Z)
    lengths = np.einsum("ij,ij->", Z, Z)
    reach = min(float(lengths), float(sizes.sum(axis=0).max()) * float(sizes.sum(axis=1).max()))
    # an entry that underflowed in scaling or in a product is off by 5e-324, in a sum of m terms, in a row of N
    formed = _gamma(m) * reach * (1.0 + _gamma(m * N)) + 4.0 * m * N * 5e-324
    step = 4.0 * (formed + _gamma(N) * float(np.trace(S)))  # more than factorising needs where the trial value is good
    shift = _trial(S)
    for _ in range(TRIALS):
        shift, step = shift + step, 2.0 * step
        H = -S
        H.flat[:: N + 1] += shift
        trace = float(np.trace(H))
        try:
            factor = np.linalg.cholesky(H)
        except np.linalg.LinAlgError:
            continue
        if np.isfinite(np.diagonal(factor)).all():
            lost = formed + _gamma(N) * trace * (1.0 + 2.0 * _gamma(N)) + EPS * (shift + float(np.trace(S)))
            return (shift + lost) * (1.0 + 4.0 * EPS)
    return reach * (1.0 + _gamma(m * N)) + formed


def _gamma(k: int) -> float:
    return (k + 8) * EPS


def _trial(S: Array) -> float:
    """A value near the largest eigenvalue; nothing is assumed of it."""
    if len(S) > SMALL:
        try:
            start = np.random.default_rng(0).standard_normal(len(S))
            return float(eigsh(S, k=1, v0=start, return_eigenvectors=False, tol=1e-12)[0])
        except ArpackError:
            pass
    return float(np.linalg.eigvalsh(S)[-1])


def radius_norm(R: Any) -> float:
    """An upper bound of the norm of every matrix whose entries are at most those of R in absolute value."""
    if R.size == 0:
        return 0.0
    sums = (1.0 + _gamma(R.size)) * (R.sum(axis=0).max() + 5e-324), R.sum(axis=1).max() + 5e-324
    product = math.sqrt(float(sums[0])) * math.sqrt(float(sums[1]))
    return product * (1.0 + 4.0 * EPS) + 5e-324
