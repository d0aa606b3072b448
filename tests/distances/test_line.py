"""Transport on the line by sorting: exact plans, tight potentials, certificates that reject what is wrong."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy.sparse import csr_array

from otattn.distances import line, transport, wasserstein
from otattn.distances.costs import pairwise_distances, scaled_cost
from otattn.distances.line import monotone_plan
from otattn.distances.plan import feasible, marginals_agree
from otattn.distances.transport import _interval
from otattn.measures import DiscreteMeasure

ORDERS = (1.0, 1.5, 2.0, 3.0, 20.0, np.inf)


@pytest.fixture
def sorting(monkeypatch):
    monkeypatch.setattr(line, "LINE_PAIRS", 0)


def pair(seed, n=23, m=31):
    rng = np.random.default_rng(seed)
    a, b = rng.random(n) ** (seed % 3 * 4), rng.random(m)
    a[rng.integers(n)] = b[rng.integers(m)] = 0.0
    x, y = rng.normal(size=(n, 1)), np.round(rng.normal(size=(m, 1)), 1)
    return DiscreteMeasure.normalized(x, a), DiscreteMeasure.normalized(y, b)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("seed", range(6))
def test_agrees_with_the_certificate_on_all_pairs(seed, p, monkeypatch):
    mu, nu = pair(seed)
    dense = transport(mu, nu, p=p)
    monkeypatch.setattr(line, "LINE_PAIRS", 0)
    result = transport(mu, nu, p=p)
    assert result.verify()
    assert result.lower <= result.value <= result.upper
    assert result.gap <= 1e-13
    assert result.value == pytest.approx(dense.value, rel=1e-10)
    assert result.value == pytest.approx(wasserstein(mu, nu, p=p), rel=1e-12)
    assert result.lower <= dense.upper
    assert dense.lower <= result.upper
    f, g = result.potentials
    if np.isfinite(p):
        C = scaled_cost(pairwise_distances(mu.points, nu.points), p, result.scale)
        # off the staircase feasibility follows from the Monge inequality, to rounding of sums of costs
        assert (C - f[:, None] - g >= -1e-13 * C.max()).all()
        dual = mu.weights @ f + nu.weights @ g
        assert dual == pytest.approx(float(result.plan.multiply(C).sum()), rel=1e-9, abs=1e-13 * C.max())
    else:
        charged = np.add.outer(f, g) > 0
        assert pairwise_distances(mu.points, nu.points)[charged].min() == result.value
        assert mu.weights @ f + nu.weights @ np.maximum(g, -1.0) > 0


def test_potentials_of_many_points_are_feasible_on_every_pair():
    rng = np.random.default_rng(0)
    mu, nu = (DiscreteMeasure(rng.normal(size=(n, 1))) for n in (700, 900))
    for p in (1.0, 2.0, 3.5):
        result = transport(mu, nu, p=p)
        assert line.by_sorting(mu, nu)
        f, g = result.potentials
        C = scaled_cost(pairwise_distances(mu.points, nu.points), p, result.scale)
        assert (C - f[:, None] - g >= -1e-12 * C.max()).all()
        assert p != 1.0 or feasible(C, f, g)


def test_wrong_answers_are_rejected(sorting):
    mu, nu = pair(1)
    for p in (1.0, 2.0, np.inf):
        result = transport(mu, nu, p=p)
        f, g = result.potentials
        bent = f.copy()
        bent[3] += 1e-3
        dense = result.plan.toarray()
        turned = dense.copy()
        (i, k), (j, m) = (np.nonzero(dense)[axis][[2, -3]] for axis in (0, 1))
        amount = 0.5 * min(dense[i, j], dense[k, m])
        turned[i, j] -= amount
        turned[k, m] -= amount
        turned[i, m] += amount
        turned[k, j] += amount
        assert marginals_agree(csr_array(turned), mu.weights, nu.weights)
        for change in (
            {"potentials": (bent, g)},
            {"potentials": (f, g[:-1])},
            {"potentials": (f, np.full_like(g, np.nan))},
            {"plan": csr_array(turned)},
            {"plan": csr_array(2.0 * dense)},
            {"value": result.value * 1.01},
            {"upper": result.upper * 0.99},
            {"lower": result.lower * 1.01},
            {"lower": 0.0},
            {"gap": 0.5},
        ):
            assert not replace(result, **change).verify(), change


def test_not_monotone_is_seen():
    mu, nu = DiscreteMeasure([[0.0], [0.0], [1.0]]), DiscreteMeasure([[5.0], [6.0], [7.0]])
    rows = np.arange(3)
    assert line.is_monotone(mu, nu, rows, np.array([1, 0, 2]))  # the first two atoms are one point
    assert not line.is_monotone(mu, nu, rows, np.array([2, 0, 1]))


def test_plans_of_unequal_weights_are_exact():
    """Flows from the definition, in fractions: the overlap of the intervals of the two quantile functions."""
    A, B = [3, 5, 2, 7], [4, 4, 9]
    rows, cols, mass = monotone_plan(np.array([4.0, 1.0, 3.0, 2.0]), A, np.array([0.5, 0.25, 0.75]), B)
    order_x, order_y = [1, 3, 2, 0], [1, 0, 2]
    expected = {}
    start = 0
    for i in order_x:
        low = 0
        for j in order_y:
            overlap = min(start + A[i], low + B[j]) - max(start, low)
            if overlap > 0:
                expected[i, j] = Fraction(overlap, 17)
            low += B[j]
        start += A[i]
    assert {(int(i), int(j)): float(w) for i, j, w in zip(rows, cols, mass, strict=True)} == pytest.approx(
        {key: float(value) for key, value in expected.items()}, rel=1e-15
    )


def test_rounding_of_the_weights_is_not_transported():
    """Weights that agree to rounding only: no mass goes across, however far the next atom is."""
    x = np.array([[0.0], [1e6], [2e6]])
    w = np.array([0.1, 0.2, 0.7])
    v = np.array([np.nextafter(0.1, 1.0), 0.2, np.nextafter(0.7, 0.0)])
    assert wasserstein(DiscreteMeasure(x, w), DiscreteMeasure(x + 1e-3, v), p=2) == pytest.approx(1e-3, rel=1e-6)
    far = transport(DiscreteMeasure(x, w), DiscreteMeasure(x + 1e-3, v), p=np.inf)
    assert far.value == pytest.approx(1e-3, rel=1e-6)


def test_an_atom_lighter_than_rounding_is_served():
    mu = DiscreteMeasure([[0.0], [1.0], [2.0]], [0.5, 1e-30, 0.5])
    nu = DiscreteMeasure([[0.0], [3.0]], [0.5, 0.5])
    rows, _, mass = monotone_plan(
        np.array([0.0, 1.0, 2.0]), [10**30, 2, 10**30], np.array([0.0, 3.0]), [10**30 + 1] * 2
    )
    assert mass[rows == 1].sum() == pytest.approx(1e-30, rel=1e-12)
    assert wasserstein(mu, nu, p=1) == pytest.approx(0.5, rel=1e-12)


def test_charges_allow_for_the_number_of_terms():
    """Potentials of a p = inf problem whose charge is of the size of the rounding of its sum prove nothing."""
    rng = np.random.default_rng(0)
    n = 400
    mu, nu = (DiscreteMeasure(rng.normal(size=(n, 2))) for _ in range(2))
    result = transport(mu, nu, p=np.inf)
    D = pairwise_distances(mu.points, nu.points)
    eps = np.finfo(float).eps
    for charge, proven in ((100, 0.0), (2000, D.min())):  # in roundings of potentials of size 1, added over 400 terms
        f, g = np.full(n, 1.0 + charge * eps), np.full(n, -1.0)
        _, lower, _ = _interval(mu, nu, np.inf, result.plan, f, g, D)
        assert lower == pytest.approx(proven, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, 2.0, np.inf])
def test_a_million_points(p):
    rng = np.random.default_rng(0)
    n = 10**6
    x, y = rng.normal(size=(n, 1)), rng.normal(size=(n, 1)) + 0.1
    result = transport(x, y, p=p)
    moved = np.abs(np.sort(x[:, 0]) - np.sort(y[:, 0]))
    expected = moved.max() if np.isinf(p) else np.mean(moved**p) ** (1 / p)
    assert result.value == pytest.approx(expected, rel=1e-12)
    assert result.plan.nnz == n
    assert result.gap < 1e-12
    assert result.verify()
