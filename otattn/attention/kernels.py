"""Normalised interactions (softmax, L2, Sinkhorn), evaluated in row blocks.

The logits are ``l(x, y) = <q(x), k(y)> + beta(y)`` with ``q(x) = W_q x + b_q`` and ``k(y) = W_k y`` in head
space (k columns), so no d x d product is formed. Atoms are weighed by ``P_ij`` proportional to ``w_j exp
l_ij``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from otattn._linalg import Array, cloud_centre
from otattn.attention.memory import blocks

__all__ = ["Kernel", "Mass", "NormalisedKernel", "Projections", "Values"]

_WIDE = 1e3
"""Squared key norm above which L2 logits come from differences: expanded squares would lose 1e-13 or more."""


Mass = Literal["one", "at most one", "any"]
"""The total weight that a token gives to the atoms."""


class Values(NamedTuple):
    """A term of a map: the average of ``V y + bias`` with the weights that a token gives to the atoms y."""

    V: Array
    bias: Array | None
    mass: Mass


@dataclass(frozen=True, eq=False)
class Projections:
    """The affine maps of one head: ``q = W_q x + b_q``, ``k = W_k y``, values ``V y + b_v``.

    ``quadratic`` adds ``-|k(y)|^2`` to the logit (with ``q = 2 Q x``, ``k = K y``: L2 attention). ``centred``
    measures the queries from the centre of the measure (Sinkhorn attention, whose potentials absorb the
    difference).
    """

    Wq: Array
    Wk: Array
    V: Array
    bq: Array | None = None
    bv: Array | None = None
    quadratic: bool = False
    centred: bool = False

    @property
    def d(self) -> int:
        return int(self.V.shape[1])

    @property
    def e(self) -> int:
        return int(self.V.shape[0])


class Kernel:
    """The atoms of one head with their times, shared by the normalised and the pointwise kind."""

    def __init__(
        self, head: Projections, y: Array, weights: Array, times: Array | None, block_size: int | None
    ) -> None:
        self.head, self.y, self.weights, self.times, self.block_size = head, y, weights, times, block_size
        self.n = len(y)

    def hidden(self, times: Array | None, rows: slice) -> NDArray[np.bool_] | None:
        """Which (row, atom) pairs the mask hides: atoms later than the row."""
        if times is None:
            return None
        assert self.times is not None
        return np.asarray(self.times[None, :] > times[rows, None])

    def field_blocks(self, m: int) -> Iterator[slice]:
        """Row blocks for arrays with all values and keys of each row."""
        return blocks(m, self.n, self.block_size, self.head.e + self.head.Wk.shape[0] + 2)


class NormalisedKernel(Kernel):
    """``P_ij = w_j exp(l_ij + offset_j) / sum`` over the atoms that row i sees.

    Keys, values and (where the logits allow it) queries are measured from a centre of the cloud: the softmax
    does not see it, and it removes the cancellation of clouds far from the origin. Atoms of zero weight have
    ``P_ij = 0`` whatever their logits. Only a row that sees no other atom (a masked token of zero weight that
    comes first) sees them, all alike: the limit of giving every one of them the same vanishing weight.
    """

    def __init__(
        self,
        head: Projections,
        y: Array,
        weights: Array,
        *,
        times: Array | None = None,
        offset: Array | None = None,
        block_size: int | None = None,
    ) -> None:
        super().__init__(head, y, weights, times, block_size)
        live = weights > 0
        self.dead: NDArray[np.intp] | None = None if live.all() else np.flatnonzero(~live)
        self.centre = _centre(y, weights, times)
        # differences first, products after: no digits are lost for clouds far from the origin
        with np.errstate(over="ignore", invalid="ignore"):  # values beyond float64 are refused where they come out
            self.K = (y - self.centre) @ head.Wk.T
            self.Vy = (y - self.centre) @ head.V.T
            self.squares = np.sum(self.K**2, axis=1) if head.quadratic else None
        wide = float(self.squares[live].max()) if self.squares is not None else 0.0
        self.reach = 4.0 * wide if wide > _WIDE else None
        with np.errstate(divide="ignore"):
            self.mass = np.log(weights)
        if offset is not None:
            self.mass = self.mass + offset

    def queries(self, x: Array) -> Array:
        """``q(x)``, in the frame of the centred keys."""
        head = self.head
        if not (head.centred or head.quadratic):
            # W_q x itself: a centre far from x would take its digits
            q = x @ head.Wq.T
            return q if head.bq is None else q + head.bq
        q = (x - self.centre) @ head.Wq.T
        return q if head.centred else np.asarray(q + (head.Wq - 2.0 * head.Wk) @ self.centre)

    def _logits(self, Q: Array, mass: Array | None) -> Array:
        """Logits of the queries Q plus ``mass``, up to a term constant in each row."""
        with np.errstate(over="ignore", invalid="ignore"):
            S = Q @ self.K.T
            if self.squares is not None:
                S -= self.squares
        if self.reach is not None:
            # squared distances from differences, unless the query is far beyond the keys (then the product is
            # better)
            half = 0.5 * Q
            with np.errstate(over="ignore"):
                near = np.sum(half**2, axis=1) <= self.reach
            if near.any():
                S[near] = -cdist(half[near], self.K, "sqeuclidean")
        if mass is not None:
            S += mass
            if self.dead is not None:
                S[:, self.dead] = -np.inf
        return S

    def weights_of(self, Q: Array, times: Array | None, rows: slice) -> Array:
        """The block ``P[rows]`` for queries Q."""
        S = self._logits(Q[rows], self.mass)
        hidden = self.hidden(times, rows)
        if hidden is not None:
            S[hidden] = -np.inf
        top = S.max(axis=1, keepdims=True)
        if hidden is not None and np.isneginf(top).any():
            blind = np.isneginf(top[:, 0])
            S[blind] = self._weightless(Q[rows][blind], hidden[blind])
            top[blind] = S[blind].max(axis=1, keepdims=True)
        if not np.isfinite(top).all():
            raise OverflowError(
                "the logits <A x, y> are not representable in float64; scale A or the tokens (atoms of zero "
                "weight included) down."
            )
        S -= top
        np.exp(S, out=S)
        S /= S.sum(axis=1, keepdims=True)
        return S

    def _weightless(self, Q: Array, hidden: NDArray[np.bool_]) -> Array:
        """Logits of rows that see no mass: over the atoms of zero weight that they see."""
        if hidden.all(axis=1).any():
            raise ValueError("every row must see an atom, received a row earlier than all atoms; give it a later time.")
        S = self._logits(Q, None)
        S[hidden] = -np.inf
        return S

    def log_normaliser(self, x: Array) -> Array:
        """``log sum_j w_j exp(l(x_i, y_j) + offset_j)``, in the frame of ``centre``."""
        Q = self.queries(x)
        out = np.empty(len(x))
        for rows in blocks(len(x), self.n, self.block_size):
            S = self._logits(Q[rows], self.mass)
            top = S.max(axis=1)
            out[rows] = top + np.log(np.exp(S - top[:, None]).sum(axis=1))
        return out

    def apply(self, x: Array, times: Array | None) -> Array:
        """``Gamma`` at the rows of x."""
        Q = self.queries(x)
        out = np.empty((len(x), self.head.e))
        for rows in blocks(len(x), self.n, self.block_size):
            out[rows] = self.weights_of(Q, times, rows) @ self.Vy
        out += self.head.V @ self.centre
        return out if self.head.bv is None else out + self.head.bv

    def field(self, x: Array, times: Array | None) -> Array:
        """``D_x Gamma``: ``sum_j P_ij (v_j - o_i) (k_j - kbar_i)^T W_q``, centred row by row."""
        Q = self.queries(x)
        out = np.empty((len(x), self.head.e, self.head.d))
        for rows in self.field_blocks(len(x)):
            P = self.weights_of(Q, times, rows)
            out[rows] = self.covariance(P) @ self.head.Wq
        return out

    def covariance(self, P: Array) -> Array:
        """``sum_j P_ij (v_j - o_i)(k_j - kbar_i)^T`` for each row, ``(m, e, k)``."""
        dv = self.Vy[None] - (P @ self.Vy)[:, None]
        dv *= P[:, :, None]
        dk = self.K[None] - (P @ self.K)[:, None]
        return np.asarray(np.swapaxes(dv, 1, 2) @ dk)


def _centre(y: Array, weights: Array, times: Array | None) -> Array:
    """A centre of the atoms; of the earliest ones for a mask: no row may feel later atoms by rounding."""
    live = weights > 0
    if times is not None:
        live &= times == times[live].min()
    w = weights[live] / weights[live].max()  # the earliest atoms may weigh next to nothing together
    return cloud_centre(y[live], w / w.sum())
