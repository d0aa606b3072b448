r"""What a row makes of its own token and of the mean of the others: quadratic forms in the two.

Unit ball, ``||A|| <= 1``, ``||V|| <= 1``. For x, y of the ball, ``d = x - y``, and on a cell of a weight p, ``q = 1 - p``, let pi and
q bound ``p q`` and q from above. A *member* ``(theta, c, nu, xi, w_1, w_2)``, ``c > 0``, the others but xi non-negative, has

.. math:: W = w_1 + w_2 + 2\lambda_{\max}(F - \operatorname{diag}(w_1, w_2))_+, \quad F = \tfrac\pi2\bigl(c|Vd|^2
          + |Ax + A^Td|^2/c\bigr) - q\theta|y|^2 - \nu\langle Ax, d\rangle + \xi|Ax|^2

as a form in ``(x, y)``. As the product of two numbers is at most half of the sum of their weighted squares,

.. math:: pq\,|Vd|\,|Ax + A^Td| + q\theta(1 - |y|^2) \le q\theta + W + \nu\langle Ax, d\rangle - \xi|Ax|^2 .
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array, lambda_max_upper
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.certificate import multiplier
from otattn.lipschitz.forms.own_pairs import PairForms, Weighted

_COARSE = [0.0, 0.004, 0.015, 0.04, 0.08, 0.12, 0.17, 0.22, 0.28, 0.34, 0.4, 0.47, 0.54, 0.62, 0.7, 0.8, 0.9, 1.0]
MASSES = np.interp(np.arange(69.0), np.arange(0.0, 69.0, 4.0), _COARSE)
"""Cells of p."""
PLANS = (
    *((1.0, xi, (0.0, 0.1, 0.2, 0.35, 0.55, 0.8)) for xi in (-0.4, 0.0, 0.2, 0.4, 0.7, 1.1)),
    *((share, xi, (0.0, 0.2, 0.5)) for share in (0.75, 0.5, 0.3) for xi in (0.15, 0.4, 0.8)),
)
"""Triples of ``theta/vartheta``, xi and values of nu."""
_LARGEST = 1e6
"""Multipliers beyond prove nothing."""


@dataclass(frozen=True, eq=False)
class OwnBlocks:
    """Members ``(cell of p, theta, c, nu, xi, w_1, w_2)`` and the W that they prove."""

    members: Array
    W: Array

    @classmethod
    def of(cls, A: Any, V: Any, multipliers: Mapping[str, Array]) -> OwnBlocks:
        """The W of each member."""
        members = multiplier(multipliers, "blocks", (len(multipliers["blocks"]), 7))
        cell = members[:, 0]
        good = (cell == np.floor(cell)) & (cell >= 0.0) & (cell < MASSES.size - 1) & (members[:, 2] > 0.0)
        good &= (members[:, [1, 3, 5, 6]] >= 0.0).all(axis=1) & ((cell < MASSES.size - 2) | (members[:, 3] == 0.0))
        good &= (np.abs(members) <= _LARGEST).all(axis=1) & (members[:, 2] >= 1.0 / _LARGEST)
        if not good.all() or set(cell.tolist()) != set(range(MASSES.size - 1)):
            raise ValueError(
                f"blocks must be rows (cell, theta, c, nu, xi, w_1, w_2), c > 0, theta, nu, w_1, w_2 >= 0, none beyond {_LARGEST:g}, "
                "nu = 0 in the last cell, with each cell of p."
            )
        forms, d = PairForms(A, V), len(A)
        out = []
        for at, theta, c, nu, xi, w1, w2 in members.tolist():
            F = _form(forms, int(at), theta, c, nu, xi) - np.diag(np.repeat([w1, w2], d))
            excess = top(lambda_max_upper(F))
            if isinstance(F, BallMatrix):
                out.append(top(lift(w1) + w2 + 2.0 * np.maximum(lift(0.0), lift(excess))))
            else:
                # entries are sums of d products of numbers of at most these sizes
                size = 2.0 * c + 5.0 / c + 2.0 * nu + abs(xi) + theta + w1 + w2
                out.append((w1 + w2 + 2.0 * (max(0.0, excess) + 64.0 * d * EPS * size)) * (1.0 + 8.0 * EPS))
        return cls(members, np.array(out))

    @classmethod
    def found(cls, A: Array, V: Array, field: float) -> OwnBlocks:
        """For each cell of p and each plan members with nearly the least W."""
        forms, last = PairForms(A, V), MASSES.size - 2
        plans = np.array([(share * field, nu, xi) for share, xi, leads in PLANS for nu in leads])
        ends = np.where(plans[:, 1] == 0.0, last, last - 1)
        # sought on every fourth cell; between them the search would end between
        sought = np.append(np.arange(0, last - 1, 4), [last - 1, last])
        z, sizes = np.zeros((sought.size, 2, len(plans))), np.full((sought.size, len(plans)), np.nan)
        near: Any = 0.0
        for k, at in enumerate(sought.tolist()):
            weighted = _weighted(forms, np.full(len(plans), at), plans)
            z[k] = weighted.least(near + np.zeros((2, len(plans))))
            sizes[k] = np.where((at < last - 1) | (at == ends), weighted.at(z[k])[0], np.nan)
            near = np.where(sizes[k] > 0.0, z[k], 0.0)
        rows = []
        for k, plan in enumerate(plans):
            cells = np.arange(ends[k] + 1)
            # where W = 0 the search has not moved
            good = sizes[:, k] > 0.0 if (sizes[:, k] > 0.0).any() else sizes[:, k] == 0.0
            between = np.array([np.interp(cells, sought[good], x[good]) for x in z[:, :, k].T])
            W, c, share = _weighted(forms, cells, np.tile(plan, (cells.size, 1))).at(between)
            theta, nu, xi = np.repeat(plan[:, None], cells.size, axis=1)
            rows.append(np.array([cells, theta, c, nu, xi, W * share, W * (1.0 - share)]).T)
        return cls.of(A, V, {"blocks": np.concatenate(rows)})

    def take(self, index: Array) -> OwnBlocks:
        """The members at ``index``."""
        return OwnBlocks(self.members[index], self.W[index])


def _ends(at: int) -> tuple[float, float]:
    """``q`` and ``p q`` at their largest on a cell of p."""
    p0, p1 = MASSES[at], MASSES[at + 1]
    p = min(max(p0, 0.5), p1)
    return float(1.0 - p0), float(p * (1.0 - p)) * (1.0 + 2.0 * EPS)


def _form(forms: PairForms, at: int, theta: float, c: float, nu: float, xi: float) -> Any:
    """F on a cell of p."""
    q, pi = _ends(at)
    d = len(forms.own) // 2
    other = np.diag(np.repeat([0.0, q * theta * (1.0 - 4.0 * EPS)], d))
    return pi * forms.form(1.0, 0.0, c, 0.0) - nu * forms.lead + xi * forms.own - other


def _weighted(forms: PairForms, cells: Array, plans: Array) -> Weighted:
    """F on these cells of p with these ``(theta, nu, xi)``."""
    q, pi = np.array([_ends(at) for at in cells.tolist()]).T[:, :, None, None]
    theta, nu, xi = plans.T[:, :, None, None]
    other = np.diag(np.repeat([0.0, 1.0], len(forms.own) // 2))
    base = xi * forms.own - nu * forms.lead - q * theta * other
    return Weighted(0.5 * pi * forms.values, 0.5 * pi * forms.turned, base)
