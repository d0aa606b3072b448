"""Situations in which one term of a formula of the distances decides: a change of it is noticed here."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy.sparse import csr_array

from otattn.distances import bures_geodesic, covariance_distance, transport
from otattn.distances.costs import pair_distances, pairwise_distances, power_mean
from otattn.distances.double_double import two_product
from otattn.measures import GaussianMeasure

EPS = 2.0**-52


def test_a_dual_value_that_is_rounding_proves_nothing():
    """Potentials ``f`` and ``g = -f`` charge equal measures with exactly 0, whatever the plan; W_inf is 1, never 9.

    In float64 the charge of a shifted plan comes out positive for some f. A lower bound made of it would be false.
    """
    n = 6
    x = 10.0 * np.arange(n)[:, None]
    result = transport(x, x + 1.0, p=np.inf)
    assert result.value == 1.0
    shifted = np.roll(np.eye(n), 1, axis=1) / n
    rows, cols = np.nonzero(shifted)
    value = float(np.abs(x[rows] - x[cols] - 1.0).max())
    rng = np.random.default_rng(0)
    positive = 0
    for _ in range(200):
        f = np.sort(rng.random(n))
        lower, upper = 9.0 * (1.0 - 5 * EPS), value * (1.0 + 5 * EPS)
        forged = replace(
            result,
            plan=csr_array(shifted),
            potentials=(f, -f),
            value=value,
            lower=lower,
            upper=upper,
            gap=(upper - lower) / upper,
        )
        positive += float(np.full(n, 1.0 / n) @ (f[rows] - f[cols])) > 0.0
        assert not forged.verify()
    assert positive > 0


def test_a_power_mean_divides_by_its_mass():
    """Slices of a measure have mass below 1: the mean of one number is that number, of 3 and 4 (p = 2) 5 / sqrt 2."""
    for mass in (0.5, 2.0):
        assert power_mean(np.array([3.0]), np.array([mass]), 2.0) == 3.0
        both = power_mean(np.array([3.0, 4.0]), np.array([mass, mass]), 2.0)
        assert abs(both - np.sqrt(12.5)) <= 1e-15 * both


def test_distances_whose_squares_underflow():
    x, y = np.array([[3e-200, 0.0], [0.0, 0.0]]), np.array([[0.0, 4e-200], [0.0, 0.0]])
    np.testing.assert_allclose(pair_distances(x, y), [5e-200, 0.0], rtol=1e-15)
    np.testing.assert_allclose(pairwise_distances(x, y), [[5e-200, 3e-200], [4e-200, 0.0]], rtol=1e-15)


def test_distances_of_equal_points_at_the_origin():
    assert (pairwise_distances(np.zeros((2, 3)), np.zeros((1, 3))) == 0.0).all()


def test_a_correlation_a_few_roundings_from_one_keeps_its_rank():
    """``[[1, 1 - s], [1 - s, 1]]`` has the eigenvalues ``2 - s`` and s, and all of these matrices commute."""
    for k, m in ((9, 13), (10, 14), (12, 40)):
        s, t = k * EPS, m * EPS
        S, T = (np.array([[1.0, 1.0 - u], [1.0 - u, 1.0]]) for u in (s, t))
        exact = np.hypot(np.sqrt(t) - np.sqrt(s), (t - s) / (np.sqrt(2.0 - s) + np.sqrt(2.0 - t)))
        assert abs(float(covariance_distance(S, T)) - exact) <= 1e-6 * exact


def test_products_are_error_free():
    """``a b = high + low`` exactly, for factors that use all their bits."""
    rng = np.random.default_rng(2)
    a, b = 1.0 + rng.random(5000), 1.0 + rng.random(5000)
    high, low = two_product(a, b)
    for u, v, p, e in zip(a.tolist(), b.tolist(), high.tolist(), low.tolist(), strict=True):
        assert Fraction(p) + Fraction(e) == Fraction(u) * Fraction(v)


def test_the_geodesic_of_two_points():
    middle = bures_geodesic(GaussianMeasure([1.0], [[0.0]]), GaussianMeasure([3.0], [[0.0]]), 0.5)
    assert (float(middle.mean[0]), float(middle.cov[0, 0])) == (2.0, 0.0)


@pytest.mark.parametrize("dim", [1, 2])
def test_potentials_of_the_largest_distance_have_no_unit(dim):
    x = np.random.default_rng(0).random((5, dim))
    assert transport(x, x[:3] + 1.0, p=np.inf).scale == 1.0
