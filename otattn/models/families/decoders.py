"""Tables of the families whose tokens see those before them: GPT-2, OPT, GPT-NeoX, Llama and its kin, gpt-oss."""

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
    Rule,
    every,
    frequencies,
    has_biases,
    minus_infinity,
    neutral,
    same,
    sizes,
    triangle,
)
from otattn.models.positions import RopeKeys, Windows

__all__ = ["DECODERS", "GEMMA2", "GPT2", "LLAMA", "QWEN2", "QWEN3"]

_COMMON = COMMON | {"is_causal": neutral(True)}
_HEADS = r"(lm_head|score|classifier|qa_outputs)\.(weight|bias)"


def _hidden(value: Any, facts: Facts) -> str | None:
    """None is four times the dimension."""
    wanted = 4 * facts["d"] if value is None else value
    return None if wanted == facts["h"] and not isinstance(value, bool) else f"{facts['h']}, as the tensors have it"


GPT2 = Family(
    name="gpt2",
    title="GPT-2",
    layer="h.{i}.",
    linear={
        "fused": ("attn.c_attn", "d 3d"),
        "output": ("attn.c_proj", "d d"),
        "up": ("mlp.c_fc", "d h"),
        "down": ("mlp.c_proj", "h d"),
    },
    layer_norms={"first": "ln_1", "second": "ln_2"},
    norms={"final": "ln_f"},
    embeddings={"words": ("wte", "vocab d"), "positions": ("wpe", "positions d")},
    transposed=True,  # Conv1D: y = x W + b
    keys=Keys(
        fields={
            "heads": Field(("n_head", "num_attention_heads")),
            "eps": Field(("layer_norm_epsilon",), 1e-5),
            "activation": Field(("activation_function",), "gelu_new"),
        },
        rules=_COMMON
        | sizes(
            d="n_embd hidden_size",
            layers="n_layer num_hidden_layers",
            positions="n_positions n_ctx max_position_embeddings",
            vocab="vocab_size",
        )
        | {
            "model_type": neutral("gpt2"),
            "architectures": every(r"(TF|Flax)?GPT2(Model|LMHeadModel|DoubleHeadsModel|For\w+)"),
            "n_inner": _hidden,
            "scale_attn_weights": neutral(True),
            "scale_attn_by_inverse_layer_idx": neutral(False),
        },
    ),
    layer_buffers={"attn.bias": triangle, "attn.masked_bias": minus_infinity},
    unused=(r"(lm_head|score|classifier)\.(weight|bias)", r"multiple_choice_head\.summary\.(weight|bias)"),
)

OPT = Family(
    name="opt",
    title="OPT",
    layer="layers.{i}.",
    linear=linear("self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj fc1 fc2"),
    layer_norms={"first": "self_attn_layer_norm", "second": "final_layer_norm"},
    norms={"final": "final_layer_norm"},
    embeddings={"words": ("embed_tokens", "vocab d"), "positions": ("embed_positions", "positions d")},
    biases="any",
    first_position=2,
    counted=True,
    keys=Keys(
        fields={
            "heads": Field(("num_attention_heads",)),
            "eps": Field((), 1e-5),
            "activation": Field(("activation_function",), "relu"),
        },
        rules=_COMMON
        | sizes(d="hidden_size word_embed_proj_dim", layers="num_hidden_layers", h="ffn_dim", vocab="vocab_size")
        | {
            "model_type": neutral("opt"),
            "architectures": every(r"(TF|Flax)?OPT(Model|For\w+)"),
            "max_position_embeddings": same("positions", beyond=2),
            "do_layer_norm_before": neutral(True),
            "_remove_final_layer_norm": neutral(False),
            "layer_norm_elementwise_affine": neutral(True),
            "enable_bias": has_biases("linear"),
        },
    ).but(harmless="dropout"),
    unused=(_HEADS,),
)

NEOX = Family(
    name="gpt_neox",
    title="GPT-NeoX",
    layer="layers.{i}.",
    linear={
        "by_head": ("attention.query_key_value", "3d d"),
        "output": ("attention.dense", "d d"),
        "up": ("mlp.dense_h_to_4h", "h d"),
        "down": ("mlp.dense_4h_to_h", "d h"),
    },
    layer_norms={"first": "input_layernorm", "second": "post_attention_layernorm"},
    norms={"final": "final_layer_norm"},
    embeddings={"words": ("embed_in", "vocab d")},
    biases="any",
    order="parallel",
    keys=Keys(
        fields={
            "heads": Field(("num_attention_heads",)),
            "eps": Field(("layer_norm_eps",), 1e-5),
            "activation": Field(("hidden_act",), "gelu"),
            "max_length": Field(("max_position_embeddings",)),
            "parallel": Field(("use_parallel_residual",), True),
        },
        rules=_COMMON
        | sizes(d="hidden_size", layers="num_hidden_layers", h="intermediate_size", vocab="vocab_size")
        | {
            "model_type": neutral("gpt_neox"),
            "architectures": every(r"GPTNeoX(Model|For\w+)"),
            "use_parallel_residual": neutral(True, False),
            "attention_bias": has_biases("attention"),
        },
    ).but(harmless="is_decoder"),
    layer_buffers={
        "attention.bias": triangle,
        "attention.masked_bias": minus_infinity,
        "attention.rotary_emb.inv_freq": frequencies,
    },
    unused=(_HEADS, r"embed_out\.weight"),
    rotary=RopeKeys(
        base=("rotary_emb_base", "rope_theta"), partial=("rotary_pct", "partial_rotary_factor"), default_partial=0.25
    ),
)


def _doubt(given: Mapping[str, Any], _: Facts) -> str | None:
    """Gemma, Helium and ERNIE 4.5 have the same tensors and other maps."""
    if given.get("hidden_act") not in (None, "silu", "swish"):
        return f"its activation is {given['hidden_act']!r}, as in Gemma, whose norms differ"
    if given.get("transformers_version") is not None:
        return "its configuration was written by transformers (transformers_version), which names the model_type, without one"
    return None


LLAMA = Family(
    name="llama",
    title="Llama",
    layer="layers.{i}.",
    linear=linear(
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.up_proj mlp.down_proj mlp.gate_proj",
        free=True,
    ),
    layer_norms={"first": "input_layernorm", "second": "post_attention_layernorm"},
    norms={"final": "norm"},
    embeddings={"words": ("embed_tokens", "vocab d")},
    biases="any",
    norm="rms",
    keys=Keys(
        fields={
            "heads": Field(("num_attention_heads",)),
            "kv_heads": Field(("num_key_value_heads",)),
            "eps": Field(("rms_norm_eps",), 1e-6),
            "activation": Field(("hidden_act",), "silu"),
            "max_length": Field(("max_position_embeddings",)),
        },
        rules=_COMMON
        | sizes(
            d="hidden_size", layers="num_hidden_layers", h="intermediate_size", vocab="vocab_size", width="head_dim"
        )
        | {
            "model_type": neutral("llama"),
            "architectures": every(r"(TF|Flax)?L[Ll]a[Mm]a(Model|For\w+)"),
            "attention_bias": has_biases("attention"),
            "mlp_bias": has_biases("mlp"),
            "rope_interleaved": neutral(False),
            "partial_rotary_factor": neutral(1.0),
            "layer_types": every("full_attention"),
            "is_llama_config": neutral(True),
        },
    ),
    buffers={"rotary_emb.inv_freq": frequencies},
    layer_buffers={"self_attn.rotary_emb.inv_freq": frequencies},
    unused=(_HEADS,),
    rotary=RopeKeys(),
    doubt=_doubt,
)


def _kin(name: str, title: str, classes: str, keys: Keys, **other: Any) -> Family:
    """A family with the tensors of Llama."""
    own: dict[str, Rule] = {"model_type": neutral(name), "architectures": every(rf"(TF|Flax)?{classes}(Model|For\w+)")}
    return replace(LLAMA, name=name, title=title, doubt=lambda given, facts: None, keys=keys.but(rules=own), **other)


_KIN_RULES = {key: rule for key, rule in LLAMA.keys.rules.items() if key not in ("layer_types", "mlp_bias")}
_PLAIN = replace(LLAMA.keys, rules={key: rule for key, rule in _KIN_RULES.items() if key != "attention_bias"})
_SWITCHED = replace(LLAMA.keys, rules=_KIN_RULES)
_HEAD_NORMS = {"query_norm": ("self_attn.q_norm.weight", "width"), "key_norm": ("self_attn.k_norm.weight", "width")}

MISTRAL = _kin("mistral", "Mistral", "Mistral", _PLAIN, biases="", windows=Windows())
QWEN2 = _kin("qwen2", "Qwen2", "Qwen2", _PLAIN, biases="query key value", windows=Windows(layers="late"))
QWEN3 = _kin("qwen3", "Qwen3", "Qwen3", _SWITCHED, layer_arrays=_HEAD_NORMS, windows=Windows(layers="late"))
GEMMA2 = _kin(
    "gemma2",
    "Gemma 2",
    "Gemma2",
    _SWITCHED.but(
        fields={
            "activation": Field(("hidden_activation", "hidden_act"), "gelu_pytorch_tanh"),
            "width_of_scale": Field(("query_pre_attn_scalar",), 256),
            "cap": Field(("attn_logit_softcapping",), 50.0, off=True),
        },
        rules={"use_bidirectional_attention": neutral(False)},
        harmless="cache_implementation",
    ),
    layer_norms={
        "first": "input_layernorm",
        "after_first": "post_attention_layernorm",
        "second": "pre_feedforward_layernorm",
        "after_second": "post_feedforward_layernorm",
    },
    norm="shifted",
    scaled_words=True,
    windows=Windows(layers="even"),
)
GPT_OSS = _kin(
    "gpt_oss",
    "gpt-oss",
    "GptOss",
    _SWITCHED.but(
        fields={
            "activation": Field((), "silu"),
            "eps": Field(("rms_norm_eps",), 1e-5),
            "top": Field(("num_experts_per_tok", "experts_per_token"), 4),
            "alpha": Field(("swiglu_alpha",), 1.702),
            "limit": Field(("swiglu_limit",), 7.0),
        },
        rules={"hidden_act": neutral("silu"), **sizes(experts="num_local_experts num_experts")},
        harmless="router_aux_loss_coef output_router_logits initial_context_length",
    ),
    linear={
        **{use: LLAMA.linear[use] for use in ("query", "key", "value", "output")},
        "router": ("mlp.router", "experts d"),
    },
    biases="query key value output router",
    layer_arrays={
        "sinks": ("self_attn.sinks", "heads"),
        "down": ("mlp.experts.down_proj", "experts h d"),
        "down_bias": ("mlp.experts.down_proj_bias", "experts d"),
        "gate_up": ("mlp.experts.gate_up_proj", "experts d 2h"),
        "gate_up_bias": ("mlp.experts.gate_up_proj_bias", "experts 2h"),
    },
    windows=Windows(default=128, layers="even"),
    rotary=RopeKeys(
        default_base=150_000.0,
        default={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        | {"original_max_position_embeddings": 4096},
    ),
)


DECODERS = (GPT2, OPT, NEOX, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GPT_OSS)
