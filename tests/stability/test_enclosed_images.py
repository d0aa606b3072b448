"""Enclosed arithmetic, functions and images hold the exact values, computed in 60 digits or in fractions."""

from collections.abc import Callable
from fractions import Fraction

import mpmath as mp
import numpy as np
import pytest
from attention_maps import MAPS
from exact_images import DIGITS, exact_image, vectors

from otattn.attention import MLP, LinearAttention, SinkhornAttention, SoftmaxAttention
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure
from otattn.stability import functions
from otattn.stability.enclosed import Enclosed
from otattn.stability.images import image


def exact_terms(x: Enclosed) -> list[Fraction]:
    low = np.zeros_like(x.high) if x.low is None else x.low
    return [Fraction(h) + Fraction(l) for h, l in zip(x.high.ravel().tolist(), low.ravel().tolist(), strict=True)]


def assert_holds(x: Enclosed, expected: list) -> None:
    """Each exact value (Fraction, or mpf in the working precision) within its error; the errors are finite."""
    assert x.bounded
    for centre, error, value in zip(exact_terms(x), x.radius.ravel().tolist(), expected, strict=True):
        if isinstance(value, Fraction):
            assert abs(centre - value) <= Fraction(error)
        else:
            assert abs(mp.mpf(centre.numerator) / centre.denominator - value) <= error


def tightness(x: Enclosed) -> float:
    return float((x.radius / np.maximum(np.abs(x.high), 1e-300)).max())


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("scale", [1e-150, 1e-40, 1.0, 1e40, 1e150])
def test_arithmetic_holds_the_fractions(fine: bool, scale: float) -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(6, 6)) * scale * 10.0 ** rng.integers(-3, 4, (6, 6))
    b = rng.normal(size=(6, 6)) / scale
    x, y = Enclosed.exact(a, fine=fine), Enclosed.exact(b, fine=fine)
    p, q = exact_terms(x), exact_terms(y)
    assert_holds(x + 3.0 * x, [u + 3 * u for u in p])
    assert_holds(x * y, [u * v for u, v in zip(p, q, strict=True)])
    turned = exact_terms(x.T)
    assert_holds(x / x.T.scaled(3), [u / v / 8 for u, v in zip(p, turned, strict=True)])
    product = [sum(p[6 * i + k] * q[6 * k + j] for k in range(6)) for i in range(6) for j in range(6)]
    assert_holds(x @ y, product)
    # errors are carried: (x y) y, (x y) / (x + x) and products of products
    assert_holds((x * y) * y, [u * v * v for u, v in zip(p, q, strict=True)])
    assert_holds((x * y) / (x + x), [v / 2 for v in q])
    again = [sum(product[6 * i + k] * product[6 * k + j] for k in range(6)) for i in range(6) for j in range(6)]
    assert_holds((x @ y) @ (x @ y), again)
    assert tightness(x * y) < (1e-29 if fine else 1e-15)


@pytest.mark.parametrize("fine", [False, True])
def test_cancellation_and_underflow_are_counted(fine: bool) -> None:
    big, small = np.array([1e16, 3.0, 1e-200]), np.array([-1e16 + 2.0, -3.0, 1e-200])
    x, y = Enclosed.exact(big, fine=fine), Enclosed.exact(small, fine=fine)
    third = [Fraction(u) / 3 for u in big.tolist()]
    assert_holds(x / 3.0 + y / 3.0, [u + Fraction(v) / 3 for u, v in zip(third, small.tolist(), strict=True)])
    assert_holds(x * y, [Fraction(u) * Fraction(v) for u, v in zip(big.tolist(), small.tolist(), strict=True)])
    # a subnormal factor against a huge one: its own rounding may not vanish in the bound
    tiny = Enclosed.exact(np.array([[3e-310, 7e-310]]), fine=fine)
    third_of = tiny / 3.0
    expected = sum(Fraction(float(v)) / 3 * Fraction(1e150) for v in (3e-310, 7e-310))
    assert_holds(third_of @ np.full((2, 1), 1e150), [expected])


def test_overflow_is_not_bounded() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        for fine in (False, True):
            x = Enclosed.exact(np.array([1e200]), fine=fine)
            assert not (x * x).bounded
            assert not functions.exp(x).bounded
            assert not (x / (x - x)).bounded


NORMAL: dict[str, tuple[Callable, Callable]] = {
    "exp": (functions.exp, mp.exp),
    "expit": (functions.expit, lambda s: 1 / (1 + mp.exp(-s))),
    "tanh": (functions.tanh, mp.tanh),
    "silu": (functions.silu, lambda s: s / (1 + mp.exp(-s))),
    "gelu": (functions.gelu, lambda s: s * mp.ncdf(s)),
    "cos": (lambda x: functions.cos_sin(x)[0], mp.cos),
    "sin": (lambda x: functions.cos_sin(x)[1], mp.sin),
}


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("name", NORMAL)
def test_functions_hold_their_values(name: str, fine: bool) -> None:
    ours, theirs = NORMAL[name]
    rng = np.random.default_rng(1)
    s = np.r_[0.0, 1e-300, -1e-20, rng.normal(size=40), 30.0 * rng.normal(size=40), -800.0, 700.0, -12.9, 13.1]
    with mp.workdps(DIGITS), np.errstate(all="ignore"):
        x = Enclosed.exact(s, fine=fine)
        assert_holds(ours(x), [theirs(mp.mpf(v)) for v in s.tolist()])
        # an argument that is not exact: s / 3, and one whose error is large
        assert_holds(ours(x / 3.0), [theirs(mp.mpf(v) / 3) for v in s.tolist()])
        for moved in (-0.9, 0.9):
            assert_holds(ours(x.widened(0.9)), [theirs(mp.mpf(v) + moved) for v in s.tolist()])
        near = Enclosed.exact(np.linspace(-3, 3, 31), fine=fine)
        assert float(ours(near).radius.max()) < (1e-27 if fine else 1e-11)


@pytest.mark.parametrize("fine", [False, True])
def test_exponentials_with_errors_above_one(fine: bool) -> None:
    x = Enclosed.exact(np.array([-900.0, -700.0, 3.0]), fine=fine).widened(250.0)
    with mp.workdps(DIGITS), np.errstate(all="ignore"):
        assert_holds(functions.exp(x), [mp.exp(mp.mpf(v)) for v in (-650.0, -450.0, 253.0)])


@pytest.mark.parametrize("fine", [False, True])
def test_square_roots(fine: bool) -> None:
    s = np.array([0.0, 1e-300, 2.0, 3e200, 1e-40])
    with mp.workdps(DIGITS):
        assert_holds(functions.sqrt(Enclosed.exact(s, fine=fine)), [mp.sqrt(mp.mpf(v)) for v in s.tolist()])
        third = Enclosed.exact(s, fine=fine) / 3.0
        assert_holds(functions.sqrt(third), [mp.sqrt(mp.mpf(v) / 3) for v in s.tolist()])


@pytest.mark.parametrize("name", MAPS)
def test_images_of_every_map(name: str) -> None:
    for seed, n in ((0, 3), (1, 4)):
        rng = np.random.default_rng(seed)
        attention, X = MAPS[name](rng), rng.normal(size=(n, 3))
        w = np.full(n, 1.0 / n) if seed == 0 else rng.dirichlet(np.ones(n))
        times = np.arange(1, n + 1) / n if seed == 0 else np.array([0.1, 0.5, 0.5, 1.0])
        mu = SpaceTimeMeasure(times, X, w) if attention.causal else DiscreteMeasure(X, w)
        with mp.workdps(DIGITS):
            rows = exact_image(attention, vectors(X), mu.weights, times)
            for fine in (False, True):
                found = image(attention, mu, fine=fine)
                assert found is not None
                assert_holds(found, [v for row in rows for v in row])
                assert float(found.radius.max()) < (1e-22 if fine else 1e-8)


def test_atoms_of_no_weight_are_left_out() -> None:
    attention = SoftmaxAttention([[0.3]], [[1.0]])
    whole = image(attention, DiscreteMeasure([[0.0], [5.0], [1.0]], [0.5, 0.0, 0.5]))
    part = image(attention, DiscreteMeasure([[0.0], [1.0]], [0.5, 0.5]))
    assert whole is not None
    assert part is not None
    assert np.array_equal(whole.high, part.high)


def test_a_map_of_ones_own_is_not_covered_by_its_base() -> None:
    class Other(SoftmaxAttention):
        pass

    assert image(Other([[0.0]], [[1.0]]), DiscreteMeasure([[1.0]])) is None


@pytest.mark.parametrize("size", [3.0, 30.0, 3000.0])
def test_sinkhorn_says_how_far_it_is_from_its_fixed_point(size: float) -> None:
    """Two atoms +-s: the kernel is symmetric, the images are +-s tanh(a s^2) exactly."""
    s = float(np.sqrt(size))
    found = image(SinkhornAttention([[1.0]], [[1.0]]), DiscreteMeasure([[-s], [s]]), fine=True)
    if size > 1000.0:  # cosh^2 of the logits is beyond what the residual can make up for
        assert found is None or float(found.radius.max()) > 1e-3
        return
    assert found is not None
    with mp.workdps(DIGITS):
        value = mp.mpf(s) * mp.tanh(mp.mpf(s) ** 2)
        assert_holds(found, [-value, value])


def test_nothing_is_claimed_beyond_float64() -> None:
    assert image(LinearAttention([[1e200]], [[1.0]]), DiscreteMeasure([[1e150]])) is None
    wide = MLP([[1e200]], [0.0], [[1e200]], activation="identity")
    assert image(wide, DiscreteMeasure([[1.0]])) is None
