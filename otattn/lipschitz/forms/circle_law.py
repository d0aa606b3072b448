r"""All that a row can do to a law, on one circle: the plane of its gradient and of its token.

A row of gradient g, ``|g| = G``, pole ``ghat = g/G``, and of a token x of the unit ball weighs points y of the ball by P, of mean m.
Let ``chi(y) = e^{-rate (G - <g,y>)}``, ``b(y) = e^{-sharp (1 - <x,y>)}``, ``rate, sharp >= 0``, ghat any unit vector where g is 0, and

.. math:: \Lambda = \sup_{|u| \le 1} E_P\bigl[\chi(y)\, |u + \langle u, y - m\rangle g|^2\bigr] , \qquad W = \sup_P \Lambda\, E_P[b] .

**Row.** For every point a and every ``half > 1/2``

.. math:: \Lambda \le E_P F , \qquad F(y) = \chi + \frac{|w|^2}{2\,half - \chi} , \quad w = half\, G (y - a) + \chi\, \hat g .

*Proof.* Fix a unit u; ``Y = <u, y - a>``, ``M = E Y``, ``c = <u, ghat>``: ``|u + <u, y - m> g|^2 = 1 + 2 G c (Y - M) + G^2 (Y -
M)^2``. Add to chi times it ``2 half G^2 M (Y - M)``, of mean 0. The sum is a quadratic polynomial in M, with ``M^2`` multiplied by
``-G^2 (2 half - chi) < 0``: its maximum over M, whatever M is, equals ``chi + (half G Y + chi c)^2 / (2 half - chi)``, and ``half G Y
+ chi c = <u, w>``. QED.

**Circle.** ``(E_P F) (E_P b) <= (E_P h)^2`` with ``h = (tau F + b/tau)/2``, ``tau > 0``; so ``W <= sup h^2`` over the ball. Let a lie
in the plane of g and x. *The supremum is that over the unit disc of the plane.* At points with the same ``<ghat, y>``, chi is the
same, ``|w|^2`` is ``half^2 G^2 |y|^2`` and an affine function of ``<x, y>``, and b is convex in ``<x, y>``: with ``|y|`` replaced by
1, h is convex in ``<x, y>``, largest at an end of what ``|y| <= 1`` leaves of it, where y lies in the plane.

**Polygon.** ``|w|^2 / (2 half - chi)`` is jointly convex in ``(w, chi)``, and F increases with chi: its slope is ``|ghat + w / (2 half
- chi)|^2``. As chi is convex in y, F is convex in y; in ``(G, G y)`` it is convex along each y, chi being convex in G. So h on an
interval of G and the disc is at most the largest of its values at the two ends and at the corners of a polygon around the disc, if
``2 half > chi`` there: beyond the disc chi may exceed 1.

On a cell of x, ``b`` at a corner takes the largest ``<x, y>``. With ``zeta = <ghat, x>`` in ``[zeta_0, zeta_1]``, ``|x|`` in ``[r_0,
r_1]`` and y at the angle theta from the pole it is ``|y|`` times ``zeta cos(theta) + (|x|^2 - zeta^2)^{1/2} sin(theta)``. For
``sin(theta) >= 0`` take ``|x| = r_1``: concave in zeta, with its peak at ``r_1 cos(theta)``. Otherwise the least ``|x|``, which is
``r_0`` or ``|zeta|``: convex in zeta between ``-r_0`` and ``r_0``, linear beyond, so an end or one of these places is worst.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.interpolate import interpn

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import lift, lower, upper

Ends = tuple[Any, Any]

_HALF_TURN = math.pi * (np.arange(41) / 40.0) ** 1.4
_TOUCHED = np.concatenate([-_HALF_TURN[:0:-1], _HALF_TURN[:-1]])
"""Where the polygon touches the circle: denser at the pole. pi itself is ``-pi``."""
NODES = (
    np.array([0.0, 0.03, 0.08, 0.15, 0.25, 0.4, 0.6, 0.8, 1.0]),
    np.linspace(0.0, 1.0, 17),
    np.array([0.0, 0.4, 0.7, 0.9, 1.0]),
)
"""``G / G_1``, ``psi / pi`` and ``|x|`` of the nodes that have multipliers, psi the angle of x with the pole."""
SHAPE = 4, *(x.size for x in NODES)
"""``log tau``, ``half``, and the two parts of ``half a``, along the pole and across."""
_ROUNDED, _ROOM = 1e-12, 1e-3
"""Above what rounding does, for a ``2 half - chi`` of at least this."""


@dataclass(frozen=True, eq=False)
class CircleLaw:
    """Bounds of W, by multipliers of nodes; between them they are interpolated."""

    largest: float
    """``G_1``, the unit of the nodes."""
    rate: float
    sharp: float
    table: Array
    """``SHAPE``"""
    exact: bool = False

    def log_bound(self, G: Ends, r: Ends, zeta: Ends) -> Array:
        """Upper bound of ``log W`` on cells ``(count,)``, given the ends of each."""
        middle = [0.5 * (lower(x[0]) + upper(x[1])) for x in (G, zeta, r)]
        with np.errstate(invalid="ignore", divide="ignore"):
            psi = np.arccos(np.clip(np.where(middle[2] > 0.0, middle[1] / middle[2], 1.0), -1.0, 1.0))
        at = interpolated(self.table, middle[0] / self.largest, psi / math.pi, middle[2])
        return self.by(at, G, r, zeta)

    def by(self, at: Array, G: Ends, r: Ends, zeta: Ends) -> Array:
        """The same with given multipliers ``(4, count)``."""
        wrap: Any = lift if self.exact else np.asarray
        tau, half = wrap(np.exp(np.clip(at[0], -300.0, 300.0)))[:, None], wrap(at[1])[:, None]
        along, across = wrap(at[2])[:, None], wrap(at[3])[:, None]
        y1, y2 = _corners(self.exact)
        b = self._seen((y1, y2), [wrap(x)[:, None] for x in r], [wrap(x)[:, None] for x in zeta])
        best: Any = None
        for end in G:
            g = wrap(end)[:, None]
            chi = np.exp(-self.rate * (g * (1.0 - y1)))
            room = 2.0 * half - chi
            w1, w2 = g * (half * y1 - along) + chi, g * (half * y2 - across)
            F = chi + (w1**2 + w2**2) / np.maximum(room, 1e-300)
            F = np.where(lower(room) > _ROOM, upper(F), np.inf)
            best = F if best is None else np.maximum(best, F)
        h = upper(0.5 * (tau * wrap(best) + wrap(b) / tau)).max(axis=1)
        found = 2.0 * np.log(wrap(h))
        return np.asarray(upper(found) + (0.0 if self.exact else _ROUNDED * (1.0 + np.abs(found))))

    def _seen(self, y: tuple[Any, Any], r: list[Any], zeta: list[Any]) -> Array:
        """Upper bounds of b at the corners."""
        wrap: Any = lift if self.exact else np.asarray
        y1, y2 = y
        size = np.sqrt(y1**2 + y2**2)
        ahead = upper(y2) >= 0.0
        above = [z * y1 + y2 * np.sqrt(np.maximum(r[1] ** 2 - z**2, 0.0)) for z in zeta]
        places = [*zeta, *(np.minimum(np.maximum(x, zeta[0]), zeta[1]) for x in (-r[0], r[0]))]
        below = [z * y1 + y2 * np.sqrt(np.maximum(r[0] ** 2 - z**2, 0.0)) for z in places]
        most = np.where(ahead, np.max([upper(x) for x in above], axis=0), np.max([upper(x) for x in below], axis=0))
        # the largest over all zeta is |x| |y|, where zeta is |x| cos(theta)
        peak = r[1] * y1 / size
        inside = ahead & (lower(peak) <= upper(zeta[1])) & (upper(peak) >= lower(zeta[0]))
        most = np.where(inside, upper(r[1] * size), most)
        return np.asarray(upper(np.exp(-self.sharp * (1.0 - wrap(most)))))


def _corners(exact: bool) -> tuple[Any, Any]:
    """The corners of the polygon ``(1, corners)``: where two tangents meet."""
    wrap: Any = lift if exact else np.asarray
    first, second = wrap(_TOUCHED), wrap(np.append(_TOUCHED[1:], -_TOUCHED[0]))
    middle = 0.5 * (first + second)
    size = 1.0 / np.cos(0.5 * (second - first))
    return (np.cos(middle) * size)[None], (np.sin(middle) * size)[None]


def interpolated(table: Array, *at: Array, nodes: tuple[Array, ...] = NODES) -> Array:
    """The multipliers between the nodes, linear in each coordinate."""
    inside = [np.clip(x, known[0], known[-1]) for x, known in zip(at, nodes, strict=True)]
    return np.asarray(interpn(nodes, np.moveaxis(table, 0, -1), np.stack(inside, axis=-1))).T


def found(
    largest: float,
    rate: float,
    sharp: float,
    points: tuple[Array, Array, Array],
    rounds: int,
    start: Array | None = None,
) -> Array:
    """Good multipliers ``(4, count)`` at points ``(G, |x|, zeta)``: a search, of which nothing is trusted."""
    law = CircleLaw(largest, rate, sharp, np.empty(0))
    G, r, zeta = points
    rng = np.random.default_rng(0)
    psi = np.arccos(np.clip(zeta / np.maximum(r, 1e-12), -1.0, 1.0))
    half = np.full(G.size, 0.8)
    plain = np.stack([0.3 - np.log1p(G), half, half * (0.3 + 0.5 * r * np.cos(psi)), half * 0.5 * r * np.sin(psi)])
    best = plain if start is None else start
    value = law.by(best, (G, G), (r, r), (zeta, zeta))
    step = np.ones(G.size)
    scale = np.array([0.5, 0.25, 0.25, 0.25])[:, None]
    for _ in range(rounds):
        tried = best + step * scale * rng.normal(size=best.shape) * (rng.random(best.shape) < 0.6)
        tried[1] = np.maximum(tried[1], 0.505)
        new = law.by(tried, (G, G), (r, r), (zeta, zeta))
        better = new < value
        best, value = np.where(better, tried, best), np.where(better, new, value)
        step = np.clip(np.where(better, 1.3 * step, 0.95 * step), 0.02, 1.5)
    return best
