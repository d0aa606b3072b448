"""Covariances over an interval simplex, and the one-scalar bounds."""

import numpy as np
import pytest
from scipy.optimize import linprog

from otattn.lipschitz.constants.simplex import threshold_bounds
from otattn.lipschitz.relaxations import interval_simplex
from otattn.measures import DiscreteMeasure


def feasible_weights(low, high, rng, count):
    """Random weights between the bounds: vertices by filling in a random order, and mixtures of them."""
    vertices = []
    for _ in range(count):
        q, room = low.copy(), 1.0 - low.sum()
        for j in rng.permutation(len(low)):
            take = min(room, high[j] - low[j])
            q[j] += take
            room -= take
        vertices.append(q)
    mixed = rng.dirichlet(np.ones(count), size=count) @ np.array(vertices)
    return np.concatenate([vertices, mixed])


def interval(n, width, rng):
    p = rng.dirichlet(np.ones(n))
    return p * np.exp(-width), np.minimum(1.0, p * np.exp(width))


@pytest.mark.parametrize(("n", "d"), [(1, 2), (2, 1), (7, 1), (5, 2), (9, 3)])
@pytest.mark.parametrize("width", [0.0, 0.3, 2.0])
def test_no_weights_exceed_it(n, d, width):
    rng = np.random.default_rng(n * d)
    y = rng.standard_normal((n, d)) + 5.0
    low, high = interval(n, width, rng)
    bound = interval_simplex(y, low, high)
    assert bound.verify()
    best = 0.0
    for p in feasible_weights(low, high, rng, 30):
        norm = np.linalg.eigvalsh(DiscreteMeasure.normalized(y, p).covariance())[-1]
        best = max(best, norm)
        for share in (0.0, 0.2, 1.0):
            eta = np.array([share * ((y - p @ y) ** 2).sum(axis=1).max()])
            assert norm <= threshold_bounds((y - p @ y)[None], low[None], high[None], eta)[0] * (1 + 1e-12)
    assert best <= bound.value + 1e-14
    assert best <= bound.details["attained"] * (1 + 1e-9) or bound.details["attained"] <= bound.value
    if width == 0.0:
        assert bound.value == pytest.approx(best, rel=1e-6, abs=1e-12)


def test_one_dimension_is_a_linear_program():
    rng = np.random.default_rng(3)
    y = rng.standard_normal(8)
    low, high = interval(8, 0.5, rng)
    p = low + (high - low) * (1 - low.sum()) / (high - low).sum()
    # the relaxation centres at the middle weights p
    square = (y - p @ y) ** 2
    exact = -linprog(-square, A_eq=np.ones((1, 8)), b_eq=[1.0], bounds=list(zip(low, high, strict=True))).fun
    assert interval_simplex(y[:, None], low, high).value == pytest.approx(exact, rel=1e-6)
    etas = np.append(square, 0.0)
    values = [threshold_bounds((y - p @ y)[None, :, None], low[None], high[None], np.array([e]))[0] for e in etas]
    assert min(values) == pytest.approx(exact, rel=1e-10)  # the LP's dual optimum is at one of the squares


def test_whole_simplex_is_popoviciu():
    # all weights allowed, diametrical points: a quarter of the squared diameter
    y = np.array([[3.0, 0.0], [-3.0, 0.0], [0.0, 1.0]])
    value = interval_simplex(y, np.zeros(3), np.ones(3)).value
    assert 9.0 <= value <= 10.0


@pytest.mark.parametrize("factor", [1e-12, 1e6])
def test_scaling_translation_and_duplicates(factor):
    rng = np.random.default_rng(5)
    y = rng.standard_normal((6, 2))
    low, high = interval(6, 0.4, rng)
    plain = interval_simplex(y, low, high).value
    assert interval_simplex(factor * y, low, high).value == pytest.approx(factor**2 * plain, rel=1e-6)
    assert interval_simplex(y + 100.0, low, high).value == pytest.approx(plain, rel=1e-6)
    assert interval_simplex(np.ones((4, 3)), np.zeros(4), np.ones(4)).value == 0.0


def test_bad_intervals_are_refused():
    y = np.eye(2)
    for low, high in (([0.6, 0.6], [1, 1]), ([0, 0], [0.2, 0.2]), ([0.5, 0.5], [0.4, 0.6]), ([-0.1, 0], [1, 1])):
        with pytest.raises(ValueError, match="lower and upper"):
            interval_simplex(y, low, high)
