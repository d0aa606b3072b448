r"""The field part ``sup ||V C A||`` on boxes and point sets (notation of :mod:`otattn.lipschitz.relaxations.field`).

- Box of half widths r: ``diag C <= r^2`` (Popoviciu), so it is at most ``sum_k lambda_k r_k^2 / 2`` whenever
  ``Diag(lambda) >= s V^T V + A A^T / s``.
- Points: ``4 Cov(a, b) <= Var(a + b) <= range(a + b)^2 / 4`` with ``a = sqrt(s) p^T V x``,
  ``b = q^T A^T x / sqrt(s)``, so it is at most
  ``max over pairs of (sqrt(s) |V delta| + |A^T delta| / sqrt(s))^2 / 16``; the pair itself, with half the
  mass on either point, reaches ``|V delta| |A^T delta| / 4``. The range of a linear function is the same on
  the convex hull, so this covers the hull of the points too; on a box it is the range over pairs of
  opposite vertices.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from otattn._linalg import lambda_max_upper, spectral_norm
from otattn.lipschitz.relaxations._field_plane import best_edge_point, plane_field
from otattn.lipschitz.relaxations._heads import SoftmaxHead
from otattn.lipschitz.relaxations._quadratic import EPS, triangular
from otattn.lipschitz.relaxations._solve import Proposal, cvxpy_solve, scalar_search, scalar_value
from otattn.lipschitz.relaxations.certificate import Certificate, certify, dual_function, multiplier
from otattn.measures import Box, DiscreteMeasure, PointSet

__all__ = ["box_field", "normalised", "points_field"]

Array = NDArray[np.float64]
# boxes: up to this dimension through their vertices, which is tighter than the semidefinite program
_VERTEX_LIMIT = 12
# and beyond this one by a low-rank ascent instead of an interior-point method
_SDP_LIMIT = 40
_BLOCK = 2048


@dual_function("field_jacobian/box")
def _box_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    V, K = problem["values"], problem["keys"]
    k = V.shape[1]
    s = float(multiplier(multipliers, "s", (1,), positive=True)[0])
    diagonal = multiplier(multipliers, "diagonal", (k,))
    M = s * V.T @ V + K.T @ K / s
    rounding = 16.0 * (k + V.shape[0] + K.shape[0]) * EPS * float(np.trace(M))
    # infeasible multipliers are repaired by the least common shift, or by the least common factor
    repaired = float(diagonal.sum()) + k * lambda_max_upper(M - np.diag(diagonal))
    if (diagonal > 0).all():
        root = np.sqrt(diagonal)
        factor = lambda_max_upper(M / np.outer(root, root))
        repaired = min(repaired, factor * float(diagonal.sum()))
    return float(problem["scale"] * 0.5 * (repaired + k * rounding))


def box_field(head: SoftmaxHead, domain: Box, solver: str | None, max_iter: int | None) -> Certificate:
    r = domain.half_widths
    live = r > 0
    if not live.any():
        live = np.ones_like(live)
    raw = head.V[:, live] * r[live], head.A.T[:, live] * r[live]
    V, K, scale = normalised(*raw)
    V, K = triangular(V), triangular(K)
    M1, M2 = V.T @ V, K.T @ K
    k = len(M1)
    s, diagonal, proposal = 1.0, np.zeros(k), Proposal("none", "zero map", 0.0)
    step = np.ones(k)
    if scale > 0:
        s, diagonal, step, proposal = _low_rank_ascent(M1, M2, max_iter)
    plane = solver is None and k == 2 and scale > 0
    if plane:
        step = best_edge_point(V, K)
    u = np.zeros(head.d)
    u[live] = step * r[live]
    common: dict[str, Any] = {
        "domain": domain,
        "witness": DiscreteMeasure(np.stack([domain.center + u, domain.center - u])),
        "details": {"attained": float(np.linalg.norm(head.V @ u) * np.linalg.norm(head.A.T @ u))},
    }
    if plane:
        return plane_field(V, K, scale, common)
    if solver is None and k <= _VERTEX_LIMIT:
        signs = np.array(list(itertools.product([1.0], *[[1.0, -1.0]] * (k - 1))))
        q1, q2 = (2.0 * np.linalg.norm(signs @ M.T, axis=1) for M in raw)
        front = _pareto(q1, q2)
        rounding = 16.0 * (head.d + len(head.V)) * EPS * np.array([np.linalg.norm(M) for M in raw]) * np.sqrt(k)
        return _pairs(np.column_stack([q1[front], q2[front]]) + rounding, max_iter, common)
    if scale > 0 and (solver is not None or k <= _SDP_LIMIT):
        s, diagonal, proposal = _box_sdp(M1, M2, solver or "CLARABEL", max_iter)
    return certify(
        "field_jacobian/box",
        problem={"values": V, "keys": K, "scale": scale},
        multipliers={"s": [s], "diagonal": diagonal},
        source="field part on a box (own theorem): sum(lambda)/2, Diag(lambda) >= s D V'V D + D AA' D/s",
        solver=proposal.solver,
        solver_status=proposal.status,
        solver_value=proposal.value * scale,
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


@dual_function("field_jacobian/points")
def _points_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    root = float(np.sqrt(multiplier(multipliers, "s", (1,), positive=True)[0]))
    pairs = problem["pairs"]
    top = float((root * pairs[:, 0] + pairs[:, 1] / root).max(initial=0.0))
    return float(problem["scale"] * (top**2 / 16.0 * (1.0 + 16 * EPS)))


def points_field(head: SoftmaxHead, domain: PointSet, solver: str | None, max_iter: int | None) -> Certificate:
    if solver is not None:
        raise ValueError(
            f"solver must be None for a PointSet: one multiplier decides, and a search finds it; received {solver!r}."
        )
    y = domain.points - domain.points.mean(axis=0)
    Y1, Y2 = y @ head.V.T, y @ head.A
    pairs, index = _extreme_pairs(Y1, Y2)
    # differences of rounded images: absolute errors, proportional to the size of the cloud
    size = float(np.linalg.norm(y, axis=1).max()) * 16.0 * (head.d + len(head.V)) * EPS
    rounding = size * np.array([np.linalg.norm(head.V), np.linalg.norm(head.A)])
    q1, q2 = (np.linalg.norm(Y[index[:, 0]] - Y[index[:, 1]], axis=1) for Y in (Y1, Y2))
    best = int((q1 * q2).argmax())
    common: dict[str, Any] = {
        "domain": domain,
        "witness": DiscreteMeasure(domain.points[index[best]]),
        "details": {"attained": float(q1[best] * q2[best]) / 4.0},
    }
    return _pairs(pairs + rounding, max_iter, common)


def _pairs(pairs: Array, max_iter: int | None, common: Mapping[str, Any]) -> Certificate:
    """The certificate of pairs with rows ``(|V delta|, |A^T delta|)``, rounded outward already."""
    top = pairs.max(axis=0)
    scale = float(top[0] * top[1])
    s, proposal = 1.0, Proposal("none", "zero map", 0.0)
    if scale > 0:
        pairs = pairs / top

        def value(t: float) -> float:
            return float((np.exp(t) * pairs[:, 0] + np.exp(-t) * pairs[:, 1]).max()) ** 2 / 16.0

        # the maximum is at least max(e^t, e^-t), and at most 2 at t = 0
        t, proposal = scalar_search(value, -np.log(2.0), np.log(2.0), max_iter=max_iter)
        s = float(np.exp(2.0 * t))
    return certify(
        "field_jacobian/points",
        problem={"pairs": pairs, "scale": scale},
        multipliers={"s": [s]},
        source="field part on points (own theorem): max over pairs of (t|V delta| + |A' delta|/t)^2/16",
        solver=proposal.solver,
        solver_status=proposal.status,
        solver_value=proposal.value * scale,
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


def normalised(values: Array, keys: Array) -> tuple[Array, Array, float]:
    """Both matrices with norm one, and the product of their norms (all zero when one of them is)."""
    a, b = spectral_norm(values), spectral_norm(keys)
    if a == 0.0 or b == 0.0:
        return np.zeros_like(values), np.zeros_like(keys), 0.0
    return values / a, keys / b, a * b
