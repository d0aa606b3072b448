"""Many small transport problems of one shape at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

from otattn import _validate as check
from otattn._linalg import Array
from otattn.distances.costs import pair_distances, powers
from otattn.distances.ground import DECADES
from otattn.distances.wasserstein import wasserstein

__all__ = ["wasserstein_batch"]

_BLOCK = 1 << 21
"""Entries of the cost matrices that are formed at once (16 MB)."""
_ORDINARY = (1e-140, 1e140)
"""Largest distances whose squares and small powers stay in float64; anything else goes one by one."""


def wasserstein_batch(X: ArrayLike, Y: ArrayLike, *, p: float = 2) -> Array:
    r"""``W_p`` between the uniform measures on the rows of ``X[b]`` and of ``Y[b]``, for every b.

    .. math:: W_p(X_b, Y_b) = \min_\pi \Bigl(\frac1n \sum_i |X_{b,i} - Y_{b,\pi(i)}|^p\Bigr)^{1/p}

    An exact assignment each (sorted on the line), with the costs of a block of pairs formed together: near the floor of
    scipy's ``linear_sum_assignment``. Values agree with :func:`wasserstein` to rounding.

    Parameters
    ----------
    X, Y : array_like (B, n, d)
    p : float
        Order, ``1 <= p <= inf``. Orders above 8, and inf, are solved pair by pair.

    Returns
    -------
    ndarray (B,)
        Exactly 0.0 where the rows of ``Y[b]`` are those of ``X[b]`` in any order.

    Raises
    ------
    ValueError
        Shapes that differ or are not ``(B, n, d)``, values that are not finite, ``p < 1``.

    Examples
    --------
    >>> wasserstein_batch([[[0.0], [1.0]], [[0.0], [0.0]]], [[[1.0], [0.0]], [[3.0], [3.0]]], p=1)
    array([0., 3.])

    References
    ----------
    Peyré and Cuturi (2019), Computational Optimal Transport, section 2.3 (Birkhoff: extreme plans are permutations).
    """
    order = check.check_order(p)
    x, y = check.as_float_array(X, "X", ndim=3), check.as_float_array(Y, "Y", ndim=3)
    if x.shape != y.shape:
        raise ValueError(f"X and Y must have one shape (B, n, d), received {x.shape} and {y.shape}.")
    B, n, d = x.shape
    if B == 0 or n == 0 or d == 0:
        raise ValueError(f"X and Y must hold at least one pair, point and coordinate, received shape {x.shape}.")
    out = np.empty(B)
    block = max(1, _BLOCK // (n * n * d))
    for k in range(0, B, block):
        part = slice(k, min(B, k + block))
        out[part] = _block(x[part], y[part], order)
    return out


def _block(x: Array, y: Array, p: float) -> Array:
    B, n, d = x.shape
    if d == 1 and n > 1:
        x, y = np.sort(x, axis=1), np.sort(y, axis=1)
    if d == 1 or n == 1:
        matched = pair_distances(x.reshape(-1, d), y.reshape(-1, d)).reshape(B, n)
        ordinary = np.asarray(np.isfinite(matched).all(axis=1))
    else:
        # differences first: no expanded squares
        squares = np.zeros((B, n, n))
        with np.errstate(over="ignore", under="ignore"):
            for i in range(d):
                step = x[:, :, None, i] - y[:, None, :, i]
                squares += step * step
        ordinary, size = _ordinary(squares, p)
        cost = squares
        if p != 2.0:
            fit = np.where(ordinary[:, None, None], squares, 0.0)
            cost = powers(np.sqrt(fit / np.where(size > 0.0, size, 1.0)[:, None, None]), p)
        partner = np.zeros((B, n), dtype=np.intp)
        for b in np.flatnonzero(ordinary):
            partner[b] = linear_sum_assignment(cost[b])[1]
        matched = np.sqrt(np.take_along_axis(squares, partner[:, :, None], axis=2)[:, :, 0])
    out = _means(np.where(ordinary[:, None], matched, 0.0), p)
    # squares that vanish beside the others would be lost here
    small = ordinary & (out < _ORDINARY[0])
    for b in np.flatnonzero(~ordinary | small):
        if not (ordinary[b] and np.array_equal(x[b], y[b])):
            out[b] = wasserstein(x[b], y[b], p=p)
    return out


def _ordinary(squares: Array, p: float) -> tuple[NDArray[np.bool_], Array]:
    """Where all squared distances of a problem, and their powers over the largest, stay in float64; the largest."""
    flat = squares.reshape(len(squares), -1)
    size = flat.max(axis=1)
    least = np.min(flat, axis=1, initial=np.inf, where=flat > 0.0)
    fits = (size > _ORDINARY[0] ** 2) & (size < _ORDINARY[1] ** 2) & (p <= 8.0)
    spread = np.log10(np.where(fits, size, 1.0)) - np.log10(np.where(fits, least, 1.0))
    return np.asarray((size == 0.0) | (fits & (min(max(p, 2.0), 8.0) / 2.0 * spread <= DECADES))), size


def _means(matched: Array, p: float) -> Array:
    """``(mean_k matched_bk^p)^{1/p}``, scaled by the largest distance first."""
    top = matched.max(axis=1)
    if np.isinf(p):
        return np.asarray(top)
    ratio = matched / np.where(top > 0.0, top, 1.0)[:, None]
    return np.asarray(top * powers(ratio, p).mean(axis=1) ** (1.0 / p))
