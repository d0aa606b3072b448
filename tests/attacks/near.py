"""Attacks on the certificates near given tokens: pairs that stretch more inside the ball, for heads and for blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath as mp
import numpy as np
from definitions import image
from exact import exact, inner, masses, minus, plus, times
from exact import image as exact_image
from outcomes import Outcome, asked, attempt, settled
from problems import SOFTMAX, problem

import otattn as oa

CLIMBS = 6
STEPS = 12
Exact = Callable[[list], list]


def climbed(function: Any, value: Callable[[Any, Any], float], X, r: float, rng, both: bool) -> tuple[float, Any, Any]:
    """The largest ``|f(Y) - f(Z)| / |Y - Z|`` that ascent finds for Y in the ball around X, Z = X or (``both``) in it too."""
    best: tuple[float, Any, Any] = (0.0, X, X)
    for start in range(CLIMBS):
        Z = X.copy()
        if both and start % 2:
            D = rng.standard_normal(X.shape)
            Z = X + r * rng.random() * D / np.linalg.norm(D)
        J = function.jacobian(Z).to_dense().reshape(-1, X.size)
        D = (
            np.linalg.svd(J)[2][0]
            if start < 2
            else rng.standard_normal(X.size) * np.repeat(rng.random(len(X)) ** 4, X.shape[1])
        )
        D = D.reshape(X.shape) * (-1.0) ** (start % 2)
        for k in range(STEPS):
            size = r * (1.0 if k % 3 else 10 ** rng.uniform(-3, 0))
            Y = _inside(X, Z + size * D / max(np.linalg.norm(D), 1e-300), r)
            if not np.linalg.norm(Y - Z) > 1e-6 * r:
                break
            found = value(Y, Z)
            if found > best[0]:
                best = (found, Y, Z)
            # the gradient of the difference of the images, by the library's own Jacobian: it only points the way
            F = function.on_tokens(Y) - function.on_tokens(Z)
            D = function.jacobian(Y).rmatvec(F.ravel()).reshape(X.shape)
    return best


def _inside(X, Y, r):
    D = Y - X
    size = np.linalg.norm(D)
    return Y if size <= r * (1 - 1e-12) else X + D * (r * (1 - 1e-12) / size)


def _sure(f: Exact, Y, Z) -> Any:
    a, b = f(exact(Y)), f(exact(Z))
    moved, apart = (
        mp.sqrt(mp.fsum(t * t for x, y in zip(p, q, strict=True) for t in minus(x, y)))
        for p, q in ((a, b), (exact(Y), exact(Z)))
    )
    return moved / apart


def _attacked(name: str, kind: str, ours: Any, X, bound: Any, f: Exact, value, rng, about) -> Outcome:
    r = float(np.sqrt(len(X)) * bound.domain.radius)
    found, Y, Z = climbed(ours, value, X, r, rng, bound.quantity == "lipschitz")
    return settled(
        name, kind, bound.value, found, CLIMBS * STEPS, lambda: _sure(f, Y, Z), (about, X.tolist(), r, bound)
    )


def heads(name: str, call: Callable[..., Any]) -> Callable[[np.random.Generator], Outcome]:
    """``call(map, tokens, size, rng)`` gives the certificate; ``size`` is that of the tokens."""

    def run(rng: np.random.Generator) -> Outcome:
        if rng.random() < 0.4:
            return blocks(name, call, rng)
        q = problem(rng, kinds=SOFTMAX, heads=rng.random() < 0.5, masked=None, any_measure=False)
        X = q.region.points(rng.standard_normal((q.n, q.region.size)))
        w = np.full(q.n, 1.0 / q.n)

        def value(Y, Z):
            F = image(q.map, np.stack([Y, Z]), np.stack([w, w]))
            return float(np.linalg.norm(F[0] - F[1]) / np.linalg.norm(Y - Z))

        def body() -> Outcome:
            bound = asked(lambda: call(q.ours, X, float(np.abs(X).max()) + 1e-3, rng))
            return _attacked(name, q.kind, q.ours, X, bound, lambda x: exact_image(q.map, x, masses(w)), value, rng, q)

        return attempt(name, body, q.kind, q)

    return run


def _block(rng, d: int) -> tuple[Any, Exact]:
    """A transformer block of the library, and the same in exact arithmetic."""
    gains = [np.exp(0.3 * rng.standard_normal(d)) for _ in "ab"]
    biases = [rng.standard_normal(d) for _ in "ab"]
    eps = float(10 ** rng.uniform(-6, -1))
    center = rng.random() < 0.5
    norms = [
        oa.LayerNorm(g, b, eps=eps) if center else oa.RMSNorm(g, eps=eps) for g, b in zip(gains, biases, strict=True)
    ]
    A, V, W = rng.standard_normal((d, d)), rng.standard_normal((2, d)), rng.standard_normal((d, 2))
    causal, pre = bool(rng.random() < 0.4), bool(rng.random() < 0.5)
    attention: Any = oa.MultiHeadAttention([oa.SoftmaxAttention(A, V)], [W])
    attention = oa.MaskedAttention(attention) if causal else attention
    activation = str(rng.choice(["gelu", "silu", "tanh", "relu", "identity"]))
    U, b, down = rng.standard_normal((5, d)), rng.standard_normal(5), rng.standard_normal((d, 5))
    mlp = oa.MLP(U, b, down, activation=activation)
    ours = oa.TransformerBlock(attention, mlp, attention_norm=norms[0], mlp_norm=norms[1], pre_norm=pre)

    def norm_of(k: int, x: list) -> list:
        g, c = exact(gains[k]), exact(biases[k] if center else np.zeros(d))
        mean = mp.fsum(x) / d if center else mp.mpf(0)
        y = [a - mean for a in x]
        s = mp.sqrt(mp.fsum(a * a for a in y) / d + mp.mpf(eps))
        return [p * a / s + q for p, a, q in zip(g, y, c, strict=True)]

    def attend(X: list) -> list:
        out = []
        for i, x in enumerate(X):
            seen = X[: i + 1] if causal else X
            s = [inner(times(exact(A), x), y) for y in seen]
            p = [mp.exp(a - max(s)) for a in s]
            mean = [mp.fsum(a * y[k] for a, y in zip(p, seen, strict=True)) / mp.fsum(p) for k in range(d)]
            out.append(times(exact(W), times(exact(V), mean)))
        return out

    phi = {
        "gelu": lambda s: s * mp.ncdf(s),
        "silu": lambda s: s / (1 + mp.exp(-s)),
        "tanh": mp.tanh,
        "relu": lambda s: max(s, mp.mpf(0)),
        "identity": lambda s: s,
    }[activation]

    def feed(x: list) -> list:
        return times(exact(down), [phi(s) for s in plus(times(exact(U), x), exact(b))])

    def f(X: list) -> list:
        for k, part in enumerate((attend, lambda Z: [feed(z) for z in Z])):
            moved = part([norm_of(k, x) for x in X]) if pre else part(X)
            X = [plus(x, y) for x, y in zip(X, moved, strict=True)]
            X = X if pre else [norm_of(k, x) for x in X]
        return X

    return ours, f


def blocks(name: str, call: Callable[..., Any], rng: np.random.Generator) -> Outcome:
    """One or two transformer blocks, a residual step, or one of their parts."""
    d, n = int(rng.integers(2, 5)), int(rng.integers(1, 5))
    parts = [_block(rng, d) for _ in range(int(rng.integers(1, 3)))]
    X = rng.standard_normal((n, d)) * 10 ** rng.uniform(-0.5, 1)
    ours = parts[0][0] if len(parts) == 1 else oa.Compose(*(m for m, _ in parts))

    def f(x: list) -> list:
        for _, g in parts:
            x = g(x)
        return x

    def value(Y, Z):
        return float(np.linalg.norm(ours.on_tokens(Y) - ours.on_tokens(Z)) / np.linalg.norm(Y - Z))

    def body() -> Outcome:
        bound = asked(lambda: call(ours, X, float(np.abs(X).max()), rng))
        return _attacked(name, "blocks", ours, X, bound, f, value, rng, ours)

    return attempt(name, body, "blocks", ours)


def _certify(function: Any, X, size: float, rng) -> Any:
    kind = str(rng.choice(["pairs", "constant"]))
    return oa.certify(function, X, radius=size * 10 ** rng.uniform(-5, -1.5), kind=kind)


def _radius(function: Any, X, size: float, rng) -> Any:
    kind = str(rng.choice(["pairs", "constant"]))
    return oa.certified_radius(function, X, factor=float(rng.choice([1.1, 2.0, 10.0])), kind=kind, tol=0.1)


NEAR = {"certify": heads("certify", _certify), "certified_radius": heads("certified_radius", _radius)}
