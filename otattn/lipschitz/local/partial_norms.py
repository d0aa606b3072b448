"""Top singular triples of the partial products of a chain of derivatives, each started from its neighbour's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.operators import JacobianProduct, TopSingular, top_singular

__all__ = ["PartialNorms"]

Array = NDArray[np.float64]


class PartialNorms:
    """Top singular triples of partial products, each started from its neighbour's."""

    def __init__(self, stages: Sequence[Any], tol: float, max_iter: int, rng: np.random.Generator) -> None:
        self.stages, self.tol, self.max_iter, self.rng = stages, tol, max_iter, rng
        self.tops: dict[tuple[int, int], TopSingular] = {}
        self.products = 0

    def norm(self, a: int, b: int) -> TopSingular:
        """The triple of ``J_{a:b}``."""
        start = self.tops[a, b - 1].right if (a, b - 1) in self.tops else None
        operator = self.stages[a] if a == b else JacobianProduct(self.stages[a : b + 1])
        top = top_singular(operator, tol=self.tol, max_iter=self.max_iter, rng=self.rng, start=start)
        self.products += top.iterations
        self.tops[a, b] = top
        return top

    def table(self, read: Callable[[TopSingular], float]) -> Array:
        S = len(self.stages)
        out = np.full((S, S), np.nan)
        for (a, b), top in self.tops.items():
            out[a, b] = read(top)
        return check.frozen(out)

    def alignment(self) -> Array:
        pairs = [(self.tops[s, s].left, self.tops[s + 1, s + 1].right) for s in range(len(self.stages) - 1)]
        return check.frozen(np.array([abs(float(np.sum(u * v))) for u, v in pairs]))
