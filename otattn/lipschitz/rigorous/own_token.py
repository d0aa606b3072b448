r"""The bound of :mod:`~otattn.lipschitz.near.own_token` in intervals: what moves a row's own token in the second derivative.

The formulas are those of that module; the floats that may be chosen there (``t`` of a row, the shares of the heads) are chosen
here too, from the centres of the intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn.lipschitz.arithmetic.eigenvalues import largest_eigenvalue
from otattn.lipschitz.arithmetic.intervals import Interval, lift, upper
from otattn.lipschitz.near.own_token import _BALANCE as BALANCE
from otattn.lipschitz.rigorous.heads import EnclosedHead, matmul, norms

__all__ = ["own_token_bound"]


def own_token_bound(heads: list[EnclosedHead]) -> float:
    """An upper bound of the terms for the sum of the heads."""
    shares = _form_shares(heads)
    crossed = [[_Crossed.of(a, b) for b in heads] for a in heads]
    rows = [_row(heads, i, crossed, shares) for i in range(heads[0].n)]
    plain, whole, form = (lift(np.array(column)) for column in zip(*rows, strict=True))
    pairs, pairs_A, pairs_form = _pairs(heads, shares)
    apart, together = _joined(plain, pairs) + _joined(form, pairs_form), _joined(whole, pairs_A)
    return float(min(upper(apart), upper(together)))


def _joined(tops: Any, pairs: Any) -> Any:
    """``lambda_max(diag tops + 2 pairs)^{1/2}``, or that of twice the diagonal."""
    tops = np.maximum(tops, 0.0)
    S = 2.0 * pairs
    rows = np.arange(len(tops))
    S[rows, rows] = tops
    return np.sqrt(lift(min(float(upper(2.0 * tops.max())), max(largest_eigenvalue(S), 0.0))))


def _form_shares(heads: list[EnclosedHead]) -> list[Any]:
    """``a_h^2 sum t / t_h``."""
    guess = [h.a * float(upper(h.size_W)) * float(np.sqrt(upper((h.P**2 * h.Y**2).sum(axis=1)).max())) for h in heads]
    t = [g + 1e-6 * max(guess) + 1e-300 for g in guess]
    total = lift(np.array(t)).sum()
    return [lift(h.a) ** 2 * (total / x) for h, x in zip(heads, t, strict=True)]


@dataclass(frozen=True, eq=False)
class _Crossed:
    """For two heads ``V_a V_b^T``, ``V_a A_b``, ``A_b^T g_a`` and ``<A_a, A_b>``."""

    VV: Any
    VA: Any
    gA: Any
    AA: Any

    @classmethod
    def of(cls, a: EnclosedHead, b: EnclosedHead) -> _Crossed:
        return cls(matmul(a.V, b.V.T), matmul(a.V, b.A), matmul(a.g, b.A), (a.A * b.A).sum())


@dataclass(frozen=True, eq=False)
class _Seen:
    """A head at row i: weights, values and keys of some tokens, and the field and the gradient of the row."""

    head: EnclosedHead
    P: Any
    y: Any
    k: Any
    g: Any
    F: Any

    @classmethod
    def of(cls, h: EnclosedHead, i: int) -> _Seen:
        return cls(h, h.P[i], h.y[i], h.k(i), h.g[i], h.field[i])

    def alone(self, i: int) -> _Seen:
        """Token i only."""
        one = slice(i, i + 1)
        return _Seen(self.head, self.P[one], self.y[one], self.k[one], self.g, self.F)


def _row(
    heads: list[EnclosedHead], i: int, crossed: list[list[_Crossed]], shares: list[Any]
) -> tuple[float, float, float]:
    """``q_i`` without A, with A, and that of the term with A apart."""
    everyone = [_Seen.of(h, i) for h in heads]
    alone = [s.alone(i) for s in everyone]

    def blocks(of: Any) -> Any:
        """``sum W_a of(a, b) W_b^T``."""
        total: Any = 0.0
        for a, ha in enumerate(heads):
            for b, hb in enumerate(heads):
                part = of(a, b)
                if part is None:
                    continue
                part = part if hb.W is None else matmul(part, hb.W.T)
                total = total + (part if ha.W is None else matmul(ha.W, part))
        return total

    def plain_of(seen: list[_Seen]) -> Any:
        return blocks(lambda a, b: _plain_block(seen[a], seen[b], crossed[a][b]))

    def form_of(seen: list[_Seen]) -> Any:
        half = blocks(lambda a, b: _form_block(seen[a], seen[b], crossed[a][b], i))
        return half + half.T + blocks(lambda a, b: crossed[a][b].AA * _second_moment(seen[a], seen[b]))

    def apart(a: int, b: int) -> Any:
        if a != b:
            return None
        moments = _second_moment(everyone[a], everyone[a]) + _second_moment(alone[a], alone[a])
        return 2.0 * (shares[a] * moments)

    all_L, own_L = plain_of(everyone), plain_of(alone)
    N = blocks(lambda a, b: _both_block(everyone[a], everyone[b]))
    t = 2.0 * np.sqrt(max(_trace(own_L), 0.0) / max(_trace(N), 1e-300))
    t = lift(float(np.clip(t, 1.0 / BALANCE, BALANCE)))
    twice = 4.0 * (1.0 + 1.0 / t) - 2.0
    plain = 2.0 * all_L + twice * own_L + (1.0 + t) * N
    whole = plain + 2.0 * form_of(everyone) + twice * form_of(alone)
    return largest_eigenvalue(plain), largest_eigenvalue(whole), largest_eigenvalue(blocks(apart))


def _trace(M: Interval) -> float:
    return float(0.5 * np.trace(M.lo) + 0.5 * np.trace(M.hi))


def _second_moment(a: _Seen, b: _Seen) -> Any:
    """``sum_j P Q y_j y'_j^T``."""
    return matmul((a.P[:, None] * a.y).T, b.P[:, None] * b.y)


def _form_block(a: _Seen, b: _Seen, cross: _Crossed, i: int) -> Any:
    """``sum_j P Q <u k_j^T + g (w_j k_j - m)^T, w'_j A'>``, zeta of a on the left and of b on the right."""
    weighted = (a.P * b.P)[:, None] * b.y
    keys = matmul(a.k, cross.VA.T) + a.y * matmul(a.k, cross.gA[i])[:, None]
    return matmul(keys.T, weighted) - matmul(a.F, cross.gA[i])[:, None] * weighted.sum(axis=0)


def _plain_block(a: _Seen, b: _Seen, cross: _Crossed) -> Any:
    """The form of L between two heads, the terms with A left out."""
    pq = a.P * b.P
    w = pq * (a.k * b.k).sum(axis=1)
    Va, Vb, gg = matmul(a.head.V, b.g), matmul(b.head.V, a.g), (a.g * b.g).sum()
    L = w.sum() * cross.VV
    # u against w' k' - F'^T zeta', and the other way round
    L = L + Va[:, None] * (matmul(w, b.y) - matmul(b.F, matmul(pq, a.k)))
    L = L + (matmul(w, a.y) - matmul(a.F, matmul(pq, b.k)))[:, None] * Vb
    crossed = matmul((pq[:, None] * a.y).T, matmul(a.k, b.F.T))
    other = matmul((pq[:, None] * b.y).T, matmul(b.k, a.F.T)).T
    moments = matmul((w[:, None] * a.y).T, b.y) - crossed - other + pq.sum() * matmul(a.F, b.F.T)
    return L + gg * moments


def _both_block(a: _Seen, b: _Seen) -> Any:
    """The form of N between two heads."""
    inner = matmul(a.k, b.k.T) ** 2
    return matmul(matmul((a.P[:, None] * a.y).T, inner), b.P[:, None] * b.y)


def _pairs(heads: list[EnclosedHead], shares: list[Any]) -> tuple[Any, Any, Any]:
    """``l_ij l_ji`` without A and with A, and ``|M_ij M_ji|`` summed over the heads."""
    plain: Any = 0.0
    whole: Any = 0.0
    form: Any = 0.0
    for h, share in zip(heads, shares, strict=True):
        field = norms(h.field.reshape(h.n, -1))
        beta = h.size_W * h.P * h.Y
        part = h.size_W * h.P * (h.v * h.K + h.G[:, None] * (h.Y * h.K + field[:, None]))
        plain = plain + part
        whole = whole + part + beta * norms(h.A.ravel())
        form = form + share * (beta * beta.T)
    return plain * plain.T, whole * whole.T, form
