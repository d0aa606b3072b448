"""Situations in which one term of the constants that bounds are made of decides; exact numbers are fractions."""

import itertools
import math
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest

from otattn import bounds, relaxations
from otattn.attention import L2Attention, MultiHeadAttention, SoftmaxAttention
from otattn.attention.head import heads_of
from otattn.lipschitz.arithmetic.balls import BallMatrix, exact_arithmetic
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.constants.heads import softmax_head, unit_numbers
from otattn.lipschitz.constants.regions import see
from otattn.lipschitz.constants.rows import density_excess
from otattn.lipschitz.constants.self_logit import SelfLogit, least_stretch
from otattn.lipschitz.constants.simplex import dual_value as simplex_dual
from otattn.lipschitz.constants.sum_of_heads import combine_heads
from otattn.lipschitz.relaxations import interval_simplex
from otattn.measures import Ball, Box, Ellipsoid, PointSet

A1, B1 = 1.0 + 2.0**-27, 1.0 + 2.0**-26 + 2.0**-28
"""Their product is not a float."""
ULP = 2.0**-52


def product_and_rest(a, b):
    """``fl(a b)`` and what is missing from it."""
    return a * b, Fraction(a) * Fraction(b) - Fraction(a * b)


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
        assert pytest.approx(math.sqrt(2.0 + 1.0 / 99.0), rel=1e-9) == see(softmax_head(head), domain).G


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
        bound = f(q) + density_excess(rest, b, q, meet)
        assert most <= bound * (1 + 1e-12)
        near += bound <= 1.02 * most
    assert near >= 20


@pytest.mark.parametrize("alpha", [1.0, 3.0])
def test_the_row_constant_is_at_most_what_the_entropy_gives(alpha):
    """For alpha = 1 the first of the two is the least of all three, for alpha = 3 the second."""
    head, region, n = SoftmaxAttention(alpha * np.eye(2), np.eye(2)), Ball(2.0), 2
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


def cancelling_head(centre):
    """Logits ``(A1 x_1 + bias) y_2`` whose factor vanishes in float64 at ``x_1 = centre``, and what it is."""
    shift, rest = product_and_rest(A1, centre)
    form = np.array([[0.0, 0.0], [A1, 0.0]])
    return SoftmaxAttention(form, np.eye(2), bias=[0.0, -shift]), rest


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e8])
def test_a_shift_that_cancels_is_all_that_is_left_on_a_flat_domain(size):
    """``x_1`` is fixed: logits are ``rest y_2``, the exponent is ``2 |rest| size`` and W at least ``(rest size)^2``."""
    head, rest = cancelling_head(B1)
    assert rest != 0
    for domain in (
        Box([B1, -size], [B1, size]),
        Ellipsoid([[0.0], [size]], [B1, 0.0]),
        PointSet([[B1, -size], [B1, size]]),
    ):
        exponent = Fraction(relaxations.column_exponent(head, domain=domain).value)
        entropy = Fraction(relaxations.self_entropy(head, domain=domain, n=3).value)
        assert 2 * abs(rest) * Fraction(size) <= exponent
        assert (rest * Fraction(size)) ** 2 <= entropy


def test_a_shift_of_factors_that_cancels_enters_the_column_exponent():
    """A key that a query never meets, ``A = K^T Q`` of one row each: on a box that is flat along the query only the shift counts."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        centre, query = 1e3 * (1.0 + rng.random()), 1.0 + rng.random()
        shift, rest = product_and_rest(query, centre)
        head = SoftmaxAttention.from_qkv([[query, 0.0]], [[0.0, 1.0]], np.eye(2), scale=1.0, query_bias=[-shift])
        found = relaxations.column_exponent(head, domain=Box([centre, -1.0], [centre, 1.0])).value
        assert 2 * abs(rest) <= Fraction(found)


def test_forms_of_factors_that_cancel_are_held():
    """``A = K^T Q`` is 0 in float64 and ``rest e_1 e_1^T`` in truth: logits of tokens of size 1e9 feel it."""
    shift, rest = product_and_rest(A1, B1)
    Q, K = np.zeros((2, 2, 5))
    Q[:, 0], K[:, 0] = (A1, 1.0), (B1, -shift)
    softmax, l2 = SoftmaxAttention.from_qkv(Q, K, np.eye(5), scale=1.0), L2Attention(Q, K, np.eye(5))
    for attention, exact in ((softmax, rest), (l2, 2 * rest)):
        (head,) = heads_of(attention)
        assert not np.any(attention.A if attention is softmax else K.T @ Q)
        first = [Fraction(float(t)) for t in np.diag(head.A)]
        apart = max(abs(t - (exact if k == 0 else 0)) for k, t in enumerate(first))
        assert not np.any(head.A - np.diag(np.diag(head.A)))
        assert apart <= Fraction(head.error) * max(abs(t) for t in first)
    # two tokens at 1e9 and -1e9, of equal weights up to rest 1e18: V C A is rest 1e18
    assert bounds.field_bound(softmax, radius=1e9, n=2).value >= abs(rest) * Fraction(10) ** 18


@pytest.mark.parametrize(("alpha", "c"), [(1.0, 0.5), (-2.0, 1.0), (0.3, -2.0)])
def test_the_logit_of_a_token_with_itself_is_met(alpha, c):
    """``g z >= nu g^2 - lam z^2 - const`` with ``g = alpha z + c`` in one dimension, with equality at some z."""
    head = unit_numbers(SoftmaxAttention([[alpha]], [[1.0]], bias=[c]), Ball(1.0))
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
            low = least_stretch(unit_numbers(SoftmaxAttention(np.diag(sizes), np.eye(2)), Ball(1.0), exact=True))
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


@pytest.mark.parametrize("k", [1, 4, 50, 200])
def test_outputs_and_values_that_cancel_are_not_lost(k):
    """One token goes to W V times itself, with ``W (1, 2k)`` and ``V (2k, 1)`` whose product is rounding."""
    rng = np.random.default_rng(k)
    for _ in range(20):
        a, b = 1.0 + rng.random(2)
        shift, rest = product_and_rest(a, b)
        W, V = np.tile([a, 1.0], k)[None], np.tile([b, -shift], k)[:, None]
        attention = MultiHeadAttention([SoftmaxAttention([[0.0]], V)], outputs=[W])
        found = bounds.at_measure_bound(attention, [[1.0]]).value
        assert k * abs(rest) <= Fraction(found) <= Fraction(1e-6)


def test_an_interval_head_counts_the_rounding_of_its_values():
    """``W V`` is a few units in the last place, known to about as many."""
    shift, rest = product_and_rest(A1, B1)
    for k in range(-20, 21):
        attention = MultiHeadAttention([SoftmaxAttention([[0.0]], [[B1], [-(shift + k * ULP)]])], outputs=[[[A1, 1.0]]])
        exact = abs(Fraction(A1) * Fraction(B1) - Fraction(shift + k * ULP))
        assert exact <= Fraction(relaxations.near_tokens(attention, [[1.0]], 0.0).value)
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


def test_heads_of_factors_are_within_their_errors():
    """``A = K^T Q`` and ``c = K^T b`` in fractions; the errors are a few roundings."""
    rng = np.random.default_rng(2)
    for _ in range(10):
        Q, K = rng.standard_normal((2, 2, 5))
        b = rng.standard_normal(2)
        (head,) = heads_of(SoftmaxAttention.from_qkv(Q, K, np.eye(5), scale=1.0, query_bias=b))
        apart = [
            [sum(Fraction(K[r, i]) * Fraction(Q[r, j]) for r in (0, 1)) - Fraction(head.A[i, j]) for j in range(5)]
            for i in range(5)
        ]
        shift = [sum(Fraction(K[r, i]) * Fraction(b[r]) for r in (0, 1)) - Fraction(head.c[i]) for i in range(5)]
        size = float(np.linalg.norm(head.A, 2))
        assert sum(t * t for row in apart for t in row) <= Fraction(head.error * size * (1 - 1e-9)) ** 2
        assert sum(t * t for t in shift) <= Fraction(max(head.shift, 0.0)) ** 2
        assert head.error <= 1e-12
        assert head.shift <= 1e-12
        assert np.linalg.norm(head.c) > 0.1


def test_a_head_on_a_plane_has_the_logits_of_the_head():
    """Logits ``<A x + c, y> - <H y, y>`` of L2 attention on ``x = B u + o``, up to what all keys of a row share."""
    rng = np.random.default_rng(3)
    (head,) = heads_of(L2Attention(rng.standard_normal((2, 4)), rng.standard_normal((2, 4)), np.eye(4)))
    basis, offset = np.linalg.qr(rng.standard_normal((4, 2)))[0], rng.standard_normal(4)
    plane = head.restricted(basis, offset)
    u = rng.standard_normal((5, 2))

    def logits(head, x):
        rows = (x @ head.A.T + head.c) @ x.T - np.einsum("jk,kl,jl->j", x, head.H, x)
        return rows - rows[:, :1]

    np.testing.assert_allclose(logits(plane, u), logits(head, u @ basis.T + offset), rtol=1e-10, atol=1e-10)
