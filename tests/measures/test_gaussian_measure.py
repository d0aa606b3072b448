"""Gaussian measures of any rank."""

import numpy as np
import pytest

from otattn.measures import DiscreteMeasure, GaussianMeasure


@pytest.mark.parametrize(
    ("mean", "cov", "message"),
    [
        ([0.0, 0.0], -np.eye(2), "cov is not positive semi-definite: its least eigenvalue is -1"),
        ([0.0, 0.0], [[1.0, 0.5], [0.0, 1.0]], "cov is not symmetric: entries differ by 0.5"),
        ([0.0, 0.0], [[1.0, 2.0], [2.0, 1.0]], "not positive semi-definite"),
        ([0.0, 0.0], np.eye(3), "cov must have shape"),
        ([0.0], [[np.nan]], "cov must be finite"),
        ([np.inf], [[1.0]], "mean must be finite"),
        ([], np.zeros((0, 0)), "mean must have at least one entry"),
        ([[0.0]], [[1.0]], "mean must have 1 dimension"),
    ],
)
def test_B2_what_is_refused(mean, cov, message):
    with pytest.raises(ValueError, match=message):
        GaussianMeasure(mean, cov)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_tolerances_are_relative(scale):
    skewed = scale * np.array([[1.0, 1e-12], [0.0, 1.0]])
    g = GaussianMeasure([0.0, 0.0], skewed)
    np.testing.assert_array_equal(g.cov, g.cov.T)
    with pytest.raises(ValueError, match="not symmetric"):
        GaussianMeasure([0.0, 0.0], scale * np.array([[1.0, 1e-6], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="not positive"):
        GaussianMeasure([0.0, 0.0], scale * np.diag([1.0, -1e-6]))


def test_any_rank():
    F = np.random.default_rng(0).normal(size=(6, 3))
    for cov in (np.zeros((6, 6)), F @ F.T, np.eye(6)):
        g = GaussianMeasure(np.arange(6.0), cov)
        assert g.dim == 6
        x = g.sample(20, 1).points
        centred = x - g.mean
        # the samples stay in the range of the covariance
        s, E = np.linalg.eigh(g.cov)
        null = E[:, s < 1e-10]
        assert np.abs(centred @ null).max(initial=0.0) < 1e-6


def test_samples_have_the_moments():
    rng = np.random.default_rng(1)
    F = rng.normal(size=(2, 2))
    g = GaussianMeasure([1.0, -2.0], F @ F.T)
    mu = g.sample(200_000, rng)
    # five standard errors of a mean, and of a covariance
    np.testing.assert_allclose(mu.mean(), g.mean, atol=5 * np.sqrt(np.trace(g.cov) / 200_000))
    np.testing.assert_allclose(mu.covariance(), g.cov, atol=5 * np.sqrt(2.0 / 200_000) * np.trace(g.cov))
    np.testing.assert_array_equal(g.sample(5, 3).points, g.sample(5, 3).points)


def test_affine_images():
    rng = np.random.default_rng(2)
    F = rng.normal(size=(3, 3))
    g = GaussianMeasure(rng.normal(size=3), F @ F.T)
    M, b = rng.normal(size=(2, 3)), rng.normal(size=2)
    image = g.pushforward_affine(M, b)
    np.testing.assert_allclose(image.mean, M @ g.mean + b, rtol=1e-14)
    np.testing.assert_allclose(image.cov, M @ g.cov @ M.T, rtol=1e-13)
    assert np.linalg.eigvalsh(g.pushforward_affine(np.vstack([M, M, M])).cov)[0] > -1e-12
    with pytest.raises(ValueError, match="matrix must have shape"):
        g.pushforward_affine(np.eye(2))


def test_immutable():
    g = GaussianMeasure([0.0], [[1.0]])
    with pytest.raises(ValueError, match="read-only"):
        g.cov[0, 0] = 2.0
    assert "dim=" in repr(g)


def test_from_samples_is_the_law_of_the_sample():
    rng = np.random.default_rng(0)
    points = rng.standard_normal((5, 2))
    weights = rng.dirichlet(np.ones(5))
    mean = sum(w * x for w, x in zip(weights, points, strict=True))
    cov = sum(w * np.outer(x - mean, x - mean) for w, x in zip(weights, points, strict=True))
    gaussian = GaussianMeasure.from_samples(DiscreteMeasure(points, weights))
    np.testing.assert_allclose(gaussian.mean, mean, rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(gaussian.cov, cov, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(GaussianMeasure.from_samples(points).cov, np.cov(points.T, bias=True), rtol=1e-13)
