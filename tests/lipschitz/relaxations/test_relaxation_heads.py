"""Multi-head: above the true operator norm, below the plain sum, optimal in s, robust."""

import numpy as np
import pytest
from scipy.optimize import minimize

from otattn.attention import MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.relaxations import multihead


def attention(rng, H=3, d=4, e=2, D=4):
    heads = [SoftmaxAttention(rng.standard_normal((d, d)), rng.standard_normal((e, d))) for _ in range(H)]
    return MultiHeadAttention(heads, [rng.standard_normal((D, e)) for _ in range(H)])


def bare(head, d):
    """The head with its value matrix replaced by the identity."""
    return SoftmaxAttention(head.A, np.eye(d))


@pytest.mark.parametrize("seed", range(4))
def test_above_the_jacobian_of_the_sum_given_those_of_the_heads(seed):
    rng = np.random.default_rng(seed)
    whole = attention(rng)
    X = rng.standard_normal((5, 4))
    for masked in (False, True):
        wrap = MaskedAttention if masked else lambda a: a
        c = [np.linalg.norm(wrap(bare(h, 4)).jacobian(X).to_dense(), 2) for h in whole.heads]
        bound = multihead(wrap(whole), c)
        assert np.linalg.norm(wrap(whole).jacobian(X).to_dense(), 2) <= bound.value
        assert bound.value <= bound.details["sum"] * (1 + 1e-9)
        assert bound.verify()


@pytest.mark.parametrize("H", [1, 2, 5])
def test_optimal_in_s(H):
    rng = np.random.default_rng(H)
    whole = attention(rng, H=H, D=6)
    c = rng.random(H) + 0.5
    U = [W @ h.V for W, h in zip(whole.outputs, whole.heads, strict=True)]

    def value(theta):
        s = np.exp(theta - theta.max())
        s /= s.sum()
        M = sum(k**2 * u @ u.T / t for k, u, t in zip(c, U, s, strict=True))
        return float(np.sqrt(np.linalg.eigvalsh(M)[-1]))

    found = min(
        minimize(value, rng.standard_normal(H), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-11}).fun
        for _ in range(3)
    )
    bound = multihead(whole, c)
    assert bound.value <= found * (1 + 1e-6)
    assert bound.value >= bound.solver_value * (1 - 1e-6)


def test_known_combinations():
    eye = np.eye(2)
    one = SoftmaxAttention(eye, eye)
    assert multihead(MultiHeadAttention([one, one]), [1.0, 2.0]).value == pytest.approx(3.0, rel=1e-6)
    assert multihead(MultiHeadAttention([one]), [2.5]).value == pytest.approx(2.5, rel=1e-8)
    heads = [SoftmaxAttention(eye, np.diag(v)) for v in ([1.0, 0.0], [0.0, 1.0])]
    assert multihead(MultiHeadAttention(heads), [3.0, 4.0]).value == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("factor", [1e-12, 1e6])
def test_scaling(factor):
    rng = np.random.default_rng(7)
    whole = attention(rng)
    plain = multihead(whole, [1.0, 2.0, 3.0]).value
    scaled = MultiHeadAttention(whole.heads, [factor * W for W in whole.outputs])
    assert multihead(scaled, [1.0, 2.0, 3.0]).value == pytest.approx(factor * plain, rel=1e-6)
    assert multihead(scaled, np.array([1.0, 2.0, 3.0]) / factor).value == pytest.approx(plain, rel=1e-6)


def test_silent_heads_do_not_count():
    rng = np.random.default_rng(8)
    whole = attention(rng)
    mute = MultiHeadAttention(whole.heads, [whole.outputs[0], np.zeros((4, 2)), whole.outputs[2]])
    alone = MultiHeadAttention([whole.heads[0], whole.heads[2]], [whole.outputs[0], whole.outputs[2]])
    assert multihead(mute, [1.0, 5.0, 2.0]).value == pytest.approx(multihead(alone, [1.0, 2.0]).value, rel=1e-6)
    assert multihead(mute, [0.0, 5.0, 0.0]).value == 0.0
    assert multihead(whole, [0.0, 0.0, 0.0]).verify()


def test_bounds_are_checked():
    rng = np.random.default_rng(9)
    whole = attention(rng, H=2)
    good = [Bound(1.0, "upper", "t", n=4), Bound(2.0, "upper", "t", n=4)]
    assert multihead(whole, good).n == 4
    for wrong, message in (
        ([1.0], "one bound a head"),
        ([1.0, float("inf")], "finite"),
        ([1.0, -1.0], "non-negative"),
        ([Bound(1.0, "lower", "t"), 1.0], "upper bound"),
        ([Bound(1.0, "upper", "t", p=1.0), 1.0], "order 2"),
        ([good[0], Bound(1.0, "upper", "t", n=5)], "one number of tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            multihead(whole, wrong)
    with pytest.raises(TypeError, match="MultiHeadAttention"):
        multihead(whole.heads[0], [1.0])
