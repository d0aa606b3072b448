r"""Our Lipschitz bounds of L2 attention, in closed form, with their proofs: on a bounded domain, and of tied keys on all of R^d.

``P_ij`` is proportional to ``w_j exp(-|Q x_i - K x_j|^2)``. The derivative of a logit in the key's token is
``g_ij = 2 K^T (Q x_i - K x_j)``, which depends on j, so the formulas of softmax attention do not carry over
(they are violated). In coordinates centred at b (``x = z + b``, ``o = (Q - K) b``) the logits are ``-|Q z_i
- K z_j + o|^2``. With R the radius of the centred domain: ``G >= |g_ij|``, ``t = G R``, ``h = ||K||^2
R^2``, and the field part is that of softmax attention with ``A = 2 K^T Q``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaincc, gammaln

from otattn._linalg import norm_upper, product_error, spectral_norm_upper
from otattn.attention import AttentionMap, L2Attention, MaskedAttention
from otattn.attention.head import Head
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.intervals import lift, like, lower
from otattn.lipschitz.arithmetic.rounding import least, log, log_sum, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import Region, see
from otattn.lipschitz.constants.rows import row_norm, two_largest
from otattn.lipschitz.constants.sum_of_heads import head_bounds, parts_of
from otattn.lipschitz.hypotheses import every, l2, no_domain, order_between, order_two, tokens, unless
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.masked import masked_column_sum
from otattn.lipschitz.upper.published import largest_variance, raised_root, tied, tied_norms
from otattn.lipschitz.upper.softmax import bounds_of, closed_form, column_log, outward
from otattn.measures.domains import Domain


@dataclass(frozen=True)
class Numbers:
    """What the bounds need, each never below the exact number."""

    domain: Domain
    causal: bool
    v: Any
    sigma: Any
    R: Any
    t: Any
    h: Any
    kappa: Any
    spread: Any


def numbers_of(attention: AttentionMap, domain: Domain, *, exact: bool = False) -> Numbers:
    (head,) = parts_of(attention, exact=exact)
    return numbers(head, Region.of(domain, exact=exact))


def numbers(head: Head, region: Region) -> Numbers:
    """The numbers of one head on a region."""
    map: Any = head.map
    Q, K = head.arithmetic.matrix(map.Q), head.arithmetic.matrix(map.K)
    seen = see(head, region)
    R, center = seen.R, seen.region.center
    size: Any = 0.0
    pull: Any = 0.0
    if center is not None:
        o = (Q - K) @ center
        rounded = 0.0 if region.exact else 2.0 * product_error(np.abs(map.Q) + np.abs(map.K), center[:, None])
        size = norm_upper(o) + rounded
        pull = norm_upper(K.T @ o) + (0.0 if region.exact else rounded * norm_upper(K) + product_error(K.T, o[:, None]))
    q, k, split = spectral_norm_upper(Q), spectral_norm_upper(K), spectral_norm_upper(Q - K)
    if not region.exact:
        split += 1e-15 * (q + k)
    G = up(seen.form.norm_A * R + 2.0 * pull + 2.0 * (k * k) * R)
    rho, key = q * R + size, k * R
    spread = np.where(rho >= key, 4.0 * product(rho, key), np.square(rho + key))
    kappa = least(_least_pull(split, size, k, R), spread)
    return Numbers(
        region.domain, head.causal, seen.v, seen.sigma, R, up(product(R, G)), up(key * key), up(kappa), up(spread)
    )


def _least_pull(split: Any, size: Any, k: Any, R: Any) -> Any:
    """``max_{s in [0, R]} (split s + |o|)^2 + k^2 (R^2 - s^2)``: at R where it is convex, else at its vertex or at R."""
    at_end = np.square(split * R + size)
    if top(split) >= top(k):
        return np.maximum(at_end, np.square(size) + np.square(k * R))
    bend = k * k - split * split  # positive: the maximum over all s is |o|^2 (1 + split^2 / bend) + k^2 R^2
    free = np.square(size) * (1.0 + split * split / bend) + np.square(k * R)
    return np.where(split * size <= bend * R, free, at_end)


@closed_form(
    "l2_row_bound",
    numbers_of,
    statement="the row bound with the row constant of L2 attention",
    hypotheses="L2, masked or not; any domain; n tokens; p = 2",
    applies=every(l2(), tokens(), order_two),
)
def l2_row_bound(x: Numbers, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""n tokens, p = 2: the formula of ``row_bound`` with the row constant of L2 attention.

    That constant is ``min( max(1, (1 + t)/sqrt2), (phi(t)^2 + h/4)^{1/2} )``.

    Proof. As for softmax, ``sum_j p_j (<u, eps_j> + <y_j - m, u> <g_j, eps_j>)`` is linear in p where ``<m,
    u>`` is fixed, so two indices suffice. With weights p + q = 1, ``delta = y_1 - y_2``, ``tau = <delta,
    u>``, the norm squared is ``p^2 + q^2 + 2 p q tau <u, p g_1 - q g_2> + p^2 q^2 tau^2 (|g_1|^2 +
    |g_2|^2)``. First, with ``|tau| <= 2 R``, ``|g| <= G`` and ``z = p q``: at most ``1 + (4t - 2) z + 8 t^2
    z^2``, convex in z, so at most its larger value at ``z = 0`` and ``1/4``: ``max(1, (1+t)^2/2)``. Second,
    ``g_1 - g_2 = -2 H delta`` with ``H = K^T K``, so ``p g_1 - q g_2 = (p - q) g - H delta`` with g the
    mean of the two: the term in g is bounded as for softmax by ``phi^2``, and ``-2 p q tau <u, H delta> <=
    p q (|delta| |H delta| - <delta, H delta>) <= p q ||H|| |delta|^2 / 4 <= h/4`` since ``|H delta|^2 <=
    ||H|| <delta, H delta>`` and ``sqrt(w) - w <= 1/4``.
    """
    phi = row_constant(x)
    return log(two_largest(x.v * phi, x.sigma, n)), {"row_constant": phi, "sigma": x.sigma, "t": x.t}


def row_constant(x: Numbers) -> Any:
    """``min( max(1, (1 + t)/sqrt2), (phi(t)^2 + h/4)^{1/2} )``."""
    root = np.sqrt(like(2.0, x.t))
    return up(least(np.maximum(1.0, (1.0 + x.t) / root), np.hypot(row_norm(x.t), 0.5 * np.sqrt(x.h))))


@closed_form(
    "l2_column_bound",
    numbers_of,
    statement="sigma + v T^{1/p} (1 + h/2 + t^2)^{1/2}",
    hypotheses="L2, masked for n tokens or p = inf only; any domain, n and p",
    applies=every(l2(), unless(lambda n, p: math.isinf(p) or n is not None, l2(masked=False))),
    measures=True,
)
def l2_column_bound(x: Numbers, n: Any, p: float) -> tuple[Any, dict[str, Any]]:
    r"""``sigma + v T^{1/p} (1 + h/2 + t^2)^{1/2}`` for ``p >= 2``, for n equal atoms or any measure.

    T bounds the column sums: ``e^kappa``, ``kappa = max_{|z| <= R} |(Q - K) z + o|^2 + ||K||^2 (R^2 -
    |z|^2)``, and its sharper forms for n atoms (see ``column_sum``). For tied ``Q = K``, ``kappa = ||K||^2
    R^2``, where logits spread over ``4 ||K||^2 R^2``.

    Proof. Row by row as in ``column_bound``: ``sum_j P_ij B_ij B_ij^T = I - 2 (C H + H C) + sum_j P_ij
    |g_ij|^2 (x_j - m)(x_j - m)^T`` with ``B_ij = I + (x_j - m) g_ij^T``, at most ``1 + h/2 + t^2``, since
    ``lambda_max(-(C H + H C)) <= ||C|| ||H|| / 4`` for PSD matrices. The entropy argument of ``column_sum``
    holds for all logits l: ``log T_j <= sum_ik alpha_i alpha_k (l_ij - l_ik) = <A xbar + 2 K^T o, x_j -
    xbar> - |K x_j|^2 + E_alpha |K x|^2`` with ``A = 2 K^T Q``. Here ``2 <Q xbar + o, K x_j> - |K x_j|^2 <=
    |Q xbar + o|^2``, and ``E_alpha |K x|^2 <= |K xbar|^2 + ||K||^2 (R^2 - |xbar|^2)``; what is left is
    kappa.
    """
    row = np.hypot(np.sqrt(1.0 + 0.5 * x.h), x.t) if p >= 2.0 else 1.0 + 2.0 * x.t
    sums: Any = 0.0
    if not math.isinf(p):
        # a causal map comes here with n only
        total = log(masked_column_sum(x.spread, n)) if x.causal and n else column_log(x.kappa, x.spread, n)
        sums = total / p
    value = log_sum(log(x.sigma), log(x.v) + sums + log(row))
    return value, {"kappa": x.kappa, "sigma": x.sigma, "row": row}


@head_bounds.register(L2Attention)
def _(map: L2Attention, head: Head, region: Region, counts: Sequence[int | None], p: float, seen: Any) -> list[Bound]:
    x, whole = numbers(head, region), MaskedAttention(map) if head.causal else map
    return [b for n in counts for b in bounds_of(whole, x, n, p)]


@theorem(
    "l2_tied_bound",
    statement="||Q|| ||V Q^+|| times about n^{1/4} (log n)^{1/2} at p = 2, 4 x_n + 1, about 4 log n, at p = inf",
    hypotheses="L2 with K = Q and values that factor through Q, masked or not; all of R^d; n tokens; p >= 2",
    applies=every(tied, tokens(), order_between(2.0, math.inf), no_domain),
    everywhere=True,
)
def l2_tied_bound(attention: AttentionMap, domain: None, n: int, p: float, exact: bool) -> Bound:
    r"""Tied L2 attention on all of ``R^d``: of order ``n^{1/4} (log n)^{1/2}`` at p = 2, printed is ``n^{1/2} log n``.

    The value is ``||Q|| ||V Q^+||`` times ``R_n`` for p = inf, and for finite p times the least of

    .. math:: (1 + w_n)^{1/2}\, T_n^{1/p} + 2 \tau_n, \qquad (1 + 2 \kappa_p^{1/p} \tau_n^{1/2})\, T_n^{1/p} + 2 \tau_n,

    - ``T_n = (n+1)^{(1 + 1/n)/2} / 2``, under a causal mask ``2 (n/e)^{1/2}``, bounds the column sums of the attention weights;
    - ``w_n = 4 t^2 - 12 t + 4``, t the root of ``(t^2 - 3t + 1) / (2t - 1) = (n-1) e^{-t}``, and ``w_1 = 0``; a row attains it
      where the other tokens sit at ``+-sqrt(t) u``, half at each;
    - ``tau_n e^{tau_n + 1} = n - 1``; ``kappa_p = (log 2)^{p/2} + p Gamma(p/2, log 2)``, ``1 + log 2`` at p = 2;
    - ``R_n = 4 z + 1``, ``z e^{z + 3/2} = n - 1`` (the published bound for p = inf has ``z e^{z+1} = n - 1``), attained for
      odd n: half of the others at ``+-r u``, ``r^2 = z + 3/2``.

    The order at p = 2 is that of the constant: ``e^{1 + rho^2} / 2`` tokens at 0 that move along ``v_0``, and N tokens at
    ``v_0 + rho v_i`` with ``rho^2 = log(5 N) / 2``, v orthonormal, have more than a twentieth of the bound. Several heads as in
    :func:`~otattn.lipschitz.upper.published.kim2021_l2`.

    Proof. As there the map is ``M h(Q x)``, ``h(y)_i = m_i = sum_j P_ij y_j``, ``P_ij = k_ij / Z_i``, ``k_ij = e^{-|y_i - y_j|^2}``.
    For a unit u, with ``D_j = y_j - y_i`` and ``b_j = |u - 2 <u, y_j - m_i> D_j|``, ``<u, d m_i> <= sum_j P_ij b_j |e_j| +
    2 lambda_max(C_i) |e_i|``, where ``lambda_max(C_i) <= tau_n``. By Hoelder the first term is at most ``W^{1/2} (sum_j P_ij
    |e_j|^p)^{1/p}``, ``W = sup sum_j P_ij b_j^2``; the sum over i of its p-th power is at most ``W^{p/2} max_j T_j |e|_p^p``,
    ``T_j = sum_i P_ij``. For the second form split b: ``|sum_j P_ij <u, y_j - m_i> <D_j, e_j>| <= tau_n^{1/2} (sum_j P_ij
    |<D_j, e_j>|^p)^{1/p}``, and ``sum_i P_ij |<y_j - y_i, v>|^p <= kappa_p T_n`` for unit v, shown with the columns.

    *Columns.* Let ``alpha_i = P_ij / T_j``, and ``beta_i`` half a unit mass at i and half of alpha. By Gibbs ``log Z_i >=
    -sum_k beta_i(k) |y_i - y_k|^2 + H(beta_i)``. Average ``log T_j = -|y_i - y_j|^2 - log Z_i - log alpha_i`` over alpha: the
    squares are ``-Var - |ybar - y_j|^2`` from the first term and half of ``2 Var`` from the second, together ``-|ybar - y_j|^2``. What
    is left is ``sum_i f(alpha_i) / 2 - log 2`` with ``f(x) = x (1 + x) log(1 + 1/x)``, concave since ``f'' = 2 log(1 + 1/x) -
    1/x - 1/(1+x) <= 0`` (the trapezium rule for 1/x), so at most its value where all ``alpha_i = 1/n``. With alpha on the i of
    ``<y_j - y_i, v> >= b`` only, the squares are at most ``-b^2``: these rows have at most ``T_n e^{-b^2}``. So ``sum_i P_ij
    |<y_j - y_i, v>|^p <= T_n int min(1, 2 e^{-x}) d(x^{p/2})``, the integral ``kappa_p``.

    Under a mask rows ``i = j..n``, called 1..N, meet column j. Let ``A_k = alpha_1 + .. + alpha_k``, ``beta_i(k) = alpha_k``
    for k < i, and the rest of its mass at i. The squares add up to ``-|ybar - y_j|^2`` again. What is left, with ``a =
    alpha_k``, ``B = A_{k-1}`` and ``q_k = A_k^2 - B^2 = a (2B + a)``, is ``sum_k q_k log(1/q_k) / 2 + a h_k``. The first part is
    at most ``log(N) / 2``, ``h = B log(2B + a) + (a/2) log(1 + 2B/a) + (1-B) log(1-B)`` increases in ``a <= 1 - B``, so it is at most
    ``psi(B) = ((1+B) log(1+B) + (1-B) log(1-B)) / 2``, which increases: ``sum a h_k <= int_0^1 psi = log 2 - 1/2``.

    *Rows.* Put ``y_i = 0``, ``s_j = <u, y_j>``, ``r_j = |y_j|``, and turn u so that ``m = sum_j P_ij s_j >= 0``. Then ``W = 1 +
    4 sum_j P_ij ((s_j - m)^2 r_j^2 - s_j^2) + 4 m^2``. Multiply by ``Z_i = 1 + sum e^{-r_j^2}`` and add ``8 m t`` times the
    definition of m: ``W <= 1 + w`` follows if for each of the n - 1 others

    .. math:: (n-1) e^{-r^2} \left(4 s^2 (r^2 - 1) + 8 s m (t - r^2) + 4 m^2 (r^2 + 1 - 2t) - w\right) \le w + 4 m^2 (2t - 1).

    With ``x = r^2``, ``kappa = (n-1) e^{-x}``, ``E = (2t-1)(1 + kappa) - kappa x``, ``|s| <= r`` and the worst m this reads

    .. math:: 4 \kappa x (x-1)_+ + 4 \kappa^2 x (t - x)^2 / E \le w (1 + \kappa).

    Let ``q(x) = kappa x / (1 + kappa)``. It is largest, ``tau_n``, at ``x = tau_n + 1``; t is the maximum of ``(x - 1) q(x)``
    and lies beyond, so ``q <= t - 1``, ``E > 0`` and ``kappa x / E = q / (2t - 1 - q) <= (t-1)/t``, also ``<= x / (2t - 1 - x)``
    since ``q <= x``. There ``w = 4 (2t-1) kappa(t)``.

    - ``x = t + y``, y >= 0: divided by ``4 kappa``, ``(2t-1)(e^y - 1 - y) - y^2 >= y^2 kappa x / E``; the left side is at least
      ``(t - 3/2) y^2``, the right at most ``y^2 (t-1)/t``.
    - ``1 <= x = t - z``: the same with ``y = -z``. It follows from ``e^{-z} - 1 + z >= z^2 / t``, or ``>= z^2 / (t - 1 + z)``, by
      the two bounds of ``kappa x / E``. The first holds for z <= .95, the second beyond: ``(e^{-z} - 1 + z) / z^2`` and
      ``z (1 - e^{-z}) / (e^{-z} - 1 + z)`` decrease in z, are .3731 and 1.7302 at .95, and ``t >= 2.7405``, its value for n = 2.
    - x < 1: ``x (t-x)^2 / (2t-1-x) <= (2t-1) e^{x-t} + t^2 - 3t + 1`` suffices. For t >= 3 the left side increases on [0, 1] to
      ``(t-1)/2``, at most ``t^2 - 3t + 1``; below, right less left grows with t, and at t = 2.74 ten intervals of x show it.

    *One row.* For p = inf and ``|e_j| <= 1``, with ``sigma_j = s_j - m``, ``<u, d m_i> <= P_ii + sum_{j != i} P_ij (b_j +
    2 |sigma_j| r_j)``, as ``C_i u = sum_j P_ij sigma_j y_j``. With ``4 m`` times the definition of m added, this is at most R if
    for each other token ``kappa (h - R) <= R - 1 + 4 m^2``, where ``h = b + 2 |sigma| r + 4 m s - 4 m^2`` and ``b^2 = 1 -
    4 m sigma + 4 sigma^2 (r^2 - 1)``. R is the maximum over x of ``1 + p (4 x - 2)``, ``p = kappa / (1 + kappa)``, so ``kappa
    (4 r^2 - 1 - R) <= R - 1``, and ``h <= 4 r^2 - 1`` suffices.

    - ``r^2 >= 1 + m^2``: b is convex in s, and at ``s = +-r`` it is ``2 r (r -+ m) - 1``, not negative as ``r - m >= 1/(r + m) >=
      1/(2 r)``; so h is ``4 r^2 - 1 - 4 m^2`` there.
    - ``r^2 < 1 + m^2``, ``sigma < 0``: ``b <= 1 + 2 m |sigma|``, so ``h <= 1 + 2 |sigma| (r - m)``, at most ``1 + 2 r^2`` as ``|sigma|
      <= r + m`` (and at most 1 for r < m).
    - ``r^2 < 1 + m^2``, ``sigma >= 0``, so ``r >= m``: for r > 1, ``sigma <= r - m < 1/(r + m)`` gives ``sigma (r^2 - 1) <= m``. So
      ``b <= 1`` and ``h <= 1 + 2 (r - m)(r + 2 m) <= 1 + (9/4) r^2``.

    The last two are at most ``4 r^2 - 1`` for ``x = r^2 >= 8/7``. Below, ``1 + (9/4) x p(x) <= R`` suffices. Up to ``x = tau_n +
    1``, which is beyond 8/7, ``x p`` increases, and ``(18/7) p(8/7) <= 4 p(3/2) <= R - 1`` by ``p(y) / p(x) >= (1 + e^x) /
    (1 + e^y)`` for y > x. A causal mask leaves fewer others in each row.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.lipschitz import bounds
    >>> tied = L2Attention(np.eye(3), np.eye(3), np.eye(3))
    >>> [round(f(tied, n=1000).value, 1) for f in (bounds.l2_tied_bound, bounds.kim2021_l2)]
    [34.6, 590.8]
    """
    number: Any = lift if exact else float
    variance, t = number(largest_variance(n)), number(_double_root(n))
    tokens = number(float(np.nextafter(float(n), math.inf)))
    row = np.sqrt(1.0 + np.maximum(4.0 * t * (t - 3.0) + 4.0, 0.0))
    causal = attention.unmasked is not attention
    log_columns = (
        np.log(number(2.0)) + 0.5 * (np.log(tokens) - 1.0)
        if causal
        else 0.5 * (1.0 + 1.0 / number(float(n))) * np.log(tokens + 1.0) - np.log(number(2.0))
    )
    if math.isinf(p):
        constant = 4.0 * number(raised_root(1.5, n)) + 1.0
    else:
        split = 1.0 + 2.0 * _moment(p, exact) * np.sqrt(variance)
        constant = least(row, split) * np.exp(log_columns / p) + 2.0 * variance
    value = log(number(tied_norms(attention, exact=exact))) + np.log(up(constant))
    details = {"row": row, "column_sum": np.exp(log_columns), "variance": variance}
    return outward(value, "l2_tied_bound", domain, n, p, {k: float(top(x)) for k, x in details.items()})


def _moment(p: float, exact: bool) -> Any:
    """``kappa_p^{1/p}``, ``kappa_p = (log 2)^{p/2} + p Gamma(p/2, log 2)``; by balls where it must be proved."""
    half, two = 0.5 * p, math.log(2.0)
    if not exact:
        rest = math.log(p) + float(gammaln(half)) + math.log(float(gammaincc(half, two)))
        return float(up(math.exp(float(np.logaddexp(half * math.log(two), rest)) / p)))
    from flint import arb

    log_two = arb(2).log()
    kappa = log_two ** arb(half) + arb(p) * log_two.gamma_upper(arb(half))
    return lift(float(up(float((kappa ** (1 / arb(p))).upper()))))


def _double_root(n: int) -> float:
    """At least t, ``(t^2 - 3t + 1)/(2t - 1) = (n-1) e^{-t}``, proved by intervals: the difference of the sides increases."""
    if n == 1:
        return (3.0 + math.sqrt(5.0)) / 2.0  # w = 0

    def excess(t: Any, others: Any) -> Any:
        return np.log((t * (t - 3.0) + 1.0) / (2.0 * t - 1.0)) + t - np.log(others)

    t = float(brentq(lambda t: float(excess(t, float(n - 1))), 2.7, 800.0, xtol=1e-13)) * (1.0 + 1e-12)
    if not lower(excess(lift(t), lift(float(n - 1)))) >= 0.0:
        raise CertificateError(f"the row constant of {n} tokens could not be confirmed in intervals; please report it.")
    return t
