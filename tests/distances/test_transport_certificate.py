"""Certified transport: plans, potentials, intervals, and what verify() refuses."""

from dataclasses import replace

import numpy as np
import pytest
from distance_truth import ORDERS, assignment_by_brute_force, linear_program, random_weights
from scipy.sparse import csr_array
from scipy.spatial.distance import cdist

from otattn.distances import TransportResult, transport, transport_from_cost, wasserstein
from otattn.errors import ConvergenceError, MemoryBudgetError
from otattn.measures import DiscreteMeasure


def check_transport(result: TransportResult, *, gap: float = 1e-12) -> None:
    """Everything that a certificate claims, recomputed here from its plan and potentials."""
    mu, nu, p = result.mu, result.nu, result.p
    plan = result.plan.toarray()
    f, g = result.potentials
    assert (plan >= 0).all()
    np.testing.assert_allclose(plan.sum(axis=1), mu.weights, rtol=1e-12, atol=0)
    np.testing.assert_allclose(plan.sum(axis=0), nu.weights, rtol=1e-12, atol=0)
    D = cdist(mu.points, nu.points)
    if np.isinf(p):
        assert D[plan > 0].max() == pytest.approx(result.value, rel=1e-14)
        if result.value > 0:
            charged = f[:, None] + g > 0
            assert (plan * (f[:, None] + g)).sum() > 0.0
            assert D[charged].min() == pytest.approx(result.value, rel=1e-14)
    else:
        C = (D / result.scale) ** p
        assert ((C - f[:, None]) - g >= -4e-16 * (C + np.abs(f)[:, None] + np.abs(g))).all()
        assert result.value == pytest.approx(result.scale * (plan * C).sum() ** (1 / p), rel=1e-12)
    assert result.lower <= result.value <= result.upper
    assert result.gap == pytest.approx((result.upper - result.lower) / (result.upper or 1.0), abs=1e-15)
    assert result.gap <= gap
    assert result.status == "optimal"
    assert result.verify() is True


@pytest.mark.parametrize("p", ORDERS)
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize(("n", "m", "dim"), [(60, 60, 2), (40, 70, 3), (30, 30, 1), (1, 9, 2), (9, 1, 2), (1, 1, 3)])
def test_certified_to_1e_12(n, m, dim, uniform, p):
    rng = np.random.default_rng(n + m)
    mu = DiscreteMeasure(rng.normal(size=(n, dim)), None if uniform else random_weights(n, rng))
    nu = DiscreteMeasure(rng.normal(size=(m, dim)), None if uniform else random_weights(m, rng))
    result = transport(mu, nu, p=p)
    check_transport(result)
    assert wasserstein(mu, nu, p=p) == pytest.approx(result.value, rel=1e-13)


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
@pytest.mark.parametrize("uniform", [True, False])
def test_certified_at_two_hundred_atoms(uniform, p):
    rng = np.random.default_rng(200)
    x, y = rng.normal(size=(200, 4)), rng.normal(size=(200, 4)) + 0.2
    weights = (None, None) if uniform else (random_weights(200, rng), random_weights(200, rng))
    check_transport(transport(DiscreteMeasure(x, weights[0]), DiscreteMeasure(y, weights[1]), p=p))


@pytest.mark.slow
@pytest.mark.parametrize("uniform", [True, False])
def test_certified_at_twelve_hundred_atoms(uniform):
    rng = np.random.default_rng(1200)
    x, y = rng.normal(size=(1200, 2)), rng.normal(size=(1200, 2))
    weights = (None, None) if uniform else (random_weights(1200, rng), random_weights(1200, rng))
    check_transport(transport(DiscreteMeasure(x, weights[0]), DiscreteMeasure(y, weights[1])))


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
@pytest.mark.parametrize("separation", [1e-3, 1e-8, 1e-11])
@pytest.mark.parametrize("clusters", [False, True])
def test_certified_for_near_measures(p, separation, clusters):
    rng = np.random.default_rng(17)
    centres = rng.normal(size=(4, 3))[rng.integers(0, 4, 60)] if clusters else rng.normal(size=(60, 3))
    x = centres + separation * rng.normal(size=(60, 3))
    y = x + separation * rng.normal(size=(60, 3))
    w, order = random_weights(60, rng), rng.permutation(60)
    result = transport(DiscreteMeasure(x, w), DiscreteMeasure(y[order], w[order]), p=p)
    check_transport(result)
    assert 0.0 < result.value < 20 * separation


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
def test_the_interval_holds_the_truth(p):
    rng = np.random.default_rng(3)
    for separation in (1.0, 1e-7):
        x = rng.normal(size=(6, 2))
        y = x[rng.permutation(6)] + separation * rng.normal(size=(6, 2))
        truth = assignment_by_brute_force(x, y, p)
        result = transport(x, y, p=p)
        assert result.lower <= truth <= result.upper


@pytest.mark.parametrize("p", [60, 200])
def test_large_orders_have_a_scale(p):
    rng = np.random.default_rng(9)
    x = rng.normal(size=(20, 2))
    result = transport(x, x[::-1] + 1e-3 * rng.normal(size=(20, 2)), p=p)
    assert result.scale != 1.0
    f, g = result.potentials
    C = np.minimum(cdist(result.mu.points, result.nu.points) / result.scale, 1.3) ** p
    assert ((C - f[:, None]) - g >= -1e-14 * C).all()
    assert result.gap < 1e-12
    assert result.verify()


def test_equal_measures_cost_exactly_nothing():
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(30, 2)), random_weights(30, rng)
    for p in ORDERS:
        result = transport(DiscreteMeasure(x, w), DiscreteMeasure(x[::-1], w[::-1]), p=p)
        assert (result.value, result.lower, result.upper, result.gap) == (0.0, 0.0, 0.0, 0.0)
        assert result.verify()


@pytest.mark.parametrize("p", [1, 2, np.inf])
def test_zero_weight_atoms_get_feasible_potentials(p):
    rng = np.random.default_rng(2)
    mu = DiscreteMeasure(rng.normal(size=(6, 2)), [0.0, 0.2, 0.3, 0.0, 0.5, 0.0])
    nu = DiscreteMeasure(rng.normal(size=(5, 2)), [0.25, 0.0, 0.25, 0.5, 0.0])
    check_transport(transport(mu, nu, p=p))


def test_W15_the_certified_transport_refuses_too():
    x = np.zeros((60000, 2))
    with pytest.raises(MemoryBudgetError, match="230400000000 bytes"):
        transport(x, x)


@pytest.mark.parametrize("p", [1, 2, 3, np.inf])
def test_W16_five_atoms_against_many(p):
    rng = np.random.default_rng(16)
    result = transport(rng.normal(size=(5, 3)), rng.normal(size=(960, 3)), p=p)
    plan = result.plan
    assert plan.sum() == pytest.approx(1.0, abs=1e-12)
    np.testing.assert_allclose(plan.sum(axis=1), 1 / 5, rtol=1e-12)
    np.testing.assert_allclose(plan.sum(axis=0), 1 / 960, rtol=1e-12)
    check_transport(result)


@pytest.mark.parametrize("p", [2, np.inf])
def test_verify_refuses_what_was_tampered_with(p):
    rng = np.random.default_rng(4)
    result = transport(rng.normal(size=(8, 2)), DiscreteMeasure(rng.normal(size=(6, 2)), random_weights(6, rng)), p=p)
    assert result.verify()
    f, g = result.potentials
    plan = result.plan.toarray()
    other = plan.copy()
    other[0] = other[0][::-1]
    swapped = np.outer(result.mu.weights, result.nu.weights)  # right marginals, wrong cost
    wrong = {
        "value": [result.value * (1 + 1e-9), result.value * 0.5, np.nan],
        "lower": [result.lower * (1 - 1e-9), result.upper * 2],
        "upper": [result.upper * (1 + 1e-9), result.lower * 0.5],
        "gap": [0.5],
        "plan": [csr_array(p) for p in (plan * 0.5, other, swapped, -plan, plan[:5])],
        "potentials": [(f[:-1], g), (f * np.nan, g), (f * 0.0, g * 0.0)],
        "mu": [DiscreteMeasure(result.mu.points[::-1])],
        "nu": [DiscreteMeasure(result.nu.points)],
        "p": [1.0 if p == 2 else 2.0],
    }
    if p == 2:
        wrong["potentials"] += [(f + 1e-6, g), (f * 0.999, g)]
        wrong["scale"] = [2.0]
    for name, values in wrong.items():
        for value in values:
            assert replace(result, **{name: value}).verify() is False, (name, value)


def test_results_are_read_only():
    result = transport([[0.0], [1.0]], [[0.5], [2.0]])
    with pytest.raises(ValueError, match="read-only"):
        result.potentials[0][0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        result.plan.data[0] = 1.0
    with pytest.raises(AttributeError):
        result.value = 0.0
    assert "gap" in repr(result)


def test_a_distance_beyond_float64_is_refused():
    with pytest.raises(OverflowError, match="rescale"):
        transport([[1.5e308, 0.0]], [[-1.5e308, 0.0]])


# ------------------------------------------------------------------------------------------------ cost
# matrices


def check_plan(result, gap=1e-12):
    assert result.verify() is True
    assert result.lower <= result.value <= result.upper
    assert result.gap <= gap
    f, g = result.potentials
    C = result.cost
    assert ((C - f[:, None]) - g >= -4e-16 * (np.abs(C) + np.abs(f)[:, None] + np.abs(g))).all()


@pytest.mark.parametrize("s", [1e3, 1e8, 1e16, 1e32, 1e100])
def test_W4_a_cost_far_above_the_others(s):
    third = [1 / 3] * 3
    result = transport_from_cost(third, third, [[1, 2, s], [2, 5, s], [s, s, 3]])
    assert result.value == pytest.approx(7 / 3, rel=1e-14)
    check_plan(result)
    # the same with masses that are no assignment: all of row 0 and 1 moves inside the block, at its own
    # optimum
    weights = [0.2, 0.3, 0.5]
    general = transport_from_cost(weights, [0.4, 0.1, 0.5], [[1, 2, s], [2, 5, s], [s, s, 3]])
    assert general.value == pytest.approx(0.1 * 1 + 0.1 * 2 + 0.3 * 2 + 0.5 * 3, rel=1e-14)
    check_plan(general)


def test_W4_as_points():
    x = np.array([[0.0, 0.0], [1.0, 0.0], [1e16, 0.0]])
    y = np.array([[0.0, 1.0], [1.0, 2.0], [1e16, 3.0]])
    truth = assignment_by_brute_force(x, y, 2)
    assert wasserstein(x, y) == pytest.approx(float(truth), rel=1e-12)
    result = transport(x, y)
    assert result.lower <= truth <= result.upper


def test_W7_a_zero_weight_has_a_feasible_potential():
    result = transport_from_cost([0.5, 0.5, 0], [0.5, 0.25, 0.25], [[1, 3, 0], [4, 1, 2], [0, 0, 9]])
    assert result.value == pytest.approx(1.25, rel=1e-15)
    check_plan(result)


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (8, 2)])
def test_any_cost_against_a_linear_program(shape):
    rng = np.random.default_rng(sum(shape))
    a, b = random_weights(shape[0], rng), random_weights(shape[1], rng)
    for C in (
        rng.random(shape),
        rng.normal(size=shape),
        rng.integers(0, 3, size=shape),
        1e9 * rng.random(shape),
    ):
        result = transport_from_cost(a, b, C)
        shift = C.min()
        assert result.value - shift == pytest.approx(linear_program(C - shift + 0.0, a, b), rel=1e-8, abs=1e-9)
        check_plan(result)


def test_costs_of_many_magnitudes_in_one_matrix():
    rng = np.random.default_rng(0)
    for _ in range(20):
        C = 10.0 ** rng.uniform(-20, 20, size=(6, 6))
        weights = np.full(6, 1 / 6)
        result = transport_from_cost(weights, weights, C)
        check_plan(result)
        from scipy.optimize import linear_sum_assignment

        i, j = linear_sum_assignment(C)
        assert result.value == pytest.approx(C[i, j].mean(), rel=1e-12)


def test_plans_refuse_bad_input():
    with pytest.raises(ValueError, match="cost"):
        transport_from_cost([0.5, 0.5], [1.0], [[1.0, np.nan]])
    with pytest.raises(ValueError, match="a must"):
        transport_from_cost([0.5, 0.5], [1.0], [[1.0], [2.0], [3.0]])
    with pytest.raises(ValueError, match="sum"):
        transport_from_cost([0.5, 0.4], [1.0], [[1.0], [2.0]])


def test_plan_verify_refuses_what_was_tampered_with():
    result = transport_from_cost([0.5, 0.5], [0.25, 0.75], [[0.0, 1.0], [1.0, 0.5]])
    f, g = result.potentials
    for change in (
        {"value": result.value + 1e-9},
        {"lower": result.upper + 1.0},
        {"potentials": (f + 0.1, g)},
        {"potentials": (f - 0.1, g)},
        {"plan": csr_array(np.outer([0.5, 0.5], [0.25, 0.75]))},
        {"a": np.array([0.4, 0.6])},
        {"cost": result.cost[::-1]},
    ):
        assert replace(result, **change).verify() is False, change


def test_a_solver_that_stops_early_is_refused(monkeypatch):
    monkeypatch.setattr("otattn.distances.flows.MAX_PIVOTS", 3)
    rng = np.random.default_rng(0)
    with pytest.warns(UserWarning, match="numItermax"), pytest.raises(ConvergenceError, match="optimal plan"):
        transport(rng.normal(size=(50, 2)), rng.normal(size=(60, 2)))
