"""Multi-head: above the true operator norm, below the plain sum, optimal in s, robust."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from otattn.attention import MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.bounds import multi_head, row_bound
from otattn.lipschitz.upper.multi_head import head_with_values
from otattn.lipschitz.upper_bound import lipschitz_upper_bound
from otattn.measures import Ball


def claimed(whole, values):
    """Upper bounds of the heads with identity values, as somebody may claim them."""
    return [
        Bound(float(c), "upper", "claimed", domain=Ball(9.0), n=5, attention=head_with_values(whole, h, None))
        for h, c in enumerate(values)
    ]


def combined(whole, values):
    return multi_head(whole, head_bounds=claimed(whole, values)).value


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
        bound = multi_head(wrap(whole), head_bounds=claimed(wrap(whole), c))
        assert np.linalg.norm(wrap(whole).jacobian(X).to_dense(), 2) <= bound.value
        sizes = [np.linalg.norm(W @ h.V, 2) for W, h in zip(whole.outputs, whole.heads, strict=True)]
        assert bound.value <= np.dot(c, sizes) * (1 + 1e-9)
        assert not bound.verify()  # the values at X bound nothing on the ball
        proved = [row_bound(head_with_values(wrap(whole), h, None), radius=9.0, n=5) for h in range(3)]
        bound = multi_head(wrap(whole), head_bounds=proved)
        assert bound.verify()
        assert not replace(bound, options={"heads": tuple(claimed(wrap(whole), c))}).verify()
        low = tuple(replace(b, value=0.5 * b.value) for b in proved)
        assert not replace(bound, options={"heads": low}, value=0.5 * bound.value).verify()
        own = [row_bound(wrap(h), radius=9.0, n=5) for h in whole.heads]
        assert multi_head(wrap(whole), head_bounds=own).verify()
        assert np.linalg.norm(wrap(whole).jacobian(X).to_dense(), 2) <= multi_head(wrap(whole), head_bounds=own).value
        with pytest.raises(ValueError, match="fit neither"):
            multi_head(wrap(whole), head_bounds=[*own[:2], proved[2]])


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
    bound = multi_head(whole, head_bounds=claimed(whole, c))
    assert bound.value <= found * (1 + 1e-6)
    assert bound.value >= found * (1 - 1e-9)


def test_known_combinations():
    eye = np.eye(2)
    one = SoftmaxAttention(eye, eye)
    assert combined(MultiHeadAttention([one, one]), [1.0, 2.0]) == pytest.approx(3.0, rel=1e-6)
    assert combined(MultiHeadAttention([one]), [2.5]) == pytest.approx(2.5, rel=1e-8)
    heads = [SoftmaxAttention(eye, np.diag(v)) for v in ([1.0, 0.0], [0.0, 1.0])]
    assert combined(MultiHeadAttention(heads), [3.0, 4.0]) == pytest.approx(5.0, rel=1e-6)


def test_values_count_once():
    """One head of value 1/2 and form 0 has the constant 1/2, whatever its bound is a bound of."""
    head = SoftmaxAttention([[0.0]], [[0.5]])
    whole = MultiHeadAttention([head])
    for bounds in ([row_bound(head, radius=1.0, n=2)], [row_bound(head_with_values(whole, 0, None), radius=1.0, n=2)]):
        assert multi_head(whole, head_bounds=bounds).value == pytest.approx(math.sqrt(2) / 2, rel=1e-9)
    assert lipschitz_upper_bound(whole, radius=1.0, n=2).value == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize("factor", [1e-12, 1e6])
def test_scaling(factor):
    rng = np.random.default_rng(7)
    whole = attention(rng)
    plain = combined(whole, [1.0, 2.0, 3.0])
    scaled = MultiHeadAttention(whole.heads, [factor * W for W in whole.outputs])
    assert combined(scaled, [1.0, 2.0, 3.0]) == pytest.approx(factor * plain, rel=1e-6)
    assert combined(scaled, np.array([1.0, 2.0, 3.0]) / factor) == pytest.approx(plain, rel=1e-6)


def test_silent_heads_do_not_count():
    rng = np.random.default_rng(8)
    whole = attention(rng)
    mute = MultiHeadAttention(whole.heads, [whole.outputs[0], np.zeros((4, 2)), whole.outputs[2]])
    alone = MultiHeadAttention([whole.heads[0], whole.heads[2]], [whole.outputs[0], whole.outputs[2]])
    assert combined(mute, [1.0, 5.0, 2.0]) == pytest.approx(combined(alone, [1.0, 2.0]), rel=1e-6)
    assert combined(mute, [0.0, 5.0, 0.0]) == 0.0
    assert combined(whole, [0.0, 0.0, 0.0]) == 0.0


def test_bounds_are_checked():
    rng = np.random.default_rng(9)
    whole = attention(rng, H=2)
    good = claimed(whole, [1.0, 2.0])
    assert multi_head(whole, head_bounds=good).n == 5
    for wrong, message in (
        (good[:1], "one bound a head"),
        ([1.0, good[1]], "must be Bounds"),
        (claimed(whole, [1.0, np.inf]), "finite"),
        ([replace(good[0], kind="lower"), good[1]], "lower bound"),
        ([replace(good[0], p=1.0), good[1]], "p = 1"),
        ([good[0], replace(good[1], n=6)], "n = 6"),
        ([good[0], replace(good[1], domain=Ball(8.0))], "radius 8"),
        ([good[1], good[0]], "another attention map"),
        ([replace(good[0], attention=whole.heads[0]), good[1]], "another attention map"),
    ):
        with pytest.raises(ValueError, match=message):
            multi_head(whole, head_bounds=wrong)
    any_measure = [replace(b, n=None) for b in good]
    assert multi_head(whole, head_bounds=any_measure).n is None
    assert multi_head(whole, head_bounds=[any_measure[0], good[1]]).n == 5
    with pytest.raises(ValueError, match="MultiHeadAttention"):
        multi_head(whole.heads[0], head_bounds=good)
