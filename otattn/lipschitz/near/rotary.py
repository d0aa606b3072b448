r"""Rotary heads near given tokens: an affine map of each token by its place, and softmax heads without positions.

The logit of query i and key j is ``s <R_i (Q x_i + b_Q), R_j (K x_j + b_K)>``. With ``L`` the rows of all Q, K and V of a map,
and ``T_i`` the matrix that turns the queries and keys among them by the angles of place i, the map is a sum of softmax heads of
``y_i = T_i (L x_i + b)``, whose forms pick ``<queries of y_i, keys of y_j>`` and whose values pick the values of ``y_j``: no
place is left in them. So a rotary map is a composition of two stages of a chain. The first is affine, its derivatives end, and
``T_i``, being orthogonal, stretches nothing; the second is what the bounds of softmax heads are about.

Queries and keys are scaled by one power of two and values by another, so that both have norms near 1: what the scales do to the
heads is undone in their forms. Keys and values that heads share stand in L once.

Rounding. The matrices of the heads are exact: 0, and powers of two times s. An angle is known up to ``8 eps`` of itself, its
cosine and sine up to as much and ``4 eps``: T, and ``T L``, up to ``turned = (8 + 16 angle) eps`` of their norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper, spectral_norm
from otattn.attention import (
    LayerNorm,
    MaskedAttention,
    MultiHeadAttention,
    RotaryAttention,
    ScoreAttention,
    SoftmaxAttention,
)
from otattn.attention.rotary import rotate
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.normed import BlockNorms
from otattn.lipschitz.near.scores import score_heads

__all__ = ["Lift", "lifted", "rotary_heads"]

Array = NDArray[np.float64]


class _Turned(NamedTuple):
    """Rows of L that are turned, by ``angles (n, r / 2)``."""

    rows: slice
    angles: Array
    layout: str


@dataclass(frozen=True, eq=False)
class Lift:
    """``y_i = T_i (L x_i + b)``, L ``(m, d)``."""

    L: Array
    b: Array
    parts: tuple[_Turned, ...]

    def _turn(self, z: Array, sign: float = 1.0) -> Array:
        out = np.array(z)
        for part in self.parts:
            out[:, part.rows] = rotate(z[:, part.rows], sign * part.angles, part.layout)
        return out

    def images(self, x: Array) -> tuple[Array, float]:
        """The tokens' images, and a bound of their error."""
        z = x @ self.L.T + self.b
        lost = 2.0 * (x.shape[1] + 8) * EPS * norm_upper(np.abs(x) @ np.abs(self.L).T + np.abs(self.b))
        return self._turn(z), float(lost) * (1.0 + self.turned) + self.turned * float(norm_upper(z))

    def jvp(self, v: Array) -> Array:
        return self._turn(v @ self.L.T)

    def vjp(self, g: Array) -> Array:
        return np.asarray(self._turn(g, -1.0) @ self.L)

    def matrix(self, n: int) -> Array:
        """The Jacobian ``(n m, n d)``."""
        m, d = self.L.shape
        out = np.zeros((n, m, n, d))
        rows = np.arange(n)
        for k in range(d):
            out[rows, :, rows, k] = self._turn(np.broadcast_to(self.L[:, k], (n, m)))
        return out.reshape(n * m, n * d)

    @property
    def jacobian_error(self) -> float:
        return self.turned * float(norm_upper(self.L))

    @property
    def turned(self) -> float:
        angle = max((float(np.abs(p.angles).max(initial=0.0)) for p in self.parts), default=0.0)
        return (8.0 + 16.0 * angle) * EPS


def rotary_heads(map: Any) -> tuple[RotaryAttention, ...]:
    """The rotary heads whose sum a map is; none for another map."""
    parts = map.heads if isinstance(map, MultiHeadAttention) else (map,)
    heads = tuple(h for h in parts if isinstance(h, RotaryAttention))
    return heads if len(heads) == len(parts) and len({h.masked for h in heads}) == 1 else ()


def lifted(map: Any, n: int) -> list[Any]:
    """The stages of a sum of rotary heads, or of heads with composed logits, at n tokens: the last is of heads."""
    heads: tuple[Any, ...] = rotary_heads(map) or score_heads(map)
    narrow = _power([h.Q for h in heads] + [h.K for h in heads])
    low = _power([h.V for h in heads])
    rows, made = _Rows(), []
    for h in heads:
        turn = h if isinstance(h, RotaryAttention) else h.rotation
        turned = None if turn is None else (_positions(h, n)[:, None] * turn.frequencies, turn.layout)
        q = rows.place(h.Q, h.query_bias, narrow, turned, getattr(h, "query_norm", None))
        k = rows.place(h.K, h.key_bias, narrow, turned, getattr(h, "key_norm", None))
        made.append((h, q, k, rows.place(h.V, h.value_bias, low, None, getattr(h, "value_norm", None))))
    several = isinstance(map, MultiHeadAttention)
    whole = MultiHeadAttention(
        [_picking(h, rows.size, parts) for h, *parts in made],
        map.outputs if several else None,
        output_bias=map.output_bias if several else None,
    )
    masked = isinstance(heads[0], RotaryAttention) and heads[0].masked
    return [*rows.stages(), MaskedAttention(whole) if masked else whole]


class _Block(NamedTuple):
    """Rows of L and what is added, scaled, how they are turned, their norm, and the scale with which they end."""

    M: Array
    bias: Array
    turned: tuple[Array, str] | None
    norm: LayerNorm | None
    first: float
    last: float

    def same(self, other: _Block) -> bool:
        """Whether the rows can stand for those of another block."""
        if self.norm is not other.norm or (self.turned is None) != (other.turned is None) or self.last != other.last:
            return False
        pairs = [(self.M, other.M), (self.bias, other.bias)]
        if self.turned is not None and other.turned is not None:
            if self.turned[1] != other.turned[1]:
                return False
            pairs.append((self.turned[0], other.turned[0]))
        return all(np.array_equal(a, b) for a, b in pairs)

    @property
    def scaled_norm(self) -> LayerNorm:
        """The norm, of rows that are scaled: ``N(z)`` from ``scale z``."""
        assert self.norm is not None
        eps = self.norm.eps * self.first**2
        return LayerNorm(self.norm.gain, self.norm.bias, eps=eps, center=self.norm.center)


def _picking(h: Any, size: int, parts: list[tuple[slice, float]]) -> SoftmaxAttention | ScoreAttention:
    """The head on the lifted tokens."""
    (q, k, v), (of_q, of_k, of_v) = zip(*((np.eye(size)[at], scale) for at, scale in parts), strict=True)
    values, scale = v / of_v, h.scale / (of_q * of_k)
    if isinstance(h, RotaryAttention):
        return SoftmaxAttention(scale * (k.T @ q), values)
    kept = {name: getattr(h, name) for name in ("bias", "cap", "mask", "sink", "length")}
    return ScoreAttention(q, k, values, scale=scale, **kept)


class _Rows:
    """Blocks of L, each once."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []

    @property
    def size(self) -> int:
        return sum(len(b.M) for b in self.blocks)

    def place(
        self, M: Array, bias: Array | None, scale: float, turned: tuple[Array, str] | None, norm: LayerNorm | None
    ) -> tuple[slice, float]:
        """Where the rows of M stand, and by what they are multiplied in the end."""
        scaled = scale * (np.zeros(len(M)) if bias is None else bias)
        last = scale if norm is None else _power([np.abs(norm.gain).max()[None, None]])
        block, at = _Block(scale * M, scaled, turned, norm, scale, last), 0
        for known in self.blocks:
            if known.same(block):
                break
            at += len(known.M)
        else:
            self.blocks.append(block)
        return slice(at, at + len(M)), last

    def stages(self) -> list[Lift | BlockNorms]:
        """The affine map, the norms where there are any, and the turns."""
        turns: list[_Turned] = []
        norms: list[tuple[slice, LayerNorm]] = []
        ends, at = [], 0
        for block in self.blocks:
            rows = slice(at, at + len(block.M))
            if block.turned is not None:
                turns.append(_Turned(rows, *block.turned))
            if block.norm is not None:
                norms.append((rows, block.scaled_norm))
            ends.append(np.full(len(block.M), 1.0 if block.norm is None else block.last))
            at = rows.stop
        L, b = np.concatenate([block.M for block in self.blocks]), np.concatenate([block.bias for block in self.blocks])
        if not norms:
            return [Lift(L, b, tuple(turns))]
        return [
            Lift(L, b, ()),
            BlockNorms(tuple(norms), at),
            Lift(np.diag(np.concatenate(ends)), 0.0 * b, tuple(turns)),
        ]


def _power(blocks: list[Array]) -> float:
    """A power of two by which the blocks together get a norm of about 1."""
    size = spectral_norm(np.concatenate(blocks))
    return float(2.0 ** -np.clip(np.round(np.log2(size)), -200, 200)) if size > 0.0 else 1.0


def _positions(h: RotaryAttention, n: int) -> Array:
    length = float(n) if h.length is None else h.length
    return np.asarray(length * (np.arange(1, n + 1) / n))
