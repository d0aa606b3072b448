"""Situations in which one term of a proven formula decides: the formula against a value that is attained there."""

import math

import numpy as np
import pytest
from scipy.special import lambertw

from otattn import bounds, relaxations
from otattn.attention import (
    ExponentialAttention,
    L2Attention,
    LinearAttention,
    MaskedAttention,
    RMSNorm,
    RotaryAttention,
    ScoreAttention,
    SoftmaxAttention,
)
from otattn.lipschitz import local_lipschitz
from otattn.lipschitz.arithmetic.intervals import lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import log_sum
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.constants.regions import Region, largest_norm, see
from otattn.lipschitz.constants.rows import two_largest
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
    seen = see(softmax_head(attention).on_span(), region)
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
        seen = see(softmax_head(line).on_span(), domain)
        assert pytest.approx(10.0, rel=1e-10) == seen.G
        assert seen.t == pytest.approx(5.0, rel=1e-10)
        assert seen.sigma == pytest.approx(1.5, rel=1e-9)
        assert seen.value_radius == pytest.approx(1.5, rel=1e-10)
        # max (2 x + 1)(y - x) with y = 4.5: at x = 3.5
        assert seen.kappa == pytest.approx(8.0, rel=1e-6)
        assert largest_norm(domain) == pytest.approx(4.5, rel=1e-10)
    box = Box([-1.0, -1.0], [1.0, 1.0])
    assert see(softmax_head(HEADS["one direction"]).on_span(), box).sigma == pytest.approx(2.0, rel=1e-8)


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
        assert see(softmax_head(attention).on_span(), domain).G >= 3.0
        # two tokens 2 and 2 - gap: the column of the larger one
        x = np.array([2.0, 1.5])
        P = np.exp(np.outer(x + 1.0, x))
        P /= P.sum(axis=1, keepdims=True)
        assert bounds.column_sum(attention, domain=domain, n=2).value >= P.sum(axis=0).max()


def test_half_the_diameter_of_a_point_set():
    """Two points: values 0 and 4 have the deviation 2, half their distance."""
    points = PointSet([[1.0], [5.0]])
    seen = see(softmax_head(SoftmaxAttention([[1.0]], [[1.0]])).on_span(), points)
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
        "rotary sequences": (
            bounds.rotary_gram_bound,
            RotaryAttention(A, B, V, query_bias=[0.3, 0.1], key_bias=[0.2, -0.5]),
        ),
        "rotary": (bounds.rotary_row_bound, RotaryAttention(A, B, V, query_bias=[0.3, 0.1], key_bias=[0.2, -0.5])),
        "score row": (bounds.score_row_bound, ScoreAttention(A, B, V, value_bias=[0.5, 2.0], sink=0.3, length=1.0)),
        "score column": (bounds.score_column_bound, ScoreAttention(A, B, V, key_norm=RMSNorm([1.0, 2.0], eps=0.1))),
    }


@pytest.mark.parametrize("name", small_maps())
@pytest.mark.parametrize("domain", ["ball", "ellipsoid", "box", "two points"])
def test_bounds_hold_at_extreme_tokens(name, domain):
    theorem, attention = small_maps()[name]
    rng = np.random.default_rng(4)
    points = extreme_points(DOMAINS[domain], rng)
    for n in (2, 3, 6):
        value = theorem(attention, domain=DOMAINS[domain], n=n).value
        for _ in range(8):
            X = points[rng.integers(len(points), size=n)]
            assert slope(attention, X) <= value * (1 + ROOM)


def test_gradients_of_l2_attention_are_attained_in_one_dimension():
    """``|2 k (q x - k y)|`` with q = 2, k = 1 on [2, 4]: 12 at x = 4, y = 2; half the length is 1."""
    for q, domain, largest in ((2.0, Box([2.0], [4.0]), 12.0), (-1.0, Box([2.0], [4.0]), 16.0), (2.0, Ball(1.0), 6.0)):
        found = bounds.l2_row_bound(L2Attention([[q]], [[1.0]], [[1.0]]), domain=domain, n=2)
        assert found.details["t"] == pytest.approx(largest, rel=1e-10)
        assert found.details["t"] >= largest


@pytest.mark.parametrize("kind", ["points", "box"])
def test_values_that_cancel_on_pairs_are_not_lost(kind):
    """``V (1, 1, 1) = 2^-54``, which is 0 in float64: two points at distance ``2 (1, 1, 1)`` still have a field part."""
    corner = np.ones(3)
    domain = PointSet([corner, -corner]) if kind == "points" else Box(-corner, corner)
    attention = SoftmaxAttention(1e25 * np.ones((3, 3)), [[1.0, 2.0**-54, -1.0]])
    # V C A with C = (1, 1, 1) (1, 1, 1)^T; the row A^T (1, 1, 1) is 3e25 (1, 1, 1)
    assert bounds.field_bound(attention, domain=domain).value >= 2.0**-54 * 3e25 * math.sqrt(3.0)


def test_logarithms_of_bounds_are_bounds_too():
    """One token: the constant is ``||V||``, 3; bounds of several heads are made of the logarithms."""
    for theorem in (bounds.row_bound, bounds.column_bound, bounds.density_bound):
        found = theorem(SoftmaxAttention([[1.0]], [[3.0]]), radius=1.0, n=1)
        assert found.log_value >= math.log(3.0)
        assert found.log_value == pytest.approx(math.log(3.0), abs=1e-10)


def test_a_bias_that_cancels_is_not_lost():
    """``A b = 1e20 2^-54`` at the centre ``b = (1, 1, 1)``, which is 0 in float64, and the domain is next to nothing."""
    row = 1e20 * np.array([1.0, 2.0**-54, -1.0])
    domain = Ellipsoid(1e-40 * np.eye(3), np.ones(3))
    seen = see(softmax_head(SoftmaxAttention(np.array([row, 0 * row, 0 * row]), np.eye(3))).on_span(), domain)
    assert seen.G >= 1e20 * 2.0**-54


def test_sums_of_logarithms_in_intervals():
    """``log(2 + 3)``, with and without a zero."""
    for zero in ((), (-math.inf,), (lift(-math.inf),)):
        found = log_sum(np.log(lift(2.0)), np.log(lift(3.0)), *zero)
        assert float(lower(found)) <= math.log(5.0) <= float(upper(found))
        assert float(upper(found)) - float(lower(found)) <= 1e-12


def test_an_interval_is_true_when_it_is_not_zero():
    assert bool(lift(1.0))
    assert bool(lift(-2.0))
    assert not bool(lift(0.0))


def test_the_first_power_of_an_interval_is_the_interval():
    x = lift(np.array([-0.3, 0.0, 0.1]))
    assert np.array_equal(lower(x**1.0), lower(x))
    assert np.array_equal(upper(x**1.0), upper(x))


def test_intervals_keep_what_is_known_of_their_ends():
    assert float(upper(np.cos(lift(0.0)))) == 1.0
    assert float(lower(np.cos(lift(math.pi)))) >= -1.0
    assert float(upper(np.sin(lift(1.5707963)))) == 1.0  # just below the maximum
    found = np.hypot(lift(3.0), lift(0.0))
    assert float(lower(found)) == 3.0 <= float(upper(found))


@pytest.mark.parametrize("offset", [-4.0, -0.5, 0.3, 4.0])
@pytest.mark.parametrize("size", [0.2, 1.0, 5.0])
def test_the_bias_enters_the_self_entropy_once(size, offset):
    """In one dimension: ``sup g^2 - (g z - tau)_+^2``, ``g = a z + c``, on a grid of z."""
    n = 5
    z = np.linspace(-1.0, 1.0, 2001)
    tau = float(lambertw((n - 1) / math.e).real)
    for a in (-size, size):
        g = a * z + offset
        least = float((g**2 - np.maximum(g * z - tau, 0.0) ** 2).max())
        head = SoftmaxAttention([[a]], [[1.0]], bias=[offset])
        found = relaxations.self_entropy(head, domain=Ball(1.0), n=n).value
        assert least * (1.0 - 1e-12) <= found <= 1.25 * least + 1e-9


@pytest.mark.parametrize("alpha", [-1.0, 0.5, 2.0])
def test_a_solver_proposes_the_multiplier_of_the_column_sums(alpha):
    head = SoftmaxAttention(alpha * np.eye(2), np.eye(2), bias=[0.7, -0.2])
    search = relaxations.column_exponent(head, domain=Ball(1.5))
    assert relaxations.column_exponent(head, domain=Ball(1.5), solver="CLARABEL").value == pytest.approx(
        search.value, rel=1e-6
    )


def test_a_local_bound_whose_square_leaves_float64():
    """Weights near ``e^600``: their squares overflow, and a sum with inf - inf in it proved nothing and was called 0."""
    mu = DiscreteMeasure([[0.0365, -0.2858], [0.278, 0.0754]], [0.44, 0.56])
    attention = ExponentialAttention([[3029.1, 794.0], [-6616.4, -1734.3]], [[-1.3, -0.4]])
    local = local_lipschitz(attention, mu).value
    assert 1e250 < local <= bounds.at_measure_bound(attention, mu).value <= 2.0 * local


@pytest.mark.parametrize("kind", [LinearAttention, ExponentialAttention])
def test_a_local_bound_counts_what_cancels(kind):
    """One token with ``h U + h' v g^T = 0``: the row's part of the bound is all rounding."""
    x = np.array([[1.7]])
    attention = kind([[-1.0 / 1.7**2]], [[1.0]]) if kind is ExponentialAttention else kind([[1.0]], [[1e-9]])
    value = bounds.at_measure_bound(attention, x).value
    assert local_lipschitz(attention, x).value <= value <= 3.0 * local_lipschitz(attention, x).value + 1e-6


def test_a_cluster_far_from_the_mean_keeps_its_covariance():
    """A row that sees one atom only: its covariance is a difference of second moments that cancel."""
    points = np.array([[0.0, 0.0], [1e6, 0.0], [1e6, 1.0]])
    attention = SoftmaxAttention(np.array([[1e-5, 0.0], [0.0, 3.0]]), np.eye(2))
    assert local_lipschitz(attention, points).value <= bounds.at_measure_bound(attention, points).value


def test_published_bound_on_a_domain_of_subnormal_size():
    attention = SoftmaxAttention([[0.3]], [[1.0]], bias=[2.0])
    for radius in (5e-324, 1e-310, 1e-300, 1e-200):
        found = bounds.castin2024_discrete(attention, radius=radius, n=3)
        assert found.value >= 1.0
        assert found.verify()
