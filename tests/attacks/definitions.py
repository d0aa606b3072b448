"""Attention from its definition, in plain numpy and batched, with derivatives by the complex step.

Nothing of the library is used: what it proves is measured against this. Tokens are ``X (B, n, d)`` with weights ``w (B, n)``;
token i of n has the time ``(i + 1) / n`` unless the map says otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

STEP = 1e-30
"""Imaginary step: its square is below rounding for every logit, so the derivative is exact to rounding."""
SCALINGS = 20_000
"""Alternate normalisations of a Sinkhorn kernel at most; those that are not done by then raise."""
SCORES = ("score", "open score")
"""Composed logits, with positions and without."""
UNNORMALISED = {
    "linear": lambda s: s,
    "relu": lambda s: np.where(s.real > 0, s, 0),
    "exponential": np.exp,
    "sigmoid": lambda s: np.where(s.real > 0, 1 / (1 + np.exp(-np.abs(s.real) - 1j * s.imag)), _expit_left(s)),
}


def _expit_left(s: Any) -> Any:
    e = np.exp(np.minimum(s.real, 0) + 1j * s.imag)
    return e / (1 + e)


@dataclass(frozen=True)
class Head:
    """One head: its kind, its arrays by the papers' names, and the matrices that multiply its values, first to last."""

    kind: str
    par: dict[str, Any]
    outputs: tuple[np.ndarray, ...] = ()

    def values(self, X):
        """What the weights average."""
        Y = X @ self.par["V"].T
        if self.kind in SCORES:
            Y = normed(Y + self.par["b"], self.par["value_norm"])
        for W in self.outputs:
            Y = Y @ W.T
        return Y

    def bias(self):
        """The value bias after the outputs; only normalised heads have one, so that it is added as it is."""
        b = np.zeros(len(self.par["V"]))
        if self.kind not in SCORES:  # there it is part of the values: a sink leaves less of it
            b = self.par.get("b", b)
        for W in self.outputs:
            b = W @ b
        return b


@dataclass(frozen=True)
class Map:
    """A sum of heads and a bias, with or without a causal mask."""

    heads: tuple[Head, ...]
    causal: bool = False
    times: tuple[float, ...] | None = None
    bias: tuple[float, ...] | None = None
    gate: tuple[Any, Any] | None = None

    @property
    def ordered(self) -> bool:
        """Tokens have times that matter, so that distances are conditional."""
        return self.causal or any(h.kind in ("rotary", "score") for h in self.heads)

    def clock(self, n: int) -> np.ndarray:
        """Times of the tokens."""
        return (np.arange(n) + 1.0) / n if self.times is None else np.array(self.times)

    @property
    def dim(self) -> int:
        return int(self.heads[0].par["V"].shape[1])


def turned(z, positions, par):
    """Pairs of leading coordinates turned by ``position * frequency``."""
    r = par["rotary_dim"]
    angles = positions[:, None] * par["base"] ** (-np.arange(0, r, 2) / r)
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = (slice(0, r, 2), slice(1, r, 2)) if par["layout"] == "adjacent" else (slice(0, r // 2), slice(r // 2, r))
    out = np.array(z)
    out[..., a], out[..., b] = z[..., a] * cos - z[..., b] * sin, z[..., a] * sin + z[..., b] * cos
    return out


def normed(z, norm):
    """``gain (z - mean) / sqrt(mean square + eps) + shift``, the mean left alone for RMSNorm."""
    if norm is None:
        return z
    gain, shift, eps, centred = norm
    y = z - z.mean(-1, keepdims=True) if centred else z
    return gain * y / np.sqrt((y * y).mean(-1, keepdims=True) + eps) + shift


def places(par, clock):
    """Positions of the tokens."""
    return clock * (len(np.unique(clock)) if par["length"] is None else par["length"])


def composed(head: Head, x, at, X, clock):
    """Logits of queries and keys that are normalised, turned, capped and biased; minus infinity where nothing is seen."""
    p = head.par
    q = normed(x @ p["Q"].T + p["bq"], p["query_norm"])
    k = normed(X @ p["K"].T + p["bk"], p["key_norm"])
    place = places(p, clock)
    if p["omega"]:
        angles = place[:, None] * np.array(p["omega"])
        z = [np.array(q), np.array(k)]
        for one, many in ((z[0], angles[at]), (z[1], angles)):
            r = many.shape[1]
            a, b = np.array(one[..., :r]), np.array(one[..., r : 2 * r])
            one[..., :r], one[..., r : 2 * r] = a * np.cos(many) - b * np.sin(many), a * np.sin(many) + b * np.cos(many)
        q, k = z
    S = p["scale"] * np.einsum("bik,bjk->bij", q, k)
    if p["cap"] is not None:
        S = p["cap"] * np.tanh(S / p["cap"])
    apart = place[None, :] - place[at][:, None]
    S = S - p["slope"] * np.abs(apart)
    if p["table"] is not None:
        m = len(p["table"]) // 2
        S = S + np.array(p["table"])[np.clip(np.rint(apart), -m, m).astype(int) + m]
    return np.where(sees(p, apart), S, -np.inf)


def sees(par, apart):
    """Which atoms are seen, by ``j - i``."""
    before, after, causal = par["window"]
    return (apart >= -before - 1e-6) & (apart <= (0.0 if causal else after + 1e-6))


def logits(head: Head, x, at, X, clock=None):
    """Of the queries ``x (B, m, d)``, which stand at the tokens ``at (m,)``, with all keys: ``(B, m, n)``."""
    p = head.par
    if head.kind in SCORES:
        return composed(head, x, at, X, clock)
    if head.kind == "l2":
        q, k = x @ p["Q"].T, X @ p["K"].T
        return -((q[:, :, None] - k[:, None]) ** 2).sum(-1)
    if head.kind in ("qkv", "rotary"):
        q, k = p["scale"] * (x @ p["Q"].T + p["bq"]), X @ p["K"].T + p["bk"]
        if head.kind == "rotary":
            place = clock * (len(np.unique(clock)) if p["length"] is None else p["length"])
            q, k = turned(q, place[at], p), turned(k, place, p)
        return np.einsum("bik,bjk->bij", q, k)
    return np.einsum("bik,bjk->bij", x @ p["A"].T + p.get("c", 0.0), X)


def softmax(s):
    """Over the last axis; the maximum is taken out of the real part."""
    e = np.exp(s - s.real.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_sum(s):
    top = s.real.max(-1, keepdims=True)
    return (np.log(np.exp(s - top).sum(-1, keepdims=True)) + top)[..., 0]


def sinkhorn(L, w):
    """Potentials ``f, h`` with ``sum_j w_j e^{L_ij + f_i + h_j} = 1`` and the same over i."""
    lw, h = np.log(w), np.zeros(L.shape[:-1], dtype=L.dtype)
    scale, turning = 1.0 + np.abs(L.real).max(), 1e-13 * np.abs(L.imag).max()
    for step in range(SCALINGS):
        f = -log_sum(L + (h + lw)[:, None, :])
        new = -log_sum(np.swapaxes(L, 1, 2) + (f + lw)[:, None, :])
        moved, old = new - h, h
        h = new
        if np.abs(moved.real).max() < 1e-14 * scale and np.abs(moved.imag).max() <= turning:
            return f, h
        if step % 100 == 99:  # slow: a Newton step for the fixed point of the two normalisations, constants left alone
            k = np.exp(L + f[:, :, None] + h[:, None, :])
            turn = np.swapaxes(k * w[:, :, None], 1, 2) @ (k * w[:, None, :])
            h = old + np.linalg.solve(np.eye(L.shape[1]) - turn + w[:, None, :], moved[..., None])[..., 0]
    raise ArithmeticError("the alternate normalisations of this kernel are too slow for a reference")


def weights(map: Map, head: Head, x, at, X, w, potential=None):
    """Attention weights ``(B, m, n)`` (with the masses of the atoms in them)."""
    clock = map.clock(X.shape[1])
    L = logits(head, x, at, X, clock)
    seen = clock <= clock[at][:, None] if map.causal else np.ones(L.shape[1:], bool)
    if head.kind in UNNORMALISED:
        return np.where(seen, UNNORMALISED[head.kind](np.where(seen, L, 0)), 0) * w[:, None, :]
    if head.kind in SCORES and head.par["sink"] is not None:
        p = head.par
        count = len(np.unique(clock)) if p["length"] is None else p["length"]
        with np.errstate(divide="ignore"):
            rest = np.full((*L.shape[:2], 1), p["sink"] - np.log(count), dtype=L.dtype)
            return softmax(np.concatenate([L + np.log(w)[:, None, :], rest], axis=2))[:, :, :-1]
    if head.kind == "sinkhorn":
        L = L + (sinkhorn(L, w)[1] if potential is None else potential)[:, None, :]
    return softmax(np.where(seen, L + np.log(w)[:, None, :], -np.inf))


def gamma(map: Map, x, at, X, w, potentials=None):
    """``Gamma_mu`` at x: ``(B, m, e)``."""
    total = 0.0 if map.bias is None else np.array(map.bias)
    for k, head in enumerate(map.heads):
        P = weights(map, head, x, at, X, w, None if potentials is None else potentials[k])
        total = total + np.einsum("bij,bje->bie", P, head.values(X)) + head.bias()
    return total if map.gate is None else total * UNNORMALISED["sigmoid"](x @ map.gate[0].T + map.gate[1] + 0j)


def image(map: Map, X, w):
    """``f(X)``, ``(B, n, e)``."""
    return gamma(map, X, np.arange(X.shape[1]), X, w)


def along(map: Map, X, w, eps):
    """``D f(X) eps``, ``(B, n, e)``."""
    size = np.abs(eps).max(axis=(1, 2), keepdims=True)
    size = np.where(size > 0, size, 1.0)
    return image(map, X + 1j * STEP * (eps / size), w).imag / STEP * size


def jacobian(map: Map, X, w):
    """``(B, n, e, n, d)``."""
    B, n, d = X.shape
    Y = X[:, None] + 1j * STEP * np.eye(n * d).reshape(1, n * d, n, d)
    out = image(map, Y.reshape(-1, n, d), np.repeat(w, n * d, axis=0)).imag / STEP
    return np.moveaxis(out.reshape(B, n * d, n, -1), 1, -1).reshape(B, n, -1, n, d)


def field_jacobian(map: Map, x, at, X, w):
    """``D_x Gamma_mu(x)``, ``(B, m, e, d)``: the measure stays where it is."""
    (B, m, d), kept = x.shape, []
    for head in map.heads:
        h = sinkhorn(logits(head, X, np.arange(X.shape[1]), X), w)[1] if head.kind == "sinkhorn" else None
        kept.append(None if h is None else np.repeat(h, d, axis=0))
    y = x[:, None] + 1j * STEP * np.eye(d)[None, :, None, :]
    out = gamma(map, y.reshape(B * d, m, d), at, np.repeat(X, d, axis=0), np.repeat(w, d, axis=0), kept).imag / STEP
    return np.moveaxis(out.reshape(B, d, m, -1), 1, -1)


# --- norms, from below ---------------------------------------------------------------------------------------------------


def mean_norm(eps, w, p):
    """``(sum_i w_i |eps_i|^p)^{1/p}`` of ``(B, n, k)``."""
    size = np.linalg.norm(eps, axis=-1)
    if np.isinf(p):
        return size.max(-1)
    top = np.maximum(size.max(-1), 1e-300)
    return top * ((w * (size / top[:, None]) ** p).sum(-1)) ** (1 / p)


def operator_norm(J, w, p, rounds=25, starts=2):
    """A value from below of the norm of J on ``L^p(w)``, and a direction that attains it; exact for p = 2."""
    B, n, e, _, d = J.shape
    if p == 2:
        s = np.sqrt(w)
        M = (J * s[:, :, None, None, None] / s[:, None, None, :, None]).reshape(B, n * e, n * d)
        _, sigma, Vt = np.linalg.svd(M, full_matrices=False)
        return sigma[:, 0], Vt[:, 0].reshape(B, n, d) / s[:, :, None]
    if p == 1:  # a share of one atom moves
        blocks = np.moveaxis(J * (w[:, :, None, None, None] / w[:, None, None, :, None]), 3, 1)
        value, u = sum_of_norms(blocks, rounds, starts)
        best, eps = value.argmax(1), np.zeros((B, n, d))
        eps[np.arange(B), best] = u[np.arange(B), best]
        return value.max(1), eps
    if np.isinf(p):  # one image decides: the dual of its row
        blocks = np.transpose(J, (0, 1, 3, 4, 2))
        value, u = sum_of_norms(blocks, rounds, starts)
        best = value.argmax(1)
        back = np.einsum("bjde,be->bjd", blocks[np.arange(B), best], u[np.arange(B), best])
        return value.max(1), back / np.maximum(np.linalg.norm(back, axis=-1, keepdims=True), 1e-300)
    return _power(J, w, p, rounds)


def sum_of_norms(blocks, rounds=25, starts=2):
    """``max_{|u| = 1} sum_k |B_k u|`` for ``(..., k, r, c)`` by the fixed point that never falls, from singular vectors."""
    flat = blocks.reshape(*blocks.shape[:-3], -1, blocks.shape[-1])
    top = np.linalg.svd(flat, full_matrices=False)[2]
    best, where = np.full(blocks.shape[:-3], -1.0), None
    for start in range(min(starts, top.shape[-2])):
        u = top[..., start, :]
        for _ in range(rounds):
            y = np.einsum("...krc,...c->...kr", blocks, u)
            size = np.linalg.norm(y, axis=-1)
            g = np.einsum("...krc,...kr->...c", blocks, y / np.maximum(size, 1e-300)[..., None])
            length = np.linalg.norm(g, axis=-1, keepdims=True)
            u = np.where(length > 0, g / np.maximum(length, 1e-300), u)
        value = np.linalg.norm(np.einsum("...krc,...c->...kr", blocks, u), axis=-1).sum(-1)
        where = u if where is None else np.where((value > best)[..., None], u, where)
        best = np.maximum(best, value)
    return best, where


def _power(J, w, p, rounds):
    """The nonlinear power method for the norm on ``L^p(w)``: every iterate is a value from below."""
    q = p / (p - 1)
    x = operator_norm(J, w, 2)[1]
    best, where = np.zeros(len(J)), x
    for _ in range(rounds):
        x = x / np.maximum(mean_norm(x, w, p), 1e-300)[:, None, None]
        y = np.einsum("biejd,bjd->bie", J, x)
        value = mean_norm(y, w, p)
        where = np.where((value > best)[:, None, None], x, where)
        best = np.maximum(best, value)
        r = np.linalg.norm(y, axis=-1, keepdims=True)
        r = np.maximum(r / np.maximum(r.max(1, keepdims=True), 1e-300), 1e-60)
        y = y / np.maximum(np.abs(y).max((1, 2), keepdims=True), 1e-300)
        g = np.einsum("biejd,bie->bjd", J, w[:, :, None] * y * r ** (p - 2)) / w[:, :, None]
        s = np.linalg.norm(g, axis=-1, keepdims=True)
        s = np.maximum(s / np.maximum(s.max(1, keepdims=True), 1e-300), 1e-60)
        x = g / np.maximum(np.abs(g).max((1, 2), keepdims=True), 1e-300) * s ** (q - 2)
    return best, where


def local_constant(map: Map, X, w, p):
    """Values from below of the W_p constant at each configuration, with their directions."""
    return operator_norm(jacobian(map, X, w), w, p)


# --- distances -----------------------------------------------------------------------------------------------------------


def orders(n: int, causal: bool) -> Iterable[tuple[int, ...]]:
    """The matchings of n equal atoms; a sequence has one."""
    return [tuple(range(n))] if causal else itertools.permutations(range(n))


def distance(X, Y, p, causal=False):
    """``W_p`` of n equal atoms (conditional for sequences), by all permutations."""
    D = np.linalg.norm(X[:, None] - Y[None], axis=-1)
    n, rows = len(X), np.arange(len(X))
    if np.isinf(p):
        return min(D[rows, list(s)].max() for s in orders(n, causal))
    top = max(D.max(), 1e-300)
    return top * min(((D[rows, list(s)] / top) ** p).mean() for s in orders(n, causal)) ** (1 / p)
