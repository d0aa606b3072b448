"""Interval arithmetic holds the exact result (Arb at 200 bits, mpmath, fractions) and is tight."""

import dataclasses
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest

from otattn.lipschitz.arithmetic._interval_kernels import KERNELS, Increasing
from otattn.lipschitz.arithmetic.intervals import Interval, lift, xlogy

LARGEST, LEAST = np.finfo(float).max, 5e-324
EDGES = np.array([0.0, LEAST, 3 * LEAST, 2.0**-1022, 2.0**-1021, 1e-300, 1e-160, 1e-8, 1 / math.e, 0.5, 1.0, 1.5, 2.0])
EDGES = np.concatenate([EDGES, [math.pi / 2, math.pi, 37.0, 709.782712893384, 745.13, 1e8, 1e154, 1e200, LARGEST]])


@pytest.fixture
def flint() -> Any:
    module = pytest.importorskip("flint", reason="python-flint gives the exact values (extra: proof)")
    before, module.ctx.prec = module.ctx.prec, 200
    yield module
    module.ctx.prec = before


def points(rng: np.random.Generator, n: int) -> np.ndarray:
    """Ordinary, tiny, huge and subnormal numbers, the edges and their neighbours, of both signs."""
    edges = np.concatenate([EDGES, np.nextafter(EDGES[:-1], np.inf), np.nextafter(EDGES, 0.0)])
    kinds = [rng.normal(size=n), rng.normal(size=n) * 10.0 ** rng.uniform(-12, 3, n), rng.choice(edges, n)]
    kinds += [10.0 ** rng.uniform(-307, 308, n), LEAST * rng.integers(0, 2**52, n), 1 + rng.normal(size=n) * 1e-9]
    return np.choose(rng.integers(0, len(kinds), n), kinds) * rng.choice([-1.0, 1.0], n)


def around(rng: np.random.Generator, x: np.ndarray) -> Interval:
    """Intervals that hold `x`: the number itself, an end of it at x, or wider ones."""
    width = np.abs(x) * 10.0 ** rng.uniform(-17, 0, x.shape)
    with np.errstate(over="ignore"):  # an infinite end is one more case
        lo = np.where(rng.random(x.shape) < 0.6, x, x - width)
        hi = np.where(rng.random(x.shape) < 0.6, x, x + width)
    return Interval.between(lo, hi)


def violations(result: Interval, exact: list[Any], number: Callable[[float], Any]) -> list[int]:
    """Positions at which the exact value is certainly outside (comparisons of balls are true when certain)."""
    ends = zip(result.lo.ravel().tolist(), result.hi.ravel().tolist(), exact, strict=True)
    return [i for i, (lo, hi, v) in enumerate(ends) if v < number(lo) or v > number(hi) or not lo <= hi]


# name: (numpy function, method of an Arb or mpmath number, least argument)
UNARY: dict[str, tuple[Callable[[Any], Any], str, float]] = {
    "exp": (np.exp, "exp", -np.inf),
    "expm1": (np.expm1, "expm1", -np.inf),
    "log": (np.log, "log", LEAST),
    "log1p": (np.log1p, "log1p", math.nextafter(-1.0, 0.0)),
    "sqrt": (np.sqrt, "sqrt", 0.0),
    "cos": (np.cos, "cos", -np.inf),
    "sin": (np.sin, "sin", -np.inf),
    "cosh": (np.cosh, "cosh", -np.inf),
    "sinh": (np.sinh, "sinh", -np.inf),
    "tanh": (np.tanh, "tanh", -np.inf),
    "arctan": (np.arctan, "atan", -np.inf),
}


def arguments(rng: np.random.Generator, n: int, least: float) -> np.ndarray:
    """Points at which a function of `UNARY` is defined."""
    x = points(rng, n)
    return np.where(x >= least, x, np.maximum(np.abs(x), least))


@pytest.mark.parametrize("name", UNARY)
def test_unary_against_arb(name: str, flint: Any) -> None:
    function, method, least = UNARY[name]
    rng = np.random.default_rng(len(name))
    x = arguments(rng, 10_000, least)
    exact = [getattr(flint.arb(v), method)() for v in x.tolist()]
    assert violations(function(lift(x)), exact, flint.arb) == []
    assert violations(function(around(rng, x)), exact, flint.arb) == []
    ordinary = (np.abs(x) > 1e-3) & (np.abs(x) < 20)
    value, result = np.array([float(v) for v in exact]), function(lift(x))
    scale = 1.0 if name in ("cos", "sin") else np.abs(value)
    assert ordinary.sum() > 1000
    assert np.all((result.hi - result.lo)[ordinary] <= (1e-14 * scale * np.ones_like(x))[ordinary])


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("name", [name for name in UNARY if name != "sqrt"])
def test_a_library_with_errors_of_four_ulp_is_enclosed(
    name: str, sign: float, flint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, method, least = UNARY[name]
    x = arguments(np.random.default_rng(1), 2000, least)
    x = np.concatenate([x, [np.pi / 2, 3.0, np.pi, 5.0, 20.0, 700.0]])

    def poor(t: Any) -> Any:
        v = np.asarray(function(t)) * (1 + sign * 4 * 2.0**-52)
        if name in ("cos", "sin"):
            return np.where(np.abs(t) > 1.5, v + sign * 1e-16, v)  # relative errors are larger at the zeros
        return np.where(np.abs(v) < 2.0**-1022, 0.0, v)  # flushed to zero

    kernel = KERNELS[name]
    if isinstance(kernel, Increasing):
        kernel = dataclasses.replace(kernel, function=poor)
    else:
        monkeypatch.setattr(np, name, poor)
    with np.errstate(all="ignore"):
        result = Interval(*kernel((x, x)))
    assert violations(result, [getattr(flint.arb(v), method)() for v in x.tolist()], flint.arb) == []


@pytest.mark.parametrize("name", UNARY)
def test_unary_against_mpmath(name: str) -> None:
    function, method, least = UNARY[name]
    x = arguments(np.random.default_rng(7), 300, least)
    x = x[(np.abs(x) < 1e4) & (np.abs(x) > 1e-300) & (x > least)]
    assert len(x) > 100
    with mpmath.workprec(1200):
        assert violations(function(lift(x)), [getattr(mpmath, method)(v) for v in x.tolist()], mpmath.mpf) == []


BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
}


@pytest.mark.parametrize("name", [*BINARY, "hypot", "maximum", "minimum", "logaddexp"])
def test_binary_against_arb(name: str, flint: Any) -> None:
    def exact(a: float, b: float) -> Any:
        x, y = flint.arb(a), flint.arb(b)
        if name == "hypot":
            return (x * x + y * y).sqrt()
        if name == "logaddexp":
            return max(x, y) + (-abs(x - y)).exp().log1p()
        return {**BINARY, "maximum": max, "minimum": min}[name](x, y)

    rng = np.random.default_rng(3)
    x, y = points(rng, 10_000), points(rng, 10_000)
    y[:200] = x[:200] * (1 + 1e-15 * rng.normal(size=200))
    values = [exact(a, b) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    function = getattr(np, name)
    forms = [(lift(x), lift(y)), (around(rng, x), y), (x, around(rng, y)), (around(rng, x), around(rng, y))]
    for a, b in forms:
        assert violations(function(a, b), values, flint.arb) == []
    both = abs(around(rng, x)), abs(around(rng, y))  # of one sign
    values = [exact(abs(a), abs(b)) for a, b in zip(x.tolist(), y.tolist(), strict=True)]
    assert violations(function(*both), values, flint.arb) == []
    u, v = rng.uniform(0.5, 2, 1000), rng.uniform(0.5, 2, 1000)
    tight = function(lift(u), lift(v + 3))
    assert np.all(tight.hi - tight.lo <= 1e-14 * np.abs(tight.hi))


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4, 7, -1, -2, -3, 0.5, 1.5, -0.5, 0.1, 2.7])
def test_power_against_arb(exponent: float, flint: Any) -> None:
    rng = np.random.default_rng(5)
    x = points(rng, 10_000)
    x = np.abs(x) if exponent != int(exponent) else x
    x = x[x != 0] if exponent < 0 else x
    power = flint.arb(exponent) if exponent != int(exponent) else int(exponent)
    exact = [flint.arb(v) ** power for v in x.tolist()]
    for a in (lift(x), around(rng, x)):
        assert violations(a**exponent, exact, flint.arb) == []
    u = lift(rng.uniform(0.5, 2, 1000)) ** exponent
    assert np.all(u.hi - u.lo <= 1e-14 * u.hi)


def test_other_bases_against_arb(flint: Any) -> None:
    rng = np.random.default_rng(11)
    x = np.concatenate([rng.normal(size=2000) * 400, rng.normal(size=2000), np.arange(-1100.0, 1100.0)])
    two = [flint.arb(2) ** flint.arb(v) for v in x.tolist()]
    for a in (lift(x), around(rng, x)):
        assert violations(np.exp2(a), two, flint.arb) == []
        assert violations(2.0**a, two, flint.arb) == []
    base = np.abs(x) + 1e-3
    exact = [flint.arb(b) ** flint.arb(v) for b, v in zip(base.tolist(), x.tolist(), strict=True)]
    assert violations(lift(base) ** x, exact, flint.arb) == []
    assert violations(around(rng, base) ** around(rng, x), exact, flint.arb) == []
    assert np.power(lift(-1.0), lift(2.0)).hi == np.inf
    for function, radix in ((np.log2, 2), (np.log10, 10)):
        logs = [flint.arb(b).log() / flint.arb(radix).log() for b in base.tolist()]
        assert violations(function(lift(base)), logs, flint.arb) == []


def program(rng: np.random.Generator, steps: int) -> list[tuple[str, int, int]]:
    """A random expression: operations on earlier values, which start with four arrays of leaves."""
    names = [
        "add",
        "subtract",
        "multiply",
        "divide",
        "neg",
        "abs",
        "sqrt",
        "exp",
        "log1p",
        "tanh",
        "square",
        "max",
        "cos",
    ]
    return [(str(rng.choice(names)), int(rng.integers(0, 4 + k)), int(rng.integers(0, 4 + k))) for k in range(steps)]


def apply(name: str, x: Any, y: Any, library: dict[str, Callable[[Any], Any]]) -> Any:
    """One operation, for intervals and for balls; partial functions take magnitudes."""
    if name in BINARY:
        return BINARY[name](x, y)
    if name == "max":
        return library["max"](x, y)  # type: ignore[call-arg]
    if name in ("neg", "square"):
        return -x if name == "neg" else x * x
    argument = {"exp": lambda: -abs(x), "sqrt": lambda: abs(x), "log1p": lambda: abs(x)}.get(name, lambda: x)()
    return abs(x) if name == "abs" else library[name](argument)


def test_random_expressions_against_arb(flint: Any) -> None:
    names = ("sqrt", "exp", "log1p", "tanh", "cos")
    numpys: dict[str, Any] = {name: getattr(np, name) for name in names} | {"max": np.maximum}
    balls: dict[str, Any] = {name: operator.methodcaller(name) for name in names} | {"max": max}
    checked = 0
    for seed in range(45):
        rng = np.random.default_rng(seed)
        leaves = [points(rng, 300) if seed % 2 else rng.normal(size=300) for _ in range(4)]
        intervals: list[Any] = [around(rng, v) if rng.random() < 0.5 else lift(v) for v in leaves]
        exact: list[list[Any]] = [[flint.arb(v) for v in leaf.tolist()] for leaf in leaves]
        for name, i, j in program(rng, 10):
            intervals.append(apply(name, intervals[i], intervals[j], numpys))
            exact.append([apply(name, a, b, balls) for a, b in zip(exact[i], exact[j], strict=True)])
            assert violations(intervals[-1], exact[-1], flint.arb) == [], (seed, name)
            checked += sum(v.is_finite() for v in exact[-1])
    assert checked > 100_000


def test_a_formula_of_numpy_runs_unchanged_on_intervals(flint: Any) -> None:
    def softmax(z: Any) -> Any:
        w = np.exp(z - z.max(axis=1, keepdims=True))
        return w / w.sum(axis=1, keepdims=True)

    z = np.random.default_rng(0).normal(size=(50, 20)) * 10
    result = softmax(lift(z))
    assert result.shape == z.shape
    assert np.all((result.lo <= softmax(z)) & (softmax(z) <= result.hi))
    for row, ends in zip(z.tolist(), result, strict=True):
        weights = [flint.arb(v).exp() for v in row]
        total = sum(weights)
        assert violations(ends, [w / total for w in weights], flint.arb) == []
    assert np.all(result.hi - result.lo <= 1e-12 * result.hi)


def test_edges_of_the_domains() -> None:
    with np.errstate(all="raise"):
        zero, unit = lift(0.0), Interval.between(0.0, 1.0)
        assert (zero * Interval.between(-np.inf, np.inf)).hi == 0 == (zero * np.inf).lo
        assert (1 / Interval.between(-1.0, 1.0)).hi == np.inf == -(1 / lift(0.0)).lo
        quotient = 1 / Interval.between(0.0, 4.0)
        assert quotient.hi == np.inf
        assert 0.25 * (1 - 1e-15) <= quotient.lo <= 0.25
        assert -0.25 <= (1 / Interval.between(-4.0, 0.0)).hi <= -0.25 * (1 - 1e-15)
        assert (zero / unit).hi == 0
        assert np.log(zero).hi == -np.inf == np.log(unit).lo
        assert np.log(unit).hi == 0 == np.log(lift(1.0)).lo
        assert np.sqrt(Interval.between(-1.0, 0.0)).hi == 0 == np.sqrt(Interval.between(-1.0, 0.0)).lo
        for undefined in (
            np.sqrt(lift(-1.0)),
            np.log(lift(-1.0)),
            np.log1p(lift(-2.0)),
            lift(-1.0) ** 0.5,
            lift(np.nan),
        ):
            assert undefined.hi == np.inf
        assert np.exp(lift(-1e4)).lo == 0 < np.exp(lift(-1e4)).hi
        assert np.exp(lift(1e4)).hi == np.inf > np.exp(lift(1e4)).lo > 1.79e308
        assert (lift(LARGEST) + LARGEST).lo == LARGEST
        assert (np.cos(unit * 10).lo, np.cos(unit * 10).hi, np.sin(lift(np.inf)).hi) == (-1, 1, 1)
        assert np.sin(Interval.between(1.0, 2.0)).hi == 1 == np.cos(Interval.between(-1.0, 1.0)).hi
        tiny = lift(1e-200) * 1e-200
        assert tiny.lo == 0 < tiny.hi
        assert (lift(np.inf) - np.inf).hi == np.inf
        assert np.logaddexp(lift(-np.inf), -np.inf).hi <= -LARGEST
        assert all(f(zero).lo == 0 == f(zero).hi for f in (np.tanh, np.sinh, np.expm1, np.log1p, np.arctan, np.square))


def test_xlogy(flint: Any) -> None:
    rng = np.random.default_rng(6)
    x, y = np.abs(points(rng, 10_000)), np.maximum(np.abs(points(rng, 10_000)), LEAST)
    pairs = list(zip(x.tolist(), y.tolist(), strict=True))
    exact = [flint.arb(a) * flint.arb(b).log() for a, b in pairs]
    for a, b in ((lift(x), y), (x, lift(y)), (abs(around(rng, x)), abs(around(rng, y)))):
        assert violations(xlogy(a, b), exact, flint.arb) == []
    p = abs(around(rng, y))
    assert violations(xlogy(p, p), [flint.arb(b) * flint.arb(b).log() for b in y.tolist()], flint.arb) == []
    unit = Interval.between(0.0, 1.0)
    assert -0.36788 < xlogy(unit, unit).lo < -1 / math.e
    assert xlogy(unit, unit).hi == 0 == xlogy(lift(0.0), 0.0).lo
    assert xlogy(0.0, 0.0) == 0.0
    assert xlogy(Interval.between(-1e-17, 0.5), Interval.between(0.0, 0.5)).hi == 0
    with pytest.raises(ValueError, match="x >= 0 is required"):
        xlogy(lift(-1.0), 2.0)


def test_where_holds_the_values_of_a_piecewise_formula() -> None:
    def huber(t: Any) -> Any:
        return np.where(abs(t) <= 1, t * t / 2, abs(t) - 0.5)

    rng = np.random.default_rng(2)
    x = around(rng, rng.normal(size=2000) * 1.5)
    inside = x.lo + (x.hi - x.lo) * rng.random((5, 2000))
    inside = np.clip(inside, x.lo, x.hi)
    for sample in inside:
        exact = [t * t / 2 if abs(t) <= 1 else abs(t) - Fraction(1, 2) for t in map(Fraction, sample.tolist())]
        assert violations(huber(x), exact, Fraction) == []
