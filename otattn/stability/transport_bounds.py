r"""Proven bounds of ``W_p`` between two measures whose atoms are enclosed.

``W_p`` depends on the atoms by their distances alone, and grows with each of them. So lower bounds of all
distances, a pair of potentials feasible for their powers and the exact masses give a lower bound of ``W_p``; upper
bounds of the distances on the support of a plan of exact marginals give an upper bound. Masses are integers
(the weights as exact fractions of their sums), so dual value and flows are computed without rounding; the
solver only proposes potentials and the support.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from otattn._linalg import Array
from otattn.distances.bottleneck import bottleneck, witnessed_threshold
from otattn.distances.conditional import time_groups
from otattn.distances.costs import powers
from otattn.distances.double_double import two_sum
from otattn.distances.duality import c_transform
from otattn.distances.flows import elimination
from otattn.distances.masses import exact_masses
from otattn.distances.plan import solve
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure
from otattn.stability.enclosed import TINY, UNIT, Enclosed

__all__ = [
    "Problem",
    "Slice",
    "distance_bounds",
    "pair_slices",
    "pairs_upper",
    "plan_upper",
    "transport_lower",
    "transport_upper",
]

Index = NDArray[np.intp]
Measure = DiscreteMeasure | SpaceTimeMeasure

SAFE = 320.0
"""Distances from e^-320 to e^320 (1e-139 to 1e139): their squares stay in float64, and those of the differences
that matter beside them."""
POWER_UNITS = 32.0
"""Relative error of ``x^p`` in units of ``u``, also for the root: 16 units in the last place."""
CAP = 1e20
"""Costs are cut here, in units of the size of ``W_p^p``: that only lowers them."""
TIME_TOL = 1e-12
_BLOCK = 2**21


@dataclass(frozen=True)
class Slice:
    """Atoms of both measures that may be joined, and the masses of the slice in each of them."""

    rows: Index
    cols: Index
    masses: tuple[Fraction, Fraction]


@dataclass(frozen=True, eq=False)
class Problem:
    """Weights of both measures (positive), what may be joined, and the order."""

    a: Array
    b: Array
    slices: list[Slice]
    p: float


def pair_slices(mu: Measure, nu: Measure) -> list[Slice]:
    """What may be joined: everything, or the atoms of one time (times within ``TIME_TOL`` are one, as in
    `conditional_wasserstein`). Indices count the atoms of positive weight.
    """
    sides = [m.weights[m.weights > 0] for m in (mu, nu)]
    n, m = (len(w) for w in sides)
    if not (isinstance(mu, SpaceTimeMeasure) and isinstance(nu, SpaceTimeMeasure)):
        return [Slice(np.arange(n), np.arange(m), (Fraction(1), Fraction(1)))]
    exact = [[Fraction(float(v)) for v in w] for w in sides]
    totals = [sum(w, Fraction(0)) for w in exact]
    times = np.concatenate([mu.times[mu.weights > 0], nu.times[nu.weights > 0]])
    out = []
    for group in time_groups(times, TIME_TOL):
        i, j = group[group < n], group[group >= n] - n
        masses = [sum((w[k] for k in at), Fraction(0)) / t for w, at, t in zip(exact, (i, j), totals, strict=True)]
        out.append(Slice(i, j, (masses[0], masses[1])))
    return out


def distance_bounds(x: Enclosed, y: Enclosed) -> tuple[Array, Array]:
    """Entrywise bounds of ``|x_i - y_j|``, ``(n, m)`` each.

    Raises
    ------
    ValueError
        One enclosure is in double-double and the other is not: the low parts of the finer one would be left out, and
        the bounds would not hold.
    """
    if x.fine != y.fine:
        raise ValueError(
            f"x and y must be enclosed with one precision, received fine={x.fine} and fine={y.fine}; enclose both alike."
        )
    d, fine = x.shape[1], x.fine
    with np.errstate(all="ignore"):
        D = np.zeros((len(x.high), len(y.high))) if fine else cdist(x.high, y.high)
        rows, cols = np.nonzero(~(np.abs(np.log(D)) < SAFE))
        step = max(1, _BLOCK // d)
        for k in range(0, len(rows), step):
            i, j = rows[k : k + step], cols[k : k + step]
            D[i, j] = _lengths(x, y, i, j)
        # differences, squares, d - 1 sums, the root; then the errors of the atoms, also those of the rounded
        # low parts
        relative = (d + 16.0) * UNIT
        spread = _reach(x)[:, None] + _reach(y)
        lower = np.maximum(D * (1.0 - relative) - spread, 0.0) * (1.0 - 4.0 * UNIT) - TINY
        upper = (D * (1.0 + relative) + spread) * (1.0 + 4.0 * UNIT) + TINY
    return np.maximum(lower, 0.0), upper


def _reach(x: Enclosed) -> Array:
    """An upper bound of the Euclidean error of each atom, with what differences of pairs lose."""
    error = x.radius + (0.0 if x.low is None else 16.0 * UNIT**2 * np.abs(x.high))
    size = error.max(axis=1, keepdims=True)
    safe = np.where(size > 0.0, size, 1.0)
    norm = size[:, 0] * np.sqrt(np.sum((error / safe) ** 2, axis=1))
    return np.asarray(norm * (1.0 + (x.shape[1] + 16.0) * UNIT) + TINY * x.shape[1])


def _lengths(x: Enclosed, y: Enclosed, i: Index, j: Index) -> Array:
    """Distances of single pairs, scaled so that no square over- or underflows, low parts included."""
    difference, rest = two_sum(x.high[i], -y.high[j])
    if x.low is not None and y.low is not None:
        difference = difference + (rest + (x.low[i] - y.low[j]))
    size = np.abs(difference).max(axis=1, keepdims=True)
    safe = np.where(size > 0.0, size, 1.0)
    return np.asarray(size[:, 0] * np.sqrt(np.sum((difference / safe) ** 2, axis=1)))


def transport_lower(x: Enclosed, y: Enclosed, problem: Problem, size: float) -> float:
    """A lower bound of ``W_p`` for atoms in x and y; ``size``, a guess of it, is the unit of the computation."""
    low = distance_bounds(x, y)[0]
    ends = [_lower(low[np.ix_(part.rows, part.cols)], problem, part, size) for part in problem.slices]
    # masses that differ between the measures by rounding count with the smaller here, with the larger below
    return _combined(ends, [min(part.masses) for part in problem.slices], problem.p, -1.0)


def transport_upper(x: Enclosed, y: Enclosed, problem: Problem, size: float) -> float:
    """An upper bound of ``W_p``, as in `transport_lower`."""
    return plan_upper(distance_bounds(x, y)[1], problem, size)


def plan_upper(high: Array, problem: Problem, size: float) -> float:
    """An upper bound of ``W_p`` where the distances of atoms are at most ``high (n, m)``, as in `transport_lower`."""
    ends = [_upper(high[np.ix_(part.rows, part.cols)], problem, part, size) for part in problem.slices]
    return _combined(ends, [max(part.masses) for part in problem.slices], problem.p, 1.0)


def _combined(ends: list[float], masses: list[Fraction], p: float, outward: float) -> float:
    if np.isinf(p) or len(ends) == 1:
        return max(ends)
    shares = np.array([float(m) for m in masses]) * (1.0 + outward * 2.0 * UNIT)
    return _mean(shares, np.array(ends), p, outward)


def pairs_upper(weights: Array, distances: Array, p: float) -> float:
    """An upper bound of ``W_p`` of two measures of the same weights whose atoms are so far apart, one by one, at most."""
    if np.isinf(p):
        return float(distances.max())
    exact = exact_masses(weights, weights)[0]
    shares = np.array([m / sum(exact) for m in exact]) * (1.0 + 2.0 * UNIT)
    return _mean(shares, distances, p, 1.0)


def _mean(mass: Array, values: Array, p: float, outward: float) -> float:
    """``(sum mass values^p)^{1/p}``, rounded outward."""
    unit = _power_of_two(float(values.max()))
    if unit == 0.0 or not np.isfinite(values).all():
        return float(values.max())
    if p > 512.0:  # ratios below one: a power of a ratio below two may overflow
        unit = min(2.0 * unit, 2.0**1023)
    with np.errstate(under="ignore"):
        terms = mass * powers(values / unit, p)
    total = math.fsum(terms) + (len(terms) * TINY if outward > 0.0 else 0.0)
    return _root(total, p, unit, outward)


def _root(total: float, p: float, unit: float, outward: float) -> float:
    """``unit total^{1/p}``, rounded outward, with the errors of the powers in ``total`` and of ``1 / p``."""
    if total <= 0.0:
        return TINY if outward > 0.0 else 0.0
    relative = (4.0 * POWER_UNITS + 2.0 * abs(math.log(total)) / p) * UNIT
    return max(total ** (1.0 / p) * unit * (1.0 + outward * relative) + outward * TINY, 0.0)


def _power_of_two(value: float) -> float:
    return 2.0 ** (math.frexp(value)[1] - 1) if 0.0 < value < np.inf else value


def _lower(low: Array, problem: Problem, part: Slice, size: float) -> float:
    if low.size == 1:
        return float(low[0, 0])
    A, B = exact_masses(problem.a[part.rows], problem.b[part.cols])
    if np.isinf(problem.p):
        found = bottleneck(low, A, B)
        # a plan must use a pair with f + g > 0; these potentials are whole numbers, their sums exact
        least = witnessed_threshold(low, found.f, found.g) if _dual(found.f, found.g, A, B) > 0 else np.inf
        return least if least < np.inf else 0.0
    unit = _unit(low, size)
    C = _costs(low, problem.p, unit) * (1.0 - POWER_UNITS * UNIT)
    g = solve(C, A, B).g
    dual = _dual(c_transform(C, g), g, A, B) / sum(A)
    return _root(float(max(Fraction(0), dual)), problem.p, unit, -1.0)


def _upper(high: Array, problem: Problem, part: Slice, size: float) -> float:
    if high.size == 1 or not np.isfinite(high).all():
        return float(high.max()) if np.isfinite(high).all() else np.inf
    A, B = exact_masses(problem.a[part.rows], problem.b[part.cols])
    rows, cols = _support(high, problem.p, A, B, size)
    flows, total = _exact_plan(rows, cols, A, B), sum(A)
    paid = np.array([high[r, c] for r, c, _ in flows])
    if np.isinf(problem.p):
        return float(paid.max())
    mass = np.array([m / total for _, _, m in flows]) * (1.0 + 2.0 * UNIT)
    return _mean(mass, paid, problem.p, 1.0)


def _support(D: Array, p: float, A: list[int], B: list[int], size: float) -> tuple[Index, Index]:
    """Where a plan that is (nearly) optimal has its mass."""
    if np.isinf(p):
        found = bottleneck(D, A, B)
        return found.rows, found.cols
    C = _costs(D, p, _unit(D, size))
    if D.shape[0] == D.shape[1] and min(A) == max(A) and min(B) == max(B):
        rows, cols = linear_sum_assignment(C)
        return rows, cols
    flow = solve(C, A, B)
    return flow.rows, flow.cols


def _unit(D: Array, size: float) -> float:
    """A power of two, so that division by it is exact."""
    return _power_of_two(size) or _power_of_two(float(D.max())) or 1.0


def _costs(D: Array, p: float, unit: float) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return np.minimum(powers(D / unit, p), CAP)


def _dual(f: Array, g: Array, A: list[int], B: list[int]) -> Fraction:
    """``sum A f + sum B g`` without rounding."""
    ratios = [(m, *float(v).as_integer_ratio()) for v, m in zip([*f, *g], [*A, *B], strict=True)]
    common = max(den for _, _, den in ratios)  # powers of two
    return Fraction(sum(m * num * (common // den) for m, num, den in ratios), common)


def _exact_plan(rows: Index, cols: Index, A: list[int], B: list[int]) -> list[tuple[int, int, int]]:
    """A plan of marginals A and B to the last unit, on the proposed support as far as that carries one.

    On a forest the flows follow from the leaves inward; what is left over (rounding of the weights against
    each other) goes in the order of the atoms.
    """
    n = len(A)
    left = [*A, *B]
    arcs = list(zip(rows.tolist(), (cols + n).tolist(), strict=True))
    flows: list[tuple[int, int, int]] = []

    def send(u: int, v: int) -> None:
        mass = min(left[u], left[v])
        if mass > 0:
            flows.append((u, v - n, mass))
            left[u] -= mass
            left[v] -= mass

    steps = [k for _, k, _ in elimination(arcs, left)]
    for k in [*steps, *sorted(set(range(len(arcs))) - set(steps))]:  # what lies on a cycle comes last
        send(*arcs[k])
    for u, v in _corner(left, n):
        send(u, v)
    return flows


def _corner(left: list[int], n: int) -> Iterator[tuple[int, int]]:
    """Pairs of atoms that still hold mass, by the north-west corner rule (``left`` changes meanwhile)."""
    u, v = 0, n
    while u < n and v < len(left):
        if left[u] == 0:
            u += 1
        elif left[v] == 0:
            v += 1
        else:
            yield u, v
