r"""The mean-field constant by weights that grow with the gap of a logit to the row's largest.

Notation of :mod:`otattn.lipschitz.upper.mean_field` on the unit ball at p = 2: ``a = ||A||``, ``G_x = |g_x|``, ``G_1 = max |g|``,
``|V D eps(x)| <= sigma |eps(x)|``, ``f(x) = |g(x)| - <g(x),x>``. There a row charges every column with all of its spread: the worst
row puts its mass on two tokens, and the column that is charged for it holds nothing. Here a column pays the more for a row the
closer its logit is to the row's largest; and what a row can do is known from its own token, ``|x|``, ``|g_x|`` and ``<g_x,x>``.

**Row.** With ``chi_x(y) = e^{-rate (G_x - <g_x,y>)}``, at most 1, Cauchy-Schwarz gives, for a unit u and ``w = V^T u``,
``<u, V K eps(x)> = E_{P_x} <w + <w, y - m_x> g_x, eps(y)>``, so

.. math:: |V K\epsilon(x)|^2 \le v^2 \Lambda_x \int \frac{k(x,y)}{\chi_x(y)} |\epsilon(y)|^2 d\mu(y), \qquad
          \Lambda_x = \sup_{|u| \le 1} E_{y\sim P_x}[\chi_x(y)\, |u + \langle u, y - m_x\rangle g_x|^2] ,

and ``Lip <= sigma + v (sup_y T(y))^{1/2}``, ``T(y) = int k(x,y) Lambda_x / chi_x(y) dmu(x)``.

**Column.** M1 with ``w = Lambda_x e^{rate (G_x - <g_x,y>)}``, alpha of mean xbar, ``rho = |xbar|``, ``gamma = |g(xbar)|``, gives

.. math:: \log T \le (1 - rate)\,\gamma - \langle g(\bar x), \bar x\rangle + E_\alpha[rate\, G_x + \log\Lambda_x - KL(\alpha|P_x)] ,

since ``(1 - rate) <g(xbar), y> <= (1 - rate) gamma``. The variational formula of the divergence with ``log b_x(y) = -sharp (1 -
<x,y>)``, affine in y, gives

.. math:: -KL(\alpha|P_x) \le \log E_{P_x} b_x - E_{y\sim\alpha} \log b_x = \log E_{P_x} b_x + sharp\,(1 - \langle x, \bar x\rangle) ,

on average over x at most ``E_alpha log E_{P_x} b_x + sharp (1 - rho^2)``. :mod:`otattn.lipschitz.forms.circle_law` bounds ``W(x) >=
Lambda_x E_{P_x} b_x``.

**Average.** If for every x of the ball

.. math:: \log W(x) + rate\, G_x \le w_0 + w_1 |x|^2 + w_2 G_x^2 + w_3 \langle g_x, x\rangle ,

a quadratic polynomial with the matrix ``Q = w_1 + w_2 A^T A + w_3 (A + A^T)/2``, then its mean over alpha is at most its value at xbar
and ``lam (1 - rho^2)``, ``lam >= max(0, lambda_max(Q))``, as ``tr Cov_alpha <= 1 - rho^2``. So

.. math:: \log T \le \sup_{\bar x}\; (1 - w_3)\, f(\bar x) + (w_3 - rate)\gamma + w_2 \gamma^2 + (w_1 - sharp - \lambda) \rho^2
          + w_0 + sharp + \lambda .

The w_0 of given ``w_1, w_2 >= 0, w_3 <= 1`` is a maximum over ``(|x|, |g_x|, <g_x,x>)``; self-logit inequalities, of A and of -A, say
where there is an x.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array, lambda_max_upper
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import log, log_sum, safe_exp, top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number
from otattn.lipschitz.constants.cells import boxes, ends, maximise, proved_below
from otattn.lipschitz.constants.heads import UnitNumbers, numbers_of, unit_numbers
from otattn.lipschitz.constants.self_logit import Barycentre, SelfLogit
from otattn.lipschitz.forms.circle_law import SHAPE, CircleLaw
from otattn.lipschitz.forms.logit_gap_search import Samples
from otattn.lipschitz.hypotheses import any_measure, every, order_two, softmax
from otattn.lipschitz.theorem import theorem
from otattn.measures.domains import Domain

_CELLS, _LAWS = 200_000, {"fast": 100_000, "deep": 800_000}
_CHUNK = 512
_RANGE = 2.0, 300.0
"""``max |g|``: below it the general bound is no worse, above it the polygon of the law is too coarse."""
_RAISED = 1.0 + 1e-9
"""By which w_0 is raised, above what its proofs in two arithmetics differ by."""
_STEEP = 1e5
"""Weights and sharp are at most this: their differences keep their digits."""


def _family(head: UnitNumbers, multipliers: Mapping[str, Array]) -> tuple[Barycentre, SelfLogit]:
    """The self-logit inequalities of A, and those of -A."""
    above = {"nu": multipliers["nu_above"], "gap": multipliers["gap_above"]}
    return Barycentre.of(head, SelfLogit.of(head, multipliers)), SelfLogit.of(_negative(head), above)


def _negative(head: UnitNumbers) -> UnitNumbers:
    return replace(head, A=-head.A, c=-head.c)


@dataclass(frozen=True, eq=False)
class GapRows:
    """The bounds of ``log W`` and of ``log T`` on cells."""

    field: Barycentre
    above: SelfLogit
    law: CircleLaw
    weights: Array
    """``(4,)``: w_0 to w_3."""

    @property
    def exact(self) -> bool:
        """True for intervals."""
        return self.field.head.exact

    def excess(self, lo: Array, hi: Array) -> tuple[Array, Array]:
        """``log W + rate G - w_1 |x|^2 - w_2 G^2 - w_3 <g,x>`` on cells of ``(r, q, t)``, ``<g,x> = G_1 (2 t - 1)``.

        And what each side is to blame for (measured).
        """
        parts = (slice(i, i + _CHUNK) for i in range(0, lo.shape[1], _CHUNK))
        value, pull = zip(*(self._excess(lo[:, part], hi[:, part]) for part in parts), strict=True)
        return np.concatenate(value), np.concatenate(pull, axis=1)

    def place(self, lo: Array, hi: Array) -> tuple[Any, ...]:
        """The ends of ``|x|``, of ``|g|``, of ``<g,x>`` on cells, and where there is no x."""
        r0, r1, g0, g1 = self.field.sides(lo[:2], hi[:2])
        t0, t1 = ends(lo[2], hi[2], self.exact)
        largest = self.field.head.top
        wide = 0.0 if self.exact else 1e-12 * largest
        low = self.field.family.lower(g0, g1, r0, r1) - wide
        high = wide - self.above.lower(g0, g1, r0, r1)
        z0, z1 = np.maximum(largest * (2.0 * t0 - 1.0), low), np.minimum(largest * (2.0 * t1 - 1.0), high)
        # a point, by which nothing is proved, stands for the nearest that a token may have
        point = (hi == lo).all(axis=0) & (lower(low) <= upper(high))
        none = (lower(z0) > upper(z1)) & ~point
        z0 = np.where(none | (point & (lower(z0) > upper(high))), z1, z0)
        return r0, r1, g0, g1, z0, np.where(lower(z0) > upper(z1), z0, z1), none

    def _excess(self, lo: Array, hi: Array) -> tuple[Array, Array]:
        r0, r1, g0, g1, z0, z1, none = self.place(lo, hi)
        wrap: Any = lift if self.exact else np.asarray
        known = lower(g0) > 1e-9 * top(self.field.head.top)
        low, high = np.where(known, g0, 1.0), np.where(upper(g1) > 0.0, g1, 1.0)
        # <ghat, x> of <g,x> and |g|
        left = np.where(lower(z0) < 0.0, z0 / low, z0 / high)
        right = np.where(upper(z1) > 0.0, z1 / low, z1 / high)
        most = upper(r1)
        zeta = (
            wrap(np.clip(np.where(known, lower(left), -1.0), -most, most)),
            wrap(np.clip(np.where(known, upper(right), 1.0), -most, most)),
        )
        _, w1, w2, w3 = self.weights.tolist()
        W = self.law.log_bound((g0, g1), (r0, r1), zeta)
        least = w1 * (r0 if w1 >= 0.0 else r1) ** 2 + w2 * g0**2 + w3 * (z0 if w3 >= 0.0 else z1)
        value = upper(wrap(W) + self.law.rate * g1 - least)
        value = np.where(none, -math.inf, value + (0.0 if self.exact else 1e-12 * (1.0 + np.abs(value))))
        size = 0.5 * (upper(g0) + upper(g1))
        turned = upper(self.field.gamma(wrap(hi[0]), wrap(lo[1])))
        by_g = 2.0 / (1.0 + size) + abs(self.law.rate - 2.0 * w2 * size)
        pull = np.stack(
            [
                (2.0 * self.law.sharp + 2.0 * abs(w1)) * (hi[0] - lo[0]) + by_g * np.maximum(turned - lower(g0), 0.0),
                by_g * np.maximum(upper(g1) - turned, 0.0),
                (self.law.sharp / np.maximum(size, 0.1) + abs(w3)) * np.maximum(upper(z1) - lower(z0), 0.0),
            ]
        )
        return value, np.where(hi > lo, pull + 1e-9 * (hi - lo), 0.0)

    def cover(self) -> tuple[Array, Array]:
        """Cells that hold every x."""
        edges = np.linspace(0.0, 1.0, 5)
        return boxes(edges, np.ones(2) if self.field.rigid else edges, np.linspace(0.0, 1.0, 9))

    @cached_property
    def lam(self) -> Any:
        """At least 0 and the largest eigenvalue of Q."""
        head = self.field.head
        wrap: Any = BallMatrix.exact if self.exact else np.asarray
        _, w1, w2, w3 = self.weights.tolist()
        Q = wrap(w1 * np.eye(len(head.A))) + w2 * (head.A.T @ head.A) + (0.5 * w3) * (head.A + head.A.T)
        rounded = (
            0.0
            if self.exact
            else (abs(w3) + 2.0 * w2 * top(head.a)) * head.noise
            + 64.0 * len(Q) * EPS * (abs(w1) + w2 * head.a**2 + abs(w3) * head.a)
        )
        return np.maximum(lambda_max_upper(Q), 0.0) + rounded

    def bound(self, lo: Array, hi: Array) -> Array:
        """Bound of ``log T`` on cells of (r, q)."""
        r0, r1, g0, g1, excess, _ = self.field.cell(lo, hi)
        wrap: Any = lift if self.exact else np.asarray
        w0, w1, w2, w3, rate, sharp = (wrap(x) for x in (*self.weights, self.law.rate, self.law.sharp))
        # a parabola of |g| that opens upwards
        gamma = np.maximum((w3 - rate) * g0 + w2 * g0**2, (w3 - rate) * g1 + w2 * g1**2)
        slope = w1 - sharp - self.lam
        radius = np.maximum(slope * r0**2, slope * r1**2)
        value = upper((1.0 - w3) * excess + gamma + radius + self.lam + w0 + sharp)
        return np.asarray(value + (0.0 if self.exact else 1e-12 * (1.0 + np.abs(value))))


def _fails(head: UnitNumbers) -> str | None:
    """Why the head is none of this theorem."""
    if not (top(head.v) > 1e-290 and top(head.a) > 0.0 and _RANGE[0] <= top(head.top) <= _RANGE[1] * (1.0 + 1e-9)):
        return f"V must not be zero, max |g| on the unit ball must lie in [{_RANGE[0]:g}, {_RANGE[1]:g}], received {top(head.top):g}"
    return None


def _moderate(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    return _fails(unit_numbers(attention, domain))


@problem_function("logit_gap")
def _problem(statement: Statement) -> dict[str, Any]:
    head = numbers_of(statement)
    why = _fails(head)
    if why is not None or statement.p != 2.0:
        raise ValueError(f"logit_gap does not apply: {why or 'p must be 2'}; use relaxations.mean_field.")
    return {"head": head, "target": number(statement.options, "target", least=-math.inf)}


@dual_function("logit_gap", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    head = problem["head"]
    rate, sharp = (float(multiplier(multipliers, key, (1,))[0]) for key in ("rate", "sharp"))
    weights = np.asarray(multiplier(multipliers, "weights", (4,)), dtype=float)
    table = np.asarray(multiplier(multipliers, "table", SHAPE), dtype=float)
    if not (
        0.0 <= rate <= 1.0
        and 0.0 <= sharp <= _STEEP
        and weights[2] >= 0.0
        and weights[3] <= 1.0
        and np.abs(weights).max() <= _STEEP
    ):
        raise ValueError(
            f"rate must lie in [0, 1], sharp in [0, {_STEEP:g}], w_2 must not be negative, w_3 at most 1, all at most {_STEEP:g}."
        )
    law = CircleLaw(top(head.top), rate, sharp, table, head.exact)
    rows = GapRows(*_family(head, multipliers), law, weights)
    proved = proved_below(
        rows.excess, *rows.cover(), target=float(weights[0]), max_cells=2 * _LAWS["deep"], hopeless=0.004
    )
    raised = replace(rows, weights=np.array([max(_raised(weights[0]), proved), *weights[1:]]))
    found = proved_below(raised.bound, *raised.field.boxes(24), target=problem["target"], max_cells=2 * _CELLS)
    return safe_exp(_log_bound(head, found))


def _log_bound(head: UnitNumbers, log_T: float) -> Any:
    """``log(sigma + v T^{1/2})``."""
    power = lift(log_T) if head.exact else log_T + 1e-12 * (1.0 + abs(log_T))
    return log_sum(log(head.sigma), log(head.v) + 0.5 * power)


def _raised(w: float) -> float:
    return float(w + (_RAISED - 1.0) * (1.0 + abs(w)))


@theorem(
    "logit_gap",
    statement="sigma + v T^{1/2}, T by weights that grow with the gap of a logit to the row's largest",
    hypotheses="softmax without a mask; R times the largest logit gradient from 2 to 300; any domain; any measure; p = 2",
    applies=every(softmax(masked=False), any_measure, order_two, _moderate),
    closed=False,
)
def logit_gap(attention: AttentionMap, domain: Domain, n: int | None, p: float, *, effort: str = "fast") -> Bound:
    """Upper bound of ``W_2-Lip(F)`` over all measures on the domain, by branch and bound.

    The sharpest bound for forms that are neither near the identity nor near its negative, at ``||A|| R^2`` of 4 and more.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Branch-and-bound gap of 4e-3 or 1e-3 in the logarithm of T, as far as 100,000 or 800,000 cells go.

    Returns
    -------
    Certificate
        Multipliers: ``rate``, ``sharp``, ``weights``, the ``table`` of those of rows, and those of the self-logit inequalities of A
        and of -A, ``nu``, ``gap``, ``nu_above`` and ``gap_above``.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = logit_gap(SoftmaxAttention([[0.0, 9.0], [-9.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]), radius=1.0)
    >>> bound.value < 475, bound.verify()
    (True, True)
    """
    statement = Statement(attention, domain, n, p)
    head = numbers_of(statement)
    why = _fails(head)
    if why is not None:
        raise ValueError(f"logit_gap does not apply: {why}; use relaxations.mean_field.")
    tol = 1e-3 if effort == "deep" else 4e-3
    below, above = (SelfLogit.default(x) for x in (head, _negative(head)))
    multipliers = {"nu": below.nu, "gap": below.gap, "nu_above": above.nu, "gap_above": above.gap}
    field, high = _family(head, multipliers)
    chosen, weights = Samples(field, high).choose(40 if effort == "deep" else 16)
    rows = GapRows(field, high, chosen, weights)
    law = maximise(rows.excess, *rows.cover(), tol=tol, max_cells=_LAWS[effort])
    rows = replace(rows, weights=np.array([law.value, *rows.weights[1:]]))
    raised = replace(rows, weights=np.array([_raised(law.value), *rows.weights[1:]]))
    best = maximise(raised.bound, *raised.field.boxes(24), tol=tol, max_cells=_CELLS)
    given = {
        "rate": np.array([rows.law.rate]),
        "sharp": np.array([rows.law.sharp]),
        "weights": rows.weights,
        "table": rows.law.table,
    }
    return certify(
        "logit_gap",
        statement=replace(statement, options={"target": best.value}),
        multipliers=multipliers | given,
        solver="branch and bound",
        solver_status=best.status(tol),
        solver_value=safe_exp(float(_log_bound(head, best.seen))),
        details={"kappa": head.kappa, "sigma": head.sigma, "laws": law.cells},
    )
