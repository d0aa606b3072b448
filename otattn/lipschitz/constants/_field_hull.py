r"""The field part ``sup ||V C A||`` on boxes and point sets (notation of :mod:`otattn.lipschitz.constants.field`).

- Box of half widths r: ``diag C <= r^2`` (Popoviciu), so it is at most ``sum_k lambda_k r_k^2 / 2`` whenever
  ``Diag(lambda) >= s V^T V + A A^T / s``.
- Points: ``4 Cov(a, b) <= Var(a + b) <= range(a + b)^2 / 4`` with ``a = sqrt(s) p^T V x``,
  ``b = q^T A^T x / sqrt(s)``, so it is at most
  ``max over pairs of (sqrt(s) |V delta| + |A^T delta| / sqrt(s))^2 / 16``; the pair itself, with half the
  mass on either point, reaches ``|V delta| |A^T delta| / 4``. The range of a linear function is the same on
  the convex hull, so this covers the hull of the points too.
- Boxes up to dimension 12 are exact up to cells: :mod:`otattn.lipschitz.constants._field_cells`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from otattn._linalg import EPS, Array, lambda_max_upper, mid, norm_upper, spectral_norm
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.arithmetic.rounding import product
from otattn.lipschitz.certificate import (
    Certificate,
    Statement,
    certify,
    dual_function,
    multiplier,
    problem_function,
)
from otattn.lipschitz.constants._dual_quadratic import triangular
from otattn.lipschitz.constants._field_cells import VERTEX_LIMIT, best_step, cells_field
from otattn.lipschitz.constants._solve import Proposal, cvxpy_solve, scalar_search, scalar_value
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.constants.regions import Region
from otattn.measures import Box, DiscreteMeasure, PointSet

# boxes beyond this dimension by a low-rank ascent instead of an interior-point method
_SDP_LIMIT = 40
_BLOCK = 2048


@problem_function("field_certificate/box", "field_certificate/cells")
def _box_problem(statement: Statement) -> dict[str, Any]:
    """``V D`` and ``A^T D`` of norm about one, D the half widths that are not zero, and their units."""
    head = softmax_head(statement.attention, exact=statement.exact)
    r = Region.of(statement.domain).reach
    assert r is not None
    live = r > 0 if (r > 0).any() else np.ones(len(r), dtype=bool)
    (V, K), units = unit_pair(head.V[:, live] * r[live], head.A.T[:, live] * r[live])
    if statement.exact or units is None:
        return {"values": V, "keys": K, "units": units, "live": live, "reach": r, "slack": 0.0}
    slack = 4.0 * head.lost * float(r.max()) / units[1] + 16.0 * head.d * EPS
    return {"values": triangular(V), "keys": triangular(K), "units": units, "live": live, "reach": r, "slack": slack}


@dual_function("field_certificate/box", exact=True, quantity="field")
def _box_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    V, K, units = problem["values"], problem["keys"], problem["units"]
    k = V.shape[1]
    s = float(multiplier(multipliers, "s", (1,), positive=True)[0])
    diagonal = multiplier(multipliers, "diagonal", (k,))
    if units is None:
        return 0.0
    exact = isinstance(V, BallMatrix)
    M = s * (V.T @ V) + (K.T @ K) / s
    rounding = 0.0 if exact else 16.0 * (k + V.shape[0] + K.shape[0]) * EPS * float(np.trace(M))
    total: Any = lift(diagonal).sum() if exact else float(diagonal.sum())
    # infeasible multipliers are repaired by the least common shift, or by the least common factor
    repaired = total + k * lambda_max_upper(M - np.diag(diagonal))
    if (diagonal > 0).all():
        # with floats r near the roots: D M D <= f I gives M <= f D^{-2}
        root = 1.0 / np.sqrt(diagonal)
        scaled = root[:, None] * (M * root) if not exact else (M * root).T * root
        bound = (1.0 / lift(root) ** 2).sum() if exact else float((1.0 / root**2).sum()) * (1.0 + 8 * k * EPS)
        repaired = np.minimum(repaired, np.maximum(lambda_max_upper(scaled), 0.0) * bound)
    return product(0.5 * np.maximum(repaired + k * rounding, 0.0) * (1.0 + problem["slack"]), *units)


def box_field(statement: Statement, solver: str | None, max_iter: int | None) -> Certificate:
    domain: Box = statement.domain
    head = softmax_head(statement.attention)
    problem = _box_problem(statement)
    V, K, units, live, r = (problem[key] for key in ("values", "keys", "units", "live", "reach"))
    scale = 0.0 if units is None else product(*units)
    M1, M2 = V.T @ V, K.T @ K
    k = len(M1)
    s, diagonal, proposal = 1.0, np.zeros(k), Proposal()
    step = np.ones(k)
    if scale > 0:
        s, diagonal, step, proposal = _low_rank_ascent(M1, M2, max_iter)
    cells = solver is None and k <= VERTEX_LIMIT
    if cells and scale > 0:
        rng = np.random.default_rng(0)  # fixed starts: the result depends on the data only
        step = best_step(V, K, [step, *rng.uniform(-1.0, 1.0, (8, k))])
    u = np.zeros(head.d)
    u[live] = step * r[live]
    common: dict[str, Any] = {
        "witness": DiscreteMeasure(np.stack([domain.center + u, domain.center - u])),
        "details": {"attained": float(np.linalg.norm(head.V @ u) * np.linalg.norm(head.A.T @ u))},
    }
    if cells:
        return cells_field(statement, problem, step, common)
    if scale > 0 and (solver is not None or k <= _SDP_LIMIT):
        s, diagonal, proposal = _box_sdp(M1, M2, solver or "CLARABEL", max_iter)
    return certify(
        "field_certificate/box",
        statement=statement,
        problem=problem,
        multipliers={"s": [s], "diagonal": diagonal},
        **proposal.claims(scale),
        **common,
    )


def _box_sdp(M1: Array, M2: Array, solver: str, max_iter: int | None) -> tuple[float, Array, Proposal]:
    import cvxpy as cp

    s, q, diagonal = cp.Variable(), cp.Variable(), cp.Variable(len(M1))
    constraints = [cp.diag(diagonal) - s * M1 - q * M2 >> 0, q >= cp.inv_pos(s)]
    proposal = cvxpy_solve(cp.Problem(cp.Minimize(cp.sum(diagonal) / 2), constraints), solver, max_iter)
    return scalar_value(s), np.asarray(diagonal.value, dtype=np.float64), proposal


def _low_rank_ascent(M1: Array, M2: Array, max_iter: int | None) -> tuple[float, Array, Array, Proposal]:
    """Burer-Monteiro: unit rows Z ascend ``tr(M1 ZZ') tr(M2 ZZ')``; also the best step found by rounding Z."""
    k = len(M1)
    rng = np.random.default_rng(0)  # a fixed start: the result depends on the data only
    Z = rng.standard_normal((k, int(np.ceil(np.sqrt(2 * k))) + 1))
    Z /= np.linalg.norm(Z, axis=1, keepdims=True)
    s, value, status = 1.0, 0.0, "iteration_limit"
    for _ in range(500 if max_iter is None else max_iter):
        a, b = float(np.sum((M1 @ Z) * Z)), float(np.sum((M2 @ Z) * Z))
        s = float(np.sqrt(b / a)) if a > 0 and b > 0 else 1.0
        step = (s * M1 + M2 / s) @ Z  # the matrix is PSD, so this step ascends
        norm = np.linalg.norm(step, axis=1, keepdims=True)
        Z = np.where(norm > 0, step / np.maximum(norm, 1e-300), Z)
        new = np.sqrt(max(a, 0.0) * max(b, 0.0))
        if abs(new - value) <= 1e-9 * new:
            status = "optimal"
            break
        value = new
    diagonal = np.linalg.norm((s * M1 + M2 / s) @ Z, axis=1)
    signs, best = np.ones(k), -1.0
    for w in rng.standard_normal((40, Z.shape[1])):
        z = np.where(Z @ w >= 0, 1.0, -1.0)
        for _ in range(50):  # the linearised ascent over vertices
            a, b = float(z @ M1 @ z), float(z @ M2 @ z)
            if a <= 0 or b <= 0:
                break
            new_z = np.where(M1 @ z / a + M2 @ z / b >= 0, 1.0, -1.0)
            if (new_z == z).all():
                break
            z = new_z
        product = float(z @ M1 @ z) * float(z @ M2 @ z)
        if product > best:
            signs, best = z, product
    if k <= _SDP_LIMIT:  # atoms need not be opposite vertices: coordinates that do not differ are allowed too
        for i in np.tile(np.arange(k), 3):
            trial = np.repeat(signs[None], 3, axis=0)
            trial[:, i] = (-1.0, 0.0, 1.0)
            signs = trial[int((np.sum(trial @ M1 * trial, axis=1) * np.sum(trial @ M2 * trial, axis=1)).argmax())]
    return s, diagonal, signs, Proposal("low-rank ascent", status, value)


@problem_function("field_certificate/points")
def _points_problem(statement: Statement) -> dict[str, Any]:
    """``(|V delta|, |A^T delta|)`` of the pairs of points that no other pair dominates."""
    head = softmax_head(statement.attention, exact=statement.exact)
    V, A = (M.interval() if statement.exact else M for M in (head.V, head.A))
    domain = statement.domain
    if statement.exact:
        # the square of a zero is rounded upward, to the least float
        zero = not head.V.any() or not head.A.any()
        pairs, size = (np.zeros((1, 2)) if zero else _exact_pairs(domain.points, V, A)), 0.0
    else:
        y = domain.points - domain.points.mean(axis=0)
        pairs, _ = _extreme_pairs(y @ V.T, y @ A)
        size = float(np.linalg.norm(y, axis=1).max())
    if not statement.exact:
        # images of rounded points: absolute errors, proportional to the size of the cloud
        norms = np.array([norm_upper(V), norm_upper(A) + head.lost])
        # squares of lengths below 1e-150 lose digits
        tiny = 1e-150 * (norms > 0.0) if size > 0.0 else 0.0
        pairs = pairs + size * 16.0 * (head.d + len(V)) * EPS * norms + np.where(pairs < 1e-150, tiny, 0.0)
    largest = pairs.max(axis=0)
    if (largest == 0).any():
        return {"pairs": pairs, "units": None, "exact": statement.exact}
    return {"pairs": pairs, "units": tuple(float(x) for x in largest), "exact": statement.exact}


def _lengths(rows: Any) -> Any:
    return np.sqrt((rows * rows).sum(axis=1))


def _exact_pairs(points: Array, V: Any, A: Any) -> Array:
    """Upper ends of ``(|V delta|, |A^T delta|)`` for the pairs that matter."""
    kept = np.zeros((1, 2))
    x = lift(points)
    for i in range(len(points) - 1):
        delta = x[i + 1 :] - x[i]
        new = np.stack([upper(_lengths(delta @ V.T)), upper(_lengths(delta @ A))], axis=1)
        kept = np.concatenate([kept, new])
        kept = kept[_pareto(kept[:, 0], kept[:, 1])]
    return kept


@dual_function("field_certificate/points", exact=True, quantity="field")
def _points_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    s: Any = float(multiplier(multipliers, "s", (1,), positive=True)[0])
    if problem["units"] is None:
        return 0.0
    pairs, units, margin = problem["pairs"], problem["units"], 1.0 + 32 * EPS
    if problem["exact"]:
        pairs, s, margin = lift(pairs), lift(s), 1.0
    root = np.sqrt(s)
    largest = (root * (pairs[:, 0] / units[0]) + pairs[:, 1] / units[1] / root).max(initial=0.0)
    return product(largest * largest / 16.0 * margin, *units)


def points_field(statement: Statement, solver: str | None, max_iter: int | None) -> Certificate:
    domain: PointSet = statement.domain
    head = softmax_head(statement.attention)
    if solver is not None:
        raise ValueError(
            f"solver must be None for a PointSet: one multiplier decides, and a search finds it; received {solver!r}."
        )
    y = domain.points - domain.points.mean(axis=0)
    Y1, Y2 = y @ head.V.T, y @ head.A
    _, index = _extreme_pairs(Y1, Y2)
    q1, q2 = (np.linalg.norm(Y[index[:, 0]] - Y[index[:, 1]], axis=1) for Y in (Y1, Y2))
    best = int((q1 * q2).argmax())
    common: dict[str, Any] = {
        "witness": DiscreteMeasure(domain.points[index[best]]),
        "details": {"attained": float(q1[best] * q2[best]) / 4.0},
    }
    return _pairs(statement, max_iter, common)


def _pairs(statement: Statement, max_iter: int | None, common: Mapping[str, Any]) -> Certificate:
    """The certificate of pairs."""
    problem = _points_problem(statement)
    pairs, units = problem["pairs"], problem["units"]
    scale = 0.0 if units is None else product(*units)
    s, proposal = 1.0, Proposal()
    if units is not None:
        pairs = pairs / np.array(units)

        def value(t: float) -> float:
            return float((np.exp(t) * pairs[:, 0] + np.exp(-t) * pairs[:, 1]).max()) ** 2 / 16.0

        # the maximum is at least max(e^t, e^-t), and at most 2 at t = 0
        t, proposal = scalar_search(value, -np.log(2.0), np.log(2.0), max_iter=max_iter)
        s = float(np.exp(2.0 * t))
    return certify(
        "field_certificate/points",
        statement=statement,
        problem=problem,
        multipliers={"s": [s]},
        **proposal.claims(scale),
        **common,
    )


def _extreme_pairs(Y1: Array, Y2: Array) -> tuple[Array, NDArray[np.int64]]:
    """The ``(|V delta|, |A^T delta|)`` that no other pair dominates, and those pairs."""
    n = len(Y1)
    kept, index = np.zeros((1, 2)), np.zeros((1, 2), dtype=np.int64)
    for i in range(0, n, _BLOCK):
        for j in range(i, n, _BLOCK):
            q1 = cdist(Y1[i : i + _BLOCK], Y1[j : j + _BLOCK]).ravel()
            q2 = cdist(Y2[i : i + _BLOCK], Y2[j : j + _BLOCK]).ravel()
            front = _pareto(q1, q2)
            rows, columns = np.divmod(front, min(_BLOCK, n - j))
            kept = np.concatenate([kept, np.column_stack([q1[front], q2[front]])])
            index = np.concatenate([index, np.column_stack([rows + i, columns + j])])
            front = _pareto(kept[:, 0], kept[:, 1])
            kept, index = kept[front], index[front]
    return kept, index


def _pareto(q1: Array, q2: Array) -> NDArray[np.int64]:
    """Indices of the points that no other one dominates in both coordinates."""
    order = np.lexsort((-q2, -q1))
    height = np.maximum.accumulate(q2[order])
    new = np.concatenate([[True], q2[order][1:] > height[:-1]])
    return np.asarray(order[new])


def unit_pair(
    values: Any, keys: Any, least: tuple[float, float] = (0.0, 0.0)
) -> tuple[tuple[Any, Any], tuple[float, float] | None]:
    """Both matrices in units near their norms, and the units (None, and zeros, when one of the matrices is zero).

    No unit is below ``least``, what the rounding of the matrices amounts to.
    """
    # a norm below the normal numbers has lost its digits, and nothing is proved from it
    a, b = (
        max(spectral_norm(mid(M)), 1e-290 if M.any() or e > 0.0 else 0.0, e)
        for M, e in zip((values, keys), least, strict=True)
    )
    if a == 0.0 or b == 0.0:
        return (np.zeros(values.shape), np.zeros(keys.shape)), None
    return (values / a, keys / b), (a, b)
