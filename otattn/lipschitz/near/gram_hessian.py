r"""The second derivative of softmax heads at given tokens: ``|D^2 f[D, E]| <= C |D| |E|`` in Frobenius norms.

**The derivative.** Row i moves its logits by ``t_j = <k_ij, delta_i> + <g_i, delta_j>`` (centred keys) to first order, and
``m_j = <A delta_i, eps_j> + <A eps_i, delta_j>`` is the mixed second derivative. Differentiating a cumulant under P adds
an argument, so

``D^2 f_i [D, E] = kappa_3(v, t(D), t(E)) + Cov(V delta, t(E)) + Cov(V eps, t(D)) + Cov(v, m)``.

**Three parts.** With a unit output zeta, ``u_i = V^T zeta_i``, ``w_ij = <zeta_i, y_ij>``:

- without delta_i and eps_i: ``H(zeta) = sum_i Lap_i x (u_i g_i^T + g_i u_i^T) + Kap_i x g_i g_i^T`` (x the Kronecker product),
  ``Lap = diag P - P P^T``, ``Kap = diag(Pw) - (Pw) P^T - P (Pw)^T``, since
  ``kappa_3(w, b, b') = sum P w b b' - b'bar sum P w b - bbar sum P w b'`` for centred w;
- with one of them: ``sum_j <eps_j, L_ij delta_i>``,
  ``L_ij = P_ij [ u k_ij^T + g_i (w_ij k_ij - F_i^T zeta_i)^T + w_ij A ]``;
- with both: ``<delta_i, N_i eps_i>``, ``N_i = sum_j P_ij w_ij k_ij k_ij^T``.

**The bound.** The first part is at most ``|H(zeta)|_F |D| |E| <= sqrt(lambda_max(G))``, G the Gram matrix of
``zeta -> H(zeta)`` (size n e, for several heads with the output matrices in zeta). The others are bounded in
:mod:`~otattn.lipschitz.near.own_token`; C is the sum. (Forms are symmetric: D = E is enough, Banach.)

**Rounding.** The blocks of G have terms whose absolute values sum to at most ``2 s_il b_i b_l``,
``b_i = 4 |V|_F |g_i| + 3 max_j |y_ij| |g_i|^2``; the errors of the floats move ``H(zeta)`` by at most ``sum_i e_i |zeta_i|``
(``_moved``), so that ``sqrt(sum e_i^2)`` is added to the root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper
from otattn.lipschitz.arithmetic.largest_eigenvalue import FAILURE, largest_eigenvalue, likely_largest
from otattn.lipschitz.near.gram_jacobian import fits, output_norms, with_outputs
from otattn.lipschitz.near.head import HeadAtTokens, rounding, sink_terms
from otattn.lipschitz.near.own_token import own_token_norm

__all__ = ["Hessian", "gram_hessian", "hessian_norm"]

Array = NDArray[np.float64]


class Hessian(NamedTuple):
    """Upper bounds of the parts of ``||D^2 f||``: ``own`` has the arguments that move the row's own token, ``others`` the rest.
    ``low`` is what the floats give for ``others``.
    """

    others: float
    own: float
    low: float

    @property
    def norm(self) -> float:
        """``C``."""
        return (self.others + self.own) * (1.0 + 1e-15)


def hessian_norm(heads: list[HeadAtTokens]) -> Hessian:
    """The bounds of the parts for the sum of the heads."""
    own = own_token_norm([h.moving for h in heads], rounding(heads)) + sink_terms(heads)
    return gram_hessian(heads, own, row=_row, sizes=_sizes, moved=_moved, tol=1e-7)


def gram_hessian(
    heads: list[HeadAtTokens],
    own: float,
    *,
    row: Callable[[HeadAtTokens, HeadAtTokens, int], Array],
    sizes: Callable[[HeadAtTokens], Array],
    moved: Callable[[HeadAtTokens], Array],
    tol: float,
) -> Hessian:
    """The parts when a row of the Gram matrix of two heads, its sizes and what rounding adds to it are given."""
    n, eps = heads[0].n, rounding(heads)
    heads = [h.moving for h in heads]
    G = with_outputs(heads, row)
    low, high = largest_eigenvalue(G, tol) if fits(heads) else likely_largest(G, FAILURE)
    norms = output_norms(heads)
    lost, added = np.zeros((n, n)), np.zeros(n)
    for a, u in zip(heads, norms, strict=True):
        added += u * moved(a)
        for b, w in zip(heads, norms, strict=True):
            lost += 2.0 * u * w * (a.P @ b.P.T) * sizes(a)[:, None] * sizes(b)
    others = np.sqrt(high**2 + eps * float(norm_upper(lost))) + float(norm_upper(added))
    return Hessian(float(others) * (1.0 + eps), own, low)


def _sizes(h: HeadAtTokens) -> Array:
    G, Y, _ = h.sizes
    return np.asarray(4.0 * h.size_V * G + 3.0 * Y.max(axis=1) * G**2)


def _row(a: HeadAtTokens, b: HeadAtTokens, i: int) -> Array:
    """``<H_i, H_l>`` for l <= i, i for the head a and l for b: ``(i + 1, e, f)``."""
    p, q, g, y = a.P[i], b.P[: i + 1], b.g[: i + 1], b.y[: i + 1]
    pq = p * q
    s = pq.sum(axis=1)
    lap = s - pq @ p - np.einsum("lj,lj->l", pq, q) + s**2  # <Lap_i, Lap_l>
    both, gg = 2.0 * s[:, None], g @ a.g[i]
    Va, Vb = b.V @ a.g[i], g @ a.V.T  # V_b g_i and V_a g_l
    lap_kap = np.einsum("lj,ljf->lf", pq * (1.0 - p - 2.0 * q + both), y)
    kap_lap = (pq * (1.0 - 2.0 * p - q + both)) @ a.y[i]
    weight = pq * (1.0 - 2.0 * p - 2.0 * q + both)
    kap_kap = np.matmul(np.swapaxes(weight[:, :, None] * a.y[i], 1, 2), y)
    kap_kap += 2.0 * (pq @ a.y[i])[:, :, None] * np.einsum("lj,ljf->lf", pq, y)[:, None, :]
    G = gg[:, None, None]
    out = 2.0 * (lap * gg)[:, None, None] * (a.V @ b.V.T)
    out += 2.0 * lap[:, None, None] * Vb[:, :, None] * Va
    out += 2.0 * G * (Vb[:, :, None] * lap_kap[:, None, :] + kap_lap[:, :, None] * Va)
    out += G**2 * kap_kap
    return np.asarray(out)


def _moved(h: HeadAtTokens) -> Array:
    """What the errors of the floats may add to ``|H_i(zeta)|_F``, unit zeta."""
    G, Y, _ = h.sizes
    wide = Y.max(axis=1)
    # |Lap|_F <= 2, |Kap|_F <= 3 |w|; changes of Lap at most 4 |dP|, of Kap 5 |d(Pw)| + 2 |w| |dP|
    weighted = h.lost * wide + h.dy
    lap = 8.0 * h.lost * h.v * G + 4.0 * (h.dV * G + h.v * h.dg)
    kap = (5.0 * weighted + 2.0 * wide * h.lost) * G**2 + 6.0 * wide * G * h.dg
    return np.asarray(lap + kap)
