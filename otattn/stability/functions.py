r"""Elementary functions of enclosed arrays.

In float64 the libraries are trusted to a stated number of units (``LIBRARY_UNITS``; the error function to
``2^-43``). In double-double nothing is trusted: arguments are reduced to a small interval and Taylor series are
summed in enclosed arithmetic, so that all rounding is counted by the operations themselves and only the tail of
the series is added by hand.

A function f is evaluated at the centre c of its argument; the argument's error e then moves it by at most
``e sup |f'|`` over ``[c - e, c + e]``.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from scipy.special import ndtr

from otattn._linalg import Array
from otattn.stability.enclosed import TINY, UNIT, Enclosed, upward

__all__ = ["cos_sin", "exp", "expit", "gelu", "silu", "sqrt", "tanh"]

LIBRARY_UNITS = 8.0
"""Error of numpy's exp, sin, cos and sqrt in units of ``u``: 4 units in the last place (they document less than 1)."""
NORMAL_ERROR = 2.0**-43
"""Relative error of scipy's normal distribution function in float64 (its authors document 1e-15 on the bulk)."""
TAIL = 2.0**-115
"""More than the rest of each series below on its reduced argument."""
_FAR = 13.0  # 1 - Phi(13) < 7e-39


def _constant(numerator: int, denominator: int, error: float) -> Enclosed:
    """A number given by an integer fraction, as a pair of floats."""
    exact = Fraction(numerator, denominator)
    high = float(exact)
    low = float(exact - Fraction(high))
    return Enclosed(np.array(high), np.array(low), np.array(error))


def _inverse(k: int) -> Enclosed:
    return _constant(1, k, 2.0**-105 / k)


# 45 decimals each
_LN2 = _constant(693147180559945309417232121458176568075500134, 10**45, 2.0**-104)
_HALF_PI = _constant(1570796326794896619231321691639751442098584699, 10**45, 2.0**-104)
_ROOT = _constant(398942280401432677939946059934381868475858631, 10**45, 2.0**-104)  # 1 / sqrt(2 pi)
_FACTORIALS = [_inverse(math.factorial(k)) for k in range(30)]


def _centre(x: Enclosed) -> Enclosed:
    return Enclosed(x.high, x.low)


def exp(x: Enclosed) -> Enclosed:
    """``e^x``; values beyond float64 become inf, unbounded."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if x.low is None:
            value = np.exp(x.high)
            y = Enclosed(value, None, LIBRARY_UNITS * UNIT * value + TINY)
        else:
            y = _fine_exp(_centre(x))
        if x.error is None:
            return y
        top = (y.high + y.radius) * (1.0 + 4.0 * UNIT)
        moved = top * x.error * (1.0 + x.error)  # e^t - 1 <= t + t^2 for t <= 1
        large = ~(x.error <= 1.0)
        if large.any():  # y e^error itself, also where y has vanished
            size = np.abs(x.high) + x.error
            far = np.exp(x.high + x.error + 8.0 * UNIT * size) * (1.0 + 2.0 * LIBRARY_UNITS * UNIT) + TINY
            moved = np.where(large, far, moved)
        return y.widened(moved)


def _fine_exp(x: Enclosed) -> Enclosed:
    """``2^k (e^{r / 16})^16`` with ``r = x - k log 2``, ``|r| <= 0.35``; the series ends with ``(r/16)^14 / 14!``."""
    k = np.rint(np.clip(np.nan_to_num(x.high, nan=0.0), -800.0, 720.0) / math.log(2.0))
    beyond = x.high < -790.0  # below every float
    r = (x - Enclosed.exact(k, fine=True) * _LN2).where(~beyond).scaled(-4)
    y = r * _FACTORIALS[14] + _FACTORIALS[13]
    for j in range(12, -1, -1):
        y = y * r + _FACTORIALS[j]
    y = y.widened(TAIL)
    for _ in range(4):
        y = y * y
    # where x is far above 720 the power of two is too small: refused
    out = y.scaled(k.astype(np.int64)).where(~beyond)
    return out.widened(np.where(x.high > 719.0, np.inf, 0.0))


def cos_sin(x: Enclosed) -> tuple[Enclosed, Enclosed]:
    """``cos x, sin x``."""
    if x.low is None:
        values = np.cos(x.high), np.sin(x.high)
        c, s = (Enclosed(v, None, np.full(v.shape, LIBRARY_UNITS * UNIT)) for v in values)
    else:
        k = np.rint(x.high / (0.5 * math.pi))
        r = _centre(x) - Enclosed.exact(k, fine=True) * _HALF_PI
        square = r * r
        even, odd = _FACTORIALS[28] * square, _FACTORIALS[29] * square
        for j in range(26, -1, -2):
            sign = 1.0 if j % 4 == 0 else -1.0
            even, odd = even + sign * _FACTORIALS[j], odd + sign * _FACTORIALS[j + 1]
            if j:
                even, odd = even * square, odd * square
        even, odd = even.widened(TAIL), (odd * r).widened(TAIL)
        turn = np.mod(k, 4.0)
        c = _choose(turn, even, -odd, -even, odd)
        s = _choose(turn, odd, even, -odd, -even)
        far = np.where(np.abs(x.high) < 2.0**40, 0.0, 2.0)
        c, s = c.widened(far), s.widened(far)
    return (c, s) if x.error is None else (c.widened(x.error), s.widened(x.error))


def _choose(turn: Array, *options: Enclosed) -> Enclosed:
    def pick(name: str) -> Array:
        return np.select([turn == q for q in range(4)], [getattr(option, name) for option in options])

    return Enclosed(pick("high"), pick("low"), pick("radius"))


def sqrt(x: Enclosed) -> Enclosed:
    """The square root of a non-negative array."""
    with np.errstate(divide="ignore", invalid="ignore"):
        s = np.sqrt(np.maximum(x.high, 0.0))
        if x.low is None:
            y = Enclosed(s, None, LIBRARY_UNITS * UNIT * s)
        else:
            fine = Enclosed(s, np.zeros_like(s))
            rest = _centre(x) - fine * fine
            assert rest.low is not None
            step = np.where(s > 0.0, (rest.high + rest.low) / (2.0 * s), 0.0)
            high = s + step
            # s + step - sqrt(x) = (sqrt(x) - s)^2 / (2 s), and |sqrt(x) - s| <= 2 u s
            error = 64.0 * UNIT**2 * s + np.where(s > 0.0, TINY / s, 0.0)
            y = Enclosed(high, (s - high) + step, error)
        if x.error is None:
            return y
        moved = np.where(s > 0.0, np.minimum(x.error / s, np.sqrt(x.error)), np.sqrt(x.error))
        return y.widened(moved * (1.0 + 8.0 * UNIT))


def expit(x: Enclosed) -> Enclosed:
    """The logistic function, from the exponential that does not overflow; ``0 < f' <= min(f, 1/4)``."""
    positive = x.high >= 0.0
    e = exp(_centre(x) * np.where(positive, -1.0, 1.0))
    y = e.where(~positive, 1.0) / (1.0 + e)
    if x.error is None:
        return y
    near = (y.high + y.radius) * x.error * (1.0 + x.error)
    return y.widened(np.where(x.error <= 1.0, np.minimum(near, 0.25 * x.error), 0.25 * x.error))


def tanh(x: Enclosed) -> Enclosed:
    """The hyperbolic tangent; ``0 < f' <= 1``."""
    sign = np.where(x.high >= 0.0, 1.0, -1.0)
    e = exp(_centre(x) * (-2.0 * sign))
    y = ((1.0 - e) / (1.0 + e)) * sign
    return y if x.error is None else y.widened(x.error)


def silu(x: Enclosed) -> Enclosed:
    """``x expit(x)``."""
    return x * expit(x)


def gelu(x: Enclosed) -> Enclosed:
    """``x Phi(x)``, Phi the normal distribution function."""
    if x.low is None:
        value = ndtr(x.high)
        phi = Enclosed(value, None, upward(NORMAL_ERROR * value))
    else:
        phi = _fine_normal(_centre(x))
    # Phi' <= 0.4
    return x * (phi if x.error is None else phi.widened(0.4 * x.error))


def _fine_normal(x: Enclosed) -> Enclosed:
    r"""``Phi(x) = 1/2 + phi(x) sum_k x^{2k+1} / (1 3 5 ... (2k+1))``: terms of one sign.

    Once ``2 k + 3 >= 2 x^2`` the terms fall by half at least, and the rest is below the last one.
    """
    far = ~(np.abs(x.high) < _FAR)
    z = x.where(~far)
    square = z * z
    term = total = z
    last = 2.0 * float(square.high.max(initial=0.0))
    k = 0
    while True:
        k += 1
        term = term * square * _inverse(2 * k + 1)
        total = total + term
        if 2 * k + 3 >= last and float(np.abs(term.high).max(initial=0.0)) <= TAIL:
            break
    total = total.widened(2.0 * np.abs(term.high) + 2.0 * term.radius)
    density = exp(square * -0.5) * _ROOT
    value = total * density + 0.5
    sides = np.where(x.high > 0.0, 1.0, 0.0)
    outside = np.where(np.isfinite(x.high), 1e-38, np.inf), value.radius
    assert value.low is not None
    return Enclosed(
        np.where(far, sides, value.high), np.where(far, 0.0, value.low), np.where(far, outside[0], outside[1])
    )
