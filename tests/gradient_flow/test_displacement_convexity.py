"""Second derivatives of energies along geodesics."""

import json

import numpy as np
import pytest

from otattn.distances import bures_geodesic
from otattn.gradient_flow import displacement_convexity, displacement_convexity_study, energies
from otattn.measures import DiscreteMeasure, GaussianMeasure
from otattn.stability import samplers


def test_point_masses() -> None:
    """On point masses the Sinkhorn energy is ``<A x, x> / 2``, so the second derivative is ``<A u, u>``."""
    A = np.array([[2.0, 0.5], [0.5, -1.0]])
    rng = np.random.default_rng(0)
    for _ in range(5):
        x, y = rng.standard_normal((2, 2))
        u = (y - x) / np.linalg.norm(y - x)
        result = displacement_convexity(energies.SinkhornEnergy(A), [x], [y])
        assert result.least == pytest.approx(u @ A @ u, rel=1e-9)
        assert result.greatest == pytest.approx(u @ A @ u, rel=1e-9)
        assert result.distance == pytest.approx(np.linalg.norm(y - x), rel=1e-14)


@pytest.mark.parametrize(
    "build", [energies.ExponentialEnergy, energies.LinearEnergy, energies.ReLUEnergy, energies.SigmoidEnergy]
)
def test_slopes_are_the_derivative_of_the_curve(build: type) -> None:
    """The slopes against differences of the energies along the geodesic (fourth order, step 1/64)."""
    rng = np.random.default_rng(1)
    A = np.array([[0.6, 0.2], [0.2, -0.5]])
    mu = DiscreteMeasure.normalized(rng.standard_normal((4, 2)), 0.2 + rng.random(4))
    nu = DiscreteMeasure.normalized(rng.standard_normal((5, 2)), 0.2 + rng.random(5))
    result = displacement_convexity(build(A), mu, nu, n_times=257)
    h = result.times[1]
    e = result.energies
    numeric = (8 * (e[3:-1] - e[1:-3]) - (e[4:] - e[:-4])) / (12 * h)
    # the ReLU energy has kinks in its second derivative: second order there
    tol = 1e-4 if build is energies.ReLUEnergy else 1e-7
    assert np.abs(numeric - result.slopes[2:-2]).max() <= tol * np.abs(result.slopes).max()


def test_gaussian_slopes_and_one_dimension() -> None:
    rng = np.random.default_rng(2)
    A = np.array([[1.0, 0.4], [0.4, -0.8]])
    F, G = rng.standard_normal((2, 2, 2))
    g, h = GaussianMeasure(rng.standard_normal(2), F @ F.T), GaussianMeasure([1.0, 0.0], G @ G.T)
    for energy in (
        energies.GaussianSoftmaxEnergy(A),
        energies.GaussianSinkhornEnergy(A),
        energies.GaussianL2Energy(A),
    ):
        result = displacement_convexity(energy, g, h, n_times=129)
        e, step = result.energies, result.times[1]
        numeric = (8 * (e[3:-1] - e[1:-3]) - (e[4:] - e[:-4])) / (12 * step)
        assert np.abs(numeric - result.slopes[2:-2]).max() <= 1e-6 * np.abs(result.slopes).max()
    # in one dimension E = a^2 s^4 / 4 of the standard deviation s: d^2E/ds^2 = 3 a^2 s^2, smallest at the start
    a = 1.5
    result = displacement_convexity(
        energies.GaussianSoftmaxEnergy([[a]]), GaussianMeasure([0.0], [[1.0]]), GaussianMeasure([0.0], [[4.0]]),
        n_times=1001,
    )  # fmt: skip
    # secants of slopes are averages of the second derivative
    assert 3 * a * a <= result.least == pytest.approx(3 * a * a, rel=2e-3)
    assert 12 * a * a >= result.greatest == pytest.approx(12 * a * a, rel=2e-3)
    assert result.convex
    assert result.distance == pytest.approx(1.0, rel=1e-12)


def test_rank_deficient_gaussians() -> None:
    energy = energies.GaussianSinkhornEnergy(np.diag([1.0, 0.5]))
    result = displacement_convexity(
        energy, GaussianMeasure([0.0, 0.0], np.diag([1.0, 0.0])), GaussianMeasure([0.0, 0.0], np.diag([0.0, 1.0]))
    )
    assert np.isfinite(result.slopes).all()
    for t, e in zip(result.times[::8], result.energies[::8], strict=True):
        assert e == pytest.approx(energy(bures_geodesic(result.mu, result.nu, float(t))), rel=1e-9, abs=1e-12)


def test_quadratic_energy_is_convex_and_its_negative_is_not() -> None:
    """Positive A: exp<Ax, y> is not convex on pairs, but on the line of one point mass it is."""
    energy = energies.ExponentialEnergy([[1.0]])
    forward = displacement_convexity(energy, [[0.5]], [[1.5]])
    assert forward.convex
    back = displacement_convexity(energies.CombinedEnergy([energy], [-1.0]), [[0.5]], [[1.5]])
    assert not back.convex
    assert back.least == pytest.approx(-forward.greatest, rel=1e-12)
    assert back.greatest == pytest.approx(-forward.least, rel=1e-12)
    # d^2/dx^2 exp(x^2)/2 = (1 + 2 x^2) exp(x^2)
    assert forward.least >= (1 + 0.5) * np.exp(0.25)
    assert forward.greatest <= (1 + 4.5) * np.exp(2.25)


@pytest.mark.parametrize("name", ["exponential", "sinkhorn", "sigmoid", "gaussian"])
def test_energies_are_not_displacement_convex(name: str) -> None:
    """A search over random pairs finds a violation, for indefinite A."""
    A = np.array([[0.8, 0.3], [0.3, -0.9]])
    energy = {
        "exponential": energies.ExponentialEnergy(A),
        "sinkhorn": energies.SinkhornEnergy(A),
        "sigmoid": energies.SigmoidEnergy(A),
        "gaussian": energies.GaussianSinkhornEnergy(A),
    }[name]
    sampler = samplers.gaussian_measure_pairs(2) if name == "gaussian" else samplers.uniform_ball_pairs(4, 2, 1.5)
    study = displacement_convexity_study(energy, sampler, n_pairs=25, rng=3, n_times=9)
    assert study.least < -1e-2
    assert not study.convex
    assert study.n_pairs == 25
    assert study.least == study.leasts.min()
    assert study.greatest == study.greatests.max() > study.least
    assert study.verify()
    again = displacement_convexity_study(energy, sampler, n_pairs=25, rng=3, n_times=9)
    assert np.array_equal(again.leasts, study.leasts)
    one = displacement_convexity(energy, study.mu, study.nu, n_times=9)
    assert one.least == pytest.approx(study.least, rel=1e-9)


def test_search_finds_the_extremes_of_a_known_range() -> None:
    """Point masses under the Sinkhorn energy: values fill ``[lambda_min(A), lambda_max(A)]`` and never leave it."""
    A = np.diag([2.0, -1.0])
    study = displacement_convexity_study(
        energies.SinkhornEnergy(A), samplers.uniform_ball_pairs(1, 2, 1.0), n_pairs=200, rng=4, n_times=3
    )
    assert -1.0 - 1e-6 <= study.least < -0.95
    assert 1.95 < study.greatest <= 2.0 + 1e-6
    assert study.kind == "estimate"


def test_export_and_bad_input() -> None:
    energy = energies.LinearEnergy(np.eye(2))
    result = displacement_convexity(energy, np.zeros((1, 2)), np.ones((1, 2)))
    data = json.loads(json.dumps(result.to_dict()))
    assert data["kind"] == "estimate"
    assert data["n_pairs"] == 1
    assert "LinearEnergy" in repr(result)
    object.__setattr__(result, "slopes", result.slopes + 1.0)
    assert not result.verify()
    with pytest.raises(ValueError, match="different measures"):
        displacement_convexity(energy, np.ones((2, 2)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="n_times must be at least 3"):
        displacement_convexity(energy, np.zeros((1, 2)), np.ones((1, 2)), n_times=2)
    gaussian = GaussianMeasure([0.0, 0.0], np.eye(2))
    with pytest.raises(TypeError, match="GaussianMeasure"):
        displacement_convexity(energy, gaussian, gaussian)
    with pytest.raises(TypeError, match="GaussianMeasure"):
        displacement_convexity(energies.GaussianSoftmaxEnergy(np.eye(2)), np.ones((2, 2)), gaussian)
    with pytest.raises(ValueError, match="different measures"):
        displacement_convexity(energies.GaussianSoftmaxEnergy(np.eye(2)), gaussian, gaussian)
