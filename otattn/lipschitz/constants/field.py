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
- Boxes and point sets: see :mod:`otattn.lipschitz.constants._field_hull`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array, product_error
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.rounding import product
from otattn.lipschitz.certificate import (
    Certificate,
    Statement,
    certify,
    dual_function,
    multiplier,
    problem_function,
)
from otattn.lipschitz.constants._dual_quadratic import row_span, triangular
from otattn.lipschitz.constants._field_hull import box_field, points_field, unit_pair
from otattn.lipschitz.constants._solve import Proposal, cvxpy_solve, scalar_search, scalar_value
from otattn.lipschitz.constants.heads import enclosing_round, softmax_head
from otattn.lipschitz.constants.quadratic import norm_product_dual
from otattn.lipschitz.hypotheses import softmax
from otattn.lipschitz.theorem import theorem
from otattn.measures import Box, DiscreteMeasure, Domain, PointSet


@theorem(
    "field_certificate",
    statement="sigma = sup ||V C A||, by one multiplier or one a coordinate",
    hypotheses="softmax, masked or not; any domain, n and p",
    applies=softmax(),
    quantity="field",
    closed=False,
)
def field_certificate(
    attention: AttentionMap,
    domain: Domain,
    n: int | None,
    p: float,
    *,
    solver: str | None = None,
    max_iter: int | None = None,
) -> Certificate:
    r"""Certified bound of ``||D_x Gamma_mu(x)|| = ||V C A||`` over all measures on ``domain`` and all x.

    Exact (to rounding) on balls, ellipsoids and LayerNorm domains, and up to cells on boxes of dimension 12 and less (1e-7
    as a rule; a percent seen in dimension 8). On point sets and larger boxes a percent above the best two-atom measure as
    a rule.

    Other Parameters
    ----------------
    solver : {"CLARABEL", "SCS"}, optional
        Who proposes the multipliers. By default a scalar search where one multiplier decides; for boxes cells
        of the boundary up to dimension 12, the semidefinite program by CLARABEL up to 40, and a low-rank ascent
        beyond. A box with ``solver`` given takes the semidefinite program.
    max_iter : int, optional
        Iteration limit of the solver; a small one raises the value, never lowers it.

    Returns
    -------
    Certificate
        Multipliers ``s`` and, for a box, ``diagonal``, or the ``level`` of the cells; ``witness`` is a two-atom measure and
        ``details["attained"]`` the value that it reaches.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.measures import Box
    >>> bound = field_certificate(SoftmaxAttention([[1.0]], [[2.0]]), domain=Box([-1.0], [3.0]))
    >>> round(bound.value, 5)
    8.0
    """
    statement = Statement(attention, domain, n, p)
    if isinstance(domain, PointSet):
        return points_field(statement, solver, max_iter)
    if isinstance(domain, Box):
        return box_field(statement, solver, max_iter)
    return _round(statement, solver, max_iter)


@problem_function("field_certificate/round")
def _round_problem(statement: Statement) -> dict[str, Any]:
    """``V E`` and ``A^T E`` with norms of about one, on the span that they see, and the product of their units."""
    head = softmax_head(statement.attention, exact=statement.exact)
    around = enclosing_round(statement.domain, head.d, exact=statement.exact)
    raw = head.V @ around.E, head.A.T @ around.E
    rounded = 0.0, 0.0
    if not statement.exact and head.V.any() and head.A.any() and around.radius > 0.0:
        # where terms cancel, this may be all that is left
        rounded = product_error(head.V, around.E), product_error(head.A.T, around.E) + head.lost * around.radius
    (values, keys), units = unit_pair(*raw, least=rounded)
    if statement.exact or units is None:
        return {"values": values, "keys": keys, "units": units, "slack": 0.0, "basis": None}
    basis, missed = row_span(values, keys)
    if basis is not None:
        values, keys = values @ basis, keys @ basis
    error = missed + max(e / u for e, u in zip(rounded, units, strict=True))
    error += 16.0 * max(head.V.shape + head.A.shape) * EPS
    # what an error of the two factors, of norm one, adds to the product of their norms
    slack = 2.0 * error + error**2
    return {"values": triangular(values), "keys": triangular(keys), "units": units, "slack": slack, "basis": basis}


@dual_function("field_certificate/round", exact=True, quantity="field")
def _round_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    V, K, units = problem["values"], problem["keys"], problem["units"]
    s = float(multiplier(multipliers, "s", (1,), positive=True)[0])
    if units is None:
        return 0.0
    return product(norm_product_dual(V, K, s) + problem["slack"], *units)


def _round(statement: Statement, solver: str | None, max_iter: int | None) -> Certificate:
    problem = _round_problem(statement)
    V, K, units, basis = (problem[key] for key in ("values", "keys", "units", "basis"))
    scale = 0.0 if units is None else product(*units)
    s, proposal = _one_multiplier(V.T @ V, K.T @ K, solver, max_iter, trivial=units is None)
    z = _balanced_direction(V, K, s)
    head = softmax_head(statement.attention)
    around = enclosing_round(statement.domain, head.d)
    u = around.E @ (z if basis is None else basis @ z)
    attained = float(np.linalg.norm(head.V @ u) * np.linalg.norm(head.A.T @ u))
    return certify(
        "field_certificate/round",
        statement=statement,
        problem=problem,
        multipliers={"s": [s]},
        **proposal.claims(scale),
        witness=DiscreteMeasure(np.stack([around.center + u, around.center - u])),
        details={"attained": attained},
        residuals={"to_attained": float(_round_dual(problem, {"s": np.array([s])})) - attained},
    )


def _one_multiplier(
    M1: Array, M2: Array, solver: str | None, max_iter: int | None, *, trivial: bool
) -> tuple[float, Proposal]:
    """The minimiser of ``lambda_max(s M1 + M2 / s) / 2``; both of norm one, so it lies in [1/2, 2]."""
    if trivial:
        return 1.0, Proposal()
    if solver is None:

        def value(t: float) -> float:
            return 0.5 * float(np.linalg.eigvalsh(np.exp(t) * M1 + np.exp(-t) * M2)[-1])

        t, proposal = scalar_search(value, -np.log(2.0), np.log(2.0), max_iter=max_iter)
        return float(np.exp(t)), proposal
    import cvxpy as cp

    s, q = cp.Variable(), cp.Variable()
    objective = cp.lambda_max(s * M1 + q * M2) / 2
    proposal = cvxpy_solve(cp.Problem(cp.Minimize(objective), [q >= cp.inv_pos(s)]), solver, max_iter)
    return scalar_value(s), proposal


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
