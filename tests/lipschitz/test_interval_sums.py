"""Sums, products and matrix products of intervals against exact fractions."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from otattn.lipschitz.arithmetic.intervals import Interval, lift


def around(rng: np.random.Generator, x: np.ndarray) -> Interval:
    """Intervals that hold `x`: the number itself, an end of it at x, or wider ones."""
    width = np.abs(x) * 10.0 ** rng.uniform(-17, 0, x.shape)
    return Interval.between(x - width * (rng.random(x.shape) < 0.4), x + width * (rng.random(x.shape) < 0.4))


def holds(result: Interval, exact: Any) -> bool:
    """Whether every fraction lies between the ends."""
    ends = zip(result.lo.ravel().tolist(), result.hi.ravel().tolist(), np.ravel(exact).tolist(), strict=True)
    return all((lo == -np.inf or Fraction(lo) <= v) and (hi == np.inf or v <= Fraction(hi)) for lo, hi, v in ends)


@pytest.mark.parametrize("axis", [None, 0, 1, -1, (0, 2), 2])
def test_sums_and_products_against_fractions(axis: Any) -> None:
    rng = np.random.default_rng(9)
    x = rng.normal(size=(7, 6, 5)) * 10.0 ** rng.integers(-8, 9, (7, 6, 5))
    exact = np.sum(np.vectorize(Fraction, otypes=[object])(x), axis=axis)
    for result in (np.sum(lift(x), axis=axis), around(rng, x).sum(axis=axis)):
        assert result.shape == np.shape(exact)
        assert holds(result, exact)
    sums = np.sum(lift(x), axis=axis)
    assert np.all(sums.hi - sums.lo <= 1e-14 * np.sum(np.abs(x), axis=axis))
    assert np.sum(lift(x), axis=axis, keepdims=True).shape == np.sum(x, axis=axis, keepdims=True).shape
    y = rng.uniform(0.5, 2, x.shape)
    product = np.prod(np.vectorize(Fraction, otypes=[object])(y), axis=axis)
    assert holds(np.prod(lift(y), axis=axis), product)
    assert np.max(lift(x), axis=axis).hi.tolist() == np.max(x, axis=axis).tolist()


def test_long_sum_counts_its_rounding() -> None:
    x = np.full(100_001, 0.1)
    total, exact = np.sum(lift(x)), Fraction(0.1) * 100_001
    assert Fraction(total.lo.item()) < exact < Fraction(total.hi.item())
    assert total.hi - total.lo < 1e-10
    assert np.sum(lift(np.zeros((0, 3))), axis=0).hi.tolist() == [0.0, 0.0, 0.0]
    assert np.sum(lift(np.zeros(9))).hi == 0
    assert np.sum(lift([0.1, 0.2]), initial=1.0).hi >= 1.3


@pytest.mark.parametrize("scale", [1.0, 1e-170, 1e150, 1e-320])
def test_matmul_against_fractions(scale: float) -> None:
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(6, 40)) * scale, rng.normal(size=(40, 5)) * 10.0 ** rng.integers(-9, 9, (40, 5))
    b[:, 0] *= scale
    fractions = np.vectorize(Fraction, otypes=[object])
    exact = fractions(a).dot(fractions(b))
    for left, right in ((lift(a), b), (a, lift(b)), (around(rng, a), around(rng, b)), (around(rng, a), b)):
        assert holds(left @ right, exact)
    assert holds(lift(a) @ b[:, 1], exact[:, 1])
    positive = abs(around(rng, a)) @ abs(around(rng, b))
    assert holds(positive, fractions(abs(a)).dot(fractions(abs(b))))
    assert np.all(positive.lo >= 0)
    if scale == 1.0:
        result = lift(a) @ b
        assert np.all(result.hi - result.lo <= 100 * 2.0**-52 * (np.abs(a) @ np.abs(b)))
    # the corner of the intervals where every product is greatest
    wide = Interval.between(a, a + scale), Interval.between(b, b + 1.0)
    corner = fractions(wide[0].hi).dot(fractions(wide[1].hi))
    assert holds(wide[0] @ wide[1], corner)
