r"""Softmax heads at given tokens, enclosed: the numbers of :mod:`~otattn.lipschitz.near.head`, each within an interval.

Logits, weights, means, values, keys and queries are balls of 192 bits, in which the floats of the map and of the tokens enter
exactly, whatever cancels; each is then rounded outward to an interval of float64. Tokens are measured from their mean: values
and keys change by constants, which their means under a row take away, and the logits of a row by a constant, which softmax takes
away.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import spectral_norm_upper
from otattn.attention.head import Head, heads_of
from otattn.lipschitz.arithmetic.balls import BALLS, BallMatrix
from otattn.lipschitz.arithmetic.intervals import Interval, lift, upper

__all__ = ["EnclosedHead", "enclosed_heads", "matmul", "norms"]


@dataclass(frozen=True, eq=False)
class EnclosedHead:
    """The head ``W V`` at n tokens, in intervals: ``P (n, n)``, values ``(n, e)``, keys ``(n, d)``, their means under the rows,
    the gradients ``g (n, d)``, ``V (e, d)``, the form ``A (d, d)``, and ``W (D, e)``, None for the identity.
    """

    P: Any
    values: Any
    value_means: Any
    keys: Any
    key_means: Any
    g: Any
    V: Any
    A: Any
    W: Any | None

    @property
    def n(self) -> int:
        return int(self.P.shape[0])

    @property
    def e(self) -> int:
        return int(self.V.shape[0])

    @cached_property
    def y(self) -> Any:
        """Values from their mean under row i, ``(n, n, e)``."""
        return self.values[None] - self.value_means[:, None]

    def k(self, i: int) -> Any:
        """Keys from their mean under row i, ``(n, d)``."""
        return self.keys - self.key_means[i]

    @cached_property
    def weighted(self) -> Any:
        """``P_ij y_ij``, as ``(n_i, e, n_j)``."""
        return np.swapaxes(self.P[:, :, None] * self.y, 1, 2)

    @cached_property
    def field(self) -> Any:
        """``F_i = sum_j P_ij y_ij k_ij^T``, ``(n, e, d)``."""
        return np.stack([matmul(self.weighted[i], self.k(i)) for i in range(self.n)])

    @cached_property
    def G(self) -> Any:
        """``|g_i|``."""
        return norms(self.g)

    @cached_property
    def Y(self) -> Any:
        """``|y_ij|``."""
        return norms(self.y)

    @cached_property
    def K(self) -> Any:
        """``|k_ij|``."""
        return np.stack([norms(self.k(i)) for i in range(self.n)])

    def spreads(self) -> tuple[Any, Any]:
        """Upper bounds of the largest standard deviations of values and keys under the rows, ``(n,)`` each."""
        out = []
        for i in range(self.n):
            root = np.sqrt(self.P[i])[:, None]
            out.append([float(upper(spectral_norm_upper(root * x))) for x in (self.y[i], self.k(i))])
        values, keys = np.array(out).T
        return lift(values), lift(keys)

    @cached_property
    def a(self) -> float:
        """An upper bound of ``||A||``."""
        return float(upper(spectral_norm_upper(self.A)))

    @cached_property
    def v(self) -> float:
        """An upper bound of ``||V||``."""
        return float(upper(spectral_norm_upper(self.V)))

    @cached_property
    def size_W(self) -> Any:
        """``|W|_F``, 1 where there is none."""
        return 1.0 if self.W is None else norms(self.W.ravel())

    @cached_property
    def norm_W(self) -> float:
        """An upper bound of ``||W||``."""
        return 1.0 if self.W is None else float(upper(spectral_norm_upper(self.W)))


def norms(x: Any) -> Any:
    """Euclidean norms over the last axis."""
    return np.sqrt((x**2).sum(axis=-1))


def matmul(a: Any, b: Any) -> Any:
    """The product; exactly 0 where a factor is."""
    if not (np.any(upper(np.abs(a))) and np.any(upper(np.abs(b)))):
        return Interval.exact(np.zeros(np.matmul(upper(a), upper(b)).shape))
    return np.matmul(a, b)


def enclosed_heads(attention: Any, tokens: Any) -> list[EnclosedHead]:
    """The heads of a map, whose sum it is, at tokens ``(n, d)``: floats, or balls."""
    X = BallMatrix.exact(tokens)
    n = len(X)
    average = BallMatrix.exact(np.ones((n, n))) @ X / float(n)
    return [_enclosed(head, X, X - average) for head in heads_of(attention, arithmetic=BALLS)]


def _enclosed(head: Head, X: BallMatrix, y: BallMatrix) -> EnclosedHead:
    ones = BallMatrix.exact(np.ones((len(X), 1)))
    g = X @ head.A.T + ones @ head.c.column().T
    P = _softmax(g @ y.T, head.causal)
    values, keys = y @ head.V.T, y @ head.A
    return EnclosedHead(
        P.interval().clip(0.0, 1.0),
        values.interval(),
        (P @ values).interval(),
        keys.interval(),
        (P @ keys).interval(),
        g.interval(),
        head.V.interval(),
        head.A.interval(),
        None if head.output is None else head.output.interval(),
    )


def _softmax(logits: BallMatrix, causal: bool) -> BallMatrix:
    """The weights of the rows; a hidden token has weight 0."""
    rows = []
    for i, row in enumerate(logits.balls.tolist()):
        seen = row[: i + 1] if causal else row
        top = max(seen, key=float)
        grown = [(x - top).exp() for x in seen]
        total = sum(grown)
        rows.append([x / total for x in grown] + [x * 0 for x in row[len(seen) :]])
    return BallMatrix(type(logits.balls)(rows))
