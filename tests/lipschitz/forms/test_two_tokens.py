"""Two tokens: the formula of the rows, the quadratic inequality, the boxes, adversaries, tampering."""

import math
from dataclasses import replace

import numpy as np
import pytest
from relaxation_attacks import FORMS, climb, in_ball

from otattn.attention import MaskedAttention, SoftmaxAttention
from otattn.lipschitz.constants.self_logit import unit_numbers
from otattn.lipschitz.lower.best import lipschitz_lower_bound
from otattn.lipschitz.relaxations import two_tokens
from otattn.lipschitz.upper.two_tokens import Family, Forms, largest_lead, maximum, share
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
def test_any_multipliers_bound_the_quadratic_form(attention):
    """Wild multipliers included: what they miss is added."""
    rng = np.random.default_rng(1)
    head = unit_numbers(attention, 1.0)
    forms = Forms(head)
    nu, tau = rng.normal(size=(40, 2)) * 3, rng.normal(size=40)
    family = Family(forms, nu, tau, np.exp(rng.normal(size=(40, 3))))
    for _ in range(400):
        x1, x2 = in_ball(2.0 * rng.normal(size=(2, 3)), 1.0)
        gap, g1, g2 = x1 - x2, head.A @ x1 + head.c, head.A @ x2 + head.c
        N = np.sum((g1 + head.A.T @ gap) ** 2) + np.sum(g1**2)
        size = np.array([np.linalg.norm(gap)])
        leads = [np.array([abs(l) / forms.unit]) for l in (g1 @ gap, g2 @ gap)]
        assert family(size, size, *leads)[0] * forms.unit**2 * (1 + 1e-12) >= N


@pytest.mark.slow
@pytest.mark.parametrize("name", ["identity", "negative", "skew", "generic", "line"])
def test_the_field_part_is_never_exceeded(name):
    """Random and climbed pairs against F itself, on the multipliers of a certificate."""
    rng = np.random.default_rng(2)
    A, V = FORMS[name]
    bound = two_tokens(SoftmaxAttention(7.0 * A, V), radius=1.0)
    head = unit_numbers(SoftmaxAttention(7.0 * A, V), 1.0)
    forms = Forms(head)
    family = Family(forms, bound.multipliers["nu"], bound.multipliers["tau"], bound.multipliers["w"])
    F = math.exp(maximum(family, forms.unit, largest_lead(head, forms), 4e-2).value) * forms.unit**2

    def value(X):
        gap = X[:, 0] - X[:, 1]
        total = 0.0
        for i, sign in ((0, 1.0), (1, -1.0)):
            g = X[:, i] @ head.A.T + head.c
            lead = sign * np.sum(g * gap, axis=1)
            N = np.sum((g + sign * gap @ head.A) ** 2, axis=1) + np.sum(g**2, axis=1)
            total = total + share(lead) * N
        return np.sum(gap**2, axis=1) * total

    X = in_ball(1.5 * rng.normal(size=(2000, 2, len(A))), 1.0)
    best = value(X)
    for step in np.geomspace(0.5, 1e-3, 40):
        Y = in_ball(X + step * rng.normal(size=X.shape), 1.0)
        new = value(Y)
        X, best = np.where((new > best)[:, None, None], Y, X), np.maximum(new, best)
    assert best.max() <= F
    assert best.max() >= 0.2 * F  # the relaxation is worth something


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("a", [1.0, 6.0, 40.0])
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
def test_what_it_gains():
    skew = SoftmaxAttention(25.0 * FORMS["skew"][0], np.eye(2))
    assert two_tokens(skew, radius=1.0).value <= 1.06 * lipschitz_lower_bound(skew, radius=1.0, n=2, rng=0).value
    negative = SoftmaxAttention(-9.0 * np.eye(3), np.eye(3))
    upper = lipschitz_upper_bound(negative, radius=1.0, n=2)
    assert upper.theorem == "two_tokens"
    assert upper.value <= 2.3 * lipschitz_lower_bound(negative, radius=1.0, n=2, rng=0).value


@pytest.mark.slow
def test_scaling_zero_maps_and_refusals():
    A, V = FORMS["generic"]
    one = two_tokens(SoftmaxAttention(5 * A, V), radius=1.0).value
    # the search for multipliers sees the same numbers up to rounding
    assert two_tokens(SoftmaxAttention(5e6 * A, 1e-6 * V), radius=1e-3).value == pytest.approx(1e-6 * one, rel=1e-3)
    assert two_tokens(SoftmaxAttention(A, 0 * V), radius=1.0).value == 0.0
    mean = two_tokens(SoftmaxAttention(0 * A, V), radius=1.0)
    assert np.linalg.norm(V, 2) <= mean.value <= math.sqrt(2.0) * np.linalg.norm(V, 2)
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
    ):
        assert not replace(bound, multipliers={**bound.multipliers, key: value}).verify()
    lower = lipschitz_lower_bound(attention, radius=1.0, n=2, rng=0).value
    for key in ("nu", "w", "tau"):
        for factor in (0.0, 0.3, 2.0):
            other = replace(bound, multipliers={**bound.multipliers, key: factor * bound.multipliers[key]})
            assert other.proved_value() >= lower
    for target in (np.nan, np.inf, bound.options["target"] + 0.1):
        assert not replace(bound, options={"target": target}).verify()
