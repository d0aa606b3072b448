"""Atoms whose points are enclosed, what a map is evaluated on with a proven error, and sums over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.memory import blocks
from otattn.stability import functions
from otattn.stability.enclosed import UNIT, Enclosed, append_columns

__all__ = [
    "IMAGES",
    "Atoms",
    "Rule",
    "column",
    "columns",
    "image_of",
    "linear",
    "shifted",
    "softmax_rows",
    "stack",
    "total",
    "weighted",
]


@dataclass(frozen=True, eq=False)
class Atoms:
    """Atoms of positive weight, their points enclosed; ``times`` is None where the measure has none."""

    points: Enclosed
    weights: Array
    times: Array | None
    masked: bool = False

    @classmethod
    def of(cls, mu: Measure, *, fine: bool) -> Atoms:
        live = mu.weights > 0
        times = getattr(mu, "times", None)
        return cls(Enclosed.exact(mu.points[live], fine=fine), mu.weights[live], None if times is None else times[live])

    @property
    def uniform(self) -> bool:
        return bool((self.weights == self.weights[0]).all())

    def hidden(self, rows: slice) -> NDArray[np.bool_] | None:
        """The atoms that are later than each row, under a mask."""
        if not self.masked or self.times is None:
            return None
        return np.asarray(self.times[None, :] > self.times[rows, None])


Rule = Callable[[Any, Atoms], Enclosed | None]

IMAGES: dict[type[AttentionMap], Rule] = {}
"""The rule of each map (:mod:`otattn.stability.images` fills it)."""


def image_of(attention: AttentionMap, atoms: Atoms) -> Enclosed | None:
    """The image under the rule of the map's exact type; None without one."""
    rule = IMAGES.get(type(attention))
    return None if rule is None else rule(attention, atoms)


def stack(parts: list[Enclosed]) -> Enclosed:
    low = None if parts[0].low is None else np.concatenate([part.low for part in parts])
    return Enclosed(np.concatenate([part.high for part in parts]), low, np.concatenate([part.radius for part in parts]))


def linear(x: Enclosed, W: Array) -> Enclosed:
    """``x W^T``; nothing to do for the identity."""
    square = W.shape[0] == W.shape[1]
    return x if square and np.array_equal(W, np.eye(len(W))) else x @ W.T


def column(c: Array, like: Enclosed) -> Enclosed:
    return Enclosed.exact(c[None, :], fine=like.fine)


def shifted(x: Enclosed, c: Array | None) -> Enclosed:
    return x if c is None else x + c


def weighted(E: Enclosed, atoms: Atoms, rows: slice) -> Enclosed:
    """``w_j E_ij``, 0 where the mask hides the atom."""
    hidden = atoms.hidden(rows)
    out = E if atoms.uniform else E * atoms.weights
    return out if hidden is None else out.where(~hidden)


def softmax_rows(logits: Callable[[slice], Enclosed], values: Enclosed, atoms: Atoms) -> Enclosed:
    """``sum_j w_j e^{l_ij} v_j / sum_j w_j e^{l_ij}``; any number may be taken from a row of logits."""
    m, e = values.shape
    with_mass = append_columns(values, np.ones((m, 1)))
    parts = []
    for rows in blocks(m, m, None, 12):
        S, hidden = logits(rows), atoms.hidden(rows)
        seen = S.high if hidden is None else np.where(hidden, -np.inf, S.high)
        E = functions.exp(S - seen.max(axis=1, keepdims=True))
        sums = weighted(E, atoms, rows) @ with_mass
        parts.append(sums[:, :e] / sums[:, e:])
    return stack(parts)


def total(atoms: Atoms) -> Enclosed:
    """The sum of the weights, of ones where they are equal."""
    w, fine = np.ones(len(atoms.weights)) if atoms.uniform else atoms.weights, atoms.points.fine
    high = math.fsum(w)
    low = math.fsum([*w, -high])
    # both sums are rounded correctly
    return Enclosed(np.array(high), np.array(low) if fine else None, np.array(abs(low) * (UNIT if fine else 1.0)))


def columns(parts: list[Enclosed]) -> Enclosed:
    return stack([part.T for part in parts]).T
