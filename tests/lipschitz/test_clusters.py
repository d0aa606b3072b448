"""Tokens in few distinct places: one small matrix stands for the Jacobian of all of them."""

import numpy as np
import pytest

import otattn as oa
from otattn.lipschitz.lower.charts import forms_of
from otattn.lipschitz.lower.clusters import Configuration, cluster_constant, split_gradient


def maps(rng: np.random.Generator) -> dict[str, oa.AttentionMap]:
    A, V = rng.normal(size=(3, 3)), rng.normal(size=(2, 3))
    softmax = oa.SoftmaxAttention(A, V, bias=rng.normal(size=3))
    return {
        "softmax": softmax,
        "l2": oa.L2Attention(rng.normal(size=(2, 3)), rng.normal(size=(2, 3)), V),
        "heads": oa.MultiHeadAttention([softmax, oa.SoftmaxAttention(-A, V)], [np.eye(2), rng.normal(size=(2, 2))]),
    }


@pytest.mark.parametrize("name", ["softmax", "l2", "heads"])
@pytest.mark.parametrize("counts", [[1, 1, 4], [3, 2, 1], [1, 1, 1], [6]])
def test_equals_the_jacobian_of_all_tokens(name: str, counts: list[int]) -> None:
    rng = np.random.default_rng(len(counts))
    attention = maps(rng)[name]
    n = sum(counts)
    mu = oa.DiscreteMeasure(rng.normal(size=(len(counts), 3)), np.array(counts) / n)
    dense = np.linalg.norm(attention.jacobian(mu.tokens(n)).to_dense(), 2)
    assert cluster_constant(attention, mu, n=n) == pytest.approx(dense, rel=1e-12)


@pytest.mark.parametrize("name", ["softmax", "l2", "heads"])
def test_mean_field_value_is_the_local_constant(name: str) -> None:
    rng = np.random.default_rng(1)
    attention = maps(rng)[name]
    mu = oa.DiscreteMeasure(rng.normal(size=(4, 3)), rng.dirichlet(np.ones(4)))
    local = oa.local_lipschitz(attention, mu)
    one = Configuration(forms_of(attention), mu.points[None], np.log(mu.weights)[None])
    assert one.top()[0][0] == pytest.approx(local.particle, rel=1e-12)
    assert np.linalg.norm(one.fields()[0], 2, axis=(1, 2)).max() == pytest.approx(local.splitting, rel=1e-12)
    assert cluster_constant(attention, mu) == pytest.approx(max(local.particle, local.splitting), rel=1e-12)


@pytest.mark.parametrize("name", ["softmax", "l2", "heads"])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_by_finite_differences(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    attention = maps(rng)[name]
    X, lw = rng.normal(size=(1, 4, 3)), rng.normal(size=(1, 4))
    forms, atom = forms_of(attention), np.array([int(rng.integers(4))])

    def values(points: np.ndarray, log_weights: np.ndarray) -> np.ndarray:
        one = Configuration(forms, points, log_weights)
        return np.array([one.top()[0][0], np.linalg.norm(one.fields()[0, atom[0]], 2)])

    one = Configuration(forms, X, lw)
    gradients = one.gradient(*one.top()[1:]), split_gradient(one, atom)
    D, e, h = rng.normal(size=X.shape), rng.normal(size=lw.shape), 1e-6
    by_points = (values(X + h * D, lw) - values(X - h * D, lw)) / (2 * h)
    by_weights = (values(X, lw + h * e) - values(X, lw - h * e)) / (2 * h)
    for k, (gX, gw) in enumerate(gradients):
        assert by_points[k] == pytest.approx(float(np.sum(gX * D)), rel=1e-5, abs=1e-6)
        assert by_weights[k] == pytest.approx(float(np.sum(gw * e)), rel=1e-5, abs=1e-6)


def test_a_million_tokens_and_bad_input() -> None:
    attention = oa.SoftmaxAttention(-np.eye(2), np.eye(2))
    mu = oa.DiscreteMeasure([[0.0, 6.0], [0.0, -6.0], [6.0, 0.0]], np.array([1, 1, 10**6 - 2]) / 10**6)
    assert cluster_constant(attention, mu, n=10**6) > 0.7 * 36 * 1000
    with pytest.raises(ValueError, match="multiples of 1/7"):
        cluster_constant(attention, mu, n=7)
    with pytest.raises(TypeError, match="use local_lipschitz"):
        cluster_constant(oa.LinearAttention(np.eye(2), np.eye(2)), mu)


@pytest.mark.slow
def test_huge_mean_field_constants_stay_finite() -> None:
    for p in (2, np.inf):
        bound = oa.lipschitz_lower_bound(oa.SoftmaxAttention(-400 * np.eye(3), np.eye(3)), radius=1.0, p=p, rng=0)
        assert np.isfinite(bound.value)
        assert bound.value > (1e100 if p == 2 else 400.0)
        assert np.isfinite(bound.witness.weights).all()
