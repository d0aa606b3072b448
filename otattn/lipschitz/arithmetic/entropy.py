r"""What the entropy H of a law Q on m atoms says of the variance of its logits and of mean squares.

**Varentropy.** Let nu be the variance of ``log Q``. At a maximum over the laws with ``h_0 <= H <= h_1`` the derivative of nu in each
positive atom t, ``log^2 t + 2 (1 + H) log t`` up to a constant, is a constant plus a multiple of ``log t``, that of H (whose gradient
is no multiple of that of the total unless all atoms are equal, and then ``nu = 0``). So t has at most two values ``t_1 > t_2``, on k
and k' atoms, of total weights s and 1 - s. With ``x = log(t_1/t_2) > 0``:

.. math:: \nu = s(1-s)x^2, \qquad H = (1-s)x - \log t_1 .

From ``t_1 <= s``, from ``k' <= m - 1``, and from ``k + k' = s/t_1 + (1-s)/t_2 <= m``:

.. math:: (1-s)x \le H + \log s, \qquad x \le \log\frac{s}{1-s} + \log(m-1), \qquad
          \log(s + (1-s)e^x) - (1-s)x \le \log m - H .

The left side of the last increases in x: a number at which it is larger bounds x. On a cell of s it is at least what its two terms
have at opposite ends.

**Gibbs.** ``b sum Q_j e_j^2 + H <= log sum_j exp(b e_j^2)`` for every ``b > 0``: with the ``e_j`` known, H bounds the mean of the
squares. Of norms below ``e_3`` with squares of sum ``rem`` the exponentials less one sum to at most ``(rem/e_3^2)(exp(b e_3^2) - 1)``
(convexity).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array
from otattn.lipschitz.arithmetic.intervals import is_interval, lift, lower, upper
from otattn.lipschitz.arithmetic.rounding import top

_FAR = 40.0
_LOGITS = np.concatenate(
    [[-800.0, -25.0, -17.0], np.linspace(-12.0, 12.0, 3001), [13.0, 14.0, 16.0, 18.0, 21.0, 25.0, 30.0, _FAR]]
)
"""Ends of the cells of ``logit s``."""
ENTROPIES = 30
"""Cells of entropies."""
INVERSE_TEMPERATURES = np.geomspace(0.5, 80.0, 12)
"""Values of b."""


def entropies(n: int) -> Array:
    """Ends of cells of the entropy of laws on ``n - 1`` atoms, the last at or above ``log(n - 1)``."""
    return np.append(np.linspace(0.0, math.log(n - 1.0), ENTROPIES + 1)[:-1], top(np.log(lift(n - 1.0))))


def varentropy(m: int) -> float:
    """The largest variance of ``log Q`` over laws Q on m atoms, outward."""
    s = np.linspace(-_FAR, _FAR, 16_001)
    near = np.minimum(np.abs(s[:-1]), np.abs(s[1:])) * (np.sign(s[:-1]) == np.sign(s[1:]))
    far = np.maximum(np.abs(lift(s[:-1]) + np.log(lift(m - 1.0))), np.abs(lift(s[1:]) + np.log(lift(m - 1.0))))
    half = np.exp(0.5 * lift(near)) + np.exp(-0.5 * lift(near))
    return float(upper((far / half) ** 2).max())


def varentropies(m: int, entropies: Array) -> Array:
    """The same over those with an entropy in ``[h, h']``, for each two successive ``entropies >= 0``; m at least 2."""
    return np.array(_varentropies(m, tuple(entropies.tolist())))


@lru_cache(maxsize=8)
def _varentropies(m: int, entropies: tuple[float, ...]) -> tuple[float, ...]:
    h = lift(np.array(entropies))
    below = np.exp(lift(_LOGITS))[:, None]
    s, rest = below / (1.0 + below), 1.0 / (1.0 + below)
    # the largest s(1 - s) of each cell, and the three bounds of x there
    near = np.where(_LOGITS[:-1] > 0.0, _LOGITS[:-1], np.minimum(_LOGITS[1:], 0.0))[:, None]
    half = np.exp(0.5 * lift(near)) + np.exp(-0.5 * lift(near))
    x = np.minimum(
        upper(np.maximum(h[1:] + np.log(s[1:]), 0.0) / rest[1:]),
        upper(np.maximum(lift(_LOGITS[1:, None]) + np.log(lift(m - 1.0)), 0.0)),
    )
    room = upper(np.log(lift(float(m))) - h[:-1])
    guess = _largest(upper(s[1:]), lower(rest[1:]), upper(rest[:-1]), room)
    left = lower(np.log(s[1:] + rest[1:] * np.exp(lift(guess))) - rest[:-1] * lift(guess))
    x = np.where(left > room, np.minimum(x, guess), x)
    # beyond the last cell s(1 - s) x^2 decreases
    tail = upper(np.exp(-lift(_FAR)) * (_FAR + np.log(lift(float(m)))) ** 2)
    return tuple(np.maximum(upper((lift(x) / half) ** 2).max(axis=0), tail).tolist())


def _largest(s: Array, low: Array, high: Array, room: Array) -> Array:
    """In floats, a little more than the last x with ``log(s + low e^x) - high x <= room``."""
    x0, x1 = np.zeros((len(s), room.size)), np.full((len(s), room.size), 2.0 * _FAR + math.log(1e15))
    for _ in range(40):
        x = 0.5 * (x0 + x1)
        more = np.log(s + low * np.exp(x)) - high * x > room
        x0, x1 = np.where(more, x0, x), np.where(more, x, x1)
    return np.asarray(x1 * (1.0 + 1e-9) + 1e-9)


def mean_square(most: Sequence[Any], next_one: Any, rem: Any, others: int, kinds: Array) -> Array:
    """Bounds ``(kinds, boxes)`` of ``sum Q_j e_j^2``, outward, for laws with at least these entropies.

    ``most`` are the largest ``e_j``, in order; the ``others`` are below ``next_one``, and their squares sum to at most ``rem``.
    """
    b, low = INVERSE_TEMPERATURES[:, None], np.maximum(next_one**2, 1e-9)
    first = most[0] ** 2
    total = others + np.minimum(rem / low, float(others)) * (np.exp(b * low) - 1.0)
    for x in most:
        total = total + np.exp(b * x**2)
    logs = upper(np.log(total)) + (0.0 if is_interval(first) else 1e-13)
    best = np.minimum(upper(first), ((logs[:, None] - kinds[:, None]) / b[:, None]).min(axis=0))
    # a difference and a quotient of floats: two roundings
    return np.asarray(np.maximum(best, 0.0) * (1.0 + 4.0 * EPS))
