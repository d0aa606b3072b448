"""The products of a fused Jacobian in one work dtype: buffers, row blocks, threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.attention import memory as attention_memory
from otattn.operators import threads
from otattn.operators.layer import Factor, HeadSlices, Mixing, SoftmaxLayer
from otattn.operators.streaming import PANEL_ROWS, KernelTiles, Panel, Tiling

__all__ = ["HeadProducts"]

Array = NDArray[Any]

THREADED_FROM = 512
"""Fewest tokens for which threads over panels pay."""


FEW_ROWS = 128
"""Panels of fewer rows slow the products down; more are taken only where memory is ample."""


@dataclass(frozen=True, eq=False)
class _Head:
    """One head at the measure; ``dQ``, ``dK`` and ``dV`` are the current direction."""

    where: HeadSlices
    left: Array
    """``[dQ | Q]``, ``(n, 2k)``."""
    right: Array
    """``[K | dK]``, ``(n, 2k)``."""
    dV: Array
    V: Array
    """``(n, e + 1)``, the last column 1: it takes ``<g, O>`` through a matrix product."""
    O: Array
    tiles: KernelTiles


@dataclass(frozen=True, eq=False)
class _Workspace:
    """The buffers of one thread: a tile, panels of recomputed tiles, a block of cotangents, adjoint sums."""

    T: Array
    panels: list[Array]
    g: Array
    sums: list[tuple[Array, Array]]
    """``(K-bar, V-bar)`` of each head, contiguous (adding into columns of one wide array is several times slower)."""


class HeadProducts:
    """``J``, ``J^T`` and ``J^T J`` of a layer in L^2(mu), in units of the layer's scale.

    Not to be called from two threads at once: the buffers are shared between calls.
    """

    def __init__(self, layer: SoftmaxLayer, dtype: np.dtype[Any], memory: int | None, workers: int | None) -> None:
        self.layer, self.dtype = layer, dtype
        n, heads = layer.n, len(layer.heads)
        automatic = threads.blas_threads() if n >= THREADED_FROM else 1
        self.workers = max(1, min(automatic if workers is None else workers, n))
        budget = attention_memory.MEMORY_BUDGET if memory is None else memory
        keep, slots = self._cut(budget)
        self.stored = keep
        self.root = None if layer.root is None else layer.root.astype(dtype)
        self.stack = Factor(layer.stacked(dtype), n)
        self.outputs = None if layer.outputs is None else Factor(layer.outputs.astype(dtype), n)
        self.mixing: Mixing | None = None
        rows, columns = self.tiling.rows, self.tiling.columns
        self.ones = np.ones(columns, dtype)
        self.spaces = [
            _Workspace(
                T=np.empty(rows * columns, dtype),
                panels=[np.empty(rows * n, dtype) for _ in range(slots)],
                g=np.empty((rows, max(h.e for h in layer.heads) + 1), dtype),
                sums=[(np.empty((n, h.k), dtype), np.empty((n, h.e), dtype)) for h in layer.heads],
            )
            for _ in range(self.workers)
        ]
        # of all heads side by side: the projected direction, then the adjoint sums
        self.wide = np.empty((n, layer.width), dtype) if heads > 1 else None
        self.heads = [self._head(h, keep) for h in range(heads)]
        threads.run(self._prepare, self.workers)

    def _cut(self, budget: int) -> tuple[bool, int]:
        """Chooses the tiling: whether all tiles are kept, and how many panels a thread keeps otherwise."""
        layer, itemsize, heads = self.layer, self.dtype.itemsize, len(self.layer.heads)
        n, visible = layer.n, layer.visible
        self.tiling = Tiling(n, itemsize, visible=visible, workers=self.workers)
        if heads * self.tiling.entries * itemsize <= budget:
            return True, 0
        # where the outputs couple the heads, J^T J comes back to the panels of all of them: kept if they fit
        room = budget // (4 * itemsize * n * self.workers)
        slots = heads if layer.coupled and room >= FEW_ROWS * heads else 1
        rows = max(16, min(PANEL_ROWS, max(room // (4 * slots), min(FEW_ROWS, room // slots))))
        self.tiling = Tiling(n, itemsize, visible=visible, workers=self.workers, max_rows=rows)
        return False, slots

    def _head(self, h: int, keep: bool) -> _Head:
        layer, n, where = self.layer, self.layer.n, self.layer.heads[h]
        k, e = where.k, where.e
        left, right = np.empty((n, 2 * k), self.dtype), np.empty((n, 2 * k), self.dtype)
        values = np.ones((n, e + 1), self.dtype)
        left[:, k:] = layer.queries(h)
        right[:, :k] = layer.keys(h)
        values[:, :e] = layer.values(h)
        tiles = KernelTiles(left[:, k:], right[:, :k], layer.column, self.tiling, keep=keep)
        dV, O = np.empty((n, e), self.dtype), np.empty((n, e), self.dtype)
        return _Head(where, left, right, dV, values, O, tiles)

    def _prepare(self, worker: int) -> None:
        space = self.spaces[worker]
        scratch = space.panels[0] if space.panels else None
        for head in self.heads:
            for panel in self.tiling.share(worker, self.workers):
                tiles = head.tiles.prepare(panel, scratch)
                O = head.O[panel.start : panel.stop]
                O[...] = 0.0
                for (a, b), E in zip(panel.tiles, tiles, strict=True):
                    O += E @ head.V[a:b, : head.where.e]
                O *= head.tiles.inverse[panel.start : panel.stop, None]

    def jvp(self, x: Array) -> Array:
        """``J x`` for ``(n, d)``."""
        self._project(x)
        out = np.empty((self.layer.n, self.layer.value_width), self.dtype)

        def work(w: int) -> None:
            for panel in self.tiling.share(w, self.workers):
                for h, head in enumerate(self.heads):
                    self._forward(self.spaces[w], h, panel, out[panel.start : panel.stop, head.where.values])

        threads.run(work, self.workers)
        y = out if self.outputs is None else self.outputs.forward(out)
        return y if self.root is None else y * self.root

    def vjp(self, g: Array) -> Array:
        """``J^T g`` for ``(n, e)``."""
        if self.root is not None:
            g = g * self.root
        cotangent = g if self.outputs is None else self.outputs.back(g)

        def work(w: int) -> None:
            self._clear(w)
            for panel in self.tiling.share(w, self.workers):
                for h, head in enumerate(self.heads):
                    part = cotangent[panel.start : panel.stop, head.where.values]
                    self._backward(self.spaces[w], h, panel, part, fresh=True)

        threads.run(work, self.workers)
        return self._collect()

    def gram(self, x: Array) -> Array:
        """``J^T J x`` for ``(n, d)``."""
        if self.mixing is None:
            self.mixing = Mixing(self.layer, self.outputs)
        mixing, every = self.mixing, range(len(self.heads))
        # heads that the outputs do not couple go one after the other: the tile is still in the cache
        groups = [every] if self.layer.coupled else [range(h, h + 1) for h in every]
        self._project(x)

        def work(w: int) -> None:
            space = self.spaces[w]
            self._clear(w)
            out = np.empty((self.tiling.rows, self.layer.value_width), self.dtype)
            for panel in self.tiling.share(w, self.workers):
                o = out[: len(panel)]
                for group in groups:
                    for h in group:
                        self._forward(space, h, panel, o[:, self.heads[h].where.values])
                    for h, g in mixing(o, group):
                        if self.root is not None:
                            g = g * self.root[panel.start : panel.stop] ** 2
                        self._backward(space, h, panel, g, fresh=len(group) > len(space.panels))

        threads.run(work, self.workers)
        return self._collect()

    def _project(self, x: Array) -> None:
        """``[dQ | dK | dV]`` of all heads in one product, then laid beside Q and K."""
        if self.root is not None:
            x = x / self.root
        if self.wide is None:  # one head: straight to their places
            head, (q, key, v), W = self.heads[0], self.heads[0].where.parts, self.stack.W
            np.matmul(x, W[q].T, out=head.left[:, : head.where.k])
            np.matmul(x, W[key].T, out=head.right[:, head.where.k :])
            np.matmul(x, W[v].T, out=head.dV)
            return
        Y = self.stack.forward(x, out=self.wide)
        for head in self.heads:
            (q, key, v), k = head.where.parts, head.where.k
            head.left[:, :k], head.right[:, k:], head.dV[...] = Y[:, q], Y[:, key], Y[:, v]

    def _clear(self, worker: int) -> None:
        for K, V in self.spaces[worker].sums:
            K[...] = 0.0
            V[...] = 0.0

    def _collect(self) -> Array:
        """Adds up the threads' adjoint sums and goes back through the projections."""
        first, others = self.spaces[0].sums, self.spaces[1:]
        for h, (K, V) in enumerate(first):
            for space in others:
                K += space.sums[h][0]
                V += space.sums[h][1]
        if self.wide is None:
            head, (q, key, v), W = self.heads[0], self.heads[0].where.parts, self.stack.W
            y = head.left[:, : head.where.k] @ W[q]
            y += first[0][0] @ W[key]
            y += first[0][1] @ W[v]
        else:
            for head, (K, V) in zip(self.heads, first, strict=True):
                q, key, v = head.where.parts
                self.wide[:, q], self.wide[:, key], self.wide[:, v] = head.left[:, : head.where.k], K, V
            y = self.stack.back(self.wide)
        return y if self.root is None else y / self.root

    def _tile(self, space: _Workspace, h: int, panel: Panel, t: int, *, fresh: bool) -> Array:
        """Tile ``t`` of head h; recomputed unless it is stored or (not ``fresh``) left by the pass before."""
        tiles = self.heads[h].tiles
        if tiles.keep:
            return tiles.tile(panel, t, None)
        view = panel.view(space.panels[h if len(space.panels) > 1 else 0], t)
        return tiles.tile(panel, t, view) if fresh else view

    def _forward(self, space: _Workspace, h: int, panel: Panel, out: Array) -> None:
        """``do`` of the panel's rows."""
        head, rows = self.heads[h], slice(panel.start, panel.stop)
        left, e = head.left[rows], head.where.e
        y, r = np.zeros((len(panel), e), self.dtype), np.zeros(len(panel), self.dtype)
        for t, (a, b) in enumerate(panel.tiles):
            E = self._tile(space, h, panel, t, fresh=True)
            T = space.T[: E.size].reshape(E.shape)
            np.matmul(left, head.right[a:b].T, out=T)
            T *= E
            r += T @ self.ones[: b - a]
            y += T @ head.V[a:b, :e]
            y += E @ head.dV[a:b]
        y -= r[:, None] * head.O[rows]
        np.multiply(y, head.tiles.inverse[rows, None], out=out)

    def _backward(self, space: _Workspace, h: int, panel: Panel, cotangent: Array, *, fresh: bool) -> None:
        """Adds what the panel's rows give to the adjoint sums; Q-bar takes the place of dQ, now done with."""
        head, rows = self.heads[h], slice(panel.start, panel.stop)
        k, e, (K, V) = head.where.k, head.where.e, space.sums[h]
        Q, dQ, g = head.left[rows, k:], np.zeros((len(panel), k), self.dtype), space.g[: len(panel), : e + 1]
        values = cotangent * head.tiles.inverse[rows, None]
        g[:, :e] = values
        g[:, e] = -np.einsum("ij,ij->i", values, head.O[rows])
        for t, (a, b) in enumerate(panel.tiles):
            E = self._tile(space, h, panel, t, fresh=fresh)
            T = space.T[: E.size].reshape(E.shape)
            np.matmul(g, head.V[a:b].T, out=T)
            T *= E
            dQ += T @ head.right[a:b, :k]
            K[a:b] += T.T @ Q
            V[a:b] += E.T @ values
        head.left[rows, :k] = dQ
