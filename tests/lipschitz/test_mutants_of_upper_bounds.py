"""Situations in which one term of an upper bound decides."""

import math
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest

from otattn import bounds, relaxations
from otattn.attention import (
    L2Attention,
    MaskedAttention,
    MultiHeadAttention,
    RotaryAttention,
    SigmoidAttention,
    SoftmaxAttention,
)
from otattn.lipschitz import local_lipschitz
from otattn.lipschitz.arithmetic.balls import exact_arithmetic
from otattn.lipschitz.arithmetic.intervals import is_interval, lift, upper
from otattn.lipschitz.constants.heads import unit_numbers
from otattn.lipschitz.constants.self_logit import psd_defect
from otattn.lipschitz.forms import psd_mean_field
from otattn.lipschitz.upper import psd
from otattn.lipschitz.upper.mean_field import log_bound
from otattn.lipschitz.upper.psd_columns import Columns
from otattn.lipschitz.upper.psd_multipliers import Multipliers, OwnShare
from otattn.lipschitz.upper.rows_and_columns import Rows
from otattn.lipschitz.upper.softmax import outward, seen_by
from otattn.lipschitz.upper.unnormalised import suprema
from otattn.measures import Ball, DiscreteMeasure, Ellipsoid

A1, B1 = 1.0 + 2.0**-27, 1.0 + 2.0**-26 + 2.0**-28
"""Their product is not a float."""


def test_a_shift_of_l2_attention_that_cancels_is_felt():
    """Two tokens next to a centre b where ``Q b`` is 0 in float64: the weights see what is left of it."""
    shift = A1 * B1
    Q, K, size = 2.0**33 * np.array([[A1, -1.0, 0.0]]), 1e6 * np.array([[0.0, 0.0, 1.0]]), 1e-9
    centre = 2.0**33 * np.array([B1, shift, 0.0])
    value = bounds.l2_column_bound(L2Attention(Q, K, np.eye(3)), domain=Ellipsoid(size * np.eye(3), centre), n=2).value
    with mp.workdps(60):
        rows = lambda M: mp.matrix([[mp.mpf(float(t)) for t in row] for row in np.atleast_2d(M)])  # noqa: E731
        q, k, b = rows(Q), rows(K), rows(centre).T
        tokens = [mp.matrix([0, 0, s * mp.mpf(size)]) for s in (1, -1)]
        # a token moves across the query and the key: both rows follow with their weights of it
        square = mp.mpf(0)
        for x in tokens:
            logits = [-(mp.norm(q * (b + x) - k * (b + y)) ** 2) for y in tokens]
            weights = [mp.e ** (t - max(logits)) for t in logits]
            square += (max(weights) / sum(weights)) ** 2
        assert mp.sqrt(square) <= value
        assert mp.sqrt(square) > 1.4


def test_the_row_constant_of_tied_l2_attention_is_what_its_proof_gives():
    """``min(max(1, (1 + t) / sqrt2), (phi(t)^2 + h/4)^{1/2})`` with ``t = 4 k^2``, ``h = k^2``; phi is 1 up to t = 1/2."""
    for k in (0.05, 0.2, 0.33, 0.35):
        t, h = 4.0 * k * k, k * k
        found = bounds.l2_row_bound(L2Attention([[k]], [[k]], [[1.0]]), radius=1.0, n=2).details["row_constant"]
        least = min(max(1.0, (1.0 + t) / math.sqrt(2.0)), math.sqrt(1.0 + h / 4.0))
        assert least <= found <= least * (1 + 1e-9)


def slope_1(attention, X):
    """The ``W_1`` constant near n tokens: the largest sum of the norms of a column of blocks; one dimension."""
    return float(np.abs(attention.jacobian(DiscreteMeasure(X)).to_dense()).sum(axis=0).max())


@pytest.mark.parametrize("k", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("q", [-2.0, 0.1, 1.0])
def test_l2_attention_of_order_one(k, q):
    attention = L2Attention([[q]], [[k]], [[1.0]])
    found = bounds.l2_column_bound(attention, radius=1.0, n=2, p=1)
    t = 2.0 * abs(q * k) + 2.0 * k * k
    assert found.details["t" if "t" in found.details else "row"] == pytest.approx(1.0 + 2.0 * t, rel=1e-9)
    for x in np.linspace(-1.0, 1.0, 9):
        for y in np.linspace(-1.0, 1.0, 9):
            assert slope_1(attention, [[x], [y]]) <= found.value


@pytest.mark.parametrize("n", [None, 5])
def test_heads_of_l2_attention_have_all_their_bounds(n):
    """Two heads, one of which does nothing: the bound of the other."""
    head = L2Attention(0.4 * np.eye(2), 0.4 * np.eye(2), np.eye(2))
    nothing = L2Attention(np.eye(2), np.eye(2), np.zeros((2, 2)))
    both = MultiHeadAttention([head, nothing])
    singles = [bounds.l2_column_bound(head, radius=1.0, n=m) for m in {n, None}]
    if n is not None:
        singles.append(bounds.l2_row_bound(head, radius=1.0, n=n))
    assert bounds.multi_head(both, radius=1.0, n=n).value == pytest.approx(min(float(b) for b in singles), rel=1e-6)


def test_a_head_of_l2_attention_takes_the_row_bound_where_it_is_less():
    head = L2Attention(1.5 * np.eye(2), -1.5 * np.eye(2), np.eye(2))
    both = MultiHeadAttention([head, L2Attention(np.eye(2), np.eye(2), np.zeros((2, 2)))])
    row = bounds.l2_row_bound(head, radius=1.0, n=2)
    assert row.value < 0.9 * bounds.l2_column_bound(head, radius=1.0, n=2).value
    assert bounds.multi_head(both, radius=1.0, n=2).value == pytest.approx(row.value, rel=1e-6)


@pytest.mark.parametrize("n", [None, 5])
def test_masked_heads_have_all_their_bounds(n):
    head = SoftmaxAttention(0.5 * np.eye(2), np.eye(2))
    nothing = SoftmaxAttention(np.eye(2), np.zeros((2, 2)))
    both = MaskedAttention(MultiHeadAttention([head, nothing]))
    single = MaskedAttention(head)
    singles = [bounds.masked_average_bound(single, radius=1.0, n=n)]
    if n is not None:
        names = ("masked_column_bound", "masked_row_bound", "row_bound")
        singles += [getattr(bounds, name)(single, radius=1.0, n=n) for name in names]
    assert bounds.multi_head(both, radius=1.0, n=n).value == pytest.approx(min(float(b) for b in singles), rel=1e-6)


@pytest.mark.parametrize("p", [1.5, 2.0, 6.0])
@pytest.mark.parametrize("t", [0.3, 2.0])
def test_the_masked_average_is_the_least_over_its_orders(t, p):
    """``N_r (e^{2t} p / (p - r))^{1/r}`` on a grid of r, ``N_r`` from ``E X^{r'} <= E X^2 (max X)^{r'-2}``."""
    found = bounds.masked_average_bound(MaskedAttention(SoftmaxAttention([[t]], [[1.0]])), radius=1.0, p=p)
    best = mp.inf
    for r in np.linspace(1.0, p, 2000)[1:-1]:
        dual = r / (r - 1)
        size = mp.sqrt(1 + t * t) if r >= 2 else ((1 + t * t) * mp.mpf(1 + 2 * t) ** (dual - 2)) ** (1 / dual)
        best = min(best, size * (mp.e ** (2 * t) * p / (p - r)) ** (1 / r))
    # the field part in one dimension is the variance times t
    assert found.value == pytest.approx(float(best) + t, rel=1e-3)


@pytest.mark.parametrize("alpha", [3.0, 9.0, -4.0])
def test_mean_field_of_order_one_holds_at_two_atoms(alpha):
    attention = SoftmaxAttention([[alpha]], [[1.0]])
    bound = relaxations.mean_field(attention, radius=1.0, p=1).value
    for weight in (0.5, 0.1, 1e-2, 1e-3, 1e-5):
        for x in (-1.0, 0.0, 0.5, 0.9):
            mu = DiscreteMeasure([[x], [1.0]], [1.0 - weight, weight])
            assert local_lipschitz(attention, mu, p=1).value <= bound * (1 + 1e-9)


def test_a_form_near_a_semidefinite_one_moves_the_bound_by_its_distance():
    """``log T`` moves by at most ``2 |E|``, and by ``h (2 a |E| + |E|^2)`` in the second factor."""
    head = unit_numbers(SoftmaxAttention([[2.0, 1e-15], [0.0, 1.0]], np.eye(2)), Ball(1.0))
    apart, a = psd_defect(head), float(upper(head.a))
    assert apart > 0.0
    for h in (1e-3, 0.1, 1.0, 10.0):
        assert psd_mean_field.loose(psd_mean_field.Columns(a, 2.0, 1.0, h, 1.0), apart) >= 2.0 * apart + h * (
            2.0 * a * apart + apart**2
        )


@pytest.mark.parametrize("x", [1.0, 30.0, 600.0])
def test_the_logarithm_of_a_bound_has_room_for_its_rounding(x):
    """Numbers of size x are rounded by multiples of ``2^-52 x``, a hundred of them in a sum over cells."""
    head = unit_numbers(SoftmaxAttention([[1.0]], [[1.0]]), Ball(1.0))
    found = float(log_bound(head, 1.0, x))
    with mp.workdps(40):
        exact = mp.log(mp.mpf(float(head.sigma)) + mp.mpf(float(head.v)) * mp.exp(mp.mpf(x)))
        assert found - exact >= 100 * 2.0**-52 * x
        assert found - exact <= 1e-9


def test_the_rotary_row_bound_is_of_order_two():
    found = bounds.rotary_row_bound(RotaryAttention(np.eye(2), np.eye(2), np.eye(2)), radius=1.0, n=3)
    assert (found.p, found.n) == (2.0, 3)


def test_the_peak_of_a_row_is_the_maximum():
    """``max_{0 <= x <= k} (x + b)^2 - s x^2`` on a grid."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        gamma, spread, diagonal = 2.0 * rng.random((3, 1))
        rows = Rows(gamma, spread, diagonal, 3, 1.0, 4)
        k, e, s = 2.0 * rng.random((1, 1)), rng.random((1, 1)), rng.choice([0.5, 1.0, 1.5, 4.0])
        x = np.linspace(0.0, float(k[0, 0]), 4001)
        most = ((x + diagonal[0] * e[0, 0]) ** 2 - s * x**2).max()
        found = float(rows.peak(k, e, np.full((1, 1), s * rows.omega[0]))[0, 0])
        assert most <= found * (1 + 1e-12)
        assert found <= most + 1e-4


def test_outputs_of_outputs_that_cancel_are_not_lost():
    """One token goes to ``W_1 W_2 V`` times itself, V is large and the product of the outputs is 0 in float64."""
    shift = A1 * B1
    rest = abs(Fraction(A1) * Fraction(B1) - Fraction(shift))
    large = MultiHeadAttention([SoftmaxAttention([[0.0]], [[1e10]])], outputs=[[[B1], [-shift]]])
    small = SoftmaxAttention([[0.0]], [[0.0]])
    both = MultiHeadAttention([large, small], outputs=[[[A1, 1.0]], [[1.0]]])
    assert rest > 0
    assert rest * 10**10 <= Fraction(bounds.multi_head(both, radius=1.0, n=1).value)


def test_a_rigorous_proof_takes_no_number_from_the_fast_path():
    pytest.importorskip("flint", reason="python-flint is needed for ball arithmetic")
    attention, region = SoftmaxAttention(np.eye(2), np.eye(2)), Ball(1.5)
    fast = seen_by(attention, region)
    with exact_arithmetic():
        proved = seen_by(attention, region, exact=True)
    assert not is_interval(fast.G)
    assert is_interval(proved.G)
    assert seen_by(attention, region) is fast


def test_the_row_of_the_column_bound_sees_the_values_on_the_domain():
    """``V = (0, 1)`` on an ellipse that is flat along it: the deviation of values is 1/100, that of tokens is 1."""
    domain = Ellipsoid(np.diag([1.0, 0.01]), np.zeros(2))
    attention = SoftmaxAttention(np.diag([3.0, 0.0]), [[0.0, 1.0]])
    for p in (2.0, 3.0, math.inf):
        assert bounds.column_bound(attention, domain=domain, p=p).details["row"] == pytest.approx(
            math.hypot(1.0, 3.0 * 0.01), rel=1e-9
        )


def test_logarithms_in_intervals_keep_their_value():
    for x, exact in ((lift(math.log(3.0)), 3.0), (lift(-math.inf), 0.0), (lift(-math.inf) + 1.0, 0.0)):
        found = outward(x, "row_bound", Ball(1.0), 2, 2.0, {})
        assert found.value >= exact
        assert found.value == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("a", [0.3, 1.0, 1.2, 1.5, 2.0, 3.0, 50.0])
def test_the_slope_of_a_sigmoid_weight_is_attained(a):
    """``sup h + a h'`` over ``|s| <= a`` on a grid."""
    q = 1.0 / (1.0 + np.exp(-np.linspace(-a, a, 200_001)))
    most = float((q + a * q * (1.0 - q)).max())
    head = SigmoidAttention([[1.0]], [[1.0]])
    for number in (a, lift(a)):
        found = math.exp(float(upper(suprema(head, number)[0])))
        assert most <= found * (1 + 1e-12)
        assert found == pytest.approx(most, rel=1e-6)


def test_the_bound_of_a_box_counts_its_own_share():
    """A row that sees its own token pays at least the least own share of its cell, a positive number here."""
    columns = Columns(9.0, 9.0, 1.0, 4, 2, (1.3, 2.5, 0.4), 0.7, 1.9, 0.2)
    edges = np.linspace(0.0, 1.0, 4)
    mu, sigma, xi = np.array([0.3, 0.5, 0.9]), np.array([0.2, 0.4, 0.1]), np.array([1.0, 3.0, 2.0])
    own = Multipliers(mu, 0.2 * mu, sigma, xi, sigma, sigma, sigma, sigma)
    least = OwnShare(own, 4).table.min(axis=1)
    assert (least > 0.5).all()
    lo, hi = columns.start(edges)
    cell = np.searchsorted(edges, 0.5 * (lo[0] + hi[0])) - 1
    others = columns.off(lo, hi, own.at(cell))[0]
    total = psd._cell_bound(columns, edges, own)(lo, hi)[0]
    assert np.isfinite(others).sum() > 100
    assert (total >= others + least[cell] - 1e-9).all()


def test_head_bounds_are_of_the_domain_that_is_asked_for():
    attention = MultiHeadAttention([SoftmaxAttention([[1.0]], [[1.0]]) for _ in range(2)])
    singles = [bounds.column_bound(head, radius=1.0, n=2) for head in attention.heads]
    assert bounds.multi_head(attention, radius=1.0, n=2, head_bounds=singles).domain == Ball(1.0)
    for wider in ({"radius": 2.0}, {"domain": Ball(2.0)}):
        with pytest.raises(ValueError, match="head_bounds must bound every head"):
            bounds.multi_head(attention, n=2, head_bounds=singles, **wider)
