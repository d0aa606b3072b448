r"""The mean-field constant by weights that grow with the gap of a logit to the row's largest.

Notation of :mod:`otattn.lipschitz.upper.mean_field` on the unit ball at p = 2: ``a = ||A||``, ``G_x = |g_x|``, ``G_1 = max |g|``,
``|V D eps(x)| <= sigma |eps(x)|``, ``f(x) = |g(x)| - <g(x),x>``. There a row charges every column with all of its spread: the worst
row puts its mass on two tokens, and the column that is charged for it holds nothing. Here a column pays the more for a row the
closer its logit is to the row's largest. This wins where f is largest on the sphere, so that alpha is nearly a point.

**Row.** With ``chi_x(y) = e^{-rate (G_x - <g_x,y>)}``, at most 1, and ``|V^T u + <y - m_x, V^T u> g_x| <= v (1 + G_x |y - m_x|)``,
Cauchy-Schwarz gives

.. math:: |V K\epsilon(x)|^2 \le v^2 \Lambda_x \int \frac{k(x,y)}{\chi_x(y)} |\epsilon(y)|^2 d\mu(y), \qquad
          \Lambda_x = E_{y\sim P_x}[\chi_x(y)(1 + G_x|y - m_x|)^2] ,

so ``Lip <= sigma + v (sup_y T(y))^{1/2}``, ``T(y) = int k(x,y) Lambda_x / chi_x(y) dmu(x)``.

**Column.** M1 with ``w = Lambda_x e^{rate (G_x - <g_x,y>)}``, alpha of mean xbar, ``rho = |xbar|``, ``gamma = |g(xbar)|``, gives

.. math:: \log T \le f(\bar x) + rate\,(E_\alpha G_x - \gamma) + E_\alpha[\log\Lambda_x - KL(\alpha|P_x)] ,

since ``(1 - rate) <g(xbar), y> <= (1 - rate) gamma``; and ``E_alpha G_x <= Gam^{1/2}``, ``Gam >= E_alpha G_x^2`` as there. Let e be
the direction of xbar and ``b(y) = e^{-sharp (1 - <e,y>)}``. The variational formula of the divergence with ``log b``, affine, gives

.. math:: -KL(\alpha|P_x) \le \log E_{P_x} b - E_\alpha \log b = \log E_{P_x} b + sharp\,(1 - \rho) .

Hence ``log Lambda_x - KL <= log W(G_x, psi_x) + sharp (1 - rho)``, W the supremum of :mod:`otattn.lipschitz.forms.pole_law` and
psi_x the angle between e and ``g_x``.

**Average.** Let ``z_x = <g_x,e> = G_x cos(psi_x)`` and ``U = 1 + G_1``. If for all G and psi

.. math:: W(G, \psi) \le U^2 \bigl(w_0 + w_1 z/G_1 + w_2 (z/G_1)^2 + w_3 (G/G_1)^2\bigr), \qquad w_2, w_3 \ge 0,

then, by Jensen, ``E_alpha log W <= log E_alpha W``, with ``E z_x = zbar = <g(xbar),e> = (gamma - f(xbar))/rho``, ``E z_x^2 <= zbar^2
+ a^2 (1 - rho^2)``, ``E G_x^2 <= Gam``. The w_0 of given ``w_1, w_2, w_3`` is a maximum over ``(G, psi, D)``. On a cell of ``(rho,
gamma)`` zbar runs over pieces of ``[-gamma, gamma]``, on each of which ``f = gamma - rho zbar``, besides the bound of f by the
self-logit inequality.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import linprog, minimize

from otattn._linalg import Array
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.intervals import lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import log, log_sum, safe_exp, top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number
from otattn.lipschitz.constants.cells import boxes, ends, maximise, proved_below
from otattn.lipschitz.constants.heads import UnitNumbers, numbers_of, unit_numbers
from otattn.lipschitz.constants.self_logit import Barycentre, SelfLogit
from otattn.lipschitz.forms.pole_law import product_bound
from otattn.lipschitz.hypotheses import any_measure, every, order_two, softmax
from otattn.lipschitz.theorem import theorem
from otattn.measures.domains import Domain

_EDGES = np.linspace(-1.0, 1.0, 33)[:, None]
"""The pieces of ``zbar / G_1``."""
_RATES, _SHARPS = (0.4, 0.6, 0.8, 1.0), (0.12, 0.25, 0.45, 0.8)
"""First rates, and sharpnesses over ``G_1``."""
_CELLS, _LAWS = 200_000, {"fast": 40_000, "deep": 400_000}
_CHUNK = 512
_WEIGHTS = (-1.0, 1.0), (-0.3, 0.3), (0.0, 0.5), (0.0, 0.5), (0.0, None)
"""Limits of w_0 to w_3: a steep majorant is loose on the pieces."""
_RANGE = 2.0, 300.0
"""``max |g|``: below it the general bound is no worse, above it the lengths of the laws are too coarse."""
_RAISED = 1.0 + 1e-9
"""By which w_0 is raised, above what its proofs in two arithmetics differ by."""


@dataclass(frozen=True, eq=False)
class GapRows:
    """The bounds of W and of ``log T`` on cells."""

    field: Barycentre
    rate: float
    sharp: float
    weights: Array
    """``(4,)``: w_0 to w_3."""

    @property
    def exact(self) -> bool:
        """True for intervals."""
        return self.field.head.exact

    def law(self, lo: Array, hi: Array) -> tuple[Array, Array]:
        """``W / U^2 - w_1 z - w_2 z^2 - w_3 g^2`` on cells of ``(g, psi / pi, D / 2)``, ``g = G / G_1``, ``z = g cos psi``.

        And what each side is to blame for (measured).
        """
        parts = (slice(i, i + _CHUNK) for i in range(0, lo.shape[1], _CHUNK))
        value = np.concatenate([self._law(lo[:, part], hi[:, part]) for part in parts])
        return value, (hi - lo) * np.array([[2.0], [1.0], [4.0]])

    def _law(self, lo: Array, hi: Array) -> Array:
        wrap: Any = lift if self.exact else np.asarray
        largest = wrap(self.field.head.top)
        g0, g1 = wrap(lo[0]), wrap(hi[0])
        psi = np.maximum(math.pi * lo[1] - 1e-15, 0.0), np.minimum(math.pi * hi[1] + 1e-15, math.pi)
        G = lower(largest * g0), upper(largest * g1)
        W = product_bound(G, psi, (2.0 * lo[2], 2.0 * hi[2]), self.rate, self.sharp, self.exact)
        c0, c1 = (np.cos(wrap(x)) for x in psi)
        z0, z1 = np.minimum(g0 * c1, g1 * c1), np.maximum(g0 * c0, g1 * c0)
        _, w1, w2, w3 = (wrap(w) for w in self.weights)
        # the parabola in z is above its tangent at any place: here its vertex, or the end of the cell next to it
        vertex = -self.weights[1] / max(2.0 * self.weights[2], 1e-12)
        at = wrap(np.clip(vertex, lower(z0), upper(z1)))
        slope = w1 + 2.0 * w2 * at
        least = w1 * at + w2 * at**2 + np.minimum(slope * (z0 - at), slope * (z1 - at))
        return upper(W / (1.0 + largest) ** 2 - least - w3 * g0**2 + (0.0 if self.exact else 1e-13))

    def cover(self) -> tuple[Array, Array]:
        """Cells that hold every ``(G, psi, D)``."""
        return boxes(np.linspace(0.0, 1.0, 5), np.linspace(0.0, 1.0, 9), np.linspace(0.0, 1.0, 9))

    def bound(self, lo: Array, hi: Array) -> Array:
        """Bound of ``log T`` on cells of (r, q)."""
        head = self.field.head
        r0, r1, g0, g1, excess, Gam = self.field.cell(lo, hi)
        z0, z1 = (head.top * x for x in ends(_EDGES[:-1], _EDGES[1:], self.exact))
        f = np.minimum(excess, g1 - np.minimum(r0 * z0, r1 * z0))
        # f = gamma - rho zbar does not exceed its bound
        none = (
            (lower(z0) > upper(g1))
            | (upper(z1) < -upper(g1))
            | (lower(g0 - np.maximum(r0 * z1, r1 * z1)) > upper(excess))
        )
        f = np.where(none, -math.inf, f)
        gap = self.rate * np.maximum(np.minimum(head.top, np.sqrt(Gam)) - g0, 0.0) + self.sharp * (1.0 - r0)
        w0, w1, w2, w3 = (lift(w) if self.exact else w for w in self.weights)
        spread = w0 + w2 * (head.a / head.top) ** 2 * (1.0 - r0**2) + w3 * np.minimum(1.0, Gam / head.top**2)
        # a parabola in zbar that opens upwards; where it is not positive there is no alpha, as it bounds W
        W = np.maximum(*(w1 * x + w2 * x**2 + spread for x in ends(_EDGES[:-1], _EDGES[1:], self.exact)))
        unit = lift(1.0) + head.top if self.exact else 1.0 + head.top
        return np.asarray(upper((f + np.log(np.maximum(W, 1e-300))).max(axis=0) + gap + 2.0 * np.log(unit)))


@dataclass(frozen=True, eq=False)
class _Samples:
    """Points of the laws and of barycentres, on which weights are chosen."""

    field: Barycentre

    def weights(self, rate: float, sharp: float) -> tuple[Array, float]:
        """Good weights, and ``log T`` of the worst point."""
        rows = GapRows(self.field, rate, sharp, np.zeros(4))
        g, D = np.array([0.05, 0.5, 0.8, 1.0]), np.linspace(0.15, 0.95, 11)
        psi = np.array([0.0, 0.03, 0.06, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0])
        points = np.stack([x.ravel() for x in np.meshgrid(g, psi, D, indexing="ij")])
        W = rows.law(points, points)[0].reshape(g.size, psi.size, D.size).max(axis=2)
        z = g[:, None] * np.cos(math.pi * psi)
        seen = np.stack([np.ones_like(z), z, z**2, np.broadcast_to(g[:, None] ** 2, z.shape)], axis=-1).reshape(-1, 4)
        at = np.stack([x.ravel() for x in np.meshgrid(np.linspace(0.0, 1.0, 41), np.linspace(0.0, 1.0, 41))])
        r, _, gamma, _, excess, Gam = self.field.cell(at, at)
        head = self.field.head
        zbar = np.clip((gamma - excess) / np.maximum(r, 1e-9), -gamma, gamma) / head.top
        E = np.stack(
            [
                np.ones_like(r),
                zbar,
                zbar**2 + (head.a / head.top) ** 2 * (1.0 - r**2),
                np.minimum(1.0, Gam / head.top**2),
            ]
        )
        level = excess + rate * np.maximum(np.minimum(head.top, np.sqrt(Gam)) - gamma, 0.0) + sharp * (1.0 - r)
        # least s for which every barycentre has E . w <= s e^{-level}, in units of the largest level
        above = level > level.max() - 9.0
        scale = np.exp(level.max() - level[above])
        A = np.block([[-seen, np.zeros((len(seen), 1))], [E.T[above], -scale[:, None]]])
        most = np.append(-W.ravel(), np.zeros(int(above.sum())))
        found = linprog([1e-3, 0.0, 1e-3, 1e-3, 1.0], A_ub=A, b_ub=most, bounds=_WEIGHTS)
        if found.x is None:
            return np.array([float(W.max()), 0.0, 0.0, 0.0]), math.inf
        return found.x[:4], math.log(found.x[4]) + float(level.max()) + 2.0 * math.log1p(head.top)

    def choose(self) -> GapRows:
        """Good rate, sharpness and weights."""
        largest = float(self.field.head.top)
        tried = {(t, s): self.weights(t, s * largest) for t, s in itertools.product(_RATES, _SHARPS)}
        t, s = min(tried, key=lambda key: tried[key][1])

        def loss(x: Array) -> float:
            if not (0.0 <= x[0] <= 1.0 and abs(x[1]) < 6.0):
                return math.inf
            return self.weights(float(x[0]), math.exp(x[1]) * largest)[1]

        start = np.array([t, math.log(s)])
        simplex = start + np.array([[0.0, 0.0], [-0.12, 0.0], [0.0, 0.3]])
        x = minimize(loss, start, method="Nelder-Mead", options={"maxfev": 16, "initial_simplex": simplex}).x
        rate, sharp = float(x[0]), math.exp(x[1]) * largest
        return GapRows(self.field, rate, sharp, self.weights(rate, sharp)[0])


def _field(head: UnitNumbers, multipliers: Mapping[str, Array]) -> Barycentre:
    return Barycentre.of(head, SelfLogit.of(head, multipliers))


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
    if not (0.0 <= rate <= 1.0 and sharp >= 0.0 and (weights[2:] >= 0.0).all()):
        raise ValueError("rate must lie in [0, 1], sharp, w_2 and w_3 must not be negative.")
    rows = GapRows(_field(head, multipliers), rate, sharp, weights)
    proved = proved_below(
        rows.law, *rows.cover(), target=float(weights[0]), max_cells=2 * _LAWS["deep"], hopeless=0.004
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

    The sharpest bound for forms that are skew, or neither near the identity nor near its negative, at ``||A|| R^2`` of 9 and more.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Branch-and-bound gap of 1e-2 or 2e-3 in the logarithm of T, as far as 40,000 or 400,000 cells go.

    Returns
    -------
    Certificate
        Multipliers: ``rate``, ``sharp``, ``weights``, and those of the self-logit inequality, ``nu`` and ``gap``.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = logit_gap(SoftmaxAttention([[0.0, 9.0], [-9.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]), radius=1.0)
    >>> bound.value < 580, bound.verify()
    (True, True)
    """
    statement = Statement(attention, domain, n, p)
    head = numbers_of(statement)
    why = _fails(head)
    if why is not None:
        raise ValueError(f"logit_gap does not apply: {why}; use relaxations.mean_field.")
    tol = 2e-3 if effort == "deep" else 1e-2
    family = SelfLogit.default(head)
    multipliers = {"nu": family.nu, "gap": family.gap}
    rows = _Samples(_field(head, multipliers)).choose()
    size = float(rows.weights @ [1.0, 0.0, 0.0, 1.0])
    law = maximise(rows.law, *rows.cover(), tol=tol * size, max_cells=_LAWS[effort])
    rows = replace(rows, weights=np.array([law.value, *rows.weights[1:]]))
    raised = replace(rows, weights=np.array([_raised(law.value), *rows.weights[1:]]))
    found = maximise(raised.bound, *raised.field.boxes(24), tol=tol, max_cells=_CELLS)
    given = {"rate": np.array([rows.rate]), "sharp": np.array([rows.sharp]), "weights": rows.weights}
    return certify(
        "logit_gap",
        statement=replace(statement, options={"target": found.value}),
        multipliers=multipliers | given,
        solver="branch and bound",
        solver_status=found.status(tol),
        solver_value=safe_exp(float(_log_bound(head, found.seen))),
        details={"kappa": head.kappa, "sigma": head.sigma, "laws": law.cells},
    )
