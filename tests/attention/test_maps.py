"""Constructors, factors, heads, residuals, blocks: what each map is, and what it refuses."""

from typing import Any

import numpy as np
import pytest

from otattn.attention import (
    MLP,
    AttentionMap,
    Compose,
    JacobianOperator,
    L2Attention,
    LayerNorm,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    Residual,
    RMSNorm,
    SigmoidAttention,
    SoftmaxAttention,
    TransformerBlock,
)
from otattn.measures import DiscreteMeasure

EYE = np.eye(2)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(30)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_factors_and_biases_are_those_of_a_layer(rng: np.random.Generator, k: int) -> None:
    """``softmax((X Q^T + b_Q)(X K^T + b_K)^T / sqrt(k)) (X V^T + b_V)``, as a transformer computes it."""
    Q, K, V = rng.standard_normal((k, 3)), rng.standard_normal((k, 3)), rng.standard_normal((2, 3))
    bq, bk, bv = rng.standard_normal(k), rng.standard_normal(k), rng.standard_normal(2)
    X = rng.standard_normal((5, 3))
    attention = SoftmaxAttention.from_qkv(Q, K, V, query_bias=bq, key_bias=bk, value_bias=bv)
    S = np.exp((X @ Q.T + bq) @ (X @ K.T + bk).T / np.sqrt(k))
    expected = S / S.sum(axis=1, keepdims=True) @ (X @ V.T + bv)
    assert np.allclose(attention.on_tokens(X), expected, rtol=0, atol=1e-13)
    same = SoftmaxAttention(attention.A, V, bias=attention.bias, value_bias=bv)
    assert np.allclose(same.on_tokens(X), expected, rtol=0, atol=1e-13)
    v = rng.standard_normal((5, 3))
    assert np.allclose(same.jacobian(X).jvp(v), attention.jacobian(X).jvp(v), rtol=0, atol=1e-12)
    assert np.allclose(attention.A, K.T @ Q / np.sqrt(k), rtol=1e-14)
    assert attention.bias is not None
    assert np.allclose(attention.bias, K.T @ bq / np.sqrt(k), rtol=1e-14)
    scaled = SoftmaxAttention.from_qkv(Q, K, V, scale=0.25, query_bias=bq)
    assert np.allclose(scaled.A, 0.25 * K.T @ Q, rtol=1e-14)
    assert scaled.factors is not None
    q, keys, b = scaled.factors
    assert np.array_equal(q, 0.25 * Q)
    assert np.array_equal(keys, K)
    assert b is not None
    assert np.array_equal(b, 0.25 * bq)


def test_definitions_by_hand(rng: np.random.Generator) -> None:
    A, V, X = rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), rng.standard_normal((4, 3))
    L = X @ A.T @ X.T
    kernels = {SigmoidAttention: 1 / (1 + np.exp(-L)), ReLUAttention: np.maximum(L, 0), LinearAttention: L}
    for kind, kernel in kernels.items():
        assert np.allclose(kind(A, V).on_tokens(X), kernel @ X @ V.T / 4, rtol=0, atol=1e-14)
    Q, K = rng.standard_normal((2, 3)), rng.standard_normal((2, 3))
    P = np.exp(-np.sum((X @ Q.T)[:, None] ** 2 - 2 * (X @ Q.T)[:, None] * (X @ K.T) + (X @ K.T) ** 2, axis=2))
    expected = P / P.sum(axis=1, keepdims=True) @ X @ V.T
    assert np.allclose(L2Attention(Q, K, V).on_tokens(X), expected, rtol=0, atol=1e-13)


def test_norms_by_hand(rng: np.random.Generator) -> None:
    X, gain, bias = rng.standard_normal((4, 5)), rng.standard_normal(5), rng.standard_normal(5)
    expected = gain * (X - X.mean(axis=1, keepdims=True)) / np.sqrt(X.var(axis=1, keepdims=True) + 1e-2) + bias
    assert np.allclose(LayerNorm(gain, bias, eps=1e-2).on_tokens(X), expected, rtol=0, atol=1e-14)
    expected = gain * X / np.sqrt(np.mean(X**2, axis=1, keepdims=True) + 1e-2)
    assert np.allclose(RMSNorm(gain, eps=1e-2).on_tokens(X), expected, rtol=0, atol=1e-14)
    # the radial direction is lost, the others are not
    J = LayerNorm(np.ones(5)).field_jacobian(X, X)
    assert np.allclose(np.linalg.matrix_rank(J), 3)


def test_blocks_are_their_formulas(rng: np.random.Generator) -> None:
    attention = SoftmaxAttention(rng.standard_normal((2, 2)), rng.standard_normal((2, 2)))
    perceptron = MLP(rng.standard_normal((3, 2)), np.zeros(3), rng.standard_normal((2, 3)))
    first, second = LayerNorm([1.0, 2.0], eps=1e-2), RMSNorm([1.0, -1.0], eps=1e-2)
    X = rng.standard_normal((4, 2))
    pre = TransformerBlock(attention, perceptron, attention_norm=first, mlp_norm=second)
    Y = X + attention.on_tokens(first.on_tokens(X))
    assert np.allclose(pre.on_tokens(X), Y + perceptron.on_tokens(second.on_tokens(Y)), rtol=0, atol=1e-14)
    post = TransformerBlock(attention, perceptron, attention_norm=first, mlp_norm=second, pre_norm=False)
    Y = first.on_tokens(X + attention.on_tokens(X))
    assert np.allclose(post.on_tokens(X), second.on_tokens(Y + perceptron.on_tokens(Y)), rtol=0, atol=1e-14)
    bare = TransformerBlock(attention, perceptron)
    Y = X + attention.on_tokens(X)
    assert np.allclose(bare.on_tokens(X), Y + perceptron.on_tokens(Y), rtol=0, atol=1e-14)


class Counting(SoftmaxAttention):
    """Counts its evaluations."""

    calls = 0

    def _apply(self, *args: Any) -> np.ndarray:
        type(self).calls += 1
        return super()._apply(*args)


def test_compositions_evaluate_each_map_once_at_the_atoms(rng: np.random.Generator) -> None:
    attention = Counting(rng.standard_normal((2, 2)), rng.standard_normal((2, 2)))
    inner = Compose(Residual(attention), Residual(attention))
    outer = Compose(inner, Residual(inner), attention)
    X = rng.standard_normal((4, 2))
    Counting.calls = 0
    expected = outer.on_tokens(X)
    assert Counting.calls == 5
    # a copy of the atoms takes the general way, through the images of the measure, to the same values
    assert np.allclose(outer(X, X), expected, rtol=0, atol=1e-14)
    assert np.allclose(outer(X[1:2], X), expected[1:2], rtol=0, atol=1e-14)


def test_compositions_do_not_take_other_points_for_the_atoms(rng: np.random.Generator) -> None:
    """The shortcut asks for the very array of the measure: two measures may share weights but not values."""
    attention = SoftmaxAttention(rng.standard_normal((2, 2)), rng.standard_normal((2, 2)))
    both = Compose(attention, attention)
    mu, nu = DiscreteMeasure(rng.standard_normal((4, 2))), DiscreteMeasure(rng.standard_normal((4, 2)))
    by_hand = attention(attention(nu.points, mu), attention.pushforward(mu))
    assert np.allclose(both(nu.points, mu), by_hand, rtol=0, atol=1e-14)


def rowwise(matrix: np.ndarray) -> JacobianOperator:
    """The same matrix for each of two tokens, given by its products only."""
    e, d = matrix.shape
    return JacobianOperator(2, d, e, jvp=lambda v: v @ matrix.T, vjp=lambda g: g @ matrix)


def test_operator_without_assembly_is_built_from_products(rng: np.random.Generator) -> None:
    M = rng.standard_normal((2, 3))
    for matrix in (M, M.T):
        e, d = matrix.shape
        J = rowwise(matrix)
        assert np.allclose(J.to_dense(), np.kron(np.eye(2), matrix), rtol=0, atol=0)
        assert np.allclose(J.reweighted([0.25, 0.75]).to_dense(), np.kron(np.eye(2), matrix), rtol=1e-15)
        assert J.matmat(np.ones((2 * d, 3))).shape == (2 * e, 3)


REFUSED: dict[str, tuple[type[Exception], str, object]] = {
    "A not square": (ValueError, "A must be square", lambda: SoftmaxAttention(np.ones((2, 3)), EYE)),
    "V of another space": (ValueError, "V must have shape", lambda: SoftmaxAttention(EYE, np.ones((2, 3)))),
    "A not finite": (ValueError, "A must be finite", lambda: SigmoidAttention([[np.inf]], [[1.0]])),
    "A empty": (ValueError, "non-empty", lambda: SoftmaxAttention(np.ones((0, 0)), np.ones((1, 0)))),
    "bias too long": (ValueError, "bias must have 2", lambda: SoftmaxAttention(EYE, EYE, bias=[1, 2, 3])),
    "value bias": (ValueError, "value_bias", lambda: SoftmaxAttention(EYE, EYE, value_bias=[1.0])),
    "Q and K": (ValueError, "K must have shape", lambda: L2Attention(EYE, np.ones((3, 2)), EYE)),
    "key bias": (ValueError, "key_bias", lambda: SoftmaxAttention.from_qkv(EYE, EYE, EYE, key_bias=[1.0])),
    "no heads": (ValueError, "non-empty", lambda: MultiHeadAttention([])),
    "heads of two spaces": (
        ValueError,
        "act on one space",
        lambda: MultiHeadAttention([SoftmaxAttention(EYE, EYE), SoftmaxAttention([[1.0]], [[1.0]])]),
    ),
    "outputs too few": (
        ValueError,
        "one matrix a head",
        lambda: MultiHeadAttention([SoftmaxAttention(EYE, EYE)], []),
    ),
    "outputs of two heights": (
        ValueError,
        "equally many rows",
        lambda: MultiHeadAttention([SoftmaxAttention(EYE, EYE)] * 2, [EYE, np.ones((3, 2))]),
    ),
    "heads that cannot be summed": (
        ValueError,
        "one dimension",
        lambda: MultiHeadAttention([SoftmaxAttention(EYE, EYE), SoftmaxAttention(EYE, [[1.0, 0.0]])]),
    ),
    "residual to another space": (
        ValueError,
        "received 2 -> 1",
        lambda: Residual(SoftmaxAttention(EYE, [[1.0, 0.0]])),
    ),
    "residual of a function": (TypeError, "attention map", lambda: Residual(np.tanh)),  # type: ignore[arg-type]
    "maps that do not fit": (
        ValueError,
        "gives dimension 1",
        lambda: Compose(SoftmaxAttention(EYE, [[1.0, 0.0]]), LayerNorm([1.0, 1.0])),
    ),
    "nothing composed": (TypeError, "one or more", lambda: Compose()),
    "activation": (ValueError, "activation must be one of", lambda: MLP(EYE, [0, 0], EYE, activation="elu")),
    "eps": (ValueError, "eps", lambda: LayerNorm([1.0], eps=-1.0)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(case: str) -> None:
    kind, message, build = REFUSED[case]
    with pytest.raises(kind, match=message):
        build()  # type: ignore[operator]


def test_measures_are_checked() -> None:
    attention: AttentionMap = SoftmaxAttention(EYE, EYE)
    for value in ("tokens", {"points": 1}):
        with pytest.raises(TypeError, match="mu must be"):
            attention([[0.0, 0.0]], value)
    with pytest.raises(ValueError, match="at least one point"):
        attention.on_tokens(np.ones((0, 2)))
    with pytest.raises(ValueError, match="2 dimension"):
        attention.on_tokens([1.0, 2.0])
    assert MaskedAttention(attention).causal
    assert not attention.causal


def test_learned_factors_of_softmax_and_l2_share_one_scale() -> None:
    """Classes take what stands in the exponent, ``from_qkv`` learned factors and ``1 / sqrt(k)`` unless a scale is given."""
    rng = np.random.default_rng(0)
    Q, K, V, X = rng.standard_normal((4, 5, 3))
    for scale in (None, 0.3):
        s = 5**-0.5 if scale is None else scale
        softmax, l2 = (cls.from_qkv(Q, K, V, scale=scale) for cls in (SoftmaxAttention, L2Attention))
        assert np.allclose(softmax.A, s * K.T @ Q, rtol=1e-14)
        gaps = X @ Q.T - (X @ K.T)[:, None]
        assert np.allclose(l2.logits(X).T, -s * (gaps**2).sum(axis=2), rtol=1e-13)
        e = np.exp(l2.logits(X) - l2.logits(X).max(axis=1, keepdims=True))
        assert np.allclose(l2.on_tokens(X), (e / e.sum(axis=1, keepdims=True)) @ X @ V.T, rtol=1e-12)
    with pytest.raises(ValueError, match="scale must be"):
        L2Attention.from_qkv(Q, K, V, scale=-1.0)
