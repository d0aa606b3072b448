r"""Rotary heads on sequences: the forms of all offsets in one Gram matrix, on balls and ellipsoids, with the proof.

**What is bounded.** Token i of a sequence stands at position ``i s``; s is 1, or ``length / n`` for a map with a length. Two
sequences of n tokens are compared position by position, ``(1/n sum_i |x_i - y_i|^2)^{1/2}``: the conditional ``W_2`` of n equal
atoms, one at each of the times ``1/n, ..., 1``. That is what n tokens are for every map that sees times. The theorem here uses it,
unlike ``rotary_row_bound``, which holds wherever the tokens stand: at other positions one token could meet all others at its
worst offset.

**Notation.** Tokens ``x = E z + b``, ``|z| <= 1`` (a ball: ``E = R I``); logits ``s <R_i (Q x_i + b_Q), R_j (K x_j + b_K)>``. With
``A_m = s K^T R_m Q`` the gradient of the logit in the key's token is ``g_ij = A_{i-j} E z_i + c_{i-j}``, ``c_m = s K^T R_m (Q b +
b_Q)``; in the query's ``h_ij = A_{i-j}^T E z_j + k_{i-j}``, ``k_m = s Q^T R_m^T (K b + b_K)``. Over the offsets m of two tokens

.. math:: a = \max_m \|A_m E\| + |c_m|, \quad H = \max_m \|E^T A_m\| + |k_m|, \quad v = \|V\|, \quad w = \|V E\|, \quad
          \sigma = w H,

and lambda is at least the largest eigenvalue of ``sum_m (1 + theta) A_m E E^T A_m^T + (1 + 1/theta) c_m c_m^T`` over the offsets
at which one token is met by the rows that see it, theta > 0 any number (0 without the c_m). Under a causal mask those are ``N = n -
1`` offsets: ``1..n-1`` for the first token (its own row sees nothing else), and among ``0..n-2`` for the others. Without a mask they
are ``N = n``, ``1-j..n-j``. With ``m = min(n, max(2, 2 N a^2 / lambda))``,

.. math:: T = v \sqrt{n/2} + \sqrt{w^2 \lambda / 2 + v^2 n / 8}, \qquad \rho = \bigl(v + \max(w a, v/2)\bigr) / \sqrt2,

.. math:: Lip^2 \le \sigma^2 + \tfrac12 \bigl( \alpha + \sqrt{\alpha^2 + \beta^2} \bigr), \qquad
          \alpha = T^2 + 2 \sigma \rho \sqrt m, \quad \beta = 2 \sigma T .

**Proof.** *Row.* Let ``e_j = |eps_j|`` and u be a unit vector. Row i of the derivative, ``sum_j P_ij (<V^T u, eps_j> + <V^T u, x_j -
m_i> (<g_ij, eps_j> + <h_ij, eps_i>))``, is linear in ``P_i`` where ``<V^T u, m_i>`` is fixed, so it is at most its value for two
indices j, l of weights p + q = 1 (or for one, where the second term vanishes):

    ``p <V^T u, eps_j> + q <V^T u, eps_l> + p q <V^T u, x_j - x_l> (<g_ij, eps_j> - <g_il, eps_l> + <h_ij - h_il, eps_i>)``.

``|V (x_j - x_l)| <= 2 w``, ``|h_ij - h_il| <= 2 H`` and ``4 p q <= 1``: the last part is at most ``sigma e_i``. Put ``h_i(j)`` for
the largest ``|<A_{i-j} E z + c_{i-j}, eps_j>|`` over z, ``X = (w/2)(h_i(j) + h_i(l))``, ``s_i^2 = e_j^2 + e_l^2``, ``r = p q``. The
rest is at most ``v s_i sqrt(1 - 2r) + 4 r X``; by the tangent ``sqrt(1 - 2r) <= (3/2 - 2r) / sqrt2`` that is at most a linear function
of r in [0, 1/4] with the ends ``3 v s_i / sqrt8`` and ``v s_i / sqrt2 + X``. So the row is at most ``a_i + sigma e_i``,

    ``a_i = v s_i / sqrt2 + max(X, v s_i / sqrt8) <= v s_i / sqrt2 + sqrt(X^2 + v^2 s_i^2 / 8)``.

*Columns.* Let ``N_j`` be the rows of two indices that use j: at most 2 N in all (the first row of a mask has one index). For each
j, ``sum_{i in N_j} h_i(j)^2 <= min(lambda, |N_j| a^2) e_j^2``, since ``h_i(j) <= |E^T A^T eps_j| + |<c, eps_j>|`` and ``(x + y)^2 <=
(1 + theta) x^2 + (1 + 1/theta) y^2``. Put S for the sum of the m largest ``e_j^2`` (m may be no integer: the next one counts in
part). A sum of ``lambda t_j e_j^2`` with ``t_j <= 1`` and ``sum t_j <= m`` is at most ``lambda S``, and ``s_i^2 <= S`` since ``m >=
2``. So ``sum X^2 <= w^2 lambda S / 2`` and ``sum s_i^2 <= n S``, and by Minkowski ``sum a_i^2 <= T^2 S``.

*Together.* ``a_i <= rho s_i``, from ``X <= w a s_i / sqrt2``. Let theta_i in [0, 1] pick the m largest. By Cauchy-Schwarz ``sum
theta_i a_i e_i <= rho sqrt(S) sqrt(m) sqrt(S)`` and ``sum (1 - theta_i) a_i e_i <= T sqrt(S) sqrt(1 - S)``. So ``|Df eps|^2 <=
sigma^2 + alpha S + beta sqrt(S (1 - S))``, largest over S in [0, 1] at the value above. Along the straight path between two sequences
tokens stay in the convex domain and keep their positions, so what bounds the derivative is a Lipschitz constant. QED
"""

from __future__ import annotations

import math

import numpy as np

from otattn.attention.head import check_sizes
from otattn.attention.rotary import RotaryAttention
from otattn.lipschitz.arithmetic.rounding import is_zero, least, log, product, top, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.offsets import OffsetForms
from otattn.lipschitz.hypotheses import every, order_two, rotary, tokens
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.softmax import outward
from otattn.measures.domains import Domain


@theorem(
    "rotary_gram_bound",
    statement="T = v (n/2)^{1/2} + (w^2 lambda/2 + v^2 n/8)^{1/2} and sigma, lambda of the sum of all offsets' forms on the domain",
    hypotheses="rotary, causal or not, on sequences: token i of n at position i s; any domain; n tokens; p = 2",
    applies=every(rotary, tokens(), order_two),
)
def rotary_gram_bound(attention: RotaryAttention, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    r"""Sequences of n tokens, p = 2: the shape of the domain and the forms of all offsets together.

    ``Lip^2 <= sigma^2 + (alpha + sqrt(alpha^2 + beta^2)) / 2``, ``alpha = T^2 + 2 sigma rho sqrt(m)``, ``beta = 2 sigma T``, with the
    numbers of the proof, which is in :mod:`otattn.lipschitz.upper.rotary`. Token i stands at position i (at ``i length / n`` for a
    map with a length); distances are conditional, ``(1/n sum_i |x_i - y_i|^2)^{1/2}``. v for one token.

    Examples
    --------
    >>> import numpy as np
    >>> from otattn.lipschitz.bounds import rotary_row_bound
    >>> from otattn.measures import Ellipsoid
    >>> head = RotaryAttention(np.eye(4), np.eye(4), np.eye(4), base=100.0)
    >>> flat = Ellipsoid(np.diag([9.0, 1.0, 1.0, 1.0]))
    >>> rotary_row_bound(head, domain=flat, n=64).value / rotary_gram_bound(head, domain=flat, n=64).value > 1.2
    True

    References
    ----------
    otattn, rotary Gram bound.
    """
    assert n is not None
    check_sizes(attention)
    x = OffsetForms(attention, domain, n, exact)
    if n == 1 or is_zero(x.v):
        return outward(log(x.v), "rotary_gram_bound", domain, n, p, {})
    a, root, sigma = x.a, x.root, up(product(x.w, x.H))
    details = {"a": a, "lambda_root": root, "sigma": sigma, "w": x.w}
    parts = up(product(x.w, root)), up(product(x.w, a)), sigma, x.v
    unit = max(top(part) for part in parts)
    if not math.isfinite(unit):
        return outward(math.inf, "rotary_gram_bound", domain, n, p, details)
    R, A, s, v = (part / unit for part in parts)
    two, count = x.number(2.0), x.number(float(n))
    T = v * np.sqrt(count / 2.0) + np.sqrt(R * R / 2.0 + v * v * count / 8.0)
    rho = (v + np.maximum(A, v / 2.0)) / np.sqrt(two)
    m = count if top(root) == 0.0 else least(count, np.maximum(two, 2.0 * x.rows * (a / root) ** 2))
    alpha, beta = T * T + 2.0 * s * rho * np.sqrt(up(m)), 2.0 * s * T
    value = up(np.sqrt(s * s + (alpha + np.hypot(alpha, beta)) / 2.0))
    return outward(log(value) + log(unit), "rotary_gram_bound", domain, n, p, details | {"T": T * unit})
