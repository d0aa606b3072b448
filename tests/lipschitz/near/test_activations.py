"""The bounds of the derivatives of activations, proved on the whole line."""

import mpmath as mp
import numpy as np
import pytest

from otattn.lipschitz.arithmetic.intervals import Interval, upper
from otattn.lipschitz.near.activations import ACTIVATIONS

FAR = 40.0
CUTS = 40
ROOT, CUBE = float(np.sqrt(2.0 / np.pi)), 0.044715  # the constants of the GELU through tanh are these floats
SUPS = ("sup_first", "sup_second", "sup_third", "sup_fourth")


def below(f, bound, low, high):
    """Whether ``|f| < bound`` on ``[low, high]``, by interval arithmetic on cells that are cut where it cannot tell."""
    ends = np.linspace(low, high, 4097)
    left, right = ends[:-1], ends[1:]
    for _ in range(CUTS):
        value = f(Interval.between(left, right))
        open_ = ~(np.maximum(upper(value), upper(-value)) < bound)
        if not open_.any():
            return True
        left, right = left[open_], right[open_]
        if len(left) > 200_000:
            return False
        middle = 0.5 * (left + right)
        left, right = np.concatenate([left, middle]), np.concatenate([middle, right])
    return False


def near(f, low, high):
    """The largest value of ``|f|`` on a grid: what a bound must not be far above."""
    return float(np.abs(upper(f(Interval.exact(np.linspace(low, high, 4001))))).max())


def sigmoid_product(order, q):
    """The derivative of ``s sigma(q(s))``; ``q(s)`` gives q and its first four derivatives."""

    def derivative(s):
        q0, q1, q2, q3, q4 = q(s)
        p = 1.0 / (1.0 + np.exp(-q0))
        s1 = p * (1.0 - p)
        s2, s3 = s1 * (1.0 - 2.0 * p), s1 * (1.0 - 6.0 * s1)
        s4 = s2 * (1.0 - 12.0 * s1)
        inner = [
            p,
            s1 * q1,
            s2 * q1**2 + s1 * q2,
            s3 * q1**3 + 3.0 * s2 * q1 * q2 + s1 * q3,
            s4 * q1**4 + 6.0 * s3 * q1**2 * q2 + s2 * (3.0 * q2**2 + 4.0 * q1 * q3) + s1 * q4,
        ]
        return s * inner[order] + order * inner[order - 1]

    return derivative


def tail(order, q):
    """A bound of it for ``|s| >= FAR``, decreasing: ``|sigma^(k)| <= 2 e^{-|q|}``, and sigma is at most 1."""
    q0, *slopes = (float(np.max(np.abs(part))) for part in q(np.array([FAR])))
    size = 1.0 + sum(slopes)
    return (1.0 if order == 1 else 0.0) + 16.0 * (FAR + order) * 2.0 * size**order * np.exp(-q0)


def plain(s):
    return s, 1.0 + 0.0 * s, 0.0 * s, 0.0 * s, 0.0 * s


def cubic(s):
    c = 2.0 * ROOT
    return c * (s + CUBE * s**3), c * (1.0 + 3.0 * CUBE * s**2), 6.0 * c * CUBE * s, 6.0 * c * CUBE + 0.0 * s, 0.0 * s


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize(("name", "q"), [("silu", plain), ("gelu_tanh", cubic)])
def test_products_with_a_sigmoid(name, q, order):
    bound = getattr(ACTIVATIONS[name], SUPS[order - 1])
    assert below(sigmoid_product(order, q), bound, -FAR, FAR)
    assert tail(order, q) < bound
    assert near(sigmoid_product(order, q), -4.0, 4.0) > 0.99 * bound


@pytest.mark.parametrize("order", [2, 3, 4])
def test_the_exact_gelu(order):
    polynomial = {2: lambda s: 2.0 - s**2, 3: lambda s: s**3 - 4.0 * s, 4: lambda s: 7.0 * s**2 - 4.0 - s**4}[order]
    low = float(1 / mp.sqrt(2 * mp.pi))
    density = Interval.between(np.nextafter(low, 0), np.nextafter(low, 1))

    def derivative(s):
        return polynomial(s) * np.exp(-0.5 * s**2) * density

    bound = getattr(ACTIVATIONS["gelu"], SUPS[order - 1])
    assert below(derivative, bound, -FAR, FAR)
    assert FAR**4 * 8.0 * np.exp(-0.5 * FAR**2) < bound  # decreasing beyond
    assert near(derivative, -4.0, 4.0) > 0.99 * bound


def test_the_slope_of_the_exact_gelu():
    """Its own slope vanishes at ``+-sqrt 2`` only; at infinity it tends to 0 and 1."""
    with mp.workdps(30):
        top = mp.ncdf(mp.sqrt(2)) + mp.sqrt(2) * mp.npdf(mp.sqrt(2))
        assert max(1.0, float(1 - top)) < float(top) < ACTIVATIONS["gelu"].sup_first < 1.01 * float(top)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_tanh_by_polynomials(order):
    slopes = {
        1: lambda t: 1.0 - t**2,
        2: lambda t: -2.0 * t * (1.0 - t**2),
        3: lambda t: -2.0 * (1.0 - t**2) * (1.0 - 3.0 * t**2),
        4: lambda t: (1.0 - t**2) * (16.0 * t - 24.0 * t**3),
    }
    bound = getattr(ACTIVATIONS["tanh"], SUPS[order - 1])
    assert below(slopes[order], bound, -1.0, 1.0)
    assert near(slopes[order], -1.0, 1.0) > 0.99 * bound
    t = mp.tanh(mp.mpf("0.37"))
    assert float(slopes[order](t)) == pytest.approx(float(mp.diff(mp.tanh, mp.mpf("0.37"), order)), rel=1e-9)


@pytest.mark.parametrize(("name", "q"), [("silu", plain), ("gelu_tanh", cubic)])
def test_the_formulas_are_derivatives(name, q):
    """What is bounded here is the derivative of the function, and, up to the third, what the library evaluates."""
    functions = {
        "gelu_tanh": lambda s: s * (1 + mp.tanh(ROOT * (s + CUBE * s**3))) / 2,
        "silu": lambda s: s / (1 + mp.exp(-s)),
    }
    phi = ACTIVATIONS[name]
    ours = (phi.first, phi.second, phi.third)
    for order in (1, 2, 3, 4):
        for s in (-3.1, 0.6):
            with mp.workdps(40):
                exact = float(mp.diff(functions[name], mp.mpf(s), order))
            found = sigmoid_product(order, q)(Interval.exact(np.array([s])))
            assert float(upper(found)[0]) == pytest.approx(exact, rel=1e-9)
            if order < 4:
                assert float(ours[order - 1](np.array([s]))[0]) == pytest.approx(exact, rel=1e-11)
