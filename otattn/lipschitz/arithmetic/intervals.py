r"""Interval arithmetic for numpy formulas: arrays of intervals that hold the exact result.

A formula written with numpy functions, ``np.sqrt(1 + x**2).sum(axis=0)``, runs on an `Interval` as it runs on floats.
The result holds the exact value of the formula at every choice of real numbers from the intervals, all rounding counted:
its upper end is a proven upper bound. `otattn.lipschitz.arithmetic._interval_kernels` states the model and proves each operation.

A comparison that the intervals do not decide is a `Truth` which knows both answers. ``np.where`` then returns the hull of
both branches, and ``if`` raises. A part of a formula that meets floats only, ``np.sqrt(2.0) * x``, is rounded as floats
are: write ``np.sqrt(lift(2.0)) * x`` where the exact root is meant. Nothing turns an interval into a float silently: take
`upper` or `lower`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from scipy import special

from otattn._linalg import Array
from otattn.lipschitz.arithmetic._interval_kernels import KERNELS, Pair, magnitudes, power, repaired, xlogx
from otattn.lipschitz.arithmetic._interval_truth import Truth


def _pair(x: Any) -> Pair:
    """Ends of an interval, or of numbers: equal unless float64 does not hold the number, or it is a nan."""
    if isinstance(x, Interval):
        return x.lo, x.hi
    given = np.asarray(x)
    if given.dtype.kind not in "fiub":
        raise TypeError(f"real numbers are required, got dtype {given.dtype}: convert them to float64")
    v = given.astype(np.float64, copy=False)
    if (given.dtype.kind in "iu" and np.any(np.abs(v) >= 2.0**53)) or given.dtype.itemsize > 8:
        return np.nextafter(v, -np.inf), np.nextafter(v, np.inf)
    return repaired(v, v) if np.isnan(v).any() else (v, v)


class Interval(NDArrayOperatorsMixin):
    """An array of intervals ``[lo, hi]``; an infinite end is no limit, and a nan becomes the whole line.

    `exact` and `between` make one from numbers; the constructor takes two arrays of ends as they are.

    Examples
    --------
    >>> x = Interval.between([0.0, 1.0], [0.5, 2.0])
    >>> bool(np.all(upper(x * x - x) >= [0.0, 2.0]))
    True
    >>> np.where(x < 1.5, x, -1.0)
    Interval([0.0, -1.0], [0.5, 2.0])
    """

    __slots__ = ("hi", "lo")
    __array_priority__ = 1000.0
    lo: Array
    hi: Array

    def __init__(self, lo: Any, hi: Any) -> None:
        self.lo, self.hi = np.asarray(lo), np.asarray(hi)

    @staticmethod
    def exact(x: Any) -> Interval:
        """Floats as intervals of length 0 (a copy; an `Interval` is returned as it is)."""
        if isinstance(x, Interval):
            return x
        lo, hi = _pair(np.array(x))
        return Interval(lo, hi)

    @staticmethod
    def between(lo: Any, hi: Any) -> Interval:
        """The intervals from `lo` to `hi` (copies, broadcast); ValueError where ``lo > hi``."""
        low, high = np.broadcast_arrays(_pair(lo)[0], _pair(hi)[1])
        if np.any(low > high):
            worst = np.unravel_index(np.argmax(low > high), low.shape)
            raise ValueError(f"lo <= hi is required, got lo = {low[worst]} > hi = {high[worst]}: swap the ends")
        return Interval(low.copy(), high.copy())

    shape = property(lambda self: self.lo.shape)
    ndim = property(lambda self: self.lo.ndim)
    size = property(lambda self: self.lo.size)
    dtype = property(lambda self: self.lo.dtype)
    T = property(lambda self: Interval(self.lo.T, self.hi.T))

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("a number was required, got an Interval: take upper(x) or lower(x), so that no end is dropped")

    __float__ = __int__ = __index__ = __complex__ = __array__ = item = _refuse

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __len__(self) -> int:
        return len(self.lo)

    def __iter__(self) -> Iterator[Interval]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> Interval:
        key = key.decided() if isinstance(key, Truth) else key
        lo = self.lo[key]
        return Interval(lo, lo if self.hi is self.lo else self.hi[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        """Assignment to fresh ends (views of the old ones keep their values); an undecided key takes the hull."""
        if isinstance(key, Truth) and np.ndim(value) == 0:
            merged = _where(key, value, self)
            self.lo, self.hi = merged.lo, merged.hi
            return
        key = key.decided() if isinstance(key, Truth) else key
        lo, hi = self.lo.copy(), self.hi.copy()
        lo[key], hi[key] = _pair(value)
        self.lo, self.hi = lo, hi

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", None)
        with np.errstate(all="ignore"):
            if method == "__call__" and not kwargs:
                result = _call(ufunc.__name__, inputs)
            elif method == "outer" and not kwargs:
                a, b = (Interval(*_pair(x)) for x in inputs)
                result = ufunc(a.reshape(a.shape + (1,) * b.ndim), b)
            elif method == "reduce":
                result = _reduce(ufunc, inputs[0], **{"axis": 0, **kwargs})
            elif method == "accumulate" and ufunc in (np.maximum, np.minimum):
                result = _endwise(ufunc.accumulate, inputs, kwargs)
            else:
                raise TypeError(f"np.{ufunc.__name__} ({method}, {sorted(kwargs)}) is not defined for intervals")
        if out is None:
            return result
        if not isinstance(out[0], Interval):
            raise TypeError("a float array cannot hold intervals: write a = a + x, not a += x or out=a")
        out[0].lo, out[0].hi = result.lo, result.hi
        return out[0]

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return dispatch(func, args, kwargs)

    def sum(self, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Interval:
        """Sum over the axes."""
        return _reduce(np.add, self, axis, keepdims, initial)

    def mean(self, axis: Any = None, keepdims: bool = False) -> Interval:
        """Sum over the axes divided by the number of summands."""
        total = self.sum(axis, keepdims)
        return total / float(self.size // max(total.size, 1))

    def max(self, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Interval:
        """Greatest entry."""
        return _reduce(np.maximum, self, axis, keepdims, initial)

    def min(self, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Interval:
        """Least entry."""
        return _reduce(np.minimum, self, axis, keepdims, initial)

    def clip(self, low: Any = None, high: Any = None) -> Interval:
        """``minimum(maximum(x, low), high)``."""
        x = self if low is None else np.maximum(self, low)
        return x if high is None else np.minimum(x, high)

    def reshape(self, *shape: Any) -> Interval:
        """The same intervals in another shape."""
        return Interval(self.lo.reshape(*shape), self.hi.reshape(*shape))

    def ravel(self) -> Interval:
        """The same intervals in one row."""
        return self.reshape(-1)

    def spectral_norm(self) -> Interval:
        """An upper bound of the largest singular value of a matrix, proved, above it by rounding only."""
        from otattn.lipschitz.arithmetic.eigenvalues import largest_eigenvalue

        if not np.any(magnitudes((self.lo, self.hi))[1]):
            return Interval.exact(0.0)
        gram = self @ self.T if self.shape[0] <= self.shape[1] else self.T @ self
        out: Any = np.sqrt(Interval.exact(max(largest_eigenvalue(gram), 0.0)))
        return out

    def copy(self) -> Interval:
        """Fresh ends."""
        return Interval(self.lo.copy(), self.hi.copy())

    def __repr__(self) -> str:
        ends = f"{self.lo.tolist()}, {self.hi.tolist()}" if self.size <= 4 else f"shape={self.shape}"
        return f"Interval({ends})"


def is_interval(x: Any) -> bool:
    """Whether `x` is an array of intervals."""
    return isinstance(x, Interval)


def lift(x: Any) -> Interval:
    """`Interval.exact`: floats as intervals of length 0."""
    return Interval.exact(x)


def like(x: Any, other: Any) -> Any:
    """A number in the arithmetic of another: an interval of length 0 beside an interval."""
    return lift(x) if isinstance(other, Interval) else x


def upper(x: Any) -> Array:
    """Upper ends of an interval; floats as they are."""
    return x.hi if isinstance(x, Interval) else np.asarray(x, dtype=np.float64)


def lower(x: Any) -> Array:
    """Lower ends of an interval; floats as they are."""
    return x.lo if isinstance(x, Interval) else np.asarray(x, dtype=np.float64)


def xlogy(x: Any, y: Any) -> Any:
    """``x log y`` for x >= 0, and 0 at x = 0; floats go to scipy. ``xlogy(x, x)`` uses the exact range of x log x.

    The numbers are known to be non-negative, so the part of an interval below 0 is cut off.
    """
    if not (isinstance(x, Interval) or isinstance(y, Interval)):
        return special.xlogy(x, y)
    lo, hi = _pair(x)
    if np.any(hi < 0):
        raise ValueError(f"x >= 0 is required, got an interval with upper end {hi.min()}")
    with np.errstate(all="ignore"):
        return Interval(*xlogx((lo, hi))) if x is y else Interval(np.maximum(lo, 0.0), hi) * np.log(lift(y))


def _compared(name: str, a: Pair, b: Pair) -> Truth:
    """The comparison `name` of the intervals a and b."""
    if name.startswith("greater"):
        a, b, name = b, a, name.replace("greater", "less")
    if name == "less":
        return Truth(a[1] < b[0], a[0] < b[1])
    if name == "less_equal":
        return Truth(a[1] <= b[0], a[0] <= b[1])
    equal = Truth((a[0] == b[1]) & (a[1] == b[0]), (a[0] <= b[1]) & (b[0] <= a[1]))
    return equal if name == "equal" else ~equal


def _call(name: str, inputs: tuple[Any, ...]) -> Any:
    """One ufunc at its arguments."""
    if name == "power" and not isinstance(inputs[1], Interval) and np.ndim(inputs[1]) == 0:
        return Interval(*power(_pair(inputs[0]), float(inputs[1])))
    pairs = [_pair(x) for x in inputs]
    if name in KERNELS:
        return Interval(*KERNELS[name](*pairs))
    if name in ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal"):
        return _compared(name, *pairs)
    lo, hi = pairs[0]
    if name in ("isfinite", "isnan", "isinf"):
        ends = getattr(np, name)(lo), getattr(np, name)(hi)
        return ends[0] & ends[1] if name == "isfinite" else ends[0] | ends[1]
    raise TypeError(f"np.{name} is not defined for intervals: add a kernel for it to _interval_kernels.py")


def _endwise(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function that is exact and increasing in every entry, at the lower and at the upper ends."""

    def ends(value: Any, end: int) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(ends(item, end) for item in value)
        return _pair(value)[end] if isinstance(value, Interval) else value

    lo, hi = (func(*ends(args, i), **{key: ends(value, i) for key, value in kwargs.items()}) for i in (0, 1))
    return tuple(map(Interval, lo, hi)) if isinstance(lo, list | tuple) else Interval(lo, hi)


def _reduce(ufunc: np.ufunc, x: Interval, axis: Any = None, keepdims: bool = False, initial: Any = None) -> Interval:
    """Reduction by a tree of halves, so that n summands meet ``log2 n`` roundings; each is counted."""
    if ufunc in (np.maximum, np.minimum):
        extra = {} if initial is None else {"initial": initial}
        return _endwise(ufunc.reduce, (x,), {"axis": axis, "keepdims": keepdims, **extra})
    axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(sorted(i % x.ndim for i in axes))
    y: Any = _endwise(np.moveaxis, (x, axes, range(len(axes))), {})
    y = y.reshape((int(np.prod(y.shape[: len(axes)])),) + y.shape[len(axes) :])
    if len(y) == 0:
        y = lift(np.full((1,) + y.shape[1:], ufunc.identity, dtype=np.float64))
    while len(y) > 1:
        half = len(y) // 2
        z = ufunc(y[:half], y[half : 2 * half])
        y = np.concatenate([z, y[2 * half :]]) if len(y) % 2 else z
    y = y[0] if initial is None else ufunc(y[0], initial)
    return y.reshape([1 if i in axes else n for i, n in enumerate(x.shape)]) if keepdims else y


def _where(condition: Any, a: Any, b: Any) -> Interval:
    """Branch a or b; the hull of both where the condition is undecided."""
    (a0, a1), (b0, b1) = _pair(a), _pair(b)
    if not isinstance(condition, Truth):
        return Interval(np.where(condition, a0, b0), np.where(condition, a1, b1))
    sure, maybe = condition.sure, condition.maybe
    lo, hi = np.where(maybe, np.minimum(a0, b0), b0), np.where(maybe, np.maximum(a1, b1), b1)
    return Interval(np.where(sure, a0, lo), np.where(sure, a1, hi))


def _diff(x: Any, n: int = 1, axis: int = -1) -> Interval:
    """Differences of neighbours."""
    for _ in range(n):
        y = np.moveaxis(x, axis, 0)
        x = np.moveaxis(y[1:] - y[:-1], 0, axis)
    return x


def _filled(x: Any, value: Any, dtype: Any = None) -> Interval:
    """`value` in the shape of `x`."""
    return Interval(*(np.full(x.shape, end, dtype=np.float64) for end in _pair(value)))


_PLACING = """
append atleast_1d atleast_2d atleast_3d broadcast_arrays broadcast_to column_stack concatenate copy delete diag
diagonal expand_dims flip hstack insert moveaxis ravel repeat reshape roll rot90 sort squeeze stack swapaxes take
take_along_axis tile transpose tril triu vstack
"""
ENDWISE = frozenset(getattr(np, name) for name in _PLACING.split())
"""Functions that only place entries, and the sort (the k-th least number increases with every entry)."""

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "where": _where,
    "clip": lambda x, *args, **kwargs: lift(x).clip(*args, **kwargs),
    "sum": lambda x, axis=None, **kwargs: lift(x).sum(axis, **kwargs),
    "mean": lambda x, axis=None, **kwargs: lift(x).mean(axis, **kwargs),
    "prod": lambda x, axis=None, **kwargs: _reduce(np.multiply, x, axis, **kwargs),
    "max": lambda x, axis=None, **kwargs: lift(x).max(axis, **kwargs),
    "min": lambda x, axis=None, **kwargs: lift(x).min(axis, **kwargs),
    "any": lambda x, axis=None, **kwargs: x.any(axis, **kwargs),
    "all": lambda x, axis=None, **kwargs: x.all(axis, **kwargs),
    "zeros_like": lambda x, dtype=None: _filled(x, 0.0),
    "ones_like": lambda x, dtype=None: _filled(x, 1.0),
    "empty_like": lambda x, dtype=None: _filled(x, np.nan),
    "full_like": _filled,
    "diff": _diff,
    "dot": lambda a, b: np.matmul(a, b) if np.ndim(a) and np.ndim(b) else a * b,
    "shape": lambda x: x.shape,
    "ndim": lambda x: x.ndim,
    "size": lambda x: x.size,
}
FUNCTIONS |= {"amax": FUNCTIONS["max"], "amin": FUNCTIONS["min"]}


def dispatch(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A function of numpy with an `Interval` or a `Truth` among its arguments."""
    if func.__name__ in FUNCTIONS:
        return FUNCTIONS[func.__name__](*args, **kwargs)
    if func in ENDWISE:
        return _endwise(func, args, kwargs)
    raise TypeError(f"np.{func.__name__} is not defined for intervals: add it to FUNCTIONS or ENDWISE of intervals.py")
