r"""What a row makes of its own token and one other: quadratic forms in the two.

Unit ball, ``||A|| <= 1``, ``||V|| <= 1``. For tokens x (the row's own) and y, ``d = x - y``, and norms e of the displacement of
x and s of that of y, a row with weight p on x and ``q = 1 - p`` on y has a value of at most

.. math:: p e + q s + a\,pq\,|Vd|\,(|Ax + A^T d|\, e + |Ax|\, s) .

*Members.* For ``X, Y > 0``, ``c > 0``, nu and ``w_1, w_2 >= 0`` let

.. math:: W = w_1 + w_2 + 2\,\lambda_{\max}(Q - \operatorname{diag}(w_1, w_2))_+, \qquad
          Q = \tfrac12 \bigl(c\,|Vd|^2 + (X |Ax + A^Td|^2 + Y |Ax|^2)/c\bigr) + \nu \langle Ax, d\rangle

as a form in ``(x, y)``. By Cauchy-Schwarz the last bracket is at most ``E (X |Ax + A^T d|^2 + Y |Ax|^2)^{1/2}`` with ``E^2 = e^2/X +
s^2/Y``, and the product of two numbers is at most half of the sum of their weighted squares: for all x, y of the ball

.. math:: |Vd|\,(|Ax + A^T d|\, e + |Ax|\, s) + E\,\nu\,\langle Ax, d\rangle \le E\,W .

*Logits.* ``a <Ax, d>`` is the lead of the own logit. A row pays ``lambda a (<Ax, m> - L)``, m its mean and L its largest logit over
a (:mod:`otattn.lipschitz.forms.vertex_rows`): as L is at least every mixture of the two logits, at most ``lambda a k <Ax, d>``
for every k in ``[-q, p]``. With ``k lambda = pq E nu`` the value and this payment come to at most ``p e + q s + a pq E W``; that k is
allowed when ``q E nu <= lambda`` (``nu > 0``), or ``p E |nu| <= lambda`` (``nu < 0``), on a cell of p at its worst end.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array, lambda_max_upper
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, like, upper
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.certificate import multiplier

RATIOS = (0.002, 0.15, 0.5, 1.2, 3.0, 10.0, 1000.0)
"""Shares ``Y/X`` of the members."""
LEADS = (0.2, 0.4, 0.7, 1.0, 1.5, 2.4, 4.0)
"""Absolute values of nu, tried while they lower W."""
WEIGHTS = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 1.0)
"""Cells of p; ``1 - p`` is a float too."""
_FAR = 6.0
"""Logarithms of c and of ``w_1/w_2`` are sought up to this size."""
_SPREAD, _CLOSE, _ROUNDS = 0.3, 5e-3, 30
"""Sides of their first simplex and of the last, and how often it is moved."""


class PairForms:
    """The quadratic forms in ``(x, y)``."""

    def __init__(self, A: Any, V: Any) -> None:
        d = len(A)
        one, zero = np.eye(d), np.zeros((d, d))
        own, D = np.hstack([one, zero]), np.hstack([one, -one])
        G = A @ own
        turned, VD = G + A.T @ D, V @ D
        lead = G.T @ D
        self.values, self.turned, self.own = VD.T @ VD, turned.T @ turned, G.T @ G
        self.lead = 0.5 * (lead + lead.T)

    def form(self, X: float, Y: float, c: float, nu: float) -> Any:
        """Q."""
        gradients = X * self.turned + Y * self.own
        return 0.5 * (c * self.values + gradients / c) + nu * self.lead


class Weighted:
    """``lambda_max(c P + Q/c + B)`` with x and y weighted: matrices ``(count, size, size)``, P and Q may be one for all."""

    def __init__(self, P: Array, Q: Array, B: Array) -> None:
        self.parts = [np.broadcast_to(M, B.shape) for M in (P, Q, B)]

    def at(self, z: Array, which: Any = slice(None)) -> tuple[Array, Array, Array]:
        """``W, c, w_1/W`` at ``z = (log c, logit w_1/W)``, ``(2, count)``, of some of them."""
        c, share = np.exp(z[0]), 1.0 / (1.0 + np.exp(-z[1]))
        P, Q, B = (M[which] for M in self.parts)
        root = 1.0 / np.sqrt(np.repeat([share, 1.0 - share], B.shape[-1] // 2, axis=0)).T
        F = root[:, :, None] * (c[:, None, None] * P + Q / c[:, None, None] + B) * root[:, None, :]
        return np.maximum(np.linalg.eigvalsh(F)[:, -1], 0.0), c, share

    def least(self, start: Array) -> Array:
        """The z of nearly the least W, by the method of Nelder and Mead for all at once."""
        z = np.stack([start, start + [[_SPREAD], [0.0]], start + [[0.0], [_SPREAD]]])
        size = np.array([self.at(x)[0] for x in z])
        for _ in range(_ROUNDS):
            order = np.argsort(size, axis=0)
            size, z = np.take_along_axis(size, order, 0), np.take_along_axis(z, order[:, None], 0)
            middle = 0.5 * (z[0] + z[1])
            once = np.clip(2.0 * middle - z[2], -_FAR, _FAR)
            first = self.at(once)[0]
            factor = np.where(first < size[0], 2.0, np.where(first < size[2], 0.5, -0.5))
            again = np.clip(middle + factor * (middle - z[2]), -_FAR, _FAR)
            second = self.at(again)[0]
            better = np.minimum(first, second)
            stuck = np.flatnonzero(better >= size[2])
            z[2] = np.where(better >= size[2], z[2], np.where(second < first, again, once))
            size[2] = np.minimum(size[2], better)
            for x, value in zip(z[1:], size[1:], strict=True):
                x[:, stuck] = 0.5 * (x + z[0])[:, stuck]
                value[stuck] = self.at(x[:, stuck], stuck)[0]
            if (np.abs(z - z[0]) < _CLOSE).all():
                break
        best = size.argmin(axis=0)
        return np.take_along_axis(z, best[None, None], 0)[0]


def _least(forms: PairForms, X: float, Y: float, nu: float, start: Array) -> tuple[list[float], Array]:
    """The member with nearly the least W, and where the search for c and for the share of ``w_1`` ended."""
    weighted = Weighted(0.5 * forms.values, 0.5 * (X * forms.turned + Y * forms.own), nu * forms.lead[None])
    end = weighted.least(start)
    W, c, share = (float(x[0]) for x in weighted.at(end))
    return [X, Y, c, nu, W * share, W * (1.0 - share)], end


@dataclass(frozen=True, eq=False)
class OwnPairs:
    """Members ``(X, Y, c, nu, w_1, w_2)`` and the W that they prove; ``W`` floats or intervals."""

    members: Array
    W: Any

    @classmethod
    def of(cls, A: Any, V: Any, multipliers: Mapping[str, Array]) -> OwnPairs:
        """The W of each member."""
        members = multiplier(multipliers, "pairs", (len(multipliers["pairs"]), 6))
        if not len(members) or not ((members[:, :3] > 0.0).all() and (members[:, 4:] >= 0.0).all()):
            raise ValueError(
                "pairs must be one or more rows (X, Y, c, nu, w_1, w_2) with X, Y, c > 0 and w_1, w_2 >= 0."
            )
        forms, d = PairForms(A, V), len(A)
        out = []
        for X, Y, c, nu, w1, w2 in members.tolist():
            Q = forms.form(X, Y, c, nu)
            excess = lambda_max_upper(Q - np.diag(np.repeat([w1, w2], d)))
            if isinstance(Q, BallMatrix):
                out.append(top(lift(w1) + w2 + 2.0 * np.maximum(lift(0.0), lift(top(excess)))))
            else:
                # entries are sums of d products of numbers of at most these sizes
                size = 2.0 * c + 5.0 * (X + Y) / c + 2.0 * abs(nu) + w1 + w2
                out.append(
                    (w1 + w2 + 2.0 * (float(np.maximum(0.0, top(excess))) + 64.0 * d * EPS * size)) * (1.0 + 8.0 * EPS)
                )
        return cls(members, np.array(out))

    @classmethod
    def found(cls, A: Array, V: Array) -> OwnPairs:
        """A member for each ratio and each nu, with nearly the least W."""
        forms, rows = PairForms(A, V), []
        for ratio in RATIOS:
            X, Y = 1.0 / (1.0 + ratio), ratio / (1.0 + ratio)
            first, at = _least(forms, X, Y, 0.0, np.zeros((2, 1)))
            rows.append(first)
            for sign in (1.0, -1.0):
                last, start = first, at
                for nu in LEADS:
                    # a nu that lowers W has a price: one that does not is of no use
                    row, start = _least(forms, X, Y, sign * nu, start)
                    if row[4] + row[5] > 0.995 * (last[4] + last[5]):
                        break
                    rows.append(row)
                    last = row
        return cls.of(A, V, {"pairs": np.array(rows)})

    def values(self, e: Any, s: Any, a: Any, levels: Array) -> Any:
        """The bound ``(directions, levels)``, for e and s of shape ``(directions, 1)``, of lambda at each level.

        Of the members that a lambda allows on a cell of p the best in floats is taken.
        """
        near_e, near_s, near_a = upper(e), upper(s), float(upper(a))
        worst: Any = None
        for p0, p1 in itertools.pairwise(WEIGHTS):
            need, value = self._on(near_e, near_s, near_a, (p0, p1), np.arange(len(self.members)))
            best = np.array([np.where(need <= lam * (1.0 - 1e-9), value, np.inf).argmin(axis=1) for lam in levels]).T
            need, value = self._on(e, s, a, (p0, p1), best)
            value = np.where(upper(need) <= levels, value, np.inf)
            worst = value if worst is None else np.maximum(worst, value)
        return worst

    def _on(self, e: Any, s: Any, a: Any, ends: tuple[float, float], index: Any) -> tuple[Any, Any]:
        """For p between the ends: the lambda that the members at ``index`` need, and their value without its pay."""
        X, Y, _, nu, _, _ = (like(x, a) for x in np.moveaxis(self.members[index], -1, 0))
        p0, p1 = ends
        E = np.sqrt(e * e / X + s * s / Y)
        M = a * E * like(self.W[index], a)
        need = np.where(self.members[index, 3] > 0.0, 1.0 - p0, p1) * (E * np.abs(nu))
        # concave in p: a tangent bounds it, from any p
        step = upper(e - s) / np.maximum(2.0 * upper(M), 1e-300)
        p = like(np.clip(0.5 + step, p0, p1), a)
        slope = e - s + (1.0 - 2.0 * p) * M
        value = p * e + (1.0 - p) * s + p * (1.0 - p) * M + np.maximum(slope * (p0 - p), slope * (p1 - p))
        return need, value
