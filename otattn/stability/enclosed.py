"""Arrays with a proven error: a running error analysis of sums, products and matrix products.

An :class:`Enclosed` array stands for an unknown exact array within ``error`` of ``high + low``, entry by entry.
Each operation evaluates in floating point and adds to ``error`` what its operands' errors and its own rounding
can do; the model is that of Higham (2002), Accuracy and Stability of Numerical Algorithms, chapters 2 to 4:
``fl(a op b) = (a op b)(1 + delta) + eta``, ``|delta| <= u = 2^-53``, ``eta`` from underflow. Two precisions share
the code: ``low`` is None for plain float64 (one unit ``u``), an array for double-double (``u^2`` times a small
constant that each operation states).

Errors are themselves computed in float64; every one is enlarged by :func:`upward`, which covers the rounding
of the few operations that made it and what underflowed in them. An overflow leaves inf or nan, and
:attr:`Enclosed.bounded` is then False: nothing is claimed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn._linalg import Array
from otattn.distances.double_double import two_product, two_sum

__all__ = ["TINY", "UNIT", "Enclosed", "append_columns", "upward"]

UNIT = 2.0**-53
"""Half the distance of 1 to the next float: the relative error of one rounded operation."""
TINY = 2.0**-1060
"""More than all that can underflow in one scalar operation on (pairs of) floats: at most 64 roundings of 2^-1075
each, and the rounding of errors that are subnormal themselves."""
SLACK = 2.0**-48
"""32 units: an error is the result of fewer than 30 operations on non-negative numbers."""
SUM_UNITS, PRODUCT_UNITS, QUOTIENT_UNITS = 8.0, 16.0, 64.0
"""Errors of double-double operations in units of ``u^2``: of ``|a| + |b|``, of ``|a b|``, of ``|a / b|`` (the sharp
constants of Joldes, Muller and Popescu (2017) are 2 to 10)."""


def upward(error: Array) -> Array:
    """``error`` enlarged beyond the rounding of the operations that made it."""
    return np.asarray(error * (1.0 + SLACK) + TINY)


class Enclosed:
    """The exact array lies within ``error`` of ``high + low``.

    Parameters
    ----------
    high : ndarray
    low : ndarray or None
        None in plain float64.
    error : ndarray or None
        Same shape; None when ``high + low`` is exact.
    """

    __array_ufunc__ = None  # numpy arrays on the left leave their operators to this class
    __slots__ = ("error", "high", "low")

    def __init__(self, high: Array, low: Array | None = None, error: Array | None = None) -> None:
        self.high, self.low, self.error = high, low, error

    @classmethod
    def exact(cls, values: ArrayLike, *, fine: bool = False) -> Enclosed:
        """Floats taken as exact numbers, in double-double when ``fine``."""
        high = np.asarray(values, dtype=np.float64)
        return cls(high, np.zeros_like(high) if fine else None)

    @property
    def fine(self) -> bool:
        """True in double-double."""
        return self.low is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.high.shape

    @property
    def radius(self) -> Array:
        """The error as an array."""
        return np.zeros(self.high.shape) if self.error is None else self.error

    @property
    def bounded(self) -> bool:
        """True when every value and every error is finite."""
        parts = (self.high, self.low, self.error)
        return all(part is None or bool(np.isfinite(part).all()) for part in parts)

    def _map(self, f: Any) -> Enclosed:
        return Enclosed(*(None if part is None else f(part) for part in (self.high, self.low, self.error)))  # type: ignore[arg-type]

    @property
    def T(self) -> Enclosed:
        return self._map(np.transpose)

    def __getitem__(self, key: Any) -> Enclosed:
        return self._map(lambda part: part[key])

    def widened(self, extra: Any) -> Enclosed:
        """The same values with ``extra`` (non-negative) added to the error."""
        return Enclosed(self.high, self.low, upward(self.radius + extra))

    def scaled(self, power: Any) -> Enclosed:
        """Times ``2^power`` (integers), exact unless something underflows."""
        high = np.ldexp(self.high, power)
        low = None if self.low is None else np.ldexp(self.low, power)
        return Enclosed(high, low, upward(np.ldexp(self.radius, power)))

    def where(self, keep: NDArray[np.bool_], other: float = 0.0) -> Enclosed:
        """The exact float ``other`` where ``keep`` is False."""
        low = None if self.low is None else np.where(keep, self.low, 0.0)
        error = None if self.error is None else np.where(keep, self.error, 0.0)
        return Enclosed(np.where(keep, self.high, other), low, error)

    def __neg__(self) -> Enclosed:
        return Enclosed(-self.high, None if self.low is None else -self.low, self.error)

    def __add__(self, other: Any) -> Enclosed:
        a, b = self, _enclosed(other)
        error = _plus(a.error, b.error)
        if a.low is None and b.low is None:
            high = a.high + b.high
            return Enclosed(high, None, upward(_plus(error, UNIT * np.abs(high))))
        s, rest = two_sum(a.high, b.high)
        high, low = two_sum(s, rest + _plus(a.low, b.low))
        own = SUM_UNITS * UNIT**2 * (np.abs(a.high) + np.abs(b.high))
        return Enclosed(high, low, upward(_plus(error, own)))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Enclosed:
        return self + (-_enclosed(other))

    def __rsub__(self, other: Any) -> Enclosed:
        return _enclosed(other) + (-self)

    def __mul__(self, other: Any) -> Enclosed:
        a, b = self, _enclosed(other)
        if a.low is None and b.low is None:
            high, low = np.asarray(a.high * b.high), None
            own = UNIT * np.abs(high)
        else:
            p, rest = two_product(a.high, b.high)
            cross = _plus(
                None if b.low is None else a.high * b.low,
                None if a.low is None else a.low * b.high,
            )
            high, low = two_sum(p, rest + cross)
            own = PRODUCT_UNITS * UNIT**2 * np.abs(p)
        return Enclosed(high, low, upward(own + _carried(a, b)))

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Enclosed:
        a, b = self, _enclosed(other)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            q = np.asarray(a.high / b.high)
            if a.low is None and b.low is None:
                high, low, own = q, None, 2.0 * UNIT * np.abs(q)
            else:
                centre_a, centre_b = Enclosed(a.high, a.low), Enclosed(b.high, b.low)
                rest = centre_a - Enclosed(q, np.zeros_like(q)) * centre_b
                high, low = two_sum(q, (rest.high + (0.0 if rest.low is None else rest.low)) / b.high)
                own = QUOTIENT_UNITS * UNIT**2 * np.abs(q) + TINY / np.abs(b.high)
            size = np.abs(b.high) * (1.0 - 4.0 * UNIT)
            room = size if b.error is None else size - b.error
            carried = 0.0 if a.error is None else a.error / room
            if b.error is not None:
                carried = carried + (1.0 + SLACK) * np.abs(q) * (b.error / room)
            return Enclosed(high, low, np.where(room > 0.0, upward((own + carried) * (1.0 + SLACK)), np.inf))

    def __rtruediv__(self, other: Any) -> Enclosed:
        return _enclosed(other) / self

    def __matmul__(self, other: Any) -> Enclosed:
        r"""``A B`` of matrices.

        In float64 any order of summation, fused or not, leaves ``gamma_k |A| |B|``, ``gamma_k = k u / (1 - k
        u)`` (Higham, section 3.5). In double-double the k products and k sums leave ``(16 + 8 (k + 1)) u^2 |A|
        |B|`` to first order, since no partial sum exceeds ``|A| |B|``.
        """
        a, b = self, _enclosed(other)
        k = a.high.shape[-1]
        if a.low is None and b.low is None:
            high, low = a.high @ b.high, None
            own = (k + 2.0) * UNIT
        else:
            high, low = _fine_product(a, b)
            own = (8.0 * k + 32.0) * UNIT**2
        size_b = np.abs(b.high)
        # what underflows here is multiplied by |A|, so it is replaced before
        error = np.abs(a.high) @ upward(own * size_b + b.radius)
        if a.error is not None:
            error = error + a.error @ (size_b + b.radius)
        # low parts are below u |high|; sums of k non-negative terms are rounded by k u
        grown = 1.0 + (2.0 * k + 16.0) * UNIT
        return Enclosed(high, low, upward(error * grown + k * TINY))

    def __rmatmul__(self, other: Any) -> Enclosed:
        return _enclosed(other) @ self

    def clipped(self) -> Enclosed:
        """``max(., 0)``, which does not enlarge an error."""
        positive = self.high > 0.0
        low = None if self.low is None else np.where(positive, self.low, 0.0)
        # a pair of high 0 has low 0, so the sign is that of high
        return Enclosed(np.where(positive, self.high, 0.0), low, self.error)


def _enclosed(value: Any) -> Enclosed:
    return value if isinstance(value, Enclosed) else Enclosed(np.asarray(value, dtype=np.float64))


def _plus(a: Array | None, b: Array | None) -> Any:
    if a is None:
        return 0.0 if b is None else b
    return a if b is None else a + b


def _carried(a: Enclosed, b: Enclosed) -> Any:
    """What errors of the factors do to a product: ``|a| eb + |b| ea + ea eb``."""
    total: Any = 0.0
    if b.error is not None:
        total = total + np.abs(a.high) * b.error
    if a.error is not None:
        total = total + a.error * (np.abs(b.high) + b.radius)
    return total * (1.0 + 4.0 * UNIT)


def _fine_product(a: Enclosed, b: Enclosed) -> tuple[Array, Array]:
    """The matrix product of the centres, one column of A at a time."""
    high = np.zeros((len(a.high), b.high.shape[1]))
    low = np.zeros_like(high)
    for t in range(a.high.shape[1]):
        x, y = a.high[:, t, None], b.high[None, t]
        p, rest = two_product(x, y)
        if b.low is not None:
            rest = rest + x * b.low[None, t]
        if a.low is not None:
            rest = rest + a.low[:, t, None] * y
        s, carry = two_sum(high, p)
        high, low = two_sum(s, carry + (low + rest))
    return high, low


def append_columns(a: Enclosed, values: Array) -> Enclosed:
    """``a`` with the exact columns ``values`` on its right."""
    zeros = np.zeros_like(values)
    return Enclosed(
        np.hstack([a.high, values]),
        None if a.low is None else np.hstack([a.low, zeros]),
        None if a.error is None else np.hstack([a.error, zeros]),
    )
