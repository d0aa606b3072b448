"""Situations in which one term of a proven formula decides: the formula against a value that is attained there."""

import math

import numpy as np
import pytest

from otattn import bounds
from otattn.attention import L2Attention, LinearAttention, MaskedAttention, RotaryAttention, SoftmaxAttention
from otattn.lipschitz.regions import Region, largest_norm, see
from otattn.lipschitz.row_constants import two_largest
from otattn.lipschitz.setting import softmax_form
from otattn.measures import Ball, Box, DiscreteMeasure, Ellipsoid, PointSet

ROOM = 1e-12
"""Relative rounding of the attained values here; bounds are rounded outward."""


def extreme_points(domain, rng):
    """Points of a domain, those of its boundary among them."""
    if isinstance(domain, PointSet):
        return domain.points
    if isinstance(domain, Box):
        bits = np.array(np.meshgrid(*[[0.0, 1.0]] * domain.dim)).reshape(domain.dim, -1).T
        return domain.lower + bits * (domain.upper - domain.lower)
    dim = 2 if domain.dim is None else domain.dim
    z = rng.standard_normal((60, dim if isinstance(domain, Ball) else domain.shape.shape[1]))
    z = np.concatenate([z, -z]) / np.linalg.norm(np.concatenate([z, z]), axis=1, keepdims=True)
    return (1.0 - 1e-15) * domain.radius * z if isinstance(domain, Ball) else z @ domain.shape.T + domain.center


DOMAINS = {
    "ball": Ball(1.3),
    "ellipsoid": Ellipsoid([[0.9, 0.4], [0.0, 0.3]], [1.0, -2.0]),
    "flat": Ellipsoid([[0.5], [1.0]], [0.3, 2.0]),
    "box": Box([0.5, -1.0], [1.5, 2.0]),
    "flat box": Box([1.0, -1.0], [1.0, 1.0]),
    "two points": PointSet([[1.0, 2.0], [2.0, -0.5]]),
    "triangle": PointSet([[0.0, 1.0], [math.sqrt(0.75), -0.5], [-math.sqrt(0.75), -0.5]]),
}
HEADS = {
    "any": SoftmaxAttention([[0.7, -0.4], [0.9, 0.2]], [[1.0, 0.5], [-0.3, 0.8]], bias=[0.4, -0.6]),
    "one direction": SoftmaxAttention(np.full((2, 2), 0.5), np.full((2, 2), 0.5)),
    "negative": SoftmaxAttention(-np.eye(2), np.eye(2), bias=[1.0, 1.0]),
    "skew": SoftmaxAttention([[0.0, 1.0], [-1.0, 0.0]], [[1.0, 0.0]]),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("domain", DOMAINS)
def test_numbers_of_a_region_hold_at_its_points(domain, head):
    attention, region = HEADS[head], DOMAINS[domain]
    A, V = attention.A, attention.V
    c = np.zeros(2) if attention.bias is None else attention.bias
    seen = see(softmax_form(attention), region)
    x = extreme_points(region, np.random.default_rng(1))
    g = x @ A.T + c
    gaps = (x[:, None] - x[None]).reshape(-1, 2)
    assert np.linalg.norm(g, axis=1).max() <= seen.G * (1 + ROOM)
    assert 0.5 * np.linalg.norm(gaps, axis=1).max() <= seen.region.half_diameter * (1 + ROOM)
    # <A x + c, y - x>, and the spread of the logits of a row
    logits = g @ x.T
    assert (logits - np.diagonal(logits)[:, None]).max() <= seen.kappa + ROOM * (1.0 + seen.t)
    assert 0.5 * (logits.max(axis=1) - logits.min(axis=1)).max() <= seen.t * (1 + ROOM)
    # two atoms of weight 1/2: the covariance is gap gap^T / 4
    values, keys = np.linalg.norm(gaps @ V.T, axis=1), np.linalg.norm(gaps @ A, axis=1)
    assert 0.25 * (values * keys).max() <= seen.sigma * (1 + ROOM)
    assert 0.5 * values.max() <= seen.value_radius * (1 + ROOM)
    assert largest_norm(region) >= np.linalg.norm(x, axis=1).max() * (1 - ROOM)


def test_numbers_of_a_region_are_attained():
    """One dimension, and diagonal matrices: the numbers are the maxima."""
    line = SoftmaxAttention([[2.0]], [[3.0]], bias=[1.0])
    for domain in (Ellipsoid([[0.5]], [4.0]), Box([3.5], [4.5]), PointSet([[3.5], [4.5]])):
        seen = see(softmax_form(line), domain)
        assert pytest.approx(10.0, rel=1e-10) == seen.G
        assert seen.t == pytest.approx(5.0, rel=1e-10)
        assert seen.sigma == pytest.approx(1.5, rel=1e-9)
        assert seen.value_radius == pytest.approx(1.5, rel=1e-10)
        # max (2 x + 1)(y - x) with y = 4.5: at x = 3.5
        assert seen.kappa == pytest.approx(8.0, rel=1e-6)
        assert largest_norm(domain) == pytest.approx(4.5, rel=1e-10)
    box = Box([-1.0, -1.0], [1.0, 1.0])
    assert see(softmax_form(HEADS["one direction"]), box).sigma == pytest.approx(2.0, rel=1e-8)


def test_the_corners_of_a_box_count():
    """Two atoms at opposite corners: ``V C A`` has norm 2, twice what the inscribed disc has."""
    box = Box([-1.0, -1.0], [1.0, 1.0])
    bound = bounds.field_bound(HEADS["one direction"], domain=box)
    assert 2.0 <= bound.value <= 2.0 * (1 + 1e-8)


def test_the_shape_of_a_box_holds_its_corners():
    """The ellipsoid of a box goes through the corners, in every dimension."""
    for d in (1, 2, 3, 20):
        r = np.linspace(0.5, 2.0, d)
        region = Region.of(Box(-r, r))
        corner = np.linalg.solve(region.shape, r)
        assert np.linalg.norm(corner) <= 1.0 + ROOM
        assert np.linalg.norm(corner) == pytest.approx(1.0, rel=1e-10)


def test_the_bias_of_a_centre_has_its_sign():
    """Logits ``(x + 1) y`` on [0, 2]: the gradient is 3 at the end, and the two-atom measure feels it."""
    attention = SoftmaxAttention([[1.0]], [[1.0]], bias=[1.0])
    for domain in (Ellipsoid([[1.0]], [1.0]), Box([0.0], [2.0]), PointSet([[0.0], [2.0]])):
        assert see(softmax_form(attention), domain).G >= 3.0
        # two tokens 2 and 2 - gap: the column of the larger one
        x = np.array([2.0, 1.5])
        P = np.exp(np.outer(x + 1.0, x))
        P /= P.sum(axis=1, keepdims=True)
        assert bounds.column_sum(attention, domain=domain, n=2).value >= P.sum(axis=0).max()


def test_half_the_diameter_of_a_point_set():
    """Two points: values 0 and 4 have the deviation 2, half their distance."""
    points = PointSet([[1.0], [5.0]])
    seen = see(softmax_form(SoftmaxAttention([[1.0]], [[1.0]])), points)
    assert seen.region.half_diameter == pytest.approx(2.0, rel=1e-10)
    assert seen.region.half_diameter >= 2.0
    assert seen.value_radius >= 2.0
    # a triangle's half diameter is below its radius
    triangle = Region.of(DOMAINS["triangle"])
    assert triangle.half_diameter == pytest.approx(math.sqrt(0.75), rel=1e-10)
    assert triangle.radius >= 1.0


def slope(attention, X):
    """Norm of the derivative at n tokens, the Lipschitz constant near them (p = 2)."""
    mu = X if attention.causal else DiscreteMeasure(X)
    return float(np.linalg.norm(attention.jacobian(mu).to_dense(), 2))


def test_two_largest_is_attained():
    """The maximum over token norms, on a fine grid of the share of the two largest."""
    for row, sigma, n in ((1.0, 0.5, 2), (1.0, 0.5, 5), (0.3, 2.0, 9), (2.0, 0.0, 3), (0.0, 1.5, 4)):
        s = np.linspace(0.0, 1.0, 400_001)
        # e_1^2 = e_2^2 = s / 2, the others share 1 - s
        total = np.sqrt(2.0 * s) + np.sqrt((n - 2.0) * (1.0 - s))
        square = n * row**2 * s + 2.0 * row * sigma * np.sqrt(s) * total + sigma**2
        best = math.sqrt(square.max())
        assert best <= two_largest(row, sigma, n) * (1 + ROOM)
        assert two_largest(row, sigma, n) == pytest.approx(best, rel=1e-9)


def small_maps():
    rng = np.random.default_rng(3)
    A, B, V = rng.standard_normal((3, 2, 2))
    return {
        "row": (bounds.row_bound, SoftmaxAttention(A, V)),
        "masked row": (bounds.masked_row_bound, MaskedAttention(SoftmaxAttention(A, V))),
        "masked column": (bounds.masked_column_bound, MaskedAttention(SoftmaxAttention(A, V))),
        "column": (bounds.column_bound, SoftmaxAttention(-A @ A.T, V)),
        "density": (bounds.density_bound, SoftmaxAttention(-A @ A.T, V)),
        "l2 row": (bounds.l2_row_bound, L2Attention(A, B, V)),
        "l2 column": (bounds.l2_column_bound, L2Attention(A, B, V)),
        "l2 column tied": (bounds.l2_column_bound, L2Attention(A, A, V)),
        "pointwise": (bounds.pointwise_bound, LinearAttention(A, V)),
        "rotary": (bounds.rotary_row_bound, RotaryAttention(A, B, V, query_bias=[0.3, 0.1], key_bias=[0.2, -0.5])),
    }


@pytest.mark.parametrize("name", small_maps())
@pytest.mark.parametrize("domain", ["ball", "ellipsoid", "box", "two points"])
def test_bounds_hold_at_extreme_tokens(name, domain):
    theorem, attention = small_maps()[name]
    rng = np.random.default_rng(4)
    points = extreme_points(DOMAINS[domain], rng)
    for n in (2, 3, 6):
        value = theorem(attention, domain=DOMAINS[domain], n=n).value
        for _ in range(20):
            X = points[rng.integers(len(points), size=n)]
            assert slope(attention, X) <= value * (1 + ROOM)
