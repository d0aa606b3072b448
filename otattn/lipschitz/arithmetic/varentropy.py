r"""The largest variance of ``log Q`` over laws Q on m atoms, and over those with an entropy in a cell.

Let nu be that variance and H the entropy. At a maximum over the laws with ``h_0 <= H <= h_1`` the derivative of nu in each positive
atom t, ``log^2 t + 2 (1 + H) log t`` up to a constant, is a constant plus a multiple of ``log t``: that of H (their gradients are
independent of that of the total unless all atoms are equal, and then ``nu = 0``). So t has at most two values ``t_1 > t_2``, on k and
k' atoms, of total weights s and 1 - s. With ``x = log(t_1/t_2) > 0``:

.. math:: \nu = s(1-s)x^2, \qquad H = (1-s)x - \log t_1 .

From ``t_1 <= s``, from ``k' <= m - 1``, and from ``k + k' = s/t_1 + (1-s)/t_2 <= m``:

.. math:: (1-s)x \le H + \log s, \qquad x \le \log\frac{s}{1-s} + \log(m-1), \qquad
          \log(s + (1-s)e^x) - (1-s)x \le \log m - H .

The left side of the last increases in x: a number at which it is larger bounds x. On a cell of s it is at least what its two terms
have at opposite ends.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import lift, lower, upper

_FAR = 40.0
_LOGITS = np.concatenate(
    [[-_FAR, -25.0, -17.0], np.linspace(-12.0, 12.0, 3001), [13.0, 14.0, 16.0, 18.0, 21.0, 25.0, 30.0, _FAR]]
)
"""Ends of the cells of ``logit s``."""


def varentropy(m: int) -> float:
    """The largest variance of ``log Q`` over laws Q on m atoms, outward."""
    s = np.linspace(-_FAR, _FAR, 16_001)
    near = np.minimum(np.abs(s[:-1]), np.abs(s[1:])) * (np.sign(s[:-1]) == np.sign(s[1:]))
    far = np.maximum(np.abs(lift(s[:-1]) + np.log(lift(m - 1.0))), np.abs(lift(s[1:]) + np.log(lift(m - 1.0))))
    half = np.exp(0.5 * lift(near)) + np.exp(-0.5 * lift(near))
    return float(upper((far / half) ** 2).max())


def varentropies(m: int, entropies: Array) -> Array:
    """The same over those with an entropy in ``[h, h']``, for each two successive ``entropies >= 0``; ``2 <= m <= 1e15``."""
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
