"""Situations in which one term of the interval and ball arithmetic decides."""

import math

import numpy as np
import pytest

from otattn.lipschitz.arithmetic.intervals import Interval, lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import log_sum


def test_powers_of_a_base_of_both_signs_are_not_bounded() -> None:
    """``(-2)^2 = 4`` and ``(-2)^3 = -8`` lie outside of every image of [0, 1]."""
    found = Interval.between([-2.0, 0.5], [1.0, 1.0]) ** lift(np.array([2.0, 2.0]))
    assert lower(found)[0] <= -8.0
    assert upper(found)[0] >= 4.0
    # a base above zero has both ends
    assert (lower(found)[1], upper(found)[1]) == pytest.approx((0.25, 1.0), rel=1e-12)


def test_the_mean_of_intervals() -> None:
    x = np.array([[1.0, 2.0, 6.0], [-1.0, 0.0, 4.0]])
    for axis, exact in ((None, 2.0), (0, [0.0, 1.0, 5.0]), (1, [3.0, 1.0])):
        found = lift(x).mean(axis=axis)
        assert np.all(lower(found) <= exact)
        assert np.all(upper(found) >= exact)
        np.testing.assert_allclose(upper(found), exact, rtol=1e-14, atol=1e-14)
        assert np.shape(lower(np.mean(lift(x), axis=axis))) == np.shape(exact)


def test_an_interval_without_limit_is_not_finite() -> None:
    half = Interval.between([0.0, -np.inf, 0.0], [1.0, 0.0, np.inf])
    assert np.isfinite(half).tolist() == [True, False, False]
    assert np.isinf(half).tolist() == [False, True, True]


def test_the_dot_product_with_a_number_is_a_multiple() -> None:
    x = lift(np.array([1.0, -2.0]))
    for found in (np.dot(x, 3.0), np.dot(3.0, x)):
        np.testing.assert_allclose(upper(found), [3.0, -6.0], rtol=1e-14)
    assert float(upper(np.dot(x, np.array([3.0, 1.0])))) == pytest.approx(1.0, rel=1e-12)


def test_a_sum_of_zeros_is_zero() -> None:
    """``log(0 + 0)``, the zeros as intervals."""
    assert log_sum(lift(-math.inf), lift(-math.inf)) == -math.inf


def test_wide_balls_are_not_proved_semidefinite() -> None:
    """The balls hold ``[[1, x], [x, 1]]`` with x > 1, although their centres have least eigenvalues above some roundings."""
    pytest.importorskip("flint", reason="python-flint is needed for ball arithmetic")
    from otattn.lipschitz.arithmetic.balls import BallMatrix, exact_arithmetic, proves_psd

    eps = 2.0**-52
    with exact_arithmetic():
        for gap in (4.0, 6.0, 8.0, 12.0, 20.0):
            for room in (0.5, 1.0, 3.0):
                x = 1.0 - gap * eps
                wide = np.array([[0.0, (gap + room) * eps], [(gap + room) * eps, 0.0]])
                M = np.array([[1.0, x], [x, 1.0]])
                assert not proves_psd(BallMatrix.between(Interval.between(M - wide, M + wide)))
