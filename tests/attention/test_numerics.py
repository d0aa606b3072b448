"""Digits kept: clouds far from the origin, clusters far apart, one-hot rows, against 50-digit arithmetic."""

import mpmath
import numpy as np
import pytest

from otattn.attention import (
    MLP,
    L2Attention,
    LayerNorm,
    MaskedAttention,
    MultiHeadAttention,
    RMSNorm,
    SoftmaxAttention,
    memory,
)
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure

Rng = np.random.Generator


def exact_softmax(A: np.ndarray, c: np.ndarray, x: np.ndarray, y: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Gamma with V = I in 50 digits, rounded once at the end."""
    with mpmath.workdps(50):
        M, keys = mpmath.matrix(A.tolist()), [mpmath.matrix(row.tolist()) for row in y]
        out = []
        for row in x:
            g = M * mpmath.matrix(row.tolist()) + mpmath.matrix(c.tolist())
            logits = [(g.T * k)[0] for k in keys]
            top = max(logits)
            P = [mpmath.mpf(float(wj)) * mpmath.exp(lj - top) for wj, lj in zip(w, logits, strict=True)]
            total = mpmath.fsum(P)
            out.append(
                [float(mpmath.fsum(p * k[i] for p, k in zip(P, keys, strict=True)) / total) for i in range(len(c))]
            )
    return np.array(out)


def exact_l2(Q: np.ndarray, K: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """L2 attention with V = I in 50 digits."""
    with mpmath.workdps(50):
        Qm, Km = mpmath.matrix(Q.tolist()), mpmath.matrix(K.tolist())
        keys = [mpmath.matrix(row.tolist()) for row in y]
        out = []
        for row in x:
            q = Qm * mpmath.matrix(row.tolist())
            logits = [-mpmath.fsum((q - Km * k)[i] ** 2 for i in range(Q.shape[0])) for k in keys]
            P = [mpmath.exp(lj - max(logits)) for lj in logits]
            out.append(
                [
                    float(mpmath.fsum(p * k[i] for p, k in zip(P, keys, strict=True)) / mpmath.fsum(P))
                    for i in range(y.shape[1])
                ]
            )
    return np.array(out)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e6])
def test_softmax_far_from_the_origin(offset: float) -> None:
    """The form acts on differences (the bias undoes the offset): as good as the rounding of the queries allows."""
    rng = np.random.default_rng(0)
    A, X = rng.standard_normal((3, 3)), rng.standard_normal((8, 3)) + offset
    w = rng.random(8)
    w /= w.sum()
    bias = -A @ np.full(3, offset)
    attention = SoftmaxAttention(A, np.eye(3), bias=bias)
    out = attention.pushforward(DiscreteMeasure(X, w)).points
    # The query A x + c is a difference of numbers of size |A| offset and cannot be known better than their rounding,
    # 2e-16 * offset * |A|; it changes a logit by that times the diameter of the cloud, and the output has its own
    # rounding of 1e-16 * offset. Both are optimal: the inputs themselves are rounded as much.
    assert np.abs(out - exact_softmax(A, bias, X, X, w)).max() <= 1e-14 + 5e-15 * offset


@pytest.mark.parametrize("offset", [1.0, 2.0**20, 2.0**40])
def test_softmax_does_not_feel_a_shift_that_its_form_does_not(offset: float) -> None:
    """A annihilates the shift from the left and the right: only the output moves, by exactly the shift."""
    rng = np.random.default_rng(1)
    A = np.zeros((3, 3))
    A[:2, :2] = rng.standard_normal((2, 2))
    X = np.round(rng.standard_normal((8, 3)) * 2**10) / 2**10
    shift = np.array([0.0, 0.0, offset])
    attention = SoftmaxAttention(A, np.eye(3))
    out, moved = attention.on_tokens(X), attention.on_tokens(X + shift)
    assert np.abs(moved - shift - out).max() <= 2e-16 * offset + 1e-15
    v = rng.standard_normal((8, 3))
    J, K = attention.jacobian(X), attention.jacobian(X + shift)
    # the centre of the cloud rounds by 1e-16 * offset, the derivative is measured from it
    assert np.allclose(J.jvp(v), K.jvp(v), rtol=0, atol=1e-14 + 1e-15 * offset)


@pytest.mark.parametrize("offset", [1.0, 1e6, 1e9])
def test_softmax_with_keys_far_away(offset: float) -> None:
    """Queries near the origin, keys far from it: the common part of the logits cancels before it can round."""
    rng = np.random.default_rng(2)
    A, Y, x = rng.standard_normal((2, 2)), rng.standard_normal((6, 2)) + offset, rng.standard_normal((3, 2))
    w = np.full(6, 1 / 6)
    out = SoftmaxAttention(A, np.eye(2))(x, Y)
    assert np.abs(out - exact_softmax(A, np.zeros(2), x, Y, w)).max() <= 2e-15 + 4e-16 * offset


def test_l2_commutes_with_translations() -> None:
    rng = np.random.default_rng(3)
    Q = rng.standard_normal((2, 3))
    X = np.round(rng.standard_normal((8, 3)) * 2**20) / 2**20
    attention = L2Attention(Q, Q.copy(), np.eye(3))
    out = attention.on_tokens(X)
    for offset in (1e3, 1e6):
        moved = attention.on_tokens(X + offset)
        assert np.abs(moved - offset - out).max() <= 3e-16 * offset + 1e-14


@pytest.mark.parametrize("distance", [1.0, 1e3, 1e6])
def test_l2_of_clusters_far_apart(distance: float) -> None:
    """Squared distances come from differences: expanded squares would lose ``1e-16 * distance^2``."""
    rng = np.random.default_rng(4)
    X = 0.3 * rng.standard_normal((10, 2))
    X[5:] += distance
    out = L2Attention(np.eye(2), np.eye(2), np.eye(2)).on_tokens(X)
    assert np.abs(out - exact_l2(np.eye(2), np.eye(2), X, X)).max() <= 1e-14 + 1e-15 * distance
    blocked = L2Attention(np.eye(2), np.eye(2), np.eye(2))(X, X, block_size=3)
    assert np.abs(out - blocked).max() <= 1e-14 + 1e-15 * distance


def test_l2_queries_far_beyond_the_keys() -> None:
    rng = np.random.default_rng(5)
    Q, K = rng.standard_normal((2, 2)), rng.standard_normal((2, 2))
    Y = 30.0 * rng.standard_normal((6, 2))
    x = np.vstack([1e5 * rng.standard_normal((2, 2)), 10.0 * rng.standard_normal((2, 2))])
    out = L2Attention(Q, K, np.eye(2))(x, Y)
    assert np.abs(out - exact_l2(Q, K, x, Y)).max() < 1e-9


@pytest.mark.parametrize("form", [1e3, 1e6])
def test_one_hot_rows_do_not_leak_rounding(form: float) -> None:
    """Logits of 1e6 round by 1e-10, but one-hot weights have no derivative for that to reach."""
    rng = np.random.default_rng(6)
    X = rng.standard_normal((6, 3))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    J = SoftmaxAttention(form * np.eye(3), np.eye(3)).jacobian(X)
    v = rng.standard_normal((6, 3))
    assert np.abs(J.jvp(v) - v).max() < 1e-15
    assert np.abs(J.vjp(v) - v).max() < 1e-15


def test_causal_rows_do_not_round_with_later_tokens() -> None:
    """The centre of a masked cloud is its first slice, not the mean, which a later outlier would move."""
    rng = np.random.default_rng(7)
    X = rng.standard_normal((5, 2))
    Y = np.vstack([X, [[1e12, -1e12]]])
    masked = MaskedAttention(SoftmaxAttention(np.eye(2), np.eye(2)))
    mu = SpaceTimeMeasure(np.arange(1, 6) / 6, X)
    nu = SpaceTimeMeasure(np.arange(1, 7) / 6, Y)
    assert np.allclose(masked.pushforward(nu).points[:5], masked.pushforward(mu).points, rtol=0, atol=1e-15)


def test_norms_of_far_offset_and_constant_tokens() -> None:
    norm = LayerNorm(np.ones(3))
    x = np.array([[0.0, 0.25, 1.0]])
    assert np.array_equal(norm.on_tokens(x + 2.0**40), norm.on_tokens(x))
    for token in ([0.1, 0.1, 0.1], [1e6 + 0.1] * 3):
        with pytest.raises(ValueError, match="tokens must not be constant when eps is 0"):
            norm.on_tokens([token])
        assert np.array_equal(LayerNorm(np.ones(3), eps=1e-5).on_tokens([token]), np.zeros((1, 3)))
    with pytest.raises(ValueError, match="tokens must not be zero"):
        RMSNorm(np.ones(3)).on_tokens(np.zeros((1, 3)))
    # squares of the entries neither overflow nor vanish
    for scale in (1e-300, 1e-160, 1e160, 1e300):
        assert np.allclose(norm.on_tokens(scale * x), norm.on_tokens(x), rtol=1e-14)
        assert np.allclose(RMSNorm(np.ones(3)).on_tokens(scale * x), RMSNorm(np.ones(3)).on_tokens(x), rtol=1e-14)


@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh", "relu"])
def test_activations_saturate(activation: str) -> None:
    perceptron = MLP([[1.0]], [0.0], [[1.0]], activation=activation)
    for x in (1e3, 1e200):
        above, below = perceptron.on_tokens([[x], [-x]]).ravel()
        assert above == (1.0 if activation == "tanh" else x)
        assert below == pytest.approx(-1.0 if activation == "tanh" else 0.0, abs=1e-300)
        slopes = perceptron.field_jacobian([[x], [-x]], [[0.0]]).ravel()
        assert slopes == pytest.approx([0.0 if activation == "tanh" else 1.0, 0.0], abs=1e-300)


def test_overflow_of_values_is_an_error() -> None:
    big = MLP([[1e200]], [0.0], [[1e200]], activation="identity")
    with pytest.raises(OverflowError, match="not representable"), np.errstate(over="ignore"):
        big.on_tokens([[1.0]])
    J = SoftmaxAttention(np.eye(1), np.eye(1)).jacobian([[0.0], [1.0]])
    with pytest.raises(OverflowError, match="not representable"):
        J.jvp([[np.nan], [0.0]])


def test_many_heads_share_the_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head may keep its kernel where twelve together may not."""
    rng = np.random.default_rng(8)
    X = rng.standard_normal((32, 4))
    heads = [SoftmaxAttention(rng.standard_normal((4, 4)), np.eye(4)) for _ in range(12)]
    monkeypatch.setattr(memory, "MEMORY_BUDGET", 4 * 8 * 32 * 32)
    calls = 0
    original = heads[0]._kernel(DiscreteMeasure(X), None, None).weights_of.__func__  # type: ignore[attr-defined]

    def counted(*args: object) -> np.ndarray:
        nonlocal calls
        calls += 1
        return original(*args)

    monkeypatch.setattr("otattn.attention.kernels.NormalisedKernel.weights_of", counted)
    one, all_heads = heads[0].jacobian(X), MultiHeadAttention(heads).jacobian(X)
    calls = 0
    one.jvp(X)
    assert calls == 0
    all_heads.jvp(X)
    assert calls >= 12
