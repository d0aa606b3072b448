"""Tables of the families whose tokens see all others: BERT and its kin, ModernBERT, ViT, the encoder of T5."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from otattn.models.family import Family, linear
from otattn.models.keys import (
    COMMON,
    Facts,
    Field,
    Keys,
    every,
    has_biases,
    neutral,
    numbered,
    plain_activation,
    same,
    sizes,
    zeros,
)
from otattn.models.positions import RopeKeys, Windows

__all__ = ["ENCODERS"]


def _doubt(given: Mapping[str, Any], facts: Facts) -> str | None:
    """RoBERTa has the same tensors, but its positions start after the padding token's index, 1."""
    if facts["types"] == 1 and given.get("type_vocab_size") is None:
        return "has one row of token_type_embeddings, as RoBERTa, whose positions start elsewhere"
    pad = given.get("pad_token_id")
    return None if pad in (None, 0) else f"has pad_token_id {pad!r}, as RoBERTa, whose positions start elsewhere"


BERT = Family(
    name="bert",
    title="BERT",
    layer="encoder.layer.{i}.",
    linear=linear(
        "attention.self.query attention.self.key attention.self.value attention.output.dense intermediate.dense output.dense"
    ),
    layer_norms={"first": "attention.output.LayerNorm", "second": "output.LayerNorm"},
    norms={"embedding": "embeddings.LayerNorm"},
    embeddings={
        "words": ("embeddings.word_embeddings", "vocab d"),
        "positions": ("embeddings.position_embeddings", "positions d"),
        "types": ("embeddings.token_type_embeddings", "types d"),
    },
    order="post",
    causal=False,
    keys=Keys(
        fields={
            "heads": Field(("num_attention_heads",)),
            "eps": Field(("layer_norm_eps",), 1e-12),
            "activation": Field(("hidden_act",), "gelu"),
        },
        rules=COMMON
        | sizes(
            d="hidden_size",
            layers="num_hidden_layers",
            h="intermediate_size",
            vocab="vocab_size",
            positions="max_position_embeddings",
            types="type_vocab_size",
        )
        | {
            "model_type": neutral("bert"),
            "architectures": every(r"(TF|Flax)?Bert(Model|LMHeadModel|For\w+)"),
            "position_embedding_type": neutral("absolute"),
            "is_decoder": neutral(False),
            "is_causal": neutral(False),
            "directionality": neutral("bidi"),
        },
    ),
    buffers={"embeddings.position_ids": numbered, "embeddings.token_type_ids": zeros},
    unused=(
        r"pooler\.dense\.(weight|bias)",
        r"cls\.(predictions|seq_relationship)\..+",
        r"(classifier|qa_outputs)\.(weight|bias)",
    ),
    doubt=_doubt,
)

ROBERTA = replace(
    BERT,
    name="roberta",
    aliases=("xlm-roberta",),
    title="RoBERTa",
    keys=BERT.keys.but(
        fields={"pad": Field(("pad_token_id",), 1), "eps": Field(("layer_norm_eps",), 1e-12)},
        rules={
            "model_type": neutral("roberta", "xlm-roberta"),
            "architectures": every(r"(TF|Flax)?(XLM)?R[Oo][Bb][Ee][Rr][Tt]a(Model|For\w+)"),
        },
    ),
    buffers={"embeddings.token_type_ids": zeros},
    unused=(
        r"embeddings\.position_ids",
        r"pooler\.dense\.(weight|bias)",
        r"lm_head\..+",
        r"classifier\.(dense\.|out_proj\.)?(weight|bias)",
        r"qa_outputs\.(weight|bias)",
    ),
    first_position=None,
    doubt=lambda given, facts: None,
)

ELECTRA = replace(
    BERT,
    name="electra",
    title="ELECTRA",
    embeddings={use: (name, shape.replace(" d", " e")) for use, (name, shape) in BERT.embeddings.items()},
    optional={"projection": ("embeddings_project.weight", "d e"), "projection_bias": ("embeddings_project.bias", "d")},
    keys=BERT.keys.but(
        rules={
            "model_type": neutral("electra"),
            "architectures": every(r"(TF|Flax)?Electra(Model|For\w+)"),
            "embedding_size": same("e"),
        },
    ),
    unused=(
        r"(discriminator|generator)_(predictions|lm_head)\..+",
        r"classifier\.(dense\.|out_proj\.)?(weight|bias)",
        r"qa_outputs\.(weight|bias)",
    ),
    doubt=lambda given, facts: None,
)

DISTILBERT = replace(
    BERT,
    name="distilbert",
    title="DistilBERT",
    layer="transformer.layer.{i}.",
    linear=linear("attention.q_lin attention.k_lin attention.v_lin attention.out_lin ffn.lin1 ffn.lin2"),
    layer_norms={"first": "sa_layer_norm", "second": "output_layer_norm"},
    embeddings={use: BERT.embeddings[use] for use in ("words", "positions")},
    keys=Keys(
        fields={
            "heads": Field(("n_heads", "num_attention_heads")),
            "eps": Field((), 1e-12),
            "activation": Field(("activation",), "gelu"),
        },
        rules=COMMON
        | sizes(
            d="dim hidden_size",
            layers="n_layers num_hidden_layers",
            h="hidden_dim",
            vocab="vocab_size",
            positions="max_position_embeddings",
        )
        | {"model_type": neutral("distilbert"), "architectures": every(r"(TF|Flax)?DistilBert(Model|For\w+)")},
    ).but(harmless="dropout sinusoidal_pos_embds"),
    buffers={"embeddings.position_ids": numbered},
    unused=(r"vocab_(transform|layer_norm|projector)\..+", r"(pre_classifier|classifier|qa_outputs)\.(weight|bias)"),
    doubt=lambda given, facts: None,
)

MODERNBERT = Family(
    name="modernbert",
    title="ModernBERT",
    layer="layers.{i}.",
    linear={
        "fused": ("attn.Wqkv", "3d d"),
        "output": ("attn.Wo", "d d"),
        "down": ("mlp.Wo", "d h"),
        "gate_up": ("mlp.Wi", "2h d"),
    },
    layer_norms={"first": "attn_norm", "second": "mlp_norm"},
    norms={"embedding": "embeddings.norm", "final": "final_norm"},
    embeddings={"words": ("embeddings.tok_embeddings", "vocab d")},
    biases="any",
    norm="bare",
    causal=False,
    plain_first=True,
    keys=Keys(
        fields={
            "heads": Field(("num_attention_heads",)),
            "eps": Field(("norm_eps",), 1e-5),
            "activation": Field(("hidden_activation",), "gelu"),
            "max_length": Field(("max_position_embeddings",)),
        },
        rules=COMMON
        | sizes(d="hidden_size", layers="num_hidden_layers", h="intermediate_size", vocab="vocab_size")
        | {
            "model_type": neutral("modernbert"),
            "architectures": every(r"ModernBert(Model|For\w+)"),
            "norm_bias": neutral(False),
            "sliding_window": neutral(),  # half of local_attention
            "attention_bias": has_biases("attention"),
            "mlp_bias": has_biases("mlp"),
        },
    ).but(
        harmless="""deterministic_flash_attn sparse_prediction sparse_pred_ignore_index reference_compile
        repad_logits_with_grad position_embedding_type layer_norm_eps"""
    ),
    unused=(r"head\.(dense|norm)\.(weight|bias)", r"decoder\.(weight|bias)", r"classifier\.(weight|bias)"),
    rotary=RopeKeys(base=("global_rope_theta",), default_base=160_000.0, part="full_attention"),
    local_rotary=RopeKeys(base=("local_rope_theta",), part="sliding_attention"),
    windows=Windows("local_attention", 128, "thirds", symmetric=True),
)


def _grid(value: Any, facts: Facts) -> str | None:
    """The side of square images: as many patches as there are positions, but for the first tokens."""
    side = round((facts["positions"] - facts["firsts"]) ** 0.5) * facts["patch"]
    return None if value is None or value == side else f"{side}, as the tensors have it"


def _dense(value: Any, facts: Facts) -> str | None:
    """The activation once more."""
    told = plain_activation(facts["given"].get("feed_forward_proj", "relu"))
    return None if value is None or value == told else f"{told!r}, as feed_forward_proj has it"


_PATCHES = {
    "patches": ("embeddings.patch_embeddings.projection.weight", "d channels patch patch"),
    "patch_bias": ("embeddings.patch_embeddings.projection.bias", "d"),
    "class": ("embeddings.cls_token", "1 1 d"),
    "positions": ("embeddings.position_embeddings", "1 positions d"),
}
VIT = Family(
    name="vit",
    title="ViT",
    layer="encoder.layer.{i}.",
    linear=linear(
        "attention.attention.query attention.attention.key attention.attention.value attention.output.dense "
        "intermediate.dense output.dense"
    ),
    layer_norms={"first": "layernorm_before", "second": "layernorm_after"},
    norms={"final": "layernorm"},
    arrays=_PATCHES,
    biases="any",
    causal=False,
    keys=Keys(
        fields={
            "heads": Field(("num_attention_heads",)),
            "eps": Field(("layer_norm_eps",), 1e-12),
            "activation": Field(("hidden_act",), "gelu"),
        },
        rules=COMMON
        | sizes(
            d="hidden_size",
            layers="num_hidden_layers",
            h="intermediate_size",
            channels="num_channels",
            patch="patch_size",
        )
        | {
            "model_type": neutral("vit"),
            "architectures": every(r"(TF|Flax)?ViT(Model|For\w+)"),
            "image_size": _grid,
            "qkv_bias": has_biases("qkv"),
        },
    ).but(harmless="encoder_stride"),
    unused=(
        r"pooler\.dense\.(weight|bias)",
        r"classifier\.(weight|bias)",
        r"embeddings\.mask_token",
        r"decoder\.0\.(weight|bias)",
    ),
)
DEIT = replace(
    VIT,
    name="deit",
    title="DeiT",
    arrays={**_PATCHES, "distillation": ("embeddings.distillation_token", "1 1 d")},
    keys=VIT.keys.but(
        rules={"model_type": neutral("deit"), "architectures": every(r"(TF)?DeiT(Model|For\w+)")},
    ),
    unused=(*VIT.unused, r"(cls|distillation)_classifier\.(weight|bias)"),
)
_IN_MEMORY = linear("attention.q_proj attention.k_proj attention.v_proj attention.o_proj mlp.fc1 mlp.fc2")
"""The names in a model object of transformers 5; files keep the old ones."""

T5 = Family(
    name="t5",
    title="T5",
    layer="encoder.block.{i}.layer.",
    linear=linear(
        "0.SelfAttention.q 0.SelfAttention.k 0.SelfAttention.v 0.SelfAttention.o 1.DenseReluDense.wi 1.DenseReluDense.wo",
        free=True,
    ),
    layer_norms={"first": "0.layer_norm", "second": "1.layer_norm"},
    norms={"final": "encoder.final_layer_norm"},
    embeddings={"words": ("shared", "vocab d")},
    arrays={
        "relative": ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "buckets heads"),
    },
    biases="",
    norm="rms",
    causal=False,
    keys=Keys(
        fields={
            "heads": Field(("num_heads", "num_attention_heads")),
            "eps": Field(("layer_norm_epsilon",), 1e-6),
            "activation": Field(("feed_forward_proj",), "relu"),
            "farthest": Field(("relative_attention_max_distance",), 128),
            "scale": Field((), 1.0),
        },
        rules=COMMON
        | sizes(
            d="d_model hidden_size",
            layers="num_layers num_hidden_layers",
            h="d_ff",
            vocab="vocab_size",
            width="d_kv head_dim",
            buckets="relative_attention_num_buckets",
        )
        | {
            "model_type": neutral("t5"),
            "architectures": every(r"(TF|Flax)?T5(Model|EncoderModel|WithLMHeadModel|For\w+)"),
            "feed_forward_proj": every(r"(?!gated-).+"),
            "dense_act_fn": _dense,
            "is_gated_act": neutral(False),
            "is_decoder": neutral(False),
            "is_encoder_decoder": neutral(True, False),
        },
    ).but(harmless="dropout_rate num_decoder_layers scale_decoder_outputs n_positions"),
    unused=(r"decoder\.(block|final_layer_norm)\..+", r"(lm_head|classifier|qa_outputs)\..+"),
    tied=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
)
T5_GATED = replace(
    T5,
    linear={
        **T5.linear,
        "up": ("1.DenseReluDense.wi_1", "h d"),
        "gate": ("1.DenseReluDense.wi_0", "h d"),
    },
    keys=T5.keys.but(
        fields={"activation": Field(("feed_forward_proj",), "gated-gelu")},
        rules={"feed_forward_proj": every(r"gated-.+"), "is_gated_act": neutral(True, None)},
    ),
)

ENCODERS = (
    *(BERT, ROBERTA, ELECTRA, DISTILBERT, MODERNBERT, VIT, DEIT),
    *(replace(family, layer="layers.{i}.", linear=_IN_MEMORY) for family in (VIT, DEIT)),
    *(T5, T5_GATED),
)
