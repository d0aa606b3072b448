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
from otattn.attention import MaskedAttention, MultiHeadAttention, RotaryAttention, ScoreAttention, SoftmaxAttention
from otattn.attention.rotary import rotate
from otattn.lipschitz.constants._dual_quadratic import EPS
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


def lifted(map: Any, n: int) -> tuple[Lift, MaskedAttention | MultiHeadAttention]:
    """The two stages of a sum of rotary heads, or of heads with composed logits, at n tokens."""
    heads: tuple[Any, ...] = rotary_heads(map) or score_heads(map)
    narrow = _power([h.Q for h in heads] + [h.K for h in heads])
    low = _power([h.V for h in heads])
    rows, made = _Rows(), []
    for h in heads:
        turn = h if isinstance(h, RotaryAttention) else h.rotation
        turned = () if turn is None else (_positions(h, n)[:, None] * turn.frequencies, turn.layout)
        q = rows.place(h.Q, h.query_bias, narrow, *turned)
        k = rows.place(h.K, h.key_bias, narrow, *turned)
        made.append((h, q, k, rows.place(h.V, h.value_bias, low)))
    lift = rows.lift()
    several = isinstance(map, MultiHeadAttention)
    whole = MultiHeadAttention(
        [_picking(h, len(lift.L), parts, narrow, low) for h, *parts in made],
        map.outputs if several else None,
        output_bias=map.output_bias if several else None,
    )
    masked = isinstance(heads[0], RotaryAttention) and heads[0].masked
    return lift, MaskedAttention(whole) if masked else whole


def _picking(h: Any, size: int, parts: list[slice], narrow: float, low: float) -> SoftmaxAttention | ScoreAttention:
    """The head on the lifted tokens."""
    q, k, v = (np.eye(size)[part] for part in parts)
    values, scale = v / low, h.scale / narrow**2
    if isinstance(h, RotaryAttention):
        return SoftmaxAttention(scale * (k.T @ q), values)
    kept = {name: getattr(h, name) for name in ("bias", "mask", "sink", "length")}
    return ScoreAttention(q, k, values, scale=scale, **kept)


class _Rows:
    """Blocks of L, each once."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Array, Array, Array | None, str]] = []

    def place(self, M: Array, bias: Array | None, scale: float, angles: Array | None = None, layout: str = "") -> slice:
        """Where the rows of M stand."""
        block = (scale * M, scale * (np.zeros(len(M)) if bias is None else bias), angles, layout)
        at = 0
        for known in self.blocks:
            same = known[3] == layout and all(
                a is b or (a is not None and b is not None and np.array_equal(a, b))
                for a, b in zip(known[:3], block[:3], strict=True)
            )
            if same:
                break
            at += len(known[0])
        else:
            self.blocks.append(block)
        return slice(at, at + len(M))

    def lift(self) -> Lift:
        parts, at = [], 0
        for M, _, angles, layout in self.blocks:
            if angles is not None:
                parts.append(_Turned(slice(at, at + len(M)), angles, layout))
            at += len(M)
        L, b = (np.concatenate([block[k] for block in self.blocks]) for k in (0, 1))
        return Lift(L, b, tuple(parts))


def _power(blocks: list[Array]) -> float:
    """A power of two by which the blocks together get a norm of about 1."""
    size = spectral_norm(np.concatenate(blocks))
    return float(2.0 ** -np.clip(np.round(np.log2(size)), -200, 200)) if size > 0.0 else 1.0


def _positions(h: RotaryAttention, n: int) -> Array:
    length = float(n) if h.length is None else h.length
    return np.asarray(length * (np.arange(1, n + 1) / n))
