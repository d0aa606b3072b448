"""W_inf: thresholds against brute force, and the sets that prove them."""

import numpy as np
import pytest
from distance_truth import assignment_by_brute_force, random_weights, relative_error, wasserstein_by_program
from scipy.spatial.distance import cdist

from otattn.distances import transport, wasserstein
from otattn.distances.bottleneck import bottleneck, witnessed_threshold
from otattn.distances.masses import exact_masses
from otattn.measures import DiscreteMeasure


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_against_all_permutations(dim):
    rng = np.random.default_rng(dim)
    for _ in range(10):
        x, y = rng.normal(size=(6, dim)), rng.normal(size=(6, dim))
        assert relative_error(wasserstein(x, y, p=np.inf), assignment_by_brute_force(x, y, np.inf)) < 1e-15


@pytest.mark.parametrize("dim", [1, 2])
def test_with_weights_against_programs(dim):
    rng = np.random.default_rng(10 + dim)
    for n, m in ((5, 8), (7, 4), (6, 6)):
        x, y = rng.normal(size=(n, dim)), rng.normal(size=(m, dim))
        a, b = random_weights(n, rng), random_weights(m, rng)
        value = wasserstein(DiscreteMeasure(x, a), DiscreteMeasure(y, b), p=np.inf)
        assert value == pytest.approx(wasserstein_by_program(x, a, y, b, np.inf), rel=1e-14)


def test_ties_on_a_grid():
    grid = np.stack(np.meshgrid(np.arange(5.0), np.arange(5.0)), axis=-1).reshape(-1, 2)
    rng = np.random.default_rng(0)
    assert wasserstein(grid, grid[rng.permutation(25)] + [1.0, 0.0], p=np.inf) == 1.0
    assert wasserstein(grid, grid + [0.5, 0.5], p=np.inf) == pytest.approx(np.sqrt(0.5))


@pytest.mark.parametrize("uniform", [True, False])
def test_the_certificate_proves_the_threshold(uniform):
    rng = np.random.default_rng(5)
    for n in (4, 9, 25):
        D = cdist(rng.normal(size=(n, 2)), rng.normal(size=(n, 2)))
        w = (np.full(n, 1 / n),) * 2 if uniform else (random_weights(n, rng), random_weights(n, rng))
        found = bottleneck(D, *exact_masses(*w))
        assert D[found.rows, found.cols].max() == found.value
        assert witnessed_threshold(D, found.f, found.g) == found.value
        # Hall: the charged set has more mass than the atoms that are closer can take
        assert w[0] @ found.f + w[1] @ found.g > 1e-12
        # no pair below the threshold is charged
        assert (np.add.outer(found.f, found.g)[found.value > D] <= 0).all()


def test_a_small_mass_far_away_decides():
    for light in (1e-3, 1e-9, 1e-15):
        mu = DiscreteMeasure([[0.0, 0.0], [5.0, 0.0]], [1 - light, light])
        nu = DiscreteMeasure([[0.0, 0.0], [0.0, 1.0]], [0.5, 0.5])
        assert wasserstein(mu, nu, p=np.inf) == 5.0
        assert transport(mu, nu, p=np.inf).verify()


def test_is_the_limit_of_the_orders():
    rng = np.random.default_rng(7)
    x, y = rng.normal(size=(12, 2)), rng.normal(size=(9, 2))
    limit = wasserstein(x, y, p=np.inf)
    # W_p >= W_inf (least mass of a vertex of the plans)^{1/p}, masses are multiples of 1/36
    for p in (50, 500, 5000):
        assert limit * 36 ** (-1 / p) <= wasserstein(x, y, p=p) * (1 + 1e-12)
        assert wasserstein(x, y, p=p) <= limit * (1 + 1e-12)
