"""What the logits of two tokens know of their positions: turned pairs, a bias of the offset, and who sees whom."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn._files.saved import Saved
from otattn._linalg import Array
from otattn.attention.rotary import LAYOUTS, rotate

__all__ = ["Mask", "PositionBias", "Rotation", "alibi_slopes"]

SLACK = 1e-6
"""Positions are ``length * time``, times of a sequence ``i / n``: whole numbers but for rounding, far below this."""


@dataclass(frozen=True, eq=False, init=False)
class Rotation(Saved):
    """Rotary positions: pair t of the leading coordinates is turned by ``position * frequencies[t]``.

    Parameters
    ----------
    frequencies : array_like (r / 2,)
        Any angles per position; the coordinates from r on are not turned (partial rotary).
    layout : {"half", "adjacent"}
        Pairs ``(t, t + r/2)``, as in checkpoints of Hugging Face, or ``(2t, 2t + 1)``.

    Examples
    --------
    >>> Rotation.of_base(100.0, 4).frequencies
    array([1. , 0.1])
    """

    frequencies: Array
    layout: str

    def __init__(self, frequencies: ArrayLike, *, layout: str = "half") -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, received {layout!r}; see the model's code.")
        object.__setattr__(self, "frequencies", check.frozen(check.vector(frequencies, "frequencies")))
        object.__setattr__(self, "layout", layout)

    @classmethod
    def of_base(cls, base: float, dim: int, *, layout: str = "half") -> Rotation:
        """The frequencies ``base^(-2t/dim)`` of the first ``dim`` coordinates, an even number."""
        turned = check.count(dim, "dim")
        if turned % 2 or not check.positive(base, "base") > 1.0:
            raise ValueError(f"dim must be even and base above 1, received {dim} and {base!r}; 10000 is a usual base.")
        return cls(float(base) ** (-np.arange(0, turned, 2) / turned), layout=layout)

    def turn(self, z: Array, positions: Array) -> Array:
        """The rows of ``z (..., m, k)`` turned as at ``positions (m,)``; a new array."""
        return rotate(z, positions[:, None] * self.frequencies, self.layout)


@dataclass(frozen=True, eq=False, init=False)
class PositionBias(Saved):
    r"""A number added to each logit: ``-slope |i - j| + table[j - i]`` for a query at position i and a key at j.

    Parameters
    ----------
    slope : float
        ALiBi (:func:`alibi_slopes` gives those of the paper); 0 for none.
    table : array_like (2 m + 1,), optional
        Values at the offsets ``j - i = -m, ..., m``; offsets beyond take the value at the end (T5:
        :meth:`t5`). Offsets are rounded to whole numbers.

    Examples
    --------
    >>> import numpy as np
    >>> PositionBias(0.5, table=[1.0, 0.0, 3.0]).at(np.array([-2.0, 0.0, 1.0]))   # offsets j - i
    array([0. , 0. , 2.5])

    References
    ----------
    Press, Smith, Lewis, "Train short, test long: attention with linear biases", 2022. Raffel et al., "Exploring the limits of
    transfer learning with a unified text-to-text transformer", 2020.
    """

    slope: float
    table: Array | None

    def __init__(self, slope: float = 0.0, *, table: ArrayLike | None = None) -> None:
        values = None if table is None else check.vector(table, "table")
        if values is not None and len(values) % 2 == 0:
            raise ValueError(
                f"table must have an odd number of entries, one for each offset -m..m, received {len(values)}."
            )
        object.__setattr__(self, "slope", check.as_float_array(slope, "slope", ndim=0).item())
        object.__setattr__(self, "table", None if values is None else check.frozen(values))

    @classmethod
    def t5(cls, buckets: ArrayLike, *, max_distance: int = 128, bidirectional: bool = True) -> PositionBias:
        """The relative bias of T5 from its learned values, one a bucket: near offsets have their own, far ones share.

        With two directions half of the buckets are for keys after the query; else keys after the query share the first.
        """
        values = check.vector(buckets, "buckets")
        far = check.count(max_distance, "max_distance")
        if len(values) % (4 if bidirectional else 2) or 2 * far <= len(values) // (2 if bidirectional else 1):
            raise ValueError(
                f"buckets must be a multiple of {4 if bidirectional else 2} and few against max_distance, received "
                f"{len(values)} and {far}; T5 has 32 and 128."
            )
        offsets = np.arange(-far, far + 1)
        half = len(values) // 2 if bidirectional else len(values)
        start = np.where(offsets > 0, half, 0) if bidirectional else np.zeros(len(offsets), dtype=np.intp)
        away = np.abs(offsets) if bidirectional else np.maximum(-offsets, 0)
        near = half // 2
        # in float32, as the models were trained
        ratio = np.log(np.maximum(away, 1).astype(np.float32) / near) / np.float32(math.log(far / near))
        steps = near + (ratio * np.float32(half - near)).astype(np.intp)
        return cls(table=values[start + np.where(away < near, away, np.minimum(steps, half - 1))])

    def at(self, offsets: Array) -> Array:
        """The bias at offsets ``j - i``; a new array."""
        out = -self.slope * np.abs(offsets)
        if self.table is not None:
            m = len(self.table) // 2
            out += self.table[np.clip(np.rint(offsets), -m, m).astype(np.intp) + m]
        return np.asarray(out)


def alibi_slopes(num_heads: int) -> Array:
    """The slopes of ALiBi: ``2^(-8h/H)``, h = 1..H, for a power of two; for others those of the next powers below and above.

    Examples
    --------
    >>> alibi_slopes(2)
    array([0.0625    , 0.00390625])
    """
    H = check.count(num_heads, "num_heads")
    low = 1 << (H.bit_length() - 1)
    own = 2.0 ** (-8.0 * np.arange(1, low + 1) / low)
    more = 2.0 ** (-8.0 * np.arange(1, 2 * low + 1, 2) / (2 * low))
    return np.concatenate([own, more[: H - low]])


@dataclass(frozen=True, eq=False, init=False)
class Mask(Saved):
    """Which atoms a token at position i sees: those at positions j with all of the following.

    Parameters
    ----------
    causal : bool
        Atoms that are not later.
    before, after : float, optional
        A sliding window: ``i - j <= before`` and ``j - i <= after``; None is no limit. A window of w tokens that ends with the
        token itself has ``before = w - 1``.
    allowed : array_like (L, L) of bool, optional
        Any pattern: the token at position i sees the one at j where ``allowed[i - 1, j - 1]``, i and j from 1 to L; positions in
        between belong to the next whole number.

    Examples
    --------
    >>> import numpy as np
    >>> Mask(before=1).hidden(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 3.0])).astype(int)
    array([[0, 1, 1],
           [0, 0, 1],
           [1, 0, 0]])
    """

    causal: bool
    before: float | None
    after: float | None
    allowed: NDArray[np.bool_] | None

    def __init__(
        self,
        causal: bool = True,
        *,
        before: float | None = None,
        after: float | None = None,
        allowed: ArrayLike | None = None,
    ) -> None:
        object.__setattr__(self, "causal", bool(causal))
        for name, value in (("before", before), ("after", after)):
            object.__setattr__(self, name, None if value is None else check.positive(value, name, zero=True))
        pattern = None if allowed is None else np.array(check.real_array(allowed, "allowed"))
        if pattern is not None:
            if pattern.dtype != np.bool_ or pattern.ndim != 2 or pattern.shape[0] != pattern.shape[1]:
                raise ValueError(
                    f"allowed must be a square array of bool, received {pattern.dtype} of shape {pattern.shape}; True means "
                    "that the token of the row sees that of the column."
                )
            pattern.flags.writeable = False
        object.__setattr__(self, "allowed", pattern)

    @classmethod
    def blocks(cls, sizes: ArrayLike, *, causal: bool = True, before: float | None = None) -> Mask:
        """Tokens see their own block only: the first ``sizes[0]`` tokens, the next ``sizes[1]``, and so on."""
        lengths = [check.count(int(s), "sizes") for s in np.atleast_1d(np.asarray(sizes))]
        of = np.repeat(np.arange(len(lengths)), lengths)
        return cls(causal, before=before, allowed=of[:, None] == of)

    @property
    def window(self) -> tuple[float, float]:
        """The largest ``i - j`` and ``j - i`` that are seen."""
        before = math.inf if self.before is None else self.before
        after = math.inf if self.after is None else self.after
        return before, 0.0 if self.causal else after

    def hidden(self, rows: Array, atoms: Array) -> NDArray[np.bool_]:
        """Which (row, atom) pairs are not seen, from their positions ``(m,)`` and ``(n,)``."""
        before, after = self.window
        offsets = atoms[None, :] - rows[:, None]
        out = offsets > (0.0 if self.causal else after + SLACK)
        if before < math.inf:
            out |= offsets < -before - SLACK
        if self.allowed is not None:
            out |= ~self.allowed[np.ix_(self._index(rows), self._index(atoms))]
        return np.asarray(out)

    def _index(self, positions: Array) -> NDArray[np.intp]:
        assert self.allowed is not None
        index = np.maximum(np.ceil(positions - SLACK).astype(np.intp), 1) - 1
        if index.max() >= len(self.allowed):
            raise ValueError(
                f"positions must be at most {len(self.allowed)}, the size of allowed, received {positions.max():g}; give a larger "
                "pattern."
            )
        return index
