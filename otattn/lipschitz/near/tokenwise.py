r"""LayerNorm, RMSNorm and perceptrons near given tokens.

Each token is moved on its own, ``f(X) = (phi(x_i))``, so that ``sum_i |phi(x_i + delta_i) - ..|^2 <= max_i (c_i/2)^2 |D|^4``: the
constant of the map is the largest of those of its tokens.

**Normalisations.** ``gain * sqrt(d) y / rho``, ``y`` the (centred) token, ``rho^2 = |y|^2 + d eps``: the first d coordinates
of ``Y / |Y|``, ``Y = (y, sqrt(d eps))``. In the plane of Y and the direction with angle ``cos = q``, ``|(Y/|Y|)''|^2 = (1 - q^2)
(1 + 3 q^2) / rho^4 <= (4/3) / rho^4`` and ``|(Y/|Y|)'''|^2 = 9 (1 - q^2)(5 q^4 - 2 q^2 + 1) / rho^6 <= 9 / rho^6``. So
``C = max |gain| sqrt(d) (2/sqrt 3) / rho^2`` and ``D3(r) = 3 max |gain| sqrt(d) / rho(r)^3``,
``rho(r)^2 = (|y| - r)_+^2 + d eps``.

**Perceptrons** ``W phi(U x + b)``. ``zeta . D^2 f [D, E] = sum_h (W^T zeta)_h phi''(s_h) <u_h, D> <u_h, E>``, at most the
Frobenius norm of ``sum_h c_h u_h u_h^T``, whose square is ``c^T (U U^T)^{o2} c`` (entrywise square): ``C^2 = lambda_max(W D (U
U^T)^{o2} D W^T)``, ``D = diag phi''(s)``. ``|D^3 f|`` at the tokens the same with phi''' and ``(U U^T)^{o3}``. On the ball phi'''
moves by at most ``sup |phi''''| |<u_h, E>|``, ``|E| <= r``, and ``sum_h <u_h, E>^2 <u_h, D>^6 <= r^2 s_4`` by Hoelder, where
``sum_h <u_h, D>^{2k} <= s_k``: ``s_k`` is the norm of the Gram matrix ``(U U^T)^{ok}`` of the tensors ``u_h^{ok}``, at most its
largest row sum, and at most ``max |u_h|^{2k - 2} ||U||^2``. So ``r sup |phi''''| ||W|| s_4^{1/2}`` is added, and
``sup |phi'''| ||W|| s_3^{1/2}`` is a bound everywhere. Gated, ``W (phi(G x + g) * (U x + b))``: the forms are
``phi''(s) t g g^T + phi'(s) (g u^T + u g^T)`` with ``t = U x + b``, and
``D3(r) = max_h (|g_h|^2 sup|phi'''| (|t_h| + |u_h| r) ||G|| + 3 |g_h|^2 sup|phi''| ||U||) ||W||``.

**ReLU** is linear until a kink is crossed. For the hidden units F of a token with ``|s_h| <= |u_h| r`` the slope is unknown:
``|f(x + d) - f(x) - J d|`` and the change of J are at most ``||W_F|| ||U_F||`` times ``|d|`` and 1. Gated, ``W (relu(G x + g) * (U x
+ b))`` is quadratic until then, ``phi'' = 0``: its C is as above. A unit h of F changes its row ``1[s > 0] t g_h + relu(s) u_h`` of
the Jacobian by at most ``(|t_h| + |u_h| r) |g_h|`` and ``|g_h| r |u_h|``, where the quadratic map changes it by ``|u_h| r |g_h|`` and
``|g_h| r |u_h|``: to C r is added ``||W_F|| (max_F (|t_h| + 2 |u_h| r) ||G_F|| + 2 r max_F |g_h| ||U_F||)``, and to the remainder
r times this.

Rounding: the preactivations are off by at most ``ds``; errors of products are relative to the sums of absolute values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper, row_norms, spectral_norm_upper
from otattn.attention import MLP, LayerNorm, TokenwiseMap
from otattn.lipschitz.arithmetic.largest_eigenvalue import small_top
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.activations import ACTIVATIONS
from otattn.lipschitz.near.expansion import AFFINE, Expansion, Taylor

__all__ = ["Perceptron", "perceptron", "tokenwise_errors", "tokenwise_expansion"]

Array = NDArray[np.float64]


class Perceptron(NamedTuple):
    """``W (phi(G x + g) * (U x + b)) + c``, or ``W phi(U x + b) + c`` without a gate; biases as arrays."""

    U: Array
    b: Array
    W: Array
    c: Array
    activation: str
    G: Array | None = None
    g: Array | None = None


def perceptron(map: Any) -> Perceptron | None:
    """The matrices of a perceptron; None for another map. A class outside this package has them in ``as_perceptron()``."""
    if isinstance(map, MLP):
        c = np.zeros(len(map.W)) if map.output_bias is None else map.output_bias
        return Perceptron(map.U, map.b, map.W, c, map.activation)
    return Perceptron(*map.as_perceptron()) if hasattr(map, "as_perceptron") else None


def tokenwise_expansion(
    map: TokenwiseMap, x: Array, left: Array | None = None, right: Array | None = None
) -> Expansion:
    """The expansion of ``left f(right z)`` at float tokens ``x = right z``; matrices (d, d), None for the identity."""
    if isinstance(map, LayerNorm):
        return _normalisation(map, x, left, right)
    p = perceptron(map)
    if p is None:
        raise TypeError(
            f"a token-wise map must be LayerNorm, RMSNorm or a perceptron to be expanded, received {type(map).__name__}."
        )
    seen = p._replace(
        U=p.U if right is None else p.U @ right,
        G=p.G if p.G is None or right is None else p.G @ right,
        W=p.W if left is None else left @ p.W,
    )
    if p.activation == "relu":
        return _kinked(p, seen, x)
    return AFFINE if p.activation == "identity" and p.G is None else _smooth(p, seen, x)


def _normalisation(map: LayerNorm, x: Array, left: Array | None, right: Array | None) -> Taylor:
    d = x.shape[1]
    low = _length(map, x)
    gain = float(np.abs(map.gain).max()) if left is None else float(spectral_norm_upper(left * map.gain))
    gain *= np.sqrt(d) * (1.0 + 8.0 * EPS)
    scale = 1.0 if right is None else float(spectral_norm_upper(right))

    def rho(r: float) -> float:
        return float(np.sqrt(max(low - scale * r, 0.0) ** 2 + d * map.eps)) * (1.0 - 8.0 * EPS)

    def third(r: float) -> float:
        size = rho(r)
        return 3.0 * gain * (scale / size) ** 3 if size > 0.0 else float("inf")

    second = gain * 1.1547005383792517 * scale**2 / max(rho(0.0) ** 2, 1e-300)
    if left is not None or right is not None:
        second = min(second, _turned_bend(map, x, left, right))
    return Taylor(second, third)


def _turned_bend(map: LayerNorm, x: Array, left: Array | None, right: Array | None) -> float:
    """C in other coordinates, L on the left and R on the right, n = y / rho, G the gain, P the centring.

    ``rho^2 (Y / |Y|)''[D, D] = -2 <n, D> D + (3 <n, D>^2 - |D|^2) n``, so ``C = sqrt(d) / rho^2 max (2 |R^T n| ||L G P R|| + |L G n|
    max(3 |R^T n|^2, ||P R||^2))``: bilinear in the same way, for the form is a difference of positive ones.
    """
    d = x.shape[1]
    y = map._centred(x)
    rho = np.sqrt((y**2).sum(axis=1) + d * map.eps) * (1.0 - 1e-10)
    n = y / rho[:, None]
    L = np.diag(map.gain) if left is None else left * map.gain
    R = np.eye(d) if right is None else right
    R = R - R.mean(axis=0) if map.center else R
    b, out = np.linalg.norm(n @ R, axis=1), np.linalg.norm(n @ L.T, axis=1)
    across, wide = float(spectral_norm_upper(L @ R)), float(spectral_norm_upper(R))
    lost = 1e-10 * float(norm_upper(L)) * max(float(norm_upper(R)), 1.0) ** 2
    values = 2.0 * b * across + out * np.maximum(3.0 * b**2, wide**2) + lost
    return float((values / rho**2).max()) * np.sqrt(d) * (1.0 + 1e-10)


def _length(map: LayerNorm, x: Array) -> float:
    """The length of the shortest (centred) token, rounded down."""
    d = x.shape[1]
    lost = 4.0 * (d + 8) * EPS * float(row_norms(x).max())
    return max(float(row_norms(map._centred(x)).min()) * (1.0 - (d + 8) * EPS) - lost, 0.0)


def _smooth(p: Perceptron, seen: Perceptron, x: Array) -> Taylor:
    """Preactivations by p, matrices of the derivatives by ``seen``, in other coordinates."""
    phi = ACTIVATIONS[p.activation]
    s, ds = _hidden(p.U if p.G is None else p.G, p.b if p.g is None else p.g, x)
    U, W = seen.U, seen.W
    norm_W, norm_U = float(spectral_norm_upper(W)), float(spectral_norm_upper(U))
    u = row_norms(U) * (1.0 + U.shape[1] * EPS)
    if seen.G is None:
        rough = 16.0 * EPS * (1.0 + np.abs(s) ** 3)
        slopes, lost = phi.second(s), phi.sup_third * ds + rough * (1.0 + np.abs(phi.second(s)))
        top = _gram_top(
            W, [slopes], [np.minimum(lost, 2.0 * phi.sup_second)], [(U @ U.T) ** 2], norm_W, [float(u.max()) ** 2]
        )
        size, turn = float(u.max()), _turn(p, seen)
        bends, cubes, fourths = phi.third(s), *_powers(U @ U.T, u, norm_U)
        crude = phi.sup_third * norm_W * turn * cubes
        fourth = phi.sup_fourth * norm_W * turn * fourths
        lost = np.minimum(phi.sup_fourth * ds + rough * (1.0 + np.abs(bends)), 2.0 * phi.sup_third)
        at = _gram_top(W, [bends], [lost], [(U @ U.T) ** 3], norm_W, [size**3]) * turn
        return Taylor(top * turn, lambda r: min(crude, at + r * fourth))
    t, dt = _hidden(p.U, p.b, x)
    G, g = seen.G, row_norms(seen.G) * (1.0 + U.shape[1] * EPS)
    norm_G = float(spectral_norm_upper(G))
    rough = 16.0 * EPS * (1.0 + s**2)
    a, da = phi.second(s) * t, (phi.sup_third * ds + rough) * (np.abs(t) + dt) + phi.sup_second * dt
    b, db = phi.first(s), phi.sup_second * ds + rough
    GG, GU, UU = G @ G.T, G @ U.T, U @ U.T
    forms = [GG**2, 2.0 * GG * GU, 2.0 * (GG * UU + GU * GU.T)]
    second = _gram_top(W, [a, b], [da, db], forms, norm_W, [float(g.max()) ** 2, 2.0 * float((g * u).max())])
    reach = np.abs(t).max(axis=0) + dt.max(axis=0)

    def third(r: float) -> float:
        one = phi.sup_third * float((g**2 * (reach + u * r)).max()) * norm_G
        return (
            (one + 3.0 * phi.sup_second * float((g**2).max()) * norm_U) * norm_W * (1.0 + 32.0 * EPS) * _turn(p, seen)
        )

    return Taylor(second * _turn(p, seen), third)


def _powers(K: Array, u: Array, norm: float) -> tuple[float, float]:
    """Upper bounds of ``(sum_h <u_h, D>^6)^{1/2}`` and ``(sum_h <u_h, D>^8)^{1/2}`` over unit D, ``K = U U^T``."""
    lost = 4.0 * (K.shape[0] + 64) * EPS
    size, M = float(u.max(initial=0.0)), np.abs(K) + lost * np.outer(u, u)
    sums = (float((M**k).sum(axis=1).max(initial=0.0)) * (1.0 + lost) for k in (3, 4))
    found = (min(float(np.sqrt(s)), size ** (k - 1) * norm) for s, k in zip(sums, (3, 4), strict=True))
    cubes, fourths = (value * (1.0 + 16.0 * EPS) for value in found)
    return cubes, fourths


def _turn(p: Perceptron, seen: Perceptron) -> float:
    """What rounding adds to matrices in other coordinates, whose condition is below a hundred."""
    return 1.0 if seen.U is p.U and seen.W is p.W else 1.0 + 1e-10


def _gram_top(
    W: Array, c: list[Array], dc: list[Array], forms: list[Array], norm_W: float, sizes: list[float]
) -> float:
    """Largest root of ``lambda_max(sum_ab W D_a F_ab D_b W^T)`` over the tokens, ``D_a = diag c_a``.

    ``sizes`` bound ``sqrt`` of the norms of the rank-one forms: an error dc moves the Frobenius norm by at most
    ``||W|| max over h of dc times the size times sqrt(number of hidden units)``.
    """
    n, h = c[0].shape
    worst, terms = 0.0, 4.0 * (h + W.shape[0] + 64) * EPS
    size_W = float(norm_upper(W))
    for i in range(n):
        K = np.outer(c[0][i], c[0][i]) * forms[0]
        if len(c) > 1:
            K += np.outer(c[0][i], c[1][i]) * forms[1] + (np.outer(c[0][i], c[1][i]) * forms[1]).T
            K += np.outer(c[1][i], c[1][i]) * forms[2]
        M = W @ K @ W.T
        lost = (
            8.0
            * terms
            * size_W**2
            * h
            * sum(float(np.abs(a[i]).max()) * size for a, size in zip(c, sizes, strict=True)) ** 2
        )
        moved = sum(float(np.linalg.norm(d[i])) * size for d, size in zip(dc, sizes, strict=True)) * norm_W
        worst = max(worst, float(np.sqrt(max(small_top(M), 0.0) + lost)) + moved)
    return worst * (1.0 + terms)


def _hidden(U: Array, b: Array, x: Array) -> tuple[Array, Array]:
    """Preactivations ``(n, h)`` and bounds of their errors."""
    size = np.abs(x) @ np.abs(U).T + np.abs(b)
    return x @ U.T + b, 2.0 * (x.shape[1] + 4) * EPS * size


@dataclass(frozen=True, eq=False)
class _Kinked:
    """The expansion of a perceptron with ReLU: the distances of its kinks, and the matrices."""

    W: Array
    U: Array
    distances: Array
    """``|s_h| / |u_h|`` token by token, rounded down."""

    def growth(self, r: float, off: float = 0.0) -> float:
        worst = 0.0
        for units in np.unique(self.distances <= r + off, axis=0) if r > 0.0 else ():
            if units.any():
                worst = max(worst, float(spectral_norm_upper(self.W[:, units]) * spectral_norm_upper(self.U[units])))
        return worst

    def remainder(self, r: float, off: float = 0.0) -> float:
        return self.growth(r, off) * r * (1.0 + 4.0 * EPS)

    def curvature(self, off: float = 0.0) -> float:
        return 0.0

    third_remainder, third_growth = remainder, growth


@dataclass(frozen=True, eq=False)
class _KinkedGate:
    """The expansion of a perceptron with a gate of ReLU: its kinks, the largest ``|t_h|`` of each unit, and C."""

    W: Array
    U: Array
    G: Array
    distances: Array
    values: Array
    second: float

    def growth(self, r: float, off: float = 0.0) -> float:
        return self.second * r + self._crossed(r, off)

    def remainder(self, r: float, off: float = 0.0) -> float:
        return (0.5 * self.second * r * r + self._crossed(r, off) * r) * (1.0 + 4.0 * EPS)

    def _crossed(self, r: float, off: float) -> float:
        worst, reach = 0.0, r + off
        g, u = (row_norms(M) * (1.0 + M.shape[1] * EPS) for M in (self.G, self.U))
        for units in np.unique(self.distances <= reach, axis=0) if r > 0.0 else ():
            if units.any():
                W, G, U = (float(spectral_norm_upper(M)) for M in (self.W[:, units], self.G[units], self.U[units]))
                own = (self.values + 2.0 * u * reach)[units].max() * G + 2.0 * reach * g[units].max() * U
                worst = max(worst, W * float(own) * (1.0 + 16.0 * EPS))
        return worst


def _kinked(p: Perceptron, seen: Perceptron, x: Array) -> Expansion:
    gated, lines = p.G is not None, seen.U if seen.G is None else seen.G
    s, ds = _hidden(p.U, p.b, x) if p.G is None or p.g is None else _hidden(p.G, p.g, x)
    g = row_norms(lines) * (1.0 + lines.shape[1] * EPS)
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.where(g > 0.0, np.maximum(np.abs(s) - ds, 0.0) / g * (1.0 - 8.0 * EPS), np.inf)
    if not gated:
        return _Kinked(seen.W, seen.U, distances)
    U, norm_W = seen.U, float(spectral_norm_upper(seen.W))
    u = row_norms(U) * (1.0 + U.shape[1] * EPS)
    forms = [2.0 * ((lines @ lines.T) * (U @ U.T) + (lines @ U.T) * (U @ lines.T))]
    on = (s > 0.0).astype(np.float64)
    second = _gram_top(seen.W, [on], [np.zeros_like(on)], forms, norm_W, [2.0 * float((g * u).max())])
    t, dt = _hidden(p.U, p.b, x)
    values = (np.abs(t) + dt).max(axis=0)
    return _KinkedGate(seen.W, U, lines, distances, values, second * _turn(p, seen))


def tokenwise_errors(map: TokenwiseMap, x: Array) -> tuple[float, float]:
    """What rounding adds to the map at float tokens (Frobenius norm), and to its Jacobian (operator norm)."""
    n, d = x.shape
    if isinstance(map, LayerNorm):
        gain = float(np.abs(map.gain).max()) * np.sqrt(d)
        rho = np.sqrt(_length(map, x) ** 2 + d * map.eps)
        relative = 16.0 * (d + 16) * EPS * (1.0 + row_norms(x) / max(rho, 1e-300))
        bias = 0.0 if map.bias is None else float(np.abs(map.bias).max()) * np.sqrt(d)
        value = gain * float(np.linalg.norm(relative)) + 4.0 * EPS * np.sqrt(n) * (gain + bias)
        return float(value), float(4.0 * gain * relative.max() / max(rho, 1e-300))
    p = perceptron(map)
    assert p is not None
    phi = ACTIVATIONS[p.activation]
    t, dt = _hidden(p.U, p.b, x)
    W, h = p.W, len(p.U)
    sizes = [float(norm_upper(M)) for M in (W, p.U)]
    bend = 0.0 if p.activation == "relu" else phi.sup_second
    if p.G is None or p.g is None:
        hidden, lost = np.abs(phi.value(t)), phi.sup_first * dt + 16.0 * EPS * (np.abs(t) + 1.0)
        slope = bend * dt + 16.0 * EPS * (1.0 + np.abs(t))
        jacobian = float(slope.max()) + 4.0 * (h + d + 16) * EPS * phi.sup_first
        jacobian *= sizes[0] * sizes[1]
    else:
        s, ds = _hidden(p.G, p.g, x)
        value, dv = np.abs(phi.value(s)), phi.sup_first * ds + 16.0 * EPS * (np.abs(s) + 1.0)
        hidden, lost = value * np.abs(t), dv * (np.abs(t) + dt) + value * dt
        slope = bend * ds + 16.0 * EPS * (1.0 + np.abs(s))
        first, second = float(dv.max()), float((slope * (np.abs(t) + dt)).max() + phi.sup_first * dt.max())
        rough = 4.0 * (h + d + 16) * EPS
        first, second = first + rough * float(value.max()), second + rough * phi.sup_first * float(np.abs(t).max())
        jacobian = sizes[0] * (sizes[1] * first + float(norm_upper(p.G)) * second)
    out = lost @ np.abs(W).T + 4.0 * (h + 8) * EPS * ((hidden + lost) @ np.abs(W).T + np.abs(p.c))
    return float(norm_upper(out)), float(jacobian)
