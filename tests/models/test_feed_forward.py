"""The feed-forward part: the activations' definitions and derivatives, plain and gated."""

import math

import numpy as np
import pytest
import synthetic as syn

from otattn.attention import MLP
from otattn.models import FeedForward

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
