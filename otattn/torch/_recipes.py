"""How modules are read: one function a kind of module, from its tensors to a map and a call of the module on tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn.attention import (
    AttentionMap,
    Compose,
    Mask,
    MaskedAttention,
    MultiHeadAttention,
    Residual,
    RotaryAttention,
    ScoreAttention,
    SoftmaxAttention,
    TransformerBlock,
)
from otattn.attention.tokenwise import TokenwiseMap
from otattn.torch._weights import Linear, Weights, scaled

__all__ = ["RECIPES", "Made"]

Array = NDArray[np.float64]


class Made(NamedTuple):
    """A map, and the module's own values: ``run(module, tokens (n, d)) -> (n, e)``."""

    map: AttentionMap
    run: Callable[[Any, Any], Any]


def _attention(
    parts: Sequence[Linear],
    heads: int,
    causal: bool,
    scale: float,
    kv_heads: int | None = None,
    frequencies: Array | None = None,
    norms: dict[str, TokenwiseMap] | None = None,
) -> AttentionMap:
    """Heads of stacked queries, keys, values and outputs; ``scale`` is that of the logits, ``frequencies`` turn them.

    ``norms`` ("query_norm", "key_norm") are those of each head's queries and keys.
    """
    groups = kv_heads or heads
    *stacked, (outputs, output_bias) = parts
    cut = [
        _split(part, [len(part[0]) // count] * count)
        for part, count in zip(stacked, (heads, groups, groups), strict=True)
    ]
    maps: list[AttentionMap] = []
    for h in range(heads):
        g = h * groups // heads
        (q, bq), (k, bk), (v, bv) = cut[0][h], cut[1][g], cut[2][g]
        options: dict[str, Any] = {"scale": scale, "query_bias": bq, "key_bias": bk, "value_bias": bv}
        if norms:
            maps.append(ScoreAttention(q, k, v, mask=Mask(True) if causal else None, **options | norms))
        elif frequencies is None:
            maps.append(SoftmaxAttention.from_qkv(q, k, v, **options))
        else:
            maps.append(RotaryAttention(q, k, v, frequencies=frequencies, layout="half", masked=causal, **options))
    whole = MultiHeadAttention(maps, np.split(outputs, heads, axis=1), output_bias=output_bias)
    return MaskedAttention(whole) if causal and frequencies is None and not norms else whole


def _split(both: Linear, sizes: list[int]) -> list[Linear]:
    """Linear maps that are stacked in one."""
    W, b = both
    cuts = np.cumsum(sizes)[:-1]
    biases = [None] * len(sizes) if b is None else np.split(b, cuts)
    return list(zip(np.split(W, cuts), biases, strict=True))


def _hidden(X: Any) -> Any:
    """Which atoms a token may not see, ``(n, n)``."""
    import torch

    return torch.ones(len(X), len(X), dtype=torch.bool).triu(1)


# torch.nn


def _torch_attention(module: Any, read: Weights, causal: bool) -> Made:
    d, heads = module.embed_dim, module.num_heads
    if (module.kdim, module.vdim) != (d, d):
        raise ValueError(
            f"module must be self-attention with kdim = vdim = {d}, received {module.kdim} and {module.vdim}; it attends "
            "to other tokens than its own."
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            "module must have neither add_bias_kv nor add_zero_attn, received one of them; use FunctionAttention."
        )
    bias = None if module.in_proj_bias is None else read.tensor(module.in_proj_bias, "in_proj_bias")
    q, k, v = _split((read.tensor(module.in_proj_weight, "in_proj_weight"), bias), [d, d, d])
    out = read.linear(module.out_proj, "out_proj")

    def run(own: Any, X: Any) -> Any:
        return own(X, X, X, need_weights=False, attn_mask=_hidden(X) if causal else None)[0]

    return Made(_attention([q, k, v, out], heads, causal, (d // heads) ** -0.5), run)


def _encoder_layer(module: Any, read: Weights, causal: bool) -> Made:
    attention = _torch_attention(module.self_attn, read, causal).map
    block = TransformerBlock(
        attention,
        read.feed_forward(module.linear1, module.linear2, module.activation),
        attention_norm=read.norm(module.norm1, "norm1"),
        mlp_norm=read.norm(module.norm2, "norm2"),
        pre_norm=bool(module.norm_first),
    )
    return Made(block, lambda own, X: own(X, src_mask=_hidden(X) if causal else None))


def _norm(module: Any, read: Weights, causal: bool) -> Made:
    return Made(read.norm(module, "module"), lambda own, X: own(X))


# transformers


def _called(own: Any, X: Any, *, causal: bool, **options: Any) -> Any:
    """A module of transformers on one text; the mask is added to the logits."""
    import torch

    if causal:
        options["attention_mask"] = torch.zeros(len(X), len(X), dtype=X.dtype).masked_fill(_hidden(X), -torch.inf)[
            None, None
        ]
    out = own(X[None], **options)
    return (out[0] if isinstance(out, tuple) else out)[0]


def _no_choice(causal: bool, own: bool) -> bool:
    if causal and not own:
        raise ValueError(
            "causal must be left out for modules of transformers, which know whether they are, received True for one that is not."
        )
    return own


def _bert_heads(module: Any, read: Weights, out: Linear | None) -> AttentionMap:
    parts = [read.linear(getattr(module, name), name) for name in ("query", "key", "value")]
    heads, causal = module.num_attention_heads, bool(module.is_causal)
    width = len(parts[2][0])
    parts.append((np.eye(width), None) if out is None else out)
    return _attention(parts, heads, causal, module.scaling)


def _bert_self(module: Any, read: Weights, causal: bool) -> Made:
    own = _no_choice(causal, bool(module.is_causal))
    return Made(_bert_heads(module, read, None), partial(_called, causal=own))


def _bert_attention(module: Any, read: Weights, causal: bool) -> Made:
    own = _no_choice(causal, bool(module.self.is_causal))
    heads = _bert_heads(module.self, read, read.linear(module.output.dense, "output.dense"))
    norm = read.norm(module.output.LayerNorm, "output.LayerNorm")
    return Made(Compose(Residual(heads), norm), partial(_called, causal=own))


def _bert_layer(module: Any, read: Weights, causal: bool) -> Made:
    part = module.attention
    own = _no_choice(causal, bool(part.self.is_causal))
    mlp = read.feed_forward(module.intermediate.dense, module.output.dense, part.self.config.hidden_act)
    block = TransformerBlock(
        _bert_heads(part.self, read, read.linear(part.output.dense, "attention.output.dense")),
        mlp,
        attention_norm=read.norm(part.output.LayerNorm, "attention.output.LayerNorm"),
        mlp_norm=read.norm(module.output.LayerNorm, "output.LayerNorm"),
        pre_norm=False,
    )
    return Made(block, partial(_called, causal=own))


def _gpt2_attention(module: Any, read: Weights, causal: bool) -> Made:
    d, heads = module.embed_dim, module.num_heads
    q, k, v = _split(read.linear(module.c_attn, "c_attn"), [d, d, d])
    out = read.linear(module.c_proj, "c_proj")
    return Made(_attention([q, k, v, out], heads, True, module.scaling), partial(_called, causal=True))


def _gpt2_block(module: Any, read: Weights, causal: bool) -> Made:
    block = TransformerBlock(
        _gpt2_attention(module.attn, read, causal).map,
        read.feed_forward(module.mlp.c_fc, module.mlp.c_proj, module.attn.config.activation_function),
        attention_norm=read.norm(module.ln_1, "ln_1"),
        mlp_norm=read.norm(module.ln_2, "ln_2"),
        pre_norm=True,
    )
    return Made(block, partial(_called, causal=True))


def _llama_attention(module: Any, read: Weights, causal: bool) -> Made:
    config = module.config
    turn = sys.modules[type(module).__module__].LlamaRotaryEmbedding(config)
    if turn.rope_type in ("dynamic", "longrope") or turn.attention_scaling != 1.0:
        raise ValueError(
            "rope_parameters must give frequencies that do not depend on the length, and no factor of the logits, received "
            f"{dict(config.rope_parameters)}; use FunctionAttention."
        )
    parts = [read.linear(getattr(module, f"{name}_proj"), f"{name}_proj") for name in "qkvo"]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    made = _attention(parts, heads, True, module.scaling, kv_heads, turn.inv_freq.double().numpy())
    return Made(made, partial(_llama_run, kind=type(module)))


def _llama_run(own: Any, X: Any, *, kind: Any) -> Any:
    import torch

    config = own.config if hasattr(own, "config") else own.self_attn.config
    turn = sys.modules[kind.__module__].LlamaRotaryEmbedding(config)
    positions = turn(X[None], torch.arange(len(X))[None])
    return _called(own, X, causal=True, position_embeddings=positions)


def _llama_layer(module: Any, read: Weights, causal: bool) -> Made:
    mlp = module.mlp
    block = TransformerBlock(
        _llama_attention(module.self_attn, read, causal).map,
        read.feed_forward(mlp.up_proj, mlp.down_proj, module.self_attn.config.hidden_act, mlp.gate_proj),
        attention_norm=read.norm(module.input_layernorm, "input_layernorm"),
        mlp_norm=read.norm(module.post_attention_layernorm, "post_attention_layernorm"),
        pre_norm=True,
    )
    return Made(block, partial(_llama_run, kind=type(module)))


def _vit_attention(module: Any, read: Weights, causal: bool) -> Made:
    _no_choice(causal, False)
    parts = [read.linear(getattr(module, f"{name}_proj"), f"{name}_proj") for name in "qkvo"]
    heads = module.num_attention_heads
    return Made(_attention(parts, heads, False, module.scaling), partial(_called, causal=False))


def _vit_layer(module: Any, read: Weights, causal: bool) -> Made:
    block = TransformerBlock(
        _vit_attention(module.attention, read, causal).map,
        read.feed_forward(module.mlp.fc1, module.mlp.fc2, module.attention.config.hidden_act),
        attention_norm=read.norm(module.layernorm_before, "layernorm_before"),
        mlp_norm=read.norm(module.layernorm_after, "layernorm_after"),
        pre_norm=True,
    )
    return Made(block, partial(_called, causal=False))


# timm


def _timm_run(own: Any, X: Any, *, causal: bool) -> Any:
    return own(X[None], **({"is_causal": True} if causal else {}))[0]


def _timm_scale(layer: Any, read: Weights) -> Array | None:
    """What a LayerScale multiplies by; an identity has nothing."""
    return read.tensor(layer.gamma, "gamma") if hasattr(layer, "gamma") else None


def _timm_heads(module: Any, read: Weights, causal: bool, scale: Array | None) -> AttentionMap:
    both = read.linear(module.qkv, "qkv")
    q, k, v = _split(both, [len(both[0]) // 3] * 3)
    out = scaled(*read.linear(module.proj, "proj"), scale)
    norms: dict[str, TokenwiseMap] = {
        f"{side}_norm": read.norm(part, f"{side[0]}_norm")
        for side in ("query", "key")
        if type(part := getattr(module, f"{side[0]}_norm")).__name__ != "Identity"
    }
    return _attention([q, k, v, out], module.num_heads, causal, float(module.scale), norms=norms)


def _timm_attention(module: Any, read: Weights, causal: bool) -> Made:
    return Made(_timm_heads(module, read, causal, None), partial(_timm_run, causal=causal))


def _timm_block(module: Any, read: Weights, causal: bool) -> Made:
    mlp = module.mlp
    block = TransformerBlock(
        _timm_heads(module.attn, read, causal, _timm_scale(module.ls1, read)),
        read.feed_forward(mlp.fc1, mlp.fc2, mlp.act, scale=_timm_scale(module.ls2, read)),
        attention_norm=read.norm(module.norm1, "norm1"),
        mlp_norm=read.norm(module.norm2, "norm2"),
        pre_norm=True,
    )
    return Made(block, partial(_timm_run, causal=causal))


_HF = "transformers.models"
RECIPES: dict[str, Callable[[Any, Weights, bool], Made]] = {
    "torch.nn.modules.activation.MultiheadAttention": _torch_attention,
    "torch.nn.modules.transformer.TransformerEncoderLayer": _encoder_layer,
    "torch.nn.modules.normalization.LayerNorm": _norm,
    "torch.nn.modules.normalization.RMSNorm": _norm,
    f"{_HF}.bert.modeling_bert.BertSelfAttention": _bert_self,
    f"{_HF}.bert.modeling_bert.BertAttention": _bert_attention,
    f"{_HF}.bert.modeling_bert.BertLayer": _bert_layer,
    f"{_HF}.gpt2.modeling_gpt2.GPT2Attention": _gpt2_attention,
    f"{_HF}.gpt2.modeling_gpt2.GPT2Block": _gpt2_block,
    f"{_HF}.llama.modeling_llama.LlamaAttention": _llama_attention,
    f"{_HF}.llama.modeling_llama.LlamaDecoderLayer": _llama_layer,
    f"{_HF}.vit.modeling_vit.ViTAttention": _vit_attention,
    f"{_HF}.vit.modeling_vit.ViTLayer": _vit_layer,
    f"{_HF}.deit.modeling_deit.DeiTAttention": _vit_attention,
    f"{_HF}.deit.modeling_deit.DeiTLayer": _vit_layer,
    "timm.layers.attention.Attention": _timm_attention,
    "timm.models.vision_transformer.Attention": _timm_attention,
    "timm.models.vision_transformer.Block": _timm_block,
}
"""By the full name of the class; a subclass is read as its base, and compared."""
