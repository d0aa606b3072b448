r"""What a mean-zero variable does to an exponential average, from its variance and its largest value alone.

Let :math:`E s = 0`, :math:`E s^2 \le \sigma^2`, :math:`|s| \le u`, and :math:`\chi(t) = (e^t - 1 - t) / t^2`.

**The average** (Bennett, 1962). :math:`1 \le E e^s \le H`, the value of the two-point variable on :math:`u` and
:math:`-v`, :math:`v = \sigma^2 / u`:

.. math:: H = \frac{u^2 e^{-v} + \sigma^2 e^u}{u^2 + \sigma^2}, \qquad
          H - 1 = \sigma^2 \, \frac{\sigma^2 \chi(-v) + u^2 \chi(u)}{\sigma^2 + u^2},

which grows with :math:`\sigma` and with u, so upper bounds of both may be put in. The second form (subtract
:math:`1` and use :math:`e^t - 1 = t + t^2 \chi(t)`: the terms :math:`-u^2 v + \sigma^2 u` cancel) loses no digits.

**The second order.** :math:`E e^s - 1 = E[s^2 \chi(s)]` and :math:`\chi` grows, so :math:`E e^s - 1 - E s^2 / 2` lies
between :math:`\sigma_0^2 (\chi(-u) - 1/2)` and :math:`\sigma_0^2 (\chi(u) - 1/2)`, :math:`\sigma_0^2 = E s^2`, and above it is
at most :math:`H - 1 - \sigma_0^2 / 2`. With :math:`\chi(t) = 1/2 + t \psi(t)`, :math:`\psi(t) = \sum_k t^k / (k + 3)!`.

**The largest value** (Samuelson). A value of weight p is at most :math:`\sigma \sqrt{(1 - p) / p}` in size: with
the rest r of weight :math:`1 - p`, :math:`p^2 s^2 = (E[s 1_r])^2 \le (1 - p)(\sigma^2 - p s^2)`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import Interval, lift, upper

__all__ = ["Expansion", "expansion"]

TERMS = 22
"""Of the series of psi on [-1, 1], whose rest is below 1e-20."""
SERIES = Interval.between(1.0 - 2.0**-45, 1.0 + 2.0**-45)
"""Relative error of the series by Horner's rule: three roundings a step, 60 in all, of terms whose absolute sum is at most
psi(1) / psi(-1) < 1.7 times theirs (Higham, section 5.1), and the rest: below 110 units of 2^-53."""
LEAST_U, LEAST_VARIANCE = 1e-150, 1e-300
"""Bounds that are smaller are raised to these: their squares are floats."""


class Expansion(NamedTuple):
    """Upper bounds of ``H - 1``, of ``|E e^s - 1 - E s^2 / 2|``, of ``(e^u - 1) / u`` and of ``chi(u)``."""

    excess: Array
    beyond: Array
    growth: Array
    chi: Array


def expansion(variance: Array, u: Array) -> Expansion:
    """The bounds for upper bounds of the variance and of ``|s|``, arrays of one shape."""
    S, U = lift(np.maximum(variance, LEAST_VARIANCE)), lift(np.maximum(u, LEAST_U))
    v, square = S / U, U * U
    above, chi = _psi_chi(U)
    below, chi_below = _psi_chi(-v)
    excess = S * ((S * chi_below + square * chi) / (S + square))
    beyond = np.maximum((square * U * above - S * v * below) / (S + square), U * _psi_chi(-U)[0])
    return Expansion(upper(excess), upper(S * beyond), upper(1.0 + U * chi), upper(chi))


def _psi_chi(t: Interval) -> tuple[Interval, Interval]:
    """``psi(t) = (chi(t) - 1/2) / t`` and ``chi(t)``, by the series where ``|t| < 1``; t is wide only by rounding."""
    small = np.abs(t.lo) < 1.0
    x, y = lift(np.where(small, t, 0.0)), lift(np.where(small, 1.0, t))
    ends = [_series(x.lo), _series(x.hi)]  # psi grows
    series = Interval.between(*ends) * SERIES
    chi = np.where(small, 0.5 + x * series, (np.expm1(y) - y) / (y * y))
    return np.where(small, series, (chi - 0.5) / y), chi


def _series(t: Array) -> Array:
    """``1/3! + t/4! + ...``, in floats."""
    out = np.ones_like(t)
    for k in range(TERMS, 3, -1):
        out = 1.0 + out * t / k
    return out / 6.0
