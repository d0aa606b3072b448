"""The softmax kernel of one head in tiles: kept when it fits the memory budget, recomputed when not.

A panel is a block of rows; a tile is a panel's part in a block of columns, of about 1 MB, so that it stays in
the cache while a product goes over it. Tiles hold ``E_ij = exp(l_ij - max_j l_ij)``; the normaliser
``Z_i = sum_j E_ij`` is kept a row: then ``P = E / Z`` costs one scaling of the rows of a result, no pass over
the tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["KernelTiles", "Panel", "Tiling"]

Array = NDArray[Any]

PANEL_ROWS = 256
TILE_BYTES = 2**20
FLOOR = -60.0
"""In float32, weights below ``e^-60`` of the largest one of their row count as 0: denormal numbers would
otherwise slow the products down a hundredfold."""


@dataclass(frozen=True)
class Panel:
    """Rows ``start:stop``, which see (some of) the columns up to ``seen``; ``tiles`` are ends of columns."""

    index: int
    start: int
    stop: int
    tiles: tuple[tuple[int, int], ...]

    @property
    def seen(self) -> int:
        """Number of columns that some row of the panel sees."""
        return self.tiles[-1][1]

    def __len__(self) -> int:
        return self.stop - self.start

    def view(self, flat: Array, t: int) -> Array:
        """Tile ``t`` in a flat array in which the tiles lie one after the other."""
        (a, b), rows = self.tiles[t], len(self)
        return flat[rows * a : rows * b].reshape(rows, b - a)


class Tiling:
    """The cut of ``n`` rows and columns into panels and tiles.

    Parameters
    ----------
    n : int
    itemsize : int
        Bytes of a number.
    visible : (n,) int array, optional
        Row i sees the columns ``0:visible[i]``, ascending (a causal mask, atoms sorted by time).
    workers : int
        Each should have a panel.
    max_rows : int
        Largest number of rows of a panel.
    """

    def __init__(
        self,
        n: int,
        itemsize: int,
        *,
        visible: Array | None = None,
        workers: int = 1,
        max_rows: int = PANEL_ROWS,
    ) -> None:
        rows = max(1, min(max_rows, -(-n // workers)))
        columns = max(1, min(n, TILE_BYTES // (itemsize * rows)))
        self.n, self.rows, self.columns, self.visible = n, rows, columns, visible
        panels = []
        for index, start in enumerate(range(0, n, rows)):
            stop = min(n, start + rows)
            seen = n if visible is None else int(visible[stop - 1])
            panels.append(Panel(index, start, stop, tuple(pairwise([*range(0, seen, columns), seen]))))
        self.panels: tuple[Panel, ...] = tuple(panels)

    @property
    def entries(self) -> int:
        """Number of entries in all tiles."""
        return sum(len(p) * p.seen for p in self.panels)

    def share(self, worker: int, workers: int) -> tuple[Panel, ...]:
        """The panels of one worker; interleaved, which also evens out the triangle of a causal mask."""
        return self.panels[worker::workers]

    def hidden(self, panel: Panel, tile: tuple[int, int]) -> NDArray[np.bool_] | None:
        """Which entries of the tile the mask hides (None when it hides none)."""
        if self.visible is None or tile[1] <= self.visible[panel.start]:
            return None
        return np.asarray(np.arange(*tile) >= self.visible[panel.start : panel.stop, None])


class KernelTiles:
    """``E_ij = exp(l_ij - top_i)`` and ``1 / Z_i`` of one head, ``l_ij = <Q_i, K_j> + column_j``.

    Parameters
    ----------
    Q, K : (n, k) arrays
        Queries (scaled) and centred keys, in the dtype of the tiles; referred to, not copied.
    column : (n,) array or None
        Log weights of the atoms, up to a constant.
    tiling : Tiling
    keep : bool
        Store the tiles.
    """

    def __init__(self, Q: Array, K: Array, column: Array | None, tiling: Tiling, *, keep: bool) -> None:
        self.tiling, self.keep, self.dtype = tiling, keep, Q.dtype
        self._Q, self._K = Q, K
        self._column = None if column is None else column.astype(Q.dtype)
        self._top = np.empty((len(Q), 1), Q.dtype)
        self.inverse = np.empty(len(Q), Q.dtype)
        # l_ij spans at most 2 |Q_i| max |K_j| (and the weights' span): when that is small nothing is denormal
        reach = 2.0 * np.sqrt(_largest_square(Q) * _largest_square(K))
        if column is not None:
            reach += float(np.ptp(column))
        self._clip = self.dtype == np.float32 and not reach < -FLOOR
        self._stored: list[list[Array]] = [[] for _ in tiling.panels]

    def prepare(self, panel: Panel, scratch: Array | None) -> list[Array]:
        """Maximum and normaliser of the panel's rows; returns its tiles, in ``scratch`` unless they are kept.

        ``scratch`` is a flat array with room for the panel.
        """
        rows = slice(panel.start, panel.stop)
        if self.keep:
            tiles = [np.empty((len(panel), b - a), self.dtype) for a, b in panel.tiles]
        else:
            assert scratch is not None
            tiles = [panel.view(scratch, t) for t in range(len(panel.tiles))]
        top = np.full((len(panel), 1), -np.inf, self.dtype)
        for tile, S in zip(panel.tiles, tiles, strict=True):
            self._logits(panel, tile, S)
            np.maximum(top, S.max(axis=1, keepdims=True), out=top)
        self._top[rows] = top
        total = np.zeros(len(panel), self.dtype)
        for S in tiles:
            self._exp(S, top)
            total += S.sum(axis=1)
        self.inverse[rows] = 1.0 / total
        if self.keep:
            self._stored[panel.index] = tiles
        return tiles

    def tile(self, panel: Panel, t: int, out: Array | None) -> Array:
        """Tile ``t`` of the panel: the stored one, or computed into ``out`` (of its shape)."""
        if self.keep:
            return self._stored[panel.index][t]
        assert out is not None
        self._logits(panel, panel.tiles[t], out)
        self._exp(out, self._top[panel.start : panel.stop])
        return out

    def _logits(self, panel: Panel, tile: tuple[int, int], out: Array) -> None:
        a, b = tile
        np.matmul(self._Q[panel.start : panel.stop], self._K[a:b].T, out=out)
        if self._column is not None:
            out += self._column[a:b]
        hidden = self.tiling.hidden(panel, tile)
        if hidden is not None:
            out[hidden] = -np.inf

    def _exp(self, S: Array, top: Array) -> None:
        S -= top
        if not self._clip:
            np.exp(S, out=S)
            return
        # exp(max(S, FLOOR)) - exp(FLOOR): exactly 0 at and below the floor, a change of e^-60 above it
        np.maximum(S, self.dtype.type(FLOOR), out=S)
        np.exp(S, out=S)
        S -= np.exp(np.full(64, FLOOR, self.dtype))[0]


def _largest_square(rows: Array) -> float:
    return float(np.einsum("ij,ij->i", rows, rows, dtype=np.float64).max())
