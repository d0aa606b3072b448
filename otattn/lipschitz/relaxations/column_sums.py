r"""Column sums of softmax attention: ``kappa = max <A x + c, y - x>`` over x, y in the domain.

For every measure mu on the domain, ``k(x, y) = e^{<g(x), y>} / int e^{<g(x), z>} dmu(z)`` and
``T = int k(x, y) dmu(x)`` (for n tokens, ``T_j = sum_i P_ij``), with ``alpha = k(., y) mu / T`` of mean
``xbar``: ``log k(x, y) <= int <g(x), y - x'> dalpha(x') - H`` by Gibbs' inequality, H the entropy of alpha
relative to mu, and ``log T = int log k dalpha + H``, so ``log T <= <g(xbar), y - xbar> <= kappa``. Not for
masked attention, whose rows sum over different sets.

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
from numpy.typing import NDArray

from otattn._linalg import spectral_norm, symmetrize
from otattn.lipschitz.relaxations._heads import check_domain, enclosing_round, softmax_head
from otattn.lipschitz.relaxations._quadratic import (
    EPS,
    box_multipliers,
    box_sdp_constraint,
    quadratic_sup,
    row_span,
)
from otattn.lipschitz.relaxations._solve import Proposal, cvxpy_solve, scalar_search, scalar_value
from otattn.lipschitz.relaxations.certificate import Certificate, certify, dual_function, multiplier
from otattn.measures import Box, Domain

__all__ = ["kappa"]

Array = NDArray[np.float64]
# with the data normalised kappa <= 2, so 1 / (4 nu) <= 2; and nu / 4 - 1 <= kappa
_LOW, _HIGH = 0.125, 12.0


def kappa(attention: Any, domain: Domain, *, solver: str | None = None, max_iter: int | None = None) -> Certificate:
    r"""Certified bound of ``kappa = max_{x, y} <A x + c, y - x>``, the logarithm of the largest column sum.

    ``int k(x, y) dmu(x) <= e^kappa`` for every measure on the domain. Exact (to rounding) on balls without
    bias: ``a/4`` for ``A = alpha I``, ``2a`` for ``A = -alpha I``, ``a`` for skew A, with ``a = ||A|| R^2``.

    Parameters
    ----------
    attention : SoftmaxAttention
    domain : Ball, Ellipsoid, LayerNormDomain, Box or PointSet
    solver : {"CLARABEL", "SCS"}, optional
        By default a scalar search, and CLARABEL for boxes.
    max_iter : int, optional
        Iteration limit of the solver.

    Returns
    -------
    Certificate
        Multiplier ``nu``; ``diagonal`` (2k,) for a box.

    Raises
    ------
    ValueError
        Masked attention.
    CertificateError
        The solver proposed nothing usable.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.measures import Ball
    >>> round(kappa(SoftmaxAttention(np.eye(3), np.eye(3)), Ball(2.0)).value, 6)
    1.0

    References
    ----------
    Our own theorem (column sums); the proof is in the docstring of this module.
    """
    head = softmax_head(attention, "kappa")
    if head.causal:
        raise ValueError(
            "attention must not be masked for column sums, received MaskedAttention: its rows sum over "
            "different sets, and T_j <= e^kappa fails for it; pass the unmasked head if that is what you mean."
        )
    check_domain(domain, head.d)
    if isinstance(domain, Box):
        live = np.flatnonzero(domain.half_widths > 0)
        r = domain.half_widths[live]
        A, c = r[:, None] * head.A[np.ix_(live, live)] * r, r * (head.A[live] @ domain.center + head.c[live])
        return _box(A, c, domain, solver, max_iter)
    around = enclosing_round(domain, head.d)
    A, c = around.E.T @ head.A @ around.E, around.E.T @ (head.A @ around.center + head.c)
    return _round(A, c, domain, solver, max_iter)


@dual_function("column_sums/round")
def _round_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    nu = float(multiplier(multipliers, "nu", (1,), positive=True)[0])
    return float(problem["scale"] * (_dual_value(problem["A"], problem["c"], nu) + problem["slack"]))


def _dual_value(A: Array, c: Array, nu: float) -> float:
    return 0.25 / nu + nu * float(c @ c) + quadratic_sup(nu * A.T @ A - A, 2.0 * nu * A.T @ c - c)


def _round(A: Array, c: Array, domain: Domain, solver: str | None, max_iter: int | None) -> Certificate:
    head_dim = domain.dim or len(c)  # the longest inner products in A and c
    scale, slack = float(np.linalg.norm(A)) + float(np.linalg.norm(c)), 0.0
    nu, proposal = 1.0, Proposal("none", "zero map", 0.0)
    if scale > 0:
        A, c = A / scale, c / scale
        basis, missed = row_span(A, A.T, c[None])
        if basis is not None:
            A, c = basis.T @ A @ basis, basis.T @ c
        top = spectral_norm(A) + float(np.linalg.norm(c))
        A, c, scale = A / top, c / top, scale * top
        # z and z' - z have norms at most 1 and 2; products of three matrices were rounded
        slack = 6.0 * missed / top + 64.0 * head_dim * EPS
        if solver is None:
            nu, proposal = scalar_search(lambda t: _dual_value(A, c, t), _LOW, _HIGH, max_iter=max_iter)
        else:
            nu, proposal = _round_sdp(A, c, solver, max_iter)
    return certify(
        "column_sums/round",
        problem={"A": A, "c": c, "scale": scale, "slack": slack},
        multipliers={"nu": [nu]},
        source="column sums (own theorem): min over nu of 1/(4 nu) + max_z nu|Az+c|^2 - <Az+c,z>",
        solver=proposal.solver,
        solver_status=proposal.status,
        solver_value=proposal.value * scale,
        domain=domain,
    )


def _round_sdp(A: Array, c: Array, solver: str, max_iter: int | None) -> tuple[float, Proposal]:
    import cvxpy as cp

    k = len(c)
    nu, tau, offset = cp.Variable(), cp.Variable(nonneg=True), cp.Variable()
    constraint = box_sdp_constraint(tau * np.ones(k), nu * (A.T @ A) - symmetrize(A), 2.0 * nu * (A.T @ c) - c, offset)
    objective = 0.25 * cp.inv_pos(nu) + nu * float(c @ c) + tau + offset
    proposal = cvxpy_solve(cp.Problem(cp.Minimize(objective), [constraint]), solver, max_iter)
    return scalar_value(nu), proposal


@dual_function("column_sums/box")
def _box_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    H, b = _pair_form(problem["A"], problem["c"])
    diagonal = multiplier(multipliers, "diagonal", (len(b),))
    return float(problem["scale"] * max(0.0, quadratic_sup(H, b, diagonal)))


def _pair_form(A: Array, c: Array) -> tuple[Array, Array]:
    """``<A z + c, z' - z>`` as a quadratic in ``(z, z')``."""
    return np.block([[-symmetrize(A), 0.5 * A.T], [0.5 * A, np.zeros_like(A)]]), np.concatenate([-c, c])


def _box(A: Array, c: Array, domain: Box, solver: str | None, max_iter: int | None) -> Certificate:
    scale = spectral_norm(A) + float(np.linalg.norm(c))
    diagonal, proposal = np.zeros(2 * len(c)), Proposal("none", "zero map", 0.0)
    if scale > 0:
        A, c = A / scale, c / scale
        H, b = _pair_form(A, c)
        diagonal, proposal = box_multipliers(H, b, solver or "CLARABEL", max_iter)
    return certify(
        "column_sums/box",
        problem={"A": A, "c": c, "scale": scale},
        multipliers={"diagonal": diagonal},
        source="column sums on a box (own theorem): Shor dual of <Az+c, z'-z>",
        solver=proposal.solver,
        solver_status=proposal.status,
        solver_value=proposal.value * scale,
        domain=domain,
    )
