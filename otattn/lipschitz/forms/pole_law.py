r"""How far the keys of a row lie from the pole of its gradient: one law on ``[0, 2]`` for all that a row can do.

A row of gradient g, ``|g| = G``, weighs points y of the unit ball by P, of mean m. With the pole ``ghat = g/G`` let ``l(y) = |y -
ghat|`` and ``D = E_P l``. Then ``<ghat, y> <= 1 - l^2/2``, and

.. math:: |y - m| \le E_{y'\sim P}|y - y'| \le \delta := l\sqrt{1 - D^2/4} + D\sqrt{1 - l^2/4} .

*Proof.* ``p = ghat - y`` has ``<p, ghat> >= |p|^2/2``, as ``|y| <= 1``: its angle with ghat is at most ``w = arccos(l/2)``. So p
and p' are at an angle of at most ``w + w' <= pi``, and ``|y - y'|^2 <= l^2 + l'^2 - 2 l l' cos(w + w') = (l sin w' + l' sin w)^2``
with ``l = 2 cos w``; ``sin w' = sqrt(1 - l'^2/4)`` is concave in ``l'``. QED.

Let e be a unit vector at the angle psi from the pole and ``b(y) = e^{-sharp (1 - <e,y>)}``. By the same cone ``<e, y> = cos psi -
<e, p>`` is at most ``t(l) = cos psi - l cos(min(pi, psi + w))``: that is ``cos(psi - 2 arcsin(l/2))``, or ``cos psi + l`` where ``psi
+ w`` exceeds pi.

**What is bounded.** For a ``rate`` in [0, 1]

.. math:: W = \sup_P\; E_P[b]\; E_P[e^{-rate\,G(1 - \langle\hat g,y\rangle)} (1 + G|y - m|)^2] ,

by the above at most the supremum over laws of l of ``E b(l) E f(l)``, ``b(l) = e^{-sharp (1 - t(l))}``, ``f = e^{-rate G l^2/2} (1 + G
delta)^2``. As ``x y <= (tau x + y/tau)^2/4``, for every ``tau > 0`` and nu

.. math:: \sqrt W \le \tfrac12 \sup_{0 \le l \le 2} \{ \tau\, b(l) + f(l)/\tau + \nu (l - D) \} .

**Evaluation.** On cells of ``(G, psi, D)``, and of l all along, at the corners. Good multipliers come from the laws that are worst for
others (Frank and Wolfe's method for ``log E b + log E f``): each is on the two ends of a face of the concave envelope at D.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import lift

Ends = tuple[Array, Array]

_LENGTHS = 2.0 * (np.arange(321) / 320.0) ** 1.5
"""Edges of the cells of l, finer at the pole."""
_ANGLES = 2.0 * np.arcsin(_LENGTHS / 2.0)
_ROUNDS, _HALVES, _EVERY = 7, 10, 2
_STEPS = np.array([0.0, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0])[:, None]
_TINY = 1e-14
"""Above what angles lose by rounding."""


def product_bound(G: Ends, psi: Ends, D: Ends, rate: float, sharp: float, exact: bool = False) -> Any:
    """Upper bounds of W on cells, whose ends are given; intervals when exact."""
    f, b = _tables(G, psi, D, rate, sharp)
    tau, nu = _multipliers(f[:, ::_EVERY], b[:, ::_EVERY], np.clip(0.5 * (D[0] + D[1]), 1e-9, 2.0 - 1e-9))
    wrap: Any = lift if exact else np.asarray
    if exact:
        f, b = _tables(G, psi, D, rate, sharp, exact=True)
    t, slope = wrap(tau)[:, None], wrap(nu)[:, None]
    far = (nu >= 0.0)[:, None]
    length = wrap(np.where(far, _LENGTHS[1:], _LENGTHS[:-1])) - wrap(np.where(far, D[0][:, None], D[1][:, None]))
    value = (0.5 * (t * b + f / t + slope * length).max(axis=1)) ** 2
    return value if exact else value * (1.0 + 1e-12)


def _tables(G: Ends, psi: Ends, D: Ends, rate: float, sharp: float, exact: bool = False) -> tuple[Any, Any]:
    """Upper bounds of ``f`` and ``b`` on the cells of l, ``(cells, lengths)``."""
    wrap: Any = lift if exact else np.asarray
    l0, l1 = wrap(_LENGTHS[:-1]), wrap(_LENGTHS[1:])
    (G0, G1), (D0, D1) = ((wrap(x)[:, None] for x in pair) for pair in (G, D))
    p0, p1 = (x[:, None] for x in psi)
    delta = np.minimum(2.0, l1 * np.sqrt(1.0 - D0**2 / 4.0) + D1 * np.sqrt(1.0 - l0**2 / 4.0))
    f = np.exp(-0.5 * rate * (G0 * l0**2)) * (1.0 + G1 * delta) ** 2
    # t increases in l up to 2 sin(psi/2) and decreases beyond; in psi it increases up to 2 arcsin(l/2)
    low, high = _ANGLES[:-1] - _TINY, _ANGLES[1:] + _TINY
    away = np.maximum(np.maximum(p0 - high, low - p1), 0.0)
    t = np.cos(wrap(away))
    # y = ghat + l e lies in the ball where psi >= (pi + 2 arcsin(l/2)) / 2
    inner = np.minimum(0.5 * (math.pi + low), math.pi)
    inside = np.minimum(1.0, np.cos(wrap(np.maximum(p0, inner) - _TINY)) + l1)
    t = np.where(p1 >= inner, np.maximum(t, inside), t)
    return f, np.exp(-sharp * np.maximum(1.0 - t, 0.0))


def _multipliers(f: Array, b: Array, D: Array) -> tuple[Array, Array]:
    """Good tau and nu ``(cells,)`` for tables on some lengths."""
    rows, middle = np.arange(D.size), (0.5 * (_LENGTHS[1:] + _LENGTHS[:-1]))[::_EVERY]
    tau = np.sqrt(0.6 * f.max(axis=1))
    best, chosen = np.full(D.size, np.inf), [tau, np.zeros(D.size)]
    mass: list[Array] = []
    for _ in range(_ROUNDS):
        h = tau[:, None] * b + f / tau[:, None]
        # the concave envelope at D: its slope by bisection, its two places
        lo, hi = np.full(D.size, -1.0), np.full(D.size, 1.0)
        scale = 8.0 * h.max(axis=1)
        low, high = np.zeros(D.size, int), np.full(D.size, middle.size - 1)
        for _ in range(_HALVES):
            nu = 0.5 * (lo + hi)
            at = (h + (scale * nu)[:, None] * middle).argmax(axis=1)
            right = middle[at] > D
            hi, lo = np.where(right, nu, hi), np.where(right, lo, nu)
            low, high = np.where(right, low, at), np.where(right, at, high)
        nu = 0.5 * (lo + hi) * scale
        value = (h + nu[:, None] * (middle - D[:, None])).max(axis=1)
        chosen = [np.where(value < best, x, y) for x, y in zip((tau, nu), chosen, strict=True)]
        best = np.minimum(best, value)
        share = np.clip((D - middle[low]) / np.maximum(middle[high] - middle[low], 1e-9), 0.0, 1.0)
        seen = [np.maximum((1.0 - share) * x[rows, low] + share * x[rows, high], 1e-9) for x in (b, f)]
        ways = [(1.0 - _STEPS) * x + _STEPS * y for x, y in zip(mass or seen, seen, strict=True)]
        take = (ways[0] * ways[1]).argmax(axis=0)
        mass = [x[take, rows] for x in ways]
        tau = np.sqrt(mass[1] / mass[0])
    return chosen[0], chosen[1]
