r"""Our bounds of attention with composed logits, in closed form, with their proofs; rotary attention is the oldest of them.

A token x at position i is mapped to ``sum_j P_ij nu(y_j)``, ``P_ij`` the normalised exponentials of logits ``l_ij`` over the
atoms that it sees, with weights, and a sink of value 0 where there is one. With ``g_ij`` and ``h_ij`` the gradients of
``l_ij`` in the key's and the query's token, moving the tokens by ``eps`` moves the image of token i by

.. math:: \sum_j P_{ij} \bigl( D\nu_j\, \epsilon_j + (\nu_j - \bar\nu_i) \langle g_{ij}, \epsilon_j\rangle \bigr) + C_i \epsilon_i ,
          \qquad C_i = \sum_j P_{ij} (\nu_j - \bar\nu_i)(h_{ij} - \bar h_i)^T ,

where a sink counts in the sums with ``nu = g = h = eps = 0``. :mod:`otattn.lipschitz.constants.scores` has ``|D nu| <= v``,
``|g| <= G``, ``|h| <= H``, and rho, half the range of ``<u, nu>``. Hence ``||C_i|| <= rho H =: sigma`` by Cauchy-Schwarz, for
``<u, nu>`` has standard deviation at most rho and ``<w, h>``, with values in ``[-H, H]``, at most H. Write ``t = rho G``.
Positions, masks and the sink stay as they are along the straight path of a coupling (of equal times, where the map has
positions), so that bounds of this derivative are Lipschitz constants, as in :mod:`otattn.lipschitz.upper.softmax`.

**What does not depend on the radius R of the tokens.** Norms of queries and keys bound G and H, and norms or a cap bound the
logits, whatever R is; rho is ``||V||`` times half the diameter unless values are normalised too. So

- with normalised queries, keys and values the constants hold on all of ``R^d`` (domain None);
- with normalised queries and keys they grow like R, for softmax attention like ``R^2`` in rows and ``e^{c R^2}`` in columns. This
  growth is real: a token whose key is near 0 turns, and with it its weight, while others at distance R are averaged;
- with a cap they grow like ``R^2``, without an exponential: the columns of the weights sum to at most ``e^{2 cap}``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from otattn._linalg import norm_upper, spectral_norm_upper
from otattn.attention import LayerNorm, Mask, ScoreAttention
from otattn.attention.head import check_sizes
from otattn.attention.rotary import RotaryAttention
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.arithmetic.rounding import is_zero, least, log, log_sum, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import largest_norm
from otattn.lipschitz.constants.rows import two_largest
from otattn.lipschitz.constants.scores import EDGE, ScoreNumbers
from otattn.lipschitz.hypotheses import every, order_two, rotary, tokens
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.masked import masked_column_sum
from otattn.lipschitz.upper.softmax import outward
from otattn.measures.domains import Domain

__all__ = ["rotary_row_bound", "score_average_bound", "score_column_bound", "score_row_bound"]


def _scores(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """Composed logits whose parts have bounded slopes; on all of ``R^d``, bounded images."""
    if not isinstance(attention, ScoreAttention):
        return f"attention must be ScoreAttention, received {type(attention).__name__}"
    norms = {name: getattr(attention, name) for name in ("query_norm", "key_norm", "value_norm")}
    for name, norm in norms.items():
        if norm is not None and (not isinstance(norm, LayerNorm) or norm.eps == 0.0):
            received = "eps = 0" if isinstance(norm, LayerNorm) else type(norm).__name__
            return f"{name} must be LayerNorm or RMSNorm with eps > 0, whose slopes are bounded, received {received}"
    if domain is None and None in norms.values():
        missing = ", ".join(name for name, norm in norms.items() if norm is None)
        return f"on all of R^d queries, keys and values must be normalised, received no {missing}"
    return None


def _sums(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """The columns of the weights have bounded sums."""
    if math.isinf(p) or n is not None:
        return None
    if attention.mask is not None:
        return f"under a mask the column sums of any measure are not bounded; give n, or p = inf, received p = {p:g}"
    return _sums_of_bias(attention, n)


def _averages(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """A causal mask and nothing else that hides atoms."""
    mask = attention.mask
    if mask is None or not mask.causal or mask.before is not None or mask.allowed is not None:
        return "the mask must be causal, without a window or a pattern"
    if not 1.0 < p < math.inf:
        return f"p must lie in (1, inf), received {p:g}"
    return _sums_of_bias(attention, n)


def _sums_of_bias(attention: Any, n: int | None) -> str | None:
    bias = attention.bias
    if bias is None or bias.slope == 0.0 or n is not None or attention.length is not None:
        return None
    return "a slope over positions without end bounds no logit; give n, or a length of the map"


@theorem(
    "score_row_bound",
    statement="the row bound with gradients that depend on the key; free of R where queries, keys and values are normalised",
    hypotheses="composed logits, any positions, masks, cap and sink, norms with eps > 0; any domain, all of R^d where queries, "
    "keys and values are normalised; n tokens; p = 2",
    applies=every(_scores, tokens(), order_two),
    everywhere=True,
)
def score_row_bound(attention: ScoreAttention, domain: Domain | None, n: int | None, p: float, exact: bool) -> Bound:
    r"""n tokens, p = 2: ``(sigma^2 + (alpha + sqrt(alpha^2 + beta^2)) / 2)^{1/2}``, as in ``row_bound``.

    ``phi = max(v, (v + t) / sqrt 2)`` takes the place of ``v phi``: ``alpha = n phi^2 + 2 sqrt2 phi sigma``, ``beta = 2 phi
    sigma sqrt(n-2)``. On a sequence under windows that show each atom to at most W rows, ``phi sqrt(W) + sigma`` is a bound
    too, free of n. One token has v without a sink, and ``v + reach (G + H) / 4`` with one.

    Proof. Fix i and a unit vector u. With ``<u, nubar_i>`` fixed, ``sum_j P_ij (<Dnu_j^T u, eps_j> + <u, nu_j - nubar_i>
    <g_ij, eps_j>)`` is linear in the row of weights (a sink counts as one more index, with the term 0), so it is largest
    where two indices have weights ``p + q = 1``. With ``|<u, nu_1 - nu_2>| <= 2 rho`` it is at most ``p (v + 2 q t) |eps_1| +
    q (v + 2 p t) |eps_2|`` (one of the two terms is missing where an index is the sink), and ``p^2 (v + 2 q t)^2 + q^2 (v + 2
    p t)^2 = v^2 + (4 v t - 2 v^2) z + 8 t^2 z^2`` with ``z = p q`` in ``[0, 1/4]``, convex in z: at most ``max(v^2, (v + t)^2
    / 2) = phi^2``. So the sum has norm at most ``phi`` times the root of the sum of the two largest ``|eps_j|^2`` of the
    atoms that i sees; the rest is the proof of ``row_bound``. For windows, add ``|eps_j|^2`` over the at most W rows that see
    j. For one token and a sink of weight 1 - P the derivative is ``P Dnu + P (1 - P) nu (g + h)^T``.

    Examples
    --------
    >>> from otattn.attention import RMSNorm
    >>> one = RMSNorm([1.0], eps=1.0)
    >>> head = ScoreAttention([[1.0]], [[1.0]], [[1.0]], query_norm=one, key_norm=one, value_norm=one)
    >>> round(score_row_bound(head, n=2).value, 3)   # tokens anywhere on the line
    3.0

    References
    ----------
    otattn, score row bound.
    """
    assert n is not None
    x = ScoreNumbers(attention, domain, exact)
    half = lift(2.0) if exact else 2.0
    phi, sigma = up(np.maximum(x.v, (x.v + x.t) / np.sqrt(half))), x.sigma
    value = _one_token(x) if n == 1 else two_largest(phi, sigma, n)
    rows = _rows_that_see(attention, n)
    if rows < n:
        value = least(value, up(phi * np.sqrt(x.number(float(rows))) + sigma))
    details = {"row_constant": phi, "sigma": sigma, "t": x.t}
    return outward(log(value), "score_row_bound", domain, n, 2.0, details)


def _one_token(x: ScoreNumbers) -> Any:
    return x.v if x.map.sink is None else up(x.v + product(0.25, x.reach, x.G + x.H))


def _rows_that_see(attention: ScoreAttention, n: int) -> int:
    """At most this many rows of a sequence see the same atom."""
    before, after = _window(attention.mask, n) if attention.length is None else (n - 1, n - 1)
    return min(n, before + after + 1)


def _window(mask: Mask | None, n: int) -> tuple[int, int]:
    """How many tokens before and after itself a token of a sequence sees at most."""
    window = (math.inf, math.inf) if mask is None else mask.window
    before, after = (n - 1 if math.isinf(w) else min(n - 1, math.floor(w + EDGE)) for w in window)
    return before, after


@theorem(
    "score_column_bound",
    statement="sigma + T^{1/p} N_p, T <= e^{2 cap}: no exponential of the radius where logits are bounded",
    hypotheses="composed logits, norms with eps > 0; any domain, all of R^d where queries, keys and values are normalised; any p; "
    "n tokens, or any measure where no mask hides atoms or p = inf",
    applies=every(_scores, _sums),
    measures=True,
    everywhere=True,
)
def score_column_bound(attention: ScoreAttention, domain: Domain | None, n: int | None, p: float, exact: bool) -> Bound:
    r"""``sigma + T^{1/p} N_p`` for every p: ``N_p = v + t`` for ``p >= 2`` and ``v + 2^{2/p - 1} t`` below, T the column sums.

    ``T <= e^S`` for any measure, S the largest difference of two logits of a row: at most twice the cap and, for normalised
    queries and keys, ``2 |s| sup|q| sup|k|``, whatever R is. For n tokens, also under a mask, T is :func:`log_column_sum`.

    Proof. Hoelder row by row, with ``1/p + 1/p' = 1``: ``<u, sum_j P_ij (..) eps_j> <= (sum_j P_ij |Dnu_j^T u + <u, nu_j -
    nubar_i> g_ij|^{p'})^{1/p'} (sum_j P_ij |eps_j|^p)^{1/p}``. By the triangle inequality in ``L^{p'}`` the first factor is
    at most ``v + G ||<u, nu - nubar>||_{p'}``; the norm is at most rho for ``p' <= 2``, and ``rho^{2/p'} (2 rho)^{1 - 2/p'}``
    above, since ``|<u, nu - nubar>| <= 2 rho``. Add the p-th powers of the second factor over the rows: each ``|eps_j|^p``
    meets at most T. The term ``C_i eps_i`` adds sigma.

    Examples
    --------
    >>> head = ScoreAttention([[1.0]], [[1.0]], [[1.0]], cap=0.1)
    >>> values = [score_column_bound(head, radius=R).value for R in (100.0, 1000.0)]
    >>> round(values[1] / values[0])   # R^2, where softmax attention has an exponential of R^2
    100

    References
    ----------
    otattn, score column bound.
    """
    x = ScoreNumbers(attention, domain, exact)
    if n == 1:
        return outward(log(_one_token(x)), "score_column_bound", domain, n, p, {})
    row = _row_norm(x, p)
    sums: Any = 0.0 if math.isinf(p) else log_column_sum(x, n)
    value = log_sum(log(x.sigma), sums / p + log(row))
    details = {"log_column_sum": sums, "row": row, "sigma": x.sigma, "t": x.t}
    return outward(value, "score_column_bound", domain, n, p, details)


def _row_norm(x: ScoreNumbers, p: float) -> Any:
    """``N_p``."""
    if p >= 2.0:
        return up(x.v + x.t)
    two = x.number(2.0)
    return up(x.v + x.t * np.exp((two / p - 1.0) * np.log(two)))


def log_column_sum(x: ScoreNumbers, n: int | None) -> Any:
    r"""Logarithm of a bound T of ``sup_j sum_i P_ij``; for any measure of ``sup_y int k(x, y) dmu(x)``.

    With S at least every difference of two logits of a row and ``r = e^{-S}``: a row that sees c atoms of equal weight, and a
    sink or none, has weights of at most ``1 / (1 + (c - 1) r)``, and its density against any measure is at most ``1 / r``.
    Add the first over the rows that see an atom:

    - no mask: n rows of n atoms;
    - causal: row i sees i atoms or more, :func:`otattn.lipschitz.upper.masked.masked_column_sum`;
    - windows on a sequence: at most ``before + after + 1`` rows see an atom. A row sees ``1 + min(i-1, before) + min(n-i, after)``,
      concave in i, at an end ``1 + min(before, after, n - 1)`` or more; under a causal mask it sees ``min(i, before + 1)``, and the
      sum over the rows ``j, ..., j + before`` is largest for the first atom;
    - a pattern on a sequence: row by row;
    - otherwise each row counts one.
    """
    S = x.logit_range(n)
    if n is None or n == 1:
        return S if n is None else 0.0
    mask, sequence = x.map.mask, x.map.length is None
    count = log(x.number(float(n)))
    if mask is None:
        return least(S, count - log_sum(0.0, log(x.number(n - 1.0)) - S))
    plain = mask.allowed is None and mask.before is None and mask.causal
    if not (sequence or plain):
        return count
    if mask.allowed is not None:
        return least(count, _pattern_sum(mask, n, np.exp(-S))) if n <= len(mask.allowed) else count
    before, after = _window(mask, n)
    if mask.causal:
        return least(count, log(masked_column_sum(S, before + 1)))
    rows, seen = min(n, before + after + 1), 1 + min(before, after)
    others = log_sum(0.0, log(x.number(seen - 1.0)) - S) if seen > 1 else 0.0
    return least(count, log(x.number(float(rows))) - others)


def _pattern_sum(mask: Mask, n: int, r: Any) -> Any:
    places = np.arange(1.0, n + 1.0)
    sees = ~mask.hidden(places, places)
    weights = 1.0 / (1.0 + np.maximum(sees.sum(axis=1) - 1.0, 0.0) * r)
    return log(up(float(upper((sees * weights[:, None]).sum(axis=0)).max())))


@theorem(
    "score_average_bound",
    statement="sigma + N_r (e^{2 cap} p / (p - r))^{1/r}, for any measure under a causal mask",
    hypotheses="composed logits with a causal mask, norms with eps > 0; any domain, all of R^d where queries, keys and values are "
    "normalised; any n; 1 < p < inf",
    applies=every(_scores, _averages),
    measures=True,
    everywhere=True,
)
def score_average_bound(
    attention: ScoreAttention, domain: Domain | None, n: int | None, p: float, exact: bool
) -> Bound:
    r"""``sigma + inf_r N_r (E p / (p - r))^{1/r}``, r in [1, p), ``E = e^S``: that of ``masked_average_bound``, free of n.

    ``N_r = v + t`` for ``r >= 2`` and ``v + 2^{2/r - 1} t`` below, as in ``score_column_bound``; S is the largest difference
    of two logits of a row. Every r gives a bound.

    Proof. As for ``masked_average_bound``: a row's density against the normalised restriction to the times ``tau <= s`` is at
    most E, less with a sink, and Hardy's inequality for averages bounds the average of ``|eps|^r`` over these times.

    Examples
    --------
    >>> head = ScoreAttention([[1.0]], [[1.0]], [[1.0]], cap=0.1, mask=Mask())
    >>> score_average_bound(head, radius=1.0).value < 10.0
    True

    References
    ----------
    otattn, score average bound.
    """
    x = ScoreNumbers(attention, domain, exact)
    if n == 1:
        return outward(log(_one_token(x)), "score_average_bound", domain, n, p, {})
    S = x.logit_range(n)
    orders = 1.0 + (p - 1.0) * np.linspace(0.0, 0.995, 200)
    plain = [log(top(_row_norm(x, r))) + (top(S) + math.log(p / (p - r))) / r for r in orders.tolist()]
    best = float(orders[int(np.argmin(plain))])
    r = x.number(best)
    value = log(_row_norm(x, best)) + (S + np.log(x.number(p) / (x.number(p) - r))) / r
    details = {"r": best, "sigma": x.sigma, "t": x.t}
    return outward(log_sum(log(x.sigma), value), "score_average_bound", domain, n, p, details)


@theorem(
    "rotary_row_bound",
    statement="the row bound with gradients that depend on the key",
    hypotheses="rotary, causal or not; any domain; n tokens; p = 2",
    applies=every(rotary, tokens(), order_two),
)
def rotary_row_bound(attention: RotaryAttention, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    r"""n tokens, p = 2, with or without mask, whatever the positions: the formula of ``row_bound`` with other constants.

    With ``v = ||V||``, ``t = G R``, ``phi = max(1, (1 + t)/sqrt2)`` and ``sigma = v R H``: ``Lip <= (sigma^2 + (alpha +
    sqrt(alpha^2 + beta^2)) / 2)^{1/2}``, ``alpha = n v^2 phi^2 + 2 sqrt2 v phi sigma``, ``beta = 2 v phi sigma sqrt(n-2)``;
    v for one token.

    The derivative of a logit ``s <R_i (Q x_i + b_Q), R_j (K y_j + b_K)>`` in the key's token is ``g_ij = s K^T R_{i-j} (Q x_i
    + b_Q)``, which depends on j. Turning is orthogonal: with R the radius of the tokens, ``|g_ij| <= G = s ||K|| (||Q|| R +
    |b_Q|)``, and in the query's token ``H = s ||Q|| (||K|| R + |b_K|)``.

    Proof. Row i of the derivative is ``sum_j P_ij V (eps_j + (y_j - m_i) <g_ij, eps_j>) + V C_i eps_i`` with ``C_i = sum_j
    P_ij (y_j - m_i) (h_ij - hbar_i)^T``, h the derivatives in the query's token: ``||C_i|| <= R H`` by Cauchy-Schwarz,
    since ``sum_j P_ij |y_j - m_i|^2 <= R^2`` and ``sum_j P_ij |h_ij - hbar_i|^2 <= H^2``. Along a fixed output direction
    ``V^T u`` the sum is linear in ``P_i`` where ``<m_i, V^T u>`` is fixed, so it is at most its value for two indices of
    weights p + q = 1. With ``delta = y_1 - y_2``, ``|delta| <= 2R``, the norm squared of that row is at most ``v^2 (p^2 (1 +
    2 q t)^2 + q^2 (1 + 2 p t)^2) = v^2 (1 + (4t - 2) z + 8 t^2 z^2)``, ``z = p q`` in ``[0, 1/4]``, convex in z: at most
    ``v^2 max(1, (1+t)^2/2)``, and only two entries of eps enter. The rest is the proof of ``row_bound``.

    Examples
    --------
    >>> head = RotaryAttention(np.eye(2), np.eye(2), np.eye(2))
    >>> rotary_row_bound(head, radius=1.0, n=1).value
    1.000...

    References
    ----------
    otattn, rotary row bound.
    """
    assert n is not None
    check_sizes(attention)
    wrap: Any = BallMatrix.exact if exact else np.asarray
    R = largest_norm(domain, exact=exact)
    q, k, v = (spectral_norm_upper(wrap(M)) for M in (attention.Q, attention.K, attention.V))
    query, key = (
        0.0 if bias is None else norm_upper(wrap(bias)) for bias in (attention.query_bias, attention.key_bias)
    )
    s = abs(float(attention.scale))
    # a product that overflows is inf, never 0 * inf
    G, H = product(k, product(q, R) + query, s), product(q, product(k, R) + key, s)
    t, sigma = product(G, R), up(product(v, R, H))
    phi = up(np.maximum(1.0, (1.0 + t) / np.sqrt(lift(2.0) if exact else 2.0)))
    value = v if n == 1 or is_zero(v) else two_largest(product(v, phi), sigma, n)
    return outward(log(value), "rotary_row_bound", domain, n, 2.0, {"row_constant": phi, "sigma": sigma, "t": t})
