"""Is the flow of covariances under attention a Bures-Wasserstein gradient flow?"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import solve_sylvester

from otattn import _validate as check
from otattn._linalg import Array, psd_eigh, symmetrize
from otattn.attention import AttentionMap
from otattn.attention.head import check_sizes
from otattn.dynamics.velocity import check_values
from otattn.errors import NotGaussianPreservingError
from otattn.gradient_flow.asymmetry import Asymmetry, dense_asymmetry, probed_asymmetry
from otattn.lipschitz.local.gaussian import affine_derivative
from otattn.measures.gaussian import check_covariance

__all__ = ["bures_closedness", "covariance_tangent"]

BASIS_SIZE = 600
"""Number of symmetric basis matrices above which the defect is estimated by probes (d = 34)."""
RANK_TOL = 1e-8


def covariance_tangent(attention: AttentionMap, cov: ArrayLike) -> Array:
    """The symmetric T with ``T Sigma + Sigma T = G Sigma + Sigma G^T``, the velocity of N(0, Sigma)'s covariance.

    Parameters
    ----------
    attention : softmax, linear, L2, Sinkhorn attention or MultiHeadAttention of these
    cov : array_like (d, d)
        Positive definite.

    Returns
    -------
    ndarray (d, d)

    Raises
    ------
    NotGaussianPreservingError
        Another kind of attention.
    ValueError
        A covariance that is not positive definite (then T is not unique).

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> covariance_tangent(SoftmaxAttention([[1.0]], [[1.0]]), [[2.0]])
    array([[2.]])
    """
    S = _definite(cov, attention)
    G = affine_derivative(attention, np.zeros(len(S)), S).G
    return symmetrize(solve_sylvester(S, S, G @ S + S @ G.T))


def bures_closedness(
    attention: AttentionMap, cov: ArrayLike, *, rng: np.random.Generator | int = 0, probes: int = 64
) -> Asymmetry:
    r"""The defect of ``U -> DT(Sigma)[U]`` from being self-adjoint on symmetric matrices.

    A curve of covariances ``Sigma' = T Sigma + Sigma T`` is a Bures-Wasserstein gradient flow iff ``T(Sigma) = 2
    dE/dSigma`` for some E, iff ``<DT(Sigma)[U], W> = <DT(Sigma)[W], U>`` for all symmetric U, W (Frobenius inner
    product; the cone of covariances is convex, so closed forms are exact). T solves ``T Sigma + Sigma T = R(Sigma)``,
    ``R = G Sigma + Sigma G^T``, hence

    .. math:: DT[U]\,\Sigma + \Sigma\, DT[U] = DR[U] - T U - U T,

    with the analytic derivative of G. The matrix of DT in an orthonormal basis of the symmetric matrices gives
    the defect exactly; for ``d > 34`` it is estimated from pairs of normal matrices, ``E (<DT[U], W> -+ <DT[W],
    U>)^2``.

    Parameters
    ----------
    attention : softmax, linear, L2, Sinkhorn attention or MultiHeadAttention of these
        With values in the space of the tokens.
    cov : array_like (d, d)
        Positive definite (condition number up to 1e8).
    rng : Generator or int
        For the probes.
    probes : int

    Returns
    -------
    Asymmetry
        0 for a gradient flow; about 0.1 to 1 when it is none.

    Raises
    ------
    NotGaussianPreservingError, ValueError
        As for `covariance_tangent`.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> A, cov = np.array([[1.0, 0.5], [0.5, -1.0]]), [[2.0, 0.0], [0.0, 1.0]]
    >>> bures_closedness(SoftmaxAttention(A, A), cov).value < 1e-12
    True
    >>> bures_closedness(SoftmaxAttention(A, np.eye(2)), cov).value > 0.1
    True

    References
    ----------
    Takatsu (2011), Wasserstein geometry of Gaussian measures; Castin, Ablin, Carrillo, Peyré, 2025.
    """
    S = _definite(cov, attention)
    d = len(S)
    s, E = psd_eigh(S)
    total = s[:, None] + s[None, :]
    derivative = affine_derivative(attention, np.zeros(d), S)

    def solve(R: Array) -> Array:
        return np.asarray(E @ ((E.T @ R @ E) / total) @ E.T)

    R = derivative.G @ S
    T = solve(R + R.T)

    def apply(U: Array) -> Array:
        change = derivative.dG(np.zeros(d), U) @ S + derivative.G @ U - T @ U
        return solve(change + change.T)

    if d * (d + 1) // 2 > BASIS_SIZE:
        return _probed(apply, d, check.rng_from(rng), check.count(probes, "probes", least=2))
    i, j = np.triu_indices(d)
    scale = np.where(i == j, 1.0, np.sqrt(2.0))
    columns = []
    for a, b in zip(i, j, strict=True):
        U = np.zeros((d, d))
        U[a, b] = U[b, a] = 1.0 if a == b else np.sqrt(0.5)
        columns.append(apply(U)[i, j] * scale)
    return Asymmetry(dense_asymmetry(np.stack(columns, axis=1)))


def _probed(apply: Callable[[Array], Array], d: int, rng: np.random.Generator, probes: int) -> Asymmetry:
    skew, even = np.empty(probes), np.empty(probes)
    for k in range(probes):
        U, W = (symmetrize(rng.standard_normal((d, d))) for _ in range(2))
        one, other = float(np.sum(apply(U) * W)), float(np.sum(apply(W) * U))
        skew[k], even[k] = (one - other) ** 2, (one + other) ** 2
    return probed_asymmetry(skew, even)


def _definite(cov: ArrayLike, attention: AttentionMap) -> Array:
    S = check.moderate(check_covariance(cov, dim=attention.in_dim), "cov")
    check_sizes(attention)
    if attention.causal:
        raise NotGaussianPreservingError(
            "attention must be unmasked for a flow of Gaussians, received a masked one; use the discrete tests."
        )
    check_values(attention, len(S))
    s = np.linalg.eigvalsh(S)
    if not s[0] > RANK_TOL * s[-1]:
        raise ValueError(
            f"cov must be positive definite with a condition number up to {1 / RANK_TOL:g}, received eigenvalues "
            f"from {s[0]:.3g} to {s[-1]:.3g}; restrict the attention to its range."
        )
    return S
