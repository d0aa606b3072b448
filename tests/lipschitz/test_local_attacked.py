"""Local bounds against the definition in mpmath, where float64 loses what a value is made of."""

import contextlib

import mpmath as mp
import numpy as np
import pytest
from exact_local import DIGITS, big, truth

from otattn import bounds
from otattn.attention import (
    ExponentialAttention,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    MultiHeadAttention,
    ReLUAttention,
    SigmoidAttention,
    SoftmaxAttention,
)
from otattn.lipschitz.relaxations import near_tokens
from otattn.measures import DiscreteMeasure


def holds(attention, points, weights=None):
    mu = points if weights is None else DiscreteMeasure(points, weights)
    w = None if weights is None else mu.weights
    return truth(attention, points, w) <= mp.mpf(bounds.at_measure_bound(attention, mu).value) * (1 + mp.mpf(1e-15))


def ball_holds(attention, tokens):
    return truth(attention, tokens, splitting=False) <= mp.mpf(near_tokens(attention, tokens, 0.0).value)


POINTWISE = [SigmoidAttention, ReLUAttention, LinearAttention, ExponentialAttention]
EYE = np.eye(2)
TOKENS = np.random.default_rng(0).standard_normal((3, 2))


@pytest.mark.parametrize("size", [1e-300, 1e-170, 1e-6, 1e25])
def test_squares_of_the_values_underflow(size):
    V = size * EYE
    for attention in (SoftmaxAttention(EYE, V), L2Attention(EYE, EYE, V), *(kind(EYE, V) for kind in POINTWISE)):
        assert holds(attention, TOKENS)
        assert bounds.at_measure_bound(attention, TOKENS).value < 100 * size
    assert ball_holds(SoftmaxAttention(EYE, V), TOKENS)
    assert near_tokens(SoftmaxAttention(EYE, V), TOKENS, 0.1).value < 100 * size


@pytest.mark.parametrize("kind", [ReLUAttention, LinearAttention])
def test_squares_of_small_logits_underflow(kind):
    attention = kind(EYE, EYE)
    assert holds(attention, 1e-90 * TOKENS)
    assert bounds.at_measure_bound(attention, 1e-90 * TOKENS).value < 1e-177


@pytest.mark.parametrize("kind", [SigmoidAttention, ExponentialAttention])
def test_what_underflows_is_positive(kind):
    attention = kind([[-1000.0]], [[1.0]])
    assert 0.0 < bounds.at_measure_bound(attention, [[1.0]]).value < 1e-300
    several = MultiHeadAttention([attention, attention], [[[0.1]], [[0.1]]])
    assert holds(several, np.array([[1.0]]))


def test_atoms_that_a_row_does_not_see_do_not_scale_it():
    # logits of row 1: -300 (seen) and 600 or 900 (not seen); of row 2: -650
    for unseen in (600.0, 900.0):
        attention = MaskedAttention(ExponentialAttention([[-300.0, -650.0], [unseen, -650.0]], EYE))
        assert holds(attention, EYE)
        assert bounds.at_measure_bound(attention, EYE).value < 1e-120


@pytest.mark.parametrize("seed", range(5))
def test_queries_that_cancel(seed):
    """``A x`` is zero within rounding, and what it is decides about weights, slopes and sides of a kink."""
    rng = np.random.default_rng(seed)
    a, q = rng.standard_normal(2) * 1e8, rng.standard_normal(2)
    x = np.array([[1.0, a[0], -q[0] * a[0] / q[1]], [1.5, a[1], -q[0] * a[1] / q[1]]])
    A = np.zeros((3, 3))
    A[0, 1:] = q
    V = np.array([[1.0, 0.0, 0.0]])
    for attention in (ReLUAttention(A, V), SigmoidAttention(1e12 * A, V), SigmoidAttention(1e9 * A, V)):
        assert holds(attention, x)
    for size in (1e7, 1e8, 1e10):
        assert holds(ExponentialAttention(size * A, V), x)


@pytest.mark.parametrize("seed", range(6))
def test_queries_of_factors_that_cancel(seed):
    """No key and no query is seen in float64, and the values spread by 1e9."""
    rng = np.random.default_rng(seed)
    a, q = rng.standard_normal(2) * 1e9, rng.standard_normal(2)
    x = np.array([[0.0, 1e9, a[0], -q[0] * a[0] / q[1]], [0.0, -1e9, a[1], -q[0] * a[1] / q[1]]])
    attention = SoftmaxAttention.from_qkv(
        [[0.0, 0.0, *q]], [[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]], scale=1.0
    )
    assert holds(attention, x)
    assert ball_holds(attention, x)


@pytest.mark.parametrize("seed", range(4))
def test_products_of_outputs_and_values_that_cancel(seed):
    rng = np.random.default_rng(seed)
    p, V, X = rng.standard_normal(3), rng.standard_normal((3, 2)), rng.standard_normal((3, 2))
    V[2] = -(p[0] * V[0] + p[1] * V[1]) / p[2]
    head = SoftmaxAttention(rng.standard_normal((2, 2)), V)
    inner = MultiHeadAttention([head], [p[None]])
    for attention in (inner, MultiHeadAttention([inner, inner], [[[1.0]], [[2.0]]])):
        assert holds(attention, X)
    assert ball_holds(inner, X)
    flat_head = SoftmaxAttention(EYE, EYE)
    nested = MultiHeadAttention([MultiHeadAttention([flat_head], [V])], [p[None]])
    assert holds(nested, X)


def test_a_large_bound_of_a_head_without_output():
    """The bound of the first head is 1e300, and its output matrix zero; the second one counts."""
    first = ExponentialAttention([[690.0]], [[1.0]])
    for size in (1e-17, 1e-20, 1e-23):
        second = LinearAttention([[0.0]], [[1.0]]), SigmoidAttention([[0.0]], [[size]])
        for head in second:
            assert holds(MultiHeadAttention([first, head], [[[0.0]], [[1.0]]]), np.array([[1.0]]))


@pytest.mark.parametrize("weight", [1e-12, 1e-300, 1e-320, 5e-324])
def test_small_weights(weight):
    x = TOKENS * [[1.0], [3.0], [0.2]]
    for attention in (SoftmaxAttention(np.diag([2.0, -1.0]), EYE), L2Attention(EYE, EYE, EYE)):
        assert holds(attention, x, [weight, 0.5, 0.5])
    for kind in POINTWISE:
        assert holds(kind(np.diag([2.0, -1.0]), EYE), x, [weight, 0.5, 0.5])


def killed(seed, *, ball):
    """Tokens far away along directions that A or V kill, up to rounding: ``(attention, tokens, weights)``."""
    rng = np.random.default_rng(seed)
    n, d = int(rng.integers(1, 6)), int(rng.integers(2, 7))
    k = int(rng.integers(1, d))
    B = np.linalg.qr(rng.standard_normal((d, k)))[0] if rng.random() < 0.6 else np.eye(d)[:, :k]
    R = 10 ** rng.uniform(2, 12)
    x = rng.standard_normal((n, d)) * 10 ** rng.uniform(-3, 1) * (rng.random() < 0.8)
    x = x + R * (rng.standard_normal((n, k)) if rng.random() < 0.7 else np.ones((n, k))) @ B.T

    def form(m):
        M = rng.standard_normal((m, d))
        return M - (M @ B) @ B.T if rng.random() < 0.7 else M

    def scaled(*factors):
        size = 10 ** rng.uniform(-10, 1) / (2e-16 * R * R * np.prod([np.linalg.norm(M) for M in factors]))
        return min(size, 1e20)

    def head(kind):
        V = form(int(rng.integers(1, 3)))[:1]
        if kind == "l2" or (kind == "softmax" and rng.random() < 0.4):
            q, key = form(1), form(1)
            size = np.sqrt(scaled(q, key))
            if kind == "l2":
                return L2Attention(size * q, size * key, V)
            bias = -size * q @ x[0] if rng.random() < 0.5 else None
            return SoftmaxAttention.from_qkv(size * q, size * key, V, scale=1.0, query_bias=bias)
        A = form(d).T @ form(d) if rng.random() < 0.6 else form(d)
        A = A * scaled(A)
        if kind == "softmax":
            return SoftmaxAttention(A, V, bias=-A @ x[0] if rng.random() < 0.5 else None)
        return POINTWISE[int(kind)](A - A.T if rng.random() < 0.3 else A, V)

    kind = "softmax" if ball else ("softmax", "l2", 0, 1, 2, 3)[int(rng.integers(6))]
    attention = head(kind)
    if rng.random() < 0.3:
        attention = MultiHeadAttention([attention, head(kind)], rng.standard_normal((2, 2, 1)))
    if rng.random() < 0.3:
        return MaskedAttention(attention), x, None
    w = None if ball or rng.random() < 0.4 else 10 ** rng.uniform(-12, 0, n)
    return attention, x, None if w is None else w / w.sum()


def check_upper(seed):
    attention, x, w = killed(seed, ball=False)
    with contextlib.suppress(OverflowError):  # exponentials of huge logits
        assert holds(attention, x, w)


def check_ball(seed):
    attention, x, _ = killed(seed, ball=True)
    assert ball_holds(attention, x)


@pytest.mark.slow
def test_directions_that_the_maps_kill():
    for seed in range(40):
        check_upper(seed)
        check_ball(seed)


@pytest.mark.slow
def test_directions_that_the_maps_kill_many():
    for seed in range(40, 500):
        check_upper(seed)
        check_ball(seed)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_tokens_far_along_directions_that_a_reduction_drops(seed):
    """d = 64, rank 3: the reduced tokens are small, the tokens are not, and rounding sees these."""
    rng = np.random.default_rng(seed)
    L, M = rng.standard_normal((2, 3, 64)) / 8
    null = np.linalg.svd(np.vstack([L, M]))[2][6:]
    x = rng.standard_normal((3, 64)) + 1e9 * rng.standard_normal((3, len(null))) @ null
    attention = SoftmaxAttention(L.T @ M, L)
    assert ball_holds(attention, x)
    assert holds(attention, x)


def test_no_configuration_in_the_ball_exceeds_it_in_exact_arithmetic():
    rng = np.random.default_rng(5)
    for _ in range(6):
        A, far = 2.0 * rng.standard_normal((2, 2)), rng.standard_normal(2) * 1e6
        x = rng.standard_normal((3, 2)) + far
        attention = SoftmaxAttention(A, rng.standard_normal((1, 2)), bias=-A @ far)
        for rho in (1e-9, 1e-3, 0.3):
            bound = mp.mpf(near_tokens(attention, x, rho).value)
            for _ in range(4):
                step = rng.standard_normal((3, 2))
                step *= rho * (1 - 1e-12) / np.linalg.norm(step, axis=1, keepdims=True)
                with mp.workdps(DIGITS):
                    moved = big(x) + big(step)
                assert truth(attention, moved, splitting=False) <= bound
