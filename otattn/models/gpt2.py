"""GPT-2 decoders: absolute positions, LayerNorm before each part, causal mask."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.attention import LayerNorm
from otattn.models.checkpoint import Checkpoint, open_checkpoint
from otattn.models.feed_forward import activation_name
from otattn.models.layer import ModelLayer, Projections, norm_domain
from otattn.models.transformer import MAX_LAYERS, ModelConfig, Transformer, feed_forward, layer_norm, read_config, whole

__all__ = ["GPT2", "gpt2"]

Array = NDArray[np.float64]
HEAD_DIM = 64


class GPT2(Transformer):
    """A GPT-2 decoder; made by :func:`gpt2`."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, prefix: str) -> None:
        super().__init__(checkpoint, config)
        self.prefix = prefix

    def _norm(self, name: str) -> LayerNorm:
        return layer_norm(self.checkpoint, self.prefix + name, self.config.dim, self.config.eps)

    def _layer(self, index: int) -> ModelLayer:
        c, stem, read = self.config, f"{self.prefix}h.{index}.", self.checkpoint.tensor
        d = c.dim
        # Conv1D: y = x W + b, queries, keys and values side by side
        q, k, v = np.split(read(f"{stem}attn.c_attn.weight", d, 3 * d).T, 3)
        bq, bk, bv = np.split(read(f"{stem}attn.c_attn.bias", 3 * d), 3)
        out, bo = read(f"{stem}attn.c_proj.weight", d, d).T, read(f"{stem}attn.c_proj.bias", d)
        first = self._norm(f"h.{index}.ln_1")
        return ModelLayer(
            index,
            Projections(q, k, v, out, bq, bk, bv, bo, c.num_heads, c.num_heads, masked=True),
            first,
            self._norm(f"h.{index}.ln_2"),
            feed_forward(
                self.checkpoint,
                f"{stem}mlp.c_fc",
                f"{stem}mlp.c_proj",
                activation=c.activation,
                d=d,
                transposed=True,
            ),
            True,
            norm_domain(first),
        )

    def embed(self, token_ids: NDArray[np.int64]) -> Array:
        d, read = self.config.dim, self.checkpoint.tensor
        words, index = np.unique(token_ids, return_inverse=True)
        X = read(f"{self.prefix}wte.weight", None, d, rows=words)[index.reshape(token_ids.shape)]
        return np.asarray(X + read(f"{self.prefix}wpe.weight", None, d)[: token_ids.shape[1]])

    def _final_norm(self) -> LayerNorm:
        return self._norm("ln_f")


def gpt2(
    source: Checkpoint | Mapping[str, Any] | str | PathLike[str],
    *,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    num_heads: int | None = None,
    eps: float | None = None,
    activation: str | None = None,
) -> GPT2:
    """A GPT-2 model from a checkpoint, with or without a prefix before its names ("transformer.", ...).

    Heads are :class:`MaskedAttention` of softmax heads, and act on sequences and space-time measures.

    Parameters
    ----------
    source : path, mapping of arrays, or Checkpoint
    config : mapping or path, optional
        The model's ``config.json``; the one beside the file by default, where there is one.
    num_heads : int, optional
        From the configuration, else one head for 64 dimensions, as in all published sizes.
    eps : float, optional
        Of LayerNorm; from the configuration, else 1e-5.
    activation : str, optional
        From the configuration, else "gelu_new" (GELU through tanh).

    Returns
    -------
    GPT2

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``models`` is not installed.
    ValueError
        A damaged file, tensors that are missing or do not fit, another architecture or scaling of the logits.
    """
    checkpoint = open_checkpoint(source)
    given = read_config(checkpoint, config)
    kind = given.get("model_type", "gpt2")
    if kind != "gpt2" or given.get("scale_attn_by_inverse_layer_idx") or given.get("scale_attn_weights") is False:
        raise ValueError(
            f"a GPT-2 model with logits over sqrt(k) is required, received model_type {kind!r} or another scaling; "
            "build its layers from plain arrays with otattn.load_layer."
        )
    prefix = checkpoint.prefix_of("wte.weight")
    vocab, d = checkpoint.shapes[f"{prefix}wte.weight"][:2]
    heads = num_heads if num_heads is not None else given.get("n_head", given.get("num_attention_heads"))
    if heads is None:
        if d % HEAD_DIM:
            raise ValueError(
                f"num_heads must be given: {checkpoint.origin} has no config.json beside it, and its dimension {d} is no "
                f"multiple of {HEAD_DIM}."
            )
        heads = d // HEAD_DIM
    layers = checkpoint.count_layers(lambda i: f"{prefix}h.{i}.attn.c_attn.weight")
    return GPT2(
        checkpoint,
        ModelConfig(
            family="gpt2",
            num_layers=whole(layers, "the number of layers", most=MAX_LAYERS),
            num_heads=whole(heads, "num_heads", most=d),
            num_kv_heads=whole(heads, "num_heads", most=d),
            dim=d,
            vocab_size=vocab,
            max_length=checkpoint.shapes.get(f"{prefix}wpe.weight", (0,))[0],
            eps=check.positive(eps if eps is not None else given.get("layer_norm_epsilon", 1e-5), "eps", zero=True),
            activation=activation_name(activation or given.get("activation_function", "gelu_new")),
            pre_norm=True,
            causal=True,
        ),
        prefix,
    )
