r"""Outward-rounded operations on pairs of ends (float64 arrays); `otattn.lipschitz.arithmetic.intervals` wraps them.

**The model.** A pair :math:`(l, h)` stands for the real numbers :math:`l \le x \le h`. An infinite end says "no limit on
that side", so zero times an infinite end is 0. A kernel returns a pair that holds :math:`f(x, y)` for all real x, y in
its arguments at which f is defined, and the whole line where f is defined nowhere.

**The basic operations.** IEEE 754 rounds ``+ - * /`` and the square root to nearest. Let v be the rounded result and
:math:`|v| \ge 2^{-1021}`. Then the exact result lies between the two neighbours of v, and
:math:`ulp(v) \le 2^{-52} |v|`, so rounding :math:`v \pm 2^{-52} |v|` gives the neighbour or something further out
(rounding is monotone and the neighbour on the far side is :math:`v \pm ulp(v)` or nearer). This takes three fast passes,
where ``nextafter`` is ten times slower. Below :math:`2^{-1021}` sums of floats are exact; a product or quotient is
widened there by ``nextafter``, and the signs of the factors decide which ends may cross zero.

**Functions of the library.** The vectorised functions of numpy are documented to 4 ulp. They are widened by 18 relative
:math:`2^{-52}` (more than 16 ulp and the rounding of the widening) and by :math:`2^{-1021}`, which counts code that
flushes subnormal results to zero; then clipped to the exact range and sign.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from otattn._linalg import Array

Pair = tuple[Array, Array]

EPS = 2.0**-52
"""Relative widening of a correctly rounded result: at least one ulp."""
SMALL = 2.0**-1021
"""Below it a product or quotient may be rounded in the subnormal range."""
LIBRARY = 18.0 * EPS
"""Relative widening of a function of the library: four times its documented 4 ulp, and two for the widening."""
TINY = 2.0**-1021
"""Absolute widening of a function of the library: a result, itself a few ulp off, that was flushed to zero."""
LARGEST = float(np.finfo(np.float64).max)
ONE = np.ones(())
HALF_PI_UP = float(np.nextafter(np.pi / 2, np.inf))  # np.pi / 2 and np.pi are below the exact numbers


def repaired(lo: Any, hi: Any) -> Pair:
    """The pair, with the whole half-line in place of a nan."""
    if np.isnan(lo).any():
        lo = np.where(np.isnan(lo), -np.inf, lo)
    if np.isnan(hi).any():
        hi = np.where(np.isnan(hi), np.inf, hi)
    return lo, hi


def _down(v: Any) -> Any:
    """A number below every real that rounds to `v` (for subnormal `v`: `v` itself, see the module)."""
    w = v - np.abs(v) * EPS
    if np.isnan(w).any():
        w = np.where(np.isnan(v), -np.inf, np.where(np.isnan(w), np.nextafter(v, -np.inf), w))
    return w


def _up(v: Any) -> Any:
    w = v + np.abs(v) * EPS
    if np.isnan(w).any():
        w = np.where(np.isnan(v), np.inf, np.where(np.isnan(w), np.nextafter(v, np.inf), w))
    return w


def _outward(lo: Any, hi: Any) -> tuple[Any, Any, Any]:
    """Ends moved outward, and where an end may come from an underflow (there by ``nextafter``)."""
    low, high = _down(lo), _up(hi)
    tiny = np.minimum(np.abs(lo), np.abs(hi)) < SMALL
    if tiny.any():
        low, high = np.asarray(low), np.asarray(high)
        np.nextafter(lo, -np.inf, out=low, where=tiny)
        np.nextafter(hi, np.inf, out=high, where=tiny)
    return low, high, tiny


def _signed(low: Any, high: Any, least: Any, greatest: Any) -> Pair:
    """Ends that do not cross zero where the exact result is known to be >= 0 (`least`) or <= 0 (`greatest`)."""
    return np.where(least, np.maximum(low, 0.0), low), np.where(greatest, np.minimum(high, 0.0), high)


def add(a: Pair, b: Pair) -> Pair:
    """Sums of the ends; a sum that is subnormal or zero is exact."""
    return _down(a[0] + b[0]), _up(a[1] + b[1])


def negative(a: Pair) -> Pair:
    """Exact."""
    return -a[1], -a[0]


def subtract(a: Pair, b: Pair) -> Pair:
    """a + (-b)."""
    return _down(a[0] - b[1]), _up(a[1] - b[0])


def _product(x: Any, y: Any) -> Any:
    """Rounded product with zero times an infinite end equal to 0."""
    v = x * y
    return np.where(np.isnan(v), 0.0, v) if np.isnan(v).any() else v


def multiply(a: Pair, b: Pair) -> Pair:
    """Hull of the products of ends; of non-negative intervals, or with a float, not all four are needed."""
    if (a[0] >= 0).all() and (b[0] >= 0).all():
        least, most = [(a[0], b[0])], [(a[1], b[1])]
    else:
        xs = a[:1] if a[0] is a[1] else a
        ys = b[:1] if b[0] is b[1] else b
        least = most = [(x, y) for x in xs for y in ys]
    products = [_product(x, y) for x, y in least]
    lo = reduce(np.minimum, products)
    hi = reduce(np.maximum, products if most is least else [_product(x, y) for x, y in most])
    low, high, tiny = _outward(lo, hi)
    if not tiny.any():
        return low, high
    smallest = reduce(np.minimum, [np.sign(x) * np.sign(y) for x, y in least])
    greatest = reduce(np.maximum, [np.sign(x) * np.sign(y) for x, y in most])
    return _signed(low, high, smallest >= 0, greatest <= 0)


def divide(a: Pair, b: Pair) -> Pair:
    """Quotients by the numbers of b other than 0: the whole line where b has both signs or is 0."""
    flip = b[1] <= 0
    if flip.any():
        b = np.where(flip, -b[1], b[0]), np.where(flip, -b[0], b[1])
        a = np.where(flip, -a[1], a[0]), np.where(flip, -a[0], a[1])
    whole = (b[0] < 0) | (b[1] == 0)
    b0 = np.abs(b[0])  # no negative zero
    positive, negative_ = a[0] >= 0, a[1] <= 0
    low, high, _ = _outward(a[0] / np.where(positive, b[1], b0), a[1] / np.where(negative_, b[1], b0))
    low, high = _signed(*repaired(low, high), positive, negative_)
    if whole.any():
        return np.where(whole, -np.inf, low), np.where(whole, np.inf, high)
    return low, high


def magnitudes(a: Pair) -> Pair:
    """Least and greatest absolute value: exact."""
    return np.maximum(np.maximum(a[0], -a[1]), 0.0), np.maximum(np.abs(a[0]), np.abs(a[1]))


def square(a: Pair) -> Pair:
    """Squares of the magnitudes."""
    least, most = magnitudes(a)
    low, high, tiny = _outward(least * least, most * most)
    return np.maximum(low, 0.0), (np.where(most == 0, 0.0, high) if tiny.any() else high)


def sqrt(a: Pair) -> Pair:
    """Correctly rounded, never subnormal unless 0; the part below 0 is cut off."""
    return repaired(_down(np.sqrt(np.maximum(a[0], 0.0))), _up(np.sqrt(a[1])))


def _below(v: Any) -> Any:
    """`v` of the library, lowered; an overflow says that the exact value is near the largest float or above."""
    v = np.minimum(v, LARGEST)
    return np.minimum(v * (1 - LIBRARY), v * (1 + LIBRARY)) - TINY


def _above(v: Any) -> Any:
    v = np.maximum(v, -LARGEST)
    return np.maximum(v * (1 - LIBRARY), v * (1 + LIBRARY)) + TINY


@dataclass(frozen=True)
class Increasing:
    """An increasing function on [domain, inf) with values in [least, greatest], and zero exactly at `root`."""

    function: Callable[[Any], Any]
    domain: float = -np.inf
    least: float = -np.inf
    greatest: float = np.inf
    root: float | None = None

    def __call__(self, a: Pair) -> Pair:
        lo, hi = np.maximum(a[0], self.domain), a[1]
        low = np.maximum(_below(self.function(lo)), self.least)
        image = self.function(hi)
        high = np.minimum(_above(image), self.greatest)
        if self.root is not None:
            low, high = _signed(low, high, lo >= self.root, hi <= self.root)
        if self.domain > -np.inf:
            high = np.where(image == -np.inf, image, high)  # the pole of a logarithm at the end of its domain
        return repaired(low, high)


exp = Increasing(np.exp, least=0.0)
log = Increasing(np.log, domain=0.0, root=1.0)
log1p = Increasing(np.log1p, domain=-1.0, root=0.0)


def cosh(a: Pair) -> Pair:
    """Even, increasing in the magnitude, at least 1."""
    least, most = magnitudes(a)
    return np.maximum(_below(np.cosh(least)), 1.0), _above(np.cosh(most))


def _nearby(function: Callable[[Any], Any], a: Pair) -> Pair:
    """Sine or cosine anywhere: its value at the lower end, give or take the length of the interval."""
    value, length = function(a[0]), _up(a[1] - a[0])
    return np.fmax(_below(value) - 2 * EPS - length, -1.0), np.fmin(_above(value) + 2 * EPS + length, 1.0)


def cos(a: Pair) -> Pair:
    """Monotone in the magnitude up to pi; absolutely widened beyond 1.5, as relative errors grow at the zeros."""
    least, most = magnitudes(a)
    far, here = np.where(most < 1.5, 0.0, EPS), most <= np.pi
    low, high = np.maximum(_below(np.cos(most)) - far, -1.0), np.minimum(_above(np.cos(least)) + far, 1.0)
    other = (low, high) if here.all() else _nearby(np.cos, a)
    return np.where(here, low, other[0]), np.where(here, high, other[1])


def sin(a: Pair) -> Pair:
    """On [-pi/2, pi] it rises up to pi/2 and then falls; absolutely widened beyond 1.5."""
    lo, hi = a
    here = (lo >= -np.pi / 2) & (hi <= np.pi)
    ends = np.sin(lo), np.sin(hi)
    far = np.where(hi < 1.5, 0.0, EPS)
    low, high = np.maximum(_below(np.minimum(*ends)) - far, -1.0), np.minimum(_above(np.maximum(*ends)) + far, 1.0)
    high = np.where((lo <= HALF_PI_UP) & (hi >= np.pi / 2), 1.0, high)
    low, high = _signed(low, high, lo >= 0, hi <= 0)
    other = (low, high) if here.all() else _nearby(np.sin, a)
    return np.where(here, low, other[0]), np.where(here, high, other[1])


def hypot(a: Pair, b: Pair) -> Pair:
    """Increasing in both magnitudes; at most their sum, which keeps an exact zero."""
    x, y = magnitudes(a), magnitudes(b)
    low, high = np.maximum(_below(np.hypot(x[0], y[0])), 0.0), _above(np.hypot(x[1], y[1]))
    return np.maximum(low, np.maximum(x[0], y[0])), np.minimum(high, _up(x[1] + y[1]))


def logaddexp(a: Pair, b: Pair) -> Pair:
    """Increasing in both arguments: max + log(1 + exp(-difference)) at the two pairs of ends."""

    def at(x: Any, y: Any) -> Pair:
        top = np.maximum(x, y)
        gap = subtract((top, top), (np.minimum(x, y),) * 2)
        return add((top, top), log1p(exp((-gap[1], -np.maximum(gap[0], 0.0)))))

    return at(a[0], b[0])[0], at(a[1], b[1])[1]


def power(a: Pair, exponent: float) -> Pair:
    """``x ** exponent`` for one float: of x >= 0 (the part below is cut off) unless the exponent is an integer."""
    if exponent == 0:
        return np.ones_like(a[0]), np.ones_like(a[1])
    if exponent < 0:
        return divide((ONE, ONE), power(a, -exponent))
    if exponent in (0.5, 1, 2):
        return {0.5: sqrt, 1: lambda x: x, 2: square}[exponent](a)
    if exponent == np.floor(exponent) and exponent % 2 == 1:
        return Increasing(lambda x: np.power(x, exponent), root=0.0)(a)
    even = exponent == np.floor(exponent)
    return Increasing(lambda x: np.power(x, exponent), domain=0.0, least=0.0, root=0.0)(magnitudes(a) if even else a)


def powers(a: Pair, b: Pair) -> Pair:
    """``a ** b = exp(b log a)`` for intervals of exponents: the whole line where the base may be negative."""
    low, high = exp(multiply(b, log(a)))
    return np.where(a[0] < 0, -np.inf, low), np.where(a[0] < 0, np.inf, high)


def xlogx(a: Pair) -> Pair:
    """``x log x`` for x >= 0: 0 at 0, falling to -1/e at 1/e, then rising."""
    lo, hi = np.maximum(a[0], 0.0), a[1]
    at_lo, at_hi = (multiply((x, x), log((x, x))) for x in (lo, hi))
    low, high = np.minimum(at_lo[0], at_hi[0]), np.maximum(at_lo[1], at_hi[1])
    least, below, above = -np.exp(-1.0) * (1 + LIBRARY), 0.36, 0.37  # 1/e lies between `below` and `above`
    return np.where((lo < above) & (hi > below), np.maximum(np.minimum(low, least), least), low), high


def _centre(a: Pair) -> Pair:
    """Floats m and r >= 0 with [a] inside [m - r, m + r]; r = 0 for a float."""
    same = a[0] == a[1]
    m = np.where(same, a[0], 0.5 * a[0] + 0.5 * a[1])
    return m, np.where(same, 0.0, _up(np.maximum(m - a[0], a[1] - m)))


def matmul(a: Pair, b: Pair) -> Pair:
    r"""Products of matrices by midpoints and radii (Rump 1999), with the error of the products counted.

    With k summands, in any order and with or without fused operations (the conventional products of every BLAS),
    :math:`|fl(A B) - A B| \le \gamma_k |A| |B| + k 2^{-1074}`, :math:`\gamma_k = k u / (1 - k u)`, :math:`u = 2^{-53}`. The
    radius is :math:`|A| r_B + r_A (|B| + r_B) + \gamma_k |A| |B|`. Its three terms are products of non-negative
    matrices, computed with the same relative error, so the factor :math:`1 + (k + 8) 2^{-52}` and the absolute
    :math:`(4 k + 4) 2^{-1074}` cover all of it.
    """
    (m, r), (n, s) = _centre(a), _centre(b)
    k = m.shape[-1]
    product = np.matmul(m, n)
    radius = np.matmul(np.abs(m), np.abs(n)) * ((k + 1) * EPS)
    if np.any(s):
        radius = radius + np.matmul(np.abs(m), s)
    if np.any(r):
        radius = radius + np.matmul(r, _up(np.abs(n) + s))
    radius = radius * (1.0 + (k + 8) * EPS) + (4 * k + 4) * 2.0**-1074
    low, high = repaired(_down(product - radius), _up(product + radius))
    return (np.maximum(low, 0.0) if (a[0] >= 0).all() and (b[0] >= 0).all() else low), high


KERNELS: dict[str, Callable[..., Pair]] = {
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "divide": divide,
    "true_divide": divide,
    "negative": negative,
    "positive": lambda a: a,
    "absolute": magnitudes,
    "fabs": magnitudes,
    "square": square,
    "sqrt": sqrt,
    "reciprocal": lambda a: divide((ONE, ONE), a),
    "power": powers,
    "float_power": powers,
    "exp": exp,
    "exp2": Increasing(np.exp2, least=0.0),
    "expm1": Increasing(np.expm1, least=-1.0, root=0.0),
    "log": log,
    "log2": Increasing(np.log2, domain=0.0, root=1.0),
    "log10": Increasing(np.log10, domain=0.0, root=1.0),
    "log1p": log1p,
    "cosh": cosh,
    "sinh": Increasing(np.sinh, root=0.0),
    "tanh": Increasing(np.tanh, least=-1.0, greatest=1.0, root=0.0),
    "arctan": Increasing(np.arctan, least=-HALF_PI_UP, greatest=HALF_PI_UP, root=0.0),
    "cos": cos,
    "sin": sin,
    "hypot": hypot,
    "logaddexp": logaddexp,
    "matmul": matmul,
    "maximum": lambda a, b: (np.maximum(a[0], b[0]), np.maximum(a[1], b[1])),
    "minimum": lambda a, b: (np.minimum(a[0], b[0]), np.minimum(a[1], b[1])),
}
KERNELS["fmax"], KERNELS["fmin"] = KERNELS["maximum"], KERNELS["minimum"]
KERNELS["clip"] = lambda a, b, c: KERNELS["minimum"](KERNELS["maximum"](a, b), c)
