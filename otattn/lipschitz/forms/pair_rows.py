r"""Two tokens: what the leads of their logits decide, and the matrices S of :mod:`otattn.lipschitz.forms.two_tokens`.

On boxes of the leads, ``L = l_1 + l_2``. A smooth function lies within its slopes times half the widths of a box of its value at the
middle (mean value theorem): near its maximum, where slopes cancel, this is sharper than the ranges of its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn.lipschitz.arithmetic.intervals import like, upper
from otattn.lipschitz.forms.token_pairs import Ends

_FLOOR = 1e-8
"""Added to each entry of S, so that its leading vector is positive."""


def times(x: Ends, y: Ends) -> Ends:
    """A range of the products of two ranges."""
    corners = [a * b for a in x for b in y]
    low, high = corners[0], corners[0]
    for c in corners[1:]:
        low, high = np.minimum(low, c), np.maximum(high, c)
    return low, high


def plus(*terms: Ends) -> Ends:
    """A range of the sums."""
    (a, b), *rest = terms
    return sum((t[0] for t in rest), a), sum((t[1] for t in rest), b)


def minus(x: Ends, y: Ends) -> Ends:
    """A range of the differences."""
    return x[0] - y[1], x[1] - y[0]


def size(x: Ends) -> Any:
    """The largest absolute value of a range."""
    return np.maximum(np.abs(x[0]), np.abs(x[1]))


@dataclass(frozen=True, eq=False)
class Rows:
    """Ranges of what the leads decide: ``q_i``, ``T_i``, and ``N N^T`` by its middle and its slopes."""

    q: tuple[Ends, Ends]
    T: tuple[Ends, Ends]
    gram: tuple[Curve, Curve, Curve]
    widths: tuple[Any, Any]

    @classmethod
    def of(cls, one: Ends, two: Ends, both: Ends) -> Rows:
        """The leads and their sum L, in their natural unit.

        ``N_ii = (R_i + D_i)/2`` and ``N_ij = (R_i - D_i)/2`` with ``R_i = 1 + q_i L``, ``D_i = T_i + q_i (2 l_i + L)``; ``dT/dl =
        2 q``, ``dq/dl = - q T``.
        """
        at = [0.5 * (upper(x[0]) + upper(x[1])) for x in (one, both)]
        widths = tuple(np.maximum(x[1] - m, m - x[0]) for m, x in zip(at, (one, both), strict=True))
        middle = at[0] + 0.0 * one[0], (at[1] + 0.0 * one[0]) - at[0]
        q: list[Ends] = []
        T: list[Ends] = []
        R: list[Curve] = []
        D: list[Curve] = []
        for k, own in enumerate((one, two)):
            a, b = own
            q.append((_share(np.maximum(np.abs(a), np.abs(b))), _share(np.maximum(np.maximum(a, -b), 0.0))))
            T.append((_tanh(a), _tanh(b)))
            share, lean = _share(np.abs(middle[k])), _tanh(middle[k])
            fall = times(q[k], T[k])
            bend = minus((4.0 * q[k][0], 4.0 * q[k][1]), times(fall, plus(own, own, both)))
            drop = times((-fall[1], -fall[0]), both)
            for out, value, slope, line in (
                (R, 1.0 + share * at[1], drop, plus((1.0, 1.0), times(q[k], both))),
                (D, lean + share * (2.0 * middle[k] + at[1]), bend, plus(T[k], times(q[k], plus(own, own, both)))),
            ):
                # l_2 = L - l_1
                pair = (slope, q[k]) if k == 0 else ((-slope[1], -slope[0]), plus(slope, q[k]))
                out.append(Curve(value, *pair, line))
        gram = tuple(
            R[i].times(R[j], widths).plus(D[i].times(D[j], widths), 0.5 * sign, 0.5)
            for i, j, sign in ((0, 0, 1.0), (0, 1, -1.0), (1, 1, 1.0))
        )
        return cls((q[0], q[1]), (T[0], T[1]), (gram[0], gram[1], gram[2]), (widths[0], widths[1]))

    def norm_squared(self) -> Any:
        """``||P||^2``: the larger root for ``P^T P = [[1, u], [u, v]]``, ``u = (T_1 - T_2)/2``, ``v = (T_1^2 + T_2^2)/2``."""
        u = 0.5 * size(minus(*self.T))
        v = 0.5 * (size(self.T[0]) ** 2 + size(self.T[1]) ** 2)
        return 0.5 * (1.0 + v + np.sqrt((1.0 - v) ** 2 + 4.0 * u * u))

    def by_tokens(self, across: tuple[Any, Any], beta: Any, k: float) -> list[list[Any]]:
        """The form in ``(|alpha_1|, |alpha_2|, |W'|)``."""
        one = _root(k, beta)
        line = [self.q[0][1] * across[0] * beta, self.q[1][1] * across[1] * beta, np.sqrt(self.norm_squared()) * one]
        return _form([size(x.range(self.widths)) for x in self.gram], beta, [line])

    def by_sum_and_difference(self, lengths: Mapping[str, Any], beta: Any, k: float) -> list[list[Any]]:
        """The form in ``(|alpha_+|, |alpha_-|, |w_+'|, |w_-'|)``."""
        (one, mixed, two), (q1, q2), (T1, T2) = self.gram, self.q, self.T
        half = one.plus(two, 0.5, 0.5)
        gram = [half.plus(mixed, 1.0), one.plus(two, -0.5, 0.5), half.plus(mixed, -1.0)]
        r, s = 0.5 * (q1[1] + q2[1]), 0.5 * size(minus(q1, q2))
        h, total, symmetric = (lengths[k] * beta for k in ("turned", "sum", "symmetric"))
        unit = _root(k, h)
        zero, tilt, rest = 0.0 * unit, 0.5 * unit * size(minus(T1, T2)), 0.5 * unit * size(plus(T1, T2))
        second = [r * total + s * symmetric, s * total + r * symmetric, tilt, rest]
        return _form([size(x.range(self.widths)) for x in gram], beta, [[r * h, s * h, unit, zero], second])


@dataclass(frozen=True, eq=False)
class Curve:
    """A function of ``(l_1, L)`` on boxes: its value at the middle, ranges of its two slopes, and a range of its own."""

    at: Any
    lead: Ends
    both: Ends
    hull: Ends

    def range(self, widths: tuple[Any, Any]) -> Ends:
        """A range, ``widths`` half those of the box."""
        spread = size(self.lead) * widths[0] + size(self.both) * widths[1]
        return np.maximum(self.hull[0], self.at - spread), np.minimum(self.hull[1], self.at + spread)

    def plus(self, other: Curve, factor: float, own: float = 1.0) -> Curve:
        """``own * self + factor * other``."""

        def sum_of(x: Ends, y: Ends) -> Ends:
            return plus(times((own, own), x), times((factor, factor), y))

        at = own * self.at + factor * other.at
        return Curve(at, sum_of(self.lead, other.lead), sum_of(self.both, other.both), sum_of(self.hull, other.hull))

    def times(self, other: Curve, widths: tuple[Any, Any]) -> Curve:
        """The product."""
        x, y = self.range(widths), other.range(widths)
        slopes = [
            plus(times(mine, y), times(x, theirs))
            for mine, theirs in ((self.lead, other.lead), (self.both, other.both))
        ]
        return Curve(self.at * other.at, slopes[0], slopes[1], times(x, y))


def _root(k: float, other: Any) -> Any:
    """``1/sqrt(k)``, beside others."""
    shape = np.ones(upper(other).shape)
    return 1.0 / np.sqrt(like(k * shape, other))


def _form(M: list[Any], beta: Any, lines: list[list[Any]]) -> list[list[Any]]:
    """``beta^2 M`` on the first two places, plus the squares of the lines."""
    k = len(lines[0])
    S = [[sum((x[i] * x[j] for x in lines[1:]), lines[0][i] * lines[0][j]) for j in range(k)] for i in range(k)]
    for i, j, m in ((0, 0, M[0]), (0, 1, M[1]), (1, 0, M[1]), (1, 1, M[2])):
        S[i][j] = S[i][j] + beta * beta * m
    return S


def largest(S: list[list[Any]]) -> Any:
    """At least the largest eigenvalue of each symmetric matrix with non-negative entries."""
    k = len(S)
    floats = np.array([[upper(x) for x in row] for row in S]) + _FLOOR
    safe = np.where(np.isfinite(floats), floats, 1.0).transpose(2, 0, 1)
    y = np.maximum(np.abs(np.linalg.eigh(safe)[1][..., -1]), 1e-12).T
    ratios = [sum(((S[i][j] + _FLOOR) * y[j] for j in range(1, k)), (S[i][0] + _FLOOR) * y[0]) / y[i] for i in range(k)]
    best = ratios[0]
    for x in ratios[1:]:
        best = np.maximum(best, x)
    return upper(best)


def _share(lead: Any) -> Any:
    """``q`` at a lead of at least 0."""
    e = np.exp(-lead)
    return e / (1.0 + e) ** 2


def _tanh(lead: Any) -> Any:
    """``tanh(l/2)``."""
    e = np.exp(-np.abs(lead))
    share = (1.0 - e) / (1.0 + e)
    return np.where(lead >= 0.0, share, -share)
