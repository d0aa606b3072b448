"""Tables of GGUF files: the names of llama.cpp for tensors and keys, and what its programs compute with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from otattn.models.families.decoders import GEMMA2, GPT2, LLAMA, QWEN2, QWEN3
from otattn.models.family import Family, linear
from otattn.models.keys import Facts, Field, Keys, Rule, neutral, ones, sizes
from otattn.models.positions import RopeKeys, Windows

__all__ = ["GGUF"]

_SIZES = {
    "d": "embedding_length",
    "layers": "block_count",
    "h": "feed_forward_length",
    "vocab": "vocab_size",
    "width": "attention.key_length",
    "value_width": "attention.value_length",
}
_OFF: dict[str, tuple[float, ...]] = {
    "rope.scaling.yarn_ext_factor": (0.0, -1.0),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1.0,)),
    # 0 is read as no scaling
    **dict.fromkeys(
        ("rope.scaling.factor", "rope.scale_linear", "logit_scale", "residual_scale", "embedding_scale"), (1.0, 0.0)
    ),
    **dict.fromkeys(("expert_count", "expert_used_count"), (0,)),
    **dict.fromkeys(("rope.scaling.yarn_log_multiplier", "attention.clamp_kqv"), (0.0,)),
    **dict.fromkeys(("attention.max_alibi_bias", "attention.sliding_window"), (0.0,)),
}
"""Values of keys with which what they switch on is off."""
_HARMLESS = (
    "rope.scaling.original_context_length rope.scaling.finetuned attention.dropout final_logit_softcapping pooling_type"
)


def _scaling(arch: str) -> Rule:
    """No scaling; "linear" is none when its factor is 1."""

    def rule(value: Any, facts: Facts) -> str | None:
        given = facts["given"]
        factor = given.get(f"{arch}.rope.scaling.factor", given.get(f"{arch}.rope.scale_linear"))
        return None if value in (None, "", "none") or (value == "linear" and factor == 1.0) else "'none' (not scaled)"

    return rule


def _attention_scale(value: Any, facts: Facts) -> str | None:
    """0 and 1 / sqrt(k) are the plain scale."""
    plain = facts["width"] ** -0.5
    close = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value - plain) <= 1e-6 * plain
    return None if value is None or value == 0.0 or close else f"1 / sqrt({facts['width']})"


def _keys(arch: str, *, eps: str, fields: Mapping[str, Field], without: str = "", **more: Rule) -> Keys:
    """The keys of an architecture, whose names start with it; ``without`` are keys that it reads otherwise, or not at all."""
    own = {
        "rope.scaling.type": _scaling(arch),
        "attention.scale": _attention_scale,
        "attention.causal": neutral(True),
        "use_parallel_residual": neutral(False),
        "tensor_data_layout": neutral("Meta AI original pth"),
        **{key: neutral(*values) for key, values in _OFF.items()},
        **sizes(**_SIZES),
        **more,
    }
    return Keys(
        fields={
            "heads": Field((f"{arch}.attention.head_count",)),
            "kv_heads": Field((f"{arch}.attention.head_count_kv",)),
            "eps": Field((f"{arch}.attention.{eps}",)),
            **fields,
        },
        rules={f"{arch}.{key}": rule for key, rule in own.items() if key not in without.split()}
        | {"general.architecture": neutral(arch), "general.type": neutral("model")},
        harmless=frozenset(f"{arch}.{key}" for key in _HARMLESS.split()),
        namespaces=("general.", "tokenizer.", "split.", "quantize.", "imatrix.", "mradermacher."),
    )


def _rms(arch: str, *, activation: str = "silu", fields: Mapping[str, Field] | None = None, **other: Any) -> Keys:
    """Keys of the kin of Llama."""
    read = {"activation": Field((), activation), "max_length": Field((f"{arch}.context_length",)), **(fields or {})}
    return _keys(arch, eps="layer_norm_rms_epsilon", fields=read, **other)


def _rope(arch: str, layout: str) -> RopeKeys:
    return RopeKeys(base=(f"{arch}.rope.freq_base",), layout=layout, turned=(f"{arch}.rope.dimension_count",))


_NAMES: dict[str, Any] = {
    "layer": "blk.{i}.",
    "layer_norms": {"first": "attn_norm", "second": "ffn_norm"},
    "norms": {"final": "output_norm"},
    "embeddings": {"words": ("token_embd", "vocab d")},
    "layer_buffers": {},
    "unused": (r"(output|cls|cls\.output)\.(weight|bias)",),
    "doubt": lambda given, facts: None,
}
_LINEAR = linear("attn_q attn_k attn_v attn_output ffn_up ffn_down ffn_gate", free=True)


def _kin(family: Family, *, keys: Keys, layout: str = "half", **other: Any) -> Family:
    """A family with the maps of Llama."""
    parts = {**_NAMES, "linear": _LINEAR, "buffers": {"rope_freqs.weight": ones}, "windows": None, **other}
    return replace(family, keys=keys, rotary=_rope(family.name, layout), **parts)


def _width_of_scale(facts: Facts) -> int:
    """No key tells the scale of Gemma 2: it is 1 / sqrt(k) but for the size with 46 layers, where it is sqrt(H / d)."""
    return int(facts["d"] // facts["heads"] if facts["layers"] == 46 else facts["width"])


_LLAMA = _kin(
    LLAMA,
    keys=_rms("llama"),
    layout="adjacent",  # rows of queries and keys are stored in this order
    buffers={},
    divisors="rope_freqs.weight",
)
_QWEN2 = _kin(QWEN2, keys=_rms("qwen2"))
_QWEN3 = _kin(
    QWEN3,
    keys=_rms("qwen3"),
    layer_arrays={"query_norm": ("attn_q_norm.weight", "width"), "key_norm": ("attn_k_norm.weight", "width")},
)
_GEMMA2 = _kin(
    GEMMA2,
    keys=_rms(
        "gemma2",
        activation="gelu_pytorch_tanh",
        fields={
            "cap": Field(("gemma2.attn_logit_softcapping",), 50.0),
            "width_of_scale": Field((), _width_of_scale),
        },
        without="attention.scale attention.sliding_window",
        **{"attention.sliding_window_pattern": neutral(2)},
    ),
    layer_norms={
        "first": "attn_norm",
        "after_first": "post_attention_norm",
        "second": "ffn_norm",
        "after_second": "post_ffw_norm",
    },
    norm="rms",  # the 1 is added to gains before they are stored
    biases="",
    windows=Windows(size="gemma2.attention.sliding_window", layers="even"),
)
_GPT2 = replace(
    GPT2,
    **_NAMES
    | {
        "linear": {
            "fused": ("attn_qkv", "3d d"),
            "output": ("attn_output", "d d"),
            "up": ("ffn_up", "h d"),
            "down": ("ffn_down", "d h"),
        },
        "embeddings": {"words": ("token_embd", "vocab d"), "positions": ("position_embd", "positions d")},
        "transposed": False,
        "keys": _keys(
            "gpt2",
            eps="layer_norm_epsilon",
            fields={"activation": Field((), "gelu_new")},
            without="rope.scaling.type attention.scale",
            **sizes(positions="context_length"),
        ),
    },
)

GGUF = {family.name: family for family in (_LLAMA, _QWEN2, _QWEN3, _GEMMA2, _GPT2)}
"""By ``general.architecture``. Mistral's files are of the llama type. Left out are types whose programs compute another map than
the model was trained with (BERT and GPT-NeoX: GELU by its tanh approximation), and those without a table here."""
