"""The Wasserstein distance between discrete measures."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from otattn import _validate as check
from otattn._linalg import Array
from otattn.distances.bottleneck import bottleneck
from otattn.distances.costs import (
    ASSIGNMENT_BYTES,
    SIMPLEX_BYTES,
    check_budget,
    pair_distances,
    pairwise_distances,
    power_mean,
)
from otattn.distances.ground import ground_cost
from otattn.distances.line import monotone_plan
from otattn.distances.masses import exact_masses, merge_atoms, same_measure
from otattn.distances.plan import solve
from otattn.measures import DiscreteMeasure, MeasureLike, as_discrete

__all__ = ["discrete_pair", "wasserstein"]

VANISHING = 1e-100


def wasserstein(mu: MeasureLike, nu: MeasureLike, *, p: float = 2) -> float:
    """Wasserstein distance of order p, ``W_p = (min_P sum_ij P_ij |x_i - y_j|^p)^{1/p}``, by exact transport.

    The ground distance is Euclidean whatever ``p``, and ``W_inf`` is the least threshold below which all the
    mass can be moved. On the line the monotone coupling is optimal; uniform measures of equally many atoms
    are an assignment; anything else is POT's network simplex, certified by its dual.

    Parameters
    ----------
    mu, nu : DiscreteMeasure or array_like (n, d), (m, d)
        An array is the uniform measure on its rows.
    p : float
        Order, ``1 <= p <= inf``.

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
    p, mu, nu = discrete_pair(mu, nu, p)
    if mu.n == nu.n and mu.is_uniform and nu.is_uniform:
        value = _matched(mu.points, nu.points, p)
    else:
        x, A, y, B = _merged(mu, nu)
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


def discrete_pair(mu: MeasureLike, nu: MeasureLike, p: Any) -> tuple[float, DiscreteMeasure, DiscreteMeasure]:
    """Order and measures, checked."""
    p, mu, nu = check.check_order(p), as_discrete(mu, "mu"), as_discrete(nu, "nu")
    if mu.dim != nu.dim:
        raise ValueError(
            f"mu and nu must live in one space, received dimensions {mu.dim} and {nu.dim}; check the last axis."
        )
    return p, mu, nu


def _merged(mu: DiscreteMeasure, nu: DiscreteMeasure) -> tuple[Array, list[int], Array, list[int]]:
    A, B = exact_masses(mu.weights, nu.weights)
    return *merge_atoms(mu.points, A), *merge_atoms(nu.points, B)


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
    rows, partner = linear_sum_assignment(ground_cost(D, p, [1] * n, [1] * n)[0])
    value = power_mean(D[rows, partner], None, p)
    # squares of such differences may have vanished beside the others
    return value if value > VANISHING else power_mean(pair_distances(x, y[partner]), None, p)


def _weighted(x: Array, A: list[int], y: Array, B: list[int], p: float) -> float:
    if len(x) == 1 or len(y) == 1:
        rows, cols = np.divmod(np.arange(len(x) * len(y)), len(y))
        total = sum(A)
        mass = np.array([u * v / (total * total) for u in A for v in B])
    elif x.shape[1] == 1:
        rows, cols, mass = monotone_plan(x[:, 0], A, y[:, 0], B)
    else:
        check_budget(len(x), len(y), SIMPLEX_BYTES)
        D = pairwise_distances(x, y)
        if np.isinf(p):
            return bottleneck(D, A, B).value
        flow = solve(ground_cost(D, p, A, B)[0], A, B)
        rows, cols, mass = flow.rows, flow.cols, flow.mass
    return power_mean(pair_distances(x[rows], y[cols]), mass, p)
