"""Exact transport on a cost matrix, with a certificate that trusts no solver.

The simplex decides with potentials of the size of the largest cost, hence is blind to costs 1e16 times
smaller (two clouds a distance 1e-8 apart have such costs, for p = 2, beside those of their diameter). So the
gap of its answer is computed from feasible potentials, and while it is too wide the problem is solved again
on the reduced costs, capped a little above those that the current plan pays: the same problem under a
magnifying glass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from otattn import _validate as check
from otattn._linalg import EPS, Array
from otattn._tabular import Result
from otattn.distances.bottleneck import bottleneck
from otattn.distances.costs import SIMPLEX_BYTES, check_budget, relative_rounding
from otattn.distances.duality import (
    c_transform,
    reduced_costs,
    support_slack,
    tight_potentials,
)
from otattn.distances.flows import Support, network_simplex
from otattn.distances.masses import exact_masses, to_weights
from otattn.distances.paths import matching_potentials, small_potentials
from otattn.errors import ConvergenceError

__all__ = [
    "CostTransport",
    "Flow",
    "extend_potentials",
    "feasible",
    "marginals_agree",
    "solve",
    "sparse_plan",
    "status_of",
    "support",
    "transport_from_cost",
]

Index = NDArray[np.intp]

TARGET_GAP = 1e-13
OPTIMAL_GAP = 1e-9
FAILED_GAP = 1e-6
MARGINAL_TOL = 1e-12
SWEEPS = 64
MATCHED_SWEEPS = 512  # for a permutation, whose shortest paths are all that is known of its potentials
CAPS = (1e4, 1e2, 1e8, 1e3, 1e6)  # how far above the costs that the current plan pays the next round looks


@dataclass(frozen=True, eq=False)
class Flow:
    """A plan on its support (rows ascending) with feasible potentials; ``gap`` is relative to the cost."""

    rows: Index
    cols: Index
    mass: Array
    f: Array
    g: Array
    cost: float
    gap: float


def solve(C: Array, A: list[int], B: list[int]) -> Flow:
    """A certified plan for the cost ``C (n, m)`` and positive integer masses of equal sums.

    Raises
    ------
    ConvergenceError
        The simplex stopped early, or the certified relative gap stays above 1e-6.
    """
    if 1 in C.shape:
        return _single(C, A, B)
    if len(A) == len(B) and min(A) == max(A) and min(B) == max(B):
        rows, cols = linear_sum_assignment(C)  # an extreme plan is a permutation (Birkhoff)
        found = [matching_potentials(C, cols, max_sweeps=MATCHED_SWEEPS)]
        matched = _certified(C, (rows, cols, np.full(len(A), 1.0 / len(A))), found)
        if matched.gap <= TARGET_GAP:
            return matched
    R = C - C.min(axis=1)[:, None]
    g = R.min(axis=0)
    R -= g
    basis, peeling, v = network_simplex(R, A, B)
    best = _certified(C, basis, _candidates(C, basis, tight_potentials(C, *basis[:2], g + v, peeling), g))
    for factor in CAPS:
        if best.gap <= TARGET_GAP:
            return best
        R = reduced_costs(C, best.f, best.g)
        cap = factor * _largest_needed(R, best, A, B)
        basis, _, v = network_simplex(np.minimum(R, cap, out=R), A, B)
        flow = _certified(C, basis, _candidates(C, basis, best.g + v, best.g))
        best = min(best, flow, key=lambda x: (x.gap, x.cost))
    if best.gap > FAILED_GAP:
        raise ConvergenceError(
            f"transport between {C.shape[0]} and {C.shape[1]} atoms must be certified to a relative gap of "
            f"{FAILED_GAP:g}, but reached {best.gap:.3g}; the costs or the weights span too many orders of "
            "magnitude for float64: treat the far or light atoms apart from the others."
        )
    return best


def _single(C: Array, A: list[int], B: list[int]) -> Flow:
    """The only plan there is when one side is a single atom."""
    rows, cols = np.indices(C.shape).reshape(2, -1)
    mass = to_weights(A if C.shape[1] == 1 else B)
    f, g = (C[:, 0].copy(), np.zeros(1)) if C.shape[1] == 1 else (np.zeros(1), C[0].copy())
    return Flow(rows, cols, mass, f, g, float(mass @ C.ravel()), 0.0)


def _largest_needed(R: Array, flow: Flow, A: list[int], B: list[int]) -> float:
    """A reduced cost that an optimal plan hardly needs to exceed."""
    paid = float(R[flow.rows, flow.cols].max())
    if paid <= 1e-3 * float(R.max()):
        return paid
    # the plan itself pays costs of the largest size, perhaps blindly: see whether it has to
    try:
        return max(bottleneck(R, A, B).value, 1e-12 * paid)
    except ConvergenceError:
        return 1e-6 * paid


def _candidates(C: Array, basis: Support, *known: Array) -> Iterator[Array]:
    """Column potentials that may prove a plan optimal; shortest paths only if the known ones leave a gap."""
    yield from known
    yield small_potentials(C, *basis[:2], max_sweeps=SWEEPS)


def _certified(C: Array, basis: Support, candidates: Iterable[Array]) -> Flow:
    """The plan with the best of several potentials."""
    rows, cols, mass = basis
    paid = mass * C[rows, cols]
    size = float(np.abs(paid).sum())
    best: Flow | None = None
    for g in candidates:
        # tight potentials need one transform to be feasible; the second improves those that are not
        f = c_transform(C, g)
        for again in (False, True):
            g = c_transform(C.T, f) if again else g
            slack = float(mass @ support_slack(C, f, g, rows, cols))
            gap = slack / size if size > 0.0 else (0.0 if slack == 0.0 else np.inf)
            if best is None or gap < best.gap:
                best = Flow(rows, cols, mass, f, g, float(paid.sum()), gap)
            if best.gap <= TARGET_GAP:
                return best
    assert best is not None
    return best


def extend_potentials(C: Array, rows: Index, f: Array) -> tuple[Array, Array]:
    """Potentials feasible at every atom, also those of weight zero, from ``f`` on the live ``rows``."""
    g = c_transform(C[rows].T, f)
    return c_transform(C, g), g


def feasible(C: Array, f: Array, g: Array, units: float = 0.0) -> bool:
    """``f_i + g_j <= C_ij`` to one rounding of each term, and so many units of rounding of ``C`` itself."""
    if f.shape != C.shape[:1] or g.shape != C.shape[1:] or not (np.isfinite(f).all() and np.isfinite(g).all()):
        return False
    room = C - f[:, None]
    room -= g
    rounding = 4 * EPS * (np.abs(f)[:, None] + np.abs(g) + (1.0 + units / 4.0) * np.abs(C))
    return bool((room >= -rounding).all())


def marginals_agree(plan: csr_array, a: Array, b: Array) -> bool:
    """True when a non-negative plan has the marginals ``a`` and ``b`` to 1e-12, relative to each weight."""
    if plan.shape != (len(a), len(b)) or not np.isfinite(plan.data).all() or (plan.data < 0).any():
        return False
    rows, cols = np.asarray(plan.sum(axis=1)).ravel(), np.asarray(plan.sum(axis=0)).ravel()
    return bool((np.abs(rows - a) <= MARGINAL_TOL * a).all() and (np.abs(cols - b) <= MARGINAL_TOL * b).all())


def sparse_plan(rows: Index, cols: Index, mass: Array, shape: tuple[int, int]) -> csr_array:
    """The plan as a read-only sparse array."""
    plan = csr_array((mass, (rows, cols)), shape=shape)
    for part in (plan.data, plan.indices, plan.indptr):
        part.flags.writeable = False
    return plan


def status_of(gap: float) -> str:
    """The word for a relative gap."""
    return "optimal" if gap <= OPTIMAL_GAP else "near-optimal"


def support(plan: csr_array) -> tuple[Index, Index, Array]:
    """``(rows, cols, mass)`` of the entries of a plan that carry mass."""
    coo = plan.tocoo()
    keep = coo.data > 0
    return coo.row[keep], coo.col[keep], coo.data[keep]


@dataclass(frozen=True, eq=False)
class CostTransport(Result):
    """An optimal transport plan for a cost matrix and the proof that it is one.

    Attributes
    ----------
    value : float
        ``sum_ij P_ij cost_ij``.
    plan : scipy.sparse.csr_array (n, m)
        Marginals ``a``, ``b`` to a few units in the last place of each weight.
    potentials : tuple of ndarray (n,), (m,)
        ``f_i + g_j <= cost_ij`` for all i, j, those of zero weight included.
    lower, upper : float
        Dual and primal value at the marginals of ``plan``, rounded outward.
    gap : float
        ``upper - lower`` relative to ``sum_ij P_ij |cost_ij|``.
    status : str
        "optimal", or "near-optimal" when the gap exceeds 1e-9 (beyond 1e-6 there is no result).
    a, b, cost : ndarray
        The problem.
    """

    value: float
    plan: csr_array
    potentials: tuple[Array, Array]
    lower: float
    upper: float
    gap: float
    status: str
    a: Array
    b: Array
    cost: Array

    def verify(self) -> bool:
        """Recompute marginals, feasibility and the interval from the plan and the potentials alone."""
        f, g = self.potentials
        if not (marginals_agree(self.plan, self.a, self.b) and feasible(self.cost, f, g)):
            return False
        interval = _interval(self.cost, f, g, *support(self.plan))
        return all(
            abs(old - new) <= 8 * EPS * interval[3]
            for old, new in zip((self.value, self.lower, self.upper), interval[:3], strict=True)
        ) and bool(np.isclose(self.gap, interval[4], rtol=1e-6, atol=4 * EPS))


def _interval(
    C: Array, f: Array, g: Array, rows: Index, cols: Index, mass: Array
) -> tuple[float, float, float, float, float]:
    """Value, lower, upper, the size ``sum P |C|`` and the relative gap of a plan and its potentials."""
    paid = mass * C[rows, cols]
    size = float(np.abs(paid).sum())
    value = float(paid.sum())
    slack = max(0.0, float(mass @ support_slack(C, f, g, rows, cols)))
    rounding = relative_rounding(0, 1.0, len(mass)) * size
    lower, upper = value - slack - rounding, value + rounding
    return value, lower, upper, size, (upper - lower) / size if size > 0.0 else 0.0


def transport_from_cost(a: ArrayLike, b: ArrayLike, cost: ArrayLike) -> CostTransport:
    """Optimal transport for a cost matrix, ``min sum_ij P_ij cost_ij`` over plans P from ``a`` to ``b``.

    Parameters
    ----------
    a : array_like (n,)
    b : array_like (m,)
        Non-negative weights of sum 1; zeros are allowed.
    cost : array_like (n, m)
        Finite costs, of any sign and spread.

    Returns
    -------
    CostTransport
        With ``lower <= value <= upper`` certified by feasible potentials.

    Raises
    ------
    ValueError
        Weights that are no probabilities, or a cost of another shape.
    MemoryBudgetError
        The solver would allocate more than 4 GiB.
    ConvergenceError
        No plan could be certified to a relative gap of 1e-6.

    Examples
    --------
    >>> s = 1e32
    >>> round(transport_from_cost([1/3] * 3, [1/3] * 3, [[1, 2, s], [2, 5, s], [s, s, 3]]).value, 12)
    2.333333333333

    References
    ----------
    Peyré and Cuturi (2019), Computational Optimal Transport, sections 2.5 and 3.5 (duality, network simplex).
    """
    C = check.frozen(check.matrix(cost, "cost"))
    n, m = C.shape
    check_budget(n, m, SIMPLEX_BYTES)
    u = check.frozen(check.check_weights(a, n, "a"))
    v = check.frozen(check.check_weights(b, m, "b"))
    rows, cols = np.flatnonzero(u), np.flatnonzero(v)
    live = len(rows) == n and len(cols) == m
    flow = solve(C if live else C[np.ix_(rows, cols)], *exact_masses(u[rows], v[cols]))
    f, g = (flow.f, flow.g) if live else extend_potentials(C, rows, flow.f)
    plan = sparse_plan(rows[flow.rows], cols[flow.cols], flow.mass, (n, m))
    value, lower, upper, _, gap = _interval(C, f, g, *support(plan))
    return CostTransport(value, plan, (check.frozen(f), check.frozen(g)), lower, upper, gap, status_of(gap), u, v, C)
