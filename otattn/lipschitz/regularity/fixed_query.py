r"""Estimate 3, the slope in the measure: ``c_p = sup_x`` of the constant of ``mu -> Gamma_mu(x)`` from ``W_p``, with its proofs.

The query x stays where it is, the measure moves. F itself moves both; its constant averages over the queries, so it may be
far smaller than ``c_p`` (Sinkhorn attention: :func:`otattn.lipschitz.upper.sinkhorn.sinkhorn_bound` has no exponential, at a
fixed x the rate ``e^{2a}`` occurs) and, under a mask, exist where no ``c_p`` does.

Notation of :mod:`otattn.lipschitz.upper.softmax`: moving the atoms by eps moves the image of x by ``V K_x eps``, ``K_x eps = E_P[B_y
eps(y)]``, ``B_y = I + (y - m) g^T``, and ``c_p = sup ||V K_x||`` from ``L^p(mu)`` to ``R^e``: along the displacement interpolation
of an optimal coupling the image moves at most that fast. ``k = dP/dmu``. By Hoelder ``|V K_x eps| <= N_p (E_P |eps|^p)^{1/p} <= N_p
(sup k)^{1/p} |eps|_p``, ``N_p`` the norm from ``L^p(P)``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from otattn.attention import AttentionMap, L2Attention, PointwiseAttention, SinkhornAttention
from otattn.attention.head import Head
from otattn.lipschitz.arithmetic.intervals import like
from otattn.lipschitz.arithmetic.rounding import least, log, log_sum, product, top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import Region, Seen, see
from otattn.lipschitz.constants.rows import density_constant_p, fixed_query_constant, hoelder_constant, row_norm
from otattn.lipschitz.hypotheses import every, single_heads
from otattn.lipschitz.regularity.heads import bound_of_heads, known_heads
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.l2 import numbers, row_constant
from otattn.lipschitz.upper.unnormalised import scalars, suprema
from otattn.measures.domains import Domain


def _has_a_constant(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    if n is not None or math.isinf(p):
        return None
    for head, causal in single_heads(attention):
        if isinstance(head, PointwiseAttention):
            continue
        if causal:
            return (
                "under a mask the constant at time s is theta([0, s])^{-1/p} times that without one, theta the law of the times: "
                "no constant holds for every s; give n, or p = inf"
            )
        if p < 2.0 and isinstance(head, SinkhornAttention):
            return f"for Sinkhorn attention and any measure p must lie in [2, inf], received {p:g}"
    return None


@theorem(
    "fixed_query_bound",
    statement="v c_p(t): (1 + t^2)^{1/2} at p = inf, (1 + 2t) e^{2t} at p = 1, about .65 t e^t or phi(t) n^{1/2} at p = 2",
    hypotheses="softmax, L2, Sinkhorn (any measure: p >= 2) or unnormalised heads, masked for n tokens or p = inf; any domain",
    applies=every(known_heads, _has_a_constant),
    quantity="measure",
    measures=True,
)
def fixed_query_bound(attention: AttentionMap, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    r"""The largest constant of ``mu -> Gamma_mu(x)`` from ``W_p`` to ``R^e`` over x of the domain, n equal atoms or any measure.

    Softmax, ``t = sup |g| r`` (r the half diameter; a on the centred ball), times v:

    - ``p = inf``: ``sqrt(1 + t^2)``, for ``d = 1`` ``max(1, t + 1/(4t))``. Exact for V = I.
    - ``p = 1``: ``(1 + 2t) e^{2t}``; n atoms: ``n q (1 + 2t (1-q))``, ``q = min(1 / (1 + (n-1) e^{-2t}), 1/2 + 1/(4t))``. Exact.
    - ``p = 2``: :func:`~otattn.lipschitz.constants.rows.fixed_query_constant`, about ``.65 t e^t``; n atoms: ``sqrt(n) phi(t)``
      and :func:`~otattn.lipschitz.constants.rows.density_constant` too, so the law is ``R^2 sqrt(n/2)``.
    - other p: ``(sup k)^{1/p} N_p``, and for n atoms ``n^{1/p} 2^{(1/2 - 1/p)_+} phi(t)``.

    L2: the same with ``N_p = sqrt(1 + h/2 + t^2)`` for ``p >= 2`` and ``1 + 2t`` below, the spread of the logits for 2t, and
    the row constant of L2 attention for phi. Sinkhorn, ``p >= 2``: ``e^{4t/p} sqrt(v^2 + G^2 r_V^2) + e^{2t} r_V (r_K + G)``
    (on the ball ``v (e^{4a/p} sqrt(1 + a^2) + 2 a e^{2a})``); n atoms and p < 2: ``n^{1/p - 1/2}`` times that of 2.
    Unnormalised: ``v sup(|h| + a |h'|)`` for every p and n, masked or not. Several heads as in
    :func:`otattn.lipschitz.regularity.heads.bound_of_heads`.

    Under a mask, conditional ``W_p``: token i of n has ``(n/i)^{1/p}`` times the constant of i atoms, the largest being that
    of the second or ``n^{1/p} v`` of the first.

    Proof. ``sup k <= e^{2t}``, and ``k_j = n P_j <= n / (1 + (n-1) e^{-2t})`` for n atoms, as a row's logits differ by at most
    2t. ``N_p`` is in :func:`~otattn.lipschitz.constants.rows.hoelder_constant`; for ``d = 1`` and p = inf it is ``E_P |1 + (y - m)
    g|``, convex in y: two atoms at the ends with ``q = 1/2 + 1/(4t)``. For p = 1 the norm is ``sup k |V B_y|``; an atom of share
    q has ``|y - m| <= 2 r (1-q)``, and ``q (1 + 2t (1-q))`` increases up to that q. The two-index argument of
    :func:`~otattn.lipschitz.constants.rows.row_norm` gives ``|K eps| <= phi (|eps_j|^2 + |eps_k|^2)^{1/2}``, at most
    ``2^{(1/2 - 1/p)_+} n^{1/p} |eps|_p`` times phi. L2 attention: the same steps with the rows of
    :mod:`otattn.lipschitz.upper.l2`.

    Sinkhorn: in the notation of :mod:`otattn.lipschitz.upper.sinkhorn`, ``P_x`` has the logits ``<A x, y> + h(y)`` and moves
    with ``dh = -psi`` (up to what ``<A b, eps>`` adds to both): the derivative is ``V K_x eps - V Cov_{P_x}(y, psi)``. As there,
    ``Var_{P_x}(psi)^{1/2} <= e^{2t} |psi - E psi|_pi <= e^{2t} (r_K + G) |eps|_2``, also for x off the support, and ``k <=
    e^{4t}``, ``k <= n``. For n atoms ``|eps|_2 <= n^{1/p - 1/2} |eps|_p``.

    Unnormalised: the derivative is ``V int (h I + h' y g^T) eps dmu``, at most the largest norm of the kernel times
    ``|eps|_1``. A mask restricts the integral.

    Mask: the row of token i sees i atoms of weight ``1/n``; for them ``|eps|_p`` over all n is at least ``(i/n)^{1/p}`` times
    their own. Each bound above, divided by ``i^{1/p}``, decreases from i = 2 on.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> fixed_query_bound(SoftmaxAttention(np.eye(2), np.eye(2)), radius=2.0, p=float("inf")).value  # sqrt(17)
    4.123105...
    """

    def evaluate(head: Head, region: Region, seen: Seen | None) -> Any:
        return _of_head(head, region, seen, n, p, attention.in_dim == 1)

    return bound_of_heads("fixed_query_bound", evaluate, attention, domain, n, p, exact)


def _of_head(head: Head, region: Region, seen: Seen | None, n: int | None, p: float, line: bool) -> Any:
    if isinstance(head.map, PointwiseAttention):
        whole, a, _ = scalars(head, region)
        return log(whole.v) + suprema(head.map, a)[0]
    count = n if n is None or not head.causal else min(n, 2)
    if isinstance(head.map, L2Attention):
        x = numbers(head, region)
        v, value = log(x.v), _l2(x, count, p)
    elif isinstance(head.map, SinkhornAttention):
        whole = see(head, replace(region, center=None))
        v, value = log(whole.v), _sinkhorn(head, whole, count, p)
    else:
        whole = see(head, region) if seen is None else seen
        v, value = log(whole.v), _softmax(whole, count, p, line)
    if count == 1:
        value = v
    if not head.causal or n is None or math.isinf(p):
        return value
    if n == 1:
        return v
    first = np.log(like(n, v)) / p + v if top(v) > -1e300 else v
    return max(first, (np.log(like(n, value)) - np.log(like(2.0, value))) / p + value, key=top)


def _density(spread: Any, n: int | None) -> Any:
    """The logarithm of the largest density of a row's weights, whose logits differ by at most ``spread``."""
    if n is None or n == 1:
        return spread if n is None else 0.0 * spread
    return np.log(like(n, spread)) - log_sum(0.0 * spread, np.log(like(n - 1.0, spread)) - spread)


def _two_atoms(row: Any, n: int, p: float) -> Any:
    """The logarithm of ``n^{1/p} 2^{(1/2 - 1/p)_+}`` times the norm of two indices."""
    return (np.log(like(n, row)) + np.maximum(0.5 * like(p, row) - 1.0, 0.0) * np.log(like(2.0, row))) / p + log(row)


def _softmax(seen: Seen, n: int | None, p: float, line: bool) -> Any:
    t, turn, v = seen.t, seen.t_values, log(seen.v)
    if math.isinf(p):
        ends = np.maximum(1.0, t + 0.25 / np.maximum(t, 0.5))
        return least(log(seen.row_deviation), v + log(ends)) if line else log(seen.row_deviation)
    if p == 1.0:
        if n is None:
            return v + 2.0 * t + np.log1p(2.0 * turn)
        q = np.minimum(np.exp(_density(2.0 * t, n)) / n, 0.5 + 0.25 / np.maximum(turn, 1e-300))
        return v + np.log(like(n, q)) + log(q) + np.log1p(2.0 * turn * np.maximum(1.0 - q, 0.0))
    row = log(seen.row_deviation) if p >= 2.0 else v + log(hoelder_constant(turn, p))
    found = [_density(2.0 * t, n) / p + row]
    if p >= 2.0:
        found.append(v + density_constant_p(seen.t_ball, n, p)[1])
    if p == 2.0:
        found.append(v + fixed_query_constant(seen.t_ball))
    if n is not None:
        found.append(v + _two_atoms(row_norm(turn), n, p))
    return least(*found)


def _l2(x: Any, n: int | None, p: float) -> Any:
    v = log(x.v)
    row = log(np.hypot(np.sqrt(1.0 + 0.5 * x.h), x.t) if p >= 2.0 else 1.0 + 2.0 * x.t)
    if math.isinf(p):
        return v + row
    found = [v + row + _density(x.spread, n) / p]
    if n is not None:
        found.append(v + _two_atoms(row_constant(x), n, p))
    return least(*found)


def _sinkhorn(head: Head, seen: Seen, n: int | None, p: float) -> Any:
    if p < 2.0:
        assert n is not None
        return _sinkhorn(head, seen, n, 2.0) + (1.0 / like(p, seen.t) - 0.5) * np.log(like(n, seen.t))
    keys = see(head.with_values(head.A.T), seen.region).value_radius
    moved = log(product(seen.value_radius, keys + seen.G)) + 2.0 * seen.t
    if math.isinf(p):
        return log_sum(log(seen.row_deviation), moved)
    density = 4.0 * seen.t if n is None else least(4.0 * seen.t, np.log(like(n, seen.t)))
    return log_sum(density / p + log(seen.row_deviation), moved)
