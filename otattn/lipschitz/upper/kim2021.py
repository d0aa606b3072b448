r"""The published bounds of [KPM21]: Kim, Papamakarios, Mnih, "The Lipschitz constant of self-attention"."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.special import lambertw

from otattn._linalg import Array, spectral_norm_upper
from otattn.attention import AttentionMap, L2Attention, MultiHeadAttention
from otattn.lipschitz.arithmetic.rounding import ROUNDING, down, up
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.hypotheses import centred_ball, every, no_bias, no_domain, order_two, softmax, tokens
from otattn.lipschitz.theorem import theorem
from otattn.measures import Ball, DiscreteMeasure

EXACT_RANK = 64
"""Ranks are decided in fractions up to this dimension; values of wider heads must not need it."""


def _l2_heads(attention: AttentionMap) -> tuple[AttentionMap, ...]:
    inner = attention.unmasked
    return inner.heads if isinstance(inner, MultiHeadAttention) else (inner,)


def _tied(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """Heads with tied keys and values that factor through them."""
    for i, head in enumerate(_l2_heads(attention)):
        if not isinstance(head, L2Attention):
            return (
                f"attention must be L2Attention (or heads of it), received {type(head).__name__} as head {i}; softmax "
                "attention is not Lipschitz on R^d (kim2021_dot_product)"
            )
        if not np.array_equal(head.Q, head.K):
            gap = float(np.abs(head.Q - head.K).max())
            return f"attention must have tied keys, K = Q, received entries that differ by {gap:g}"
        if not _factors(head.V, head.Q):
            return (
                "attention must have values that factor through the queries exactly, V = M Q, received a V with a part "
                "outside the row space of Q; on all of R^d the smallest such part makes the constant infinite"
            )
    return None


def _factors(V: Array, Q: Array) -> bool:
    """Whether the rows of V lie in the row space of Q, as exact numbers."""
    s = np.linalg.svd(Q, compute_uv=False)
    if len(s) == Q.shape[1] and s[-1] > 8.0 * max(Q.shape) * np.finfo(float).eps * s[0]:
        return True  # the rows of Q span everything
    live = np.any(Q != 0.0, axis=0)
    if np.any(V[:, ~live]):
        return False
    if Q.shape[1] > EXACT_RANK:
        return not V.any()
    return _rank(np.vstack([Q, V])) == _rank(Q)


def _rank(M: Array) -> int:
    """The rank of a matrix of floats, by elimination in fractions."""
    rows = [[Fraction(float(x)) for x in row] for row in M]
    rank = 0
    for j in range(M.shape[1]):
        pivot = next((i for i in range(rank, len(rows)) if rows[i][j]), None)
        if pivot is None:
            continue
        rows[rank], rows[pivot] = rows[pivot], rows[rank]
        for i in range(rank + 1, len(rows)):
            if factor := rows[i][j] / rows[rank][j]:
                rows[i] = [x - factor * y for x, y in zip(rows[i], rows[rank], strict=True)]
        rank += 1
    return rank


@theorem(
    "kim2021_l2",
    statement="sqrt(n) (4 tau_n + 1) (sum_h ||Q||^2 ||V Q^+||^2)^{1/2} ||W||",
    hypotheses="L2 with K = Q and values that factor through Q; all of R^d; n tokens; p = 2",
    applies=every(_tied, tokens(), order_two, no_domain),
    reference="[KPM21] Theorem 3.2, constant re-derived",
    rigorous=False,
    everywhere=True,
)
def kim2021_l2(attention: AttentionMap, domain: None, n: int, p: float, exact: bool) -> Bound:
    r"""Bound of tied L2 attention on all of ``R^d``: ``sqrt(n) (4 phi^{-1}(n-1) + 1) ||Q|| ||V Q^+||``.

    ``phi(x) = x e^{x+1}``, ``P_ij`` proportional to ``exp(-|Q x_i - Q x_j|^2)`` (keys tied to queries, ``K
    = Q``, no scale: put the paper's ``(D/H)^{-1/4}`` into Q) and values that factor through the queries,
    ``V = M Q``, ``M = V Q^+``. Several heads with outputs ``W_h``: ``||[W_1, ..., W_H]|| (sum_h
    c_h^2)^{1/2}``, ``c_h`` the bound of head h. In the paper's notation (``Q = W_Q^T / (D/H)^{1/4}``, ``V =
    W_V^T W_Q W_Q^T / sqrt(D/H)``) this is at most ``sqrt(n) / sqrt(D/H) (4 phi^{-1}(n-1) + 1) (sum_h
    ||W_Q^h||^4 ||W_V^h||^2)^{1/2} ||W_O||``. A form with ``||W_Q||^2`` under the root is quoted elsewhere;
    it cannot hold, since the map is homogeneous of degree 2 in ``W_Q`` (n = 1 is the linear map ``V``).

    Proof. Let ``y = Q x``: the map is ``M h(Q x)`` with ``h(y)_i = m_i = sum_j P_ij y_j``. With ``D_j = y_j
    - y_i``, ``d m_i = sum_j P_ij e_j + 2 C_i e_i - 2 sum_j P_ij (y_j - m_i) <D_j, e_j>``, C_i the
    covariance of row i. Write ``t_j = |D_j|^2``, so ``tau_i = sum_j P_ij t_j`` with ``P_ij`` proportional
    to ``e^{-t_j}`` and ``t_i = 0``: at a maximum over the n - 1 others ``1 - t_j = -tau`` for all, so they
    are equal and ``tau e^{tau+1} = n - 1``: ``tau_i <= phi^{-1}(n-1)``. For ``sum_j |e_j|^2 = 1`` the three
    terms are at most 1, ``2 tr C_i <= 2 tau`` (the variance around the mean is at most that around y_i) and
    ``2 sum_j P_ij |y_j - m_i| |D_j| <= 2 (tr C_i)^{1/2} tau^{1/2} <= 2 tau``. So each row has norm at most
    ``4 tau + 1`` and n rows ``sqrt(n)`` times that. A causal mask leaves fewer others in each row, and the
    proof as it is.
    """
    tau = up(float(lambertw((n - 1) / math.e).real))
    heads, inner = _l2_heads(attention), attention.unmasked
    total = sum(_tied_norm(head) ** 2 for head in heads)
    mix = 1.0
    if isinstance(inner, MultiHeadAttention):
        mix = math.sqrt(len(heads)) if inner.outputs is None else spectral_norm_upper(np.hstack(inner.outputs))
    value = up(math.sqrt(n) * (4.0 * tau + 1.0) * math.sqrt(total) * mix) * (1.0 + ROUNDING)
    return Bound(value, "upper", n=n, details={"phi_inverse": tau}, theorem="kim2021_l2")


def _tied_norm(head: Any) -> float:
    """``||Q|| ||V Q^+||`` of a tied head."""
    Q, V = head.Q, head.V
    _, s, Wt = np.linalg.svd(Q, full_matrices=False)
    keep = s > s.max(initial=0.0) * max(Q.shape) * 1e-15
    if not keep.any():
        return 0.0  # then V = 0 too
    W = Wt[keep].T
    M = (V @ W) / s[keep]
    # the relative error of the smallest kept singular value enters M
    slack = 1.0 + 16.0 * max(Q.shape) * np.finfo(float).eps * float(s[0] / s[keep].min())
    return spectral_norm_upper(Q) * spectral_norm_upper(M) * slack


def _ball_or_all(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    return None if domain is None else centred_ball(attention, domain, n, p)


@theorem(
    "kim2021_dot_product",
    statement="inf on R^d, about R^2 sup |V u| |A^T u| on the ball",
    hypotheses="softmax without a mask and without a bias; centred ball or all of R^d; n >= 2 tokens; p = 2",
    applies=every(softmax(masked=False), tokens(least=2), order_two, no_bias, _ball_or_all),
    reference="[KPM21] Theorem 3.1",
    kind="lower",
    rigorous=False,
    everywhere=True,
)
def kim2021_dot_product(attention: AttentionMap, domain: Ball | None, count: int, p: float, exact: bool) -> Bound:
    r"""Dot-product attention is not Lipschitz on ``R^d``: inf without a radius, at least ``c R^2`` with one.

    Put one token at 0 and the others at ``+-R u``, as evenly as n allows (n = 2: one at ``R u``; one left
    over stays at 0). The token at 0 weighs all alike, so its own block of the Jacobian is ``V/n + V C A``
    with ``C = (k/n) R^2 u u^T`` (k tokens away from 0; ``R^2 u u^T / 4`` for n = 2), which grows like ``R^2
    |V u| |A^T u|``.

    Returns
    -------
    Bound
        kind "lower", with the witness: a measure of two or three atoms whose weights are multiples of
        ``1/n``. For ``A = 0`` or ``V = 0`` the map is linear in the tokens and its constant ``||V||`` is
        returned.
    """
    form, key = softmax_head(attention).on_span(), "kim2021_dot_product"
    if not form.A.any() or not form.V.any():
        return Bound(down(float(np.linalg.norm(form.V, 2))), "lower", domain=domain, n=count, theorem=key)
    if domain is None:
        return Bound(math.inf, "lower", n=count, theorem=key)
    R = domain.radius
    candidates = np.concatenate(
        [np.linalg.svd(form.V)[2][:1], np.linalg.svd(form.A)[0].T[:1], np.linalg.svd(form.V @ form.A)[2][:1]]
    )
    balance = float(np.clip(float(np.linalg.norm(form.A, 2)) / float(np.linalg.norm(form.V, 2)), 1e-100, 1e100))
    mixed = np.linalg.eigh(balance * form.V.T @ form.V + form.A @ form.A.T / balance)[1][:, -1:]
    k = 2 * ((count - 1) // 2) if count > 2 else 1
    share = k / count if count > 2 else 0.25
    best, direction = 0.0, candidates[0]
    for u in np.concatenate([candidates, mixed.T]):
        block = form.V / count + share * R * R * np.outer(form.V @ u, form.A.T @ u)
        norm = float(np.linalg.norm(block, 2))
        if norm > best:
            best, direction = norm, u
    u = form.lift(direction)
    value = down(best)
    # equal tokens are one atom: n of them would take n rows
    places, counts = ([1.0, 0.0], [1, 1]) if count == 2 else ([1.0, -1.0, 0.0], [k // 2, k // 2, count - k])
    return Bound(
        value,
        "lower",
        domain=domain,
        n=count,
        witness=DiscreteMeasure(np.outer(R * np.array(places), u), [m / count for m in counts]),
        theorem=key,
    )
