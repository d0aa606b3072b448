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
``zeta -> H(zeta)`` (size n e, for several heads with the output matrices in zeta). Row by row ``|L_i|_F <= c_i |zeta_i|``,
where the last term counts as an operator, ``b_h = ||A_h|| sqrt(lambda_max(sum_j P_ij^2 y y^T))`` for each head, together
``sum_h |W_h^T zeta| b_h <= ||[W_1 / w_1, ..]|| (sum_h w_h^2 b_h^2)^{1/2}``, ``w_h = ||W_h||``, or all three in
Frobenius norm, which counts ``|A_h|_F`` but neither adds heads nor terms: the smaller one; and ``|N_i|_F <= k_i |zeta_i|``:
eigenvalues of e x e matrices. Then ``sum_i |zeta_i| (c_i (|delta_i| |E| + |eps_i| |D|) + k_i |delta_i| |eps_i|)`` is at most
``2 max c + max k``, and ``C = sqrt(lambda_max(G)) + 2 max_i c_i + max_i k_i``.

**Rounding.** The blocks of G have terms whose absolute values sum to at most ``2 s_il b_i b_l``,
``b_i = 4 |V|_F |g_i| + 3 max_j |y_ij| |g_i|^2``; the errors of the floats move ``H(zeta)`` by at most ``sum_i e_i |zeta_i|``
(``_moved``), so that ``sqrt(sum e_i^2)`` is added to the root; and those of L and N are added to ``c_i`` and ``k_i``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper, spectral_norm_upper
from otattn.lipschitz.near.gram_jacobian import fits, output_norms, with_outputs
from otattn.lipschitz.near.head import HeadAtTokens, rounding
from otattn.lipschitz.near.largest_eigenvalue import FAILURE, largest_eigenvalue, likely_largest, small_top

__all__ = ["Hessian", "hessian_norm"]

Array = NDArray[np.float64]


class Hessian(NamedTuple):
    """Upper bounds of the parts of ``||D^2 f||``: ``others``, ``own``, ``both`` have none, one and two arguments that move
    the row's own token. ``low`` is what the floats give for ``others``.
    """

    others: float
    own: float
    both: float
    low: float

    @property
    def norm(self) -> float:
        """``C``."""
        return (self.others + 2.0 * self.own + self.both) * (1.0 + 1e-15)


def hessian_norm(heads: list[HeadAtTokens]) -> Hessian:
    """The bounds of the parts for the sum of the heads."""
    n, eps = heads[0].n, rounding(heads)
    G = with_outputs(heads, _row)
    low, high = largest_eigenvalue(G, 1e-3) if fits(heads) else likely_largest(G, FAILURE)
    norms = output_norms(heads)
    lost, moved = np.zeros((n, n)), np.zeros(n)
    for a, u in zip(heads, norms, strict=True):
        moved += u * _moved(a)
        for b, w in zip(heads, norms, strict=True):
            lost += 2.0 * u * w * (a.P @ b.P.T) * _sizes(a)[:, None] * _sizes(b)
    others = np.sqrt(high**2 + eps * float(norm_upper(lost))) + float(norm_upper(moved))
    own, both = _own(heads, eps)
    return Hessian(float(others) * (1.0 + eps), own, both, low)


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


def _own(heads: list[HeadAtTokens], eps: float) -> tuple[float, float]:
    """``max_i c_i`` and ``max_i k_i``."""
    n = heads[0].n
    outer, crossed = _outer(heads), _crossed(heads)
    parts = np.array([_own_row(heads, i, outer, crossed) for i in range(n)])
    moved_c, moved_w, moved_k, sizes_c, sizes_w, sizes_k = (np.zeros(n) for _ in range(6))
    for h, w in zip(heads, output_norms(heads), strict=True):
        g, y, k = h.sizes
        Y, K = y.max(axis=1), k.max(axis=1)
        size_A = 0.0 if h.A is None else float(norm_upper(h.A))
        sizes = h.size_V * K + 2.0 * g * Y * K
        sizes_c += w * sizes
        sizes_w += w * (sizes + Y * size_A)
        sizes_k += w * Y * K**2
        moved = h.lost * (h.v * K + 2.0 * g * Y * K)
        moved += h.dV * K + h.v * h.dk + 2.0 * h.dg * Y * K + g * (h.dy * K + Y * h.dk + h.dfield)
        moved_c += w * (moved + h.a * (h.lost * Y + h.dy))
        moved_w += w * (moved + (size_A + h.dA) * (h.lost * Y + h.dy) + Y * h.dA)
        moved_k += w * (h.lost * Y * K**2 * np.sqrt(n) + h.dy * K**2 + 2.0 * Y * K * h.dk)
    c = np.sqrt(np.maximum(parts[:, 0], 0.0) + eps * sizes_c**2) + parts[:, 1] * (1.0 + eps) + moved_c
    whole = np.sqrt(np.maximum(parts[:, 3], 0.0) + eps * sizes_w**2) + moved_w
    both = np.sqrt(np.maximum(parts[:, 2], 0.0) + eps * sizes_k**2) + moved_k
    return float(np.minimum(c, whole).max()) * (1.0 + eps), float(both.max()) * (1.0 + eps)


def _outer(heads: list[HeadAtTokens]) -> tuple[list[float], float]:
    """``w_h = ||W_h||`` and ``||[W_1 / w_1, ..]||``, 1 where there are no output matrices and one head."""
    if len(heads) == 1 and heads[0].W is None:
        return [1.0], 1.0
    W = [np.eye(len(h.V)) if h.W is None else h.W for h in heads]
    sizes = [float(spectral_norm_upper(M)) for M in W]
    scaled = [M / max(size, 1e-300) for M, size in zip(W, sizes, strict=True)]
    return sizes, float(spectral_norm_upper(np.concatenate(scaled, axis=1)))


class _Crossed(NamedTuple):
    """For two heads ``V_a A_b``, ``A_b^T g_a`` and ``<A_a, A_b>``."""

    VA: Array
    gA: Array
    AA: float


def _crossed(heads: list[HeadAtTokens]) -> list[list[_Crossed]] | None:
    """For all pairs; None where a form is not known."""
    out = []
    for a in heads:
        line = []
        for b in heads:
            if a.A is None or b.A is None:
                return None
            line.append(_Crossed(a.V @ b.A, a.g @ b.A, float((a.A * b.A).sum())))
        out.append(line)
    return out


def _own_row(
    heads: list[HeadAtTokens], i: int, outer: tuple[list[float], float], crossed: list[list[_Crossed]] | None
) -> tuple[float, float, float, float]:
    """For row i: ``lambda_max`` of the form of L without A, the part of A, that of N, and that of L with A."""
    e = sum(len(h.V) for h in heads)
    L, N, A = np.empty((e, e)), np.empty((e, e)), np.zeros((e, e))
    at = np.cumsum([0, *(len(h.V) for h in heads)])
    for a, h in enumerate(heads):
        for b, o in enumerate(heads):
            rows, columns = slice(at[a], at[a + 1]), slice(at[b], at[b + 1])
            if crossed is not None:  # the terms with A of b, and their transposes
                block = _form_block(h, o, crossed[a][b], i)
                A[rows, columns] += block
                A[columns, rows] += block.T
                yy = (h.P[i] * o.P[i])[:, None] * o.y[i]
                A[rows, columns] += crossed[a][b].AA * (h.y[i].T @ yy)
            if b >= a:
                L[rows, columns], N[rows, columns] = _own_blocks(h, o, i)
                L[columns, rows], N[columns, rows] = L[rows, columns].T, N[rows, columns].T
    single = np.zeros(len(heads))
    for b, (h, w) in enumerate(zip(heads, outer[0], strict=True)):
        y = h.P[i][:, None] * h.y[i]
        single[b] = w * h.a * np.sqrt(max(small_top(y.T @ y), 0.0))
    a_part = min(float(single.sum()), outer[1] * float(np.linalg.norm(single)) * (1.0 + 1e-14))
    whole = L + A
    if heads[0].W is not None:
        W = np.concatenate([h.W for h in heads if h.W is not None], axis=1)
        L, N, whole = W @ L @ W.T, W @ N @ W.T, W @ whole @ W.T
    elif len(heads) > 1:  # the heads are summed
        W = np.concatenate([np.eye(len(h.V)) for h in heads], axis=1)
        L, N, whole = W @ L @ W.T, W @ N @ W.T, W @ whole @ W.T
    return small_top(L), float(a_part), small_top(N), float("inf") if crossed is None else small_top(whole)


def _form_block(a: HeadAtTokens, b: HeadAtTokens, cross: _Crossed, i: int) -> Array:
    """``sum_j P Q <u k_j^T + g (w_j k_j - m)^T, w'_j A'>``, zeta of a on the left and of b on the right."""
    pq = (a.P[i] * b.P[i])[:, None]
    weighted = pq * b.y[i]
    gk = a.k[i] @ cross.gA[i]
    out = (a.k[i] @ cross.VA.T + a.y[i] * gk[:, None]).T @ weighted
    out -= np.outer(a.field[i] @ cross.gA[i], weighted.sum(axis=0))
    return np.asarray(out)


def _own_blocks(a: HeadAtTokens, b: HeadAtTokens, i: int) -> tuple[Array, Array]:
    """The forms of L (without A) and of N between two heads."""
    pq = a.P[i] * b.P[i]
    ka, kb, ya, yb = a.k[i], b.k[i], a.y[i], b.y[i]
    kk = ka @ kb.T
    w = pq * np.diag(kk)
    Va, Vb, gg = a.V @ b.g[i], b.V @ a.g[i], float(a.g[i] @ b.g[i])
    L = w.sum() * (a.V @ b.V.T)
    # u against w' k' - F'^T zeta', and the other way round
    L += np.outer(Va, w @ yb - b.field[i] @ (pq @ ka))
    L += np.outer(w @ ya - a.field[i] @ (pq @ kb), Vb)
    cross = (pq[:, None] * ya).T @ (ka @ b.field[i].T)
    other = ((pq[:, None] * yb).T @ (kb @ a.field[i].T)).T
    L += gg * ((w[:, None] * ya).T @ yb - cross - other + pq.sum() * (a.field[i] @ b.field[i].T))
    N = (a.P[i][:, None] * ya).T @ (kk**2 @ (b.P[i][:, None] * yb))
    return L, N
