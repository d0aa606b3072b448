"""What is done faster gives what the plain way gives: distances by products, flows in one pass, potentials of a matching."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

import otattn as oa
from otattn.distances import flows
from otattn.distances.costs import _by_products, pairwise_distances
from otattn.distances.duality import c_transform
from otattn.distances.masses import exact_masses
from otattn.distances.paths import matching_potentials

EPS = np.finfo(float).eps


@pytest.mark.parametrize("d", [32, 384])
def test_distances_by_products_keep_their_digits(d):
    """Far from the origin, with some pairs near each other and two equal: as exact as the docstring says."""
    rng = np.random.default_rng(d)
    x, y = rng.normal(size=(2, 80, d)) + 1e3
    y[3] = x[5] * (1.0 + 1e-9)
    y[7] = x[9]
    D = _by_products(x, y)
    assert D is not None
    exact = np.sqrt(((x[:, None].astype(np.longdouble) - y[None].astype(np.longdouble)) ** 2).sum(axis=2))
    assert D[9, 7] == 0.0
    far = exact > 0.0
    assert (np.abs(D - exact)[far] <= (d + 3) * EPS * exact[far]).all()


@pytest.mark.parametrize("scale", [1e-120, 1e120, 1e160])
def test_distances_by_products_leave_extreme_scales_alone(scale):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 70, 40))
    np.testing.assert_allclose(pairwise_distances(scale * x, scale * y), scale * pairwise_distances(x, y), rtol=1e-14)


def test_close_clouds_are_not_taken_by_products():
    x = np.random.default_rng(0).normal(size=(80, 40))
    assert _by_products(np.repeat(x[:8], 10, axis=0), x + 1e-9 * x[::-1]) is not None
    assert _by_products(np.repeat(x[:4], 20, axis=0), np.repeat(x[:4], 20, axis=0)) is None


@pytest.mark.parametrize("seed", range(4))
def test_flows_of_one_pass_are_those_of_the_cautious_way(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    n, m = 30, 41
    A, B = exact_masses(rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m)))
    R = rng.random((n, m))
    quick, _, _ = flows.network_simplex(R.copy(), A, B)
    assert flows._plain_flow(*quick[:2], A, B) is not None
    monkeypatch.setattr(flows, "_plain_flow", lambda *_: None)
    slow, _, _ = flows.network_simplex(R.copy(), A, B)
    for a, b in zip(quick, slow, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("rows", "cols", "A", "B"),
    [
        ([0, 0, 1, 1], [0, 1, 0, 1], [2, 2], [2, 2]),  # a cycle
        ([0, 1], [0, 1], [2, 2], [1, 3]),  # trees that do not balance
        ([0, 0, 1], [0, 1, 0], [1, 3], [3, 1]),  # a flow of nothing
        ([0, 0], [0, 1], [4, 1], [3, 2]),  # an atom without an arc
    ],
)
def test_flows_that_need_care_are_left_to_it(rows, cols, A, B):
    assert flows._plain_flow(np.array(rows), np.array(cols), A, B) is None


@pytest.mark.parametrize(("n", "shift"), [(5, 0.0), (60, 0.0), (200, 5.0)])
def test_potentials_of_a_matching_are_tight_and_feasible(n, shift):
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=(2, n, 3))
    C = pairwise_distances(x, y + shift) ** 2
    rows, partner = linear_sum_assignment(C)
    g = matching_potentials(C, partner, max_sweeps=512)
    f = C[rows, partner] - g[partner]
    assert (f[:, None] + g <= C + 1e-13 * C.max()).all()
    np.testing.assert_allclose(c_transform(C, g), f, rtol=0, atol=1e-13 * C.max())


def test_potentials_end_on_a_matching_that_is_not_optimal():
    """Its negative cycle would lower them for ever."""
    C = pairwise_distances(*np.random.default_rng(0).normal(size=(2, 20, 2)))
    assert np.isfinite(matching_potentials(C, np.arange(20), max_sweeps=8)).all()


def test_many_dimensions_and_weights_agree_with_the_certified_interval():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(2, 70, 48))
    a, b = rng.dirichlet(np.ones(70), size=2)
    mu, nu = oa.DiscreteMeasure(x, a), oa.DiscreteMeasure(y, b)
    found = oa.transport(mu, nu, p=3)
    assert found.verify()
    assert found.gap <= 1e-13
    assert found.lower <= oa.wasserstein(mu, nu, p=3) <= found.upper


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_certificate_verifies_where_distances_are_rounded_otherwise(p, monkeypatch):
    """Another BLAS adds in another order; here the other machine takes differences."""
    x, y = np.random.default_rng(p).normal(size=(2, 70, 384))
    found = oa.transport(x, y[:66], p=p)
    monkeypatch.setattr("otattn.distances.costs._by_products", lambda *_: None)
    assert found.verify()
