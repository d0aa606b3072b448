"""Outward rounding of closed forms, and exponentials that are carried as logarithms.

The functions take floats, which are rounded outward by a margin, or intervals, which carry their own rounding.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from otattn._linalg import lost_below
from otattn.lipschitz.arithmetic.intervals import is_interval, upper

MARGIN = 1e-12
"""Relative margin of the closed forms: a hundred operations with errors of 1e-15, and a factor 10."""
ROUNDING = 1e-11
"""Relative margin of a returned value over what was proved: another BLAS rounds a recheck differently, and interval
arithmetic widens it."""
NOTHING = -1e300
"""Upper ends below this are those of the logarithm of zero, widened when something was added to it: entries and lengths are at
most 1e30, and a positive float has a logarithm above -745."""
LEAST = 5e-324
"""The least positive float: a product that underflows is at most this."""


def up(value: Any) -> Any:
    """``value`` raised by the margin of the closed forms (non-negative values); an interval as it is."""
    return value if is_interval(value) else value * (1.0 + MARGIN)


def down(value: float) -> float:
    """``value`` lowered by the margin of the closed forms (non-negative values)."""
    return value * (1.0 - MARGIN)


def top(value: Any) -> float:
    """The number itself, or the upper end of an interval."""
    return float(upper(value))


def is_zero(value: Any) -> bool:
    """True when a non-negative number is proved to be zero."""
    return top(value) == 0.0


def least(*values: Any) -> Any:
    """The smallest of several upper bounds; for intervals of their upper ends."""
    return min(values, key=top)


def product(*factors: Any) -> Any:
    """The product of non-negative factors, at least the exact one: it does not underflow to 0, and 0 wins over inf."""
    if any(is_zero(f) for f in factors):
        return 0.0
    if any(is_interval(f) for f in factors):
        return functools.reduce(lambda x, y: x * y, factors)
    mantissa, exponent = 1.0, 0
    for factor in factors:
        if not math.isfinite(factor):
            return math.inf
        part, power = math.frexp(factor)
        mantissa, shift = math.frexp(mantissa * part)
        exponent += power + shift
    try:
        found = max(math.ldexp(mantissa, exponent), LEAST)
        return found + lost_below(found)
    except OverflowError:
        return math.inf


def safe_exp(x: Any) -> Any:
    """``exp(x)``, inf exactly when the number exceeds the largest float."""
    if is_interval(x):
        return np.exp(x)
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def log_sum(*logs: Any) -> Any:
    """``log(sum_i exp(l_i))`` without overflow; terms of ``-inf`` are zeros."""
    if any(is_interval(x) for x in logs):
        terms = [x for x in logs if top(x) > NOTHING]
        return functools.reduce(np.logaddexp, terms) if terms else -math.inf
    largest = max(logs)
    if math.isinf(largest):
        return largest
    return largest + math.log(sum(math.exp(x - largest) for x in logs))


def log(value: Any) -> Any:
    """``log(value)`` with ``log 0 = -inf``; a nan, of which nothing is known, gives inf."""
    if is_interval(value):
        return np.log(value) if top(value) > 0 else -math.inf
    if math.isnan(value):
        return math.inf
    return math.log(value) if value > 0 else -math.inf
