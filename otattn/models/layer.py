"""One layer of a transformer: its heads as attention maps, and its forward pass on many windows at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from otattn.attention import (
    AttentionMap,
    LayerNorm,
    MaskedAttention,
    MultiHeadAttention,
    SoftmaxAttention,
    TransformerBlock,
)
from otattn.attention.feed_forward import FeedForward
from otattn.attention.rotary import RotaryAttention, rotate
from otattn.measures import Domain, Ellipsoid, LayerNormDomain

__all__ = ["ModelLayer", "Projections", "norm_domain"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Projections:
    """The matrices of an attention layer, heads stacked, in the convention ``y = W x + b``.

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
    rotary : dict or None
        ``base``, ``layout`` and ``rotary_dim`` of :class:`RotaryAttention`.
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
    rotary: dict[str, float | int | str] | None = None

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

    def head(self, h: int) -> tuple[AttentionMap, Array]:
        """Head h as an attention map into its own values, and its output matrix ``(D, e)``."""
        q, k, v = self._part(self.query, h, True), self._part(self.key, h), self._part(self.value, h)
        bq = None if self.query_bias is None else self._part(self.query_bias, h, True)
        bk = None if self.key_bias is None else self._part(self.key_bias, h)
        bv = None if self.value_bias is None else self._part(self.value_bias, h)
        e = len(v)
        out = self.output[:, h * e : (h + 1) * e]
        if self.rotary is not None:
            options: dict = dict(self.rotary)
            return (
                RotaryAttention(q, k, v, query_bias=bq, key_bias=bk, value_bias=bv, masked=self.masked, **options),
                out,
            )
        head = SoftmaxAttention.from_qkv(q, k, v, query_bias=bq, key_bias=bk, value_bias=bv)
        return MaskedAttention(head) if self.masked else head, out

    def _part(self, stacked: Array, h: int, query: bool = False) -> Array:
        count = self.num_heads if query else self.num_kv_heads
        index = h if query else h * self.num_kv_heads // self.num_heads
        size = len(stacked) // count
        return stacked[index * size : (index + 1) * size]

    def __call__(self, X: Array) -> Array:
        """The attention output (output matrix included) for tokens ``(windows, n, d)``."""
        w, n, _ = X.shape
        q = _split(X, self.query, self.query_bias, self.num_heads)
        k = _split(X, self.key, self.key_bias, self.num_kv_heads)
        v = _split(X, self.value, self.value_bias, self.num_kv_heads)
        width = q.shape[-1]
        if self.rotary is not None:
            r = int(self.rotary.get("rotary_dim") or width)
            frequencies = float(self.rotary["base"]) ** (-np.arange(0, r, 2) / r)
            angles = np.arange(n)[:, None] * frequencies
            layout = str(self.rotary["layout"])
            q, k = rotate(q, angles, layout), rotate(k, angles, layout)
        group = self.num_heads // self.num_kv_heads
        hidden = np.triu(np.ones((n, n), dtype=bool), 1) if self.masked else None
        out = np.empty((w, n, self.num_heads, v.shape[-1]))
        for i in range(w):
            for h in range(self.num_heads):
                S = q[i, h] @ k[i, h // group].T
                S /= np.sqrt(width)
                if hidden is not None:
                    S[hidden] = -np.inf
                S -= S.max(axis=1, keepdims=True)
                np.exp(S, out=S)
                S /= S.sum(axis=1, keepdims=True)
                out[i, :, h] = S @ v[i, h // group]
        y = out.reshape(w, n, -1) @ self.output.T
        return np.asarray(y if self.output_bias is None else y + self.output_bias)


def _split(X: Array, W: Array, b: Array | None, heads: int) -> Array:
    """Projections ``(windows, heads, n, k)``."""
    y = X @ W.T
    if b is not None:
        y = y + b
    w, n, _ = X.shape
    return np.ascontiguousarray(y.reshape(w, n, heads, -1).transpose(0, 2, 1, 3))


@dataclass(frozen=True, eq=False)
class ModelLayer:
    """A transformer layer read from a checkpoint.

    Attributes
    ----------
    index : int
        Number of the layer, from 0.
    projections : Projections
        Query, key, value and output matrices, heads stacked.
    attention_norm, mlp_norm : LayerNorm
        Before attention and MLP (``pre_norm``: GPT-2, Llama) or after them (BERT).
    feed_forward : FeedForward
    pre_norm : bool
    domain : Domain
        Where the tokens that the attention sees are: the image of the normalisation that feeds it. A
        :class:`LayerNormDomain` for BERT and GPT-2, an ellipsoid for RMSNorm.
    """

    index: int
    projections: Projections
    attention_norm: LayerNorm
    mlp_norm: LayerNorm
    feed_forward: FeedForward
    pre_norm: bool
    domain: Domain

    @cached_property
    def _parts(self) -> tuple[tuple[AttentionMap, Array], ...]:
        return tuple(self.projections.head(h) for h in range(self.projections.num_heads))

    @property
    def heads(self) -> tuple[AttentionMap, ...]:
        """Each head as a map into its own values R^e: softmax, masked or rotary attention, biases included."""
        return tuple(head for head, _ in self._parts)

    @property
    def outputs(self) -> tuple[Array, ...]:
        """The output matrix ``(D, e)`` of each head."""
        return tuple(out for _, out in self._parts)

    @cached_property
    def attention(self) -> AttentionMap:
        """All heads with their output matrices and the output bias."""
        heads, bias = self.heads, self.projections.output_bias
        inner = [h.attention for h in heads if isinstance(h, MaskedAttention)]
        if inner:
            return MaskedAttention(MultiHeadAttention(inner, self.outputs, output_bias=bias))
        return MultiHeadAttention(heads, self.outputs, output_bias=bias)

    @cached_property
    def block(self) -> TransformerBlock:
        """The whole layer as a token map, Jacobian included."""
        return TransformerBlock(
            self.attention,
            self.feed_forward,
            attention_norm=self.attention_norm,
            mlp_norm=self.mlp_norm,
            pre_norm=self.pre_norm,
        )

    def attention_input(self, X: Array) -> Array:
        """What the attention sees when the layer receives ``X (windows, n, d)``."""
        return tokenwise(self.attention_norm, X) if self.pre_norm else X

    def forward(self, X: Array, seen: Array | None = None) -> Array:
        """The layer applied to ``X (windows, n, d)``; ``seen`` is :meth:`attention_input` where known."""
        Y = X + self.projections(self.attention_input(X) if seen is None else seen)
        if self.pre_norm:
            return np.asarray(Y + tokenwise(self.feed_forward, tokenwise(self.mlp_norm, Y)))
        Y = tokenwise(self.attention_norm, Y)
        return tokenwise(self.mlp_norm, Y + tokenwise(self.feed_forward, Y))

    def __repr__(self) -> str:
        p = self.projections
        return f"ModelLayer({self.index}, heads={p.num_heads}, kv_heads={p.num_kv_heads}, dim={p.query.shape[1]})"


def tokenwise(map: LayerNorm | FeedForward, X: Array) -> Array:
    """A token-wise map on ``(windows, n, d)``."""
    return map._map(X.reshape(-1, X.shape[-1])).reshape(*X.shape[:-1], -1)


def norm_domain(norm: LayerNorm) -> Domain:
    """The domain in which a normalisation puts its tokens.

    With ``eps > 0`` the standardised token has a norm below ``sqrt(d)``, so it lies in the ellipsoid all the same.
    """
    if norm.center:
        return LayerNormDomain(norm.gain, norm.bias)
    return Ellipsoid(np.sqrt(len(norm.gain)) * np.diag(norm.gain))
