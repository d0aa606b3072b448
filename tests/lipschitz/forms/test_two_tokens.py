"""Two tokens: the formula of the rows, the quadratic inequalities, the boxes, adversaries, tampering."""

import math
from dataclasses import replace

import numpy as np
import pytest
from relaxation_attacks import FORMS, climb, in_ball

from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.lipschitz.certificate import Statement
from otattn.lipschitz.forms.token_pairs import NAMES, Family
from otattn.lipschitz.forms.two_tokens import Stated
from otattn.lipschitz.lower.best import lipschitz_lower_bound
from otattn.lipschitz.relaxations import two_tokens
from otattn.lipschitz.upper_bound import lipschitz_upper_bound
from otattn.measures import Ball, Ellipsoid

BIASED = SoftmaxAttention(3.0 * FORMS["generic"][0], FORMS["generic"][1], bias=[1.0, -0.5, 0.3])


def rows(A, c, x1, x2):
    """``p_1``, ``q_1`` and the two vectors of row 1 from the docstring."""
    d, g = x1 - x2, A @ x1 + c
    p = 1.0 / (1.0 + math.exp(-(g @ d)))
    return p, p * (1 - p), g + A.T @ d, g


def test_the_rows_are_those_of_the_jacobian():
    rng = np.random.default_rng(0)
    for _ in range(30):
        d = int(rng.integers(1, 4))
        A, c, X = rng.normal(size=(d, d)), rng.normal(size=d), rng.normal(size=(2, d))
        J = SoftmaxAttention(A, np.eye(d), bias=c).jacobian(X).to_dense().reshape(2, d, 2, d)
        for i, j in ((0, 1), (1, 0)):
            p, q, own, other = rows(A, c, X[i], X[j])
            gap = X[i] - X[j]
            assert np.abs(J[i, :, i] - p * np.eye(d) - q * np.outer(gap, own)).max() < 1e-12
            assert np.abs(J[i, :, j] - (1 - p) * np.eye(d) + q * np.outer(gap, other)).max() < 1e-12


@pytest.mark.parametrize("attention", [SoftmaxAttention(5.0 * FORMS["generic"][0], np.eye(3)), BIASED])
def test_any_multipliers_bound_what_is_left_of_the_forms(attention):
    """Wild multipliers included: what they miss is added. The parts along the difference are taken off."""
    rng = np.random.default_rng(1)
    stated = Stated.of(Statement(attention, Ball(1.0), 2, 2.0))
    unit, A, c = stated.forms.unit, stated.head.A, stated.head.c
    V = attention.V / np.linalg.norm(attention.V, 2)
    families = {
        name: Family(
            stated.forms, name, rng.normal(size=(20, 2)) * 3, rng.normal(size=20), np.exp(rng.normal(size=(20, 3)))
        )
        for name in NAMES
    }
    for _ in range(40):
        x1, x2 = in_ball(2.0 * rng.normal(size=(2, 3)), 1.0)
        gap, g1, g2 = x1 - x2, A @ x1 + c, A @ x2 + c
        e, h = gap / np.linalg.norm(gap), A.T @ gap
        for swapped in (False, True):
            first, turned = (g2, -h) if swapped else (g1, h)
            vectors = {"own": [first + turned, first], "turned": [h], "sum": [g1 + g2], "symmetric": [A @ gap + h]}
            place = [np.array([x]) for x in (gap @ gap, g1 @ gap / unit, (g1 - g2) @ gap / unit / (gap @ gap))]
            for name, family in families.items():
                square = np.sum((V @ gap) ** 2)
                if name in vectors:
                    square = sum(np.sum((y - (y @ e) * e) ** 2) for y in vectors[name]) / unit**2
                proved = family(*[(x, x) for x in place], np.array(place), swapped=swapped)[0]
                assert proved * (1 + 1e-12) + 1e-12 >= square, name


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("a", [1.0, 40.0])
def test_never_violated_by_climbs(name, a):
    A, V = FORMS[name]
    attention = SoftmaxAttention(a * A, V)
    bound = two_tokens(attention, radius=1.0)
    assert climb(attention, (1, 1), 1.0, np.random.default_rng(3)) <= bound.value
    assert lipschitz_lower_bound(attention, radius=1.0, n=2, rng=0).value <= bound.value
    assert bound.verify()


@pytest.mark.slow
def test_never_violated_with_a_bias_on_other_domains():
    rng = np.random.default_rng(4)
    assert climb(BIASED, (1, 1), 2.0, rng) <= two_tokens(BIASED, domain=Ball(2.0)).value
    flat = Ellipsoid(np.diag([1.0, 0.5, 0.2]), [0.3, 0.0, 1.0])
    bound = two_tokens(BIASED, domain=flat)
    for _ in range(100):
        assert np.linalg.norm(BIASED.jacobian(flat.sample(2, rng)).to_dense(), 2) <= bound.value


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_multiples_of_the_identity_leave_one_percent(sign):
    """The gap of the search: the form is sharp there."""
    attention = SoftmaxAttention(sign * 4.0 * np.eye(2), np.eye(2))
    low = lipschitz_lower_bound(attention, radius=1.0, n=2, rng=0).value
    assert low <= two_tokens(attention, radius=1.0).value <= 1.012 * low


@pytest.mark.slow
def test_what_it_gains():
    skew = SoftmaxAttention(25.0 * FORMS["skew"][0], np.eye(2))
    assert two_tokens(skew, radius=1.0).value <= 1.03 * lipschitz_lower_bound(skew, radius=1.0, n=2, rng=0).value
    negative = SoftmaxAttention(-9.0 * np.eye(3), np.eye(3))
    upper = lipschitz_upper_bound(negative, radius=1.0, n=2)
    assert upper.theorem == "two_tokens"
    assert upper.value <= 1.012 * lipschitz_lower_bound(negative, radius=1.0, n=2, rng=0).value


@pytest.mark.slow
def test_tokens_may_lie_apart_across_what_a_low_rank_form_sees():
    """Identity values are seen on the span of A alone; the difference of the tokens has a part across it."""
    rng = np.random.default_rng(6)
    Q, K = rng.normal(size=(2, 1, 6))
    attention = SoftmaxAttention.from_qkv(3.0 * Q, K, np.eye(6))
    bound = two_tokens(attention, radius=1.0)
    assert climb(attention, (1, 1), 1.0, rng) <= bound.value
    assert bound.verify(rigorous=True)


@pytest.mark.slow
def test_scaling_zero_maps_and_refusals():
    A, V = FORMS["generic"]
    one = two_tokens(SoftmaxAttention(5 * A, V), radius=1.0).value
    # the search for multipliers sees the same numbers up to rounding
    assert two_tokens(SoftmaxAttention(5e6 * A, 1e-6 * V), radius=1e-3).value == pytest.approx(1e-6 * one, rel=1e-3)
    assert two_tokens(SoftmaxAttention(A, 0 * V), radius=1.0).value == 0.0
    mean = two_tokens(SoftmaxAttention(0 * A, V), radius=1.0)
    assert mean.value == pytest.approx(np.linalg.norm(V, 2), rel=1e-6)
    with pytest.raises(ValueError, match="effort"):
        two_tokens(SoftmaxAttention(A, V), radius=1.0, effort="slow")
    with pytest.raises(ValueError, match="without a mask"):
        two_tokens(MaskedAttention(SoftmaxAttention(A, V)), radius=1.0)


@pytest.mark.slow
def test_the_recheck_rejects_tampering():
    attention = SoftmaxAttention(-9.0 * np.eye(2), np.eye(2))
    bound = two_tokens(attention, radius=1.0)
    assert bound.verify()
    assert not replace(bound, value=0.98 * bound.value).verify()
    for key, value in (
        ("nu", np.full_like(bound.multipliers["nu"], np.nan)),
        ("w", -1.0 - bound.multipliers["w"]),
        ("tau", bound.multipliers["tau"][1:]),
        ("tau", np.zeros((0,))),
        ("form", np.full_like(bound.multipliers["form"], 7.0)),
        ("form", np.zeros_like(bound.multipliers["form"])),
    ):
        assert not replace(bound, multipliers={**bound.multipliers, key: value}).verify()
    lower = lipschitz_lower_bound(attention, radius=1.0, n=2, rng=0).value
    for key in ("nu", "w", "tau"):
        for factor in (0.0, 0.3, 2.0):
            other = replace(bound, multipliers={**bound.multipliers, key: factor * bound.multipliers[key]})
            assert other.proved_value() >= lower
    for target in (np.nan, np.inf, bound.options["target"] + 0.1):
        assert not replace(bound, options={"target": target}).verify()
