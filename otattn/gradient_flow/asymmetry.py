"""How far a square operator is from being symmetric, as it stands or for the best scalar mobility."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn._tabular import Result
from otattn.attention.jacobian import JacobianOperator

__all__ = ["Asymmetry", "dense_asymmetry", "mobility_defect", "operator_asymmetry", "probed_asymmetry"]


@dataclass(frozen=True)
class Asymmetry(Result):
    """``|J - J^T|_F / |J + J^T|_F``: 0 for a symmetric J, inf for a skew one.

    Attributes
    ----------
    value : float
    error : float
        Standard error of an estimate by random probes, 0 when the value is exact.
    probes : int
        Number of probes, 0 when exact.
    """

    value: float
    error: float = 0.0
    probes: int = 0


def dense_asymmetry(matrices: Array) -> float:
    """The defect of one matrix ``(d, d)``, or of a stack ``(m, d, d)`` taken together; 0 when all are 0.

    Examples
    --------
    >>> dense_asymmetry(np.array([[1.0, 0.0], [0.0, 1.0]])), dense_asymmetry(np.array([[0.0, 1.0], [-1.0, 0.0]]))
    (0.0, inf)
    """
    top = float(np.abs(matrices).max(initial=0.0))
    if top == 0.0:
        return 0.0
    M = matrices / top  # squares of entries of any size stay representable
    other = np.swapaxes(M, -1, -2)
    return _ratio(float(np.sum((M - other) ** 2)), float(np.sum((M + other) ** 2)))


def operator_asymmetry(
    J: JacobianOperator, *, rng: np.random.Generator, probes: int = 16, dense_size: int = 1024
) -> Asymmetry:
    """The defect of a square operator: exact up to ``dense_size`` rows, else by Hutchinson's probes.

    With v of independent random signs, ``E |(J - J^T) v|^2 = |J - J^T|_F^2``, and likewise for the sum: one product
    with J and one with its transpose a probe. The defect is the square root of the ratio of the two means; its
    standard error comes from the spread of the probes (delta method).

    References
    ----------
    Hutchinson (1990), A stochastic estimator of the trace of the influence matrix.
    """
    size = J.shape[0]
    if size <= dense_size:
        return Asymmetry(dense_asymmetry(J.to_dense()))
    skew, even, logs = np.empty(probes), np.empty(probes), np.full(probes, -np.inf)
    for k in range(probes):
        v = 2.0 * rng.integers(0, 2, size=size) - 1.0
        forward, backward = J.matvec(v), J.rmatvec(v)
        top = max(float(np.abs(forward).max()), float(np.abs(backward).max()))
        if top > 0.0:
            forward, backward, logs[k] = forward / top, backward / top, np.log(top)
        skew[k], even[k] = np.sum((forward - backward) ** 2), np.sum((forward + backward) ** 2)
    if np.isneginf(logs).all():
        return Asymmetry(0.0, 0.0, probes)
    scale = np.exp(2.0 * (logs - logs.max()))
    return probed_asymmetry(skew * scale, even * scale)


def probed_asymmetry(skew: Array, even: Array) -> Asymmetry:
    """The defect from independent estimates of the two squared norms, with its standard error (delta method)."""
    value = _ratio(float(skew.mean()), float(even.mean()))
    if not 0.0 < value < np.inf:
        return Asymmetry(value, 0.0, len(skew))
    spread = float(np.std(skew - value**2 * even, ddof=1)) / np.sqrt(len(skew))
    return Asymmetry(value, float(spread / even.mean() / (2.0 * value)), len(skew))


def _ratio(skew: float, even: float) -> float:
    if skew == 0.0:
        return 0.0
    return float(np.sqrt(skew / even)) if even > 0.0 else float("inf")


_LEAST_SHARE = 1e-6
"""Blocks below this share of their row are not compared: they may be rounding, or have vanished beside the others."""


def mobility_defect(jacobian: Array, values: Array, *, one_sided: bool = False) -> float | None:
    r"""How far the field stays from ``M_i f_i = grad_i E``, for the best positive mobilities ``M_1, ..., M_n``.

    Suppose that ``M_i(X) f_i(X) = grad_{x_i} E(X)`` for some positive functions ``M_i`` of all tokens (weights
    included). Then ``D_{x_j}(M_i f_i) = M_i K_ij + f_i (D_{x_j} M_i)^T``, ``K_ij = D_{x_j} f_i``, is the transpose of
    the same with i and j exchanged. The unknown derivatives of M disappear orthogonally to the velocities: with
    the projections ``Pi_i`` along ``f_i`` and ``B_ij = Pi_i K_ij Pi_j``,

    .. math:: M_i B_{ij} = M_j B_{ji}^\top \quad \text{for all } i, j.

    That is necessary for a mobility of any kind, and it is checked at one configuration: ``B_ij`` and
    ``B_ji^T`` must be positive multiples of each other with ratios ``M_j / M_i`` that agree over all pairs. The
    logarithms of M are fitted to the ratios by least squares; each pair then contributes ``|M_i B_ij - M_j
    B_ji^T|`` and ``|M_i B_ij + M_j B_ji^T|``, scaled to a common size and weighted by what the pair means to its
    rows, and the defect is the ratio of the root mean squares. 0 when mobilities fit, 1 when one of the two
    blocks always vanishes (a mask).

    With huge logits ``M_j / M_i`` may exceed what float64 resolves, and ``B_ij`` vanishes beside its row where
    ``B_ji`` does not; such pairs decide nothing and are left out, unless ``one_sided``.

    Parameters
    ----------
    jacobian : ndarray (n, d, n, d)
        ``K``.
    values : ndarray (n, d)
        ``f``.
    one_sided : bool
        Count pairs of which only one block is there: blocks that vanish do so exactly (causal maps).

    Returns
    -------
    float or None
        None when the test says nothing: ``d = 1``, a single token, or no pair to compare. With ``d = 2`` and
        ``n <= 2`` it is (nearly) always passed.

    References
    ----------
    Our own argument, above (Frobenius integrability in the space of configurations).
    """
    n, d = values.shape
    if d == 1 or n == 1:
        return None
    norm = np.linalg.norm(values, axis=1, keepdims=True)
    unit = np.divide(values, norm, out=np.zeros_like(values), where=norm > 0.0)
    rows = np.abs(jacobian).reshape(n, -1).max(axis=1)
    B = jacobian / np.where(rows > 0.0, rows, 1.0)[:, None, None, None]  # M_i takes up the scale of row i
    B = B - unit[:, :, None, None] * np.einsum("ia,iajb->ijb", unit, B)[:, None]
    B = B - np.einsum("iajb,jb->iaj", B, unit)[..., None] * unit[None, None]
    B = B.swapaxes(1, 2)  # (i, j, d, d)
    size = np.linalg.norm(B, axis=(2, 3))
    size[size < _LEAST_SHARE] = 0.0  # rows have entries of size 1
    i, j = np.triu_indices(n, 1)
    a, b = size[i, j], size[j, i]
    keep = (a > 0.0) | (b > 0.0) if one_sided else (a > 0.0) & (b > 0.0)
    if not keep.any():
        return None
    i, j, a, b = i[keep], j[keep], a[keep], b[keep]
    first, second = B[i, j], np.swapaxes(B[j, i], 1, 2)
    both = (a > 0.0) & (b > 0.0)
    log_m = _fit(n, i[both], j[both], np.log(b[both] / a[both]), np.minimum(a, b)[both])
    # each pair at the size 1: p = M_i B_ij, q = M_j B_ji^T
    gap = np.zeros(len(i))
    gap[both] = log_m[i[both]] + np.log(a[both]) - log_m[j[both]] - np.log(b[both])
    p = first * (_inverse(a) * np.exp(np.minimum(gap, 0.0)))[:, None, None]
    q = second * (_inverse(b) * np.exp(-np.maximum(gap, 0.0)))[:, None, None]
    total = np.sum(p * p, axis=(1, 2)) + np.sum(q * q, axis=(1, 2))
    weight = np.maximum(a, b) ** 2 * _inverse(total)
    skew = float(np.sum(weight * np.sum((p - q) ** 2, axis=(1, 2))))
    even = float(np.sum(weight * np.sum((p + q) ** 2, axis=(1, 2))))
    own = B[np.arange(n), np.arange(n)]
    live = np.diagonal(size) > 0.0
    diagonal = dense_asymmetry(own[live] / np.diagonal(size)[live][:, None, None]) if live.any() else 0.0
    return max(_ratio(skew, even), diagonal)


def _inverse(x: Array) -> Array:
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > 0.0)


def _fit(n: int, i: NDArray[np.intp], j: NDArray[np.intp], ratios: Array, w: Array) -> Array:
    """``log M`` with ``log M_i - log M_j`` close to the ratios, weighted: a weighted graph Laplacian."""
    L = np.zeros((n, n))
    np.add.at(L, (i, j), -w)
    np.add.at(L, (j, i), -w)
    L[np.diag_indices(n)] = -L.sum(axis=1)
    r = np.zeros(n)
    np.add.at(r, i, w * ratios)
    np.add.at(r, j, -w * ratios)
    return np.asarray(np.linalg.lstsq(L, r, rcond=None)[0])
