"""Softmax heads on ellipsoids: bounds that see how far the values reach, attacked by climbs inside the domain."""

import numpy as np
import pytest

import otattn as oa
from otattn import Box, Ellipsoid, LayerNormDomain, PointSet, SoftmaxAttention, bounds
from otattn.lipschitz.constants.regions import largest_norm
from otattn.lipschitz.relaxations import rows_and_columns

BOUNDS = (bounds.row_bound, bounds.column_bound, rows_and_columns)
MASKED = (bounds.row_bound, bounds.masked_row_bound, bounds.masked_column_bound, rows_and_columns)


def problem(seed):
    """A head, plain or masked, with or without bias, on a flat domain away from the origin, and a number of tokens."""
    rng = np.random.default_rng([31, seed])
    d, n = int(rng.integers(2, 5)), int(rng.integers(2, 8))
    A = rng.standard_normal((d, d)) * 10 ** rng.uniform(-1, 1.2)
    A = -A @ A.T if seed % 5 == 0 else A
    bias = rng.standard_normal(d) * (seed % 3)
    head = SoftmaxAttention(A, rng.standard_normal((int(rng.integers(1, 4)), d)), bias=bias)
    E, b = rng.standard_normal((d, d)) * 10 ** rng.uniform(-1.5, 0.3, (d, 1)), rng.standard_normal(d) * (seed % 4)
    gain = np.exp(rng.standard_normal(d))
    r = np.abs(E).sum(axis=1)
    domain = (Ellipsoid(E, b), LayerNormDomain(gain, 0.1 * b), Box(b - r, b + r))[seed % 7 % 3]
    return (oa.MaskedAttention(head) if seed % 2 else head), domain, n


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_climb_exceeds_the_bounds(seed):
    attention, domain, n = problem(seed)
    lower = oa.lipschitz_lower_bound(attention, domain=domain, n=n, rng=seed).value
    for bound in MASKED if seed % 2 else BOUNDS:
        assert lower <= bound(attention, domain=domain, n=n).value * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_no_random_tokens_exceed_the_bounds(seed):
    attention, domain, n = problem(seed)
    rng = np.random.default_rng(seed)
    values = [bound(attention, domain=domain, n=n).value for bound in (MASKED if seed % 2 else BOUNDS)]
    for _ in range(40):
        tokens = domain.project(domain.center + 10 ** rng.uniform(-1, 1) * rng.standard_normal((n, domain.dim)))
        assert oa.local_lipschitz(attention, tokens).particle <= min(values) * (1 + 1e-9)


def test_values_that_see_the_short_axis_only():
    """Logits of size 100 turn between values that are 1e-4 apart: the rows are nearly averages."""
    head = SoftmaxAttention(100.0 * np.eye(2)[::-1], [[0.0, 1.0]])
    flat = Ellipsoid(np.diag([1.0, 1e-4]))
    ball = bounds.row_bound(head, radius=1.0, n=16)
    here = bounds.row_bound(head, domain=flat, n=16)
    assert here.details["t"] == pytest.approx(100.0 * 1e-4, rel=1e-9)
    assert here.value < 4.1 < 200 < ball.value
    # a box and a finite set see it too
    for domain in (Box([-1.0, -1e-4], [1.0, 1e-4]), PointSet([[1.0, 1e-4], [-1.0, 0.0], [0.0, -1e-4]])):
        assert bounds.row_bound(head, domain=domain, n=16).value < 4.1
    assert (
        bounds.masked_average_bound(oa.MaskedAttention(head), domain=flat, n=16).value
        < bounds.masked_average_bound(oa.MaskedAttention(head), radius=1.0, n=16).value / 50
    )


def test_an_ellipsoid_that_is_a_ball_is_that_ball():
    rng = np.random.default_rng(5)
    head = SoftmaxAttention(3.0 * rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), bias=[0.1, 0.2, -0.3])
    turn = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    for bound in BOUNDS:
        ball = bound(head, radius=2.0, n=5).value
        # the program seeks its multipliers anew
        assert bound(head, domain=Ellipsoid(2.0 * turn), n=5).value == pytest.approx(ball, rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_the_program_on_an_ellipsoid_is_proved_in_intervals(seed):
    attention, domain, n = problem(seed)
    bound = rows_and_columns(attention, domain=domain, n=n)
    assert bound.verify(rigorous=True)
    assert bound.value < rows_and_columns(attention, domain=oa.Ball(_radius(domain)), n=n).value


def _radius(domain):

    return float(largest_norm(domain))


def flat_sets(de):
    corners = np.array([[1.0, de], [1.0, -de], [-1.0, de], [-1.0, -de]])
    return (
        Box([-1.0, -de], [1.0, de]),
        PointSet(np.vstack([corners, [0.985, 0.0]])),
        Ellipsoid(np.diag([1.5, 1.5 * de])),
    )


@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize("kind", range(3))
def test_values_of_a_small_range_may_deviate_as_much_as_they_like(n, kind):
    """Two anchors at opposite ends of the values, the tokens' spread tiny: false on boxes if the spread bounded the values."""
    de = 1e-2
    head = SoftmaxAttention(1e3 * np.eye(2), [[0.0, 1.0]])
    tokens = np.array([[1.0, de], [1.0, -de]] + [[0.985, 0.0]] * (n - 2))
    domain = flat_sets(de)[kind]
    reached = oa.local_lipschitz(head, tokens).particle
    for attention in (head, oa.MaskedAttention(head)):
        assert oa.local_lipschitz(attention, tokens).particle <= rows_and_columns(attention, domain=domain, n=n).value
    assert reached <= bounds.row_bound(head, domain=domain, n=n).value <= 3.0 * reached


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, [1.0, 0.5]])
@pytest.mark.parametrize(
    "domain",
    [
        PointSet([[1.0, 2.0]]),
        Box([1.0, 1.0], [1.0, 1.0]),
        Ellipsoid(np.zeros((2, 2))),
        Ellipsoid(1e-160 * np.eye(2)),
        Ellipsoid(np.diag([1e-155, 1e-170])),
        Ellipsoid(1e-200 * np.eye(2)),
    ],
)
def test_domains_that_are_nearly_points(domain, bias):
    head = SoftmaxAttention(2.0 * np.eye(2), np.eye(2), bias=bias)
    # equal tokens are averaged: the norm is 1
    assert 1.0 <= rows_and_columns(head, domain=domain, n=3).value <= 1.01
    assert 1.0 <= oa.lipschitz_upper_bound(head, domain=domain, n=3).value <= 1.0 + 1e-9
