r"""Constants of one row of attention: how strongly a row's output can react to moving what it attends to.

A row with query gradient g (``|g| <= G``), weights ``P`` on points ``y`` of mean m and half diameter r maps a
displacement field ``eps`` to ``K eps = E_P[ B_y eps(y) ]``, ``B_y = I + (y - m) g^T``. Below, ``t = G r``.

With values, ``V K eps`` is paired with ``w = V^T u``, ``|w| <= v``, in place of u, and ``<w, y>`` has half the range ``rho_V``, the
value radius, at most ``v r``: the proofs use no more, so ``v`` times the same constants at ``t = G rho_V / v`` bound ``V K``. (On an
ellipsoid ``rho_V`` may be far below ``v r``. Both grow with ``|w|`` where ``|w| t`` is held: the two-index norm in sight, the power
mean because it is even in ``|w|``, exchanging the points, and convex.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import is_interval, lift, like, upper, xlogy
from otattn.lipschitz.arithmetic.rounding import MARGIN, least, log, safe_exp, top, up

CELLS = 1024


def row_norm(t: Any) -> Any:
    r"""``phi(t)``: the norm of K from ``(sum_j |eps_j|^2)^{1/2}`` to ``R^d``, exactly its supremum.

    ``phi = 1`` for ``t <= 1/2``, ``phi^2 = (1 + (t + 1/(4t))^2) / 2`` beyond.

    Proof. For a fixed unit vector u and fixed eps, ``<u, K eps> = sum_j p_j (<u, eps_j> + <y_j - m, u> <g,
    eps_j>)`` is linear in p where ``<m, u>`` is held fixed, so its maximum over such p sits at a p on two
    indices j, k, and is at most the two-index norm times ``(|eps_j|^2 + |eps_k|^2)^{1/2}``. With weights p
    >= q = 1 - p and ``tau = <y_j - y_k, u>`` the two-index norm squared is ``p^2 |u + q tau g|^2 + q^2 |u -
    p tau g|^2``, at most ``p^2 + q^2 + 2 p q (p - q) 2t + 2 p^2 q^2 (2t)^2`` since ``|tau| |g| <= 2 t``.
    With ``p = (1 + s)/2`` that is ``(1 + w^2)/2``, ``w = s + t (1 - s^2)``, largest at ``s = min(1,
    1/(2t))``; it is attained by two opposite points and g along u.
    """
    if np.ndim(t) == 0 and top(t) <= 0.5:
        return 1.0
    # increasing in t, and the formula is least at 1/2, where it is 1; hypot does not overflow where phi does not
    t = np.maximum(t, 0.5)
    return up(np.hypot(1.0, t + 0.25 / t) / np.sqrt(like(2.0, t)))


def two_largest(row: Any, sigma: Any, n: int) -> Any:
    r"""The largest ``(sum_i (row sqrt(s) + sigma e_i)^2)^{1/2}`` over token norms e of sum of squares 1.

    s is the sum of the two largest ``e_i^2``, so ``sum_i e_i <= sqrt(2 s) + sqrt((n-2)(1-s))``; what is left,
    ``sigma^2 + alpha s + beta sqrt(s (1-s))`` with ``alpha = n row^2 + 2 sqrt2 row sigma`` and
    ``beta = 2 row sigma sqrt(n-2)``, is largest at ``sigma^2 + (alpha + sqrt(alpha^2 + beta^2)) / 2``. n >=
    2.
    """
    unit = max(top(row), top(sigma))
    if not math.isfinite(top(row) + top(sigma)):
        return math.inf
    if unit == 0.0:
        return unit
    row, sigma = row / unit, sigma / unit
    alpha = n * row * row + 2.0 * np.sqrt(like(2.0, row)) * row * sigma
    beta = 2.0 * row * sigma * np.sqrt(like(n - 2.0, row))
    return up(unit * np.sqrt(sigma * sigma + 0.5 * (alpha + np.hypot(alpha, beta))))


def hoelder_constant(t: Any, p: float) -> Any:
    r"""``sup_u (E_P |B_y^T u|^{p'})^{1/p'}``, ``1/p + 1/p' = 1``: the norm of K from ``L^p(P)``.

    For ``p >= 2``, ``sqrt(1 + t^2)``: ``p' <= 2`` and ``E |B^T u|^2 = 1 + |g|^2 Var <y, u>``. For ``p = 1``,
    ``1 + 2 t``. Between, ``|u + <y - m, u> g|^{p'}`` is convex in ``<y, u>`` and, as a power of at least 1
    of an affine function, in the cosine of u and g: two opposite points and g along u are worst, ``max_q q
    (1 + 2 t (1-q))^{p'} + (1-q) |1 - 2 t q|^{p'}``. That maximum is bounded cell by cell.
    """
    if p >= 2.0:
        return up(np.hypot(1.0, t))
    if p == 1.0:
        return up(1.0 + 2.0 * t)
    dual = like(p, t) / (like(p, t) - 1.0)
    # E X^{p'} <= E X^2 (max X)^{p'-2}
    simple = np.exp((np.log1p(t * t) + (dual - 2.0) * np.log1p(2.0 * t)) / dual)
    scale = np.log1p(2.0 * t)

    def cells(q0: Any, q1: Any) -> Any:
        first = np.log1p(2.0 * t * (1.0 - q0)) - scale
        second = np.maximum(np.abs(1.0 - 2.0 * t * q0), np.abs(1.0 - 2.0 * t * q1))
        with np.errstate(divide="ignore", under="ignore"):
            return q1 * np.exp(dual * first) + (1.0 - q0) * np.exp(dual * (np.log(second) - scale))

    return up(least(simple, np.exp(scale + np.log(_cell_maximum(cells, other=t)) / dual)))


def density_constant(t: Any, n: int | None) -> tuple[Any, Any]:
    r"""``Psi``: a bound of ``sup_x`` of the norm of ``K_x`` from ``L^2(mu)``, and its logarithm.

    ``Psi^2 = max_{q in [0,1]} min(E_n, q + (1-q) E) (1 + 4 t^2 q (1-q))``, ``E = e^{2t}``,
    ``E_n = n E / (E + n - 1)`` for n atoms of weight 1/n (E for any measure), here with ``t = G R``, R the
    radius.

    Proof. Let ``k = dP/dmu = e^{<g, y>}/Z`` be the row's density. ``|<u, K eps>|^2 <= int k^2 |B^T u|^2 dmu
    |eps|^2 <= (sup k) E_P |B^T u|^2 |eps|^2`` and ``E_P |B^T u|^2 <= 1 + |g|^2 lambda_max(C)``. With
    ``h = <m, g>/|g| = R (2q - 1)``: ``lambda_max(C) <= tr C <= R^2 - |m|^2 <= R^2 - h^2 = 4 R^2 q (1-q)``.
    Since ``int dmu = 1 = E_P[1/k]``, ``sup k <= e^{|g| R} E_P e^{-<g,y>} <= q + (1-q) e^{2 |g| R}`` (the
    chord of a convex function); and n atoms have ``n P_j <= n / (1 + (n-1) e^{-2t})``.

    The maximum in closed form: with ``r = 1/E`` and ``b = 4 t^2`` the cubic ``E (1 - (1-r) q)(1 + b q
    (1-q))`` has its local maximum at the smaller root of ``3 (1-r) b q^2 - 2 (2-r) b q + b - (1-r) = 0``,
    below 1/2; the two pieces meet at ``q* = 1/(1 + (n-1) r)``, and the first increases up to ``min(q*,
    1/2)``.
    """
    r, rest = np.exp(-2.0 * t), -np.expm1(-2.0 * t)
    b = 4.0 * t * t
    meet = 0.0 if n is None else 1.0 / (1.0 + (n - 1.0) * r)
    if n is not None and top(meet) >= 0.5:
        # E_n = n q*, a bound for every q
        value = up(np.maximum(n * meet * (1.0 + t * t), 1.0))
        return np.sqrt(value), 0.5 * np.log(value)
    # where the maximum stands is a float near the root; the slope there says how far above the maximum may be
    q = float(np.clip(_density_peak(top(r), top(rest), top(b)), min(1.0, top(meet)), 1.0))
    q = meet if q <= top(meet) else q
    # f(1) = 1 never exceeds f(0) = E; the value at q* is E_n (1 + b q* (1 - q*))
    scaled = (1.0 - rest * q) * (1.0 + b * q * (1.0 - q))
    if is_interval(t):
        scaled = scaled + density_excess(rest, b, q, meet)
    log_value = t + 0.5 * log(up(scaled))
    log_value = log_value if is_interval(t) else log_value + 1e-15 * t
    return up(safe_exp(log_value)), log_value


def _density_peak(r: float, rest: float, b: float) -> float:
    """The local maximum of ``(1 - (1-r) q)(1 + b q (1-q))``, 0 where it falls from the start."""
    if b <= rest:
        return 0.0
    # in units of b, whose square may overflow
    half = 2.0 - r
    root = half * half - 3.0 * rest * (1.0 - rest / b)
    return (half - math.sqrt(max(root, 0.0))) / (3.0 * rest)


def density_excess(rest: Any, b: Any, q: Any, meet: Any) -> Any:
    r"""At least what the maximum over ``[q*, 1]`` of the cubic ``f`` of :func:`density_constant` exceeds ``f(q)`` by.

    ``f'' = -2 rest b (1 - 2q) - 2 b (1 - rest q) <= 0`` for ``q <= 1/2``, and f falls beyond 1/2 whatever b is, so f is below
    its tangent at q on ``[q*, 1/2]``: ``f <= f(q) + max(f'(q) (1/2 - q), f'(q) (q* - q), 0)``.
    """
    slope = -rest * (1.0 + b * q * (1.0 - q)) + (1.0 - rest * q) * b * (1.0 - 2.0 * q)
    return np.maximum(0.0, np.maximum(slope * np.maximum(0.5 - q, 0.0), -slope * np.maximum(q - meet, 0.0)))


def fixed_query_constant(t: Any) -> Any:
    r"""The logarithm of a bound of ``sup_x`` of the norm of ``K_x`` from ``L^2(mu)`` over any measure, ``t = G R``.

    ``max_q (q e^{-t} + (1-q) e^t) ( e^{-t} (1 + 4 t^2 q (1-q)) + 2 sinh t q (1 + t delta)^2 )`` is its square, ``delta = 2 (1-q)``
    where ``(1-q)^2 >= 1/2`` and ``delta^2 = 1 / (1 - (1-q)^2)`` elsewhere. Equal to the supremum for ``t >= 2`` when ``d >= 2``.

    Proof. With ``s = <g, y>``, ``k = dP/dmu = e^s / Z``, ``int dmu = 1`` gives ``Z = 1 / E_P e^{-s}``, so ``|<u, K eps>|^2 <= E_P[k f]
    int |eps|^2 dmu`` and ``E_P[k f] = E_P[e^{-s}] E_P[e^s f]``, ``f = |u + <y - m, u> g|^2``. The supremum grows with ``|g|``: a
    shorter g is a measure on a smaller ball. Let ``|g| R = t``. Chords with ``chi = (1 + s/t)/2``, ``q = E_P chi``: ``E_P e^{-s}
    <= q e^{-t} + (1-q) e^t`` and ``e^s <= e^{-t} + 2 sinh t chi``. First, ``E_P f <= 1 + |g|^2 tr C <= 1 + 4 t^2 q (1-q)``
    as in :func:`density_constant`. Second, with ``P_1 = chi P / q`` of mean ``m_1``, ``m - m_1 = (1-q)(m_0 - m_1)``:
    ``E_{P_1} |y - m|^2 <= R^2 - |m_1|^2 + (1-q)^2 (R + |m_1|)^2 <= delta^2 R^2`` (largest in ``|m_1| <= R`` at the end or at
    ``(1-q)^2 R / (1 - (1-q)^2)``), and ``E_P[chi f] = q E_{P_1} f <= q (1 + t delta)^2`` by Minkowski. The maximum over q is
    bounded cell by cell: q falls from the first factor, delta too.
    """
    if top(t) > 1e100:
        return math.inf  # squares overflow
    r, rest = np.exp(-2.0 * t), -np.expm1(-2.0 * t)

    def cells(q0: Any, q1: Any) -> Any:
        middle, b = np.clip(0.5, q0, q1), np.square(1.0 - q0)
        # from .2929 on the second form; 1 - b is above .49 there
        square = np.where(upper(q0) <= 0.2925, 4.0 * b, 1.0 / np.maximum(1.0 - b, 0.49))
        first = np.log1p(-rest * q0)
        near = r * (1.0 + 4.0 * np.square(t) * middle * (1.0 - middle))
        return 0.5 * (first + np.log(near + rest * q1 * np.square(1.0 + t * np.sqrt(square))))

    log_value = t + _cell_maximum(cells, other=t)
    return log_value if is_interval(t) else log_value + 1e-15 * (1.0 + t) + MARGIN


def density_constant_p(t: Any, n: int | None, p: float) -> tuple[Any, Any]:
    r"""``Psi_p`` for ``p >= 2``, and its logarithm.

    ``Psi_p^p = max_q min(E_n, q + (1-q) E) (1 + 4 t^2 q (1-q))^{p/2}``.

    ``|K eps|^p <= (E_P |B^T u|^{p'})^{p/p'} E_P |eps|^p`` with ``p' <= 2``, and ``E_P |eps|^p <= sup k int
    |eps|^p dmu``. The maximum is bounded cell by cell.
    """
    if math.isinf(p):
        return hoelder_constant(t, p), log(hoelder_constant(t, p))
    if p == 2.0:
        return density_constant(t, n)
    r = np.exp(-2.0 * t)
    # in units of E
    log_cap = math.inf if n is None else np.log(like(n, t)) - np.log1p((n - 1.0) * r) - 2.0 * t

    def cells(q0: Any, q1: Any) -> Any:
        middle = np.clip(0.5, q0, q1)
        first = np.minimum(np.log1p(-(1.0 - r) * q0), log_cap)
        share = 2.0 * np.sqrt(middle * (1.0 - middle))
        # beyond 1e100 the 1 is below rounding, and the square would overflow
        large = top(t) >= 1e100
        spread = 2.0 * (np.log(t) + np.log(np.maximum(share, 1.0 / t))) if large else np.log1p((t * share) ** 2)
        return first / p + 0.5 * spread

    # the logarithms are of size 2 t, and so is their rounding
    log_value = 2.0 * t / p + _cell_maximum(cells, other=t)
    log_value = log_value if is_interval(t) else log_value + 1e-15 * (1.0 + t)
    return up(safe_exp(log_value)), log_value


def _cell_maximum(cells: Callable[[Any, Any], Any], *, other: Any) -> Any:
    """An upper bound of the maximum over [0, 1] of a function that ``cells(q0, q1)`` bounds on each cell.

    The 64 largest cells are split once more; the others keep their bound. ``other`` is a number of the arithmetic used.
    """

    def bound(q0: Array, q1: Array) -> Array:
        return np.asarray(upper(cells(lift(q0), lift(q1)) if is_interval(other) else cells(q0, q1)))

    edges = np.linspace(0.0, 1.0, CELLS + 1)
    values = bound(edges[:-1], edges[1:])
    order = np.argsort(values)
    best = order[-64:]
    fine = edges[best, None] + np.linspace(0.0, 1.0, 129) * (edges[best + 1] - edges[best])[:, None]
    fine[:, -1] = edges[best + 1]
    found = max(float(values[order[-65]]), float(bound(fine[:, :-1].ravel(), fine[:, 1:].ravel()).max()))
    return like(found, other)


_PLACES, _SHARES = 256, 1024
"""Values of pbar, the denser the nearer to 1, where the divergence has a logarithm; cells of q: each loses at most 2e-3."""
_EXCESS = 1e-3, 1e6
"""Below, a difference of squares loses its digits; above, nothing is gained."""
_NOTHING = -1e6
"""Logarithm of the weight of a cell that is left out."""
VALUES = 1.0 - (1.0 - np.arange(65) / 64.0) ** 2
"""Edges of the cells of ``X = |V e|^2 / v^2``, denser near 1."""


@dataclass(frozen=True, eq=False)
class JointRows:
    r"""Rows whose two parts are not added: the weights W of :mod:`otattn.lipschitz.upper.mean_field` at p = 2.

    In its notation, on the unit ball: ``a = ||A||``, ``v = ||V||``. Let ``v a share`` be at least ``||V C A||`` for every covariance
    C of a measure on the domain (share at most 1). For ``excess > 0`` let ``Delta = a^2 (share^2 + excess)``. For a unit vector u,
    with ``w = V^T u / v``, ``d = |A^T C_x w|`` and ``1 + t = 1/(1 - d^2/Delta)``,

    .. math:: \langle u, V K\epsilon(x) + V D\epsilon(x)\rangle^2
              \le (1 + t)\langle u, V K\epsilon(x)\rangle^2 + (1 + 1/t)\langle u, V D\epsilon(x)\rangle^2
              \le v^2 \int k(x,y)\, w_x |\epsilon(y)|^2 d\mu(y) + v^2 \Delta |\epsilon(x)|^2,
              \quad w_x = \max_u \frac{|w|^2 + |g_x|^2 w^T C_x w}{1 - d^2/\Delta} .

    **Values.** For fixed w and ``tr C_x <= U`` a quotient is at most L where ``|w|^2 + |g_x|^2 w^T C w + L |A^T C w|^2/Delta <= L``,
    whose left side is convex in C: the largest quotient is that of some ``C = U e e^T``, e a unit vector. With ``X = |V e|^2/v^2``,
    ``Y = |A^T e|^2/a^2``, in which V and A share one direction,

    .. math:: w_x \le \max_e \frac{1 + |g_x|^2 U X}{1 - U^2 X Y / (share^2 + excess)} .

    ``reach`` bounds ``X Y`` on cells of X (:func:`otattn.lipschitz.constants.quadratic.products`), for a share of at least ``rank_one
    = sup ||V C A||/(v a tr C)``: nothing is read of the domain but that it lies in the ball. Where share is below that, C is none of
    the domain's, and reach is ``rank_one^2``, as ``d <= a min(share, U rank_one)``, d and X no longer seen together.

    Hence ``Lip^2 <= v^2 (Delta + sup_y T(y))``, ``T(y) = int k(x,y) w_x dmu(x)``. Only a row whose ``tr C_x`` is near 1 pays for
    both parts in full, and such a row is far from alpha.

    **Weights.** By the identity M1 the bound of ``log T`` needs ``E_alpha[log w_x - KL(alpha|P_x)]``. Data processing gives ``KL >=
    kl(pbar|q)``, ``pbar = (1 + |xbar|)/2``, and ``tr C_x <= 1 - |m_x|^2 <= U(q) = 4 q (1-q)``, for one q of each x; so ``w_x
    e^{-KL} <= W(|g_x|^2)``,

    .. math:: W(G) = \max_{0\le q\le 1,\; e} (1 + G\,U(q)\,X)\, e^{-s(q)}, \qquad
              s(q) = kl(\bar p|q) + \log\bigl(1 - \min(share^2, U(q)^2 X Y) / (share^2 + excess)\bigr) .

    W is convex in G, a maximum of affine functions, so between 0 and the largest ``|g|^2 =: G_1`` it lies below its chord, which is
    increasing; the logarithm of the chord is concave, and Jensen's inequality gives

    .. math:: E_\alpha[\log w_x - KL(\alpha|P_x)] \le \log\bigl( (1 - \gamma) W(0) + \gamma W(G_1) \bigr), \quad
              \gamma = Gam / G_1 \ge E_\alpha |g_x|^2 / G_1 .

    ``W(G)`` does not increase with pbar. For q beyond 1/2, U and the weight decrease and ``kl(pbar|q) <= kl(pbar|1-q)``: a best q
    lies in ``[1/2, pbar]``. There the divergence increases with pbar; and a q above a lesser pbar is no better than that pbar.

    **Evaluation.** ``W(0)`` and ``W(G_1)`` at fixed values of pbar, of which the last one at or below that of ``|xbar|`` is taken; on
    a cell of q the weight at its lower end, the divergence at its upper one.
    """

    a: Any
    """``||A||``; it and ``largest`` are floats or intervals."""
    largest: Any
    """``max |g|``."""
    share: float
    """At least ``sup ||V C A||`` over ``v a``, at most 1."""
    excess: float
    """``Delta / a^2 - share^2``."""
    reach: Array | None = None
    """Upper bounds of ``X Y`` on the cells of X that ``VALUES`` bound; by default 1."""
    places: int = _PLACES
    shares: int = _SHARES

    def __post_init__(self) -> None:
        if not _EXCESS[0] <= self.excess <= _EXCESS[1]:
            raise ValueError(f"excess must lie in [{_EXCESS[0]:g}, {_EXCESS[1]:g}], received {self.excess:g}.")

    @cached_property
    def heavier(self) -> Array:
        """The values of pbar: multiples of ``places^-2``, so that ``2 pbar - 1`` and ``1 - pbar`` are floats."""
        return np.asarray(1.0 - 0.5 * (np.arange(self.places, -1, -1) / self.places) ** 2)

    @cached_property
    def table(self) -> tuple[Any, Any]:
        """``log W(0)`` and ``log W(G_1)`` at each pbar."""
        wrap: Any = lift if is_interval(self.a) else np.asarray
        edges = 0.5 + 0.5 * np.arange(self.shares + 1) / self.shares
        p = self.heavier[:, None]
        # beyond pbar nothing is to be gained: the cell that holds it ends there
        q = np.minimum(edges[1:], p)
        rest = np.where(p < 1.0, 1.0 - q, 1.0)
        kl = xlogy(wrap(p), wrap(p) / wrap(q)) + xlogy(wrap(1.0 - p), wrap(1.0 - p) / wrap(rest))
        at = wrap(edges[:-1])
        weights = self.row(4.0 * at * (1.0 - at))
        low, high = (np.where(edges[:-1] <= p, weight - kl, _NOTHING).max(axis=1) for weight in weights)
        return low, high

    def row(self, U: Any) -> tuple[Any, Any]:
        """The logarithm of the largest weight of a row with ``tr C_x <= U``, for ``|g_x|^2`` of 0 and of ``G_1``."""
        square = like(self.share, self.a) ** 2
        most, X = (np.ones(1), np.ones(1)) if self.reach is None else (self.reach, VALUES[1:])
        seen = np.minimum(square, U[:, None] ** 2 * most)
        split = np.log(square + self.excess) - np.log(np.maximum(square - seen, 0.0) + self.excess)
        return split.max(axis=1), (split + np.log1p(self.largest**2 * U[:, None] * X)).max(axis=1)

    def log_weight(self, least_r: Array, Gam: Any) -> Any:
        """The bound of ``E_alpha[log w - KL]`` for ``|xbar|`` at least this, and this ``Gam``."""
        place = np.searchsorted(2.0 * self.heavier - 1.0, least_r, side="right") - 1
        low, high = (x[place] for x in self.table)
        gamma = np.minimum(1.0, Gam / self.largest**2)
        return high + np.log(gamma + (1.0 - gamma) * np.exp(np.minimum(low - high, 0.0)))

    def log_square(self, log_T: Any) -> Any:
        """``log(Delta + T)``."""
        share = like(self.share, self.a)
        return np.logaddexp(2.0 * log(self.a) + np.log(share**2 + self.excess), log_T)
