"""One layer of a transformer: its parts read from a checkpoint, as one map, and its forward pass on many windows at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.attention import (
    AttentionMap,
    Compose,
    FeedForward,
    LayerNorm,
    MaskedAttention,
    MultiHeadAttention,
    PositionBias,
    Residual,
    RMSNorm,
    Sum,
    TransformerBlock,
)
from otattn.attention.tokenwise import TokenwiseMap
from otattn.measures import Domain, Ellipsoid, LayerNormDomain
from otattn.models.config import ModelConfig
from otattn.models.experts import Experts
from otattn.models.family import Layout
from otattn.models.heads import Projections, tokenwise

__all__ = ["ModelLayer", "projection", "read_layer", "read_norm"]

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class ModelLayer:
    """A transformer layer read from a checkpoint.

    Attributes
    ----------
    index : int
        Number of the layer, from 0.
    projections : Projections
        Query, key, value and output matrices, heads stacked.
    attention_norm, mlp_norm : LayerNorm or None
        Before attention and MLP ("pre": GPT-2, Llama; "parallel": GPT-NeoX) or after them ("post": BERT); None for the first
        of ModernBERT.
    feed_forward : TokenwiseMap
    order : {"post", "pre", "parallel"}
    domain : Domain
        Where the tokens that the attention sees are: the image of the normalisation that feeds it. A
        :class:`LayerNormDomain` for BERT and GPT-2, an ellipsoid for RMSNorm.
    attention_out_norm, mlp_out_norm : LayerNorm or None
        On what attention and MLP add (Gemma 2).
    """

    index: int
    projections: Projections
    attention_norm: LayerNorm | None
    mlp_norm: LayerNorm
    feed_forward: TokenwiseMap
    order: str
    domain: Domain
    attention_out_norm: LayerNorm | None = None
    mlp_out_norm: LayerNorm | None = None

    @cached_property
    def _parts(self) -> tuple[tuple[AttentionMap, Array], ...]:
        parts = (self.projections.head(h) for h in range(self.projections.num_heads))
        return tuple((_placed(head, self.domain), out) for head, out in parts)

    @property
    def heads(self) -> tuple[AttentionMap, ...]:
        """Each head as a map into its own values R^e: softmax, masked or rotary attention, biases included.

        Their constants are those on :attr:`domain` unless another is given.
        """
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
            whole: AttentionMap = MaskedAttention(MultiHeadAttention(inner, self.outputs, output_bias=bias))
        else:
            whole = MultiHeadAttention(heads, self.outputs, output_bias=bias)
        return _placed(whole, self.domain)

    @cached_property
    def block(self) -> Compose:
        """The whole layer as a token map, Jacobian included."""
        attention, mlp = (
            part if norm is None else Compose(part, norm)
            for part, norm in ((self.attention, self.attention_out_norm), (self.feed_forward, self.mlp_out_norm))
        )
        if self.order == "parallel":
            first = attention if self.attention_norm is None else Compose(self.attention_norm, attention)
            return Compose(Residual(Sum(first, Compose(self.mlp_norm, mlp))))
        return TransformerBlock(
            attention,
            mlp,
            attention_norm=self.attention_norm,
            mlp_norm=self.mlp_norm,
            pre_norm=self.order == "pre",
        )

    def attention_input(self, X: Array) -> Array:
        """What the attention sees when the layer receives ``X (windows, n, d)``."""
        return X if self.order == "post" else tokenwise(self.attention_norm, X)

    def forward(self, X: Array, seen: Array | None = None, visible: Mask | None = None) -> Array:
        """The layer applied to ``X (windows, n, d)``; ``seen`` is :meth:`attention_input` where known."""
        added = self.projections(self.attention_input(X) if seen is None else seen, visible)
        Y = X + tokenwise(self.attention_out_norm, added)
        if self.order == "post":
            Y = tokenwise(self.attention_norm, Y)
            return tokenwise(self.mlp_norm, Y + tokenwise(self.feed_forward, Y))
        into = tokenwise(self.mlp_norm, X if self.order == "parallel" else Y)
        return np.asarray(Y + tokenwise(self.mlp_out_norm, tokenwise(self.feed_forward, into)))

    def __repr__(self) -> str:
        p = self.projections
        return f"ModelLayer({self.index}, heads={p.num_heads}, kv_heads={p.num_kv_heads}, dim={p.query.shape[1]})"


def _placed(map: AttentionMap, domain: Domain) -> AttentionMap:
    """A map that was just made, with the domain of its tokens."""
    object.__setattr__(map, "domain", domain)
    return map


def read_norm(layout: Layout, config: ModelConfig, name: str) -> LayerNorm:
    """The normalisation with this whole name."""
    read, kind = layout.checkpoint.tensor, layout.family.norm
    names = layout.norm(name)
    gain = read(names[0], None)
    if kind in ("rms", "shifted"):
        return RMSNorm(gain + 1.0 if kind == "shifted" else gain, eps=config.eps)
    return LayerNorm(gain, read(names[1], len(gain)) if len(names) > 1 else None, eps=config.eps)


def read_layer(layout: Layout, config: ModelConfig, index: int) -> ModelLayer:
    """Layer ``index`` of a checkpoint."""
    family, stem = layout.family, layout.stem(index)
    norms = {
        use: read_norm(layout, config, stem + name)
        for use, name in family.layer_norms.items()
        if not (family.plain_first and index == 0 and use == "first")
    }
    first = norms.get("first")
    return ModelLayer(
        index,
        _projections(layout, config, index),
        first,
        norms["second"],
        _feed_forward(layout, config, index),
        config.order,
        _domain(layout, config, index, first),
        norms.get("after_first"),
        norms.get("after_second"),
    )


def _linear(layout: Layout, index: int, use: str) -> tuple[Any, Any]:
    """Matrix and bias in the convention ``y = W x + b``; None where the family has none."""
    if use not in layout.family.linear:
        return None, None
    read = layout.checkpoint.tensor
    W, name = read(layout.weight(index, use)), layout.bias(index, use)
    W = W.T if layout.family.transposed else W
    return W, None if name is None else read(name, len(W))


def _split(W: Array, b: Array | None, parts: int, by: int = 1) -> list[tuple[Any, Any]]:
    """The matrices stacked in one, ``by`` times in turn."""
    out = []
    for i in range(parts):
        W_i, b_i = (None if a is None else a.reshape(by, parts, -1, *a.shape[1:])[:, i] for a in (W, b))
        out.append((W_i.reshape(-1, W.shape[1]), None if b_i is None else b_i.reshape(-1)))  # type: ignore[union-attr]
    return out


def _projections(layout: Layout, config: ModelConfig, index: int) -> Projections:
    family, c, stem = layout.family, config, layout.stem(index)
    uses = ("query", "key", "value")
    if "fused" in family.linear:
        parts = _split(*_linear(layout, index, "fused"), 3)
    elif "by_head" in family.linear:
        parts = _split(*_linear(layout, index, "by_head"), 3, c.num_heads)
    else:
        parts = [_linear(layout, index, use) for use in uses]
    (q, bq), (k, bk), (v, bv) = parts
    out, bo = _linear(layout, index, "output")
    arrays = {use: layout.checkpoint.tensor(stem + name) for use, (name, _) in family.layer_arrays.items()}
    norms: dict[str, Any] = {use: RMSNorm(arrays[use], eps=c.eps) for use in arrays if use.endswith("_norm")}
    bias = None
    if "relative" in family.arrays:
        table = layout.checkpoint.tensor(layout.prefix + family.arrays["relative"][0])
        bias = tuple(PositionBias.t5(column, max_distance=c.farthest) for column in table.T)
    reach = c.reach[index]
    return Projections(
        *(q, k, v, out, bq, bk, bv, bo),
        c.num_heads,
        c.num_kv_heads,
        masked=c.causal,
        scale=c.scale,
        rotary=c.rotary if reach is None or c.local_rotary is None else c.local_rotary,
        reach=reach,
        cap=c.cap,
        sinks=arrays.get("sinks"),
        bias=bias,
        **norms,
    )


def _feed_forward(layout: Layout, config: ModelConfig, index: int) -> TokenwiseMap:
    family, c, stem = layout.family, config, layout.stem(index)
    if "router" in family.linear:
        router, bias = _linear(layout, index, "router")
        names = ("gate_up", "gate_up_bias", "down", "down_bias")
        options: dict[str, Any] = {use: layout.checkpoint.tensor(stem + family.layer_arrays[use][0]) for use in names}
        return Experts(router, bias, **options | dict(c.experts))
    (up, b_up), (gate, b_gate) = (_linear(layout, index, use) for use in ("up", "gate"))
    if "gate_up" in family.linear:
        (gate, b_gate), (up, b_up) = _split(*_linear(layout, index, "gate_up"), 2)
    down, b_down = _linear(layout, index, "down")
    return FeedForward(up, down, activation=c.activation, gate=gate, up_bias=b_up, down_bias=b_down, gate_bias=b_gate)


def _domain(layout: Layout, config: ModelConfig, index: int, first: LayerNorm | None) -> Domain:
    """Where the tokens are that the attention of a layer sees."""
    family = layout.family
    if config.order != "post" and first is not None:
        return norm_domain(first)
    if index:
        return norm_domain(read_norm(layout, config, layout.stem(index - 1) + family.layer_norms["second"]))
    domain = norm_domain(read_norm(layout, config, layout.prefix + family.norms["embedding"]))
    project = projection(layout)
    if project is None:
        return domain
    assert isinstance(domain, Ellipsoid)
    W, b = project
    return Ellipsoid(W @ domain.shape, W @ domain.center + b)


def projection(layout: Layout) -> tuple[Array, Array] | None:
    """The linear map from embeddings to tokens, where there is one (ELECTRA)."""
    names = [layout.prefix + name for name, _ in layout.family.optional.values()]
    if not any(name in layout.checkpoint for name in names):
        return None
    W, b = (layout.checkpoint.tensor(name) for name in names)
    return W, b


def norm_domain(norm: LayerNorm) -> Domain:
    """The domain in which a normalisation puts its tokens.

    With ``eps > 0`` the standardised token has a norm below ``sqrt(d)``, so it lies in the ellipsoid all the same.
    """
    if norm.center:
        return LayerNormDomain(norm.gain, norm.bias)
    return Ellipsoid(np.sqrt(len(norm.gain)) * np.diag(norm.gain))
