"""The feed-forward part: the activations' definitions and derivatives, plain and gated."""

import math

import numpy as np
import pytest
import synthetic as syn

from otattn.attention import MLP
from otattn.models import FeedForward
from otattn.models.experts import Experts

DEFINITIONS = {
    "gelu": syn.gelu,
    "gelu_tanh": syn.gelu_tanh,
    "gelu_new": syn.gelu_tanh,
    "silu": syn.silu,
    "relu": lambda s: max(s, 0.0),
    "tanh": math.tanh,
}


@pytest.mark.parametrize("activation", DEFINITIONS)
def test_activations(activation: str) -> None:
    phi = FeedForward([[1.0]], [[1.0]], activation=activation)
    s = np.linspace(-6.0, 6.0, 41)
    values = phi.on_tokens(s[:, None]).ravel()
    np.testing.assert_allclose(values, [DEFINITIONS[activation](x) for x in s], atol=1e-14)
    extreme = np.array([[1e200], [-1e200], [1e4], [-1e4]])
    assert np.isfinite(phi.on_tokens(extreme)).all()
    slopes = phi.field_jacobian(extreme, extreme).ravel()
    expected = [0.0, 0.0] * 2 if activation == "tanh" else [1.0, 0.0] * 2
    np.testing.assert_allclose(slopes, expected, atol=1e-12)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "tanh"])
@pytest.mark.parametrize("gated", [False, True])
def test_derivatives(activation: str, gated: bool) -> None:
    rng = np.random.default_rng(1)
    U, W, G = rng.normal(size=(5, 3)), rng.normal(size=(2, 5)), rng.normal(size=(5, 3))
    options = {"gate": G} if gated else {"up_bias": rng.normal(size=5), "down_bias": rng.normal(size=2)}
    part = FeedForward(U, W, activation=activation, **options)
    X, v, g = rng.normal(size=(4, 3)), rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    h = 1e-4
    f = [part.on_tokens(X + s * h * v) for s in (1, -1, 2, -2)]
    J = part.jacobian(X)
    # fourth order differences: truncation h^4
    np.testing.assert_allclose(J.jvp(v), (8 * (f[0] - f[1]) - f[2] + f[3]) / (12 * h), atol=1e-10)
    assert np.sum(J.jvp(v) * g) == pytest.approx(np.sum(v * J.vjp(g)), rel=1e-12)
    np.testing.assert_allclose(J.to_dense() @ v.ravel(), J.jvp(v).ravel(), atol=1e-13)
    D = part.field_jacobian(X, X)
    np.testing.assert_allclose(np.einsum("ned,nd->ne", D, v), J.jvp(v), atol=1e-13)


def test_plain_is_the_two_layer_perceptron() -> None:
    rng = np.random.default_rng(2)
    U, b, W, c = rng.normal(size=(5, 3)), rng.normal(size=5), rng.normal(size=(3, 5)), rng.normal(size=3)
    X = rng.normal(size=(6, 3))
    for activation in ("gelu", "relu", "silu", "tanh"):
        ours = FeedForward(U, W, activation=activation, up_bias=b, down_bias=c).on_tokens(X)
        np.testing.assert_allclose(ours, MLP(U, b, W, activation=activation, output_bias=c).on_tokens(X), atol=1e-14)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="activation must be one of"):
        FeedForward([[1.0]], [[1.0]], activation="selu")
    with pytest.raises(ValueError, match="gate must have shape"):
        FeedForward(np.ones((2, 3)), np.ones((3, 2)), activation="silu", gate=np.ones((3, 2)))
    with pytest.raises(ValueError, match="down must have shape"):
        FeedForward(np.ones((2, 3)), np.ones((3, 3)), activation="silu")


def experts(rng: np.random.Generator, limit: float = 1.0) -> Experts:
    E, d, h = 4, 3, 5
    shapes = {"gate_up": (E, d, 2 * h), "gate_up_bias": (E, 2 * h), "down": (E, h, d), "down_bias": (E, d)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return Experts(rng.normal(size=(E, d)), rng.normal(size=E), **arrays, top=2, alpha=1.7, limit=limit)


def test_experts_are_their_definition() -> None:
    rng = np.random.default_rng(0)
    part, X = experts(rng), 2.0 * rng.normal(size=(9, 3))
    expected = []
    for x in X:
        logits = part.router @ x + part.router_bias
        chosen = sorted(range(4), key=lambda e: -logits[e])[:2]
        shares = [math.exp(logits[e]) for e in chosen]
        total = np.zeros(3)
        for e, share in zip(chosen, shares, strict=True):
            hidden = []
            z = x @ part.gate_up[e] + part.gate_up_bias[e]
            for i in range(5):
                g, u = min(z[2 * i], 1.0), max(-1.0, min(z[2 * i + 1], 1.0))
                hidden.append((u + 1.0) * g / (1.0 + math.exp(-1.7 * g)))
            total += share / sum(shares) * (np.array(hidden) @ part.down[e] + part.down_bias[e])
        expected.append(total)
    np.testing.assert_allclose(part.on_tokens(X), expected, atol=1e-13)
    assert len({tuple(np.argsort(-(X @ part.router.T + part.router_bias), axis=1)[i, :2]) for i in range(9)}) > 2


def test_experts_have_derivatives() -> None:
    rng = np.random.default_rng(1)
    part, X, v, g = experts(rng, limit=2.5), rng.normal(size=(9, 3)), rng.normal(size=(9, 3)), rng.normal(size=(9, 3))
    J, h = part.jacobian(X), 1e-6
    slope = (part.on_tokens(X + h * v) - part.on_tokens(X - h * v)) / (2 * h)
    np.testing.assert_allclose(J.jvp(v), slope, atol=1e-7 * np.abs(slope).max())
    assert np.sum(J.jvp(v) * g) == pytest.approx(np.sum(v * J.vjp(g)), rel=1e-12)
    np.testing.assert_allclose(np.einsum("ned,nd->ne", part.field_jacobian(X, X), v), J.jvp(v), atol=1e-12)


def test_experts_refuse_what_does_not_fit() -> None:
    part = experts(np.random.default_rng(0))
    names = ("router", "router_bias", "gate_up", "gate_up_bias", "down", "down_bias")
    arrays = {name: getattr(part, name) for name in names}
    options = {"top": 2, "alpha": 1.7, "limit": 7.0}
    for wrong in ({"gate_up": part.gate_up[:, :, :8]}, {"down": part.down[:3]}, {"top": 5}, {"alpha": 0.0}):
        with pytest.raises(ValueError, match="must"):
            Experts(**(arrays | options | wrong))
