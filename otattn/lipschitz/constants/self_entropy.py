r"""Self-token entropy: how far a row of softmax attention can spread, given that it sees its own token.

The logits are ``<g, x>``, ``g = A x_i + c``, and by the entropy of the row (proof in :mod:`otattn.lipschitz.constants.self_logit`)
``<g, m> >= <g, x_i> - tau_n``. With tokens ``x = E z + b``, ``|z| <= 1``, and ``h = E^T g``, b cancels:
``lambda_max(C) <= ||E||^2 (1 - |m_z|^2)`` and ``|m_z| >= (<h, z_i> - tau_n)_+ / |h|``,
``|h| <= ||E|| |g|``; hence

.. math:: W := \sup |g|^2 \lambda_{\max}(C) \le
          \sup_{|z| \le 1} \|E\|^2 |g(z)|^2 - \bigl((\langle h(z), z\rangle - \tau_n)_+\bigr)^2 .

Masked rows see at most n tokens, their own included, so all of this holds for them. The dual: the square is
``-(u_+)^2 = min_{nu >= 0} nu^2 - 2 nu u``, so for every ``nu >= 0`` what remains is a quadratic in z over
the ball (exact dual, one multiplier, found inside the dual function) or over the box (one multiplier a
coordinate).

Row constant: with ``B_j = I + (x_j - m) g^T`` the operator ``eps -> sum_j P_j B_j eps_j`` has norm at most

- ``phi(t)``, t = R max|g| (R the radius of a ball around the domain);
- ``sqrt(1 + W)``: Cauchy-Schwarz, ``sum_j P_j B_j B_j^T = I + |g|^2 C`` and
  ``sum_j P_j |eps_j|^2 <= |eps|^2``;
- ``1 + sqrt(W / 2)``: for centred ``s_j = <u, x_j - m>``, ``sum_j P_j^2 s_j^2 <= sum_j P_j s_j^2 / 2``. If
  all ``P_j <= 1/2`` it is plain. If ``P_1 = 1 - r > 1/2``, with shares ``q_j = P_j s_j^2`` of sum lambda and
  ``m = lambda - q_1``: ``(P_1 s_1)^2 = (sum_{j > 1} P_j s_j)^2 <= r m``, so the sum is at most
  ``min((1 - r)(lambda - m), r m) + r m <= 2 r (1 - r) lambda <= lambda / 2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn._linalg import EPS, Array, mid, product_error, spectral_norm
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import is_interval, lift
from otattn.lipschitz.arithmetic.rounding import LEAST, least
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
    box_sdp_constraint,
    row_span,
    triangular,
)
from otattn.lipschitz.constants._solve import Proposal, cvxpy_solve, scalar_search, scalar_value
from otattn.lipschitz.constants.heads import enclosing_round, gradient_error, softmax_head
from otattn.lipschitz.constants.quadratic import ball_maximum
from otattn.lipschitz.constants.regions import Region, see
from otattn.lipschitz.constants.rows import row_norm as phi
from otattn.lipschitz.constants.self_logit import entropy_gap
from otattn.lipschitz.hypotheses import every, softmax, tokens
from otattn.lipschitz.theorem import theorem
from otattn.measures import Ball, Box, Domain


@theorem(
    "self_entropy",
    statement="sup |g|^2 lambda_max(C) by the entropy of a row that sees its own token",
    hypotheses="softmax, masked or not; any domain; n tokens",
    applies=every(softmax(), tokens()),
    quantity="self_entropy",
    closed=False,
)
def self_entropy(
    attention: AttentionMap, domain: Domain, n: int, p: float, *, solver: str | None = None, max_iter: int | None = None
) -> Certificate:
    r"""Certified bound of ``W = sup |g_i|^2 lambda_max(C_i)`` over n tokens in the domain.

    Other Parameters
    ----------------
    solver : {"CLARABEL", "SCS"}, optional
        By default a scalar search, and CLARABEL for boxes.
    max_iter : int, optional
        Iteration limit of the solver.

    Returns
    -------
    Certificate
        Multiplier ``nu`` (the linearisation of the square); ``diagonal`` for a box. ``details["tau"]`` is
        ``tau_n``.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.attention import SoftmaxAttention
    >>> head = SoftmaxAttention(np.eye(2), np.eye(2))
    >>> round(self_entropy(head, radius=10.0, n=1).value, 4)  # a single token: |g|^2 (R^2 - |x|^2)
    2500.0
    """
    return _certificate("self_entropy", Statement(attention, domain, n, p), solver, max_iter)


@theorem(
    "row_certificate",
    statement="min(phi, sqrt(1 + W), 1 + sqrt(W / 2)) of one row",
    hypotheses="softmax, masked or not; any domain; n tokens",
    applies=every(softmax(), tokens()),
    quantity="row",
    closed=False,
)
def row_certificate(
    attention: AttentionMap, domain: Domain, n: int, p: float, *, solver: str | None = None, max_iter: int | None = None
) -> Certificate:
    r"""Certified bound of the norm of one row, ``eps -> sum_j P_ij (I + (x_j - m_i) g_i^T) eps_j``.

    The value matrix is left out (V = I). It is ``min(phi(t), sqrt(1 + W), 1 + sqrt(W / 2))`` with W from
    :func:`self_entropy`, whose parameters and multipliers it shares.

    Other Parameters
    ----------------
    solver, max_iter
        As for :func:`self_entropy`.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.attention import SoftmaxAttention
    >>> round(row_certificate(SoftmaxAttention(np.zeros((2, 2)), np.eye(2)), radius=1.0, n=8).value, 6)
    1.0
    """
    return _certificate("row_certificate", Statement(attention, domain, n, p), solver, max_iter)


@dual_function("self_entropy", exact=True, quantity="self_entropy")
def _entropy_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    nu = float(multiplier(multipliers, "nu", (1,), sign=True)[0])
    if problem["unit"] == 0.0:
        return 0.0
    diagonal = multiplier(multipliers, "diagonal", problem["c"].shape) if problem["box"] else None
    unit = lift(problem["unit"]) if isinstance(problem["G"], BallMatrix) else problem["unit"]
    value = np.square(unit) * np.maximum(0.0, _dual_value(problem, nu, diagonal) + problem["slack"])
    return value if is_interval(value) else max(float(value), LEAST)  # it may underflow, and is not 0


@dual_function("row_certificate", exact=True, quantity="row")
def _row_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    W = _entropy_dual(problem, multipliers)
    return least(phi(problem["logits"]), np.sqrt(1.0 + W), 1.0 + np.sqrt(W / 2.0))


def _dual_value(problem: Mapping[str, Any], nu: float, diagonal: Array | None) -> Any:
    G, c, S, h, tau = (problem[key] for key in ("G", "c", "S", "h", "tau"))
    number: Any = lift(nu) if isinstance(G, BallMatrix) else nu
    constant = number * number + (2.0 * number * tau if nu > 0 else 0.0) + problem["constant"]
    form, linear = G.T @ G - 2.0 * nu * S, 2.0 * (c - nu * h)
    return constant + (ball_maximum(form, linear) if diagonal is None else box_maximum(form, linear, diagonal))


def _certificate(name: str, statement: Statement, solver: str | None, max_iter: int | None) -> Certificate:
    problem = _row_problem(statement) if name == "row_certificate" else _entropy_problem(statement)
    nu, diagonal, proposal = 0.0, np.zeros(len(problem["c"])), Proposal()
    if problem["unit"] > 0:
        if problem["box"] or solver is not None:
            nu, diagonal, proposal = _sdp(problem, solver or "CLARABEL", max_iter)
        else:
            nu, proposal = scalar_search(lambda t: float(_dual_value(problem, t, None)), 0.0, 1.0, max_iter=max_iter)
    scale = problem["unit"] ** 2 if name == "self_entropy" else float("nan")
    return certify(
        name,
        statement=statement,
        problem=problem,
        multipliers={"nu": [nu], "diagonal": diagonal} if problem["box"] else {"nu": [nu]},
        **proposal.claims(scale),
        details={"tau": problem["tau_n"], "radius": problem["radius"]},
    )


@problem_function("row_certificate")
def _row_problem(statement: Statement) -> dict[str, Any]:
    form = softmax_head(statement.attention, exact=statement.exact).on_span(ball=isinstance(statement.domain, Ball))
    return {**_entropy_problem(statement), "logits": see(form, statement.domain).t_ball}


@problem_function("self_entropy")
def _entropy_problem(statement: Statement) -> dict[str, Any]:
    """``radius |g(z)|`` as ``|G z + g0|``, ``<h(z), z>`` as ``z^T S z + h^T z``, in units that bound both by one."""
    exact, domain = statement.exact, statement.domain
    head = softmax_head(statement.attention, exact=exact)
    around = _box_round(domain) if isinstance(domain, Box) else enclosing_round(domain, head.d, exact=exact)
    E, center, radius = around
    E = BallMatrix.exact(E) if exact else E
    shifted, left = head.A @ center + head.c, E.T @ head.A
    G, g0 = (head.A @ E) * radius, shifted * radius
    S, h = left @ E, E.T @ shifted
    # |z| may reach radius / min(r) in a box, but |E z| stays below the radius
    unit = spectral_norm(mid(G if not isinstance(domain, Box) else head.A * radius * radius)) + float(
        np.linalg.norm(mid(g0))
    )
    tau = entropy_gap(check.count(statement.n, "n"))
    data: dict[str, Any] = {"box": isinstance(domain, Box), "radius": radius, "tau_n": tau}
    nothing = radius == 0.0 or not (head.A.any() or head.c.any())
    if nothing or (exact and not G.any() and not g0.any()):
        return {**data, "G": G, "c": h, "S": S, "h": h, "constant": 0.0, "tau": 0.0, "unit": 0.0, "slack": 0.0}
    rounded = 0.0
    if not exact:
        rounded = product_error(head.A, E) * radius + product_error(left, E) + product_error(E.T, head.A) * radius
        rounded += 2.0 * radius * gradient_error(head, center, radius)
    # where all of it cancelled, what rounded is left
    unit = max(unit, rounded, 1e-290)
    G, g0, S, h = G / unit, g0 / unit, (S + S.T) / (2.0 * unit), h / unit
    c, slack = G.T @ g0, 0.0
    share: Any = (lift(tau) if exact else tau) / unit
    if not exact:
        # |g| and <h, z> are at most one: errors of both, at most one too, enter the square about twice
        slack = 16.0 * rounded / unit + 64.0 * (len(c) + head.d) * EPS
        if not data["box"]:
            basis, missed = row_span(G, S, h[None], c[None])
            slack += 16.0 * missed
            if basis is not None:
                G, S, h, c = G @ basis, basis.T @ S @ basis, basis.T @ h, basis.T @ c
            G = triangular(G)
    return {**data, "G": G, "c": c, "S": S, "h": h, "constant": g0 @ g0, "tau": share, "unit": unit, "slack": slack}


def _box_round(domain: Box) -> tuple[Array, Array, float]:
    """The sides of a box as columns, its centre, and its radius."""
    region = Region.of(domain)
    r = region.reach
    assert r is not None
    assert region.center is not None
    E = np.diag(r)[:, r > 0] if (r > 0).any() else np.diag(r)[:, :1]
    return E, region.center, float(region.radius)


def _sdp(problem: Mapping[str, Any], solver: str, max_iter: int | None) -> tuple[float, Array, Proposal]:
    import cvxpy as cp

    G, c, S, h, tau = (problem[key] for key in ("G", "c", "S", "h", "tau"))
    k = len(c)
    nu, offset = cp.Variable(nonneg=True), cp.Variable()
    diagonal = cp.Variable(k if problem["box"] else (), nonneg=True)
    spread = diagonal if problem["box"] else diagonal * np.ones(k)
    constraint = box_sdp_constraint(spread, G.T @ G - 2.0 * nu * S, 2.0 * (c - nu * h), offset)
    objective = cp.square(nu) + 2.0 * tau * nu + problem["constant"] + cp.sum(diagonal) + offset
    proposal = cvxpy_solve(cp.Problem(cp.Minimize(objective), [constraint]), solver, max_iter)
    # the solver may leave the sign of nu to rounding
    return max(0.0, scalar_value(nu)), np.broadcast_to(np.asarray(diagonal.value), k).astype(float), proposal
