r"""One softmax head at given tokens: the floats that the bounds near them are made of, and how far these may be off.

Row i of the head: weights ``P_ij``, values and keys from their means under the row, ``y_ij = v_j - sum_k P_ik v_k`` and
``k_ij = A^T (x_j - sum_k P_ik x_k)``, the gradient ``g_i = A x_i + c`` of its logits, and the field ``F_i = sum_j P_ij y_ij
k_ij^T``. A row sums over what it sees: a hidden token has weight 0.

A sink is one more column: a value and a key that do not move, its weight a part of the row's mass. Cumulants under P are sums
over all columns. Of the factors of a term those that stem from moved values and keys of others vanish at the sink, so that in a
sum with one of them it is left out: there only :attr:`HeadAtTokens.moving` enters, whose rows have a mass below one (means and
field are those of the whole row). The sink stays where each factor is a centred value or key under a move of the row's own
token: in the field, in :func:`sink_terms`, and in sums of the third order.

Every bound of this folder is proved in two steps. It is a norm of a matrix made of these numbers; the floats are
taken as exact numbers and rounding in the norm is counted; and the floats are off by at most the errors below, which by the
triangle inequality moves the norm by at most a sum of products of errors and sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.constants.moved_rows import MovedRows

__all__ = ["HeadAtTokens", "head_at_tokens", "rounding", "sink_terms"]

Array = NDArray[np.float64]


class Curve(NamedTuple):
    """What a soft cap does to the logits at the tokens (:mod:`~otattn.lipschitz.near.capped`).

    ``slope``, ``bend (n, m)`` are its first and second derivatives, ``dslope``, ``dbend`` their errors, and ``raw (m, d)`` the keys
    ``A^T x_j`` as they are, up to ``draw`` in norm.
    """

    cap: float
    slope: Array
    bend: Array
    dslope: Array
    dbend: Array
    raw: Array
    draw: float


@dataclass(frozen=True, eq=False)
class HeadAtTokens:
    """The head ``W V`` at n tokens.

    Attributes
    ----------
    P : (n, m)
        m = n, or n + 1 with a sink, the last.
    y, k : (n, m, e), (n, m, d)
        Centred values and keys of each row.
    g : (n, d)
    V : (e, d)
    W : (D, e) or None
        Output matrix, in exact floats; None is the identity.
    field : (n, e, d)
    dP, dy, dk, dg, dfield : (n, m) and (n,)
        Bounds of the errors of P (entries), and of y, k, g, field (norms), row by row.
    dV : float
    a, v : float
        Upper bounds of ``||A||`` and ``||V||``.
    A : (d, d) or None
        The form of the logits up to ``dA`` in Frobenius norm, where it is known.
    curve : Curve or None
        Of logits with a soft cap.
    """

    P: Array
    y: Array
    k: Array
    g: Array
    V: Array
    W: Array | None
    field: Array
    dP: Array
    dy: Array
    dk: Array
    dg: Array
    dfield: Array
    dV: float
    a: float
    v: float
    A: Array | None = None
    dA: float = 0.0
    curve: Curve | None = None

    @property
    def n(self) -> int:
        return len(self.P)

    @property
    def terms(self) -> int:
        """Products in the longest sums, a generous count."""
        return self.n + sum(self.V.shape) + 32

    @cached_property
    def moving(self) -> HeadAtTokens:
        """Without the column of a sink."""
        if self.P.shape[1] == self.n:
            return self
        real = np.s_[:, : self.n]
        curve = self.curve
        if curve is not None:
            parts = (curve.slope[real], curve.bend[real], curve.dslope[real], curve.dbend[real])
            curve = Curve(curve.cap, *parts, curve.raw[: self.n], curve.draw)
        return replace(self, P=self.P[real], y=self.y[real], k=self.k[real], dP=self.dP[real], curve=curve)

    @cached_property
    def levered(self) -> HeadAtTokens:
        """Without the column of a sink, and each value times the slope of its logit: what stands beside g in the Jacobian."""
        h = self.moving
        if h.curve is None:
            return h
        dy = h.dy + (h.curve.dslope * h.sizes[1]).max(axis=1)
        return replace(h, y=h.curve.slope[:, :, None] * h.y, dy=dy)

    @cached_property
    def sizes(self) -> tuple[Array, Array, Array]:
        """Upper bounds of ``|g_i|``, ``|y_ij|``, ``|k_ij|``, errors included."""
        up = 1.0 + 4.0 * self.terms * EPS
        G = np.linalg.norm(self.g, axis=1) * up + self.dg
        Y = np.linalg.norm(self.y, axis=2) * up + self.dy[:, None]
        K = np.linalg.norm(self.k, axis=2) * up + self.dk[:, None]
        return G, Y, K

    @cached_property
    def weights(self) -> Array:
        """Upper bounds of the weights."""
        return np.minimum(self.P + self.dP, 1.0)

    @cached_property
    def lost(self) -> Array:
        """``|dP_i|_2`` row by row."""
        return np.asarray(np.linalg.norm(self.dP, axis=1) * (1.0 + 4.0 * self.n * EPS))

    @cached_property
    def size_V(self) -> float:
        return float(norm_upper(self.V))


def head_at_tokens(
    head: MovedRows,
    W: Array | None = None,
    A: Array | None = None,
    dA: float = 0.0,
    keys: tuple[Array, Array] | None = None,
) -> HeadAtTokens:
    """The head of an :class:`MovedRows` whose tokens do not move (rho = 0); ``keys`` are ``k`` and ``dk`` where they are others."""
    P, V, n = head.P, head.V, len(head.P)
    terms = n + sum(V.shape) + 32
    dP = np.maximum(head.high - P, P - head.low) * (1.0 + 4.0 * EPS)
    moved = dP.sum(axis=1) * (1.0 + 2.0 * n * EPS)

    def error(feature: Array, lost: float) -> Array:
        # of the feature, of its mean by the weights, and of float sums
        size = float(np.linalg.norm(feature, axis=1).max(initial=0.0)) * (1.0 + 4.0 * terms * EPS)
        return np.asarray(2.0 * lost + moved * (size + lost) + 4.0 * terms * EPS * size)

    y, dy = head.centred(head.values), error(head.values, head.dv)
    k, dk = (head.centred(head.keys), error(head.keys, head.dk)) if keys is None else keys
    field = np.swapaxes(P[:, :, None] * y, 1, 2) @ k
    up = 1.0 + 4.0 * terms * EPS
    Y, K = np.linalg.norm(y, axis=2) * up, np.linalg.norm(k, axis=2) * up
    dfield = (dP * (Y + dy[:, None]) * (K + dk[:, None])).sum(axis=1)
    dfield += (P * (dy[:, None] * (K + dk[:, None]) + Y * dk[:, None] + 4.0 * terms * EPS * Y * K)).sum(axis=1)
    return HeadAtTokens(
        P, y, k, head.g, V, W, field, dP, dy, dk, head.dg, dfield * up, head.lost, head.a, head.v, A, dA
    )


def sink_terms(heads: list[HeadAtTokens]) -> float:
    """Bound of ``sum_h W_h p_s y_s <k_s, delta_i>^2`` over unit delta, s the column of a sink: its part of ``kappa_3(v, a, a)``."""
    total = np.zeros(heads[0].n)
    for h in heads:
        if h.P.shape[1] > h.n:
            _, Y, K = h.sizes
            total += (1.0 if h.W is None else float(norm_upper(h.W))) * h.weights[:, -1] * Y[:, -1] * K[:, -1] ** 2
    return float(total.max()) * (1.0 + 8.0 * (len(heads) + 1) * EPS)


def rounding(heads: list[HeadAtTokens]) -> float:
    """Relative error of a sum of products of at most eight floats, over the terms of the heads."""
    return 16.0 * (sum(h.terms for h in heads) + 64) * EPS
