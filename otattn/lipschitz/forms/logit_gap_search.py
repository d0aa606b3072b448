"""A search for the multipliers of :mod:`otattn.lipschitz.forms.logit_gap`: in floats, and nothing here is trusted."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import linprog, minimize

from otattn._linalg import Array, mid
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.constants.self_logit import Barycentre, SelfLogit
from otattn.lipschitz.forms.circle_law import NODES, SHAPE, CircleLaw, found, interpolated

_RATES, _SHARPS = (0.1, 0.25, 0.5), (0.25, 0.5, 1.0)
"""First rates, and sharpnesses over ``G_1^{1/2}``."""
_RADII = np.array([1.0, 0.97, 0.92, 0.85, 0.75, 0.6, 0.4, 0.2, 0.0])
_STEPS = 1, 2, 2
_BETWEEN = 0.0, 0.1, 0.25, 0.5, 0.75, 1.0


@dataclass(frozen=True, eq=False)
class Samples:
    """Points of rows and barycentres, on which weights are chosen."""

    field: Barycentre
    above: SelfLogit

    @cached_property
    def points(self) -> tuple[Array, Array, Array]:
        """``|x|, |g|, <g,x>`` where there is an x."""
        q = np.ones(1) if self.field.rigid else 1.0 - np.linspace(0.0, 1.0, 49) ** 1.5
        r, q = (x.ravel() for x in np.meshgrid(_RADII, q))
        g = self.field.gamma(r, q)
        z0, z1 = self.field.family.lower(g, g, r, r), -self.above.lower(g, g, r, r)
        some = z0 <= z1 + 1e-9 * self.field.head.top
        r, g, z0, z1 = r[some], g[some], np.minimum(z0, z1)[some], np.maximum(z0, z1)[some]
        each = [(r, g, z0 + t * (z1 - z0)) for t in _BETWEEN]
        r, g, z = (np.concatenate(x) for x in zip(*each, strict=True))
        return r, g, z

    @cached_property
    def directions(self) -> tuple[Array, Array]:
        """``|A v|^2`` and ``<A v, v>`` of unit vectors v that are extreme."""
        A, a = mid(self.field.head.A), top(self.field.head.a)
        S, M = 0.5 * (A + A.T), A.T @ A
        mixed = [math.cos(t) * S / a + math.sin(t) * M / a**2 for t in np.linspace(0.0, math.pi, 48)]
        v = np.concatenate([np.linalg.eigh(x)[1].T for x in mixed])
        return ((v @ A.T) ** 2).sum(axis=1), ((v @ A.T) * v).sum(axis=1)

    def law(
        self, rate: float, sharp: float, rounds: int, like: CircleLaw | None = None, every: bool = False
    ) -> CircleLaw:
        """A law with multipliers of a part of the nodes and what lies between them, or of every node; found from those of another."""
        largest, steps = top(self.field.head.top), (1, 1, 1) if every else _STEPS
        few = tuple(x[::step] for x, step in zip(NODES, steps, strict=True))
        start = None if like is None else like.table[:, :: steps[0], :: steps[1], :: steps[2]].reshape(4, -1)
        g, psi, r = (x.ravel() for x in np.meshgrid(*few, indexing="ij"))
        table = found(largest, rate, sharp, (g * largest, r, r * np.cos(math.pi * psi)), rounds, start)
        every_node = [x.ravel() for x in np.meshgrid(*NODES, indexing="ij")]
        table = interpolated(table.reshape(4, *(x.size for x in few)), *every_node, nodes=few)
        return CircleLaw(largest, rate, sharp, table.reshape(SHAPE))

    def weights(self, law: CircleLaw) -> tuple[Array, float]:
        """Good weights, and ``log T`` of the worst point."""
        rate, sharp = law.rate, law.sharp
        r, g, z = self.points
        zeta = np.clip(z / np.maximum(g, 1e-9), -r, r)
        W = law.log_bound((g, g), (r, r), (zeta, zeta))
        ones, zeros = np.ones_like(r), np.zeros_like(r)
        rows = [-np.stack([ones, r**2, g**2, z, zeros, zeros], axis=1)]
        most = [-(W + rate * g)]
        at = np.stack(
            [
                x.ravel()
                for x in np.meshgrid(1.0 - np.linspace(0.0, 1.0, 25) ** 2, 1.0 - np.linspace(0.0, 1.0, 49) ** 1.5)
            ]
        )
        r, _, g, _, f, _ = self.field.cell(at, at)
        rows.append(np.stack([0.0 * r + 1.0, r**2, g**2, g - f, 1.0 - r**2, 0.0 * r - 1.0], axis=1))
        most.append(-(f - rate * g + sharp * (1.0 - r**2)))
        square, own = self.directions
        rows.append(np.stack([0.0 * own, 0.0 * own + 1.0, square, own, 0.0 * own - 1.0, 0.0 * own], axis=1))
        most.append(0.0 * own)
        largest = top(self.field.head.top)
        limits = [
            (None, None),
            (-max(16.0, largest), 8.0),
            (0.0, 16.0 / largest**2),
            (-2.0, 1.0),
            (0.0, None),
            (None, None),
        ]
        cost = [0.0, 1e-4, 1e-4 * largest**2, -1e-4, 1e-4, 1.0]
        best = linprog(cost, A_ub=np.concatenate(rows), b_ub=np.concatenate(most), bounds=limits)
        if best.x is None:
            return np.array([float((W + rate * g).max()), 0.0, 0.0, 0.0]), math.inf
        return best.x[:4], float(best.x[5])

    def choose(self, tries: int) -> tuple[CircleLaw, Array]:
        """A good law, the best of a grid and so many others, and its weights."""
        unit = math.sqrt(top(self.field.head.top))
        tried: list[tuple[float, CircleLaw, Array]] = []

        def loss(x: Array) -> float:
            rate, sharp = float(x[0]), math.exp(x[1]) * unit
            if not (0.0 <= rate <= 1.0 and abs(x[1]) < 6.0):
                return math.inf
            near = min(tried, key=lambda t: abs(t[1].rate - rate) + abs(t[1].sharp - sharp) / unit, default=None)
            law = self.law(rate, sharp, 60) if near is None else self.law(rate, sharp, 20, near[1])
            weights, value = self.weights(law)
            tried.append((value, law, weights))
            return value

        for rate, sharp in itertools.product(_RATES, _SHARPS):
            loss(np.array([rate, math.log(sharp)]))
        best = min(tried, key=lambda t: t[0])[1]
        start = np.array([best.rate, math.log(best.sharp / unit)])
        simplex = start + np.array([[0.0, 0.0], [-0.06, 0.0], [0.0, 0.25]])
        minimize(loss, start, method="Nelder-Mead", options={"maxfev": tries, "initial_simplex": simplex})
        best = min(tried, key=lambda t: t[0])[1]
        law = self.law(best.rate, best.sharp, 120, best, every=True)
        return law, self.weights(law)[0]
