"""Certified maxima by branch and bound: boxes are bounded at their worst corner, the worst boxes are halved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.arithmetic.intervals import lift

CellBound = Callable[[Array, Array], Array | tuple[Array, Array]]

HOPELESS = 0.05
"""A recheck ends when the bound of one point lies this far above its target: smaller boxes would not reach it. Above
3e-3, by which a box may lie below its points where both seek multipliers."""

FINEST = 1e-11
"""Boxes this little above a point are left alone: at a smooth maximum only halves without end would come closer."""


@dataclass(frozen=True)
class Maximum:
    """A maximum over boxes: ``value`` is an upper bound, ``seen`` the largest bound of a single point.

    ``lo, hi (dims,)`` is the box where ``value`` stands, ``cells`` the number of boxes evaluated.
    """

    value: float
    seen: float
    lo: Array
    hi: Array
    cells: int

    def status(self, tol: float) -> str:
        """Whether the search reached the gap that was asked of it."""
        return "closed" if self.value <= self.seen + tol else "cells exhausted"


def ends(lo: Array, hi: Array, exact: bool) -> tuple[Any, Any]:
    """The ends of cells, as intervals in exact arithmetic."""
    return (lift(lo), lift(hi)) if exact else (lo, hi)


def boxes(*axes: Array) -> tuple[Array, Array]:
    """The boxes of a product grid, as ``lo, hi`` of shape ``(dims, count)``."""
    low = np.meshgrid(*[x[:-1] for x in axes], indexing="ij")
    high = np.meshgrid(*[x[1:] for x in axes], indexing="ij")
    return np.array([x.ravel() for x in low]), np.array([x.ravel() for x in high])


def proved_below(
    bound: CellBound, lo: Array, hi: Array, *, target: float, max_cells: int, hopeless: float = HOPELESS
) -> float:
    """``target``, a little raised, when no box exceeds it after splitting; else a larger value that is proved.

    The rise, 2e-12 and the rounding of a large number, lets a recheck that rounds otherwise leave the same boxes alone.
    """
    if not np.isfinite(target):
        raise ValueError(f"the target of a recheck must be finite, received {target!r}.")
    level = target + 2e-12 + 4e-15 * abs(target)
    found = maximise(bound, lo, hi, tol=0.0, max_cells=max_cells, floor=level, ceiling=level + hopeless)
    return max(found.value, level)


def maximise(
    bound: CellBound,
    lo: Array,
    hi: Array,
    *,
    tol: float,
    max_cells: int,
    floor: float = -np.inf,
    ceiling: float = np.inf,
    probe: int = 64,
) -> Maximum:
    """Upper bound of the maximum of ``bound`` over the boxes, within ``tol`` of the best point if cells suffice.

    Parameters
    ----------
    bound : callable
        ``bound(lo, hi) -> (count,)``, an upper bound on each box, ``-inf`` where the box is empty. A degenerate box
        ``lo == hi`` stands for a point. It may return ``(bound, pull)``, ``pull (dims, count)`` the looseness that
        each side is to blame for: the side with the largest is halved (by default the relatively longest).
    lo, hi : ndarray (dims, count)
        Boxes that cover the domain; each later box is a half of an earlier one, so the cover stays.
    tol : float
        Absolute gap at which a box is left alone, at least ``FINEST`` once a point lies above ``floor``.
    max_cells : int
        Evaluations after which the current (valid) bound is returned.
    floor : float
        A value below which the maximum is of no interest: boxes below it are not split.
    ceiling : float
        A value above which it is of no interest: once a point exceeds it, the current (valid) bound is returned.
    probe : int
        Number of leading boxes whose middle is evaluated each round.

    Raises
    ------
    ValueError
        ``bound`` gave a nan: nothing is proved then.
    """
    widths = np.maximum((hi - lo).max(axis=1, keepdims=True), 1e-300)

    def evaluate(lo: Array, hi: Array) -> tuple[Array, Array]:
        found = bound(lo, hi)
        pair = found if isinstance(found, tuple) else (found, (hi - lo) / widths)
        if np.isnan(pair[0]).any():
            raise ValueError("the bound of a box must be a number, received nan; check the multipliers.")
        return pair

    value, pull = evaluate(lo, hi)
    cells = value.size
    seen, settled = floor, -np.inf
    worst_lo, worst_hi = lo[:, 0], hi[:, 0]

    while True:
        alive = value > -np.inf
        lo, hi, value, pull = lo[:, alive], hi[:, alive], value[alive], pull[:, alive]
        if value.size == 0:
            break
        order = np.argsort(value)[::-1]
        lo, hi, value, pull = lo[:, order], hi[:, order], value[order], pull[:, order]
        middle = 0.5 * (lo[:, :probe] + hi[:, :probe])
        points, _ = evaluate(middle, middle)
        seen = max(seen, float(points.max(initial=-np.inf)))
        gap = tol if seen == floor else max(tol, FINEST)
        active = int(np.searchsorted(-value, -(seen + gap), side="left"))
        full = cells >= max_cells or seen > ceiling
        rest = 0 if full else active
        if rest < value.size and value[rest] > settled:
            settled = float(value[rest])
            worst_lo, worst_hi = lo[:, rest], hi[:, rest]
        if rest == 0:
            break
        # best first: when there are too many, the lowest of the active boxes wait unsplit
        take = min(rest, max(1, max_cells // 8))
        wait = slice(take, rest)
        axis = pull[:, :take].argmax(axis=0)
        picked = np.arange(take)
        cut = 0.5 * (lo[axis, picked] + hi[axis, picked])
        low_hi, high_lo = hi[:, :take].copy(), lo[:, :take].copy()
        low_hi[axis, picked] = cut
        high_lo[axis, picked] = cut
        new_lo = np.concatenate([lo[:, :take], high_lo], axis=1)
        new_hi = np.concatenate([low_hi, hi[:, :take]], axis=1)
        # a half is never worse than the whole
        new_value, new_pull = evaluate(new_lo, new_hi)
        new_value = np.minimum(new_value, np.tile(value[:take], 2))
        cells += new_value.size
        lo = np.concatenate([new_lo, lo[:, wait]], axis=1)
        hi = np.concatenate([new_hi, hi[:, wait]], axis=1)
        value = np.concatenate([new_value, value[wait]])
        pull = np.concatenate([new_pull, pull[:, wait]], axis=1)
    return Maximum(settled, seen, worst_lo, worst_hi, cells)
