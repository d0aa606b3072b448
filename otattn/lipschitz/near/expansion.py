r"""What second and third derivatives say of a map f in the ball ``|D| <= r`` around given tokens X.

With ``|D^2 f(X)| <= C`` and ``|D^3 f(X + D)| <= D3(r)``, both as multilinear forms on Frobenius norms (for symmetric forms the
norm is attained on the diagonal, Banach), Taylor's formula gives

- ``|f(X + D) - f(X) - J D| <= C r^2 / 2 + r^3 int_0^1 (1 - s)^2 / 2 D3(s r) ds``;
- ``||J(X + D) - J|| <= C r + r^2 int_0^1 (1 - s) D3(s r) ds``.

D3 increases, so that its value at the right end of each cell of s bounds the integrals: the weight falls off where D3 is
largest, which is most of what these bounds gain over ``D3(r) r^3 / 6``. Around a point within ``off`` of X the same holds with
``C + off D3(off)`` and ``D3(off + s r)``. Without their first terms the two bound what is left after the second order,
``f(X + D) - f(X) - J D - D^2 f[D, D] / 2`` and ``J(X + D) - J - D^2 f[D, .]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

__all__ = ["AFFINE", "Cubic", "Expansion", "Taylor"]

CELLS = 20
"""Cells of the integrals over s."""
COARSE = 1e-2
"""Third-order terms below this share of the second are bounded by one cell."""
_UP = 1.0 + 1e-14
STEADY = 1.02
"""Growth of D3 over the ball up to which one cell bounds what is left after the second order."""
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


class Cubic(Expansion, Protocol):
    """How far it may be from its Taylor polynomial of second order."""

    def curvature(self, off: float = 0.0) -> float:
        """Upper bound of ``|D^2 f(Y)|``, ``|Y - X| <= off``; its excess over ``curvature()`` bounds the change of ``D^2 f``."""
        ...

    def third_remainder(self, r: float, off: float = 0.0) -> float:
        """Upper bound of ``|f(Y + D) - f(Y) - J(Y) D - D^2 f(Y)[D, D] / 2|`` for ``|D| <= r``."""
        ...

    def third_growth(self, r: float, off: float = 0.0) -> float:
        """Upper bound of ``||J(Y + D) - J(Y) - D^2 f(Y)[D, .]||``."""
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
        return r * r * self._sum(r, off, 0.5, lambda t: (1.0 - t) ** 3 / 6.0) if r < _FAR else float("inf")

    def growth(self, r: float, off: float = 0.0) -> float:
        return r * self._sum(r, off, 1.0, lambda t: (1.0 - t) ** 2 / 2.0) if r < _FAR else float("inf")

    def curvature(self, off: float = 0.0) -> float:
        return (self.second + (off * self.third(off) if off > 0.0 else 0.0)) * _UP

    def third_remainder(self, r: float, off: float = 0.0) -> float:
        return r**3 * self._left(r, off, lambda t: (1.0 - t) ** 3 / 6.0) if r < _FAR else float("inf")

    def third_growth(self, r: float, off: float = 0.0) -> float:
        return r**2 * self._left(r, off, lambda t: (1.0 - t) ** 2 / 2.0) if r < _FAR else float("inf")

    def _left(self, r: float, off: float, weight: Callable[[float], float]) -> float:
        """``sum over cells (weight(left) - weight(right)) D3(off + right r)``."""
        last = self.third(off + r)
        if not last > STEADY * self.third(off):
            return weight(0.0) * last * _UP
        ends = [k / CELLS for k in range(CELLS + 1)]
        return sum((weight(s) - weight(t)) * self.third(off + t * r) for s, t in pairwise(ends)) * _UP

    def _sum(self, r: float, off: float, share: float, weight: Callable[[float], float]) -> float:
        """``share C + r sum over cells (weight(left) - weight(right)) D3(off + right r)``."""
        if r == 0.0:
            return 0.0
        second = share * (self.second + (off * self.third(off) if off > 0.0 else 0.0))
        whole = r * weight(0.0) * self.third(off + r)
        if whole > COARSE * second:
            ends = [k / CELLS for k in range(CELLS + 1)]
            whole = r * sum((weight(s) - weight(t)) * self.third(off + t * r) for s, t in pairwise(ends))
        return (second + whole) * _UP


AFFINE = Taylor(0.0, lambda r: 0.0)
"""The expansion of an affine map."""
