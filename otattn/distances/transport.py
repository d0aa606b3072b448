"""Optimal transport between discrete measures, with its plan, its potentials and a certified interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from otattn import _validate as check
from otattn._linalg import EPS, Array
from otattn._tabular import Result
from otattn.distances.bottleneck import bottleneck, witnessed_threshold
from otattn.distances.costs import (
    SIMPLEX_BYTES,
    blas_units,
    check_budget,
    ground_cost,
    pair_distances,
    pairwise_distances,
    power_mean,
    relative_rounding,
    scaled_cost,
)
from otattn.distances.duality import support_slack
from otattn.distances.line import (
    Staircase,
    by_sorting,
    is_monotone,
    line_potentials,
    line_threshold,
    monotone_plan,
    tight,
)
from otattn.distances.masses import exact_masses
from otattn.distances.plan import (
    extend_potentials,
    feasible,
    marginals_agree,
    solve,
    sparse_plan,
    status_of,
    support,
)
from otattn.distances.wasserstein import discrete_pair
from otattn.measures import DiscreteMeasure, MeasureLike

__all__ = ["TransportResult", "transport"]


Solved = tuple[csr_array, Array, Array, float, tuple[float, float, float]]
"""Plan, potentials and their scale, and ``(value, lower, upper)``."""


@dataclass(frozen=True, eq=False)
class TransportResult(Result):
    """An optimal plan between two measures and the proof of how optimal it is.

    Attributes
    ----------
    value : float
        ``W_p(mu, nu)``, the cost of ``plan``.
    plan : scipy.sparse.csr_array (n, m)
        Its marginals are the weights, to a few units in their last place.
    potentials : tuple of ndarray (n,), (m,)
        For finite ``p``: ``f_i + g_j <= (|x_i - y_j| / scale)^p`` for all atoms, those of weight zero
        included. For ``p = inf``: a plan must use a pair with ``f_i + g_j > 0``, and none of them is closer
        than ``lower``. Between many atoms on the line, see Notes of `transport`.
    scale : float
        Unit of the potentials, 1 unless the powers would leave the range of float64.
    lower, upper : float
        ``lower <= W_p <= upper`` for the marginals of ``plan``, rounded outward.
    gap : float
        ``(upper - lower) / upper``, 0 when ``upper`` is 0.
    status : str
        "optimal", or "near-optimal" when the gap exceeds 1e-9 (far beyond that there is no result).
    p, mu, nu
        The problem.
    """

    value: float
    plan: csr_array
    potentials: tuple[Array, Array]
    scale: float
    lower: float
    upper: float
    gap: float
    status: str
    p: float
    mu: DiscreteMeasure
    nu: DiscreteMeasure

    def verify(self) -> bool:
        """Recompute marginals, dual feasibility and the interval from the plan and the potentials alone.

        False as soon as anything disagrees: a plan with other marginals, potentials that are infeasible, a
        value or an interval that they do not give. Costs the ``(n, m)`` matrix of distances, on the line a sort.
        """
        f, g = self.potentials
        if not marginals_agree(self.plan, self.mu.weights, self.nu.weights):
            return False
        if by_sorting(self.mu, self.nu):
            return self._line_witness(f, g) and self._agrees(_line_interval(self.mu, self.nu, self.p, self.plan))
        D = pairwise_distances(self.mu.points, self.nu.points)
        if not np.isinf(self.p):
            D = scaled_cost(D, self.p, self.scale)
            if not feasible(D, f, g, self.p * blas_units(self.mu.dim)):
                return False
        elif f.shape != D.shape[:1] or g.shape != D.shape[1:] or not np.isfinite(np.r_[f, g]).all():
            return False
        return self._agrees(_interval(self.mu, self.nu, self.p, self.plan, f, g, D))

    def _line_witness(self, f: Array, g: Array) -> bool:
        """On the line: potentials that equal the cost on the staircase, for p = inf those that the plan gives."""
        if np.isinf(self.p):
            new = line_threshold(self.mu, self.nu, *support(self.plan)[:2])
            return all(np.array_equal(a, b) for a, b in zip((f, g), new, strict=True))
        return tight(self.mu, self.nu, self.p, self.scale, f, g)

    def _agrees(self, new: tuple[float, float, float]) -> bool:
        """The stored value and interval against recomputed ones."""
        stored, units = (self.value, self.lower, self.upper), blas_units(self.mu.dim)
        return (
            self.lower <= self.value <= self.upper
            and all(abs(a - b) <= (8 + units) * EPS * new[0] for a, b in zip(stored, new, strict=True))
            and abs(self.gap - _relative_gap(*new[1:])) <= (16 + units) * EPS
        )

    def __repr__(self) -> str:
        return f"TransportResult(W_{self.p:g}={self.value:.9g}, gap={self.gap:.1e}, {self.status})"


def transport(mu: MeasureLike, nu: MeasureLike, *, p: float = 2) -> TransportResult:
    """Optimal transport with a certificate: plan, potentials and ``lower <= W_p <= upper``.

    ``lower`` is the dual value of potentials that are feasible for every pair of atoms (c-transforms rounded
    down) and ``upper`` the cost of a plan whose flows are computed again without rounding; for ``p = inf``
    the lower bound is a set of atoms whose mass has no room among the atoms that are closer. Large problems on the
    line are solved and certified by sorting, in memory of the size of the atoms.

    Parameters
    ----------
    mu, nu : DiscreteMeasure or array_like (n, d), (m, d)
    p : float
        Order, ``1 <= p <= inf``.

    Raises
    ------
    ValueError, OverflowError, MemoryBudgetError, ConvergenceError
        As for `wasserstein`.

    Examples
    --------
    >>> result = transport([[0.0], [3.0]], [[0.0]], p=1)
    >>> result.value, result.plan.toarray().tolist(), result.verify()
    (1.5, [[0.5], [0.5]], True)

    Notes
    -----
    On the line, beyond 2^16 pairs of atoms, no pair is looked at that the plan does not use: a plan of monotone support
    is optimal between its marginals for every ``p``, so ``lower`` is its cost less rounding, and the potentials equal the
    cost along the staircase of sorted atoms, which makes them feasible (and optimal) up to rounding (`line`).

    References
    ----------
    Peyré and Cuturi (2019), Computational Optimal Transport, section 2.5; Santambrogio (2015), Optimal Transport for
    Applied Mathematicians, theorem 2.9 (the line); Burkard, Dell'Amico and Martello
    (2009), Assignment Problems, section 6.2 (bottleneck).
    """
    p, mu, nu = discrete_pair(mu, nu, p)
    solved = _on_the_line if by_sorting(mu, nu) else _on_all_pairs
    plan, f, g, scale, (value, lower, upper) = solved(mu, nu, p)
    gap = _relative_gap(lower, upper)
    return TransportResult(
        value, plan, (check.frozen(f), check.frozen(g)), scale, lower, upper, gap, status_of(gap), p, mu, nu
    )


def _on_all_pairs(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float) -> Solved:
    """By the simplex, certified on every pair of atoms."""
    check_budget(mu.n, nu.n, SIMPLEX_BYTES)
    rows, cols = np.flatnonzero(mu.weights), np.flatnonzero(nu.weights)
    A, B = exact_masses(mu.weights[rows], nu.weights[cols])
    D = pairwise_distances(mu.points[rows], nu.points[cols])
    scale = 1.0
    f, g = np.zeros(mu.n), np.zeros(nu.n)
    if np.isinf(p):
        found = bottleneck(D, A, B)
        i, j, mass = found.rows, found.cols, found.mass
        f[rows], g[cols] = found.f, found.g
        # atoms of weight zero must charge no pair
        f[mu.weights == 0.0] = g[nu.weights == 0.0] = -1.0 - max(found.f.max(), found.g.max())
        C = pairwise_distances(mu.points, nu.points)
    else:
        C, scale = ground_cost(D, p, A, B)
        flow = solve(C, A, B)
        i, j, mass, f, g = flow.rows, flow.cols, flow.mass, flow.f, flow.g
        if len(rows) < mu.n or len(cols) < nu.n:
            C = scaled_cost(pairwise_distances(mu.points, nu.points), p, scale)
            f, g = extend_potentials(C, rows, f)
    plan = sparse_plan(rows[i], cols[j], mass, (mu.n, nu.n))
    return plan, f, g, scale, _interval(mu, nu, p, plan, f, g, C)


def _on_the_line(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float) -> Solved:
    """The monotone plan with its potentials; nothing of the size ``n m`` is formed."""
    rows, cols = np.flatnonzero(mu.weights), np.flatnonzero(nu.weights)
    A, B = exact_masses(mu.weights[rows], nu.weights[cols])
    i, j, mass = monotone_plan(mu.points[rows, 0], A, nu.points[cols, 0], B)
    if np.isinf(p):
        (f, g), scale = line_threshold(mu, nu, rows[i], cols[j]), 1.0
    else:
        f, g, scale = line_potentials(mu, nu, p, Staircase.of(mu, nu))
    plan = sparse_plan(rows[i], cols[j], mass, (mu.n, nu.n))
    ends = _line_interval(mu, nu, p, plan)
    if not np.isfinite(ends[0]):
        raise OverflowError("distances must fit in float64, received points that are too far apart; rescale them.")
    return plan, f, g, scale, ends


def _line_interval(mu: DiscreteMeasure, nu: DiscreteMeasure, p: float, plan: csr_array) -> tuple[float, float, float]:
    """``(value, lower, upper)`` on the line: a monotone plan is optimal, so only rounding is between them."""
    rows, cols, mass = support(plan)
    value = power_mean(pair_distances(mu.points[rows], nu.points[cols]), mass, p)
    if value == 0.0:
        return 0.0, 0.0, 0.0
    rounding = relative_rounding(1, p, len(mass))
    lower = value * (1.0 - rounding) if is_monotone(mu, nu, rows, cols) else 0.0
    return value, lower, value * (1.0 + rounding)


def _relative_gap(lower: float, upper: float) -> float:
    return (upper - lower) / upper if upper > 0.0 else 0.0


def _interval(
    mu: DiscreteMeasure, nu: DiscreteMeasure, p: float, plan: csr_array, f: Array, g: Array, C: Array
) -> tuple[float, float, float]:
    """``(value, lower, upper)`` from the plan and potentials that are feasible for the cost ``C`` (for p =
    inf, ``D``).
    """
    rows, cols, mass = support(plan)
    moved = pair_distances(mu.points[rows], nu.points[cols])
    value = power_mean(moved, mass, p)
    if value == 0.0:
        return 0.0, 0.0, 0.0
    rounding = relative_rounding(mu.dim, p, len(mass))
    if np.isinf(p):
        charged = float(mass @ (f[rows] + g[cols]))
        # a sum of k terms, each of one sum and one product, in whatever order
        charge_rounding = (len(mass) + 4) * EPS * float(mass @ (np.abs(f[rows]) + np.abs(g[cols])))
        lower = witnessed_threshold(C, f, g) if charged > charge_rounding else 0.0
        lower = min(lower, value)
    else:
        paid = float(mass @ C[rows, cols])
        gap = max(0.0, float(mass @ support_slack(C, f, g, rows, cols))) / paid if paid > 0.0 else 1.0
        lower = value * float(np.exp(np.log1p(-gap) / p)) if gap < 1.0 else 0.0
    return value, lower * (1.0 - rounding), value * (1.0 + rounding)
