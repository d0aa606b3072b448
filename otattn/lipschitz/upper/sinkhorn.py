r"""Our Lipschitz bound of Sinkhorn attention on a bounded domain, in closed form and without any exponential, with its proof.

Softmax attention over all measures of a ball has a constant that grows exponentially in ``a = ||A|| R^2``. Normalised in
rows and in columns it does not: the constant of W_2 is at most ``||V|| (a + sqrt(1 + a^2))``, for every number of tokens and
for any measure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from otattn.attention import SinkhornAttention
from otattn.attention.head import Head, check_sizes
from otattn.lipschitz.arithmetic.balls import arithmetic_of
from otattn.lipschitz.arithmetic.rounding import log, log_sum, product, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.regions import Region, Seen, see
from otattn.lipschitz.hypotheses import sinkhorn
from otattn.lipschitz.theorem import theorem
from otattn.lipschitz.upper.softmax import outward
from otattn.measures.domains import Domain


@theorem(
    "sinkhorn_bound",
    statement="(v^2 + G^2 r_V^2)^{1/2} + r_V r_K at p = 2; v (a + (1 + a^2)^{1/2}) on a ball",
    hypotheses="Sinkhorn; any domain, n and p",
    applies=sinkhorn,
    measures=True,
)
def sinkhorn_bound(attention: SinkhornAttention, domain: Domain, n: int | None, p: float, exact: bool) -> Bound:
    r"""``v (a + sqrt(1 + a^2))`` for W_2 on a ball of radius R, ``a = ||A|| R^2``, ``v = ||V||``: any n, any measure.

    On any domain, centred at b: ``sqrt(v^2 + G^2 r_V^2) + r_V r_K``, with ``G = max |A z|`` over ``z = x - b``, and ``r_V``,
    ``r_K`` the largest standard deviations of ``<u, V x>`` and ``<u, A^T x>``, ``|u| = 1``. For other p, with ``t = G r`` (r
    the half diameter) and ``theta = |1 - 2/p|``, add ``(r_K + G) r_V e^{2 t theta}`` for ``p > 2`` (on the ball ``2 v a e^{2 a
    theta}``); for ``p < 2`` the bound is ``sqrt(v^2 + v^2 R^2 G^2) + r_V r_K + (r_V r_K + v R G) e^{2 t theta}``.

    Proof. Let ``pi_ij = w_i w_j k_ij`` be the coupling, ``k_ij = exp(l_ij + f_i + h_j)``, ``l_ij = <A x_i, x_j>``, with both
    marginals w, and ``F_i = sum_j P_ij V x_j``, ``P_ij = w_j k_ij``. Along a displacement eps both marginal conditions say that
    ``dl + df + dh`` is orthogonal in ``L^2(pi)`` to all sums ``phi_i + psi_j``; as df + dh is such a sum, ``d pi = pi Q dl`` with
    Q the orthogonal projection off the sums. No system is inverted and no spectral gap enters. With ``b_ij = <V^T zeta_i, x_j -
    b>`` and ``q = Q b``, and since Q is self-adjoint, ``dl_ij = <A eps_i, x_j> + <A x_i, eps_j>`` and all row and column means of
    q vanish,

        ``<zeta, dF>_w = sum pi_ij <V^T zeta_i + q_ij g_i, eps_j> + sum pi_ij q_ij <eps_i, A^T (x_j - m_i)>``,

    ``g_i = A (x_i - b)``, ``m_i`` the mean of row i. The squared norm of ``V^T zeta_i + q_ij g_i`` in ``L^2(pi)`` has no cross
    term (row sums of q): it is at most ``v^2 |zeta|^2 + G^2 |q|^2``, and ``|q|`` is at most the distance of b from functions of
    i, ``|q|^2 <= sum_i w_i <zeta_i, V C_i V^T zeta_i> <= r_V^2 |zeta|^2``. The second sum is at most ``|q| (sum_i w_i <eps_i, A^T
    C_i A eps_i>)^{1/2} <= r_V r_K |zeta| |eps|``. That bounds the derivative on ``L^2(w)`` at every measure of finite support in
    the convex hull; integrate along the displacement interpolation of an optimal coupling. Couplings of general measures are
    limits of these, since the potentials are stable under weak convergence on compact sets.

    Other p. ``Q dl = (dl - E_i dl) - (psi_j - E_i psi)``, E_i the mean of row i, so that dF is the derivative ``S`` of softmax
    with these weights minus ``V Cov_i(x, psi)``. For ``p >= 2``, ``|S_i eps| <= sqrt(v^2 + G^2 r_V^2) (sum_j P_ij |eps_j|^2)^{1/2}
    + r_V r_K |eps_i|``, and P is doubly stochastic for w: on ``L^p`` the norm of S is at most ``sqrt(v^2 + G^2 r_V^2) + r_V
    r_K``. Next, ``dl - E_i dl = Q dl + (psi_j - E_i psi)`` is an orthogonal sum, so ``|psi - E psi|_pi <= |dl - E dl|_pi <= (r_K +
    G) |eps|_2``. From ``k(x, y) k(x', y') <= e^{4 t} k(x, y') k(x', y)``, integrated over y', ``P_i <= e^{4t} P_i'``, so
    ``Var_i(psi) <= e^{4t} Var_i'(psi)`` for all i', and on average ``Var_i(psi)^{1/2} <= e^{2t} |psi - E psi|_pi``. Hence ``|V
    Cov_i(x, psi)|`` has L^2 norm at most ``r_V (r_K + G) |eps|_2`` and supremum at most ``e^{2t}`` times that; in between
    ``|f|_p <= |f|_2^{2/p} |f|_inf^{1 - 2/p}``, and ``|eps|_2 <= |eps|_p``.

    For ``p <= 2`` bound the adjoint on ``L^{p'}``, ``p' >= 2``. It is ``zeta -> sum_i P'_ji (V^T zeta_i + q_ij g_i) + A^T sum_k
    P_jk q_jk x_k``, P' the backward weights. In the first sum write q with columns centred, ``q_ij = (b_ij - E'_j b) - (phi_i -
    E'_j phi)``: the sum over ``V^T zeta_i + b_ij (g_i - E'_j g)`` paired with a unit u is at most ``v (sum_i P'_ji |zeta_i|^2)^{1/2}
    (1 + |x_j - b|^2 Var'_j <g, u>)^{1/2}``, and ``|Cov'_j(phi, g)| <= G Var'_j(phi)^{1/2}`` with ``|phi - E' phi|_pi <= |b|_pi <= v R
    |zeta|_2``. In the second write q with rows centred: ``A^T C_j V^T zeta_j`` is at most ``r_V r_K |zeta_j|``, and ``|A^T Cov_j(x,
    psi)| <= r_K Var_j(psi)^{1/2}`` with ``|psi - E psi|_pi <= r_V |zeta|_2``. The step from L^2 to L^{p'} is that above.

    Sharp at p = 2: ``A = a [[0, 1], [1, 0]]`` and two atoms ``+-R e_1`` of mass 1/2 have the local constant ``2 a v``.

    Examples
    --------
    >>> sinkhorn_bound(SinkhornAttention(-3.0 * np.eye(2), np.eye(2)), radius=1.0).value   # 3 + sqrt(10)
    6.162277660...
    """
    check_sizes(attention)
    arithmetic = arithmetic_of(exact)
    # the potentials absorb what a shift of the tokens does to the logits: the form acts on centred tokens
    region = replace(Region.of(domain, exact=exact), center=None)
    head = Head.of(attention, attention.A, attention.V, arithmetic=arithmetic)
    seen = see(head, region)
    if n == 1:
        return outward(log(seen.v), "sinkhorn_bound", domain, n, p, {})
    keys = see(head.with_values(head.A.T), region).value_radius
    field = product(seen.value_radius, keys)
    details = {"G": seen.G, "value_radius": seen.value_radius, "key_radius": keys, "t": seen.t}
    value = log_sum(log(seen.row_deviation if p >= 2.0 else _adjoint_row(seen)), log(field))
    if p != 2.0:
        theta = 1.0 - 2.0 / p if p > 2.0 else 2.0 / p - 1.0
        moved = product(seen.value_radius, keys + seen.G) if p > 2.0 else field + product(seen.v, seen.R, seen.G)
        value = log_sum(value, log(moved) + 2.0 * up(seen.t * up(theta)))
    return outward(value, "sinkhorn_bound", domain, n, p, details)


def _adjoint_row(seen: Seen) -> Any:
    """``(v^2 + v^2 R^2 G^2)^{1/2}``."""
    return up(np.hypot(seen.v, product(seen.v, seen.R, seen.G)))
