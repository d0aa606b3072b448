"""The multipliers of :mod:`otattn.lipschitz.upper.psd`, and what they make of a row's own share.

One set for each cell of r; any of them gives a bound.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import lift, upper, xlogy
from otattn.lipschitz.arithmetic.rounding import top


@dataclass(frozen=True, eq=False)
class Multipliers:
    """One entry a cell of r: ``0 <= nu <= mu <= 1``, any ``sigma`` (in units of r), ``xi`` > 0, t and ``s`` in [0, 1), ``zeta`` >= 0,
    ``phi`` > 0."""

    mu: Array
    nu: Array
    sigma: Array
    xi: Array
    t: Array
    zeta: Array
    phi: Array
    s: Array

    def at(self, cell: Any) -> Multipliers:
        """The entries of these cells."""
        return Multipliers(*(getattr(self, key)[cell] for key in self.names()))

    @classmethod
    def names(cls) -> list[str]:
        """The names of the multipliers, in order."""
        return [x.name for x in fields(cls)]


class OwnShare:
    """``max_x -(1-mu) log x - (mu-nu) kl(x|y) + xi (n - 1 - 1/x)`` over shares x in (0, 1], as a decreasing step function of y.

    Tabulated from above: x and y run over cells, and the running maximum from the right makes it monotone.
    """

    def __init__(self, multipliers: Multipliers, n: int, *, count: int = 256, exact: bool = False) -> None:
        self.edges = np.concatenate([[0.0], np.geomspace(1e-3 / n, 1.0, count)])
        self.edges[-1] = 1.0
        y0, y1 = self.edges[:-1], self.edges[1:]
        wrap: Any = lift if exact else float
        rows = []
        for mu, nu, xi in zip(*(map(wrap, x) for x in (multipliers.mu, multipliers.nu, multipliers.xi)), strict=True):
            # what does not depend on y increases up to this x and decreases beyond
            turn = xi / np.maximum(1.0 - mu, 1e-300)
            x = np.geomspace(min(top(turn), 1e-2 / n), 1.0, count)[:, None]
            x[-1] = 1.0
            x0, x1 = np.concatenate([x[:1], x[:-1]]), x
            near = np.where(x1 < y0, _divergence(x1, y0, exact), 0.0)
            far = np.where(x0 > y1, _divergence(x0, y1, exact), 0.0)
            # the first cell begins at zero
            distance = np.concatenate([near[:1], np.maximum(near, far)[1:]])
            peak = np.where(np.arange(count)[:, None] > 0, np.clip(turn, x0, x1), np.minimum(turn, x1))
            best = -(1 - mu) * np.log(peak) - xi / peak - (mu - nu) * distance
            rows.append(upper(best.max(axis=0) + xi * (n - 1)))
        self.table = np.maximum.accumulate(np.array(rows)[:, ::-1], axis=1)[:, ::-1]

    def __call__(self, cell: Array, share: Array) -> Array:
        """Upper bound at every y >= ``share``."""
        index = np.searchsorted(self.edges, share * (1 - 1e-12), side="right") - 1
        return np.asarray(self.table[cell, np.clip(index, 0, self.table.shape[1] - 1)])


def _divergence(x: Array, y: Array, exact: bool) -> Any:
    """``kl(x|y)``, binary."""
    p, q = (lift(x), lift(y)) if exact else (x, y)
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = xlogy(p, p / q) + xlogy(1 - p, (1 - p) / (1 - q))
    return kl if exact else np.where(np.isnan(kl), np.inf, kl)


class Tilt(NamedTuple):
    """The multipliers as slopes: ``lean`` along ``log p``, ``along`` along ``l_ii - a h^2 = -log q``, ``bow`` along ``a h^2``."""

    mu: Any
    nu: Any
    lure: Any
    """nu, on what grows with the loss."""
    zeta: Any
    lean: Any
    along: Any
    bow: Any
    tail: Any
    """``kappa a sigma^2 r^2`` at the largest r."""
    level: Any
    """What is the same for all rows."""
