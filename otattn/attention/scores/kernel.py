"""The weights of attention with composed logits, in row blocks, and the derivative at the measure's own atoms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array, cloud_centre
from otattn.attention import memory
from otattn.attention.base import Measure
from otattn.attention.jacobian import JacobianOperator
from otattn.attention.memory import blocks
from otattn.attention.single_head import _apply_softmax_derivative
from otattn.attention.tokenwise import TokenwiseMap

if TYPE_CHECKING:
    from otattn.attention.scores.attention import ScoreAttention

__all__ = ["ScoreJacobian", "ScoreKernel"]

Product = Callable[[Array], Array]
FLAT = 350.0
"""Beyond this many caps the slope of the cap is below the smallest float; clipped so that the square does not overflow."""


class Rows(NamedTuple):
    """A block of rows: weights ``(m, n)`` (one more column for a sink) and the slopes of the cap, None without one."""

    P: Array
    slope: Array | None


class ScoreKernel:
    """The keys and values of the atoms, once; queries block by block.

    A sink is one more atom, the last, with key zero: its logit is the sink's, whatever the query. Values are measured from a
    centre of the cloud where they are linear, and the sink's value is the origin, from there.
    """

    def __init__(self, map: ScoreAttention, mu: Measure, block_size: int | None) -> None:
        self.map, self.y, self.weights, self.block_size = map, mu.points, mu.weights, block_size
        self.n = len(self.y)
        self.places = map.positions(getattr(mu, "times", None) if map.causal else None, mu)
        live = self.weights > 0
        self.dead: NDArray[np.intp] | None = None if live.all() else np.flatnonzero(~live)
        with np.errstate(over="ignore", invalid="ignore"):
            self.keys = self._placed(map.K, map.key_bias, map.key_norm, self.y, self.places)
            self.values, self.shift = self._values(live)
        with np.errstate(divide="ignore"):
            self.mass = np.log(self.weights)
        if map.sink is not None:
            count = map.length if map.length is not None else float(len(np.unique(getattr(mu, "times")[live])))  # noqa: B009
            self.mass = np.append(self.mass, map.sink - np.log(count))
            self.keys = np.vstack([self.keys, np.zeros(self.keys.shape[1])])
            self.values = np.vstack([self.values, -self.shift])

    def _values(self, live: NDArray[np.bool_]) -> tuple[Array, Array]:
        """The values less a shift, and the shift."""
        map = self.map
        if map.value_norm is not None:
            values = map.value_norm._map(_affine(self.y, map.V, map.value_bias))
            return values, np.zeros(values.shape[1])
        first = live
        if self.places is not None and map.mask is not None and map.mask.causal:
            first = live & (self.places == self.places[live].min())  # no row may feel later atoms by rounding
        w = self.weights[first] / self.weights[first].max()
        centre = cloud_centre(self.y[first], w / w.sum())
        shift = map.V @ centre
        return (self.y - centre) @ map.V.T, shift if map.value_bias is None else shift + map.value_bias

    def _placed(self, W: Array, b: Array | None, norm: TokenwiseMap | None, x: Array, places: Array | None) -> Array:
        z = _affine(x, W, b)
        return self.turned(z if norm is None else norm._map(z), places)

    def turned(self, z: Array, places: Array | None, *, back: bool = False) -> Array:
        """The rows ``z (..., m, k)`` turned as at their positions, or back."""
        if self.map.rotation is None:
            return z
        assert places is not None
        return self.map.rotation.turn(z, -places if back else places)

    def queries(self, x: Array, places: Array | None) -> Array:
        """Queries, turned and scaled."""
        map = self.map
        with np.errstate(over="ignore", invalid="ignore"):
            return map.scale * self._placed(map.Q, map.query_bias, map.query_norm, x, places)

    def rows_of(self, Q: Array, places: Array | None, rows: slice, *, slopes: bool = True) -> Rows:
        """The weights of a block of queries."""
        here = None if places is None else places[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            S = Q[rows] @ self.keys.T
        slope: Array | None = None
        if self.map.cap is not None:
            S /= self.map.cap
            if slopes:
                slope = 1.0 / np.cosh(np.clip(S, -FLAT, FLAT)) ** 2
            np.tanh(S, out=S)
            S *= self.map.cap
        hidden = self._see(S, here)
        logits = S + self.mass
        if self.dead is not None:
            logits[:, self.dead] = -np.inf
        if hidden is not None:
            logits[:, : self.n][hidden] = -np.inf
        top = logits.max(axis=1, keepdims=True)
        blind = np.isneginf(top[:, 0])
        if blind.any():
            logits[blind] = self._weightless(S[blind], None if hidden is None else hidden[blind])
            top[blind] = logits[blind].max(axis=1, keepdims=True)
        if not np.isfinite(top).all():
            raise OverflowError("the logits are not representable in float64; scale Q, K or the tokens down.")
        logits -= top
        np.exp(logits, out=logits)
        logits /= logits.sum(axis=1, keepdims=True)
        return Rows(logits, slope)

    def _see(self, S: Array, here: Array | None) -> NDArray[np.bool_] | None:
        """Adds the bias of the positions to the scores; the pairs that the mask hides."""
        map = self.map
        if here is None:
            return None
        assert self.places is not None
        if map.bias is not None:
            S[:, : self.n] += map.bias.at(self.places[None, :] - here[:, None])
        return None if map.mask is None else map.mask.hidden(here, self.places)

    def _weightless(self, S: Array, hidden: NDArray[np.bool_] | None) -> Array:
        """Logits of rows that see no mass: over the atoms of zero weight that they see, all alike."""
        if hidden is None or hidden.all(axis=1).any():
            raise ValueError(
                "every row must see an atom, received one that the mask or its time hides from all; widen the mask or give a "
                "later time."
            )
        return np.where(hidden, -np.inf, S)

    def apply(self, x: Array, places: Array | None) -> Array:
        """``Gamma`` at the rows of x."""
        Q = self.queries(x, places)
        out = np.empty((len(x), self.values.shape[1]))
        for rows in blocks(len(x), self.n, self.block_size):
            out[rows] = self.rows_of(Q, places, rows, slopes=False).P @ self.values
        out += self.shift
        return out

    def field(self, x: Array, places: Array | None) -> Array:
        """``D_x Gamma``: the covariance of values and slopes of the logits, turned back and through the norm's derivative."""
        map = self.map
        Q, z = self.queries(x, places), _affine(x, map.Q, map.query_bias)
        e, k = self.values.shape[1], self.keys.shape[1]
        out = np.empty((len(x), e, map.in_dim))
        for rows in blocks(len(x), len(self.keys), self.block_size, e + k + 2):
            C = self.covariance(self.rows_of(Q, places, rows))
            here = None if places is None else places[rows]
            back = map.scale * self.turned(np.swapaxes(C, 0, 1), here, back=True)  # (e, m, k)
            if map.query_norm is not None:
                back = np.stack([map.query_norm._vjp(z[rows], part) for part in back])
            out[rows] = np.swapaxes(back @ map.Q, 0, 1)
        return out

    def covariance(self, rows: Rows) -> Array:
        """``sum_j P_ij (v_j - o_i) (a_ij k_j)^T`` for each row, a the slopes of the cap, ``(m, e, k)``."""
        P = rows.P
        dv = self.values[None] - (P @ self.values)[:, None]
        dv *= P[:, :, None]
        if rows.slope is None:
            dk = self.keys[None] - (P @ self.keys)[:, None]
        else:
            slanted = P * rows.slope
            dk = rows.slope[:, :, None] * self.keys[None] - (slanted @ self.keys)[:, None]
        return np.asarray(np.swapaxes(dv, 1, 2) @ dk)


class _Features(NamedTuple):
    """The derivative ``(n, d) -> (n, k)`` of queries, keys or values at the atoms, and its adjoint."""

    jvp: Product
    vjp: Product

    @classmethod
    def of(cls, W: Array, b: Array | None, norm: TokenwiseMap | None, y: Array) -> _Features:
        if norm is None:
            return cls(lambda v: v @ W.T, lambda g: g @ W)
        forward, backward = norm.linearised(_affine(y, W, b))
        return cls(lambda v: forward(v @ W.T), lambda g: backward(g) @ W)


class ScoreJacobian:
    """Products with ``D_X f`` at the atoms: ``df = (P o (dL - rowsum(P o dL))) v + P dv`` with ``dL = slope o dT``.

    P and the slopes are kept when they fit half the memory budget and the kernel has no ``block_size``.
    """

    def __init__(self, kernel: ScoreKernel) -> None:
        self.kernel, map = kernel, kernel.map
        y, n = kernel.y, kernel.n
        self.Q = kernel.queries(y, kernel.places)
        self.query = _Features.of(map.Q, map.query_bias, map.query_norm, y)
        self.key = _Features.of(map.K, map.key_bias, map.key_norm, y)
        self.value = _Features.of(map.V, map.value_bias, map.value_norm, y)
        self.blocks = list(blocks(n, n, kernel.block_size))
        self.stored: list[Rows] | None = None
        if kernel.block_size is None and 8 * n * n * map._kernels <= memory.MEMORY_BUDGET // 2:
            self.stored = [kernel.rows_of(self.Q, kernel.places, rows) for rows in self.blocks]

    def rows(self) -> Iterator[tuple[slice, Rows]]:
        """The row blocks with their slices."""
        for i, rows in enumerate(self.blocks):
            yield rows, self.stored[i] if self.stored else self.kernel.rows_of(self.Q, self.kernel.places, rows)

    def _with_sink(self, z: Array) -> Array:
        """A row of zeros for the sink, where there is one: it does not move."""
        return z if len(self.kernel.keys) == len(z) else np.vstack([z, np.zeros(z.shape[1])])

    def jvp(self, direction: Array) -> Array:
        """The directional derivative of the map."""
        k = self.kernel
        dQ = k.map.scale * k.turned(self.query.jvp(direction), k.places)
        dK = self._with_sink(k.turned(self.key.jvp(direction), k.places))
        dV = self.value.jvp(direction)
        out = np.empty((k.n, dV.shape[1]))
        for rows, (P, slope) in self.rows():
            T = dQ[rows] @ k.keys.T
            T += self.Q[rows] @ dK.T
            if slope is not None:
                T *= slope
            out[rows] = _apply_softmax_derivative(P, T) @ k.values + P[:, : k.n] @ dV
        return out

    def vjp(self, cotangent: Array) -> Array:
        """The adjoint."""
        k = self.kernel
        dQ, dK = np.empty_like(self.Q), np.zeros_like(k.keys)
        dV = np.zeros((k.n, k.values.shape[1]))
        for rows, (P, slope) in self.rows():
            T = _apply_softmax_derivative(P, cotangent[rows] @ k.values.T)
            if slope is not None:
                T *= slope
            dQ[rows] = T @ k.keys
            dK += T.T @ self.Q[rows]
            dV += P[:, : k.n].T @ cotangent[rows]
        dQ = k.map.scale * k.turned(dQ, k.places, back=True)
        dK = k.turned(dK[: k.n], k.places, back=True)
        return np.asarray(self.query.vjp(dQ) + self.key.vjp(dK) + self.value.vjp(dV))

    def dense(self) -> Array:
        """Blocks ``P_ij (Dv_j + (v_j - o_i) g_ij^T)``, g the gradient of the logit in the key's token, and the field part."""
        k = self.kernel
        e, d = k.values.shape[1], k.map.in_dim
        steps = [self.value.vjp(np.broadcast_to(row, (k.n, e))) for row in np.eye(e)]
        moved = np.stack(steps, axis=1)  # (n, e, d)
        out = np.empty((k.n, e, k.n, d))
        field = k.field(k.y, k.places)
        for rows, (P, slope) in self.rows():
            means = P @ k.values
            for r, i in enumerate(range(rows.start, rows.stop)):
                G = self.key.vjp(k.turned(np.broadcast_to(self.Q[i], (k.n, len(self.Q[i]))), k.places, back=True))
                if slope is not None:
                    G = G * slope[r, : k.n, None]
                block = (k.values[: k.n] - means[r])[:, :, None] * G[:, None, :] + moved
                out[i] = np.swapaxes(block * P[r, : k.n, None, None], 0, 1)
                out[i, :, i] += field[i]
        return out

    def operator(self) -> JacobianOperator:
        """The linear operator of these products."""
        k = self.kernel
        return JacobianOperator(k.n, k.map.in_dim, k.values.shape[1], jvp=self.jvp, vjp=self.vjp, dense=self.dense)


def _affine(x: Array, W: Array, b: Array | None) -> Array:
    z = x @ W.T
    return np.asarray(z if b is None else z + b)
