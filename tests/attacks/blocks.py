"""Attacks on whole blocks: random compositions, steep tokens in their domain, near and far pairs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from exact import digits
from outcomes import Outcome, asked, attempt, settled

import otattn as oa

sys.path.append(str(Path(__file__).parents[1] / "stability"))
from exact_images import exact_ratio

Rng = np.random.Generator
TRIES = 12
ORDERS = (2.0, 2.0, 1.0, np.inf)


def token_map(rng: Rng, d: int) -> oa.AttentionMap:
    kind = int(rng.integers(4))
    gain = rng.standard_normal(d) * 10 ** rng.uniform(-1, 1)
    if kind == 0:
        return oa.LayerNorm(gain, rng.standard_normal(d), eps=10 ** rng.uniform(-4, 0))
    if kind == 1:
        return oa.RMSNorm(gain, eps=10 ** rng.uniform(-4, 0))
    h, activation = int(rng.integers(1, 4)), str(rng.choice(["gelu", "relu", "silu", "tanh"]))
    U, W = rng.standard_normal((h, d)), rng.standard_normal((d, h))
    if kind == 2:
        return oa.MLP(U, rng.standard_normal(h), W, activation=activation, output_bias=rng.standard_normal(d))
    gate = rng.standard_normal((h, d)) if rng.random() < 0.5 else None
    return oa.attention.FeedForward(U, W, activation=activation, gate=gate, up_bias=rng.standard_normal(h))


def attention(rng: Rng, d: int, causal: bool) -> oa.AttentionMap:
    A, V = rng.standard_normal((2, d, d))
    kind = int(rng.integers(4))
    if causal and kind == 0:
        return oa.RotaryAttention(A, A.T, V, layout="half", rotary_dim=d - d % 2) if d > 1 else attention(rng, d, True)
    one = oa.SoftmaxAttention(A, V, bias=rng.standard_normal(d)) if kind < 3 else oa.L2Attention(A, V, V)
    if kind == 1:
        two = oa.SoftmaxAttention(V, A, value_bias=rng.standard_normal(d))
        one = oa.MultiHeadAttention([one, two], [rng.standard_normal((d, d)) for _ in range(2)])
    return oa.MaskedAttention(one) if causal else one


def block(rng: Rng, d: int, causal: bool) -> oa.AttentionMap:
    """A composition of one to three parts, some of them residual."""
    parts: list[oa.AttentionMap] = []
    for _ in range(int(rng.integers(1, 4))):
        part = attention(rng, d, causal) if rng.random() < 0.5 else token_map(rng, d)
        if rng.random() < 0.5:
            inner = oa.Compose(token_map(rng, d), part) if rng.random() < 0.5 else part
            part = oa.Residual(inner, scale=float(rng.choice([1.0, -0.5, 2.0])))
        parts.append(part)
    if len(parts) == 1 and not isinstance(parts[0], oa.Residual):
        parts.append(token_map(rng, d))
    return oa.Compose(*parts)


def domain(rng: Rng, d: int) -> Any:
    radius = 10 ** rng.uniform(-2, 1)
    if rng.random() < 0.6:
        return oa.Ball(radius, d)
    return oa.Ellipsoid(radius * rng.standard_normal((d, d)), radius * 3 * rng.standard_normal(d))


def tokens(rng: Rng, region: Any, n: int, d: int) -> np.ndarray:
    """Anywhere in the domain, in its middle, near the singularity of the norms, or next to one another."""
    X = region.project(rng.standard_normal((n, d)) * 10 ** rng.uniform(-4, 1))
    kind = int(rng.integers(4))
    if kind == 1:
        X = region.project(10 ** rng.uniform(-4, 0) * rng.standard_normal((n, d)))
    elif kind == 2:  # nearly equal entries: where LayerNorm is steep
        X = region.project(rng.standard_normal((n, 1)) + 10 ** rng.uniform(-4, 0) * rng.standard_normal((n, d)))
    elif kind == 3:
        X = region.project(X[:1] + 1e-3 * rng.standard_normal((n, d)))
    return np.asarray(X)


def whole_block(rng: Rng) -> Outcome:
    """The bound against the steepest direction of the derivative (p = 2), and against pairs of sequences at every order."""
    name, d, n = "bounds.whole_block", int(rng.integers(1, 4)), int(rng.integers(1, 4))
    causal, p = bool(rng.random() < 0.4), float(rng.choice(ORDERS))
    F, region = block(rng, d, causal), domain(rng, d)
    kind = f"{'masked ' if causal else ''}block of {len(F.maps)}"

    def body() -> Outcome:
        bound = asked(lambda: oa.bounds.whole_block(F, domain=region, n=n, p=p)).value
        best, pair = 0.0, None
        for _ in range(TRIES):
            X = tokens(rng, region, n, d)
            with np.errstate(all="ignore"):
                Y = region.project(X + 10 ** rng.uniform(-6, 0) * steepest(F, X))
            if not np.linalg.norm(X - Y) > 1e-9 * (1.0 + np.abs(X).max()):
                continue
            value = float(ratio(F, X, Y, p))
            if value > best:
                best, pair = value, (X, Y)
        if pair is None:
            return Outcome(name, kind, "held", TRIES)
        X, Y = pair

        def sure() -> Any:
            with digits():
                return exact_ratio(F, X, Y, p)

        return settled(name, kind, bound, best, TRIES, sure, (F, region, n, p, X.tolist(), Y.tolist()))

    return attempt(name, body, kind, (F, region, n, p))


def steepest(F: oa.AttentionMap, X: np.ndarray) -> np.ndarray:
    """The right singular vector of the derivative."""
    return np.linalg.svd(F.jacobian(X).to_dense())[2][0].reshape(X.shape)


def ratio(F: oa.AttentionMap, X: np.ndarray, Y: np.ndarray, p: float) -> float:
    mu, nu = F.as_measure(X), F.as_measure(Y)
    distance = oa.conditional_wasserstein if F.causal else oa.wasserstein
    below = distance(mu, nu, p=p)
    return distance(F.pushforward(mu), F.pushforward(nu), p=p) / below if below > 0.0 else 0.0


BLOCKS = {"bounds.whole_block": whole_block}
