"""A search for the multipliers of :mod:`otattn.lipschitz.forms.frontier_rows`: in floats, and nothing here is trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.forms.vertex_rows import Cells, VertexRows, choices

_FLOORS = (
    np.array([0.0, 0.2, 0.5, 0.8, 1.25, 1.9, 3.0]),
    np.array([0.0, 0.1, 0.2, 0.35, 0.5, 0.7, 0.95, 1.25, 1.7, 2.4, 3.5]),
)
"""Values below which lambda does not fall, tried in turn: the vertices with the own token may want a larger one. Few on few
directions, more on many."""
_COARSE = 16
_RADII = 0.0, 0.1, 0.2, 0.35, 0.55, 0.8
LEVELS = np.append(0.0, np.geomspace(0.02, 15.0, 64))
"""The values of lambda."""


class Plan(NamedTuple):
    """``choice, radii, level`` for each direction and cell, and the bound of the row with them."""

    choice: Array
    radii: Array
    level: Array
    bound: Array


def _best(rows: VertexRows, candidates: Iterable[tuple[Array, Array]], floors: Array) -> Plan:
    """The best of pairs ``(choice, radii)``, each with the best lambda."""
    shape = (len(rows.e), rows.cells.gamma[0].size)
    best = Plan(np.zeros(shape, dtype=int), np.zeros(shape), np.zeros(shape, dtype=int), np.full(shape, np.inf))
    down = np.arange(shape[0])[:, None]
    for choice, r in candidates:
        need, value = rows.cells.vertices(rows.e, rows.s, choice, r)
        least = np.searchsorted(rows.levels, need * (1.0 + 1e-12))
        for floor in np.searchsorted(rows.levels, floors).tolist():
            level = np.minimum(np.maximum(least, floor), rows.levels.size - 1)
            lam = rows.levels[level]
            bound = np.maximum(value, rows.paired[down, level]) + lam * rows.cells.tau
            better = (need <= lam) & (bound < best.bound)
            for kept, new in zip(best, (choice, r, level, bound), strict=True):
                np.copyto(kept, new, where=better)
    return best._replace(bound=np.minimum(best.bound, rows.cells.apart(rows.e, rows.s)))


def _everything(rows: VertexRows) -> Iterable[tuple[Array, Array]]:
    shape, cells = (len(rows.e), rows.cells.gamma[0].size), rows.cells
    for option, (tied, form, _) in enumerate(choices()):
        gain = (cells.beta[int(tied)] < 0.99) + (cells.sigma[int(form)] < 0.99 * cells.sigma[0])
        if option and not gain.any():
            continue  # no better than plain, and dearer
        for r in _RADII if (cells.c > 0.0).any() else (0.0,):
            yield np.full(shape, option), np.full(shape, r)


def refined(
    build: Callable[[Array], Cells], rows: Callable[[Cells, Array], VertexRows], width: float
) -> tuple[Array, Plan]:
    """Edges of the cells of gamma, halved where a row's bound stands until they are this narrow, and a plan on few directions."""
    edges, angles = np.linspace(0.0, 1.0, 17), np.linspace(0.0, math.pi / 2, _COARSE + 1)
    known: dict[tuple[float, float], tuple[Array, ...]] = {}
    while True:
        cells = build(edges)
        spans = list(zip(*(x.tolist() for x in cells.gamma), strict=True))
        new = np.array([k for k, span in enumerate(spans) if span not in known], dtype=int)
        if new.size:
            part = rows(cells.select(new), angles)
            found = _best(part, _everything(part), _FLOORS[0])
            known.update({spans[k]: tuple(x[:, j] for x in found) for j, k in enumerate(new.tolist())})
        plan = Plan(*(np.stack(x, axis=1) for x in zip(*(known[span] for span in spans), strict=True)))
        near = plan.bound >= 0.998 * plan.bound.max(axis=1, keepdims=True)
        split = [0.5 * (a + b) for (a, b), at in zip(spans, near.any(axis=0), strict=True) if at and b - a > width]
        if not split:
            return edges, plan
        edges = np.union1d(edges, split)


def finer(rows: VertexRows, coarse: Plan) -> Plan:
    """A plan on many directions from that on few: the choices of the two nearest, radii near theirs."""
    place = (np.arange(len(rows.e)) + 0.5) / len(rows.e) * _COARSE - 0.5
    low = np.clip(np.floor(place), 0, _COARSE - 1).astype(int)
    pairs = [
        (coarse.choice[at], np.clip(coarse.radii[at] + step, 0.0, 1.0))
        for at in (low, np.minimum(low + 1, _COARSE - 1))
        for step in (0.0, 0.05, -0.05)
    ]
    return _best(rows, pairs, _FLOORS[1])
