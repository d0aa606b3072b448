r"""The terms of the second derivative in which a row's own token moves, for softmax heads at given tokens.

With the letters of :mod:`~otattn.lipschitz.near.gram_hessian`, zeta of unit length and D twice the argument these are
``sum_i (2 sum_j <delta_j, L_ij delta_i> + <delta_i, N_i delta_i>)``: the form of a symmetric matrix with the blocks ``L_ij +
L_ji^T`` at (j, i) and ``N_i + L_ii + L_ii^T`` at (i, i). Its norm is at most its Frobenius norm, the square of which is

``sum_i (2 sum_{j != i} |L_ij|^2 + |N_i + L_ii + L_ii^T|^2) + 2 sum_{i != j} <L_ij, L_ji^T>``,

and this is at most ``sum_i q_i |zeta_i|^2 + 2 sum_{i != j} l_ij l_ji |zeta_i| |zeta_j|``: ``q_i`` is the
largest eigenvalue of the form ``2 sum_{j != i} |L_ij|^2 + (1 + t) |N_i|^2 + 4 (1 + 1/t) |L_ii|^2`` in ``zeta_i``,
any ``t > 0``, and ``|L_ij| <= l_ij |zeta_i|``. So
the bound is the root of ``lambda_max(diag q + 2 (l_ij l_ji)_{i != j})``. The last sum is at most the first, hence also
``2 max q``.

**The term with A**, ``P_ij w_ij A`` in ``L_ij``, is large in Frobenius norm where A has many singular values. Apart: with
``M_ij = P_ij w_ij`` of a head it is ``2 sum_ij M_ij <A delta_i, delta_j> <= ||A|| | |M| + |M|^T |_F``, and

``| |M| + |M|^T |_F^2 = sum_i (2 sum_{j != i} M_ij^2 + 4 M_ii^2) + 2 sum_{i != j} |M_ij M_ji|``

is bounded in the same way; heads together by ``(sum_h a_h mu_h)^2 <= sum_h t_h sum_h a_h^2 mu_h^2 / t_h``. The
smaller of the two bounds is taken.

**Rounding.** The forms are sums of products whose absolute values are bounded by ``sizes``; the errors of the floats move the
norms of L, N and M by at most ``moved``, and the root of a row by ``sqrt6 |L|``, ``|N|`` and ``2 |M|`` of these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper, spectral_norm_upper
from otattn.lipschitz.arithmetic.largest_eigenvalue import small_top
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.gram_jacobian import output_norms
from otattn.lipschitz.near.head import HeadAtTokens

__all__ = ["own_token_norm"]

Array = NDArray[np.float64]
_BALANCE = 1e3
"""Largest t and 1/t."""


def own_token_norm(heads: list[HeadAtTokens], eps: float) -> float:
    """An upper bound of the terms for the sum of the heads; ``eps`` is the relative rounding of sums of their products."""
    crossed, shares = _crossed(heads), _form_shares(heads)
    rows = [_row(heads, i, crossed, shares) for i in range(heads[0].n)]
    plain, whole, form, of_L, of_N = (np.array(column) for column in zip(*rows, strict=True))
    s = _sizes(heads, shares)
    pairs, pairs_A, pairs_form = _pairs(heads, shares)

    def roots(tops: Array, lost: Array, moved: Array) -> Array:
        return np.asarray(np.sqrt(np.maximum(tops, 0.0) + eps * lost) * (1.0 + eps) + moved)

    lost_N = of_N * s.N**2
    apart = _joined(roots(plain, of_L * s.L**2 + lost_N, 3.0 * s.moved_L + s.moved_N), pairs)
    apart += _joined(roots(form, 4.0 * s.form**2, 2.0 * s.moved_form), pairs_form)
    together = _joined(roots(whole, of_L * s.LA**2 + lost_N, 3.0 * s.moved_LA + s.moved_N), pairs_A)
    return min(apart, together) * (1.0 + eps)


def _joined(roots: Array, pairs: Array) -> float:
    """``lambda_max(diag roots^2 + 2 pairs)^{1/2}``, or that of twice the diagonal."""
    square = roots**2
    top = 2.0 * float(square.max())
    if not np.isfinite(top):
        return float("inf")
    return float(np.sqrt(min(top, float(spectral_norm_upper(np.diag(square) + 2.0 * pairs))))) * (1.0 + 8.0 * EPS)


def _form_shares(heads: list[HeadAtTokens]) -> list[float]:
    """``a_h^2 sum t / t_h`` of the heads, rounded up."""
    guess = [
        h.a * w * float(np.sqrt((h.P**2 * h.sizes[1] ** 2).sum(axis=1).max()))
        for h, w in zip(heads, output_norms(heads), strict=True)
    ]
    t = [g + 1e-6 * max(guess) + 1e-300 for g in guess]
    return [h.a**2 * (sum(t) / x) * (1.0 + 8.0 * len(t) * EPS) for h, x in zip(heads, t, strict=True)]


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


def _row(
    heads: list[HeadAtTokens], i: int, crossed: list[list[_Crossed]] | None, shares: list[float]
) -> tuple[float, float, float, float, float]:
    """``q_i`` without A, with A, and that of the term with A apart; how often L and N are counted in these."""
    e = sum(len(h.V) for h in heads)
    at = np.cumsum([0, *(len(h.V) for h in heads)])
    all_L, own_L, all_A, own_A, N, form = (np.zeros((e, e)) for _ in range(6))
    one = slice(i, i + 1)
    for a, h in enumerate(heads):
        for b, o in enumerate(heads):
            block = slice(at[a], at[a + 1]), slice(at[b], at[b + 1])
            back = block[1], block[0]
            if crossed is not None:  # the terms with A of b, and their transposes
                for M, seen in ((all_A, slice(None)), (own_A, one)):
                    part = _form_block(h, o, crossed[a][b], i, seen)
                    M[block] += part
                    M[back] += part.T
                    M[block] += crossed[a][b].AA * _second_moment(h, o, i, seen)
            if b >= a:
                all_L[block], own_L[block] = _plain_block(h, o, i, slice(None)), _plain_block(h, o, i, one)
                N[block] = _both_block(h, o, i)
                for M in (all_L, own_L, N):
                    M[back] = M[block].T
            if a == b:
                form[block] = 2.0 * shares[a] * (_second_moment(h, h, i, slice(None)) + _second_moment(h, h, i, one))
    W = None if heads[0].W is None else np.concatenate([h.W for h in heads if h.W is not None], axis=1)
    if W is None and len(heads) > 1:  # the heads are summed
        W = np.concatenate([np.eye(len(h.V)) for h in heads], axis=1)
    outer = [M if W is None else W @ M @ W.T for M in (all_L, own_L, N, all_A, own_A, form)]
    all_L, own_L, N, all_A, own_A, form = outer
    t = 2.0 * np.sqrt(max(float(np.trace(own_L)), 0.0) / max(float(np.trace(N)), 1e-300))
    t = float(np.clip(t, 1.0 / _BALANCE, _BALANCE))
    twice = 4.0 * (1.0 + 1.0 / t) - 2.0
    plain = 2.0 * all_L + twice * own_L + (1.0 + t) * N
    whole = float("inf") if crossed is None else small_top(plain + 2.0 * all_A + twice * own_A)
    own_weight = max(float(h.P[i, i]) for h in heads) ** 2
    return small_top(plain), whole, small_top(form), 2.0 + (twice + 4.0) * own_weight, 1.0 + t


def _second_moment(a: HeadAtTokens, b: HeadAtTokens, i: int, seen: slice) -> Array:
    """``sum_j P Q y_j y'_j^T``."""
    pq = (a.P[i, seen] * b.P[i, seen])[:, None]
    return np.asarray(a.y[i, seen].T @ (pq * b.y[i, seen]))


def _form_block(a: HeadAtTokens, b: HeadAtTokens, cross: _Crossed, i: int, seen: slice) -> Array:
    """``sum_j P Q <u k_j^T + g (w_j k_j - m)^T, w'_j A'>``, zeta of a on the left and of b on the right."""
    k, y = a.k[i, seen], a.y[i, seen]
    weighted = (a.P[i, seen] * b.P[i, seen])[:, None] * b.y[i, seen]
    out = (k @ cross.VA.T + y * (k @ cross.gA[i])[:, None]).T @ weighted
    out -= np.outer(a.field[i] @ cross.gA[i], weighted.sum(axis=0))
    return np.asarray(out)


def _plain_block(a: HeadAtTokens, b: HeadAtTokens, i: int, seen: slice) -> Array:
    """The form of L between two heads, the terms with A left out."""
    pq = a.P[i, seen] * b.P[i, seen]
    ka, kb, ya, yb = a.k[i, seen], b.k[i, seen], a.y[i, seen], b.y[i, seen]
    w = pq * np.einsum("jd,jd->j", ka, kb)
    Va, Vb, gg = a.V @ b.g[i], b.V @ a.g[i], float(a.g[i] @ b.g[i])
    L = w.sum() * (a.V @ b.V.T)
    # u against w' k' - F'^T zeta', and the other way round
    L += np.outer(Va, w @ yb - b.field[i] @ (pq @ ka))
    L += np.outer(w @ ya - a.field[i] @ (pq @ kb), Vb)
    cross = (pq[:, None] * ya).T @ (ka @ b.field[i].T)
    other = ((pq[:, None] * yb).T @ (kb @ a.field[i].T)).T
    L += gg * ((w[:, None] * ya).T @ yb - cross - other + pq.sum() * (a.field[i] @ b.field[i].T))
    return np.asarray(L)


def _both_block(a: HeadAtTokens, b: HeadAtTokens, i: int) -> Array:
    """The form of N between two heads."""
    left, right = (h.P[i][:, None] * h.y[i] for h in (a, b))
    return np.asarray(left.T @ ((a.k[i] @ b.k[i].T) ** 2 @ right))


class _Sizes(NamedTuple):
    """Row by row: sizes of the terms of L, of L with A, of N and of the term with A, and what the errors of the floats add."""

    L: Array
    LA: Array
    N: Array
    form: Array
    moved_L: Array
    moved_LA: Array
    moved_N: Array
    moved_form: Array


def _sizes(heads: list[HeadAtTokens], shares: list[float]) -> _Sizes:
    n = heads[0].n
    s = _Sizes(*(np.zeros(n) for _ in _Sizes._fields))
    for h, w, share in zip(heads, output_norms(heads), shares, strict=True):
        g, y, k = h.sizes
        Y, K = y.max(axis=1), k.max(axis=1)
        size_A = 0.0 if h.A is None else float(norm_upper(h.A))
        sizes = h.size_V * K + 2.0 * g * Y * K
        weighted = h.lost * Y + h.dy  # of P y
        moved = h.lost * (h.v * K + 2.0 * g * Y * K)
        moved += h.dV * K + h.v * h.dk + 2.0 * h.dg * Y * K + g * (h.dy * K + Y * h.dk + h.dfield)
        root = w * float(np.sqrt(share))
        for total, part in zip(
            s,
            (
                w * sizes,
                w * (sizes + Y * size_A),
                w * Y * K**2,
                root * Y,
                w * moved,
                w * (moved + (size_A + h.dA) * weighted + Y * h.dA),
                w * (h.lost * Y * K**2 * np.sqrt(n) + h.dy * K**2 + 2.0 * Y * K * h.dk),
                root * weighted,
            ),
            strict=True,
        ):
            total += part
    return s


def _pairs(heads: list[HeadAtTokens], shares: list[float]) -> tuple[Array, Array, Array]:
    """``l_ij l_ji`` without A and with A, and ``|M_ij M_ji|`` summed over the heads; zero diagonals."""
    n = heads[0].n
    plain, whole, form = (np.zeros((n, n)) for _ in range(3))
    for h, w, share in zip(heads, output_norms(heads), shares, strict=True):
        G, Y, K = h.sizes
        field = np.linalg.norm(h.field, axis=(1, 2)) * (1.0 + 4.0 * h.terms * EPS) + h.dfield
        beta = w * h.weights * Y
        part = w * h.weights * (h.v * K + G[:, None] * (Y * K + field[:, None]))
        plain += part
        whole += part + beta * (0.0 if h.A is None else float(norm_upper(h.A)) + h.dA)
        form += share * beta * beta.T
    out = [plain * plain.T, whole * whole.T, form]
    for M in out:
        M *= 1.0 + 64.0 * (len(heads) + 1) * EPS
        np.fill_diagonal(M, 0.0)
    return out[0], out[1], out[2]
