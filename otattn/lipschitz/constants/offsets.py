r"""What a rotary head does at every offset, on a domain: norms of its forms, and of their Gram matrix summed over offsets.

All norms are those of k x k matrices: ``||A_m E||^2 = s^2 lambda_max(L^T R_m (Q E)(Q E)^T R_m^T L)`` with ``K = L O``, ``||O|| = 1``.
Sums over a window of offsets are doubled, ``G_{i+j} = G_i + R_i G_j R_i^T``: about ``2 log2 n`` products, whatever the angles are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from otattn._linalg import (
    EPS,
    Array,
    column_of,
    lambda_max_upper,
    mid,
    norm_upper,
    product_error,
    spectral_norm_upper,
    symmetrize,
)
from otattn.attention.rotary import RotaryAttention, pairs
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import least, product, top, up
from otattn.lipschitz.constants.regions import Region
from otattn.measures.domains import Domain

MANY = 256
"""Norms are taken offset by offset up to this many offsets, and whatever the angles beyond; windows likewise."""


class _Side(NamedTuple):
    """What the offsets turn: the Gram matrices ``M E E^T M^T`` and ``b b^T`` of projections ``M (E z) + b``, in a unit of length.

    ``size`` bounds ``||M E||``, ``shift`` is at least ``|b|``, ``lost`` what rounding did to ``M E`` and to b, all in ``unit``.
    """

    gram: Any
    bias: Any | None
    size: Any
    shift: Any
    lost: float
    unit: float


class _Factor(NamedTuple):
    """``M = unit (L O + rest)`` with ``||O|| <= stretch`` and ``||rest|| <= lost``; L has few columns and is made of floats."""

    L: Any
    stretch: Any
    lost: Any
    norm: Any
    unit: float


@dataclass(frozen=True, eq=False)
class OffsetForms:
    """The numbers of the theorem, each rounded outward, or intervals in exact arithmetic."""

    attention: RotaryAttention
    domain: Domain
    n: int
    exact: bool

    def wrap(self, x: Any) -> Any:
        """A float array in the arithmetic of the proof."""
        return BallMatrix.exact(x) if self.exact else np.asarray(x)

    def number(self, x: float) -> Any:
        """A float in the arithmetic of the proof."""
        return lift(x) if self.exact else x

    @cached_property
    def region(self) -> Region:
        return Region.of(self.domain, exact=self.exact)

    @cached_property
    def v(self) -> Any:
        """``||V||``."""
        return spectral_norm_upper(self.wrap(self.attention.V))

    @cached_property
    def w(self) -> Any:
        """At least half of every ``|V (x - y)|``."""
        M, lost, unit = self._moved(self.attention.V)
        reach = product(up(spectral_norm_upper(M) + lost), unit)
        return least(reach, product(self.v, self.region.half_diameter))

    def _moved(self, M: Array) -> tuple[Any, float, float]:
        """``M E`` in a unit, what rounding did to it, and the unit."""
        first, A = _scaled(self.wrap(M))
        if self.region.shape is None:
            R = self.region.radius
            length = 2.0 ** math.frexp(top(R))[1]
            return A * (R / length), 2.0 * EPS * _size(A), first * length
        second, E = _scaled(self.region.shape)
        return A @ E, 2.0 * product_error(A, E), first * second

    def _side(self, M: Array, bias: Array | None) -> _Side:
        """The projections ``M x + bias`` of the domain."""
        ME, lost, unit = self._moved(M)
        b, rounded = None, 0.0
        if bias is not None and np.any(bias):
            b = column_of(self.wrap(bias))
        if self.region.center is not None and np.any(self.region.center):
            A, x = self.wrap(M), column_of(self.wrap(self.region.center))
            rounded = 2.0 * product_error(A, x)
            b = A @ x if b is None else A @ x + b
            rounded += 0.0 if self.exact else 4.0 * EPS * _size(b)
        if b is None:
            return _Side(ME @ ME.T, None, spectral_norm_upper(ME), 0.0, lost, unit)
        # one unit for both, so that the Gram matrices add
        more = max(1.0, _scaled(b)[0] / unit)
        ME, b, unit = ME / more, b / (unit * more), unit * more
        lost = lost / more + (rounded / unit if rounded else 0.0)
        return _Side(ME @ ME.T, b @ b.T, spectral_norm_upper(ME), norm_upper(b), lost, unit)

    @cached_property
    def queries(self) -> _Side:
        return self._side(self.attention.Q, self.attention.query_bias)

    @cached_property
    def keys(self) -> _Side:
        return self._side(self.attention.K, self.attention.key_bias)

    @cached_property
    def key_factor(self) -> _Factor:
        return self._factor(self.attention.K)

    @cached_property
    def query_factor(self) -> _Factor:
        return self._factor(self.attention.Q)

    def _factor(self, M: Array) -> _Factor:
        """A factor of the rows of M with at most as many columns as rows."""
        unit, A = _scaled(self.wrap(M))
        left, sizes, right = np.linalg.svd(mid(A), full_matrices=False)
        L, O = self.wrap(left * sizes), self.wrap(right)
        rest = norm_upper(A - L @ O) + product_error(L, O)
        return _Factor(L, spectral_norm_upper(O), rest, spectral_norm_upper(A), unit)

    def turn(self, offset: int) -> Any:
        """The matrix that turns by an offset, ``(k, k)``."""
        a, k = self.attention, len(self.attention.Q)
        first, second = pairs(len(a.frequencies), a.layout)
        angles = self.wrap(a.frequencies) * (float(offset) if a.length is None else float(a.length))
        if a.length is not None:
            angles = angles * float(offset) / float(self.n)
        if self.exact:
            return _turning(angles, first, second, k)
        out, cos, sin = np.eye(k), np.cos(angles), np.sin(angles)
        i, j = np.arange(k)[first], np.arange(k)[second]
        out[i, i], out[j, j], out[i, j], out[j, i] = cos, cos, -sin, sin
        return out

    def _turned(self, gram: Any, offset: int) -> Any:
        R = self.turn(offset)
        return R @ gram @ R.T

    @cached_property
    def noise(self) -> float:
        """Relative: what rounding does to a Gram matrix, its turns and its products with a factor; 0 in exact arithmetic.

        An angle is off by 4 eps of itself; products of inner dimension m add ``m eps``, in Frobenius norms.
        """
        if self.exact:
            return 0.0
        a = self.attention
        k, d = a.Q.shape
        wide = d if self.region.shape is None else int(self.region.shape.shape[1])
        angle = (self.n if a.length is None else a.length) * float(np.abs(a.frequencies).max(initial=0.0))
        return 8.0 * EPS * (math.sqrt(k) * (d + wide) + 4.0 * k + 8.0 + angle)

    def _norm(self, factor: _Factor, gram: Any, doublings: float = 0.0) -> Any:
        """``lambda_max(L^T gram L)^{1/2}``, outward, times the stretch of the factor."""
        value = lambda_max_upper(factor.L.T @ gram @ factor.L)
        if self.noise:
            value = value + (2.0 + doublings) * self.noise * _size(factor.L) ** 2 * _size(gram)
        return up(factor.stretch * np.sqrt(np.maximum(value, 0.0)))

    def _loss(self, factor: _Factor, side: _Side) -> Any:
        """What the rests of the factor and of the side add to the norm at one offset."""
        return up(factor.lost * (side.size + side.lost + side.shift) + factor.norm * side.lost)

    @property
    def offsets(self) -> range:
        """All offsets of a row and what it sees."""
        return range(0 if self.attention.masked else 1 - self.n, self.n)

    def largest(self, factor: _Factor, side: _Side, sign: int) -> Any:
        """``max_m ||M^T R_m N E|| + |M^T R_m b|`` over the signed offsets, M the factor's matrix and N that of the side."""
        if len(self.offsets) > MANY:
            found = up(factor.norm * (side.size + side.lost + side.shift))
        else:
            each = [self._at(factor, side, sign * m) for m in self.offsets]
            found = up(max(each, key=top) + 2.0 * self._loss(factor, side))
        return product(found, side.unit, factor.unit, abs(float(self.attention.scale)))

    def _at(self, factor: _Factor, side: _Side, offset: int) -> Any:
        value = self._norm(factor, self._turned(side.gram, offset))
        return value if side.bias is None else value + self._norm(factor, self._turned(side.bias, offset))

    @cached_property
    def a(self) -> Any:
        """``max_m ||A_m E|| + |c_m|``."""
        return self.largest(self.key_factor, self.queries, 1)

    @cached_property
    def H(self) -> Any:
        """``max_m ||E^T A_m|| + |k_m|``."""
        return self.largest(self.query_factor, self.keys, -1)

    @property
    def rows(self) -> int:
        """N: rows whose two indices may differ."""
        return self.n - 1 if self.attention.masked else self.n

    def _sum(self, gram: Any) -> Any:
        """``sum_{0 <= m < N} R_m gram R_m^T``."""
        total, count = gram, 1
        for bit in bin(self._window)[3:]:
            total, count = total + self._turned(total, count), 2 * count
            if bit == "1":
                total, count = gram + self._turned(total, 1), count + 1
        return total

    @property
    def _window(self) -> int:
        """Offsets of one window; all there are where windows are many."""
        return 2 * self.n - 1 if not self.attention.masked and self.n > MANY else self.rows

    @property
    def _starts(self) -> range:
        if self.attention.masked:
            return range(2)
        return range(1 - self.n, 1 if self.n <= MANY else 2 - self.n)

    @cached_property
    def root(self) -> Any:
        """``lambda^{1/2}``."""
        factor, side = self.key_factor, self.queries
        total = self._sum(side.gram)
        loss = self._loss(factor, side) * np.sqrt(self.number(float(self._window)))
        if side.bias is not None:
            shift = self._sum(side.bias)
            seen = [symmetrize(mid(factor.L.T @ x @ factor.L)) for x in (total, shift)]
            sizes = [max(float(np.linalg.eigvalsh(x)[-1]), 1e-300) for x in seen]
            theta = self.number(min(max(math.sqrt(sizes[1] / sizes[0]), 1e-6), 1e6))
            ours, theirs = 1.0 + theta, 1.0 + 1.0 / theta
            total, loss = total * ours + shift * theirs, loss * (np.sqrt(ours) + np.sqrt(theirs))
        each = [self._norm(factor, self._turned(total, m), math.log2(self._window)) for m in self._starts]
        found = up(max(each, key=top) + 2.0 * loss)
        return product(found, side.unit, factor.unit, abs(float(self.attention.scale)))


def _size(M: Any) -> float:
    return top(norm_upper(M))


def _scaled(M: Any) -> tuple[float, Any]:
    """A power of two near the largest entry, and the matrix in this unit: exact."""
    size = float(np.abs(mid(M)).max(initial=0.0))
    unit = 2.0 ** math.frexp(size)[1] if size > 0.0 else 1.0
    return unit, M / unit


def _turning(angles: BallMatrix, first: slice, second: slice, size: int) -> BallMatrix:
    """The matrix that turns pairs of coordinates, ``first`` and ``second`` of range(size), by the angles of a vector."""
    rows = np.eye(size).tolist()
    places = range(size)
    for i, j, x in zip(places[first], places[second], angles.balls.entries(), strict=True):
        sin, cos = x.sin_cos()
        rows[i][i], rows[j][j], rows[i][j], rows[j][i] = cos, cos, -sin, sin
    return BallMatrix(type(angles.balls)(rows))
