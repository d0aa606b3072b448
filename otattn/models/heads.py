"""The heads of a layer, stacked as checkpoints keep them: their forward pass on many windows, and each as an attention map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.attention import (
    AttentionMap,
    LayerNorm,
    Mask,
    MaskedAttention,
    PositionBias,
    RMSNorm,
    RotaryAttention,
    Rotation,
    ScoreAttention,
    SoftmaxAttention,
)
from otattn.attention.rotary import rotate
from otattn.attention.tokenwise import TokenwiseMap
from otattn.models.positions import Rotary

__all__ = ["Projections", "tokenwise"]

Array = NDArray[np.float64]
Seen = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Projections:
    """The matrices of an attention layer, heads stacked, in the convention ``y = W x + b``.

    Logits are ``bias + cap tanh(scale <q, k> / cap)`` with what there is of it, q and k normalised and turned.

    Attributes
    ----------
    query : (H k, d)
    key, value : (G k, d), (G e, d)
        G heads of keys and values; query head h uses number ``h G / H`` of them (grouped-query attention).
    output : (D, H e)
    query_bias, key_bias, value_bias, output_bias : arrays or None
    num_heads, num_kv_heads : int
        H and G.
    masked : bool
        Causal mask.
    scale : float or None
        ``1 / sqrt(k)`` by default.
    rotary : Rotary or None
    reach : int or None
        The farthest offset that is seen (a window).
    cap : float or None
    query_norm, key_norm : LayerNorm or None
        Of each head's queries and keys, before they are turned.
    sinks : (H,) or None
        The logit of a key whose value is zero, a head.
    bias : tuple of PositionBias or None
        Of the logits, one a head.
    """

    query: Array
    key: Array
    value: Array
    output: Array
    query_bias: Array | None
    key_bias: Array | None
    value_bias: Array | None
    output_bias: Array | None
    num_heads: int
    num_kv_heads: int
    masked: bool
    scale: float | None = None
    rotary: Rotary | None = None
    reach: int | None = None
    cap: float | None = None
    query_norm: LayerNorm | None = None
    key_norm: LayerNorm | None = None
    sinks: Array | None = None
    bias: tuple[PositionBias, ...] | None = None

    def __post_init__(self) -> None:
        H, G = self.num_heads, self.num_kv_heads
        if H % G or len(self.query) % H or len(self.key) % G or len(self.value) % G:
            raise ValueError(
                f"num_heads and num_kv_heads must divide {len(self.query)} and {len(self.key)} rows and one another, "
                f"received {H} and {G}; check the configuration."
            )
        if len(self.query) // H != len(self.key) // G or self.output.shape[1] != H * (len(self.value) // G):
            raise ValueError(
                f"query, key and output must fit {H} heads and {G} key-value heads, received shapes {self.query.shape}, "
                f"{self.key.shape} and {self.output.shape}; check the configuration."
            )

    def part(self, name: str, h: int) -> Array | None:
        """The rows of "query", "key", "value" or a bias of them that belong to query head h."""
        stacked: Array | None = getattr(self, name)
        if stacked is None:
            return None
        count = self.num_heads if name.startswith("query") else self.num_kv_heads
        index = h if name.startswith("query") else h * self.num_kv_heads // self.num_heads
        size = len(stacked) // count
        return stacked[index * size : (index + 1) * size]

    def head(self, h: int) -> tuple[AttentionMap, Array]:
        """Head h as an attention map into its own values, and its output matrix ``(D, e)``."""
        e = self.output.shape[1] // self.num_heads
        return _map(self, h), self.output[:, h * e : (h + 1) * e]

    def __call__(self, X: Array, visible: Seen | None = None) -> Array:
        """The attention output (output matrix included) for tokens ``(windows, n, d)``.

        ``visible (windows, n)`` tells which tokens are seen, all by default.
        """
        w, n, _ = X.shape
        q = self._turned(_split(X, self.query, self.query_bias, self.num_heads), self.query_norm)
        k = self._turned(_split(X, self.key, self.key_bias, self.num_kv_heads), self.key_norm)
        v = _split(X, self.value, self.value_bias, self.num_kv_heads)
        group = self.num_heads // self.num_kv_heads
        places = np.arange(n, dtype=np.float64)
        away = places[None, :] - places[:, None]
        hidden = None if self.mask is None else self.mask.hidden(places, places)
        out = np.empty((w, n, self.num_heads, v.shape[-1]))
        for i in range(w):
            unseen = hidden
            if visible is not None and not visible[i].all():
                # what is hidden from all sees itself, so that its row is a row of numbers
                unseen = (~visible[i] if hidden is None else hidden | ~visible[i]) & (away != 0)
            for h in range(self.num_heads):
                out[i, :, h] = self._weights(q[i, h] @ k[i, h // group].T, h, unseen, away) @ v[i, h // group]
        y = out.reshape(w, n, -1) @ self.output.T
        return np.asarray(y if self.output_bias is None else y + self.output_bias)

    def _turned(self, z: Array, norm: LayerNorm | None) -> Array:
        """Queries or keys ``(windows, heads, n, k)``, normalised and turned."""
        if norm is not None:
            z = tokenwise(norm, z)
        if self.rotary is None:
            return z
        angles = np.arange(z.shape[2])[:, None] * np.array(self.rotary.frequencies)
        z = rotate(z, angles, self.rotary.layout)
        z[..., : 2 * angles.shape[1]] *= self.rotary.factor
        return z

    @property
    def mask(self) -> Mask | None:
        """Which tokens see which; None when all see all."""
        if not self.masked and self.reach is None:
            return None
        return Mask(self.masked, before=self.reach, after=None if self.masked else self.reach)

    def _weights(self, S: Array, h: int, hidden: Seen | None, away: Array) -> Array:
        """The weights of head h from the products ``<q, k>``."""
        S *= self.width**-0.5 if self.scale is None else self.scale
        if self.cap is not None:
            S = self.cap * np.tanh(S / self.cap)
        if self.bias is not None:
            S += self.bias[h].at(away)
        if hidden is not None:
            S[hidden] = -np.inf
        top = S.max(axis=1, keepdims=True)
        if self.sinks is not None:
            top = np.maximum(top, self.sinks[h])
        np.exp(S - top, out=S)
        total = S.sum(axis=1, keepdims=True)
        S /= total if self.sinks is None else total + np.exp(self.sinks[h] - top)
        return S

    @property
    def width(self) -> int:
        """The dimension k of a head's queries and keys."""
        return len(self.query) // self.num_heads


def _split(X: Array, W: Array, b: Array | None, heads: int) -> Array:
    """Projections ``(windows, heads, n, k)``."""
    y = X @ W.T
    if b is not None:
        y = y + b
    w, n, _ = X.shape
    return np.ascontiguousarray(y.reshape(w, n, heads, -1).transpose(0, 2, 1, 3))


def _map(p: Projections, h: int) -> AttentionMap:
    """Head h as the map of the library: softmax, masked or rotary attention, which theorems know, where nothing else is there."""
    names = ("query", "key", "value", "query_bias", "key_bias", "value_bias")
    parts: dict[str, Any] = {name: p.part(name, h) for name in names}
    norms: dict[str, Any] = {}
    for side in ("query", "key"):
        norm: LayerNorm | None = getattr(p, f"{side}_norm")
        if norm is not None:
            norms[f"{side}_norm"] = RMSNorm(
                norm.gain if p.rotary is None else p.rotary.enlarged(norm.gain), eps=norm.eps
            )
        elif p.rotary is not None:
            for name in (side, f"{side}_bias"):
                parts[name] = None if parts[name] is None else p.rotary.enlarged(parts[name])
    Q, K, V = (parts.pop(name) for name in names[:3])
    parts["scale"] = p.scale
    if norms or any(part is not None for part in (p.reach, p.cap, p.sinks, p.bias)):
        return ScoreAttention(
            Q,
            K,
            V,
            rotation=None if p.rotary is None else Rotation(p.rotary.frequencies, layout=p.rotary.layout),
            bias=None if p.bias is None else p.bias[h],
            cap=p.cap,
            mask=p.mask,
            sink=None if p.sinks is None else float(p.sinks[h]),
            **parts,
            **norms,
        )
    if p.rotary is not None:
        parts |= {"layout": p.rotary.layout, "masked": p.masked}
        return RotaryAttention(Q, K, V, frequencies=p.rotary.frequencies, **parts)
    head = SoftmaxAttention.from_qkv(Q, K, V, **parts)
    return MaskedAttention(head) if p.masked else head


def tokenwise(map: TokenwiseMap | None, X: Array) -> Array:
    """A token-wise map on ``(..., n, d)``; None is the identity."""
    return X if map is None else map._map(X.reshape(-1, X.shape[-1])).reshape(*X.shape[:-1], -1)
