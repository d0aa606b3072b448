r"""Sinkhorn attention with a symmetric form: its derivative is a quadratic form over pairs of tokens, and so is what bounds it.

**Turned forms.** Let A be symmetric without zero eigenvalues, ``A = |A|^{1/2} O |A|^{1/2}`` with O symmetric and orthogonal
(``alpha I``: plus or minus the identity), and ``cond(A)`` the ratio of the largest to the least eigenvalue of ``|A|``. On ``x' =
|A|^{1/2} x`` the same couplings are those of the form O, so F is ``V |A|^{-1/2}`` after the map with form O and values I: its
constant is at most ``||V|| cond(A)^{1/2}`` times that of O on a ball of radius ``||A||^{1/2} R``, R that of a ball around the tokens.

The potentials absorb a shift of the tokens, so the ball may be the centred one, and in units of its radius the unit ball, for the
form ``a O``, ``a = ||A|| R^2``. With weights w, the coupling is ``pi_ij = w_i w_j u_i u_j e^{a <x_i, O x_j>}``, symmetric with
marginals w, and ``P = pi / w``. Sums run over i and j.

**The derivative, turned by O, is self-adjoint.** In the proof of :func:`otattn.bounds.sinkhorn_bound`, Q the projection of
``L^2(pi)`` off the sums ``phi_i + psi_j``, the derivative J of F for V = I is, with O zeta for zeta,

.. math:: \langle O\zeta, J\epsilon\rangle_w = \sum \pi_{ij} \langle O\zeta_i, \epsilon_j\rangle
          + a \sum \pi_{ij} \langle\zeta_i, O x_j\rangle (Q s)_{ij}, \qquad
          s_{ij} = \langle\epsilon_i, O x_j\rangle + \langle O x_i, \epsilon_j\rangle .

As pi is symmetric, Q commutes with the exchange of i and j: the second sum is half of ``a <Q s^zeta, Q s^eps>``. So O J is
self-adjoint, and ``<eps, O J eps> = <eps, O P eps> + (a/2) |Q s|^2``. As ``|P| <= 1`` it is at least -1, and its norm, which is that
of J, is at most the larger of 1 and its largest value. ``|Q s|`` is at most the distance of s from ``phi_i + phi_j`` with ``phi_i =
tau <eps_i, x_i>``:

.. math:: |Qs|^2 \le \sum \pi_{ij} \bigl(\langle\epsilon_i, O x_j - \tau x_i\rangle
          + \langle\epsilon_j, O x_i - \tau x_j\rangle\bigr)^2 .

**Closed form.** For one pair, with ``p = O y - tau x``, ``q = O x - tau y``, let C be the largest eigenvalue of ``a L L^T + (0, O;
O, 0)``, ``L = (p, q)``: the mean over pi gives ``|J| <= max(1, C)``. Vectors ``(v, O v)`` and ``(v, -O v)`` split L into parts of
squares ``S = (1 - tau)^2 |x + O y|^2 / 2`` and ``D = (1 + tau)^2 |x - O y|^2 / 2``, so C is the larger root of ``C^2 - 1 = a S (C
+ 1) + a D (C - 1)``. ``C <= c`` is linear in these squares, whose sum is at most 4 before the factors: one of them is 0 at the
worst, and C is at most the larger of ``1 + 2 a (1 - tau)^2`` and ``2 a (1 + tau)^2 - 1``. With ``tau = min(1, 1/(4a))``: ``|J| <=
2 a + 1/(8a)`` for ``a >= 1/4``, and ``|J| <= 1`` below, where for ``A = alpha O`` the constant is ``||V||``, that of a translation.
A reflection has ``2 a`` at two atoms.

**Positive kernels.** Let A be positive definite, ``O = I``. ``e^{a <x, y> + t |x - y|^2 / 2}`` is positive for ``t <= a``: up to
factors of x and of y it is ``e^{(a - t) <x, y>}``. So, besides ``sum pi_ij <eps_i ^ x_i, eps_j ^ x_j>``, these are not negative:

.. math:: \sum \pi_{ij} \bigl(\langle\epsilon_i, \epsilon_j\rangle \langle x_i, x_j\rangle - \langle\epsilon_i, x_j\rangle \langle x_i,
          \epsilon_j\rangle\bigr), \qquad \sum \pi_{ij} e^{t |x_i - x_j|^2 / 2} \langle\epsilon_i, \epsilon_j\rangle .

They say that far tokens which move together are rare in pi, and may be added with factors ``a kappa`` and ``a beta``, none
negative.

**Pairs.** If for all x, y of the unit ball and all eps, eta, with ``f = e^{t |x - y|^2 / 2}``,

.. math:: \tfrac12 \bigl(\langle\epsilon, p\rangle + \langle\eta, q\rangle\bigr)^2 + \bigl(\tfrac1a + \beta f + \kappa \langle x,
          y\rangle\bigr) \langle\epsilon, \eta\rangle - \kappa \langle\epsilon, y\rangle \langle x, \eta\rangle
          \le \tfrac{C}{2} \bigl(|\epsilon|^2 + |\eta|^2\bigr) ,

the mean over pi gives ``|J| <= a C``, and ``W_2-Lip(F) <= cond(A)^{1/2} ||V|| a C`` for every measure, by the last step of the proof
there. In the plane of x and y this asks that no eigenvalue of a matrix of order 4 exceed C, across it that ``|1/a + beta f + kappa
<x, y>| <= C``. It is symmetric in x and y, so ``|y| <= |x|``: the cells are boxes of ``(|x|, |y|, angle)``.

**Sharp.** A token at x whose mass tends to 0 while all others lie at -x, a large, has the constant ``max_p p + 8 a p
(1-p)/(1+p)``, about ``1.373 a + 0.41``. For ``A = alpha I``, alpha > 0, the bound is at most 8 percent above what an
ascent over measures reached (a from 0.05 to 200; most near 0.37). For ``-alpha I`` equal atoms at the corners of a prism whose
triangles are near each other come to ``3 a / 2`` of the ``2 a``, a large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from otattn._linalg import Array, product_error, spectral_norm_upper
from otattn.attention import SinkhornAttention
from otattn.attention.head import Head, check_sizes
from otattn.lipschitz.arithmetic.balls import arithmetic_of
from otattn.lipschitz.arithmetic.intervals import Interval, lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import down, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number
from otattn.lipschitz.constants.cells import Maximum, boxes, maximise, proved_below
from otattn.lipschitz.constants.regions import Region, see
from otattn.lipschitz.hypotheses import every, order_two, sinkhorn
from otattn.lipschitz.theorem import prove, theorem
from otattn.measures.domains import Domain

_RANGE = 1e-6, 1e12
"""``||A|| R^2``: below it the closed form has all digits, above it nothing changes."""
_CELLS = {"fast": 300_000, "deep": 1_500_000}
_CHUNK = 20_000
_MOST = 20.0
"""Limit of the multipliers, above which none is of use."""
_WIDEST = 2.0
"""Limit of ``cond(A)^{1/2}``: from 1.46 on (1.34 where A is not definite) :func:`otattn.bounds.sinkhorn_bound` is the less."""
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
    if attention.A.shape[0] != attention.A.shape[1] or np.any(attention.A != attention.A.T):
        return "the form A must be symmetric"
    size, root, _ = _spectrum(attention.A, False)
    a = _size(size, domain, False)
    if not _RANGE[0] <= a <= _RANGE[1]:
        return f"||A|| R^2 must lie in [{_RANGE[0]:g}, {_RANGE[1]:g}], received {a:g}"
    if not root <= _WIDEST:
        return f"the eigenvalues of A must be within a factor {_WIDEST**2:g} of each other in absolute value"
    return None


def _size(size: Interval, domain: Domain, exact: bool) -> float:
    """``||A|| R^2``, from above."""
    radius = Region.of(domain, exact=exact).radius
    return top(product(size, radius, radius))


def _spectrum(A: Array, exact: bool) -> tuple[Interval, float, bool]:
    """``||A||`` and ``cond(A)^{1/2}`` of a symmetric A, from above, and whether A is positive definite.

    ``||A^2 - m I|| <= r`` puts the squares of its eigenvalues within r of m, and with a negative one ``||A - m^{1/2} I|| >= m^{1/2}``.
    """
    squares, eye, M = np.linalg.eigvalsh(A) ** 2, np.eye(len(A)), arithmetic_of(exact).matrix(A)
    middle = 0.5 * float(squares.min() + squares.max())
    off = lift(top(spectral_norm_upper(M @ M - middle * eye))) + product_error(M, M) + 1e-15 * middle
    low, high = lift(middle) - off, lift(middle) + off
    root = top(np.sqrt(np.sqrt(high / low))) if lower(low) > 0.0 else math.inf
    centre = math.sqrt(middle)
    return np.sqrt(high), root, up(top(spectral_norm_upper(M - centre * eye))) < down(centre)


@problem_function("sinkhorn_symmetric")
def _problem(statement: Statement) -> dict[str, Any]:
    attention, domain, p = statement.attention, statement.domain, statement.p
    check_sizes(attention)
    why = _applies(attention, domain, statement.n, p)
    if why is not None:
        raise ValueError(f"sinkhorn_symmetric does not apply: {why}; use bounds.sinkhorn_bound.")
    head = Head.of(attention, attention.A, attention.V, arithmetic=arithmetic_of(statement.exact))
    region = replace(Region.of(domain, exact=statement.exact), center=None)
    size, root, positive = _spectrum(attention.A, statement.exact)
    return {
        "a": _size(size, domain, statement.exact),
        "v": product(see(head, region).v, lift(root) if statement.exact else root),
        "positive": positive,
        "target": number(statement.options, "target", least=0.0),
    }


@dual_function("sinkhorn_symmetric", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    a, v = problem["a"], problem["v"]
    if not multipliers:
        return _value(v, a, math.inf)
    if not problem["positive"]:
        raise ValueError(
            "for a form that is not positive definite there is the closed form alone, without multipliers."
        )
    tau, kappa, beta, rate = (float(multiplier(multipliers, key, (1,), sign=True)[0]) for key in _NAMES)
    if max(tau, kappa, beta, rate) > _MOST or rate > a:
        raise ValueError(f"the multipliers must be at most {_MOST:g}, and rate at most ||A|| R^2 = {a:g}.")
    pairs = Pairs(a, tau, kappa, beta, rate)
    found = proved_below(pairs.bound, *pairs.cover(), target=problem["target"], max_cells=2 * _CELLS["deep"])
    return _value(v, a, found)


def _value(v: Any, a: float, found: float) -> Any:
    """``cond(A)^{1/2} ||V||`` times the less of ``a C`` and the closed form, outward."""
    closed = up(2.0 * a + up(0.125 / a)) if a > 0.25 else 1.0
    return product(v, min(closed, up(max(a, 1.0) * (1.0 + 1e-15) * found)))


_applies = every(sinkhorn, order_two, _form)


@theorem(
    "sinkhorn_symmetric",
    statement="k v (2a + 1/(8a)), k v for a <= 1/4; for A > 0 k v a C, C a maximum over pairs of tokens; k^2 = cond(A)",
    hypotheses="Sinkhorn, A symmetric, cond(A) at most 4; any domain and n; p = 2",
    applies=_applies,
    closed=False,
    measures=True,
)
def sinkhorn_symmetric(
    attention: SinkhornAttention, domain: Domain, n: int | None, p: float, *, effort: str = "fast"
) -> Bound:
    """Upper bound of ``W_2-Lip(F)`` of Sinkhorn attention with a symmetric A, any n and any measure, by branch and bound.

    Made for ``A = alpha O``, O symmetric and orthogonal: plus or minus the identity, a reflection, an exchange of coordinates. It is
    ``||V||`` (on a ball the constant) for ``|alpha| R^2 <= 1/4``, and from 1 on within 6.3 percent of ``2 |alpha| R^2 ||V||``, which
    reflections attain; for alpha I, alpha > 0, at most 8 percent above the largest local constants that are known. Other forms
    cost the square root of their condition number.

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
    >>> bound = sinkhorn_symmetric(SinkhornAttention([[4.0]], [[1.0]]), radius=1.0)
    >>> bound.value < 6.2, bound.verify()   # 8.12 in closed form; 5.92 is attained
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
        near = Pairs.choose(float(f"{a:.6g}"))  # it depends on every digit
        pairs = replace(near, a=a, rate=min(near.rate, (1.0 - 1e-9) * a))  # below the exact a too
        found = pairs.maximum(tol, _CELLS[effort])
        if _value(1.0, a, found.value) < _value(1.0, a, math.inf):
            given = {key: np.array([getattr(pairs, key)]) for key in _NAMES}
            target, claim = found.value, (found.cells, found.status(tol), found.seen)
    return certify(
        "sinkhorn_symmetric",
        statement=replace(statement, options={"target": target}),
        multipliers=given,
        solver="Nelder-Mead; branch and bound" if given else "none",
        solver_status=claim[1],
        solver_value=float(_value(v, a, claim[2])),
        details={"a": a, "cells": claim[0]},
    )
