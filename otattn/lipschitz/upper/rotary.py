r"""Our Lipschitz bound of attention with rotary positions on a bounded domain, in closed form, with its proof.

The logits are ``s <R_i (Q x_i + b_Q), R_j (K y_j + b_K)>``. The derivative of a logit in the key's token is ``g_ij = s K^T
R_{i-j} (Q x_i + b_Q)``, which depends on j, so that no published bound and none of the softmax formulas covers it. Turning
is orthogonal: with R the radius of the tokens, ``|g_ij| <= G = s ||K|| (||Q|| R + |b_Q|)`` and the derivative in the query's
token has norm at most ``H = s ||Q|| (||K|| R + |b_K|)``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from otattn._linalg import norm_upper, spectral_norm_upper
from otattn.attention.head import check_sizes
from otattn.attention.rotary import RotaryAttention
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import is_zero, log, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import largest_norm
from otattn.lipschitz.constants.rows import two_largest
from otattn.lipschitz.hypotheses import every, order_two, rotary, tokens
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.softmax import outward
from otattn.measures.domains import Domain


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
    if n == 1 or is_zero(v):
        value = v
    else:
        value = two_largest(product(v, phi), sigma, n) if math.isfinite(top(phi) + top(sigma)) else math.inf
    return outward(log(value), "rotary_row_bound", domain, n, 2.0, {"row_constant": phi, "sigma": sigma, "t": t})
