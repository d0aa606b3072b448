r"""What second and third derivatives say of a map f in the ball ``|D| <= r`` around given tokens X.

With ``|D^2 f(X)| <= C`` and ``|D^3 f(X + D)| <= D3(r)``, both as multilinear forms on Frobenius norms (for symmetric forms the
norm is attained on the diagonal, Banach), Taylor's formula gives

- ``|f(X + D) - f(X) - J D| <= C r^2 / 2 + r^3 int_0^1 (1 - s)^2 / 2 D3(s r) ds``;
- ``||J(X + D) - J|| <= C r + r^2 int_0^1 (1 - s) D3(s r) ds``.

D3 increases, so that its value at the right end of each cell of s bounds the integrals: the weight falls off where D3 is
largest, which is most of what these bounds gain over ``D3(r) r^3 / 6``. Around a point within ``off`` of X the same holds with
``C + off D3(off)`` and ``D3(off + s r)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

__all__ = ["AFFINE", "Expansion", "Taylor"]

CELLS = (0.0, 0.1, 0.2, 0.32, 0.45, 0.6, 0.8, 1.0)
_UP = 1.0 + 1e-14
_FAR = 1e50
"""Radii from which products would overflow."""


class Expansion(Protocol):
    """How far a map may be from its linearisation."""

    def remainder(self, r: float, off: float = 0.0) -> float:
        """Upper bound of ``|f(Y + D) - f(Y) - J(Y) D|`` for ``|D| <= r``, ``|Y - X| <= off``."""
        ...

    def growth(self, r: float, off: float = 0.0) -> float:
        """Upper bound of ``||J(Y + D) - J(Y)||``."""
        ...


@dataclass(frozen=True, eq=False)
class Taylor:
    """The expansion by C and D3.

    Attributes
    ----------
    second : float
        C.
    third : callable
        ``r -> D3(r)``, increasing.
    """

    second: float
    third: Callable[[float], float]

    def remainder(self, r: float, off: float = 0.0) -> float:
        if not r < _FAR:
            return float("inf")
        return r * r * (0.5 * self._at(off) + r * self._integral(r, off, lambda t: (1.0 - t) ** 3 / 6.0)) * _UP

    def growth(self, r: float, off: float = 0.0) -> float:
        if not r < _FAR:
            return float("inf")
        return r * (self._at(off) + r * self._integral(r, off, lambda t: (1.0 - t) ** 2 / 2.0)) * _UP

    def _at(self, off: float) -> float:
        return self.second + (off * self.third(off) if off > 0.0 else 0.0)

    def _integral(self, r: float, off: float, weight: Callable[[float], float]) -> float:
        """``sum over cells (weight(left) - weight(right)) D3(off + right r)``; the weight is minus its primitive."""
        if r == 0.0:
            return 0.0
        return sum((weight(s) - weight(t)) * self.third(off + t * r) for s, t in pairwise(CELLS))


AFFINE = Taylor(0.0, lambda r: 0.0)
"""The expansion of an affine map."""
