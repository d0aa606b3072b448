"""Conditional distances: time marginals, slices, the penalised form."""

from dataclasses import replace

import numpy as np
import pytest
from distance_truth import ORDERS, random_weights

from otattn.distances import conditional_transport, conditional_wasserstein, wasserstein
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure


def slices(seed=0, n=24, dim=2, weighted=True):
    rng = np.random.default_rng(seed)
    times = rng.choice([0.0, 0.25, 0.5, 1.0], size=n)
    w = random_weights(n, rng) if weighted else np.full(n, 1 / n)
    order = rng.permutation(n)
    mu = SpaceTimeMeasure(times, rng.normal(size=(n, dim)), w)
    nu = SpaceTimeMeasure(times[order], rng.normal(size=(n, dim)), w[order])
    return mu, nu


def test_C1_unmatched_times_are_named():
    mu = SpaceTimeMeasure([0.0, 1.0], [[0.0], [1.0]])
    nu = SpaceTimeMeasure([0.0, 2 / 3], [[0.0], [1.0]])
    for function in (conditional_wasserstein, conditional_transport):
        with pytest.raises(ValueError, match="time marginal") as error:
            function(mu, nu)
        assert "time 0.666666666667 has mass 0 in mu and 0.5 in nu" in str(error.value)
        assert "time 1 has mass 0.5 in mu and 0 in nu" in str(error.value)


@pytest.mark.parametrize("p", ORDERS)
def test_C2_swapped_in_time(p):
    mu = SpaceTimeMeasure([0.0, 1.0], [[0.0], [1.0]])
    nu = SpaceTimeMeasure([0.0, 1.0], [[1.0], [0.0]])
    assert conditional_wasserstein(mu, nu, p=p) == 1.0
    assert conditional_wasserstein(mu, mu, p=p) == 0.0
    assert wasserstein(mu.space_marginal(), nu.space_marginal(), p=p) == 0.0


def test_C3_time_masses_differ():
    mu = SpaceTimeMeasure([0.0, 1.0], [[0.0], [1.0]], [0.5, 0.5])
    nu = SpaceTimeMeasure([0.0, 1.0], [[0.0], [1.0]], [0.6, 0.4])
    with pytest.raises(ValueError, match=r"mass 0\.5 in mu and 0\.6 in nu"):
        conditional_wasserstein(mu, nu)


@pytest.mark.parametrize("p", ORDERS)
def test_sequences_with_one_token_a_time(p):
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(500, 3)), rng.normal(size=(500, 3))
    moved = np.linalg.norm(X - Y, axis=1)
    truth = moved.max() if np.isinf(p) else np.mean(moved**p) ** (1 / p)
    assert conditional_wasserstein(X, Y, p=p) == pytest.approx(truth, rel=1e-13)
    order = rng.permutation(500)
    shuffled = SpaceTimeMeasure(np.arange(1, 501)[order] / 500, Y[order])
    assert conditional_wasserstein(SpaceTimeMeasure.from_sequence(X), shuffled, p=p) == pytest.approx(truth, rel=1e-13)


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("weighted", [True, False])
def test_slices_by_hand(p, weighted):
    mu, nu = slices(weighted=weighted)
    times, masses = mu.time_marginal()
    values = []
    for t in times:
        inside = [DiscreteMeasure.normalized(m.points[m.times == t], m.weights[m.times == t]) for m in (mu, nu)]
        values.append(wasserstein(*inside, p=p))
    truth = max(values) if np.isinf(p) else (masses @ np.array(values) ** p) ** (1 / p)
    assert conditional_wasserstein(mu, nu, p=p) == pytest.approx(truth, rel=1e-13)
    result = conditional_transport(mu, nu, p=p)
    assert result.value == pytest.approx(truth, rel=1e-13)
    np.testing.assert_allclose(result.values, values, rtol=1e-13)
    np.testing.assert_array_equal(result.times, times)
    np.testing.assert_allclose(result.masses, masses, rtol=1e-14)
    assert result.lower <= result.value <= result.upper
    assert result.upper - result.lower <= 1e-12 * result.value
    assert result.verify() is True
    plan = result.plan.toarray()
    np.testing.assert_allclose(plan.sum(axis=1), mu.weights, rtol=1e-12)
    np.testing.assert_allclose(plan.sum(axis=0), nu.weights, rtol=1e-12)
    assert (plan[mu.times[:, None] != nu.times] == 0.0).all()
    assert [part.sum() for part in result.plans] == pytest.approx(np.ones(len(times)))


def test_laws():
    mu, nu = slices(1)
    rho = SpaceTimeMeasure(mu.times, np.random.default_rng(2).normal(size=(mu.n, 2)), mu.weights)
    for p in ORDERS:
        base = conditional_wasserstein(mu, nu, p=p)
        assert conditional_wasserstein(nu, mu, p=p) == pytest.approx(base, rel=1e-13)
        assert base <= conditional_wasserstein(mu, rho, p=p) + conditional_wasserstein(rho, nu, p=p)
        assert wasserstein(mu.space_marginal(), nu.space_marginal(), p=p) <= base * (1 + 1e-12)
        assert conditional_wasserstein(mu, mu, p=p) == 0.0


@pytest.mark.parametrize("p", [1, 2, 3])
def test_penalised_increases_to_the_exact_value(p):
    mu, nu = slices(3)
    exact = conditional_wasserstein(mu, nu, p=p)
    values = [
        conditional_wasserstein(mu, nu, p=p, method="penalized", penalty=strength)
        for strength in (1e-2, 1.0, 1e2, 1e4, 1e8, 1e14)
    ]
    assert (np.diff(values) >= -1e-12 * exact).all()
    assert values[0] < 0.9 * exact
    assert values[-1] == pytest.approx(exact, rel=1e-12)
    assert all(v <= exact * (1 + 1e-12) for v in values)
    # without a penalty it would be the distance of the space marginals
    loose = conditional_wasserstein(mu, nu, p=p, method="penalized", penalty=1e-12)
    assert loose == pytest.approx(wasserstein(mu.space_marginal(), nu.space_marginal(), p=p), rel=1e-9)


def test_penalised_needs_no_common_times():
    mu, nu = SpaceTimeMeasure([0.0], [[0.0]]), SpaceTimeMeasure([0.5], [[3.0]])
    value = conditional_wasserstein(mu, nu, p=2, method="penalized", penalty=16.0)
    assert value == pytest.approx(np.sqrt(9.0 + 4.0), rel=1e-14)


def test_arguments_of_the_methods():
    mu, nu = slices(4)
    for options in ({"method": "penalized"}, {"method": "penalized", "penalty": -1.0}, {"method": "other"}):
        with pytest.raises(ValueError, match=r"penal|method"):
            conditional_wasserstein(mu, nu, **options)
    with pytest.raises(ValueError, match="finite p"):
        conditional_wasserstein(mu, nu, p=np.inf, method="penalized", penalty=1.0)
    with pytest.raises(ValueError, match="drop one"):
        conditional_wasserstein(mu, nu, penalty=1.0)
    with pytest.raises(TypeError, match="times"):
        conditional_wasserstein(DiscreteMeasure([[0.0]]), nu)
    with pytest.raises(ValueError, match="dimensions 2 and 3"):
        conditional_wasserstein(mu, np.zeros((3, 3)))


def test_times_within_the_tolerance_are_one_time():
    mu = SpaceTimeMeasure([0.1 + 0.2, 0.3, 1.0], [[0.0], [1.0], [5.0]])
    nu = SpaceTimeMeasure([0.3, 0.3, 1.0], [[1.0], [0.0], [5.0]])
    assert 0.1 + 0.2 != 0.3
    assert conditional_wasserstein(mu, nu) == 0.0
    with pytest.raises(ValueError, match="time marginal"):
        conditional_wasserstein(mu, nu, time_tol=0.0)
    assert conditional_transport(mu, nu, time_tol=1e-9).verify()


def test_atoms_of_weight_zero_have_no_time():
    mu = SpaceTimeMeasure([0.0, 0.5, 1.0], [[0.0], [9.0], [1.0]], [0.5, 0.0, 0.5])
    nu = SpaceTimeMeasure([0.0, 1.0], [[1.0], [1.0]])
    assert conditional_wasserstein(mu, nu, p=1) == 0.5
    assert conditional_transport(mu, nu, p=1).plan.toarray().sum(axis=1) == pytest.approx([0.5, 0.0, 0.5])


def test_verify_refuses_what_was_tampered_with():
    mu, nu = slices(5)
    result = conditional_transport(mu, nu)
    worse = replace(result.slices[0], value=result.slices[0].value * 1.5)
    for change in (
        {"value": result.value * (1 + 1e-9)},
        {"lower": 0.0},
        {"upper": result.upper * 2},
        {"values": result.values[::-1]},
        {"slices": result.slices[::-1]},
        {"slices": result.slices[:-1]},
        {"slices": (worse, *result.slices[1:])},
        {"masses": result.masses[::-1]},
        {"p": 1.0},
        {"mu": nu},
    ):
        assert replace(result, **change).verify() is False, change
