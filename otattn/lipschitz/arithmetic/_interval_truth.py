"""Answers to comparisons of intervals, which may be undecided; `otattn.lipschitz.arithmetic.intervals` makes and uses them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray


class Truth(NDArrayOperatorsMixin):
    """Answers to a comparison: `sure` where it holds for all numbers in the intervals, `maybe` where for some."""

    __slots__ = ("maybe", "sure")
    __array_priority__ = 1001.0

    def __init__(self, sure: Any, maybe: Any) -> None:
        self.sure, self.maybe = np.asarray(sure, dtype=bool), np.asarray(maybe, dtype=bool)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the answers."""
        return self.sure.shape

    def decided(self) -> NDArray[np.bool_]:
        """The answers as a bool array; ValueError where the intervals leave one open."""
        undecided = int(np.count_nonzero(self.sure != self.maybe))
        if undecided:
            raise ValueError(
                f"the comparison must be decided here, but the intervals leave {undecided} of {self.sure.size} answers "
                "undecided: use np.where(condition, a, b), which takes the hull of both branches, or narrower intervals"
            )
        return self.sure

    def __bool__(self) -> bool:
        return bool(self.decided())

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        return self.decided().astype(bool if dtype is None else dtype)

    def any(self, axis: Any = None, keepdims: bool = False) -> Truth:
        """Whether one of the answers is yes."""
        return Truth(self.sure.any(axis=axis, keepdims=keepdims), self.maybe.any(axis=axis, keepdims=keepdims))

    def all(self, axis: Any = None, keepdims: bool = False) -> Truth:
        """Whether every answer is yes."""
        return Truth(self.sure.all(axis=axis, keepdims=keepdims), self.maybe.all(axis=axis, keepdims=keepdims))

    def __getitem__(self, key: Any) -> Truth:
        return Truth(self.sure[key], self.maybe[key])

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__
        if method == "__call__" and not kwargs:
            ends = [(x.sure, x.maybe) if isinstance(x, Truth) else (np.asarray(x, dtype=bool),) * 2 for x in inputs]
            if name in ("logical_not", "invert"):
                return Truth(~ends[0][1], ~ends[0][0])
            if name in ("logical_and", "bitwise_and", "logical_or", "bitwise_or"):
                return Truth(ufunc(ends[0][0], ends[1][0]), ufunc(ends[0][1], ends[1][1]))
        raise TypeError(f"a Truth takes &, | and ~ only, got np.{name}: use np.where(condition, a, b)")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from otattn.lipschitz.arithmetic.intervals import dispatch  # the branches of np.where become intervals

        return dispatch(func, args, kwargs)

    def __repr__(self) -> str:
        return f"Truth(shape={self.shape}, sure={int(self.sure.sum())}, maybe={int(self.maybe.sum())})"
