"""The Wasserstein distance between discrete measures: of one pair, or of many small pairs of one shape."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

from otattn import _validate as check
from otattn._linalg import Array
from otattn.distances.bottleneck import bottleneck
from otattn.distances.bures import bures_wasserstein
from otattn.distances.costs import (
    ASSIGNMENT_BYTES,
    DECADES,
    SIMPLEX_BYTES,
    check_budget,
    ground_cost,
    pair_distances,
    pairwise_distances,
    power_mean,
    powers,
)
from otattn.distances.line import monotone_plan
from otattn.distances.masses import exact_masses, merge_atoms, same_measure
from otattn.distances.plan import solve
from otattn.measures import AnyMeasure, DiscreteMeasure, GaussianMeasure, as_discrete

__all__ = ["discrete_pair", "wasserstein", "wasserstein_batch"]


def wasserstein(mu: AnyMeasure, nu: AnyMeasure, *, p: float = 2) -> float:
    """Wasserstein distance of order p, ``W_p = (min_P sum_ij P_ij |x_i - y_j|^p)^{1/p}``, by exact transport.

    The ground distance is Euclidean whatever ``p``, and ``W_inf`` is the least threshold below which all the
    mass can be moved. On the line the monotone coupling is optimal; uniform measures of equally many atoms
    are an assignment; anything else is POT's network simplex, certified by its dual.

    Parameters
    ----------
    mu, nu : DiscreteMeasure or array_like (n, d), (m, d)
        An array is the uniform measure on its rows. Two Gaussian measures have the closed form of
        :func:`~otattn.distances.bures_wasserstein`.
    p : float
        Order, ``1 <= p <= inf``; 2 between Gaussian measures.

    Returns
    -------
    float
        The distance (never its power), in the units of the points. Exactly 0.0 for equal measures, whatever
        the order of their atoms, duplicates and atoms of weight zero. Weights count as known to 4 units in
        the last place.

    Raises
    ------
    ValueError
        Invalid measures, dimensions that differ, ``p < 1``.
    OverflowError
        Points are so far apart that their distance is not representable in float64.
    MemoryBudgetError
        The exact solver would take more than 4 GiB; raised before anything is allocated.
    ConvergenceError
        The simplex stopped early, or its answer could not be certified.

    Examples
    --------
    >>> wasserstein([[0.0], [3.0]], [[0.0]], p=1)
    1.5
    >>> wasserstein([[0.0, 0.0]], [[3.0, 4.0]])
    5.0

    References
    ----------
    Peyré and Cuturi (2019), Computational Optimal Transport, sections 2.2 to 2.6.
    """
    if isinstance(mu, GaussianMeasure) and isinstance(nu, GaussianMeasure):
        if check.check_order(p) != 2:
            raise ValueError(
                f"p must be 2 between Gaussian measures, received {p}; for other orders draw samples of both."
            )
        return bures_wasserstein(mu, nu)
    p, mu, nu = discrete_pair(mu, nu, p)
    if mu.n == nu.n and mu.is_uniform and nu.is_uniform:
        value = _matched(mu.points, nu.points, p)
    else:
        A, B = exact_masses(mu.weights, nu.weights)
        (x, A), (y, B) = merge_atoms(mu.points, A), merge_atoms(nu.points, B)
        if same_measure(x, A, y, B):
            return 0.0
        if len(x) == len(y) and min(A) == max(A) and min(B) == max(B):
            value = _matched(x, y, p)
        else:
            value = _weighted(x, A, y, B, p)
    if not np.isfinite(value):
        raise OverflowError(
            f"the distance must fit in float64, received points of distance {value}; rescale the points."
        )
    return value


def discrete_pair(mu: AnyMeasure, nu: AnyMeasure, p: Any) -> tuple[float, DiscreteMeasure, DiscreteMeasure]:
    """Order and measures, checked."""
    p, mu, nu = check.check_order(p), as_discrete(mu, "mu"), as_discrete(nu, "nu")
    if mu.dim != nu.dim:
        raise ValueError(
            f"mu and nu must live in one space, received dimensions {mu.dim} and {nu.dim}; check the last axis."
        )
    return p, mu, nu


def _matched(x: Array, y: Array, p: float) -> float:
    """Uniform weights on equally many atoms: an extreme plan is a permutation (Birkhoff)."""
    n = len(x)
    if n == 1 or x.shape[1] == 1:
        if n > 1:
            x, y = np.sort(x, axis=0), np.sort(y, axis=0)
        return power_mean(pair_distances(x, y), None, p)
    check_budget(n, n, ASSIGNMENT_BYTES if p <= 8.0 else SIMPLEX_BYTES)  # large p may need the bottleneck
    D = pairwise_distances(x, y)
    if np.isinf(p):
        return bottleneck(D, [1] * n, [1] * n).value
    # shortest augmenting paths keep potentials of the size of the costs paid so far: close pairs keep their
    # digits
    _, partner = linear_sum_assignment(ground_cost(D, p, [1] * n, [1] * n)[0])
    return power_mean(pair_distances(x, y[partner]), None, p)


def _weighted(x: Array, A: list[int], y: Array, B: list[int], p: float) -> float:
    if len(x) == 1 or len(y) == 1:
        rows, cols = np.divmod(np.arange(len(x) * len(y)), len(y))
        total = sum(A)
        mass = np.array([u * v / (total * total) for u in A for v in B])
    elif x.shape[1] == 1:
        rows, cols, mass = monotone_plan(x[:, 0], A, y[:, 0], B)
    else:
        check_budget(len(x), len(y), SIMPLEX_BYTES)
        (x, A), (y, B) = _interleaved(x, A), _interleaved(y, B)
        D = pairwise_distances(x, y)
        if np.isinf(p):
            return bottleneck(D, A, B).value
        flow = solve(ground_cost(D, p, A, B)[0], A, B)
        rows, cols, mass = flow.rows, flow.cols, flow.mass
    return power_mean(pair_distances(x[rows], y[cols]), mass, p)


def _interleaved(x: Array, A: list[int]) -> tuple[Array, list[int]]:
    """Sorted atoms in another order: the simplex looks at a block of arcs at a time, and best where they differ."""
    order = np.argsort(np.arange(len(x)) % _STRIDE, kind="stable")
    return x[order], [A[k] for k in order.tolist()]


_STRIDE = 16
"""Neighbours are this many apart from now on: a tenth fewer pivots than in sorted order, as few as in random order."""
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
