r"""Heads whose logits have a soft cap, near given tokens: ``l = phi(z)``, ``phi(z) = c tanh(z / c)``, ``z_ij = <A x_i + c, x_j>``.

**Derivatives of the logits.** With raw keys ``q_j = A^T x_j``, ``tau_j = <q_j, delta_i> + <g_i, delta_j>`` and ``m_j = <A delta_i,
delta_j>``: ``t = phi' tau``, then ``phi'' tau^2 + 2 phi' m`` and ``phi''' tau^3 + 6 phi'' tau m``. Here ``0 <= phi' <= 1``, ``|phi''|
<= 0.77 / c``, ``|phi'''| <= 2 / c^2``. Write ``s_ij = phi'(z_ij)``, ``b_ij = phi''(z_ij)``, 0 for a sink, whose logit is not capped.

**First order.** ``J_ij = P_ij (V + s_ij y_ij g_i^T) + [i = j] F_i``, ``F_i = sum_j P_ij y_ij k_ij^T`` with the keys ``k_ij = s_ij
q_j - sum_l P_il s_il q_l``: the formulas of other heads with ``s y`` in place of y beside g.

**Second order.** In the notation of :mod:`~otattn.lipschitz.near.gram_hessian`, S = diag s:

- without the own token ``H(zeta) = sum_i Lap S x u g^T + S Lap x g u^T + (S Kap S + diag(P w b)) x g g^T``, as there by its
  Gram matrix, whose entries are sums over tokens and products of two of these;
- with one ``L_ij = P_ij [u k_ij^T + s_ij g_i (w_ij k_ij - F_i^T zeta)^T + s_ij w_ij A + b_ij w_ij g_i q_j^T]``, with both ``N_i =
  sum_j P_ij w_ij (k_ij k_ij^T + b_ij q_j q_j^T)``, term by term: ``c_i^2 = sum_j ||L_ij||^2`` and ``n_i = ||N_i||``, so that
  ``C = sqrt(lambda_max(G)) + 2 max c + max n``.

**Third order.** Cumulants of ``t`` and ``phi' m`` are bounded as for other heads: all that is used of ``b_j`` is ``|b_j| <= |g_i|
|delta_j|``, and a factor ``phi' <= 1`` keeps it. At moved tokens ``|s' - s| <= sup|phi''| Z r``, ``Z = |q| + G`` at its largest in the
row (``|tau| <= Z |D|``), which adds ``sup|phi''| Z^2 r^2`` to the centred changes of logits, and ``sup|phi''| Z r |q|`` to keys,
twice when they are centred. The other terms, ``3 kappa_3(v, t, phi'' tau^2) + 3 Cov(V delta, phi'' tau^2) + Cov(v, phi''' tau^3)
+ 6 Cov(v, phi'' tau m)``, are polynomials with non-negative coefficients in ``|delta_i|`` and the ``|delta_j| <= 1`` once norms are
taken. What is left of them for ``delta_i = 0`` is at most ``sum_j B_ij |delta_j|^2``, together the largest column norm of B; the
rest is at most ``|delta_i|`` times its value where all norms are 1. With ``|tau_j| <= q |delta_i| + G |delta_j|`` (q the largest raw
key of the row) and the centred ``|t_j| <= (K + G) |delta_i| + G |delta_j| + G sum_k p_k |delta_k|``, in a row of largest value Y, ``B2
= sup|phi''|``, ``B3 = sup|phi'''|``, the two values are

- ``12 B2 Y G^3 sum p_j |delta_j|^2`` and ``6 B2 Y (K + 3 G) (q + G)^2`` for the first term, which is two expectations;
- ``6 B2 v G^2 sum p_j |delta_j|^2`` and ``6 B2 v (q + G)^2`` for the second;
- ``B3 Y G^3 sum p_j |delta_j|^2`` and ``B3 Y (q + G)^3`` for the third, 0 and ``6 B2 Y (q + G) a`` for the last.

Rounding: z is off by ``|dg| |x| + small |g| |x|``, slopes and bends by the next derivative's bound times this and a few units.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.constants.moved_rows import TINY, Made, MovedRows
from otattn.lipschitz.near.gram_hessian import Hessian, gram_hessian
from otattn.lipschitz.near.gram_jacobian import output_norms
from otattn.lipschitz.near.head import Curve, HeadAtTokens, head_at_tokens, rounding
from otattn.lipschitz.near.scores import Places

__all__ = ["CapTerms", "capped_head", "capped_hessian"]

Array = NDArray[np.float64]
FLAT = 350.0
"""Beyond this many caps slopes are below the smallest float."""


def capped_head(
    rows: MovedRows, tokens: Array, places: Places, cap: float, made: Made, A: Array, W: Array | None, dA: float
) -> tuple[HeadAtTokens, MovedRows]:
    """The head with a cap at float tokens, and its rows; of ``rows`` only the weights are without it."""
    n, m = rows.P.shape
    x, sizes = (np.concatenate([part, np.zeros((m - n, *part.shape[1:]))]) for part in (tokens, made.sizes))
    raw, draw = x @ A, (made.small * float(norm_upper(A)) + made.a) * float(sizes.max())
    g = np.linalg.norm(rows.g, axis=1) * (1.0 + 4.0 * tokens.shape[1] * EPS)
    z = rows.g @ x.T
    lost = (rows.dg + made.small * g)[:, None] * sizes
    slope = 1.0 / np.cosh(np.clip(z / cap, -FLAT, FLAT)) ** 2
    bend = -2.0 / cap * np.tanh(z / cap) * slope
    curve = Curve(cap, slope, bend, lost * _second(cap) + 16.0 * EPS, lost * _third(cap) + 32.0 * EPS / cap, raw, draw)
    if places.sink:
        for part in (slope, bend, curve.dslope, curve.dbend):
            part[:, -1] = 0.0
    logits, size = cap * np.tanh(z / cap), np.minimum(np.abs(z), cap)
    if places.added is not None:
        logits, size = logits + places.added, size + places.size
    P, low, high = _weights(logits, lost + 8.0 * EPS * size, places.seen)
    rows = replace(rows, P=P, low=low, high=high)
    # the keys, as head_at_tokens has values and keys
    slanted = slope[:, :, None] * raw
    k = slanted - np.einsum("ij,ijd->id", P, slanted)[:, None]
    keys = np.linalg.norm(raw, axis=1) * (1.0 + 4.0 * tokens.shape[1] * EPS) + draw
    off, wide = (curve.dslope * keys + draw).max(axis=1), (np.minimum(slope + curve.dslope, 1.0) * keys).max(axis=1)
    moved = np.maximum(high - P, P - low).sum(axis=1) * (1.0 + 4.0 * m * EPS)
    dk = 2.0 * off + moved * (wide + off) + 4.0 * (m + sum(rows.V.shape) + 32) * EPS * wide
    return replace(head_at_tokens(rows, W, A, dA, (k, dk)), curve=curve), rows


def _weights(logits: Array, lost: Array, seen: NDArray[np.bool_] | None) -> tuple[Array, Array, Array]:
    """The softmax of each row, and the interval in which it is when logits are off by at most ``lost``."""
    m = logits.shape[1]
    logits = logits if seen is None else np.where(seen, logits, -np.inf)
    top = logits.max(axis=1, keepdims=True)
    away = logits - top
    lost = lost + 4.0 * EPS * np.where(np.isfinite(away), np.abs(away), 0.0)
    one, less, more = np.exp(away), np.exp(away - lost), np.exp(away + lost)
    P = one / one.sum(axis=1, keepdims=True)
    low = less / more.sum(axis=1, keepdims=True) * (1.0 - 4.0 * (m + 8) * EPS)
    high = np.minimum(more / less.sum(axis=1, keepdims=True) * (1.0 + 4.0 * (m + 8) * EPS) + TINY, 1.0)
    if seen is not None:
        high = np.where(seen, high, 0.0)
    return P, np.minimum(low, P), np.maximum(high, P)


def capped_hessian(heads: list[HeadAtTokens]) -> Hessian:
    """The bounds of the parts of the second derivative of the sum of the heads, which all have a cap."""
    own = _own(heads) * (1.0 + rounding(heads))
    return gram_hessian(heads, own, row=_row, sizes=_sizes, moved=_moved, tol=1e-3)


def _row(a: HeadAtTokens, b: HeadAtTokens, i: int) -> Array:
    """``<H_i, H_l>`` for l <= i, i for the head a and l for b: ``(i + 1, e, f)``."""
    assert a.curve is not None
    assert b.curve is not None
    p, s, c = a.P[i], a.curve.slope[i], a.curve.bend[i]
    past = slice(0, i + 1)
    q, r, d, g = b.P[past], b.curve.slope[past], b.curve.bend[past], b.g[past]
    y, x = a.y[i], b.y[past]
    pq, sr = p * q, s * r
    both = pq * sr
    one, of_s, of_r, of_both = (part.sum(axis=1)[:, None] for part in (pq, pq * s, pq * r, both))
    plain = (both * (1.0 - p - q)).sum(axis=1)
    straight, turned = plain + (one * of_both)[:, 0], plain + (of_s * of_r)[:, 0]  # <Lap S, Lap' R>, <Lap S, R Lap'>
    weight = both * r * (1.0 - p - 2.0 * q) + of_both * pq * r + of_r * both + pq * s * d * (1.0 - p)
    lap_kap = np.einsum("lj,ljf->lf", weight, x)
    weight = both * s * (1.0 - q - 2.0 * p) + of_both * pq * s + of_s * both + pq * r * c * (1.0 - q)
    kap_lap = weight @ y
    weight = pq * (sr**2 * (1.0 - 2.0 * p - 2.0 * q) + s**2 * (1.0 - 2.0 * p) * d + r**2 * (1.0 - 2.0 * q) * c + c * d)
    weight += 2.0 * of_both * both
    kap_kap = np.matmul(np.swapaxes(weight[:, :, None] * y, 1, 2), x)
    kap_kap += 2.0 * (both @ y)[:, :, None] * np.einsum("lj,ljf->lf", both, x)[:, None, :]
    gg = (g @ a.g[i])[:, None, None]
    Va, Vb = b.V @ a.g[i], g @ a.V.T  # V_b g_i and V_a g_l
    out = 2.0 * straight[:, None, None] * gg * (a.V @ b.V.T)
    out += 2.0 * turned[:, None, None] * Vb[:, :, None] * Va
    out += 2.0 * gg * (Vb[:, :, None] * lap_kap[:, None, :] + kap_lap[:, :, None] * Va)
    out += gg**2 * kap_kap
    return np.asarray(out)


def _bends(h: HeadAtTokens) -> tuple[Array, Array]:
    """The largest slope's error and the largest bend of each row."""
    assert h.curve is not None
    return h.curve.dslope.max(axis=1), (np.abs(h.curve.bend) + h.curve.dbend).max(axis=1)


def _sizes(h: HeadAtTokens) -> Array:
    G, Y, _ = h.sizes
    return np.asarray(4.0 * h.size_V * G + (3.0 + _bends(h)[1]) * Y.max(axis=1) * G**2)


def _moved(h: HeadAtTokens) -> Array:
    """What the errors of the floats may add to ``|H_i(zeta)|_F``, unit zeta."""
    assert h.curve is not None
    G, Y, _ = h.sizes
    wide = Y.max(axis=1)
    slopes, bends = _bends(h)
    weighted = h.lost * wide + h.dy
    lap = 8.0 * h.lost * h.v * G + 4.0 * (h.dV * G + h.v * h.dg + slopes * h.v * G)
    kap = (5.0 * weighted + 2.0 * wide * h.lost + 6.0 * slopes * wide) * G**2 + 6.0 * wide * G * h.dg
    kap += (weighted * bends + wide * h.curve.dbend.max(axis=1)) * G**2 + 2.0 * wide * bends * G * h.dg
    return np.asarray(lap + kap)


def _own(heads: list[HeadAtTokens]) -> float:
    """``2 max_i c_i + max_i n_i``, errors of the floats included in the sizes."""
    n = heads[0].n
    one, two = np.zeros(n), np.zeros(n)
    for h, w in zip(heads, output_norms(heads), strict=True):
        assert h.curve is not None
        G, Y, K = h.sizes
        p, slope = h.weights, np.minimum(h.curve.slope + h.curve.dslope, 1.0)
        bend = np.abs(h.curve.bend) + h.curve.dbend
        q = np.linalg.norm(h.curve.raw, axis=1) * (1.0 + 4.0 * h.terms * EPS) + h.curve.draw
        field = np.linalg.norm(h.field, axis=(1, 2)) * (1.0 + 4.0 * h.terms * EPS) + h.dfield
        L = h.v * K + slope * (G[:, None] * (Y * K + field[:, None]) + Y * h.a) + bend * Y * G[:, None] * q
        one += w * np.linalg.norm((p * L)[:, :n], axis=1)
        two += w * (p * Y * (K**2 + bend * q**2)).sum(axis=1)
    return 2.0 * float(one.max()) + float(two.max())


@dataclass(frozen=True, eq=False)
class CapTerms:
    """Row by row the largest raw key and the largest ``|phi''|`` at the tokens, and its bounds everywhere."""

    keys: Array
    bend: Array
    second: float
    third: float

    @classmethod
    def of(cls, curve: Curve, weights: Array) -> CapTerms:
        q = np.linalg.norm(curve.raw, axis=1) * (1.0 + 4.0 * (curve.raw.shape[1] + 8) * EPS) + curve.draw
        keys = np.where(weights > 0.0, q, 0.0).max(axis=1)
        bend = np.where(weights > 0.0, np.abs(curve.bend) + curve.dbend, 0.0).max(axis=1)
        return cls(keys, bend, _second(curve.cap), _third(curve.cap))

    def bends(self, Z: Array, r: float) -> Array:
        """``sup |phi''|`` over the ball of radius r, where logits move by at most ``Z r``."""
        return np.asarray(np.minimum(self.second, self.bend + self.third * Z * r))

    def terms(self, p: Array, G: Array, Y: Array, K: Array, a: float, v: float, r: float) -> float:
        """The bound over the ball of radius r, from those there of the weights, of ``|g|``, ``|y|``, ``|k|``, ``||A||``, ``||V||``."""
        q, y, k = self.keys + a * r, Y.max(axis=1), K.max(axis=1)
        Z = q + G
        B, T = self.bends(Z, r), self.third
        alone = 12.0 * B * y * G**3 + 6.0 * B * v * G**2 + T * y * G**3
        whole = 6.0 * B * y * (k + 3.0 * G) * Z**2 + 6.0 * B * v * Z**2 + T * y * Z**3 + 6.0 * B * y * Z * a
        n = len(p)
        columns = np.sqrt(((p[:, :n] * alone[:, None]) ** 2).sum(axis=0))
        return float(columns.max(initial=0.0) + (whole - alone).max(initial=0.0))


def _second(cap: float) -> float:
    """The largest second derivative of the cap."""
    return 0.77 / cap


def _third(cap: float) -> float:
    """And the largest third one, rounded up."""
    return 2.0 / cap**2 * (1.0 + 4.0 * EPS)
