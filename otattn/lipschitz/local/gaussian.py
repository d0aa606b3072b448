r"""The Bures-Wasserstein local constant of attention maps that keep Gaussians Gaussian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_sylvester

from otattn._linalg import psd_eigh, symmetrize
from otattn.attention import (
    AttentionMap,
    L2Attention,
    LinearAttention,
    MultiHeadAttention,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.attention.head import check_sizes
from otattn.errors import NotGaussianPreservingError
from otattn.lipschitz.bound import Bound
from otattn.measures import GaussianMeasure

__all__ = ["affine_derivative", "gaussian_local_constant"]

Array = NDArray[np.float64]
RANK_TOL = 1e-13
"""Eigenvalues of a covariance below this share of the largest count as zero."""


@dataclass(frozen=True)
class _Derivative:
    """``Gamma(x) = G x + b`` at N(m, S): G, and the derivatives of G and of the image's mean."""

    G: Array
    dG: Callable[[Array, Array], Array]
    dmean: Callable[[Array, Array], Array]


def gaussian_local_constant(attention: AttentionMap, gaussian: GaussianMeasure) -> Bound:
    r"""``lim sup BW(F(g'), F(g)) / BW(g', g)`` over Gaussians ``g'`` that tend to ``g = N(m, S)``.

    Write ``S = F F^T`` with ``F = E diag(sqrt(s))`` from the spectral decomposition and ``Gamma(x) = G x +
    b``. A tangent is a shift u of the mean and a change D of F, ``dS = D F^T + F D^T``; at first order the
    distance is ``(|u|^2 + |D|^2)^{1/2}`` for the D that are orthogonal to the rotations ``F Omega``: ``D =
    T F`` with T symmetric, in the eigenbasis ``s_i`` for ``T_ii`` and ``s_i + s_j`` for ``T_ij``, and for a
    degenerate S free columns in the kernel (variance that appears where there was none). The image
    covariance has the factor ``L = G F``, which moves by ``dL = dG F + G D``. With ``L L^T = W diag(l)
    W^T``, ``W_r`` its range and ``X = W_r^T (dL L^T + L dL^T) W_r`` its squared first-order distance is

    .. math:: |dmean|^2 + \sum_{i,j \le r} \frac{X_{ij}^2}{2 (l_i + l_j)} + \|W_\perp^T dL\|_F^2,

    the least ``|dL - L Omega|^2`` over skew Omega. All is linear in the tangent, so the constant is the
    largest singular value of a matrix. The derivatives (dS is ``dS`` below):

    - softmax: ``G = V S A``, ``dG = V dS A``, ``dmean = V (u + dS (A m + c) + S A u)``;
    - linear: ``G = V M A``, ``M = S + m m^T``, ``dG = V dM A``, ``dmean = V (dM A m + M A u)``;
    - L2, with ``N = (I + 2 S K^T K)^{-1}``, ``B = K^T Q``: ``G = 2 V N S B``, ``dG = 2 V N dS N^T B``,
      ``dmean = V [N (u + 2 dS B m + 2 S B u) - 2 N dS K^T K N (m + 2 S B m)]``;
    - Sinkhorn: ``G = V Z A``, ``dmean = V u``, where ``Z = S - Z A S A^T Z`` is the covariance of y given x
      under the coupling; ``dZ`` solves ``(I/2 + P) dZ + dZ (I/2 + P)^T = dS - Z A dS A^T Z``,
      ``P = Z A S A^T`` (a product of two PSD matrices, so the equation has one solution, and none of it
      inverts S);
    - several heads: the sum.

    Other perturbations of a Gaussian may do worse, so this bounds the ``W_2`` local constant from below only.

    Parameters
    ----------
    attention : softmax, linear, L2 or Sinkhorn attention, or MultiHeadAttention of these
    gaussian : GaussianMeasure
        Of any rank.

    Returns
    -------
    Bound
        kind "local"; ``witness = (u, D)``, the worst tangent of norm 1. Costs ``d^2 / 2`` products of d x d
        matrices and the decomposition of a ``(e + e r + ...) x (d + d (d+1)/2)`` matrix.

    Raises
    ------
    NotGaussianPreservingError
        Another kind of attention, or a masked one.
    ValueError
        A Gaussian of another dimension.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.measures import GaussianMeasure
    >>> bound = gaussian_local_constant(SoftmaxAttention([[1.0]], [[1.0]]), GaussianMeasure([0.0], [[2.0]]))
    >>> round(bound.value, 9)
    6.0

    References
    ----------
    otattn, Gaussian constant; Takatsu (2011) for the metric.
    """
    if attention.in_dim is not None and attention.in_dim != gaussian.dim:
        raise ValueError(
            f"gaussian must have the dimension {attention.in_dim} of the attention, received {gaussian.dim}."
        )
    check_sizes(attention)
    check_sizes(gaussian)
    m, S = gaussian.mean, gaussian.cov
    derivative = affine_derivative(attention, m, S)
    s, E = psd_eigh(S)
    s = np.where(s > RANK_TOL * s.max(initial=0.0), s, 0.0)
    F = E * np.sqrt(s)
    tangents = _tangents(s, E)
    L = derivative.G @ F
    W, root, _ = np.linalg.svd(L, full_matrices=True)
    spectrum = np.zeros(len(L))
    spectrum[: len(root)] = root**2
    live = spectrum > RANK_TOL * spectrum.max(initial=0.0)
    range_, kernel, l = W[:, live], W[:, ~live], spectrum[live]
    weight = np.sqrt(1.0 / (2.0 * (l[:, None] + l[None, :])))
    columns = []
    for u, D in tangents:
        change = D @ F.T
        dS = change + change.T
        dL = derivative.dG(u, dS) @ F + derivative.G @ D
        moved = range_.T @ dL @ L.T @ range_
        X = (moved + moved.T) * weight
        columns.append(np.concatenate([derivative.dmean(u, dS), X.ravel(), (kernel.T @ dL).ravel()]))
    matrix = np.stack(columns, axis=1)
    _, values, right = np.linalg.svd(matrix, full_matrices=False)
    u = sum(c * t[0] for c, t in zip(right[0], tangents, strict=True))
    D = sum(c * t[1] for c, t in zip(right[0], tangents, strict=True))
    return Bound(
        float(values[0]),
        "local",
        "otattn.gaussian_local_constant: Bures-Wasserstein local constant",
        domain=gaussian,
        witness=(u, D),
        details={"rank": int((s > 0).sum()), "image_rank": int(live.sum())},
    )


def _tangents(s: Array, E: Array) -> list[tuple[Array, Array]]:
    """An orthonormal basis of the tangents ``(u, D)``, the D orthogonal to every ``F Omega``, Omega skew."""
    d = len(s)
    zero = np.zeros((d, d))
    out: list[tuple[Array, Array]] = [(E[:, i], zero) for i in range(d)]
    for i in range(d):
        for j in range(i, d):
            if s[i] + s[j] == 0.0:
                continue
            D = np.zeros((d, d))
            # T = E_ij + E_ji in the eigenbasis, D = T F, whose columns stay in that basis
            D[i, j] += np.sqrt(s[j])
            if i != j:
                D[j, i] += np.sqrt(s[i])
            out.append((np.zeros(d), E @ D / np.linalg.norm(D)))
    empty = [int(i) for i in np.flatnonzero(s == 0.0)]
    for i in empty:
        # a free column in the kernel; which column carries it does not matter
        D = np.zeros((d, d))
        D[:, empty[0]] = E[:, i]
        out.append((np.zeros(d), D))
    return out


def affine_derivative(attention: AttentionMap, m: Array, S: Array) -> _Derivative:
    if isinstance(attention, MultiHeadAttention):
        parts = [affine_derivative(head, m, S) for head in attention.heads]
        if attention.outputs is not None:
            parts = [_scaled(W, part) for W, part in zip(attention.outputs, parts, strict=True)]
        return _Derivative(
            np.sum([part.G for part in parts], axis=0),
            lambda u, dS: np.sum([part.dG(u, dS) for part in parts], axis=0),
            lambda u, dS: np.sum([part.dmean(u, dS) for part in parts], axis=0),
        )
    if isinstance(attention, SoftmaxAttention):
        return _softmax(attention, m, S)
    if isinstance(attention, LinearAttention):
        return _linear(attention, m, S)
    if isinstance(attention, L2Attention):
        return _l2(attention, m, S)
    if isinstance(attention, SinkhornAttention) and attention.unfinished is None:
        return _sinkhorn(attention, S)
    raise NotGaussianPreservingError(
        "attention must be softmax, linear, L2, Sinkhorn or multi-head attention of these for a Gaussian "
        f"constant, received {type(attention).__name__}; sample the Gaussian and use local_lipschitz."
    )


def _scaled(W: Array, part: _Derivative) -> _Derivative:
    return _Derivative(W @ part.G, lambda u, dS: W @ part.dG(u, dS), lambda u, dS: W @ part.dmean(u, dS))


def _softmax(head: SoftmaxAttention, m: Array, S: Array) -> _Derivative:
    A, V = head.A, head.V
    g = A @ m if head.bias is None else A @ m + head.bias
    return _Derivative(
        V @ S @ A,
        lambda u, dS: V @ dS @ A,
        lambda u, dS: V @ (u + dS @ g + S @ (A @ u)),
    )


def _linear(head: LinearAttention, m: Array, S: Array) -> _Derivative:
    A, V = head.A, head.V
    M = S + np.outer(m, m)

    def second(u: Array, dS: Array) -> Array:
        return np.asarray(dS + np.outer(u, m) + np.outer(m, u))

    return _Derivative(
        V @ M @ A,
        lambda u, dS: V @ second(u, dS) @ A,
        lambda u, dS: V @ (second(u, dS) @ (A @ m) + M @ (A @ u)),
    )


def _l2(head: L2Attention, m: Array, S: Array) -> _Derivative:
    V, H, B = head.V, head.K.T @ head.K, head.K.T @ head.Q
    N = np.linalg.inv(np.eye(len(S)) + 2.0 * S @ H)
    centre = N @ (m + 2.0 * S @ (B @ m))
    return _Derivative(
        2.0 * V @ N @ S @ B,
        lambda u, dS: 2.0 * V @ N @ dS @ N.T @ B,
        lambda u, dS: V @ (N @ (u + 2.0 * dS @ (B @ m) + 2.0 * S @ (B @ u) - 2.0 * dS @ (H @ centre))),
    )


def _sinkhorn(head: SinkhornAttention, S: Array) -> _Derivative:
    A, V = head.A, head.V
    s, E = psd_eigh(S)
    half = (E * np.sqrt(s)) @ E.T
    U, b, _ = np.linalg.svd(half @ A @ half)
    rest = half @ U
    # 1 - mu^2 with mu = 2b / (1 + sqrt(1 + 4 b^2)), without cancellation: mu = b (1 - mu^2)
    Z = symmetrize((rest * (2.0 / (1.0 + np.sqrt(1.0 + 4.0 * b * b)))) @ rest.T)
    ZA = Z @ A
    P = ZA @ S @ A.T
    left = 0.5 * np.eye(len(S)) + P
    return _Derivative(
        V @ ZA,
        lambda u, dS: V @ solve_sylvester(left, left.T, dS - ZA @ dS @ ZA.T) @ A,
        lambda u, dS: V @ u,
    )
