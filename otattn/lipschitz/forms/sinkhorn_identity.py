r"""Sinkhorn attention with ``A = alpha I``: its derivative is a quadratic form over pairs of tokens, and so is what bounds it.

Let R be the radius of a ball around the tokens, ``a = |alpha| R^2``, ``o`` the sign of alpha, lengths in units of R. The
potentials absorb a shift of the tokens, so the ball may be the centred unit ball. With weights w, the coupling is ``pi_ij = w_i
w_j u_i u_j e^{o a <x_i, x_j>}``, symmetric with marginals w, and ``P = pi / w``. Sums run over i and j.

**The derivative is self-adjoint.** In the proof of :func:`otattn.bounds.sinkhorn_bound`, Q the projection of ``L^2(pi)`` off the
sums ``phi_i + psi_j``, the derivative J of F for V = I is

.. math:: \langle\zeta, J\epsilon\rangle_w = \sum \pi_{ij} \langle\zeta_i, \epsilon_j\rangle
          + o a \sum \pi_{ij} \langle\zeta_i, x_j\rangle (Q s)_{ij}, \qquad
          s_{ij} = \langle\epsilon_i, x_j\rangle + \langle x_i, \epsilon_j\rangle .

As pi is symmetric, Q commutes with the exchange of i and j: the second sum is half of ``o a <Q s^zeta, Q s^eps>``. So J is
self-adjoint, and ``<eps, J eps> = <eps, P eps> + o (a/2) |Q s|^2``. As ``|P| <= 1``, and ``P >= 0`` for o = 1 since ``e^{a <x,
y>}`` is a positive kernel, its norm is at most the larger of 1 and the largest value of ``o J``. ``|Q s|`` is at most the
distance of s from ``phi_i + phi_j`` with ``phi_i = o tau <eps_i, x_i>``:

.. math:: |Qs|^2 \le \sum \pi_{ij} \bigl(\langle\epsilon_i, x_j - o\tau x_i\rangle
          + \langle\epsilon_j, x_i - o\tau x_j\rangle\bigr)^2 .

**Closed form.** For one pair, with ``p = y - o tau x``, ``q = x - o tau y``, let C be the largest eigenvalue of ``a L L^T + o (0,
I; I, 0)``, ``L = (p, q)``: the mean over pi gives ``o J <= C``. Vectors ``(v, o v)`` and ``(v, -o v)`` split L into parts of
squares ``S = (1 - tau)^2 |y + o x|^2 / 2`` and ``D = (1 + tau)^2 |y - o x|^2 / 2``, so C is the larger root of ``C^2 - 1 = a S (C
+ 1) + a D (C - 1)``; ``|y + o x|^2 + |y - o x|^2 <= 4``, so one of them is 0 at the worst: C is at most the larger of ``1 + 2 a
(1 - tau)^2`` and ``2 a (1 + tau)^2 - 1``. With ``tau = min(1, 1/(4a))``: ``|J| <= 2 a + 1/(8a)`` for ``a >= 1/4``, and ``|J| <=
1`` below, where the constant is ``||V||``, that of a translation.

**Positive kernels.** Let ``o = 1``. ``e^{a <x, y> + t |x - y|^2 / 2}`` is positive for ``t <= a``: up to factors of x and of y it
is ``e^{(a - t) <x, y>}``. So, besides ``sum pi_ij <eps_i ^ x_i, eps_j ^ x_j>``, these are not negative:

.. math:: \sum \pi_{ij} \bigl(\langle\epsilon_i, \epsilon_j\rangle \langle x_i, x_j\rangle - \langle\epsilon_i, x_j\rangle \langle x_i,
          \epsilon_j\rangle\bigr), \qquad \sum \pi_{ij} e^{t |x_i - x_j|^2 / 2} \langle\epsilon_i, \epsilon_j\rangle .

They say that far tokens which move together are rare in pi, and may be added with factors ``a kappa`` and ``a beta``, none
negative.

**Pairs.** If for all x, y of the unit ball and all eps, eta, with ``f = e^{t |x - y|^2 / 2}``,

.. math:: \tfrac12 \bigl(\langle\epsilon, p\rangle + \langle\eta, q\rangle\bigr)^2 + \bigl(\tfrac1a + \beta f + \kappa \langle x,
          y\rangle\bigr) \langle\epsilon, \eta\rangle - \kappa \langle\epsilon, y\rangle \langle x, \eta\rangle
          \le \tfrac{C}{2} \bigl(|\epsilon|^2 + |\eta|^2\bigr) ,

the mean over pi gives ``|J| <= a C``, and ``W_2-Lip(F) <= ||V|| a C`` for every measure, by the last step of the proof there. In
the plane of x and y this asks that no eigenvalue of a matrix of order 4 exceed C, across it that ``|1/a + beta f + kappa <x, y>|
<= C``. It is symmetric in x and y, so ``|y| <= |x|``: the cells are boxes of ``(|x|, |y|, angle)``.

**Sharp.** A token at x whose mass tends to 0 while all others lie at -x, a large, has the constant ``max_p p + 8 a p
(1-p)/(1+p)``, about ``1.373 a + 0.41``. For ``o = 1`` the bound is at most 8 percent above what an ascent over measures reached (a
from 0.05 to 200; most near 0.37).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from otattn._linalg import Array
from otattn.attention import SinkhornAttention
from otattn.attention.head import Head, check_sizes
from otattn.lipschitz.arithmetic.balls import arithmetic_of
from otattn.lipschitz.arithmetic.intervals import Interval, lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number
from otattn.lipschitz.constants.cells import Maximum, boxes, maximise, proved_below
from otattn.lipschitz.constants.regions import Region, see
from otattn.lipschitz.hypotheses import every, order_two, sinkhorn
from otattn.lipschitz.theorem import prove, theorem
from otattn.measures.domains import Domain

_RANGE = 1e-6, 1e12
"""``|alpha| R^2``: below it the closed form has all digits, above it nothing changes."""
_CELLS = {"fast": 300_000, "deep": 1_500_000}
_CHUNK = 20_000
_MOST = 20.0
"""Limit of the multipliers, above which none is of use."""
_NAMES = "tau", "kappa", "beta", "rate"
_STARTS = [0.2, 0.1, -2.7, -1.0], [0.37, -0.5, -2.2, 3.0]
"""``tau``, the logarithms of ``kappa`` and ``beta``, the logit of the rate over its largest."""


@dataclass(frozen=True)
class Pairs:
    """The least C of pairs of tokens, for ``a`` and multipliers."""

    a: float
    tau: float
    kappa: float
    beta: float
    rate: float

    @property
    def unit(self) -> float:
        """Bounds of C are taken in units of ``max(1, 1/a)``, of which C is 1 to 2."""
        return max(1.0, 1.0 / self.a)

    def entries(self, r: Any, s: Any, cos: Any, sin: Any) -> tuple[dict[tuple[int, int], Any], Any]:
        """Upper triangle of the matrix in the plane of ``x = (r, 0)`` and ``y = s (cos, sin)``, and what it is across it."""
        wrap: Any = lift if isinstance(r, Interval) else float
        tau, kappa, unit = wrap(self.tau), wrap(self.kappa), wrap(self.unit)
        p, q = (s * cos - tau * r, s * sin), (r - tau * s * cos, -(tau * s * sin))
        square = (r - s) ** 2 + 2.0 * r * s * (1.0 - cos)
        near = 1.0 / wrap(self.a) + wrap(self.beta) * np.exp(0.5 * wrap(self.rate) * square)
        across = near + kappa * r * s * cos
        shift = {(0, 2): near, (1, 2): -(kappa * r * s * sin), (1, 3): across}
        L = (*p, *q)
        plane = {(i, j): L[i] * L[j] + shift.get((i, j), 0.0) for i in range(4) for j in range(i, 4)}
        return {key: x / unit for key, x in plane.items()}, across / unit

    def bound(self, lo: Array, hi: Array) -> Array:
        """Bound of ``C / unit`` on cells of ``(|x|, |y|, angle)``."""
        parts = (slice(i, i + _CHUNK) for i in range(0, lo.shape[1], _CHUNK))
        return np.concatenate([self._bound(lo[:, part], hi[:, part]) for part in parts])

    def _bound(self, lo: Array, hi: Array) -> Array:
        r, s = Interval(lo[0], hi[0]), Interval(lo[1], hi[1])
        plane, across = self.entries(r, s, *_circle(lo[2], hi[2]))
        mid, rad = np.zeros((lo.shape[1], 4, 4)), np.zeros((lo.shape[1], 4, 4))
        for (i, j), x in plane.items():
            low, high = lower(x), upper(x)
            middle = 0.5 * (low + high)
            mid[:, i, j] = mid[:, j, i] = middle
            rad[:, i, j] = rad[:, j, i] = np.nextafter(np.maximum(high - middle, middle - low), np.inf)
        value = np.maximum(largest_of_boxes(mid, rad), np.maximum(upper(across), -lower(across)))
        return np.where(lo[1] > hi[0], -np.inf, value)

    def cover(self) -> tuple[Array, Array]:
        """Cells that hold every pair."""
        side = np.linspace(0.0, 1.0, 9)
        return boxes(side, side, np.linspace(0.0, np.nextafter(math.pi, 4.0), 25))

    def maximum(self, tol: float, cells: int) -> Maximum:
        """The largest bound of a cell."""
        return maximise(self.bound, *self.cover(), tol=tol, max_cells=cells)

    @classmethod
    def choose(cls, a: float) -> Pairs:
        """Good multipliers, by descent of the largest eigenvalue over pairs of which one is on the sphere."""
        longest = min(a, 6.0)
        s, angle = np.meshgrid(np.linspace(0.0, 1.0, 33), math.pi * (1.0 - np.linspace(0.0, 1.0, 33) ** 1.5))
        place = np.ones_like(s), s, np.cos(angle), np.sin(angle)

        def at(x: Array) -> Pairs:
            scale = np.exp(np.clip(x[1:3], -30.0, math.log(_MOST)))
            rate = longest / (1.0 + math.exp(-min(max(x[3], -30.0), 30.0)))
            return cls(a, float(np.clip(x[0], 0.0, 1.0)), float(scale[0]), float(scale[1]), rate)

        def loss(x: Array) -> float:
            plane, across = at(x).entries(*place)
            matrix = np.zeros((*s.shape, 4, 4))
            for (i, j), value in plane.items():
                matrix[..., i, j] = matrix[..., j, i] = value
            return float(max(np.linalg.eigvalsh(matrix)[..., -1].max(), np.abs(across).max()))

        options = {"maxfev": 250, "xatol": 1e-4, "fatol": 1e-5}
        starts = [minimize(loss, x, method="Nelder-Mead", options=options) for x in _STARTS]
        best = min(starts, key=lambda found: float(found.fun))
        return at(minimize(loss, best.x, method="Nelder-Mead", options=options).x)


def _circle(lo: Array, hi: Array) -> tuple[Interval, Interval]:
    """Cosine and sine of angles in ``[0, pi]``."""
    least = np.where(hi >= math.pi, -1.0, lower(np.cos(lift(hi))))
    ends = np.sin(lift(lo)), np.sin(lift(hi))
    over = (lo <= 0.5 * math.pi + 1e-15) & (hi >= 0.5 * math.pi - 1e-15)
    sin = Interval(
        np.maximum(np.minimum(lower(ends[0]), lower(ends[1])), 0.0),
        np.where(over, 1.0, np.maximum(upper(ends[0]), upper(ends[1]))),
    )
    return Interval(least, upper(np.cos(lift(lo)))), sin


def largest_of_boxes(mid: Array, rad: Array) -> Array:
    """Upper bounds of the largest eigenvalues of all symmetric matrices within ``rad`` of ``mid``, entry by entry.

    With any U, near the orthogonal matrices, and any positive x: ``v^T N v = z^T U^T N U z`` with ``v = U z``, ``|z|^2 <= |v|^2 / (1 -
    ||U^T U - I||)``, and the largest eigenvalue of a symmetric matrix M is at most ``max_i (M_ii x_i + sum |M_ij| x_j) / x_i``.
    Products of order 4 in floats are within 1e-14 of the sums of the absolute values, above the subnormal numbers. What is negative is
    bounded by 0.
    """
    _, U = np.linalg.eigh(mid)
    T, size = np.swapaxes(np.abs(U), 1, 2), np.abs(mid)
    turned = np.swapaxes(U, 1, 2) @ mid @ U
    spread = (T @ rad @ np.abs(U)) * (1.0 + 1e-14) + 1e-14 * (T @ size @ np.abs(U))
    order = np.arange(mid.shape[-1])
    diagonal = turned[:, order, order].copy()
    turned[:, order, order] = 0.0
    off = np.abs(turned) + spread
    _, W = np.linalg.eigh(off + diagonal[:, :, None] * np.eye(len(order)))
    x = np.abs(W[:, :, -1]) + 1e-6
    found = (diagonal + np.einsum("kij,kj->ki", off, x) / x).max(axis=1)
    gram = np.abs(np.swapaxes(U, 1, 2) @ U - np.eye(len(order))).sum(axis=2).max(axis=1) + 1e-14
    return np.asarray(np.maximum(found, 0.0) / (1.0 - gram) * (1.0 + 1e-14))


def _form(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    A = attention.A
    if A.shape[0] != A.shape[1] or np.any(A[0, 0] * np.eye(len(A)) != A) or not A[0, 0]:
        return "the form A must be alpha I, alpha not zero"
    a = _size(attention, domain, False)
    if not _RANGE[0] <= a <= _RANGE[1]:
        return f"|alpha| R^2 must lie in [{_RANGE[0]:g}, {_RANGE[1]:g}], received {a:g}"
    return None


def _size(attention: Any, domain: Domain, exact: bool) -> float:
    """``|alpha| R^2``, from above."""
    radius = Region.of(domain, exact=exact).radius
    alpha = abs(float(attention.A[0, 0]))
    return float(top(product(lift(alpha) if exact else alpha, radius, radius)))


@problem_function("sinkhorn_identity")
def _problem(statement: Statement) -> dict[str, Any]:
    attention, domain, p = statement.attention, statement.domain, statement.p
    check_sizes(attention)
    why = _applies(attention, domain, statement.n, p)
    if why is not None:
        raise ValueError(f"sinkhorn_identity does not apply: {why}; use bounds.sinkhorn_bound.")
    head = Head.of(attention, attention.A, attention.V, arithmetic=arithmetic_of(statement.exact))
    region = replace(Region.of(domain, exact=statement.exact), center=None)
    a = _size(attention, domain, statement.exact)
    return {
        "a": a,
        "v": see(head, region).v,
        "positive": attention.A[0, 0] > 0.0,
        "target": number(statement.options, "target", least=0.0),
    }


@dual_function("sinkhorn_identity", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    a, v = problem["a"], problem["v"]
    if not multipliers:
        return _value(v, a, math.inf)
    if not problem["positive"]:
        raise ValueError("for alpha < 0 there is the closed form alone, without multipliers.")
    tau, kappa, beta, rate = (float(multiplier(multipliers, key, (1,), sign=True)[0]) for key in _NAMES)
    if max(tau, kappa, beta, rate) > _MOST or rate > a:
        raise ValueError(f"the multipliers must be at most {_MOST:g}, and rate at most alpha R^2 = {a:g}.")
    pairs = Pairs(a, tau, kappa, beta, rate)
    found = proved_below(pairs.bound, *pairs.cover(), target=problem["target"], max_cells=2 * _CELLS["deep"])
    return _value(v, a, found)


def _value(v: Any, a: float, found: float) -> Any:
    """``||V||`` times the less of ``a C`` and the closed form, outward."""
    closed = up(2.0 * a + up(0.125 / a)) if a > 0.25 else 1.0
    return product(v, min(closed, up(max(a, 1.0) * (1.0 + 1e-15) * found)))


_applies = every(sinkhorn, order_two, _form)


@theorem(
    "sinkhorn_identity",
    statement="v (2a + 1/(8a)), v for a <= 1/4; for alpha > 0 v a C, C a maximum over pairs of tokens",
    hypotheses="Sinkhorn, A = alpha I; any domain and n; p = 2",
    applies=_applies,
    closed=False,
    measures=True,
)
def sinkhorn_identity(
    attention: SinkhornAttention, domain: Domain, n: int | None, p: float, *, effort: str = "fast"
) -> Bound:
    """Upper bound of ``W_2-Lip(F)`` of Sinkhorn attention with ``A = alpha I``, any n and any measure, by branch and bound.

    For ``|alpha| R^2 <= 1/4`` it is ``||V||``; for alpha > 0 at most 8 percent above the largest local constants that are known.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Branch-and-bound gap of 5e-3 or 1e-3 of the bound: two seconds, or five.

    Returns
    -------
    Certificate
        Multipliers: ``tau``, ``kappa``, ``beta``, ``rate``; none where the closed form is the less.

    Examples
    --------
    >>> from otattn.attention import SinkhornAttention
    >>> bound = sinkhorn_identity(SinkhornAttention([[4.0]], [[1.0]]), radius=1.0)
    >>> bound.value < 6.2, bound.verify()   # 8.12 for a general A of this norm; 5.92 is attained
    (True, True)
    """
    check_sizes(attention)
    if not np.any(attention.V):
        return prove("sinkhorn_bound", attention, domain, n, p)
    statement = Statement(attention, domain, n, p, {"target": 0.0})
    data = _problem(statement)
    a, v, given, target, claim = data["a"], float(data["v"]), {}, 0.0, (0, "closed form", math.inf)
    if a > 0.25 and data["positive"]:
        tol = 1e-3 if effort == "deep" else 5e-3
        pairs = Pairs.choose(a)
        found = pairs.maximum(tol, _CELLS[effort])
        if _value(1.0, a, found.value) < _value(1.0, a, math.inf):
            given = {key: np.array([getattr(pairs, key)]) for key in _NAMES}
            target, claim = found.value, (found.cells, found.status(tol), found.seen)
    return certify(
        "sinkhorn_identity",
        statement=replace(statement, options={"target": target}),
        multipliers=given,
        solver="Nelder-Mead; branch and bound" if given else "none",
        solver_status=claim[1],
        solver_value=float(_value(v, a, claim[2])),
        details={"a": a, "cells": claim[0]},
    )
