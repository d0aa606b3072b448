r"""Two tokens: their Jacobian has rank-one rows beside the attention matrix, and the logits tie the two rows together.

Unit ball, notation of :mod:`otattn.lipschitz.constants.self_logit`; ``d = x_1 - x_2``, ``g_i = A x_i + c``,
``l_1 = <g_1, d>``, ``l_2 = -<g_2, d>`` (the lead of a token's own logit), ``p_i = P_ii = 1/(1 + e^{-l_i})``,
``q_i = p_i (1 - p_i) = 1/(4 cosh^2(l_i / 2))``. The weights of row 1 have the mean ``p_1 x_1 + (1 - p_1) x_2`` and the covariance
``q_1 d d^T``, so

.. math:: (Df\,\epsilon)_1 = V\bigl[\, p_1\epsilon_1 + (1-p_1)\epsilon_2
          + q_1\, d\,\bigl(\langle g_1 + A^T d, \epsilon_1\rangle - \langle g_1, \epsilon_2\rangle\bigr)\bigr]

and row 2 by exchanging the tokens. The first part has the norm ``||P|| <= sqrt(max column sum) <= sqrt(T_2)`` (its row sums are
1). The second is, up to the unit vector along d, a matrix of two rows, at most its Frobenius norm:

.. math:: \|Df\| \le v\bigl(\sqrt{T_2} + \sqrt F\bigr), \qquad F = \sup |d|^2 \bigl(q_1^2 N_1 + q_2^2 N_2\bigr), \qquad
          N_1 = |g_1 + A^T d|^2 + |g_1|^2 .

**F.** On a box of ``|d| in [r_0, r_1]``, ``|l_i| in [a_i, b_i]`` the ``q_i`` are at most ``1/(4 cosh^2(a_i/2))``, and ``N_1`` is a
quadratic form in ``z = (x_1, x_2, 1)`` under quadratic constraints: for all real ``nu_1, nu_2, tau`` and ``w >= 0`` with

.. math:: N_1 + \nu_1 l_1 + \nu_2 l_2 - \tau |d|^2 \preceq w_1 |x_1|^2 + w_2 |x_2|^2 + w_0 ,

``N_1 <= w_0 + w_1 + w_2 + |nu_1| b_1 + |nu_2| b_2 + tau r^2``, ``r = r_1`` for ``tau >= 0``, else ``r_0``; a negative value proves
that the box is empty (``l_1 + l_2 = <A d, d>`` is what empties it for negative A). ``N_2`` is the same with the tokens exchanged. A
finite family of multipliers serves all boxes; each misses the inequality by at most its own ``lambda_max``, which is added
(``|z|^2 <= 3``), so any numbers are admissible. The maximum over boxes is by branch and bound; a family that knows the worst
box is grown by cutting planes. For ``A = -alpha I`` this is about ``v (sqrt 2 + a/4)`` instead of ``2 v a``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.linalg import eigh
from scipy.optimize import minimize

from otattn._linalg import EPS, Array, column_of, lambda_max_upper, norm_upper
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number, trivial
from otattn.lipschitz.constants.cells import CellBound, Maximum, boxes, ends, maximise, proved_below
from otattn.lipschitz.constants.self_logit import UnitNumbers, numbers_of
from otattn.lipschitz.hypotheses import every, order_two, softmax
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.softmax import columns_at_most
from otattn.measures.domains import Domain

_CELLS = 60_000
_MARGIN = 1e-11
_LARGEST = 1e150
"""Sums of products of larger multipliers overflow, and a lost term would empty a box that is not."""


class Forms:
    """The quadratic forms in ``z = (x_1, x_2, 1)``, in units of ``unit`` (of the size of g)."""

    def __init__(self, head: UnitNumbers) -> None:
        d = len(head.A)
        zero, one = np.zeros((d, d)), np.eye(d)
        self.unit = max(top(head.a), top(norm_upper(head.c)), 1e-300)  # a float, the unit of length of the gradients
        A, c = head.A / self.unit, head.c / self.unit
        # places of x_1, x_2 and 1 in z, as matrices
        at1, at2, at0 = np.hstack([one, zero, zero[:, :1]]), np.hstack([zero, one, zero[:, :1]]), np.eye(2 * d + 1)[-1:]
        offset = column_of(c) @ at0
        G1, G2, D = A @ at1 + offset, A @ at2 + offset, at1 - at2
        turned = G1 + A.T @ D
        self.N = turned.T @ turned + G1.T @ G1
        l1, l2 = G1.T @ D, G2.T @ D
        self.l1, self.l2 = 0.5 * (l1 + l1.T), -0.5 * (l2 + l2.T)
        self.gap = D.T @ D
        self.parts = [np.diag(np.repeat(part, [d, d, 1])).astype(float) for part in ((0, 0, 1), (1, 0, 0), (0, 1, 0))]
        # |g| is known to this, in the unit; N_1 and the leads then move by at most a multiple of it
        self.noise = head.noise / self.unit

    def combination(self, nu: Array, tau: float) -> Any:
        """``N_1 + nu_1 l_1 + nu_2 l_2 - tau |d|^2``."""
        return self.N + float(nu[0]) * self.l1 + float(nu[1]) * self.l2 - tau * self.gap

    def excess(self, nu: Array, tau: float, w: Array) -> float:
        """By how much the multipliers miss the inequality, outward."""
        M = self.combination(nu, tau) - sum(wi * part for wi, part in zip(w, self.parts, strict=True))
        size = 10.0 + np.abs(nu).sum() + 4 * abs(tau) + w.sum()
        # entries are sums of d products of numbers of at most these sizes
        noise = 0.0 if isinstance(M, BallMatrix) else 64.0 * len(M) * EPS * size
        noise += 40.0 * self.noise * size
        return float(np.maximum(0.0, top(lambda_max_upper(M)) + noise))  # a nan stays one: no bound then

    def scaled(self, nu: Array, tau: float, ratio: Array) -> Array:
        """The least ``t * ratio`` that satisfies the inequality."""
        M = self.combination(nu, tau)
        weight = sum(r * part for r, part in zip(ratio, self.parts, strict=True))
        t = float(eigh(M, weight, eigvals_only=True, subset_by_index=[len(M) - 1] * 2)[0])
        return max(t, 0.0) * ratio


class Family:
    """Bounds ``const + tau r^2 + |nu_1| b_1 + |nu_2| b_2`` of ``N_1``, one for each set of multipliers."""

    def __init__(self, forms: Forms, nu: Array, tau: Array, w: Array) -> None:
        self.nu, self.tau, self.w = nu, tau, w
        slack = np.array([forms.excess(*one) for one in zip(nu, tau, w, strict=True)])
        exact = isinstance(forms.N, BallMatrix)
        self.const = (lift(w) if exact else w).sum(axis=1) + 3.0 * (lift(slack) if exact else slack)

    def __call__(self, r0: Any, r1: Any, b1: Any, b2: Any) -> Any:
        best = np.full(r0.shape, np.inf)
        for (n1, n2), tau, const in zip(np.abs(self.nu), self.tau, self.const, strict=True):
            best = np.minimum(best, const + tau * (r1 if tau >= 0 else r0) ** 2 + n1 * b1 + n2 * b2)
        return best


def share(lead: Any) -> Any:
    """``q^2`` at a lead of the logits."""
    e = np.exp(-np.abs(lead))
    return (e / (1.0 + e) ** 2) ** 2


def _cell_bound(family: Family, unit: float) -> CellBound:
    """``log F`` in units of ``unit^2`` on cells of ``(|d|, |l_1|, |l_2|)``, leads in units of ``unit``."""
    exact = not isinstance(family.const, np.ndarray)

    def bound(lo: Any, hi: Any) -> Array:
        (r0, a1, a2), (r1, b1, b2) = ends(lo, hi, exact)
        N1, N2 = family(r0, r1, b1, b2), family(r0, r1, b2, b1)
        total = share(unit * a1) * np.maximum(N1, 0.0) + share(unit * a2) * np.maximum(N2, 0.0)
        with np.errstate(divide="ignore"):
            value = np.log(total) + 2.0 * np.log(r1)
        # a box that no pair of tokens is in
        return np.where((upper(N1) < 0) | (upper(N2) < 0), -np.inf, upper(value))

    return bound


def _cover(unit: float, reach: float) -> tuple[Array, Array]:
    """Boxes that hold every pair of tokens; no lead exceeds ``reach``."""
    scale = np.append(0.0, np.geomspace(min(0.25 / unit, 0.5 * reach), reach, 7))
    scale[-1] = reach
    return boxes(np.linspace(0.0, 2.0, 9), scale, scale)


def maximum(family: Family, unit: float, reach: float, tol: float) -> Maximum:
    return maximise(_cell_bound(family, unit), *_cover(unit, reach), tol=tol, max_cells=_CELLS)


def largest_lead(head: UnitNumbers, forms: Forms) -> float:
    """No lead exceeds ``|g| |d|``."""
    return 2.0 * (1.0 + 1e-12) * max(top(head.top), 1e-300) / forms.unit


@problem_function("two_tokens")
def _problem(statement: Statement) -> dict[str, Any]:
    if statement.p != 2.0 or statement.n != 2:
        raise ValueError(f"n and p must be 2 for pair, received n = {statement.n}, p = {statement.p:g}.")
    return {"head": numbers_of(statement), "target": number(statement.options, "target", least=-math.inf)}


@dual_function("two_tokens", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    head: UnitNumbers = problem["head"]
    tau = multiplier(multipliers, "tau", multipliers["tau"].shape)
    if tau.ndim != 1 or tau.size == 0:
        raise ValueError(f"tau must be a vector, received shape {tau.shape}.")
    nu, w = multiplier(multipliers, "nu", (tau.size, 2)), multiplier(multipliers, "w", (tau.size, 3), sign=True)
    if max(float(np.abs(part).max()) for part in (nu, tau, w)) > _LARGEST:
        raise ValueError(f"multipliers must be at most {_LARGEST:g}, received larger ones; drop them from the family.")
    forms = Forms(head)
    bound = _cell_bound(Family(forms, nu, tau, w), forms.unit)
    cover = _cover(forms.unit, largest_lead(head, forms))
    log_F = proved_below(bound, *cover, target=problem["target"], max_cells=2 * _CELLS)
    return _bound(lift(log_F) if head.exact else log_F, head, forms.unit)


def _bound(log_F: Any, head: UnitNumbers, unit: float) -> Any:
    margin = 1.0 if head.exact else 1.0 + _MARGIN
    return head.v * (np.sqrt(columns_at_most(2, head.kappa)) + unit * np.exp(0.5 * log_F) * margin) * margin


def _cut(forms: Forms, r: float, b1: float, b2: float, start: Array) -> tuple[Array, float, Array]:
    """Multipliers that are good at ``(|d|, |l_1|, |l_2|) = (r, b1, b2)``."""

    def unpack(theta: Array) -> tuple[Array, float, Array]:
        ratio = np.exp(np.clip(np.array([theta[3], 0.0, theta[4]]), -12.0, 12.0))
        return theta[:2], float(theta[2]), ratio / ratio.sum()

    def value(theta: Array) -> float:
        nu, tau, ratio = unpack(theta)
        w = forms.scaled(nu, tau, ratio)
        return float(w.sum() + tau * r * r + np.abs(nu) @ [b1, b2])

    found = minimize(value, start, method="Nelder-Mead", options={"maxfev": 400, "xatol": 1e-4, "fatol": 1e-6})
    nu, tau, ratio = unpack(found.x)
    return nu, tau, forms.scaled(nu, tau, ratio)


def _only_two(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    return None if n == 2 else f"n must be 2, received {n}"


@theorem(
    "two_tokens",
    statement="quadratic forms of two tokens under quadratic constraints",
    hypotheses="softmax without a mask; any domain; two tokens; p = 2",
    applies=every(softmax(masked=False), _only_two, order_two),
    closed=False,
    count=2,
)
def two_tokens(attention: AttentionMap, domain: Domain, n: int, p: float, *, effort: str = "fast") -> Bound:
    """Upper bound of the Lipschitz constant of two tokens, for any A, V and bias, by branch and bound.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Gap of the branch and bound, 2 percent or 0.5 percent, and number of cutting planes.

    Returns
    -------
    Certificate
        Multipliers ``nu (K, 2)``, ``tau (K,)``, ``w (K, 3)``. A plain :class:`Bound` when V is zero.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = two_tokens(SoftmaxAttention([[-9.0, 0.0], [0.0, -9.0]], [[1.0, 0.0], [0.0, 1.0]]), radius=1.0)
    >>> bound.value < 6.0, bound.verify()   # the general bounds give 18
    (True, True)
    """
    statement = Statement(attention, domain, n, p)
    head = numbers_of(statement)
    if head.v == 0.0:
        return trivial(statement)
    deep = effort == "deep"
    tol, cuts = (1e-2, 150) if deep else (4e-2, 50)
    forms = Forms(head)
    reach = largest_lead(head, forms)
    starts = np.array(
        [
            [0.0, 0.0, 0.5, -4.0, 0.0],
            [0.5, 0.5, 0.0, -4.0, 0.5],
            [3.0, 3.0, -1.0, -4.0, 0.0],
            [6.0, 0.0, -1.0, -9.0, 9.0],
            [-6.0, 0.0, -1.0, -9.0, 9.0],
        ]
    )
    members = [_cut(forms, r, b, b, starts[0]) for r in (1.0, 2.0) for b in (0.1 * reach, reach)]
    for sign in (1.0, -1.0):
        # for A = -sign I, c = 0, N_1 = 2 |x_2|^2 - 6 sign l_1 - |d|^2 = 2 |x_1|^2 - 2 sign l_1 + |d|^2; no descent finds them
        for size, tau, ratio in ((6.0, -1.0, [1e-6, 1e-6, 1.0]), (2.0, 1.0, [1e-6, 1.0, 1e-6])):
            nu = np.array([sign * size, 0.0])
            members.append((nu, tau, forms.scaled(nu, tau, np.array(ratio))))
    best, stale = math.inf, 0
    for k in range(cuts):
        # the last family that cuts off the worst box so far, from changing starts: the search is not convex in w
        family = Family(forms, *(np.array(part) for part in zip(*members, strict=True)))
        found = maximum(family, forms.unit, reach, 4e-2)
        best, stale = (found.value, 0) if found.value < best - 1e-3 else (best, stale + 1)
        if stale > 8:
            break
        r, b1, b2 = (float(x) for x in found.hi)
        members += [_cut(forms, r, *one, starts[k % 5]) for one in ((b1, b2), (b2, b1))]
    family = Family(forms, *(np.array(part) for part in zip(*members, strict=True)))
    found = maximum(family, forms.unit, reach, tol)
    # gradients that vanish have no logarithm
    target = max(found.value, -600.0)
    return certify(
        "two_tokens",
        statement=replace(statement, options={"target": target}),
        problem={"head": head, "target": target},
        multipliers={"nu": family.nu, "tau": family.tau, "w": family.w},
        solver="branch and bound",
        solver_status=found.status(tol),
        solver_value=float(_bound(max(found.seen, -600.0), head, forms.unit)),
        details={"cells": found.cells, "members": len(members)},
    )
