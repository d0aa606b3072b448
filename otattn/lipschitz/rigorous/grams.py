r"""The Gram matrices of :mod:`~otattn.lipschitz.near.gram_jacobian` and :mod:`~otattn.lipschitz.near.gram_hessian`, in intervals.

The formulas are those of these modules, block by block, in the head space of the values (size n e). All sums over tokens are
products of the matrices ``P``, ``P o P``, ``M = (P_ij y_ij)`` and ``M o P``, so that a row of blocks needs only matrix products
and outer ones. For two heads a and b, ``Z_ab[i, :, l] = sum_j P^b_lj P^a_ij y^a_ij``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from otattn.lipschitz.arithmetic.eigenvalues import Symmetric
from otattn.lipschitz.rigorous.heads import EnclosedHead, matmul

__all__ = ["hessian_gram", "jacobian", "jacobian_gram"]

Row = Callable[["_Pair", int], Any]


def jacobian_gram(heads: list[EnclosedHead]) -> Symmetric:
    """``J J^T`` of the sum of the heads."""
    return _filled(heads, _jacobian_row)


def hessian_gram(heads: list[EnclosedHead]) -> Symmetric:
    """The Gram matrix of the part of the second derivative in which the row's own token stays."""
    return _filled(heads, _hessian_row)


def jacobian(heads: list[EnclosedHead]) -> Any:
    """The Jacobian of the sum of the heads, ``(n D, n, d)``."""
    total: Any = None
    for h in heads:
        J = h.weighted[:, :, :, None] * h.g[:, None, None, :] + h.P[:, None, :, None] * h.V[None, :, None, :]
        rows = np.arange(h.n)
        J[rows, :, rows] = J[rows, :, rows] + h.field
        flat = J.reshape(h.n, h.e, -1)
        flat = flat if h.W is None else matmul(h.W, flat)
        total = flat if total is None else total + flat
    return total.reshape(-1, heads[0].n, heads[0].V.shape[1])


class _Pair:
    """What two heads have in common, for all rows."""

    def __init__(self, a: EnclosedHead, b: EnclosedHead) -> None:
        self.a, self.b = a, b
        self.s = matmul(a.P, b.P.T)
        self.gg = matmul(a.g, b.g.T)
        self.VV = matmul(a.V, b.V.T)
        self.Va = matmul(b.g, a.V.T)  # V_a g_l
        self.Vb = matmul(a.g, b.V.T)  # V_b g_i
        self.za = matmul(a.weighted, b.P.T)  # [i, :, l]
        self.zb = matmul(b.weighted, a.P.T)  # [l, :, i]

    @cached_property
    def field_V(self) -> tuple[Any, Any]:
        """``F_i V_b^T`` and ``V_a F_l^T``."""
        return matmul(self.a.field, self.b.V.T), matmul(self.a.V, np.swapaxes(self.b.field, 1, 2))

    @cached_property
    def field_g(self) -> tuple[Any, Any]:
        """``F_i g_l`` as ``[i, :, l]``, ``F_l g_i`` as ``[l, :, i]``."""
        return matmul(self.a.field, self.b.g.T), matmul(self.b.field, self.a.g.T)

    @cached_property
    def lap(self) -> Any:
        """``<Lap_i, Lap_l>``."""
        P, Q = self.a.P, self.b.P
        return self.s - matmul(P**2, Q.T) - matmul(P, (Q**2).T) + self.s**2

    @cached_property
    def squares(self) -> tuple[Any, Any]:
        """``M o P`` of both heads, ``[i, :, j]``."""
        return self.a.weighted * self.a.P[:, None], self.b.weighted * self.b.P[:, None]

    @cached_property
    def kap(self) -> tuple[Any, Any]:
        """``<Kap_i, Lap_l>`` as ``[i, :, l]`` and ``<Lap_i, Kap_l>`` as ``[l, :, i]``."""
        P, Q = self.a.P, self.b.P
        both = 1.0 + 2.0 * self.s
        left = both[:, None] * self.za - 2.0 * matmul(self.squares[0], Q.T) - matmul(self.a.weighted, (Q**2).T)
        right = both.T[:, None] * self.zb - 2.0 * matmul(self.squares[1], P.T) - matmul(self.b.weighted, (P**2).T)
        return left, right


def _products(x: Any, y: Any) -> Any:
    """``sum_j x_ej y_lfj``, ``(e, l, f)``."""
    flat = y.reshape(-1, y.shape[2])
    return matmul(x, flat.T).reshape(x.shape[0], y.shape[0], y.shape[1])


def _jacobian_row(pair: _Pair, i: int) -> Any:
    """``(J_a J_b^T)_il`` for l <= i, ``(e, l, f)``."""
    a, b, past = pair.a, pair.b, slice(0, i + 1)
    out = pair.s[i, past][:, None] * pair.VV[:, None]
    out = out + pair.Va[past].T[:, :, None] * pair.zb[past, :, i] + pair.za[i, :, past][:, :, None] * pair.Vb[i]
    out = out + pair.gg[i, past][:, None] * _products(a.weighted[i], b.weighted[past])
    (mine, other), (mine_g, other_g) = pair.field_V, pair.field_g
    out = out + b.P[past, i][:, None] * mine[i][:, None] + mine_g[i, :, past][:, :, None] * b.weighted[past, :, i]
    out = out + a.P[i, past][:, None] * np.swapaxes(other[past], 0, 1)
    out = out + a.weighted[i, :, past][:, :, None] * other_g[past, :, i]
    out[:, i] = out[:, i] + matmul(a.field[i], b.field[i].T)
    return out


def _hessian_row(pair: _Pair, i: int) -> Any:
    """``<H_i, H_l>`` for l <= i, ``(e, l, f)``."""
    past = slice(0, i + 1)
    x, y, (xx, yy) = pair.a.weighted[i], pair.b.weighted[past], pair.squares
    both, gg = 1.0 + 2.0 * pair.s[i, past], pair.gg[i, past]
    both_x = _products(np.concatenate([x, xx[i]]), y)
    kap = both[:, None] * both_x[: len(x)] - 2.0 * (both_x[len(x) :] + _products(x, yy[past]))
    kap = kap + 2.0 * pair.za[i, :, past][:, :, None] * pair.zb[past, :, i]
    Va, Vb = pair.Va[past].T[:, :, None], pair.Vb[i]
    left, right = pair.kap
    mixed = Va * right[past, :, i] + left[i, :, past][:, :, None] * Vb
    out = 2.0 * (pair.lap[i, past] * gg)[:, None] * pair.VV[:, None] + 2.0 * Va * (pair.lap[i, past][:, None] * Vb)
    return out + 2.0 * gg[:, None] * mixed + (gg**2)[:, None] * kap


def _filled(heads: list[EnclosedHead], row: Row) -> Symmetric:
    """``sum_ab W_a B_ab W_b^T``, its lower triangle."""
    n, size = heads[0].n, heads[0].e if heads[0].W is None else int(heads[0].W.shape[0])
    G = Symmetric(n * size)
    pairs = [[_Pair(a, b) for b in heads] for a in heads]
    for i in range(n):
        total: Any = None
        for line in pairs:
            for pair in line:
                block = row(pair, i)
                e, f = block.shape[0], block.shape[2]
                if pair.b.W is not None:
                    block = matmul(block.reshape(-1, f), pair.b.W.T)
                block = block.reshape(e, -1)
                block = block if pair.a.W is None else matmul(pair.a.W, block)
                total = block if total is None else total + block
        G.put(slice(i * size, (i + 1) * size), slice(0, (i + 1) * size), total)
    return G
