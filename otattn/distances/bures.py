"""The Bures-Wasserstein distance between Gaussian measures, its map and its geodesics.

With factors ``S1 = F F^T`` and ``S2 = G G^T`` (both d x r, r the larger rank),

    BW^2 = |m1 - m2|^2 + min_Q || F - G Q ||_F^2,   Q orthogonal, the polar factor of G^T F.

The usual formula ``tr S1 + tr S2 - 2 tr (S1^{1/2} S2 S1^{1/2})^{1/2}`` subtracts numbers of the size of the
traces, and loses every digit when the distance is 1e-8 of the scale. ``F - G Q`` subtracts factors, which
leaves an absolute error of one rounding of the scale: all that float64 needs when the distance is not small
and the covariances are well conditioned. Otherwise factors, Q and difference are computed with 32 digits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import EPS, Array, polar_factor, symmetrize
from otattn.distances.costs import pair_distances
from otattn.distances.double_double import DoubleDouble, add, matmul, pivoted_factor, transpose
from otattn.measures import GaussianMeasure
from otattn.measures.gaussian import check_covariances

__all__ = ["bures_geodesic", "bures_wasserstein", "covariance_distance", "gaussian_transport_map"]

#: Relative pivots of a product F F^T formed in float64 come out within 10 roundings of 0 for d <= 16 and
#: within 16 for d = 64 where the rank ends: below this many (times sqrt(d / 16)), a pivot is rounding.
RANK_ROUNDINGS = 16
#: Float64 is enough for distances above this part of the scale and condition numbers below its inverse.
PLAIN = 1e-3


def bures_wasserstein(g1: GaussianMeasure, g2: GaussianMeasure) -> float:
    """Wasserstein distance of order 2 between Gaussian measures of any rank.

    ``BW^2 = |m1 - m2|^2 + tr S1 + tr S2 - 2 tr (S1^{1/2} S2 S1^{1/2})^{1/2}``, computed without its
    cancellation: the relative error is 1e-12 at worst, and 1e-15 for covariances that are close, down to
    distances of 1e-12 times the scale. Exactly 0.0 for equal measures.

    Parameters
    ----------
    g1, g2 : GaussianMeasure

    Raises
    ------
    TypeError
        An argument is no GaussianMeasure.
    ValueError
        The dimensions differ.
    OverflowError
        The distance is not representable in float64.

    Examples
    --------
    >>> bures_wasserstein(GaussianMeasure([0.0], [[1.0]]), GaussianMeasure([3.0], [[25.0]]))
    5.0

    References
    ----------
    Gelbrich (1990), On a formula for the L2 Wasserstein metric; Takatsu (2011), Wasserstein geometry of
    Gaussian measures.
    """
    g1, g2 = _gaussian_pair(g1, g2)
    spread = float(_distances(g1.cov[None], g2.cov[None])[0])
    shift = float(pair_distances(g1.mean[None], g2.mean[None])[0])
    value = float(np.hypot(shift, spread))
    if not np.isfinite(value):
        raise OverflowError(
            "the distance must fit in float64, received Gaussians that are too far apart; rescale them."
        )
    return value


def covariance_distance(S1: ArrayLike, S2: ArrayLike) -> Array:
    """Bures-Wasserstein distance between covariance matrices, vectorised over leading axes.

    Parameters
    ----------
    S1, S2 : array_like (..., d, d)
        Symmetric positive semi-definite (as for `GaussianMeasure`), of any rank; leading axes are broadcast.
        Directions in which a covariance is zero to its rounding (relative to its diagonal) count as zero.

    Returns
    -------
    ndarray (...)

    Raises
    ------
    ValueError
        Some matrix is not finite, square, symmetric or positive semi-definite.

    Examples
    --------
    >>> covariance_distance([[[4.0]], [[9.0]]], [[1.0]])
    array([1., 2.])

    References
    ----------
    As for `bures_wasserstein`.
    """
    first, second = check_covariances(S1, "S1"), check_covariances(S2, "S2")
    if first.shape[-1] != second.shape[-1]:
        raise ValueError(
            f"S1 and S2 must have one size, received shapes {first.shape} and {second.shape}; check the last axes."
        )
    a, b = np.broadcast_arrays(first, second)
    shape = a.shape[:-2]
    d = a.shape[-1]
    return _distances(a.reshape(-1, d, d), b.reshape(-1, d, d)).reshape(shape)


def gaussian_transport_map(g1: GaussianMeasure, g2: GaussianMeasure) -> tuple[Array, Array]:
    """The optimal affine map ``x -> T x + b`` that pushes ``g1`` to ``g2``.

    For an invertible ``S1`` it is ``T = S1^{-1/2} (S1^{1/2} S2 S1^{1/2})^{1/2} S1^{-1/2}``, symmetric PSD. In
    general ``T = G Q F^+`` with the factors of this module, zero orthogonally to the support of ``g1`` (where
    any map would do).

    Returns
    -------
    T : ndarray (d, d)
    b : ndarray (d,)
        ``m2 - T m1``.

    Raises
    ------
    ValueError
        No map exists: the rank of ``S2`` exceeds that of ``S1``, and a map cannot raise the dimension of a
        Gaussian.

    Examples
    --------
    >>> T, b = gaussian_transport_map(GaussianMeasure([0.0], [[1.0]]), GaussianMeasure([1.0], [[4.0]]))
    >>> T.tolist(), b.tolist()
    ([[2.0]], [1.0])

    References
    ----------
    Takatsu (2011); Peyré and Cuturi (2019), Computational Optimal Transport, remark 2.31.
    """
    g1, g2 = _gaussian_pair(g1, g2)
    F, G, Q = (part.high[0] for part in _aligned(g1.cov[None], g2.cov[None]))
    ranks = [int(np.abs(part).max(axis=0).astype(bool).sum()) for part in (F, G)]
    if ranks[1] > ranks[0]:
        raise ValueError(
            "a transport map needs a first covariance of at least the rank of the second, received ranks "
            f"{ranks[0]} and {ranks[1]}; swap the measures, or use bures_geodesic, which needs no map."
        )
    T = (G @ Q)[:, : ranks[0]] @ np.linalg.pinv(F[:, : ranks[0]], rcond=EPS)
    if ranks[0] == g1.dim:
        T = symmetrize(T)
    return T, g2.mean - T @ g1.mean


def bures_geodesic(g1: GaussianMeasure, g2: GaussianMeasure, t: float) -> GaussianMeasure:
    """The point at time ``t`` in [0, 1] of the geodesic from ``g1`` to ``g2`` (displacement interpolation).

    ``S_t = ((1-t) F + t G Q) ((1-t) F + t G Q)^T``, which is ``((1-t) I + t T) S1 ((1-t) I + t T)`` when a
    map T exists, and needs none: ranks may differ.

    Raises
    ------
    ValueError
        ``t`` outside [0, 1], or dimensions that differ.

    Examples
    --------
    >>> bures_geodesic(GaussianMeasure([0.0], [[1.0]]), GaussianMeasure([2.0], [[9.0]]), 0.5).cov
    array([[4.]])

    References
    ----------
    McCann (1997), A convexity principle for interacting gases; Takatsu (2011).
    """
    g1, g2 = _gaussian_pair(g1, g2)
    time = check.positive(t, "t", zero=True)
    if time > 1.0:
        raise ValueError(f"t must lie in [0, 1], received {t!r}; the geodesic ends at g2.")
    if time in (0.0, 1.0):
        return g2 if time else g1
    F, G, Q = (part.high[0] for part in _aligned(g1.cov[None], g2.cov[None]))
    factor = (1.0 - time) * F + time * (G @ Q)
    return GaussianMeasure((1.0 - time) * g1.mean + time * g2.mean, factor @ factor.T)


def _gaussian_pair(g1: Any, g2: Any) -> tuple[GaussianMeasure, GaussianMeasure]:
    for g, name in ((g1, "g1"), (g2, "g2")):
        if not isinstance(g, GaussianMeasure):
            raise TypeError(
                f"{name} must be a GaussianMeasure, received {type(g).__name__}; build one from a mean and "
                "a covariance (covariance_distance takes covariances)."
            )
    if g1.dim != g2.dim:
        raise ValueError(f"g1 and g2 must live in one space, received dimensions {g1.dim} and {g2.dim}.")
    return g1, g2


def _distances(S1: Array, S2: Array) -> Array:
    """Distances for two stacks ``(N, d, d)`` of valid covariances."""
    out = np.zeros(len(S1))
    differ = np.flatnonzero((S1 != S2).any(axis=(1, 2)))
    if differ.size == 0:
        return out
    A, B, unit = _scaled(S1[differ], S2[differ])
    s1, E1 = np.linalg.eigh(A)
    s2, E2 = np.linalg.eigh(B)
    F, G = ((E * np.sqrt(np.maximum(s, 0.0))[:, None, :]) for s, E in ((s1, E1), (s2, E2)))
    plain = np.linalg.norm(F - G @ polar_factor(np.swapaxes(G, 1, 2) @ F), axis=(1, 2))
    conditioned = np.minimum(s1[:, 0] - PLAIN * s1[:, -1], s2[:, 0] - PLAIN * s2[:, -1]) > 0.0
    fine = ~conditioned | (plain < PLAIN * np.sqrt(s1[:, -1] + s2[:, -1]))
    if fine.any():
        F2, G2, Q = _refined(A[fine], B[fine])
        gap = add(F2, -matmul(G2, Q))
        plain[fine] = _norm(gap.high + gap.low)
    out[differ] = plain * unit
    return out


def _norm(M: Array) -> Array:
    top = np.abs(M).max(axis=(1, 2))
    safe = np.where(top > 0.0, top, 1.0)
    return np.asarray(top * np.linalg.norm(M / safe[:, None, None], axis=(1, 2)))


def _scaled(S1: Array, S2: Array) -> tuple[Array, Array, Array]:
    """Both covariances over a power of 4 near the larger trace (exact), and the power of 2 that undoes it."""
    trace = np.maximum(np.trace(S1, axis1=1, axis2=2), np.trace(S2, axis1=1, axis2=2))
    unit = 2.0 ** np.round(0.5 * np.log2(np.where(trace > 0.0, trace, 1.0)))
    return (
        S1 / unit[:, None, None] / unit[:, None, None],
        S2 / unit[:, None, None] / unit[:, None, None],
        unit,
    )


def _aligned(S1: Array, S2: Array) -> tuple[DoubleDouble, DoubleDouble, DoubleDouble]:
    """Factors F, G and the orthogonal Q that brings ``G Q`` closest to F, in the units of the covariances."""
    A, B, unit = _scaled(S1, S2)
    F, G, Q = _refined(A, B)
    scale = unit[:, None, None]
    return DoubleDouble(F.high * scale, F.low * scale), DoubleDouble(G.high * scale, G.low * scale), Q


def _refined(A: Array, B: Array) -> tuple[DoubleDouble, DoubleDouble, DoubleDouble]:
    d = A.shape[-1]
    tol = RANK_ROUNDINGS * max(1.0, np.sqrt(d / 16)) * EPS
    F, G = pivoted_factor(A, tol), pivoted_factor(B, tol)
    # columns beyond both ranks are zero: drop them
    rank = max(1, int((np.abs(F.high).max(axis=(0, 1)) + np.abs(G.high).max(axis=(0, 1)) > 0.0).sum()))
    F = DoubleDouble(F.high[:, :, :rank], F.low[:, :, :rank])
    G = DoubleDouble(G.high[:, :, :rank], G.low[:, :, :rank])
    return F, G, _polar(matmul(transpose(G), F))


def _polar(K: DoubleDouble) -> DoubleDouble:
    """Orthogonal Q that maximises ``tr Q^T K``, to 32 digits: from the SVD, one step for symmetry, two for
    orthogonality.

    At the maximum ``P = Q^T K`` is symmetric PSD. A small rotation ``Q exp(Y)`` changes its skew part by
    ``-(P Y + Y P) / 2``: solve for the skew Y in the eigenbasis of P.
    """
    Q = polar_factor(K.high)
    start = _orthogonalised(DoubleDouble.exact(Q))
    P = matmul(transpose(start), K)
    skew = add(P, -transpose(P))
    p, E = np.linalg.eigh(symmetrize(P.high))
    W = np.swapaxes(E, 1, 2) @ (skew.high + skew.low) @ E
    total = np.abs(p)[:, :, None] + np.abs(p)[:, None, :]
    Y = np.divide(W, total, out=np.zeros_like(W), where=total > 0.0)
    # directions in which the SVD did not decide (P vanishes there) admit any rotation: keep the one there is
    Y[np.abs(Y) > 1e-2] = 0.0
    Y = E @ Y @ np.swapaxes(E, 1, 2)
    Y = 0.5 * (Y - np.swapaxes(Y, 1, 2))
    identity = DoubleDouble.exact(np.broadcast_to(np.eye(Y.shape[-1]), Y.shape))
    rotation = add(identity, DoubleDouble(Y, 0.5 * (Y @ Y)))
    return _orthogonalised(_orthogonalised(matmul(start, rotation)))


def _orthogonalised(Q: DoubleDouble) -> DoubleDouble:
    """One Newton-Schulz step ``Q + Q (I - Q^T Q) / 2``, which squares the defect of orthogonality."""
    gram = matmul(transpose(Q), Q)
    defect = add(DoubleDouble.exact(np.broadcast_to(np.eye(gram.high.shape[-1]), gram.high.shape)), -gram)
    step = 0.5 * (Q.high @ (defect.high + defect.low))
    return add(Q, DoubleDouble.exact(step))
