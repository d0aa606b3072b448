"""Attention maps that are a function of the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.attention.base import AttentionMap, Measure

__all__ = ["FunctionAttention"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False, init=False)
class FunctionAttention(AttentionMap):
    r"""A map ``x -> Gamma_mu(x)`` given by a function, for distances and ratios of what it does to measures.

    .. math:: F(\mu) = (\Gamma_\mu)_\# \mu, \qquad \Gamma_\mu(x_i) = \mathrm{function}(x, \mu)_i

    Nothing is known of the function but its values: there is no Jacobian, hence no local constant; the rounding of its
    values has no bound, so that ``certified_lower`` of a ratio is 0 and its ``resolution`` is "unbounded"; no theorem
    bounds it from above.

    Parameters
    ----------
    function : callable ``(x, mu) -> array_like (m, e)``
        Values at the rows of ``x (m, d)``, row by row, for a measure ``mu`` (a :class:`DiscreteMeasure` with ``points`` and
        ``weights``, or a :class:`SpaceTimeMeasure`). It must not change its arguments, which are read-only.
    value_dim : int, optional
        Dimension e of the values, checked in every call; that of the tokens by default.

    Raises
    ------
    TypeError
        ``function`` cannot be called.
    ValueError
        In calls: values that are not finite, or not one row of dimension e for each row of x.

    Examples
    --------
    >>> centred = FunctionAttention(lambda x, mu: x - mu.mean())
    >>> centred.pushforward([[1.0], [3.0]]).points.ravel()
    array([-1.,  1.])
    """

    function: Callable[[Array, Measure], ArrayLike]
    value_dim: int | None

    def __init__(self, function: Callable[[Array, Measure], ArrayLike], value_dim: int | None = None) -> None:
        if not callable(function) or isinstance(function, (type, AttentionMap)):
            raise TypeError(
                "function must be a callable (x, mu) -> values, received "
                f"{function.__name__ if isinstance(function, type) else type(function).__name__}; "
                "an attention map is used as it is."
            )
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "value_dim", None if value_dim is None else check.count(value_dim, "value_dim"))

    @property
    def out_dim(self) -> int | None:
        return self.value_dim

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        rows = check.frozen(x)
        values = check.points(self.function(rows, mu), "function(x, mu)", dim=self.value_dim or x.shape[1])
        if len(values) != len(x):
            raise ValueError(
                f"function must return one row of values for each row of x, received {len(values)} for {len(x)}."
            )
        return values

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return f"FunctionAttention({name}{'' if self.value_dim is None else f', value_dim={self.value_dim}'})"
