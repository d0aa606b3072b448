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

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import Interval, lift, upper

__all__ = ["excess", "growth", "second_order"]

TERMS = 22
"""Of the series of psi on [-1, 1]: what is left is below ``1 / 25!``, and is counted."""
LEAST_U, LEAST_VARIANCE = 1e-150, 1e-300
"""Bounds that are smaller are raised to these: their squares are floats."""


def _branches(t: Interval) -> tuple[Interval, Interval, Interval]:
    """``psi`` by its series where ``|t| < 1`` (at 0 elsewhere), and t there and elsewhere (1 where it is not)."""
    small = np.abs(t.lo) < 1.0
    inner, outer = np.where(small, t, 0.0), np.where(small, 1.0, t)
    # 1 + t/k (1 + t/(k + 1) (...)): the rest of the innermost bracket is below 1/20
    series = Interval.between(0.9, 1.1)
    for k in range(TERMS, 3, -1):
        series = 1.0 + inner * series / float(k)
    return series / 6.0, inner, outer


def _third(t: Interval) -> Interval:
    """``psi(t) = (e^t - 1 - t - t^2 / 2) / t^3``."""
    near, _, y = _branches(t)
    return np.where(np.abs(t.lo) < 1.0, near, (np.expm1(y) - y - y * y / 2.0) / (y * y * y))


def _chi(t: Interval) -> Interval:
    near, x, y = _branches(t)
    return np.where(np.abs(t.lo) < 1.0, 0.5 + x * near, (np.expm1(y) - y) / (y * y))


def growth(u: Array) -> Array:
    """An upper bound of ``(e^u - 1) / u`` for upper bounds u."""
    x = lift(np.maximum(u, 0.0))
    return upper(1.0 + x * _chi(x))


def excess(variance: Array, u: Array) -> tuple[Array, Array]:
    r"""Upper bounds of :math:`H - 1` and of :math:`|E e^s - 1 - E s^2 / 2|`.

    Parameters
    ----------
    variance, u : ndarray
        Upper bounds of the variance and of ``|s|``.
    """
    S, U = lift(np.maximum(variance, LEAST_VARIANCE)), lift(np.maximum(u, LEAST_U))
    v, square = S / U, U * U
    whole = S + square
    above, below = _third(U), _third(-v)
    mean = (S * _chi(-v) + square * _chi(U)) / whole
    beyond = (square * U * above - S * v * below) / whole
    lost = U * _third(-U)
    return upper(S * mean), upper(S * np.maximum(beyond, lost))


def second_order(u: Array) -> Array:
    """An upper bound of ``chi(u)``."""
    return upper(_chi(lift(np.maximum(u, 0.0))))
