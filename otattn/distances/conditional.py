"""The conditional Wasserstein distance of space-time measures: transport that never crosses time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from otattn import _validate as check
from otattn._linalg import Array
from otattn._tabular import Result
from otattn.distances.bures import bures_wasserstein
from otattn.distances.costs import (
    SIMPLEX_BYTES,
    check_budget,
    ground_cost,
    pair_distances,
    pairwise_distances,
    power_mean,
    powers,
)
from otattn.distances.masses import exact_masses
from otattn.distances.plan import solve, sparse_plan, status_of
from otattn.distances.transport import TransportResult, transport
from otattn.distances.wasserstein import wasserstein
from otattn.measures import DiscreteMeasure, GaussianMeasure, MeasureLike, SpaceTimeMeasure, as_spacetime

__all__ = [
    "ConditionalTransport",
    "check_kind",
    "conditional_transport",
    "conditional_wasserstein",
    "distance_of",
    "time_groups",
]

Index = NDArray[np.intp]
Method = Literal["exact", "penalized"]


@dataclass(frozen=True, eq=False)
class ConditionalTransport(Result):
    """Optimal transport inside each time slice.

    Attributes
    ----------
    value : float
        ``(sum_s masses_s values_s^p)^{1/p}``, the largest of ``values`` for ``p = inf``.
    times, masses : ndarray (T,)
        The common time marginal.
    values : ndarray (T,)
        ``W_p`` between the conditional measures.
    mu_atoms, nu_atoms : tuple of T index arrays
        The atoms of ``mu`` and ``nu`` in each slice.
    slices : tuple of T TransportResult
        Plan, potentials and interval of each slice, on its own atoms, with total mass 1.
    lower, upper : float
        ``lower <= value <= upper`` from the intervals of the slices.
    status : str
        "optimal", or "near-optimal" when the relative gap exceeds 1e-9.
    p, time_tol, mu, nu
        The problem.
    """

    value: float
    times: Array
    masses: Array
    values: Array
    mu_atoms: tuple[Index, ...]
    nu_atoms: tuple[Index, ...]
    slices: tuple[TransportResult, ...]
    lower: float
    upper: float
    status: str
    p: float
    time_tol: float
    mu: SpaceTimeMeasure
    nu: SpaceTimeMeasure

    _columns = ("times", "masses", "values")

    @property
    def plans(self) -> tuple[csr_array, ...]:
        """One plan a time, each of mass 1."""
        return tuple(part.plan for part in self.slices)

    @property
    def plan(self) -> csr_array:
        """The whole plan ``(n, m)``, whose marginals are the weights of the two measures."""
        parts = [part.plan.tocoo() for part in self.slices]
        rows = np.concatenate([at[c.row] for at, c in zip(self.mu_atoms, parts, strict=True)])
        cols = np.concatenate([at[c.col] for at, c in zip(self.nu_atoms, parts, strict=True)])
        mass = np.concatenate([w * c.data for w, c in zip(self.masses, parts, strict=True)])
        return sparse_plan(rows, cols, mass, (self.mu.n, self.nu.n))

    def verify(self) -> bool:
        """Recompute each slice from the measures, its plan and its potentials, and the value from them."""
        slices = list(_slices(self.mu, self.nu, self.time_tol))
        if len(slices) != len(self.slices):
            return False
        for (_, mass, rows, cols), known, part in zip(slices, self.masses, self.slices, strict=True):
            inside = _condition(self.mu, rows), _condition(self.nu, cols)
            same = all(
                np.array_equal(a.points, b.points) and np.array_equal(a.weights, b.weights)
                for a, b in zip(inside, (part.mu, part.nu), strict=True)
            )
            if not (same and mass == known and part.p == self.p and part.verify()):
                return False
        new = _combined(self.masses, self.slices, self.p)
        return np.array_equal(self.values, [part.value for part in self.slices]) and new == (
            self.value,
            self.lower,
            self.upper,
        )


def conditional_wasserstein(
    mu: MeasureLike,
    nu: MeasureLike,
    *,
    p: float = 2,
    time_tol: float = 1e-12,
    method: Method = "exact",
    penalty: float | None = None,
) -> float:
    """Conditional Wasserstein distance, ``(int W_p(mu^s, nu^s)^p dtheta(s))^{1/p}``.

    For ``p = inf`` it is the supremum over the times. ``mu^s`` and ``nu^s`` are the conditional measures at
    time s and theta is the time marginal, which the two measures must share. On two sequences with one token
    a time it is ``(1/n sum_i |x_i - y_i|^p)^{1/p}``.

    Parameters
    ----------
    mu, nu : SpaceTimeMeasure or array_like (n, d)
        An array is the sequence of its rows, token i of n at time i/n.
    p : float
        Order, ``1 <= p <= inf``.
    time_tol : float
        Times this close are one time.
    method : {"exact", "penalized"}
        "penalized" is transport in space-time with cost ``|x - y|^p + penalty |s - t|^p``: a lower bound that
        increases to the exact value as the penalty grows, and that needs no common time marginal (p finite).
    penalty : float
        For ``method="penalized"``.

    Raises
    ------
    ValueError
        The time marginals differ; the message gives the times and masses that do not match.
    OverflowError, MemoryBudgetError, ConvergenceError
        As for `wasserstein`.

    Examples
    --------
    >>> mu = SpaceTimeMeasure([0.0, 1.0], [[0.0], [1.0]])
    >>> nu = SpaceTimeMeasure([0.0, 1.0], [[1.0], [0.0]])
    >>> conditional_wasserstein(mu, nu, p=1)
    1.0

    References
    ----------
    Hosseini, Hsu and Taghvaei (2023), Conditional optimal transport on function spaces; Castin, Ablin,
    Carrillo and Peyré (2025), section on masked attention.
    """
    p, mu, nu = _spacetime_pair(mu, nu, p)
    check.positive(time_tol, "time_tol", zero=True)
    if method == "penalized":
        return _penalized(mu, nu, p, penalty)
    if method != "exact":
        raise ValueError(f"method must be 'exact' or 'penalized', received {method!r}.")
    if penalty is not None:
        raise ValueError("penalty belongs to method='penalized', received one with method='exact'; drop one of them.")
    single = _one_atom_each(mu, nu, time_tol)
    if single is not None:
        i, j, theta = single
        value = power_mean(pair_distances(mu.points[i], nu.points[j]), theta, p)
        if not np.isfinite(value):
            raise OverflowError("distances must fit in float64, received points that are too far apart; rescale them.")
        return value
    values, masses = [], []
    for _, mass, rows, cols in _slices(mu, nu, time_tol):
        values.append(wasserstein(_condition(mu, rows), _condition(nu, cols), p=p))
        masses.append(mass)
    return power_mean(np.array(values), np.array(masses), p)


def conditional_transport(
    mu: MeasureLike, nu: MeasureLike, *, p: float = 2, time_tol: float = 1e-12
) -> ConditionalTransport:
    """The conditional distance with its plan, potentials and interval in each time slice.

    Parameters, errors and references as for `conditional_wasserstein`.

    Examples
    --------
    >>> result = conditional_transport([[0.0], [1.0]], [[1.0], [1.0]], p=1)
    >>> result.value, result.values, result.verify()
    (0.5, array([1., 0.]), True)
    """
    p, mu, nu = _spacetime_pair(mu, nu, p)
    check.positive(time_tol, "time_tol", zero=True)
    times, masses, rows, cols = zip(*_slices(mu, nu, time_tol), strict=True)
    slices = tuple(transport(_condition(mu, i), _condition(nu, j), p=p) for i, j in zip(rows, cols, strict=True))
    theta = np.array(masses)
    value, lower, upper = _combined(theta, slices, p)
    values = check.frozen(np.array([part.value for part in slices]))
    return ConditionalTransport(
        value,
        check.frozen(np.array(times)),
        check.frozen(theta),
        values,
        rows,
        cols,
        slices,
        lower,
        upper,
        status_of((upper - lower) / upper if upper > 0.0 else 0.0),
        p,
        float(time_tol),
        mu,
        nu,
    )


def _spacetime_pair(mu: Any, nu: Any, p: Any) -> tuple[float, SpaceTimeMeasure, SpaceTimeMeasure]:
    p, mu, nu = check.check_order(p), as_spacetime(mu, "mu"), as_spacetime(nu, "nu")
    if mu.dim != nu.dim:
        raise ValueError(
            f"mu and nu must live in one space, received dimensions {mu.dim} and {nu.dim}; check the last axis."
        )
    return p, mu, nu


def _one_atom_each(mu: SpaceTimeMeasure, nu: SpaceTimeMeasure, tol: float) -> tuple[Index, Index, Array] | None:
    """Matching orders and masses when every time holds one atom of each measure; None otherwise."""
    i, j = (np.flatnonzero(m.weights)[np.argsort(m.times[m.weights > 0], kind="stable")] for m in (mu, nu))
    if len(i) != len(j):
        return None
    s, t, a, b = mu.times[i], nu.times[j], mu.weights[i], nu.weights[j]
    apart = len(s) < 2 or min(float(np.diff(s).min()), float(np.diff(t).min())) > 2 * tol
    if not apart or (np.abs(s - t) > tol).any() or (np.abs(a - b) > check.MASS_TOL * np.maximum(a, b)).any():
        return None
    return i, j, 0.5 * (a + b)


def _slices(mu: SpaceTimeMeasure, nu: SpaceTimeMeasure, tol: float) -> Iterator[tuple[float, float, Index, Index]]:
    """``(time, mass, atoms of mu, atoms of nu)`` for each common time, atoms of weight zero left out."""
    live = [np.flatnonzero(m.weights) for m in (mu, nu)]
    times = np.concatenate([mu.times[live[0]], nu.times[live[1]]])
    weights = np.concatenate([mu.weights[live[0]], nu.weights[live[1]]])
    groups = time_groups(times, tol)
    n = len(live[0])
    masses = np.array([[weights[k[k < n]].sum(), weights[k[k >= n]].sum()] for k in groups])
    differ = np.abs(masses[:, 0] - masses[:, 1]) > check.MASS_TOL * masses.max(axis=1)
    if differ.any():
        lines = ", ".join(
            f"time {times[groups[k][0]]:.12g} has mass {masses[k, 0]:.9g} in mu and {masses[k, 1]:.9g} in nu"
            for k in np.flatnonzero(differ)[:5]
        )
        more = f", and {differ.sum() - 5} more times" if differ.sum() > 5 else ""
        raise ValueError(
            f"mu and nu must have the same time marginal, but {lines}{more}; "
            "give both the same times and masses, raise time_tol, or use method='penalized'."
        )
    for k, pair in zip(groups, masses, strict=True):
        yield float(times[k[0]]), float(pair.mean()), live[0][k[k < n]], live[1][k[k >= n] - n]


def time_groups(times: Array, tol: float) -> list[Index]:
    """Indices of times that are one (within ``tol`` of the one before), in the order of time."""
    order = np.argsort(times, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(times[order]) > tol) + 1)


def _condition(m: SpaceTimeMeasure, atoms: Index) -> DiscreteMeasure:
    return DiscreteMeasure.normalized(m.points[atoms], m.weights[atoms])


def _combined(masses: Array, slices: tuple[TransportResult, ...], p: float) -> tuple[float, float, float]:
    ends = np.array([[part.value, part.lower, part.upper] for part in slices])
    value, lower, upper = (power_mean(column, masses, p) for column in ends.T)
    rounding = 4e-16 * (8.0 + math.log2(len(masses)))
    return value, lower * (1 - rounding), upper * (1 + rounding)


def _penalized(mu: SpaceTimeMeasure, nu: SpaceTimeMeasure, p: float, penalty: float | None) -> float:
    if penalty is None or np.isinf(p):
        raise ValueError(
            "method='penalized' needs a positive penalty and a finite p, received "
            f"penalty={penalty!r}, p={p:g}; give both, or use method='exact'."
        )
    strength = check.positive(penalty, "penalty")
    mu, nu = mu.support(), nu.support()
    check_budget(mu.n, nu.n, SIMPLEX_BYTES)
    D = pairwise_distances(mu.points, nu.points)
    with np.errstate(over="ignore", under="ignore"):
        T = strength ** (1.0 / p) * np.abs(mu.times[:, None] - nu.times)
        # (D^p + T^p)^{1/p}, entry by entry at its own scale: a distance again, whose powers are the costs
        far, near = np.maximum(D, T), np.minimum(D, T)
        joint = far * (1.0 + powers(near / np.where(far > 0.0, far, 1.0), p)) ** (1.0 / p)
    if not np.isfinite(joint).all():
        raise OverflowError("the penalized costs must fit in float64; rescale the points, or lower the penalty.")
    A, B = exact_masses(mu.weights, nu.weights)
    flow = solve(ground_cost(joint.copy(), p, A, B)[0], A, B)
    return power_mean(joint[flow.rows, flow.cols], flow.mass, p)


def check_kind(mu: Any, nu: Any, p: float, names: tuple[str, str] = ("mu", "nu")) -> None:
    """Refuse two measures, or an order, between which no distance is defined."""
    (first, second), both = names, (mu, nu)
    gaussian = [isinstance(m, GaussianMeasure) for m in both]
    if any(gaussian) and not all(gaussian):
        raise TypeError(
            f"{first} and {second} must be of one kind, received a Gaussian and another measure; sample the Gaussian."
        )
    if all(gaussian) and p != 2.0:
        raise ValueError(
            f"p must be 2 between Gaussian measures, received {p:g}; only W_2 has a closed form, sample them for "
            "another order."
        )
    if len({isinstance(m, SpaceTimeMeasure) for m in both}) > 1:
        raise TypeError(
            f"{first} and {second} must be of one kind, received a space-time measure and one without times; give both "
            "times."
        )


def distance_of(mu: DiscreteMeasure | SpaceTimeMeasure | GaussianMeasure, nu: Any, p: float) -> float:
    """``W_p`` between two measures of one kind: Gaussians (p = 2), atoms with times, or atoms."""
    if isinstance(mu, GaussianMeasure):
        return bures_wasserstein(mu, nu)
    distance = conditional_wasserstein if isinstance(mu, SpaceTimeMeasure) else wasserstein
    return distance(mu, nu, p=p)
