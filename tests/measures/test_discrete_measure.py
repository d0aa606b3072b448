"""Discrete measures: what is accepted, what is refused, and the operations."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otattn.measures import DiscreteMeasure, GaussianMeasure, as_discrete


def test_W2_weights_of_a_float32_softmax_are_renormalised():
    logits = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    w = np.exp(logits) / np.exp(logits).sum()
    w = (w * np.float32(1 + 2e-7)).astype(np.float32)
    total = w.astype(np.float64).sum()
    assert 0 < abs(total - 1) < 1e-6
    mu = DiscreteMeasure(np.zeros((5000, 1)), w)
    assert mu.weights.dtype == np.float64
    assert mu.weights.sum() == pytest.approx(1.0, abs=1e-15)
    np.testing.assert_allclose(mu.weights, w.astype(np.float64) / total, rtol=1e-15)


@pytest.mark.parametrize("total", [0.999, 1.00001, 2.0])
def test_W2_a_sum_further_from_one_is_printed(total):
    with pytest.raises(ValueError, match="sum to 1") as error:
        DiscreteMeasure([[0.0], [1.0]], [total / 2, total / 2])
    assert repr(total) in str(error.value)
    assert "normalized" in str(error.value)
    mu = DiscreteMeasure.normalized([[0.0], [1.0]], [total / 2, total / 2])
    np.testing.assert_array_equal(mu.weights, [0.5, 0.5])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, bool])
def test_W3_integers_are_cast_before_any_arithmetic(dtype):
    mu = DiscreteMeasure(np.array([[100], [1]]).astype(dtype))
    assert mu.points.dtype == np.float64
    assert mu.radius(center=[-100.0]) == float(np.array(100).astype(dtype)) + 100.0


@pytest.mark.parametrize(
    ("points", "weights", "message"),
    [
        ([[np.nan, 0.0]], None, "points must be finite, received 1 NaN"),
        ([[np.inf, 0.0]], None, "points must be finite"),
        (np.zeros((0, 3)), None, r"received shape \(0, 3\)"),
        (np.zeros((3, 0)), None, r"received shape \(3, 0\)"),
        ([0.0, 1.0], None, r"points must have 2 dimension.*received shape \(2,\)"),
        ([["a"]], None, "points must be"),
        ([[1j]], None, "complex"),
        ([[0.0], [1.0, 2.0]], None, "points must be"),
        ([[0.0], [1.0]], [0.0, 0.0], "weights must have positive mass"),
        ([[0.0], [1.0]], [1.5, -0.5], "weights must be non-negative, received a smallest entry of -0.5"),
        ([[0.0], [1.0], [2.0]], [0.5, 0.5], "weights must have 3 entries, received 2"),
        ([[0.0], [1.0]], [[0.5, 0.5]], "weights must have 1 dimension"),
        ([[0.0], [1.0]], [np.nan, 1.0], "weights must be finite"),
        ([[0.0], [1.0]], [np.inf, 1.0], "weights must be finite"),
    ],
)
def test_W5_bad_input_is_named(points, weights, message):
    with pytest.raises(ValueError, match=message):
        DiscreteMeasure(points, weights)


def test_A6_half_precision_is_widened():
    x = (300.0 * np.ones((4, 8)) / np.sqrt(8)).astype(np.float16)
    mu = DiscreteMeasure(x)
    assert mu.points.dtype == np.float64
    assert mu.radius() == pytest.approx(300.0, rel=1e-3)
    assert np.isfinite(mu.covariance()).all()
    assert np.isfinite((mu.points**2).sum(axis=1) ** 4).all()


def test_moments():
    mu = DiscreteMeasure([[0.0, 0.0], [4.0, 2.0]], [0.25, 0.75])
    np.testing.assert_array_equal(mu.mean(), [3.0, 1.5])
    np.testing.assert_allclose(mu.covariance(), 3 / 16 * np.outer([4, 2], [4, 2]), rtol=1e-15)
    assert (mu.n, mu.dim, mu.is_uniform) == (2, 2, False)
    assert mu.radius() == pytest.approx(np.sqrt(20))
    assert mu.radius(center=[4.0, 2.0]) == pytest.approx(np.sqrt(20))
    far = DiscreteMeasure(1e8 + np.array([[0.0], [1.0]]))
    assert far.covariance()[0, 0] == 0.25


def test_atoms_of_weight_zero():
    mu = DiscreteMeasure([[1e9], [1.0], [2.0]], [0.0, 0.5, 0.5])
    assert mu.radius() == 2.0
    np.testing.assert_array_equal(mu.support().points, [[1.0], [2.0]])
    assert mu.support().support() is mu.support() or mu.support().support().n == 2
    assert mu.mean()[0] == 1.5


def test_pushforward_keeps_the_weights_to_the_bit():
    mu = DiscreteMeasure([[1.0], [2.0], [4.0]], [0.1, 0.2, 0.7])
    image = mu.pushforward(lambda x: np.hstack([x, x**2]))
    assert image.weights is mu.weights
    np.testing.assert_array_equal(image.points, [[1, 1], [2, 4], [4, 16]])
    with pytest.raises(ValueError, match="keep the number of points"):
        mu.pushforward(lambda x: x[:2])
    with pytest.raises(ValueError, match=r"f\(points\) must be finite"):
        mu.pushforward(lambda x: x * np.inf)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(-1, 1)), min_size=1, max_size=12), st.integers(0, 1000))
def test_merging_is_the_same_measure(atoms, seed):
    x = np.array(atoms, dtype=float)
    w = np.random.default_rng(seed).dirichlet(np.ones(len(x)))
    merged = DiscreteMeasure(x, w).merge_duplicates()
    assert merged.n == len(set(atoms))
    for point, weight in zip(merged.points, merged.weights, strict=True):
        assert weight == pytest.approx(w[(x == point).all(axis=1)].sum(), rel=1e-14)
    # in order of first appearance, and once is enough
    first = list(dict.fromkeys(atoms))
    np.testing.assert_array_equal(merged.points, first)
    np.testing.assert_array_equal(merged.merge_duplicates().points, merged.points)


def test_merging_takes_both_signs_of_zero_for_one():
    assert DiscreteMeasure([[0.0], [-0.0]]).merge_duplicates().n == 1


def test_tokens():
    mu = DiscreteMeasure([[1.0], [2.0]], [2 / 3, 1 / 3])
    np.testing.assert_array_equal(mu.tokens(3), [[1.0], [1.0], [2.0]])
    np.testing.assert_array_equal(mu.tokens(6), [[1.0]] * 4 + [[2.0]] * 2)
    million = DiscreteMeasure([[0.0], [1.0]], [1 / 10**6, 1 - 1 / 10**6]).tokens(10**6)
    assert million.shape == (10**6, 1)
    assert million.sum() == 10**6 - 1
    with pytest.raises(ValueError, match="multiples of 1/4"):
        mu.tokens(4)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="n must be"):
            mu.tokens(wrong)
    dropped = DiscreteMeasure([[1.0], [2.0]], [1.0, 0.0]).tokens(2)
    np.testing.assert_array_equal(dropped, [[1.0], [1.0]])


def test_multiplicities_of_weights_that_are_rounded():
    # the heavy weight is a multiple of 1e-12 up to its own rounding, 1e-4 tokens
    counts = DiscreteMeasure([[1.0], [0.0]], [1e-12, 1 - 1e-12]).multiplicities(10**12)
    assert counts.tolist() == [1, 10**12 - 1]
    rng = np.random.default_rng(0)
    for size in (10, 10**6, 10**9, 10**14):
        counts = rng.integers(1, size, 6)
        measure = DiscreteMeasure(np.arange(6.0)[:, None], counts / counts.sum())
        np.testing.assert_array_equal(measure.multiplicities(int(counts.sum())), counts)
    # a light weight that is none, beside a heavy one that is allowed its rounding
    with pytest.raises(ValueError, match=r"multiples of 1/1000000000000, received 1\.4"):
        DiscreteMeasure([[1.0], [0.0]], [1.4e-12, 1 - 1.4e-12]).multiplicities(10**12)


def test_measures_are_immutable_and_copy_their_input():
    x, w = np.array([[1.0], [2.0]]), np.array([0.5, 0.5])
    mu = DiscreteMeasure(x, w)
    x[0], w[0] = 9.0, 9.0
    assert mu.points[0, 0] == 1.0
    assert mu.weights[0] == 0.5
    for array in (mu.points, mu.weights):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0.0
    with pytest.raises(AttributeError):
        mu.points = x
    assert "n=2" in repr(mu)


def test_as_discrete():
    mu = DiscreteMeasure([[1.0]])
    assert as_discrete(mu) is mu
    assert as_discrete([[1, 2], [3, 4]]).n == 2
    with pytest.raises(ValueError, match="nu must have 2 dimension"):
        as_discrete([1.0, 2.0], "nu")
    for wrong in (GaussianMeasure([0.0], [[1.0]]), "text", {"points": 1}):
        with pytest.raises(TypeError, match="nu must be a DiscreteMeasure"):
            as_discrete(wrong, "nu")
