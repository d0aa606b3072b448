r"""The field part: ``sup || V C A ||`` over the covariances C of measures on a domain.

``D_x Gamma_mu(x) = V C A`` with C the covariance of a measure on the domain, so this supremum is the
Lipschitz constant of ``x -> Gamma_mu(x)``, and the splitting part of the local constant. For unit p, q and
any ``s > 0``

.. math:: p^T V C A q \le \sqrt{\operatorname{tr}(V^T V C)\,\operatorname{tr}(A A^T C)}
          \le \tfrac12 \operatorname{tr}\bigl(C\,(s V^T V + A A^T / s)\bigr).

- Ball, ellipsoid ``E z + b``: ``C = E U E^T`` with ``tr U <= 1``, so the supremum is at most
  ``lambda_max(s E^T V^T V E + E^T A A^T E / s) / 2``. The best s gives the supremum exactly: the maximum
  over U of the geometric mean is that over the joint range of two quadratic forms on unit vectors (convex
  for dimension 3 and more; in dimension 2 an increasing function on a filled ellipse is largest on its
  boundary), attained by two atoms ``b +- E u``.
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
from otattn.lipschitz.relaxations._heads import SoftmaxHead, check_domain, enclosing_round, softmax_head
from otattn.lipschitz.relaxations._quadratic import EPS, row_span, triangular
from otattn.lipschitz.relaxations._solve import Proposal, cvxpy_solve, scalar_search
from otattn.lipschitz.relaxations.certificate import Certificate, certify, dual_function, multiplier
from otattn.measures import Box, DiscreteMeasure, Domain, PointSet

__all__ = ["field_jacobian"]

Array = NDArray[np.float64]
_VERTEX_LIMIT = (
    12  # boxes up to this dimension are bounded through their vertices, which is tighter than the SDP
)
_SDP_LIMIT = (
    40  # boxes of more dimensions are solved by a low-rank ascent instead of an interior-point method
)
_BLOCK = 2048


def field_jacobian(
    attention: Any, domain: Domain, *, solver: str | None = None, max_iter: int | None = None
) -> Certificate:
    r"""Certified bound of ``sup ||D_x Gamma_mu(x)|| = sup ||V C A||`` over all measures on ``domain`` and all x.

    Exact (to rounding) on balls, ellipsoids and LayerNorm domains. On point sets and boxes a few percent
    above the best two-atom measure as a rule (up to 25 percent in dimension 2, where four atoms may also do
    better than two).

    Parameters
    ----------
    attention : SoftmaxAttention or MaskedAttention of one
    domain : Ball, Ellipsoid, LayerNormDomain, Box or PointSet
    solver : {"CLARABEL", "SCS"}, optional
        Who proposes the multipliers. By default a scalar search where one multiplier decides; for boxes the
        vertices up to dimension 12, the semidefinite program by CLARABEL up to 40, and a low-rank ascent
        beyond. A box with ``solver`` given takes the semidefinite program.
    max_iter : int, optional
        Iteration limit of the solver; a small one raises the value, never lowers it.

    Returns
    -------
    Certificate
        Multipliers ``s`` and, for a box, ``diagonal``; ``witness`` is a two-atom measure and
        ``details["attained"]`` the value that it reaches.

    Raises
    ------
    CertificateError
        The solver proposed nothing usable.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.measures import Box
    >>> bound = field_jacobian(SoftmaxAttention([[1.0]], [[2.0]]), Box([-1.0], [3.0]))
    >>> round(bound.value, 5)
    8.0

    References
    ----------
    Our own theorem (field part); the proof is in the docstring of this module.
    """
    head = softmax_head(attention, "field_jacobian")
    check_domain(domain, head.d)
    if isinstance(domain, PointSet):
        return _points(head, domain, solver, max_iter)
    if isinstance(domain, Box):
        return _box(head, domain, solver, max_iter)
    return _round(head, domain, solver, max_iter)


# -- balls and ellipsoids -------------------------------------------------------------------------------------------


@dual_function("field_jacobian/round")
def _round_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    V, K = problem["values"], problem["keys"]
    s = float(multiplier(multipliers, "s", (1,), positive=True)[0])
    top = max(0.0, lambda_max_upper(s * V.T @ V + K.T @ K / s))
    return float(problem["scale"] * (0.5 * top + problem["slack"]))


def _round(head: SoftmaxHead, domain: Domain, solver: str | None, max_iter: int | None) -> Certificate:
    around = enclosing_round(domain, head.d)
    values, keys = head.V @ around.E, head.A.T @ around.E
    sizes = np.linalg.norm(values), np.linalg.norm(keys)
    # the span first, at unit Frobenius norms, so that the norms are those of small matrices
    values, keys = (M / size if size > 0 else M for M, size in zip((values, keys), sizes, strict=True))
    basis, missed = row_span(values, keys)
    if basis is not None:
        values, keys = values @ basis, keys @ basis
    V, K, product = _normalised(triangular(values), triangular(keys))
    scale = float(sizes[0] * sizes[1] * product)
    error = missed / max(min(spectral_norm(values), spectral_norm(keys)), 1e-300)
    slack = _slack(error + 16.0 * max(head.V.shape + head.A.shape) * EPS) if scale > 0 else 0.0
    s, proposal = _one_multiplier(V.T @ V, K.T @ K, solver, max_iter, trivial=scale == 0)
    z = _balanced_direction(V, K, s)
    u = around.E @ (z if basis is None else basis @ z)
    attained = float(np.linalg.norm(head.V @ u) * np.linalg.norm(head.A.T @ u))
    return certify(
        "field_jacobian/round",
        problem={"values": V, "keys": K, "scale": scale, "slack": slack},
        multipliers={"s": [s]},
        source="field part (own theorem): min over s of lambda_max(s E'V'VE + E'AA'E/s)/2",
        solver=proposal.solver,
        solver_status=proposal.status,
        solver_value=proposal.value * scale,
        domain=domain,
        witness=DiscreteMeasure(np.stack([around.center + u, around.center - u])),
        details={"attained": attained},
        residuals={"to_attained": scale * _round_dual_value(V, K, s) - attained},
    )


def _round_dual_value(V: Array, K: Array, s: float) -> float:
    return 0.5 * max(0.0, lambda_max_upper(s * V.T @ V + K.T @ K / s))


def _one_multiplier(
    M1: Array, M2: Array, solver: str | None, max_iter: int | None, *, trivial: bool
) -> tuple[float, Proposal]:
    """The minimiser of ``lambda_max(s M1 + M2 / s) / 2``; both of norm one, so it lies in [1/2, 2]."""
    if trivial:
        return 1.0, Proposal("none", "zero map", 0.0)
    if solver is None:

        def value(t: float) -> float:
            return 0.5 * float(np.linalg.eigvalsh(np.exp(t) * M1 + np.exp(-t) * M2)[-1])

        t, proposal = scalar_search(value, -np.log(2.0), np.log(2.0), max_iter=max_iter)
        return float(np.exp(t)), proposal
    import cvxpy as cp

    s, q = cp.Variable(), cp.Variable()
    objective = cp.lambda_max(s * M1 + q * M2) / 2
    proposal = cvxpy_solve(cp.Problem(cp.Minimize(objective), [q >= cp.inv_pos(s)]), solver, max_iter)
    return float(s.value), proposal


def _balanced_direction(V: Array, K: Array, s: float) -> Array:
    """A unit z that nearly maximises ``|Vz| |Kz|``: ascent from the top eigenvectors at the optimal s."""
    M1, M2 = V.T @ V, K.T @ K
    _, U = np.linalg.eigh(s * M1 + M2 / s if s > 0 else M1 + M2)
    best, best_value = U[:, -1], -1.0
    starts = [U[:, -1]]
    if U.shape[1] > 1:  # at a kink of lambda_max the optimum mixes two eigenvectors
        starts += [np.cos(a) * U[:, -1] + np.sin(a) * U[:, -2] for a in np.linspace(0.0, np.pi, 9)[1:-1]]
    for z in starts:
        for _ in range(100):
            a, b = float(z @ M1 @ z), float(z @ M2 @ z)
            if a <= 0.0 or b <= 0.0:
                break
            z = M1 @ z / a + M2 @ z / b
            z = z / np.linalg.norm(z)
        value = float(np.linalg.norm(V @ z) * np.linalg.norm(K @ z))
        if value > best_value:
            best, best_value = z, value
    return best


# -- boxes ----------------------------------------------------------------------------------------------------------


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


def _box(head: SoftmaxHead, domain: Box, solver: str | None, max_iter: int | None) -> Certificate:
    r = domain.half_widths
    live = r > 0
    if not live.any():
        live = np.ones_like(live)
    raw = head.V[:, live] * r[live], head.A.T[:, live] * r[live]
    V, K, scale = _normalised(*raw)
    V, K = triangular(V), triangular(K)
    M1, M2 = V.T @ V, K.T @ K
    k = len(M1)
    s, diagonal, proposal = 1.0, np.zeros(k), Proposal("none", "zero map", 0.0)
    step = np.ones(k)
    if scale > 0:
        s, diagonal, step, proposal = _low_rank_ascent(M1, M2, max_iter)
    u = np.zeros(head.d)
    u[live] = step * r[live]
    common = {
        "domain": domain,
        "witness": DiscreteMeasure(np.stack([domain.center + u, domain.center - u])),
        "details": {"attained": float(np.linalg.norm(head.V @ u) * np.linalg.norm(head.A.T @ u))},
    }
    if solver is None and k <= _VERTEX_LIMIT:
        signs = np.array(list(itertools.product([1.0], *[[1.0, -1.0]] * (k - 1))))
        q1, q2 = (2.0 * np.linalg.norm(signs @ M.T, axis=1) for M in raw)
        front = _pareto(q1, q2)
        rounding = (
            16.0 * (head.d + len(head.V)) * EPS * np.array([np.linalg.norm(M) for M in raw]) * np.sqrt(k)
        )
        return _pairs(np.column_stack([q1[front], q2[front]]) + rounding, max_iter, common)
    if scale > 0 and (solver is not None or k <= _SDP_LIMIT):
        s, diagonal, proposal = _box_sdp(M1, M2, solver or "CLARABEL", max_iter)
    return certify(
        "field_jacobian/box",
        problem={"values": V, "keys": K, "scale": scale},
        multipliers={"s": [s], "diagonal": diagonal},
        source="field part on a box (own theorem): min of sum(lambda)/2, Diag(lambda) >= s D V'V D + D AA' D/s",
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
    return float(s.value), np.asarray(diagonal.value, dtype=np.float64), proposal


def _low_rank_ascent(M1: Array, M2: Array, max_iter: int | None) -> tuple[float, Array, Array, Proposal]:
    """Burer-Monteiro: unit rows Z (k, r) ascend ``tr(M1 ZZ') tr(M2 ZZ')``; also the best vertex found by rounding Z."""
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
            signs = trial[
                int((np.sum(trial @ M1 * trial, axis=1) * np.sum(trial @ M2 * trial, axis=1)).argmax())
            ]
    return s, diagonal, signs, Proposal("low-rank ascent", status, value)


# -- point sets -----------------------------------------------------------------------------------------------------


@dual_function("field_jacobian/points")
def _points_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    root = float(np.sqrt(multiplier(multipliers, "s", (1,), positive=True)[0]))
    pairs = problem["pairs"]
    top = float((root * pairs[:, 0] + pairs[:, 1] / root).max(initial=0.0))
    return float(problem["scale"] * (top**2 / 16.0 * (1.0 + 16 * EPS)))


def _points(head: SoftmaxHead, domain: PointSet, solver: str | None, max_iter: int | None) -> Certificate:
    if solver is not None:
        raise ValueError(
            f"solver must be None for a PointSet, received {solver!r}: one multiplier decides, and a search finds it."
        )
    y = domain.points - domain.points.mean(axis=0)
    Y1, Y2 = y @ head.V.T, y @ head.A
    pairs, index = _extreme_pairs(Y1, Y2)
    # differences of rounded images: absolute errors, proportional to the size of the cloud
    size = float(np.linalg.norm(y, axis=1).max()) * 16.0 * (head.d + len(head.V)) * EPS
    rounding = size * np.array([np.linalg.norm(head.V), np.linalg.norm(head.A)])
    q1, q2 = (np.linalg.norm(Y[index[:, 0]] - Y[index[:, 1]], axis=1) for Y in (Y1, Y2))
    best = int((q1 * q2).argmax())
    common = {
        "domain": domain,
        "witness": DiscreteMeasure(domain.points[index[best]]),
        "details": {"attained": float(q1[best] * q2[best]) / 4.0},
    }
    return _pairs(pairs + rounding, max_iter, common)


def _pairs(pairs: Array, max_iter: int | None, common: Mapping[str, Any]) -> Certificate:
    """The certificate of pairs with ``(|V delta|, |A^T delta|)`` in the rows of ``pairs``, rounded outward already."""
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
    """The ``(|V delta|, |A^T delta|)`` of all pairs, thinned to those that some positive combination or their product
    makes largest."""
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


def _normalised(values: Array, keys: Array) -> tuple[Array, Array, float]:
    """Both matrices with norm one, and the product of their norms (all zero when one of them is)."""
    a, b = spectral_norm(values), spectral_norm(keys)
    if a == 0.0 or b == 0.0:
        return np.zeros_like(values), np.zeros_like(keys), 0.0
    return values / a, keys / b, a * b


def _slack(error: float) -> float:
    """What an error of the two factors, of norm one, adds to the product of their norms."""
    return 2.0 * error + error**2
