"""The local ball: above every Jacobian in it, tight as it shrinks, masked, multi-head, degenerate."""

from dataclasses import replace

import numpy as np
import pytest

from otattn.attention import L2Attention, MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz import at_measure_bound
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.bounds import field_bound, row_bound
from otattn.lipschitz.relaxations import near_tokens
from otattn.measures import Ball, Box, DiscreteMeasure


def norm(attention, X):
    return float(np.linalg.norm(attention.jacobian(X).to_dense(), 2))


def attacked(attention, X, rho, rng, steps=40):
    """Hill climbing over X', each token within rho of where it was."""
    best, at = norm(attention, X), np.zeros_like(X)
    size = rho
    for _ in range(steps):
        trial = at + size * rng.standard_normal(X.shape)
        trial *= np.minimum(1.0, rho / np.maximum(np.linalg.norm(trial, axis=1, keepdims=True), 1e-300))
        value = norm(attention, X + trial)
        if value > best:
            best, at = value, trial
        else:
            size = max(0.9 * size, 0.1 * rho)
    return best


def heads(rng, d, e, a):
    def one():
        A = rng.standard_normal((d, d))
        return SoftmaxAttention(a * A / np.linalg.norm(A, 2), rng.standard_normal((e, d)), bias=rng.standard_normal(d))

    head = one()
    yield head
    yield MaskedAttention(head)
    several = MultiHeadAttention([one(), one()], [rng.standard_normal((3, e)) for _ in range(2)])
    yield several
    yield MaskedAttention(several)


@pytest.mark.parametrize(
    ("n", "d", "e", "a"),
    [
        (1, 2, 2, 8.0),
        (2, 1, 1, 1.0),
        pytest.param(4, 2, 3, 8.0, marks=pytest.mark.slow),
        pytest.param(1, 2, 2, 1.0, marks=pytest.mark.slow),
        pytest.param(2, 1, 1, 8.0, marks=pytest.mark.slow),
        pytest.param(4, 2, 3, 1.0, marks=pytest.mark.slow),
        *(pytest.param(6, 3, 2, a, marks=pytest.mark.slow) for a in (1.0, 8.0)),
    ],
)
def test_no_configuration_in_the_ball_exceeds_it(n, d, e, a):
    rng = np.random.default_rng(n + d)
    X = rng.standard_normal((n, d))
    X /= np.maximum(1.0, np.linalg.norm(X, axis=1, keepdims=True))
    for attention in heads(rng, d, e, a):
        here = norm(attention, X)
        for rho in (0.0, 1e-3, 0.05, 0.5):
            bound = near_tokens(attention, X, rho)
            assert bound.verify()
            assert bound.details["local_value"] == pytest.approx(here, rel=1e-9)
            if rho == 0.0:
                assert here <= bound.value
                assert bound.value == pytest.approx(here, rel=1e-8)
            else:
                assert attacked(attention, X, rho, rng) <= bound.value


def test_it_is_a_lipschitz_constant_on_the_ball():
    rng = np.random.default_rng(0)
    attention = SoftmaxAttention(4 * np.eye(3), np.eye(3))
    X = rng.standard_normal((5, 3)) / 2
    bound = near_tokens(attention, X, 0.1)
    for _ in range(50):
        D = rng.standard_normal((2, 5, 3))
        D *= 0.1 * rng.random((2, 5, 1)) / np.linalg.norm(D, axis=2, keepdims=True)
        out = attention.on_tokens(X + D[0]) - attention.on_tokens(X + D[1])
        assert np.linalg.norm(out) <= bound.value * np.linalg.norm(D[0] - D[1])


def test_tight_as_the_ball_shrinks_and_monotone():
    rng = np.random.default_rng(1)
    attention = SoftmaxAttention(np.diag([4.0, 2.0, -1.0]), np.eye(3))
    X = rng.standard_normal((8, 3)) / 2
    values = [near_tokens(attention, X, rho).value for rho in (0.0, 1e-6, 1e-4, 1e-2, 0.1, 1.0)]
    assert values == sorted(values)
    # the excess is linear in rho: a factor 100 in rho is a factor 100 in it
    first, second = values[1] - values[0], values[2] - values[0]
    assert second / first == pytest.approx(100.0, rel=0.05)
    assert values[3] < 1.35 * values[0]


def test_global_bound_is_a_ceiling_and_must_apply():
    attention = SoftmaxAttention(np.eye(2), np.eye(2))
    X = np.array([[1.0, 0.0], [0.0, 1.0]])
    free = near_tokens(attention, X, 5.0)
    whole = row_bound(attention, radius=6.0, n=2)
    capped = near_tokens(attention, X, 5.0, global_bound=whole)
    assert free.value > whole.value
    assert capped.value == pytest.approx(whole.value, rel=1e-10)
    assert capped.details["branch"] == "global"
    assert capped.verify()
    assert near_tokens(attention, X, 1e-3, global_bound=whole).details["branch"] != "global"
    # a bound that somebody made up is taken, and the certificate does not verify
    invented = Bound(3.0, "upper", "test", domain=Ball(7.0), n=2, attention=attention)
    assert not near_tokens(attention, X, 5.0, global_bound=invented).verify()
    other = SoftmaxAttention(np.eye(2), 0.1 * np.eye(2))
    for wrong, message in (
        (3.0, "must be a Bound"),
        (replace(whole, kind="lower"), "lower bound"),
        (replace(whole, p=1.0), "p = 1"),
        (replace(whole, n=7), "n = 7"),
        (row_bound(attention, radius=2.0, n=2), "radius"),
        (row_bound(attention, domain=Box([-4.0, -4.0], [4.0, 4.0]), n=2), "box"),
        (row_bound(other, radius=6.0, n=2), "another attention map"),
        (at_measure_bound(attention, X), "'local'"),
        (field_bound(attention, radius=6.0), "'field'"),
    ):
        with pytest.raises(ValueError, match=message):
            near_tokens(attention, X, 5.0, global_bound=wrong)


@pytest.mark.parametrize("scale", [1e-12, 1e6])
def test_scales_and_huge_logits(scale):
    rng = np.random.default_rng(2)
    X, A, V = rng.standard_normal((4, 2)), rng.standard_normal((2, 2)), rng.standard_normal((2, 2))
    plain = near_tokens(SoftmaxAttention(A, V), X, 0.05).value
    assert near_tokens(SoftmaxAttention(A, scale * V), X, 0.05).value == pytest.approx(scale * plain, rel=1e-10)
    scaled = near_tokens(SoftmaxAttention(A / scale**2, V), scale * X, 0.05 * scale).value
    assert scaled == pytest.approx(plain, rel=1e-9)
    shifted = near_tokens(SoftmaxAttention(A, V, bias=-A @ np.full(2, 1e3)), X + 1e3, 0.05).value
    assert shifted == pytest.approx(plain, rel=1e-6)  # logits of 1e3 are rounded, and the bound pays for it
    # logits of 1e8: their rounding makes the intervals wide, the bound stays finite and valid
    hard = SoftmaxAttention(1e8 * A, V)
    bound = near_tokens(hard, X, 1e-12)
    assert norm(hard, X) <= bound.value < np.inf


def test_degenerate_data():
    X = np.array([[1.0, 2.0], [0.0, 1.0], [3.0, -1.0]])
    assert near_tokens(SoftmaxAttention(np.eye(2), np.zeros((3, 2))), X, 0.1).value == 0.0
    mean = near_tokens(SoftmaxAttention(np.zeros((2, 2)), np.eye(2)), X, 0.5)
    assert mean.value == pytest.approx(1.0, rel=1e-10)  # A = 0 averages the tokens, wherever they are
    same = near_tokens(SoftmaxAttention(np.eye(2), np.eye(2)), np.ones((4, 2)), 1e-9)
    assert same.value == pytest.approx(1.0, rel=1e-6)
    assert near_tokens(SoftmaxAttention([[2.0]], [[3.0]]), [[5.0]], 0.0).value == pytest.approx(3.0, rel=1e-10)


@pytest.mark.slow
def test_large_dimension_is_reduced_and_the_norm_may_be_bounded_only():
    rng = np.random.default_rng(3)
    d, k, n = 96, 8, 12
    attention = SoftmaxAttention.from_qkv(
        rng.standard_normal((k, d)) / 8, rng.standard_normal((k, d)) / 8, rng.standard_normal((k, d))
    )
    X = rng.standard_normal((n, d))
    bound = near_tokens(attention, X, 1e-3)
    assert norm(attention, X) <= bound.value
    assert bound.details["local_value"] == pytest.approx(norm(attention, X), rel=1e-9)
    # d = e = 40 and n = 60: 2400 rows, so the norm at X is bounded, and attained by Lanczos
    head = SoftmaxAttention(rng.standard_normal((40, 40)) / 40, np.eye(40))
    X = rng.standard_normal((60, 40)) / 4
    wide = near_tokens(head, X, 1e-4)
    assert wide.verify()
    assert wide.details["local_value"] <= wide.details["local_upper"] <= wide.value
    J = head.jacobian(X)
    v = rng.standard_normal(J.shape[1])
    for _ in range(30):
        v = J.rmatvec(J.matvec(v))
        v /= np.linalg.norm(v)
    # thirty power steps from below, Lanczos has gone further
    assert np.linalg.norm(J.matvec(v)) <= wide.details["local_value"] * (1 + 1e-9)


def test_bad_arguments():
    attention = SoftmaxAttention(np.eye(2), np.eye(2))
    with pytest.raises(ValueError, match="equal weights"):
        near_tokens(attention, DiscreteMeasure(np.eye(2), [0.3, 0.7]), 0.1)
    with pytest.raises(ValueError, match="rho must be finite and non-negative"):
        near_tokens(attention, np.eye(2), -0.1)
    with pytest.raises(ValueError, match="X must have dimension 2"):
        near_tokens(attention, np.eye(3), 0.1)
    with pytest.raises(TypeError, match="softmax heads"):
        near_tokens(L2Attention(np.eye(2), np.eye(2), np.eye(2)), np.eye(2), 0.1)
