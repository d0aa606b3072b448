r"""The mean-field constant of positive semidefinite forms: barycentres, covariances, and the variances of rows.

Notation of :mod:`otattn.lipschitz.upper.mean_field` on the unit ball, with ``c = 0``, A symmetric PSD, ``p = 2``: ``a =
||A||``, ``g_x = A x``, ``P_x = k(x,.) mu`` with mean ``m_x``, covariance ``C_x`` and ``lam_x = lambda_max(C_x)``; the
derivative of F along eps is ``V (K + D) eps``, ``K eps(x) = int k(x,y) (I + (y - m_x) g_x^T) eps(y) dmu(y)``, ``D eps(x) = C_x
A eps(x)``.

**Row.** Let u be a unit vector, ``n_y = u + <u, y - m_x> g_x``, ``h > 0`` and ``Q = I + h g_x g_x^T``. Then ``<u, K eps> = int
k <n_y, eps(y)> dmu`` and ``<n_y, eps>^2 <= (n_y^T Q^{-1} n_y)(eps^T Q eps)``. As ``Q^{-1}`` divides by ``1 + h |g_x|^2`` along
``g_x`` and ``y - m_x`` is centred under ``P_x``, ``int k n_y^T Q^{-1} n_y dmu <= 1 + lam_x |g_x|^2/(1 + h |g_x|^2)``. By
Cauchy-Schwarz, with ``H = h + 1/a^2`` and ``e_y`` the direction of ``eps(y)``,

.. math:: |K\epsilon(x)|^2 \le (1 + \lambda_x/H) \int k(x,y)\, |\epsilon(y)|^2 (1 + h \langle g_x, e_y\rangle^2)\, d\mu(y) .

**K and D are not added.** Let ``v = ||V||`` and ``v a share`` be at least ``||V C A||`` for every covariance C of a measure on
the domain (share at most 1), so that ``|V D eps(x)| <= v d_x |eps(x)|``, ``d_x = a min(lam_x, share)``. For ``Delta > (a
share)^2`` take ``1 + t = 1/(1 - d_x^2/Delta)`` in ``|V K eps + V D eps|^2 <= (1 + t) |V K eps|^2 + (1 + 1/t) |V D eps|^2``: the
last term is at most ``v^2 Delta |eps(x)|^2``. Integrated over x,

.. math:: Lip^2 \le v^2 (\Delta + \sup_y T(y)), \quad T(y) = \int k(x,y)\, w(\lambda_x) (1 + h\langle g_x, e_y\rangle^2)\, d\mu(x),
          \quad w(U) = \frac{1 + U/H}{1 - a^2 \min(U, share)^2/\Delta} .

**Column.** Let ``alpha = k(.,y) w (1 + h <g,e_y>^2) mu / T``, its mean xbar, ``y(x) = A^{1/2} x / sqrt(a)``, so that ``|y(x)|
<= 1``, ``rho = |y(xbar)|``, and ``a beta`` the largest eigenvalue of ``Cov_alpha(A^{1/2} x)``; ``rho^2 + beta <= E_alpha
|y(x)|^2 <= 1``. Let pi be a coupling of alpha with itself, ``pi_x`` the law of x' given x. Averaging ``log Z_x = <g_x, x'> -
log (dP_x/dmu)(x')`` over pi and ``log T = <g_x, y> - log Z_x + log w + log(1 + h <g_x, e_y>^2) - log dalpha/dmu`` over alpha
gives

.. math:: \log T = \langle g(\bar x), y - \bar x\rangle + E_\alpha[\log w + \log(1 + h\langle g_x, e_y\rangle^2)]
          - [Cov_\pi(Ax, x') - KL(\pi|\alpha\times\alpha)] - E_\alpha KL(\pi_x|P_x) .

The first term is at most ``a (rho - rho^2)``, and ``E_alpha <A x, e>^2 = <A xbar, e>^2 + e^T A Cov A e <= a^2 (rho^2 + beta)``
in the concave logarithm. Two couplings are used, with shares theta and 1 - theta. *The product*: nothing in the bracket, and
``KL(alpha|P_x)``. *A Gaussian channel*: by :mod:`otattn.lipschitz.forms.self_coupling` the bracket is at least ``gain(a
beta)``, and the last term is dropped.

**Variances.** Apply :mod:`otattn.lipschitz.forms.concentration` to alpha and ``P_x`` along the leading eigenvector e of
``C_x``: under alpha, ``<e, x>`` has a mean of at most ``s = min(1, rho (a/a_min)^{1/2})`` and a variance of at most ``b =
min(1, beta a/a_min)``, ``a_min`` the least eigenvalue of A (1 and 1 when it is 0); under ``P_x`` it has the variance ``lam_x``.
With the same m and C for every x,

.. math:: \log T \le \sup_{\rho^2+\beta\le 1} a\rho(1-\rho) + \log(1 + h a^2(\rho^2+\beta))
          + \min_{\theta, m, C} \{ \theta E - (1-\theta) gain(a\beta) + \max_{0\le U\le 1} [\log w(U) + \theta\log(C - U)] \} .

**Evaluation.** On a cell of ``(rho, beta/(1 - rho^2))`` each term is taken at its worst corner: E increases in s and b, the
gain in beta. Theta, m and C may be any, those of a grid are tried on each cell. The maximum over U: ``log(1 + U/H) + theta
log(C - U)`` is concave, the rest of ``log w`` convex up to ``U = share`` and constant beyond: on cells that end there, a
tangent plus a chord. When A is a PSD form plus E (rounding), ``log T`` moves by at most ``2 |E|`` in ``<A xbar, y> - E_pi <A x,
x'>`` and by ``h (2a |E| + |E|^2)`` in the last factor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import minimize

from otattn._linalg import Array
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.intervals import is_interval, lift, like, lower, upper
from otattn.lipschitz.arithmetic.rounding import safe_exp, top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number, trivial
from otattn.lipschitz.constants.cells import Maximum, boxes, ends, maximise, proved_below
from otattn.lipschitz.constants.heads import UnitNumbers, numbers_of, unit_numbers
from otattn.lipschitz.constants.self_logit import form_reason, least_stretch, psd_defect
from otattn.lipschitz.forms.concentration import exponent
from otattn.lipschitz.forms.self_coupling import gain
from otattn.lipschitz.hypotheses import any_measure, every, order_two, softmax
from otattn.lipschitz.theorem import theorem
from otattn.measures.domains import Domain

_THETAS = np.linspace(0.0, 1.0, 17)
"""Shares of the divergence from alpha itself; the rest goes to the coupling."""
_TIPS = 1.0 + np.geomspace(1e-3, 8.0, 32)
"""Numbers C of the lemma."""
_MEANS = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0])
"""Numbers ``m / s`` of the lemma."""
_VARIANCES = 128
"""Cells of the variance of a row; their error is of second order."""
_CELLS = 50_000
_CHUNK = 2048
"""Cells whose numbers of the lemma are tried together: a few megabytes."""
_RANGE = 1e-8, 5000.0
"""``||A|| R^2``: below it the column bound is sharp, above it the bound is beyond ``e^{625}``."""
_MARGIN = 1e-11
"""Above what the operations on a cell lose, for numbers of size 1."""


@dataclass(frozen=True, eq=False)
class Columns:
    """The bound of ``log T`` on cells of ``(rho, beta / (1 - rho^2))``; a and stretch are floats or intervals."""

    a: Any
    stretch: Any
    """a over the least eigenvalue of A, inf for a singular form."""
    share: float
    """``sup ||V C A||`` over ``v a``, at most 1."""
    h: float
    excess: float
    """``Delta / a^2 - share^2``."""

    @property
    def exact(self) -> bool:
        """True for intervals."""
        return is_interval(self.a)

    @cached_property
    def peaks(self) -> Any:
        """``max_U log w(U) + theta log(C - U)`` for each theta (down) and C (across)."""
        wrap: Any = lift if self.exact else np.asarray
        U = np.union1d(np.linspace(0.0, 1.0, _VARIANCES + 1), [self.share])
        U0, U1, at = wrap(U[:-1]), wrap(U[1:]), wrap(0.5 * (U[:-1] + U[1:]))
        weight = self.a**2 / (1.0 + self.h * self.a**2)
        C, theta = wrap(_TIPS)[:, None], wrap(_THETAS)[:, None, None]
        # the tangent of what is concave, the chord of what is convex
        level = np.log1p(weight * at) + theta * np.log(C - at)
        slope = weight / (1.0 + weight * at) - theta / (C - at)
        low, high = (level + slope * (end - at) + self._split(end) for end in (U0, U1))
        return np.maximum(low, high).max(axis=-1)

    def _split(self, U: Any) -> Any:
        """``-log(1 - a^2 min(U, share)^2 / Delta)``."""
        share = like(self.share, self.a)
        seen = np.minimum(U, share)
        return np.log(share**2 + self.excess) - np.log((share - seen) * (share + seen) + self.excess)

    def law(self, lo: Array, hi: Array) -> tuple[Any, Any, Any]:
        """What is known of alpha on each cell: the largest mean s and variance b of a coordinate of x, and the least gain."""
        (r0, x0), (r1, x1) = ends(lo, hi, self.exact)
        b = (1.0 - r0**2) * x1
        gained = gain(self.a * ((1.0 - r1**2) * x0))
        if math.isinf(top(self.stretch)):
            return np.ones_like(b), np.ones_like(b), gained
        return np.minimum(1.0, np.sqrt(self.stretch) * r1), np.minimum(1.0, self.stretch * b), gained

    def rows(self, s: Any, b: Any, gained: Any) -> Any:
        """The part of the rows on each cell: their weights, less the divergences."""
        E, means = _exponents(upper(s), upper(b))
        value, theta, tip = _least(upper(self.peaks), E, lower(gained))
        if not self.exact:
            return value
        # theta, m and C may be any: those found in floats
        m, share = lift(means[np.arange(tip.size), tip]), lift(_THETAS[theta])
        E = exponent(np.maximum(s, m), b, m, lift(_TIPS[tip]))
        return self.peaks[theta, tip] + share * E - (1.0 - share) * gained

    def whole(self, lo: Array, hi: Array, rows: Any) -> Array:
        """The bound, from the part of the rows."""
        (r0, _), (r1, x1) = ends(lo, hi, self.exact)
        r = np.clip(like(0.5, self.a), r0, r1)
        total = np.minimum(1.0, r1**2 + (1.0 - r0**2) * x1)
        return upper(self.a * (r - r**2) + np.log1p(self.h * self.a**2 * total) + rows)

    def bound(self, lo: Array, hi: Array) -> Array:
        """The bound on each cell."""
        parts = [(lo[:, i : i + _CHUNK], hi[:, i : i + _CHUNK]) for i in range(0, lo.shape[1], _CHUNK)]
        return np.concatenate([self.whole(*part, self.rows(*self.law(*part))) for part in parts])

    def cover(self) -> tuple[Array, Array]:
        """Cells that hold every ``(rho, beta)``."""
        return boxes(np.linspace(0.0, 1.0, 25), np.linspace(0.0, 1.0, 25))

    def maximum(self, tol: float) -> Maximum:
        """The largest bound of a cell."""
        return maximise(self.bound, *self.cover(), tol=tol, max_cells=_CELLS)


def _exponents(s: Array, b: Array) -> tuple[Array, Array]:
    """The least E over m for each cell (down) and C (across), in floats, and that m."""
    m = _MEANS[:, None, None] * s[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        E = exponent(s[:, None], b[:, None], m, _TIPS)
    E = np.where(1.0009 * (1.0 + m) ** 2 < _TIPS, E, np.inf)
    best = E.argmin(axis=0)
    return E.min(axis=0), _MEANS[best] * s[:, None]


def _least(peaks: Array, E: Array, gained: Array) -> tuple[Array, Array, Array]:
    """The least over theta and C for each cell, and both."""
    each = peaks + _THETAS[:, None] * E[:, None, :] - ((1.0 - _THETAS) * gained[:, None])[:, :, None]
    flat = each.reshape(len(E), -1)
    best = flat.argmin(axis=1)
    theta, tip = np.divmod(best, _TIPS.size)
    return flat[np.arange(len(E)), best], theta, tip


def _choose(a: float, stretch: float, share: float) -> Columns:
    """Good h and excess: the least bound over points."""
    shares = np.append(0.0, np.geomspace(0.1 / (1.0 + a), 1.0, 12))
    points = np.stack(np.meshgrid(np.linspace(0.0, 1.0, 25), shares)).reshape(2, -1)
    s, b, gained = Columns(a, stretch, share, 1.0, 1.0).law(points, points)
    E, _ = _exponents(s, b)

    def at(z: Any) -> Columns:
        return Columns(a, stretch, share, math.exp(z[0]) / a, math.exp(z[1]))

    def loss(z: Any) -> float:
        if max(abs(z)) > 20.0:
            return math.inf
        columns = at(z)
        log_T = float(columns.whole(points, points, _least(columns.peaks, E, gained)[0]).max())
        return float(_log_square(columns, log_T))

    start = min(itertools.product((-4.0, -1.5, -0.4, 0.2), (-2.0, -0.5, 1.0, 2.5)), key=lambda z: loss(np.array(z)))
    simplex = np.array([start, (start[0] + 0.3, start[1]), (start[0], start[1] + 0.5)])
    found = minimize(loss, start, method="Nelder-Mead", options={"maxfev": 40, "initial_simplex": simplex})
    return at(found.x)


def _log_square(columns: Columns, log_T: Any) -> Any:
    """``log(Delta + T)``."""
    return np.logaddexp(np.log(columns.a**2 * (like(columns.share, columns.a) ** 2 + columns.excess)), log_T)


def _fails(head: UnitNumbers) -> str | None:
    """Why the head is none of this theorem."""
    if top(head.v) == 0.0 or (top(head.a) == 0.0 and head.centred):
        return None
    why = form_reason(head)
    if why is not None:
        return why
    if not _RANGE[0] <= top(head.a) <= _RANGE[1]:
        return f"||A|| R^2 must lie in [{_RANGE[0]:g}, {_RANGE[1]:g}], received {top(head.a):g}"
    return None


def _semidefinite(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    return _fails(unit_numbers(attention, domain))


def _numbers(head: UnitNumbers) -> tuple[Any, Any, float, float]:
    """a and stretch of the nearest PSD form, share, and the distance of A to it, all outward."""
    why = _fails(head)
    if why is not None:
        raise ValueError(
            f"psd_mean_field does not apply: {why}; use relaxations.mean_field, which has no such hypothesis."
        )
    defect = psd_defect(head)
    a = head.a + defect * (1.0 + 1e-12)
    # singular values of A are within the defect of those of the PSD form
    low = (least_stretch(head) - defect) * (1.0 - 1e-12)
    stretch = a / low if low > 1e-9 * top(a) else math.inf
    # a subnormal product has lost its digits
    share = 1.0 if top(head.sigma) <= 1e-290 else top(head.sigma / (head.v * head.a)) * (1.0 + 1e-12)
    return a, stretch, min(1.0, share), defect


def loose(columns: Columns, defect: float) -> float:
    """What ``log T`` moves by when A is a PSD form plus E: ``2 |E|``, and ``h (2 a |E| + |E|^2)`` in the second factor."""
    return 4.0 * defect * (1.0 + columns.h * top(columns.a)) * (1.0 + 1e-12)


def _bound(log_T: float, columns: Columns, v: Any, defect: float) -> Any:
    """The bound that a proved maximum gives, outward."""
    power = log_T + loose(columns, defect)
    if not columns.exact:
        return v * safe_exp(0.5 * (float(_log_square(columns, power)) + _MARGIN * (1.0 + abs(power))))
    return v * np.exp(0.5 * _log_square(columns, lift(log_T) + loose(columns, defect)))


@problem_function("psd_mean_field")
def _problem(statement: Statement) -> dict[str, Any]:
    if statement.p != 2.0:
        raise ValueError(f"p must be 2 for psd_mean_field, received {statement.p:g}.")
    head = numbers_of(statement)
    a, stretch, share, defect = _numbers(head)
    target = number(statement.options, "target", least=-math.inf)
    return {"v": head.v, "a": a, "stretch": stretch, "share": share, "defect": defect, "target": target}


@dual_function("psd_mean_field", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    h, excess = (float(multiplier(multipliers, key, (1,), positive=True)[0]) for key in ("h", "excess"))
    columns = Columns(problem["a"], problem["stretch"], problem["share"], h, excess)
    # cells below the target need no splitting: only that none exceeds it is to be shown
    found = proved_below(columns.bound, *columns.cover(), target=problem["target"], max_cells=2 * _CELLS)
    return _bound(found, columns, problem["v"], problem["defect"])


@theorem(
    "psd_mean_field",
    statement="A PSD: v (Delta + T)^{1/2}, T by barycentres, covariances, and variances of rows",
    hypotheses="softmax without a mask and without a bias, A symmetric PSD; domain centred at 0; any measure; p = 2",
    applies=every(softmax(masked=False), any_measure, order_two, _semidefinite),
    closed=False,
)
def psd_mean_field(attention: AttentionMap, domain: Domain, n: int | None, p: float, *, effort: str = "fast") -> Bound:
    """Upper bound of ``W_2-Lip(F)`` over all measures on the domain for a positive semidefinite form, by branch and bound.

    The sharpest bound for multiples of the identity, free of the dimension, and of V but for its norm and ``sup ||V C A||``;
    it is one for n tokens, too, and wins there when n is large against ``e^{||A|| R^2 / 4}``.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Branch-and-bound gap of 1e-3 or 3e-4 in the logarithm of T.

    Returns
    -------
    Certificate
        Multipliers: ``h`` and ``excess``. A plain :class:`Bound` when A or V is zero.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = psd_mean_field(SoftmaxAttention([[9.0]], [[1.0]]), radius=1.0)
    >>> bound.value < 23.5, bound.verify()
    (True, True)
    """
    statement = Statement(attention, domain, n, p)
    head = numbers_of(statement)
    if top(head.v) == 0.0 or (top(head.a) == 0.0 and head.centred):
        return trivial(statement)
    a, stretch, share, defect = _numbers(head)
    tol = 3e-4 if effort == "deep" else 1e-3
    columns = _choose(a, stretch, share)
    found = columns.maximum(tol)
    return certify(
        "psd_mean_field",
        statement=replace(statement, options={"target": found.value}),
        multipliers={"h": np.array([columns.h]), "excess": np.array([columns.excess])},
        solver="branch and bound",
        solver_status=found.status(tol),
        solver_value=float(_bound(found.seen, columns, head.v, 0.0)),
        details={"cells": found.cells, "sigma": head.sigma},
        # the maximum has just been proved: what a recheck raises it by is added
        proved=float(_bound(found.value + 1e-11, columns, head.v, defect)),
    )
