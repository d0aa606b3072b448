r"""Our Lipschitz bounds of softmax attention in closed form, with their proofs.

Notation: logits ``<g(x), y>`` with ``g(x) = A x + c``, values ``V y``, tokens in a domain. With ``P_x`` the
attention weights of a row, ``m_x`` and ``C_x`` their mean and covariance, moving the tokens by ``eps``
moves the image of x by

    ``V (K eps)(x) + V C_x A eps(x)``,  ``(K eps)(x) = E_{P_x}[ (I + (y - m_x) g(x)^T) eps(y) ]``

(on n tokens ``P_ij`` replaces ``P_x``). A bound of this operator at every configuration of the domain's
convex hull is a Lipschitz constant: along the straight path of an optimal coupling the image's speed is at
most the bound times the distance. On ``L^p(mu)`` that gives ``W_p``, for atoms of any weights (``n=None``),
or for n equal ones. Domains other than centred balls enter through :mod:`otattn.lipschitz.constants.regions`: ``G =
max |g|``, ``r`` the half diameter, R the radius of the centred domain, ``v = ||V||``, ``sigma = sup ||V C
A||``, ``kappa``; for the ball and without bias ``t = G r`` is ``a = ||A|| R^2``. One token's map is linear:
``n = 1`` gives v exactly.

Every value is rounded outward; one above the largest float is inf, and ``log_value`` its logarithm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from otattn._linalg import lost_below
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.intervals import is_interval, lift, upper
from otattn.lipschitz.arithmetic.rounding import NOTHING, ROUNDING, least, log, log_sum, safe_exp, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.constants.regions import Seen, see
from otattn.lipschitz.constants.rows import (
    density_constant_p,
    fixed_query_constant,
    hoelder_constant,
    row_norm,
    two_largest,
)
from otattn.lipschitz.hypotheses import every, order_between, order_two, softmax, tokens, unless
from otattn.lipschitz.theorem import THEOREMS, PublicTheorem, theorem
from otattn.measures.domains import Ball, Domain

_LAST: tuple[Any, Domain, Seen] | None = None
"""The numbers that were made last: the theorems of a table ask for the same ones, one after the other."""


def seen_by(attention: AttentionMap, domain: Domain, *, exact: bool = False) -> Seen:
    """What a softmax head, masked or not, sees of its domain."""
    global _LAST
    last = _LAST
    if not exact and last is not None and last[0] is attention and last[1] is domain:
        return last[2]
    seen = see(softmax_head(attention, exact=exact).on_span(ball=isinstance(domain, Ball)), domain)
    if not exact:
        _LAST = attention, domain, seen
    return seen


Formula = Callable[[Any, Any, float], tuple[Any, dict[str, Any]]]
_FORMULAS: dict[str, Formula] = {}


def closed_form(key: str, numbers: Callable[..., Any] = seen_by, **record: Any) -> Callable[[Formula], PublicTheorem]:
    """Register the theorem ``(x, n, p) -> (logarithm, details)`` in the numbers ``x = numbers(attention, domain, exact=)`` of a head.

    Those know ``v`` and ``domain``. The map of one token is linear: its constant is v, whatever the theorem.
    """

    def register(formula: Formula) -> PublicTheorem:
        @functools.wraps(formula)
        def evaluate(attention: AttentionMap, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
            return bound_of(key, numbers(attention, domain, exact=exact), n, p)

        _FORMULAS[key] = formula
        return theorem(key, **record)(evaluate)

    return register


def bound_of(key: str, x: Any, n: int | None, p: float) -> Bound:
    """The bound of a closed form from the numbers of a head on its domain."""
    single = n == 1 and THEOREMS[key].quantity == "lipschitz"
    log_value, details = (log(x.v), {}) if single else _FORMULAS[key](x, n, p)
    return outward(log_value, key, x.domain, n, p, details)


def bounds_of(attention: AttentionMap, x: Any, n: int | None, p: float) -> list[Bound]:
    """All closed forms of a head's Lipschitz constant that apply, from its numbers."""
    records = [t for key, t in THEOREMS.items() if key in _FORMULAS and t.quantity == "lipschitz"]
    return [bound_of(t.key, x, n, p) for t in records if t.reason(attention, x.domain, n, p) is None]


@closed_form(
    "field_bound",
    statement="sigma = sup ||V C A||",
    hypotheses="softmax, masked or not; any domain, n and p",
    applies=softmax(),
    quantity="field",
)
def field_bound(seen: Seen, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""``sigma``: the largest ``||D_x Gamma_mu(x)|| = ||V C_x A||`` over measures and points of the domain.

    On the ball it is ``R^2 max_{|u|=1} |V u| |A^T u| = R^2 min_{s>0} lambda_max(s V^T V + A A^T / s) / 2``,
    exactly, in every dimension; proof and other domains in :meth:`otattn.lipschitz.constants.regions.Seen.sigma` and
    :func:`otattn.lipschitz.constants.quadratic.max_norm_product`.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> field_bound(SoftmaxAttention([[2.0]], [[3.0]]), radius=2.0).value
    24.000...
    """
    return log(seen.sigma), {}


@closed_form(
    "column_sum",
    statement="T_n, at most e^kappa",
    hypotheses="softmax without a mask; any domain and n",
    applies=softmax(masked=False),
    quantity="column_sum",
    measures=True,
)
def column_sum(seen: Seen, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""``T``: the largest column sum ``sum_i P_ij`` of n tokens, ``sup int k(x, y) dmu(x)`` for any measure.

    ``log T <= kappa = max <A x + c, y - x>`` over two points of the domain; ``T <= n``,
    ``T <= 1 + 1 / (1/(n-1) + e^{-kappa})`` and ``T <= n / (1 + (n-1) e^{-2t})``.

    Proof. Let ``alpha_i = w_i k_ij / T_j`` (``w_i = 1/n``, ``P_ij = k_ij / n``; any weights for measures)
    with mean xbar. ``-log k_ij = log sum_k w_k e^{l_ik - l_ij} >= -KL(alpha | w) + sum_k alpha_k (l_ik -
    l_ij)`` (Gibbs). Average over alpha: the left is ``-log T_j - KL(alpha | w)``, so ``log T_j <= <A xbar +
    c, x_j - xbar> <= kappa``. For n tokens do the same over ``i, k != j`` with ``S = sum_{i != j} P_ij``,
    ``alpha_i = P_ij / S`` and ``1/P_ij - 1 = sum_{k != j} e^{l_ik - l_ij}``: ``log S <= kappa + sum alpha_i
    log(1 - P_ij) <= kappa + log(1 - S/(n-1))`` by Jensen and Cauchy-Schwarz, so ``S <= 1 / (1/(n-1) +
    e^{-kappa})``, and ``T_j <= 1 + S``. Last, logits of a row differ by at most 2 t, so ``P_ij <= 1 / (1 +
    (n-1) e^{-2t})``.

    Not valid under a causal mask. ``kappa`` is ``a/4`` for ``A = alpha I``, ``2a`` for ``A = -alpha I``,
    ``a`` for skew A.

    Returns
    -------
    Bound
        kind "upper"; ``details["kappa"]``.
    """
    return column_log(seen.kappa, 2.0 * seen.t, n), {"kappa": seen.kappa}


def column_log(kappa: Any, spread: Any, n: int | None) -> Any:
    """Logarithm of the bound of the column sums; ``spread`` bounds the differences of a row's logits."""
    if n is None:
        return kappa
    if n == 1:
        return 0.0
    exact = is_interval(kappa) or is_interval(spread)
    count, rest = (np.log(lift(n)), np.log(lift(n - 1))) if exact else (math.log(n), math.log(n - 1.0))
    others = -log_sum(-rest, -kappa)
    return least(count, kappa, log_sum(0.0, others), count - log_sum(0.0, rest - spread))


def columns_at_most(n: int, kappa: Any) -> Any:
    """``T_n`` of n atoms in every row, outward; n where kappa is unknown."""
    if math.isinf(top(kappa)):
        return float(n)
    return np.exp(column_log(kappa, math.inf, n)) * (1 + 1e-14)


@closed_form(
    "row_bound",
    statement="the norm of two rows, about v a sqrt(n / 2)",
    hypotheses="softmax, masked or not; any domain; n tokens; p = 2",
    applies=every(softmax(), tokens(), order_two),
)
def row_bound(seen: Seen, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""n tokens, p = 2: ``( sigma^2 + (alpha + sqrt(alpha^2 + beta^2)) / 2 )^{1/2}``.

    ``alpha = n phi^2 v^2 + 2 sqrt2 phi v sigma``, ``beta = 2 phi v sigma sqrt(n-2)``, ``phi =
    row_norm(t)``, t of `t_values`; at most ``v (sqrt(n) phi(a) + a)`` on the ball. So the growth like ``R^2 sqrt(n)``
    has the constant ``v ||A|| / sqrt2``, where the published bound has ``2 sqrt3 v ||A||``. Holds with and
    without a causal mask.

    Proof. By the two-index argument of :func:`otattn.lipschitz.constants.rows.row_norm`,
    ``|K_i eps| <= phi sqrt(s)`` with s the sum of the two largest ``|eps_j|^2``; ``|V C_i A eps_i| <= sigma
    |eps_i|``. Sum the squares of ``v phi sqrt(s) + sigma |eps_i|`` over i:
    :func:`otattn.lipschitz.constants.rows.two_largest`. A mask only restricts the points that a row sees.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> row_bound(SoftmaxAttention([[1.0]], [[1.0]]), radius=1.0, n=1).value
    1.000...
    """
    phi = row_norm(seen.t_values)
    details = {"row_constant": phi, "sigma": seen.sigma, "t": seen.t_values}
    return log(two_largest(seen.v * phi, seen.sigma, n)), details


@closed_form(
    "column_bound",
    statement="sigma + T^{1/p} N_p, T <= e^kappa",
    hypotheses="softmax without a mask (masked too for p = inf); any domain, n and p",
    applies=every(softmax(), unless(lambda n, p: math.isinf(p), softmax(masked=False))),
    measures=True,
)
def column_bound(seen: Seen, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""``sigma + T^{1/p} N_p``, for every order p, for n equal atoms or any measure.

    T is :func:`column_sum` (``e^kappa`` for any measure) and ``N_p`` the norm of a row of ``V K`` from
    ``L^p(P_x)``. On the ball without bias (``sigma <= v a``):

    - ``p = 2``: ``v (a + e^{kappa/2} sqrt(1 + a^2))``. For symmetric A the rate ``kappa/2`` is that of the
      published lower bound, so it is settled: ``e^a`` for ``A = -alpha I``, ``e^{a/8}`` for ``A = alpha
      I``, against ``e^{2a}``.
    - ``p = inf``: ``v (a + sqrt(1 + a^2))``: no exponential and no n. Sharp for ``A = alpha I``.
    - ``p = 1``: ``v (a + (1 + 2a) e^kappa)``; ``p >= 2``: ``v (a + e^{kappa/p} sqrt(1 + a^2))``; between,
      ``N_p`` is :func:`otattn.lipschitz.constants.rows.hoelder_constant`.

    Proof. Hoelder row by row: ``|V (K eps)(x)|^p <= N_p^p int k(x, y) |eps(y)|^p dmu(y)``; integrate over
    x, the integral of k being at most T. For ``p >= 2``, ``N_p^2 <= sup lambda_max( V (I + |g|^2 C) V^T
    )``.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> column_bound(SoftmaxAttention([[1.0]], [[1.0]]), radius=2.0, p=float("inf")).value  # 4 + sqrt(17)
    8.123105...
    """
    row = seen.row_deviation if p >= 2.0 else seen.v * hoelder_constant(seen.t_values, p)
    sums: Any = 0.0 if math.isinf(p) else column_log(seen.kappa, 2.0 * seen.t, n) / p
    details = {
        "kappa": seen.kappa,
        "sigma": seen.sigma,
        "row": row,
        "log_column_sum": 0.0 if math.isinf(p) else sums * p,
    }
    return log_sum(log(seen.sigma), sums + log(row)), details


@closed_form(
    "density_bound",
    statement="sigma + v Psi_p(t)",
    hypotheses="softmax without a mask; any domain and n; p >= 2",
    applies=every(softmax(masked=False), order_between(2.0, math.inf)),
    measures=True,
)
def density_bound(seen: Seen, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""``sigma + v Psi_p`` for ``p >= 2``: sharper than :func:`column_bound` where kappa is close to 2 t.

    ``Psi_p`` bounds each row from ``L^p(mu)`` through the largest density of its weights and their
    variance, which cannot both be large: :func:`otattn.lipschitz.constants.rows.density_constant`; for p = 2 the smaller of
    it and :func:`otattn.lipschitz.constants.rows.fixed_query_constant`, which counts the density along the row.
    """
    _, psi = density_constant_p(seen.t_ball, n, p)
    if p == 2.0:
        psi = least(psi, fixed_query_constant(seen.t_ball))
    value = log_sum(log(seen.sigma), log(seen.v) + psi)
    return value, {"log_density_constant": psi, "sigma": seen.sigma}


def outward(
    log_value: Any, theorem: str, domain: Domain | None, n: int | None, p: float, details: dict[str, Any]
) -> Bound:
    """The bound of a theorem from its logarithm: rounded outward by :data:`ROUNDING` for a float, the upper end of an interval.

    The rounding of a large logarithm is part of it.
    """
    if is_interval(log_value) and top(log_value) <= NOTHING:
        log_value = -math.inf
    if is_interval(log_value):
        value, log_value = float(upper(np.exp(log_value))), float(upper(log_value))
    else:
        log_value += 1e-15 * abs(log_value) if math.isfinite(log_value) else 0.0
        value, log_value = up(safe_exp(log_value)) * (1.0 + ROUNDING), log_value + ROUNDING
        value += lost_below(value)
    plain = {key: float(upper(x)) if is_interval(x) else x for key, x in details.items()}
    return Bound(
        float(value),
        "upper",
        p=p,
        domain=domain,
        n=n,
        details=plain,
        theorem=theorem,
        quantity=THEOREMS[theorem].quantity,
        log_value=float(log_value),
    )
