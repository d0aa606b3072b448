r"""The third derivative of a softmax head over the ball ``|D|_F <= r`` around given tokens: ``|D^3 f [D, D, D]| <= D3(r) |D|^3``.

**The derivative.** With the logits' derivatives ``t`` and ``2 m``, ``m_j = <A delta_i, delta_j>``, row i has

``D^3 f_i = kappa_4(v, t, t, t) + 3 kappa_3(V delta, t, t) + 6 kappa_3(v, t, m) + 6 Cov(V delta, m)``,

joint cumulants under the weights p of row i. Write ``t = a + b``: ``a`` is what delta_i does, ``|a_j| <= K_j |delta_i|`` with
``K_j = |k_ij| + |g_i| |[i = j] - p_i|``, and ``b_j = <g_i, delta_j>`` for the other tokens. Contracted with a unit vector every
cumulant is a polynomial in ``tau_j = |delta_j|`` once norms are taken. Its coefficients are worked out exactly where one token
occurs alone, for there they cancel: ``kappa_4(w, b, b, b)`` has ``p w (1 - 6 p + 6 p^2) b^3`` in each token, not ``p w b^3``.

**Without delta_i** (``_others``). Cubes ``tau_k^3`` and squares ``tau_k^2 sum_{j != k} ..`` give ``sum_k B_ik tau_k^2``, by
``max_s (x s + y sqrt(1 - s^2)) = sqrt(x^2 + y^2)``; with ``sum tau^2 = 1`` the rows together are at most the largest column
norm of B. Three different tokens: with the token of the largest weight of the row taken out, ``sum_k M_ik tau_k``,
at most ``||M||``.

**With delta_i** (``_own``). ``tau_i (c12 (1 - tau_i^2) + c21 tau_i sqrt(1 - tau_i^2) + c30 tau_i^2)``: c12 is the norm of a
matrix of non-negative entries, bounded by ``max (Q z)_j / z_j`` for a positive z (Collatz, Wielandt), c21 that of a vector. The
rows together are at most ``max_i lambda_max [[c12, c21/2], [c21/2, c30]]``.

**At other tokens of the ball.** Centred logit changes are at most
``E_ij = r sqrt((|k_ij| + G |[i=j] - P_ii|)^2 + G^2 sum_{k != i} ([k=j] - P_ik)^2)``, ``G = |g_i| + a r``. By Jensen
``P' <= P e^E``, and ``P' >= P e^{-E} / sum_j P_ij e^{E_ij}``. Standard deviations: ``sd' <= e^{max E / 2} sd + v r``. Centred values
move by ``V (delta_j - mean) - Cov(v, t)``, at most ``r (sqrt 2 v + sd_v (sd_k + G sqrt(max p)))``, keys likewise. Every bound is
monotone in these.

A sink (the last column) does not move: it is left out where the coefficient is that of a token's move.

Rounding: sums of non-negative terms, whose relative error is counted; a difference keeps that of its first term. The same
formulas run on intervals, where it is counted operation by operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import spectral_norm_upper
from otattn.lipschitz.arithmetic.intervals import is_interval, lift, lower, upper
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.capped import CapTerms
from otattn.lipschitz.near.head import HeadAtTokens

__all__ = ["ThirdOrder", "third_order"]

Array = NDArray[np.float64]
_WIDE = 50.0
"""Logit changes from which nothing useful is known."""
_EXP = 64.0
"""Rounding of an exponential, in eps, with room for what intervals allow it."""


@dataclass(frozen=True, eq=False)
class ThirdOrder:
    """What ``D3(r)`` is made of: bounds of the weights ``(n, n)``, of ``|g|``, ``|y|``, ``|k|``, of the largest standard deviations
    of values and keys ``(n,)``, and the norms of A and V. Floats, or intervals.
    """

    low: Any
    high: Any
    G: Any
    Y: Any
    K: Any
    sd_v: Any
    sd_k: Any
    a: float
    v: float
    cap: CapTerms | None = None

    def __call__(self, r: float) -> float:
        """``D3(r)``, an upper bound."""
        if r < 0.0 or not np.isfinite(r):
            return float("inf")
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            moved = _Moved.by(self, r)
            if moved is None:
                return float("inf")
            value = moved.others() + moved.own()
            if self.cap is not None:
                value += self.cap.terms(moved.p, moved.G, moved.Y, moved.K, self.a, self.v, r)
            value = float(upper(_raised(value, 64.0 * (len(self.G) + 16))))
        return value if value == value else float("inf")


def third_order(h: HeadAtTokens) -> ThirdOrder:
    """``D3`` of a head, its output matrix left out."""
    G, Y, K = h.sizes
    up = 1.0 + 32.0 * h.terms * EPS
    sd = []
    for feature, lost in ((h.y, h.dy), (h.k, h.dk)):
        root = np.sqrt(h.weights)[:, :, None] * feature
        narrow = root.shape[2] <= root.shape[1]
        gram = np.swapaxes(root, 1, 2) @ root if narrow else root @ np.swapaxes(root, 1, 2)
        top = np.maximum(np.linalg.eigvalsh(gram)[:, -1], 0.0) + 16.0 * h.terms * EPS * np.trace(gram, axis1=1, axis2=2)
        sd.append(np.sqrt(top) * up + lost * np.sqrt(h.weights.sum(axis=1)) * up)
    low = np.maximum(h.P - h.dP, 0.0) * (1.0 - 4.0 * EPS)
    cap = None if h.curve is None else CapTerms.of(h.curve, h.weights)
    return ThirdOrder(low, h.weights, G, Y, K, sd[0], sd[1], h.a, h.v, cap)


def _raised(x: Any, count: float) -> Any:
    """``x`` raised by ``count eps`` of itself; an interval as it is."""
    return x if is_interval(x) else x * (1.0 + count * EPS)


def _rest(x: Any) -> Any:
    """``sum_{k != j} x_k`` row by row, nothing subtracted, rounded upward."""
    m = x.shape[1]
    return _raised(x @ (1.0 - np.eye(m)), 4.0 * m)


def _norm(x: Any) -> Any:
    return np.sqrt((x**2).sum(axis=1))


def _off(x: Any, z: Any) -> Any:
    """Norm of the matrix ``x_j z_k``, j != k, row by row."""
    return np.sqrt((x**2 * _rest(z**2)).sum(axis=1))


@dataclass(frozen=True, eq=False)
class _Moved:
    """The quantities of the proof over the ball of radius r."""

    low: Any
    p: Any
    G: Any
    Y: Any
    K: Any
    sd_v: Any
    sd_k: Any
    a: float
    v: float
    top: NDArray[np.intp]
    """Another token of large weight in each row; any will do."""

    @classmethod
    def by(cls, h: ThirdOrder, r: float) -> _Moved | None:
        n, m = h.high.shape
        G = h.G + h.a * r
        here, real = np.eye(n, m), np.arange(m) < n
        own = np.maximum(np.abs(here - np.diag(h.high)[:, None]), np.abs(here - np.diag(h.low)[:, None]))
        square = np.diag(_rest(h.high[:, :n] ** 2))[:, None]
        # sum over k != i of ([k = j] - P_ik)^2: for j != i it has the term (1 - P_ij)^2 in place of P_ij^2
        others = square + real * (1.0 - here) * (1.0 - 2.0 * h.low + 2.0 * (h.high - h.low))
        E = r * np.sqrt((h.K + G[:, None] * own) ** 2 + G[:, None] ** 2 * np.maximum(others, 0.0)) * (1.0 + 16.0 * EPS)
        slip, keys = np.zeros(n), np.zeros(n)  # changes of the slopes of a cap, and raw keys
        if h.cap is not None:
            keys = h.cap.keys + h.a * r
            slip = h.cap.bends(keys + G, r) * r * (keys + G)
            E += (r * slip * (keys + G))[:, None]
        if not (upper(E).max() < _WIDE):
            return None
        grown = _raised(h.high * np.exp(E), _EXP)
        p = np.minimum(grown, 1.0)
        low = _raised(h.low * np.exp(-E) / np.maximum(grown.sum(axis=1), 1.0)[:, None], -8.0 * n - 2.0 * _EXP)
        root = np.exp(0.5 * np.where(upper(h.high) > 0.0, E, 0.0).max(axis=1))
        sd_v, sd_k = root * h.sd_v + h.v * r, root * h.sd_k + h.a * r + slip * keys
        spread = sd_k + G * np.sqrt(p.max(axis=1))
        Y = h.Y + (r * (np.sqrt(2.0) * h.v + sd_v * spread))[:, None]
        K = h.K + (r * (np.sqrt(2.0) * h.a + sd_k * spread) + 2.0 * slip * keys)[:, None]
        # by the weights at the tokens: over the ball several may be 1
        top = np.where((here > 0.0) | ~real, 0.0, upper(h.high)).argmax(axis=1)
        if is_interval(p):  # bounds all of them: their ends
            low = lift(lower(low))
            p, G, Y, K, sd_v, sd_k = (lift(upper(x)) for x in (p, G, Y, K, sd_v, sd_k))
        return cls(low, p, G, Y, K, sd_v, sd_k, h.a, h.v, top)

    @property
    def others_move(self) -> Any:
        """The weights of the tokens but the row's own."""
        n, m = self.p.shape
        rows, columns = np.arange(n)[:, None], np.arange(m)
        return np.where((rows == columns) | (columns >= n), 0.0, self.p)

    def largest(self, *coefficients: float) -> Any:
        """Largest absolute value of a polynomial of degree at most 2 over each ``[low, p]``."""
        c0, c1, c2 = (*coefficients, 0.0, 0.0)[:3]
        ends = [np.abs(c0 + c1 * x + c2 * x * x) for x in (self.low, self.p)]
        out = np.maximum(*ends)
        if c2 != 0.0 and 0.0 < -c1 / (2.0 * c2) < 1.0:
            vertex = -c1 / (2.0 * c2)
            inside = (self.low < vertex) & (vertex < self.p)
            out = np.where(inside, np.maximum(out, abs(c0 - c1 * c1 / (4.0 * c2))), out)
        return out + 8.0 * EPS

    def others(self) -> Any:
        """The terms without the row's own token."""
        p = self.others_move
        v, Y, g = self.v, self.Y, self.G[:, None]
        pY = p * Y
        two = self.largest(1.0, -2.0)
        P_rest, Y_rest = np.sqrt(_rest(p**2)), np.sqrt(_rest(pY**2))
        B = 3.0 * v * g**2 * p * two * np.sqrt((1.0 - self.low) ** 2 + 9.0 * P_rest**2)
        alone = pY * self.largest(1.0, -6.0, 6.0)
        B += g**3 * np.sqrt(alone**2 + 9.0 * p**2 * (Y * self.largest(1.0, -4.0) * P_rest + two * Y_rest) ** 2)
        rows, top = np.arange(len(p)), self.top
        rest, rest_Y = p.copy(), pY.copy()
        rest[rows, top] = rest_Y[rows, top] = 0.0
        pairs, pairs_Y, G = _off(rest, rest), _off(rest_Y, rest), self.G
        M = (6.0 * v * G**2 * pairs)[:, None] * rest + (6.0 * G**3 * pairs)[:, None] * rest_Y
        first = 18.0 * v * G**2 * pairs + 12.0 * G**3 * (0.5 * Y[rows, top] * pairs + pairs_Y)
        M[rows, top] = first * p[rows, top]
        return _norm(B.T).max(initial=0.0) + spectral_norm_upper(M)

    def own(self) -> Any:
        """The terms with the row's own token."""
        here = np.arange(len(self.p))[:, None] == np.arange(self.p.shape[1])
        a, v, Y, G = self.a, self.v, self.Y, self.G
        self_p, self_low = np.diag(self.p).copy(), np.diag(self.low).copy()
        K = self.K + G[:, None] * np.where(here, (1.0 - self_low)[:, None], self_p[:, None])
        sd_k = self.sd_k + G * np.minimum(0.5, np.sqrt(self_p))
        variance, both = (sd_k**2)[:, None], (self.sd_v * sd_k)[:, None]
        widest = K.max(axis=1)[:, None]
        pK, pYK = self.p * K, self.p * Y * K
        cov = np.minimum(pYK.sum(axis=1), both[:, 0])
        cov_rest, square_rest = np.minimum(_rest(pYK), both), np.minimum(_rest(pK * K), variance)
        mixed_rest = np.minimum(_rest(pYK * K), widest * both)
        less = 1.0 - self.low
        p = self.others_move
        g, mine, Ki, Yi = G[:, None], self_p[:, None], np.diag(K)[:, None], np.diag(Y)[:, None]
        two = self.largest(1.0, -2.0)
        c21 = 3.0 * v * np.maximum(K**2 * less, square_rest) + 6.0 * v * g * mine * (Ki + K) + 12.0 * v * a * mine
        c21 += 6.0 * a * (Y * K * less + cov_rest) + 6.0 * a * g * mine * (Yi + Y)
        c21 += 3.0 * g * (Y * K**2 * self.largest(1.0, -4.0) + mixed_rest + 2.0 * K * cov_rest + Y * square_rest)
        cube = (pYK * K**2 * self.largest(1.0, -3.0) + 3.0 * pYK * square_rest).sum(axis=1)
        c30 = np.minimum(cube, (widest**2 * both + 3.0 * both * variance)[:, 0])
        c30 += 3.0 * v * self_p * np.maximum(np.diag(K) ** 2, variance[:, 0]) + 6.0 * v * a * self_p * (1.0 - self_low)
        c30 += 6.0 * a * self_p * (np.diag(Y) * np.diag(K) + cov)
        d = 6.0 * v * g * K * two + 6.0 * v * a * less + 6.0 * g * a * Y * two + 3.0 * v * g**2 * mine
        d = p * (d + 3.0 * g**2 * (Y * K * self.largest(1.0, -5.0, 2.0) + two * cov_rest))
        x = 6.0 * v * g * K + 3.0 * g**2 * Y * K + 6.0 * g * a * Y
        c12 = _top_rows(p, d, x, 6.0 * v * a + 6.0 * G**2 * cov, 3.0 * g**2, Y, K)
        c21_norm = _norm(p * c21)
        return (0.5 * (c12 + c30) + np.hypot(0.5 * (c12 - c30), 0.5 * c21_norm)).max(initial=0.0)


def _top_rows(p: Any, d: Any, x: Any, c: Any, f: Any, Y: Any, K: Any) -> Any:
    """Row by row the norm of ``Q = diag d + (p_j p_k (x_j + x_k + c + f (Y_j K_k + Y_k K_j)))_{j != k}``, from above."""
    diagonal = upper(d + p**2 * (2.0 * x + c[:, None] + 2.0 * f * Y * K))
    z = np.sqrt(diagonal) + 1e-3 * np.sqrt(diagonal.max(initial=0.0)) + 1e-300

    def times(z: Array) -> Any:
        pz, xz, kz, yz = (_rest(p * part * z) for part in (1.0, x, K, Y))
        return d * z + p * (x * pz + xz + c[:, None] * pz + f * (Y * kz + K * yz))

    best: Any = np.full(len(p), np.inf)
    for _ in range(6):
        image: Any = times(z)
        best = np.minimum(best, (image / z).max(axis=1))
        image = upper(image)
        z = image / np.maximum(image.max(axis=1, keepdims=True), 1e-300) + 1e-4 * z / z.max(axis=1, keepdims=True)
    return best
