r"""Column sums of softmax attention: ``kappa = max <A x + c, y - x>`` over x, y in the domain.

For every measure on the domain ``log T <= kappa``, T the largest column sum (proof in
:func:`otattn.lipschitz.upper.softmax.column_sum`). Not for masked attention, whose rows sum over different sets.

Duals, by ``gamma <= 1 / (4 nu) + nu gamma^2`` for every ``nu > 0``:

- ball or ellipsoid ``E z + b``, with ``A' = E^T A E``, ``c' = E^T (A b + c)``:
  ``max_z |A' z + c'| - <A' z + c', z>`` is at most
  ``1 / (4 nu) + max_z nu |A' z + c'|^2 - <A' z + c', z>``, a quadratic over the unit ball, whose own dual
  (one multiplier, found inside the dual function) is exact;
- box: the quadratic ``<A' z + c', z' - z>`` over the box of pairs (z, z'), with one multiplier a coordinate;
- points: the smallest ball around them (coarse: give an Ellipsoid when the cloud is not round).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array, mid, norm_upper, product_error, spectral_norm, symmetrize
from otattn.attention import AttentionMap
from otattn.lipschitz.certificate import (
    Certificate,
    Statement,
    certify,
    dual_function,
    multiplier,
    problem_function,
)
from otattn.lipschitz.constants._dual_quadratic import (
    box_maximum,
    box_multipliers,
    box_sdp_constraint,
    row_span,
)
from otattn.lipschitz.constants._solve import Proposal, cvxpy_solve, scalar_search, scalar_value
from otattn.lipschitz.constants.heads import enclosing_round, gradient_error, softmax_head
from otattn.lipschitz.constants.quadratic import column_dual
from otattn.lipschitz.constants.regions import Region
from otattn.lipschitz.hypotheses import softmax
from otattn.lipschitz.theorem import theorem
from otattn.measures import Box, Domain

# with the data normalised kappa <= 2, so 1 / (4 nu) <= 2; and nu / 4 - 1 <= kappa
_LOW, _HIGH = 0.125, 12.0


@theorem(
    "column_exponent",
    statement="kappa = max <A x + c, y - x>",
    hypotheses="softmax without a mask; any domain",
    applies=softmax(masked=False),
    quantity="column_exponent",
    closed=False,
)
def column_exponent(
    attention: AttentionMap,
    domain: Domain,
    n: int | None,
    p: float,
    *,
    solver: str | None = None,
    max_iter: int | None = None,
) -> Certificate:
    r"""Certified bound of ``kappa = max_{x, y} <A x + c, y - x>``, the logarithm of the largest column sum.

    ``int k(x, y) dmu(x) <= e^kappa`` for every measure on the domain. Exact (to rounding) on balls without
    bias: ``a/4`` for ``A = alpha I``, ``2a`` for ``A = -alpha I``, ``a`` for skew A, with ``a = ||A|| R^2``.

    Other Parameters
    ----------------
    solver : {"CLARABEL", "SCS"}, optional
        By default a scalar search, and CLARABEL for boxes.
    max_iter : int, optional
        Iteration limit of the solver.

    Returns
    -------
    Certificate
        Multiplier ``nu``; ``diagonal`` (2k,) for a box.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.attention import SoftmaxAttention
    >>> round(column_exponent(SoftmaxAttention(np.eye(3), np.eye(3)), radius=2.0).value, 6)
    1.0
    """
    statement = Statement(attention, domain, n, p)
    return _box(statement, solver, max_iter) if isinstance(domain, Box) else _round(statement, solver, max_iter)


@problem_function("column_exponent/round")
def _round_problem(statement: Statement) -> dict[str, Any]:
    """``E^T A E`` and ``E^T (A b + c)`` in units of their norms, on the span that they see."""
    head = softmax_head(statement.attention, masked=False, exact=statement.exact)
    around = enclosing_round(statement.domain, head.d, exact=statement.exact)
    E = around.E
    left, shifted = E.T @ head.A, head.A @ around.center + head.c
    A, c = left @ E, E.T @ shifted
    unit = spectral_norm(mid(A)) + float(np.linalg.norm(mid(c)))
    if not (E.any() and (head.A.any() or head.c.any())) or (statement.exact and not A.any() and not c.any()):
        return {"A": A, "c": c, "unit": 0.0, "slack": 0.0}
    if statement.exact:
        unit = max(unit, 1e-290)
        return {"A": A / unit, "c": c / unit, "unit": unit, "slack": 0.0}
    # z and z' - z have norms at most 1 and 2; each product was rounded
    size = float(norm_upper(E))
    rounded = product_error(left, E) + product_error(E.T, head.A) * size + product_error(E.T, shifted[:, None])
    rounded += size * gradient_error(head, around.center, size)
    # all of it may have cancelled: what rounded is left
    unit = max(unit, rounded, 1e-290)
    A, c = A / unit, c / unit
    basis, missed = row_span(A, A.T, c[None])
    if basis is not None:
        A, c = basis.T @ A @ basis, basis.T @ c
    return {"A": A, "c": c, "unit": unit, "slack": 6.0 * (missed + rounded / unit) + 64.0 * len(c) * EPS}


@dual_function("column_exponent/round", exact=True, quantity="column_exponent")
def _round_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    nu = float(multiplier(multipliers, "nu", (1,), positive=True)[0])
    if problem["unit"] == 0.0:
        return 0.0
    return problem["unit"] * (column_dual(problem["A"], problem["c"], nu) + problem["slack"])


def _round(statement: Statement, solver: str | None, max_iter: int | None) -> Certificate:
    problem = _round_problem(statement)
    A, c, scale = problem["A"], problem["c"], problem["unit"]
    nu, proposal = 1.0, Proposal()
    if scale > 0:
        if solver is None:
            nu, proposal = scalar_search(lambda t: float(column_dual(A, c, t)), _LOW, _HIGH, max_iter=max_iter)
        else:
            nu, proposal = _round_sdp(A, c, solver, max_iter)
    return certify(
        "column_exponent/round",
        statement=statement,
        problem=problem,
        multipliers={"nu": [nu]},
        **proposal.claims(scale),
    )


def _round_sdp(A: Array, c: Array, solver: str, max_iter: int | None) -> tuple[float, Proposal]:
    import cvxpy as cp

    k = len(c)
    nu, tau, offset = cp.Variable(), cp.Variable(nonneg=True), cp.Variable()
    constraint = box_sdp_constraint(tau * np.ones(k), nu * (A.T @ A) - symmetrize(A), 2.0 * nu * (A.T @ c) - c, offset)
    objective = 0.25 * cp.inv_pos(nu) + nu * float(c @ c) + tau + offset
    proposal = cvxpy_solve(cp.Problem(cp.Minimize(objective), [constraint]), solver, max_iter)
    return scalar_value(nu), proposal


@problem_function("column_exponent/box")
def _box_problem(statement: Statement) -> dict[str, Any]:
    """The form on the box ``|z_k| <= 1`` of the sides that are not zero, in units of its norm."""
    head = softmax_head(statement.attention, masked=False, exact=statement.exact)
    reach, center = Region.of(statement.domain).reach, statement.domain.center
    assert reach is not None
    live = np.flatnonzero(reach > 0)
    if not live.size:
        return {"A": head.A, "c": head.c, "unit": 0.0, "slack": 0.0}
    r = reach[live]
    shifted = (head.A @ center + head.c)[live]
    A, c = ((head.A[np.ix_(live, live)] * r).T * r).T, shifted * r
    unit = spectral_norm(mid(A)) + float(np.linalg.norm(mid(c)))
    if not (head.A.any() or head.c.any()) or (statement.exact and not A.any() and not c.any()):
        return {"A": A, "c": c, "unit": 0.0, "slack": 0.0}
    unit, slack = max(unit, 1e-290), 0.0
    if not statement.exact:
        size = float(np.linalg.norm(r))
        rounded = 2.0 * size * gradient_error(head, center, size)
        unit = max(unit, rounded)  # all of A b + c may have cancelled: what rounded is left
        slack = rounded / unit + 16.0 * len(r) * EPS
    return {"A": A / unit, "c": c / unit, "unit": unit, "slack": slack}


@dual_function("column_exponent/box", exact=True, quantity="column_exponent")
def _box_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    if problem["unit"] == 0.0:
        return 0.0
    H, b = _pair_form(problem["A"], problem["c"])
    diagonal = multiplier(multipliers, "diagonal", (len(b),))
    return problem["unit"] * np.maximum(0.0, box_maximum(H, b, diagonal) + problem["slack"])


def _pair_form(A: Any, c: Any) -> tuple[Any, Any]:
    """``<A z + c, z' - z>`` as a quadratic in ``(z, z')``."""
    k = len(c)
    first, second = np.eye(k, 2 * k), np.eye(k, 2 * k, k)
    whole = (first - second).T @ (A @ first)
    return -0.5 * (whole + whole.T), (second - first).T @ c


def _box(statement: Statement, solver: str | None, max_iter: int | None) -> Certificate:
    problem = _box_problem(statement)
    scale = problem["unit"]
    diagonal, proposal = np.zeros(2 * len(problem["c"])), Proposal()
    if scale > 0:
        H, b = _pair_form(problem["A"], problem["c"])
        diagonal, proposal = box_multipliers(H, b, solver or "CLARABEL", max_iter)
    return certify(
        "column_exponent/box",
        statement=statement,
        problem=problem,
        multipliers={"diagonal": diagonal},
        **proposal.claims(scale),
    )
