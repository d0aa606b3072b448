"""Maps that are a function of the caller: what they do to measures, and what is not known of them."""

import numpy as np
import pytest

import otattn as oa
from otattn.attention import FunctionAttention, SoftmaxAttention


def softmax(A, V):
    def function(x, mu):
        logits = x @ A.T @ mu.points.T + np.log(mu.weights)
        P = np.exp(logits - logits.max(axis=1, keepdims=True))
        return P / P.sum(axis=1, keepdims=True) @ mu.points @ V.T

    return function


@pytest.mark.parametrize("e", [3, 2])
def test_agrees_with_the_map_that_it_copies(e):
    rng = np.random.default_rng(0)
    A, V = rng.normal(size=(3, 3)), rng.normal(size=(e, 3))
    own, known = FunctionAttention(softmax(A, V), value_dim=e), SoftmaxAttention(A, V)
    mu = oa.DiscreteMeasure(rng.normal(size=(5, 3)), rng.dirichlet(np.ones(5)))
    nu = rng.normal(size=(4, 3))
    np.testing.assert_allclose(own(nu, mu), known(nu, mu), rtol=1e-12)
    np.testing.assert_allclose(own.pushforward(mu).points, known.pushforward(mu).points, rtol=1e-12)
    np.testing.assert_allclose(own.on_tokens(nu), known.on_tokens(nu), rtol=1e-12)
    for p in (1, 2, np.inf):
        ratio = oa.stability_ratio(own, mu, nu, p=p)
        assert ratio.value == pytest.approx(oa.stability_ratio(known, mu, nu, p=p).value, rel=1e-10)
        assert ratio.certified_lower == 0.0
        assert ratio.resolution == "unbounded"
        assert ratio.verify()


def test_space_time_measures_keep_their_times():
    def lag(x, mu):
        return x * mu.times[:, None]

    mu = oa.SpaceTimeMeasure([0.25, 0.5], [[2.0], [4.0]])
    image = FunctionAttention(lag).pushforward(mu)
    assert image.times.tolist() == [0.25, 0.5]
    assert image.points.ravel().tolist() == [0.5, 2.0]


def test_a_plain_function_is_told_what_to_do():
    with pytest.raises(TypeError, match=r"received function; wrap it as FunctionAttention\(function\)"):
        oa.stability_ratio(lambda x, mu: x, [[0.0]], [[1.0]])
    for other in (np.eye(2), "softmax", None):
        with pytest.raises(TypeError, match="SoftmaxAttention"):
            oa.stability_ratio(other, [[0.0]], [[1.0]])


def test_gaussians_are_not_known():
    with pytest.raises(oa.NotGaussianPreservingError):
        FunctionAttention(lambda x, mu: x).pushforward(oa.GaussianMeasure([0.0], [[1.0]]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, mu: x[:-1], "one row of values for each row"),
        (lambda x, mu: x[:, :1], "dimension 2"),
        (lambda x, mu: x[:, 0], "2 dimension"),
        (lambda x, mu: x * np.nan, "finite"),
        (lambda x, mu: None, "array of real numbers"),
        (lambda x, mu: x + 1j, "real numbers"),
        (lambda x, mu: np.ma.masked_less(x, 0.5), "masked"),
    ],
)
def test_wrong_values_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        FunctionAttention(function).on_tokens([[0.0, 1.0], [1.0, 0.0]])


def test_arguments_are_read_only_and_functions_are_functions():
    def spoil(x, mu):
        x[0] = 7.0
        return x

    with pytest.raises(ValueError, match="read-only"):
        FunctionAttention(spoil).on_tokens([[0.0], [1.0]])
    for wrong in (np.eye(2), SoftmaxAttention([[1.0]], [[1.0]]), SoftmaxAttention, 3):
        with pytest.raises(TypeError, match="function must be a callable"):
            FunctionAttention(wrong)
    with pytest.raises(ValueError, match="value_dim"):
        FunctionAttention(spoil, value_dim=0)
    assert "spoil" in repr(FunctionAttention(spoil))
