"""Situations in which one term of the constants that bounds are made of decides; exact numbers are fractions."""

import itertools
import math
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest

from otattn import bounds, relaxations
from otattn.attention import MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz.arithmetic.balls import BallMatrix, exact_arithmetic
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.constants.regions import Region, see
from otattn.lipschitz.constants.rows import _density_excess
from otattn.lipschitz.constants.self_logit import SelfLogit, least_stretch, unit_head
from otattn.lipschitz.constants.simplex import _dual as simplex_dual
from otattn.lipschitz.constants.sum_of_heads import combine_heads
from otattn.lipschitz.relaxations import interval_simplex
from otattn.measures import Ball, Box, Ellipsoid, PointSet

A1, B1 = 1.0 + 2.0**-27, 1.0 + 2.0**-26 + 2.0**-28
"""Their product is not a float."""
ULP = 2.0**-52


def product_and_rest(a, b):
    """``fl(a b)`` and what is missing from it."""
    return a * b, Fraction(a) * Fraction(b) - Fraction(a * b)


def test_half_the_diameter_of_one_point_is_zero():
    assert Region.of(PointSet([[1.0, -3.0]])).half_diameter == 0.0


@pytest.mark.parametrize("kind", ["points", "box"])
def test_keys_that_cancel_on_pairs_are_not_lost(kind):
    """``A^T (1, 1, 1) = 2^-54 (1, 1, 1)``, which is 0 in float64: two points at distance ``2 (1, 1, 1)`` have a field part."""
    corner = np.ones(3)
    domain = PointSet([corner, -corner]) if kind == "points" else Box(-corner, corner)
    attention = SoftmaxAttention(np.outer([1.0, 2.0**-54, -1.0], corner), 1e25 * corner[None])
    # V C A with C = (1, 1, 1) (1, 1, 1)^T: 3e25 times 2^-54 (1, 1, 1)
    assert bounds.field_bound(attention, domain=domain).value >= 2.0**-54 * 3e25 * math.sqrt(3.0)


def test_the_largest_gradient_with_a_bias_across():
    """``|diag(1, 1/10) x + (0, 1)|`` on the unit disc: ``2 - s^2 + s/5 + s^2/100`` is largest at ``s = 10/99``."""
    head = SoftmaxAttention(np.diag([1.0, 0.1]), np.eye(2), bias=[0.0, 1.0])
    for domain in (Ball(1.0), Ellipsoid(np.eye(2), np.zeros(2))):
        assert see(softmax_head(head), domain).G == pytest.approx(math.sqrt(2.0 + 1.0 / 99.0), rel=1e-9)


def test_a_tangent_is_above_the_cubic_of_the_density():
    """``f(q) = (1 - r q)(1 + b q (1 - q))`` from ``meet`` on, at any q in ``[meet, 1/2]``."""
    rng = np.random.default_rng(0)

    def f(x):
        return (1.0 - rest * x) * (1.0 + b * x * (1.0 - x))

    near = 0
    for _ in range(200):
        rest, b, q = rng.random(), 10.0 ** rng.uniform(-2, 2), 0.5 * rng.random()
        meet = q * rng.choice([1.0, rng.random(), 0.0])
        most = f(np.linspace(meet, 1.0, 2001)).max()
        bound = f(q) + _density_excess(rest, b, q, meet)
        assert most <= bound * (1 + 1e-12)
        near += bound <= 1.02 * most
    assert near >= 20


@pytest.mark.parametrize("alpha", [0.5, 3.0])
def test_the_row_constant_is_at_most_what_the_entropy_gives(alpha):
    head, region, n = SoftmaxAttention(alpha * np.eye(2), np.eye(2)), Ball(2.0), 4
    W = relaxations.self_entropy(head, domain=region, n=n).value
    row = relaxations.row_certificate(head, domain=region, n=n).value
    assert row <= min(math.sqrt(1.0 + W), 1.0 + math.sqrt(W / 2.0)) * (1 + 1e-9)


@pytest.mark.parametrize("radius", [1e-3, 1.0, 100.0])
def test_a_shift_that_cancels_enters_the_self_entropy(radius):
    """``g = -z/10 + rest`` around a far centre: ``g z`` is negative where ``|g|`` is largest, and W is ``max g^2 R^2``."""
    for k in range(1, 30):
        centre = radius * 1e13 * k / 7.0
        shift, rest = product_and_rest(0.1, centre)
        head = SoftmaxAttention([[-0.1]], [[1.0]], bias=[shift])
        exact = ((Fraction(0.1) * Fraction(radius) + abs(rest)) * Fraction(radius)) ** 2
        assert exact <= Fraction(relaxations.self_entropy(head, domain=Ellipsoid([[radius]], [centre]), n=3).value)


def test_a_shift_that_cancels_enters_the_column_exponent():
    """A head of one query and one key on a small box around a far centre, where its bias takes away all of the query."""
    for k in range(1, 30):
        size, centre = 1e-9, 1e3 * k / 7.0
        shift, rest = product_and_rest(A1, centre)
        key = [1.0, 0.1]
        head = SoftmaxAttention.from_qkv([[A1, 0.0]], [key], np.eye(2), scale=1.0, query_bias=[-shift])
        low = np.array([centre - size, -size])
        domain = Box(low, low + 2 * size)
        # at tokens z with the first entry of the centre: the query is what is missing of the product
        middle = Fraction(centre) * Fraction(A1) - Fraction(shift)
        assert middle == rest
        gap = sum(
            abs(Fraction(t)) * min(Fraction(u) - Fraction(m), Fraction(m) - Fraction(v))
            for t, u, m, v in zip(key, domain.upper, [centre, 0.0], domain.lower, strict=True)
        )
        assert abs(rest) * gap <= Fraction(relaxations.column_exponent(head, domain=domain).value)


@pytest.mark.parametrize(("alpha", "c"), [(1.0, 0.5), (-2.0, 1.0), (0.3, -2.0)])
def test_the_logit_of_a_token_with_itself_is_met(alpha, c):
    """``g z >= nu g^2 - lam z^2 - const`` with ``g = alpha z + c`` in one dimension, with equality at some z."""
    head = unit_head(SoftmaxAttention([[alpha]], [[1.0]], bias=[c]), Ball(1.0))
    nu, gap = (x.ravel() for x in np.meshgrid([-1.0, 0.0, 0.7, 5.0], [0.1, 1.0]))
    family = SelfLogit.build(head, nu, gap)
    square, linear = alpha - family.nu * alpha**2 + family.lam, c - 2.0 * family.nu * alpha * c
    least = family.const - family.nu * c**2 - linear**2 / (4.0 * square)
    assert (least >= 0.0).all()
    assert (least <= 1e-9 * (1.0 + np.abs(family.const))).all()


def test_the_least_stretch_is_proved():
    pytest.importorskip("flint", reason="python-flint is needed for ball arithmetic")
    with exact_arithmetic():
        for sizes in ((0.5, 0.3), (3.0, 2.0)):
            low = least_stretch(unit_head(SoftmaxAttention(np.diag(sizes), np.eye(2)), Ball(1.0), exact=True))
            assert low <= min(sizes)
            assert low == pytest.approx(min(sizes), rel=1e-10)


def test_weights_that_sum_to_more_than_one_are_no_weights():
    """Ten times the float 0.1 is above one, by less than float64 sees."""
    pytest.importorskip("flint", reason="python-flint is needed for ball arithmetic")
    y = np.linspace(-1.0, 1.0, 10)[:, None]
    assert interval_simplex(y, np.full(10, 0.05), np.full(10, 0.3)).verify(rigorous=True)
    over = interval_simplex(y, np.full(10, 0.1), np.full(10, 0.3))
    assert sum([Fraction(0.1)] * 10) > 1
    assert not over.verify(rigorous=True)


def test_a_sum_over_many_points_counts_its_rounding():
    """``sum_j high_j y_j^2``, the dual value for N = L = 0: one large term, and many that each round away."""
    n = 20_000
    y = np.full((n, 1), 2.0**-26 * 0.6)
    y[0] = 1.0
    high = np.ones(n)
    value = simplex_dual(
        {"points": y, "lower": np.zeros(n), "upper": high, "scale": 1.0},
        {"N": np.zeros((1, 1)), "L": np.zeros((n, 1, 1))},
    )
    assert sum(Fraction(float(t)) ** 2 for t in y[:, 0]) <= Fraction(value)


def cancelling(k):
    """``W (1, 2k)``, ``V (2k, 1)`` whose product is 0 in float64, and the exact product."""
    shift, rest = product_and_rest(A1, B1)
    return np.tile([A1, 1.0], k)[None], np.tile([B1, -shift], k)[:, None], k * rest


@pytest.mark.parametrize("k", [1, 4, 50])
def test_outputs_and_values_that_cancel_are_not_lost(k):
    """One token goes to W V times itself."""
    W, V, exact = cancelling(k)
    attention = MultiHeadAttention([SoftmaxAttention([[0.0]], V)], outputs=[W])
    assert exact != 0
    found = bounds.at_measure_bound(attention, [[1.0]]).value
    assert abs(exact) <= Fraction(found) <= Fraction(1e-9)


def test_an_interval_head_counts_the_rounding_of_its_values():
    """``W V`` is a few units in the last place, known to about as many."""
    shift, rest = product_and_rest(A1, B1)
    for k in range(-20, 21):
        attention = MultiHeadAttention([SoftmaxAttention([[0.0]], [[B1], [-(shift + k * ULP)]])], outputs=[[[A1, 1.0]]])
        exact = abs(Fraction(A1) * Fraction(B1) - Fraction(shift + k * ULP))
        assert exact <= Fraction(relaxations.local_ball(attention, [[1.0]], 0.0).value)
    assert rest != 0


@pytest.mark.parametrize("exact", [False, True])
def test_orthogonal_heads_combine_to_the_hypotenuse(exact):
    U = [np.diag([3.0, 0.0]), np.diag([0.0, 4.0])]
    if exact:
        pytest.importorskip("flint", reason="python-flint is needed for ball arithmetic")
        U = [BallMatrix.exact(M) for M in U]
    for logs in itertools.product([0.0, 2.0], repeat=2):
        with exact_arithmetic() if exact else nullcontext():
            found, shares = combine_heads(U, list(logs))
        value = math.hypot(3.0 * math.exp(logs[0]), 4.0 * math.exp(logs[1]))
        assert math.exp(top(found)) == pytest.approx(value, rel=1e-3)
        assert math.exp(top(found)) >= value * (1 - 1e-14)
        assert shares.sum() == pytest.approx(1.0, rel=1e-12)


def test_shares_of_heads_that_do_nothing():
    attention = MultiHeadAttention([SoftmaxAttention([[1.0]], [[0.0]]) for _ in range(3)])
    plain = [bounds.column_bound(h, radius=1.0, n=2) for h in attention.heads]
    found = bounds.multi_head(attention, head_bounds=plain)
    assert found.multipliers["s"].sum() == pytest.approx(1.0, rel=1e-12)
    assert found.verify()
    assert found.value == 0.0


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**30])
def test_a_bound_at_one_measure_is_the_same_in_other_units(scale):
    """Tokens times s and A by s^2: logits, weights and ``V C A`` do not change, and powers of two round nothing."""
    rng = np.random.default_rng(5)
    x, A, V = rng.standard_normal((4, 2)), rng.standard_normal((2, 2)), rng.standard_normal((2, 2))
    one = bounds.at_measure_bound(SoftmaxAttention(A, V), x).value
    other = bounds.at_measure_bound(SoftmaxAttention(A / scale**2, V), scale * x).value
    assert other == pytest.approx(one, rel=1e-12)
