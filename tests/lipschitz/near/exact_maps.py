"""Maps in mpmath along a line ``X + t D``, and their derivatives there by Taylor series: what the bounds near tokens are about."""

from __future__ import annotations

import mpmath as mp
import numpy as np

DIGITS = 40


def matrix(a):
    return mp.matrix(np.atleast_2d(np.asarray(a, dtype=float)).tolist())


def softmax(X, A, V, c, causal=False, W=None):
    """The tokens' images, rows of an mp matrix; A, V, c, W float arrays."""
    n = X.rows
    G = X * matrix(A).T
    out = mp.zeros(n, len(V))
    values = X * matrix(V).T
    for i in range(n):
        seen = range(i + 1 if causal else n)
        s = [mp.fsum((G[i, k] + mp.mpf(float(c[k]))) * X[j, k] for k in range(X.cols)) for j in seen]
        p = [mp.exp(a - max(s, key=mp.re)) for a in s]
        total = mp.fsum(p)
        for k in range(len(V)):
            out[i, k] = mp.fsum(a * values[j, k] for a, j in zip(p, seen, strict=True)) / total
    return out if W is None else out * matrix(W).T


def score(X, h, W=None):
    """A head with composed logits, a :class:`ScoreAttention` of a sequence."""
    n = X.rows
    length = n if h.length is None else mp.mpf(h.length)
    places = [length * i / n for i in range(1, n + 1)]
    q, k, v = (
        _feature(X, *(getattr(h, name) for name in names))
        for names in (
            ("Q", "query_bias", "query_norm"),
            ("K", "key_bias", "key_norm"),
            ("V", "value_bias", "value_norm"),
        )
    )
    if h.rotation is not None:
        q, k = (_turned(z, places, h.rotation.frequencies, h.rotation.layout) for z in (q, k))
    out = mp.zeros(n, v.cols)
    for i in range(n):
        terms = []
        for j in range(n):
            away = places[j] - places[i]
            if h.mask is not None and h.mask.hidden(np.array([float(places[i])]), np.array([float(places[j])]))[0, 0]:
                continue
            s = mp.mpf(float(h.scale)) * mp.fsum(q[i, t] * k[j, t] for t in range(q.cols))
            s = s if h.cap is None else mp.mpf(h.cap) * mp.tanh(s / mp.mpf(h.cap))
            if h.bias is not None:
                s -= mp.mpf(h.bias.slope) * abs(away)
                if h.bias.table is not None:
                    m = len(h.bias.table) // 2
                    s += mp.mpf(float(h.bias.table[min(max(int(mp.nint(away)), -m), m) + m]))
            terms.append((mp.exp(s), j))
        total = mp.fsum(p for p, _ in terms)
        total += 0 if h.sink is None else mp.exp(mp.mpf(h.sink)) * n / length
        for t in range(v.cols):
            out[i, t] = mp.fsum(p * v[j, t] for p, j in terms) / total
    return out if W is None else out * matrix(W).T


def _feature(X, M, bias, norm):
    z = X * matrix(M).T
    for i in range(z.rows) if bias is not None else ():
        for t in range(z.cols):
            z[i, t] += mp.mpf(float(bias[t]))
    if norm is None:
        return z
    z = layer_norm(z, norm.gain, norm.eps, norm.center)
    for i in range(z.rows) if norm.bias is not None else ():
        for t in range(z.cols):
            z[i, t] += mp.mpf(float(norm.bias[t]))
    return z


def _turned(z, places, frequencies, layout):
    out, r = z.copy(), len(frequencies)
    for i, place in enumerate(places):
        for t, f in enumerate(frequencies):
            a, b = (2 * t, 2 * t + 1) if layout == "adjacent" else (t, t + r)
            c, s = mp.cos(place * mp.mpf(float(f))), mp.sin(place * mp.mpf(float(f)))
            out[i, a], out[i, b] = c * z[i, a] - s * z[i, b], s * z[i, a] + c * z[i, b]
    return out


def layer_norm(X, gain, eps, center=True):
    out = X.copy()
    for i in range(X.rows):
        row = [X[i, k] for k in range(X.cols)]
        mean = mp.fsum(row) / X.cols if center else mp.mpf(0)
        s = mp.sqrt(mp.fsum((a - mean) ** 2 for a in row) / X.cols + mp.mpf(eps))
        for k in range(X.cols):
            out[i, k] = (row[k] - mean) / s * mp.mpf(float(gain[k]))
    return out


ACTIVATIONS = {
    "gelu": lambda s: s * (1 + mp.erf(s / mp.sqrt(2))) / 2,
    "silu": lambda s: s / (1 + mp.exp(-s)),
    "tanh": mp.tanh,
    "gelu_tanh": lambda s: s / (1 + mp.exp(-2 * mp.mpf(float(np.sqrt(2.0 / np.pi))) * (s + mp.mpf(0.044715) * s**3))),
}


def perceptron(X, U, b, W, activation, G=None):
    phi = ACTIVATIONS[activation]
    hidden = X * matrix(U).T
    gate = hidden if G is None else X * matrix(G).T
    for i in range(hidden.rows):
        for h in range(hidden.cols):
            s = hidden[i, h] + mp.mpf(float(b[h]))
            hidden[i, h] = phi(s) if G is None else phi(gate[i, h]) * s
    return hidden * matrix(W).T


def derivatives(f, X, D, order=3):
    """Norms of the first ``order`` derivatives of ``t -> f(X + t D)`` at 0, f on mp matrices."""
    with mp.workdps(DIGITS):
        x, d = matrix(X), matrix(D)
        h = mp.mpf(10) ** -8
        points = {k: f(x + k * h * d) for k in range(-3, 4)}
        # central differences of sixth and fourth order
        first = (45 * (points[1] - points[-1]) - 9 * (points[2] - points[-2]) + (points[3] - points[-3])) / (60 * h)
        second = (
            270 * (points[1] + points[-1])
            - 27 * (points[2] + points[-2])
            + 2 * (points[3] + points[-3])
            - 490 * points[0]
        ) / (180 * h**2)
        third = (-(points[3] - points[-3]) + 8 * (points[2] - points[-2]) - 13 * (points[1] - points[-1])) / (8 * h**3)
        return [float(mp.mnorm(M, "f")) for M in (first, second, third)][:order]
