"""The same definitions in 100 digits: what a violation is confirmed with, so that no rounding of ours is called a violation.

The floats of the map and of the domain are exact numbers here. Plain lists of mpmath numbers; slow, and short.
"""

from __future__ import annotations

import mpmath as mp
import numpy as np
from definitions import SCORES, Map, orders, sees

DIGITS = 100
NUDGE = mp.mpf(10) ** -35
"""Half width of the central difference: its square is the relative error of a derivative."""


def digits():
    """A context with enough digits."""
    return mp.workdps(DIGITS)


def exact(a):
    """Nested lists of exact numbers."""
    return [exact(row) for row in a] if np.ndim(a) else mp.mpf(float(a))


def times(M, x):
    return [mp.fsum(a * b for a, b in zip(row, x, strict=True)) for row in M]


def inner(x, y):
    return mp.fsum(a * b for a, b in zip(x, y, strict=True))


def norm(x):
    return mp.sqrt(mp.fsum(a * a for a in x))


def minus(x, y):
    return [a - b for a, b in zip(x, y, strict=True)]


def plus(x, y):
    return [a + b for a, b in zip(x, y, strict=True)]


def _turn(z, place, p):
    r = p["rotary_dim"]
    out = list(z)
    for t in range(r // 2):
        i, j = (2 * t, 2 * t + 1) if p["layout"] == "adjacent" else (t, t + r // 2)
        # the frequencies are floats of the map
        angle = place * mp.mpf(float(p["base"] ** (-(2.0 * t) / r)))
        out[i], out[j] = z[i] * mp.cos(angle) - z[j] * mp.sin(angle), z[i] * mp.sin(angle) + z[j] * mp.cos(angle)
    return out


def _normed(z, norm):
    if norm is None:
        return z
    gain, shift, eps, centred = norm
    middle = mp.fsum(z) / len(z) if centred else mp.mpf(0)
    y = [a - middle for a in z]
    root = mp.sqrt(mp.fsum(a * a for a in y) / len(y) + mp.mpf(float(eps)))
    return [mp.mpf(float(g)) * a / root + mp.mpf(float(b)) for g, a, b in zip(gain, y, shift, strict=True)]


def _feature(p, name, x, place):
    z = _normed(
        plus(times(exact(p[name]), x), exact(p["b" + name.lower()])), p["query_norm" if name == "Q" else "key_norm"]
    )
    out, r = list(z), len(p["omega"])
    for t, w in enumerate(p["omega"]):
        angle = place * mp.mpf(float(w))
        out[t] = z[t] * mp.cos(angle) - z[t + r] * mp.sin(angle)
        out[t + r] = z[t] * mp.sin(angle) + z[t + r] * mp.cos(angle)
    return out


def _composed(head, x, at, X, clock, w):
    """Weights of composed logits; those of a sink left out."""
    p, rows = head.par, []
    place = [_place(p, j, clock) for j in range(len(X))]
    keys = [_feature(p, "K", y, place[j]) for j, y in enumerate(X)]
    count = len(set(clock)) if p["length"] is None else mp.mpf(float(p["length"]))
    for i, z in zip(at, x, strict=True):
        q = _feature(p, "Q", z, place[i])
        terms = {} if p["sink"] is None else {-1: mp.exp(mp.mpf(float(p["sink"]))) / count}
        for j in range(len(X)):
            apart = place[j] - place[i]
            if not sees(p, float(apart)):
                continue
            s = mp.mpf(float(p["scale"])) * inner(q, keys[j])
            if p["cap"] is not None:
                s = mp.mpf(float(p["cap"])) * mp.tanh(s / mp.mpf(float(p["cap"])))
            s -= mp.mpf(float(p["slope"])) * abs(apart)
            if p["table"] is not None:
                m = len(p["table"]) // 2
                s += mp.mpf(float(p["table"][max(-m, min(m, round(float(apart)))) + m]))
            terms[j] = w[j] * mp.exp(s)
        total = mp.fsum(terms.values())
        rows.append([terms.get(j, mp.mpf(0)) / total for j in range(len(X))])
    return rows


def _queries(head, x, at, clock):
    """With logits ``<q_i, k_j>`` (minus the squared distance for L2); x stands at the tokens ``at`` of n."""
    p = head.par
    if head.kind == "l2":
        return [times(exact(p["Q"]), y) for y in x]
    if head.kind in ("qkv", "rotary"):
        s = mp.mpf(float(p["scale"]))
        q = [[s * a for a in plus(times(exact(p["Q"]), y), exact(p["bq"]))] for y in x]
        return q if head.kind == "qkv" else [_turn(z, _place(p, i, clock), p) for i, z in zip(at, q, strict=True)]
    q = [times(exact(p["A"]), y) for y in x]
    return [plus(z, exact(p["c"])) for z in q] if "c" in p else q


def _keys(head, X, clock):
    p = head.par
    if head.kind == "l2":
        return [times(exact(p["K"]), y) for y in X]
    if head.kind in ("qkv", "rotary"):
        k = [plus(times(exact(p["K"]), y), exact(p["bk"])) for y in X]
        return k if head.kind == "qkv" else [_turn(z, _place(p, i, clock), p) for i, z in enumerate(k)]
    return X


def _place(p, i, clock):
    return clock[i] * (len(set(clock)) if p["length"] is None else mp.mpf(float(p["length"])))


def _clock(map, n):
    return [mp.mpf(i + 1) / n for i in range(n)] if map.times is None else exact(map.times)


UNNORMALISED = {
    "linear": lambda s: s,
    "relu": lambda s: s if s > 0 else mp.mpf(0),
    "exponential": mp.exp,
    "sigmoid": lambda s: 1 / (1 + mp.exp(-s)),
}


def weights(map: Map, head, x, at, X, w):
    """Attention weights of the queries x, a row each; 0 for atoms that are masked."""
    clock = _clock(map, len(X))
    if head.kind in SCORES:
        return _composed(head, x, at, X, clock, w)
    keys, rows = _keys(head, X, clock), []
    if head.kind == "sinkhorn":  # softmax with the column potentials of the measure
        w = [a * b for a, b in zip(w, _scalings(_queries(head, X, range(len(X)), clock), keys, w), strict=True)]
    for i, q in zip(at, _queries(head, x, at, clock), strict=True):
        seen = [j for j in range(len(X)) if not map.causal or clock[j] <= clock[i]]
        if head.kind == "l2":
            s = [-mp.fsum(a * a for a in minus(q, keys[j])) for j in seen]
        else:
            s = [inner(q, keys[j]) for j in seen]
        if head.kind in UNNORMALISED:
            P = [w[j] * UNNORMALISED[head.kind](a) for j, a in zip(seen, s, strict=True)]
        else:
            top = max(s)
            P = [w[j] * mp.exp(a - top) for j, a in zip(seen, s, strict=True)]
            total = mp.fsum(P)
            P = [a / total for a in P]
        row = dict(zip(seen, P, strict=True))
        rows.append([row.get(j, mp.mpf(0)) for j in range(len(X))])
    return rows


def _scalings(queries, keys, w):
    """``v`` with ``sum_i w_i u_i k_ij v_j = 1`` for all j and the same over j, ``k = exp`` of the logits."""
    n, W = len(w), mp.diag(w)
    K = mp.matrix([[mp.exp(inner(q, k)) for k in keys] for q in queries])
    v = mp.ones(n, 1)
    for step in range(1000):
        u = (K * W * v).apply(lambda a: 1 / a)
        new = (K.T * W * u).apply(lambda a: 1 / a)
        moved = mp.matrix([mp.log(a / b) for a, b in zip(new, v, strict=True)])
        old, v = v, new
        if mp.norm(moved, mp.inf) < mp.mpf(10) ** (8 - DIGITS):
            return list(v)
        if step > 30:  # a Newton step for the fixed point of the two normalisations, constants left alone
            k = mp.diag(u) * K * mp.diag(v)
            dh = mp.lu_solve(mp.eye(n) - k.T * W * k * W + mp.ones(n, 1) * mp.matrix(w).T, moved)
            v = mp.matrix([a * mp.exp(b) for a, b in zip(old, dh, strict=True)])
    raise ArithmeticError("a kernel that is not normalised in 1,000 steps")


def gamma(map: Map, x, at, X, w):
    """``Gamma_mu`` at the rows of x, which stand at the tokens ``at``; all lists of exact numbers."""
    out = [[] if map.bias is None else exact(map.bias) for _ in x]
    for head in map.heads:
        values = [times(exact(head.par["V"]), y) for y in X]
        if "b" in head.par:
            values = [plus(y, exact(head.par["b"])) for y in values]
        if head.kind in SCORES:
            values = [_normed(y, head.par["value_norm"]) for y in values]
        for M in head.outputs:
            values = [times(exact(M), y) for y in values]
        for i, P in enumerate(weights(map, head, x, at, X, w)):
            mean = [mp.fsum(p * v for p, v in zip(P, column, strict=True)) for column in zip(*values, strict=True)]
            out[i] = plus(out[i], mean) if out[i] else mean
    if map.gate is not None:
        for i, y in enumerate(x):
            s = plus(times(exact(map.gate[0]), y), exact(map.gate[1]))
            s = s * len(out[i]) if len(s) == 1 else s
            out[i] = [a / (1 + mp.exp(-b)) for a, b in zip(out[i], s, strict=True)]
    return out


def image(map: Map, X, w):
    """``f(X)``."""
    return gamma(map, X, range(len(X)), X, w)


def masses(w):
    """Floats that are proportional to weights, as weights of sum one."""
    w = exact(w)
    total = mp.fsum(w)
    return [a / total for a in w]


def mean_norm(rows, w, p):
    sizes = [norm(r) for r in rows]
    if np.isinf(p):
        return max(sizes)
    p = mp.mpf(float(p))
    return mp.fsum(a * s**p for a, s in zip(w, sizes, strict=True)) ** (1 / p)


def stretch(map: Map, X, w, eps, p):
    """``||D f eps|| / ||eps||`` in ``L^p(w)``: never above the constant of the map; X, w exact, eps floats."""
    eps = exact(np.asarray(eps) / np.abs(eps).max())
    ends = [
        image(map, [[a + s * NUDGE * b for a, b in zip(x, e, strict=True)] for x, e in zip(X, eps, strict=True)], w)
        for s in (1, -1)
    ]
    moved = [[c / (2 * NUDGE) for c in minus(a, b)] for a, b in zip(*ends, strict=True)]
    return mean_norm(moved, w, p) / mean_norm(eps, w, p)


def field_stretch(map: Map, i, X, w, u):
    """``|D_x Gamma_mu(x_i) u| / |u|`` for floats u."""
    u = exact(u)
    ends = [gamma(map, [[a + s * NUDGE * b for a, b in zip(X[i], u, strict=True)]], [i], X, w)[0] for s in (1, -1)]
    return norm(minus(*ends)) / (2 * NUDGE * norm(u))


def distance(X, Y, p, causal=False):
    """``W_p`` between n equal atoms, by all permutations."""
    n = len(X)
    D = [[norm(minus(x, y)) for y in Y] for x in X]
    if np.isinf(p):
        return min(max(D[i][s[i]] for i in range(n)) for s in orders(n, causal))
    p = mp.mpf(float(p))
    return min(mp.fsum(D[i][s[i]] ** p for i in range(n)) / n for s in orders(n, causal)) ** (1 / p)
