"""Random pairs: inside their domain, reproducible, picklable, of the stated size."""

import pickle
from typing import Any

import numpy as np
import pytest

from otattn.data import load_sample
from otattn.distances import wasserstein
from otattn.measures import Ball, DiscreteMeasure, GaussianMeasure, SpaceTimeMeasure
from otattn.stability import samplers

X = np.random.default_rng(0).normal(size=(5, 3))
CASES: list[tuple[Any, type]] = [
    (samplers.uniform_ball_pairs(6, 3, 2.0), DiscreteMeasure),
    (samplers.uniform_ball_pairs(6, 1, 2.0, 4, True), DiscreteMeasure),
    (samplers.gaussian_pairs(6, 3, 0.5), DiscreteMeasure),
    (samplers.perturbation_pairs(DiscreteMeasure(X, [0.1, 0.2, 0.3, 0.4, 0.0]), 1e-3), DiscreteMeasure),
    (samplers.perturbation_pairs(SpaceTimeMeasure.from_sequence(X), 1e-3), SpaceTimeMeasure),
    (samplers.two_dirac_pairs(3, 2.0), DiscreteMeasure),
    (samplers.two_dirac_pairs(1, 2.0, 0.3, None), DiscreteMeasure),
    (samplers.gaussian_measure_pairs(3), GaussianMeasure),
    (samplers.gaussian_measure_pairs(4, 2.0, 0.0, 2), GaussianMeasure),
    (samplers.sequence_pairs(6, 3, 2.0), SpaceTimeMeasure),
    (samplers.window_pairs(X, 3), DiscreteMeasure),
    (samplers.window_pairs(X[None].repeat(2, 0), 5, causal=True), SpaceTimeMeasure),
]


@pytest.mark.parametrize(("sampler", "kind"), CASES, ids=[repr(s)[:50] for s, _ in CASES])
def test_every_sampler(sampler: Any, kind: type) -> None:
    copy = pickle.loads(pickle.dumps(sampler))
    for seed in range(20):
        pair = sampler(np.random.default_rng(seed))
        again = copy(np.random.default_rng(seed))
        for mu, other in zip(pair, again, strict=True):
            assert isinstance(mu, kind)
            names = ("mean", "cov") if kind is GaussianMeasure else ("points", "weights")
            assert all(np.array_equal(getattr(mu, k), getattr(other, k)) for k in names)
            if sampler.domain is not None:
                assert isinstance(sampler.domain, Ball)
                assert mu.radius() <= sampler.domain.radius * (1 + 1e-15)
    assert type(sampler).__name__ in repr(sampler)


def test_the_ball_is_filled_uniformly() -> None:
    mu, nu = samplers.uniform_ball_pairs(20000, 3, 2.0)(np.random.default_rng(1))
    r = np.linalg.norm(mu.points, axis=1) / 2.0
    assert np.mean(r**3) == pytest.approx(0.5, abs=0.01)  # r^3 is uniform; standard error 0.002
    assert np.abs(mu.mean()).max() < 0.05
    assert not np.array_equal(mu.points, nu.points)


def test_perturbations_have_their_size() -> None:
    for size in (1e-3, 1e-8):
        mu, nu = samplers.perturbation_pairs(X + 10.0, size)(np.random.default_rng(2))
        # points of size 10 are rounded by 2e-15
        assert wasserstein(mu, nu) == pytest.approx(size, rel=1e-12 + 1e-14 / size)


def test_two_diracs_keep_their_masses() -> None:
    rng = np.random.default_rng(3)
    masses = []
    for _ in range(200):
        mu, nu = samplers.two_dirac_pairs(2, 3.0, 0.01, 0.1)(rng)
        assert np.array_equal(mu.weights, nu.weights)
        assert np.linalg.norm(mu.points[0]) == pytest.approx(3.0, rel=1e-14)
        assert abs(np.linalg.det(mu.points)) < 1e-13  # on one line through the origin
        # displacement, and projection back into the ball, which is no farther than twice that
        assert np.linalg.norm(mu.points - nu.points, axis=1).max() <= 0.6
        masses.append(mu.weights[0])
    assert 0.01 <= min(masses) < 0.03
    assert max(masses) <= 0.5 + 1e-15


def test_gaussians_have_the_stated_rank_and_scale() -> None:
    rng = np.random.default_rng(4)
    mu, _ = samplers.gaussian_measure_pairs(5, 1.0, 0.0, 2)(rng)
    assert np.linalg.matrix_rank(mu.cov) == 2
    assert not mu.mean.any()
    covs = [samplers.gaussian_measure_pairs(2, 3.0)(rng)[0].cov for _ in range(2000)]
    np.testing.assert_allclose(np.mean(covs, axis=0), 9 * np.eye(2), atol=0.8)  # standard error 0.2


def test_windows_are_runs_of_real_tokens() -> None:
    layer = load_sample()
    sampler = samplers.window_pairs(layer.hidden_states, 16)
    rows = layer.hidden_states.reshape(-1, 384)
    for seed in range(5):
        for mu in sampler(np.random.default_rng(seed)):
            start = int(np.flatnonzero((rows == mu.points[0]).all(1))[0])
            assert np.array_equal(rows[start : start + 16], mu.points)
            assert start // 128 == (start + 15) // 128


@pytest.mark.parametrize(
    "call",
    [
        lambda: samplers.uniform_ball_pairs(0, 2, 1.0),
        lambda: samplers.uniform_ball_pairs(3, 2.5, 1.0),  # type: ignore[arg-type]
        lambda: samplers.uniform_ball_pairs(3, 2, -1.0),
        lambda: samplers.uniform_ball_pairs(3, 2, 1.0, 0),
        lambda: samplers.gaussian_pairs(3, 2, 0.0),
        lambda: samplers.perturbation_pairs(X, 0.0),
        lambda: samplers.perturbation_pairs([[np.nan]], 1.0),
        lambda: samplers.two_dirac_pairs(2, 1.0, 0.7),
        lambda: samplers.two_dirac_pairs(2, 1.0, 0.1, -1.0),
        lambda: samplers.gaussian_measure_pairs(2, rank=3),
        lambda: samplers.gaussian_measure_pairs(2, mean_scale=-1.0),
        lambda: samplers.sequence_pairs(2, 2, np.inf),
        lambda: samplers.window_pairs(X, 6),
        lambda: samplers.window_pairs(X, 5),
        lambda: samplers.window_pairs(X[0], 1),
        lambda: samplers.window_pairs(np.zeros((0, 3, 2)), 1),
    ],
)
def test_bad_arguments(call: Any) -> None:
    with pytest.raises(ValueError, match="must"):
        call()
