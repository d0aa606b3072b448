"""GPT-2 decoders: absolute positions, LayerNorm before each part and at the end, causal mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.family import Family
from otattn.models.keys import COMMON, Field, Keys, Rule, every, neutral, same
from otattn.models.opening import Config, Source, configure, read_config
from otattn.models.shards import open_checkpoint
from otattn.models.transformer import Transformer

__all__ = ["GPT2", "gpt2"]

HEAD_DIM = 64


def _triangle(values: NDArray[np.float64], _: Mapping[str, Any]) -> str | None:
    n = values.shape[-1] if values.ndim else 0
    square = values.ndim >= 2 and values.size == n * n
    return None if square and np.array_equal(values.reshape(n, n), np.tri(n)) else "ones up to the diagonal"


def _minus_infinity(values: NDArray[np.float64], _: Mapping[str, Any]) -> str | None:
    return None if values.size == 1 and values.item() <= -1e4 else "one number of at most -1e4"


def _hidden() -> Rule:
    """None is four times the dimension."""

    def rule(value: Any, facts: Mapping[str, Any]) -> str | None:
        wanted = 4 * facts["d"] if value is None else value
        return None if wanted == facts["h"] and not isinstance(value, bool) else f"{facts['h']}, as the tensors have it"

    return rule


FAMILY = Family(
    name="gpt2",
    title="GPT-2",
    embeddings={"words": ("wte", "vocab d"), "positions": ("wpe", "positions d")},
    norms={"final": "ln_f"},
    layer="h.{i}.",
    linear={
        "fused": ("attn.c_attn", "d 3d"),
        "output": ("attn.c_proj", "d d"),
        "up": ("mlp.c_fc", "d h"),
        "down": ("mlp.c_proj", "h d"),
    },
    layer_norms={"first": "ln_1", "second": "ln_2"},
    biases="all",
    norm_bias=True,
    transposed=True,  # Conv1D: y = x W + b
    pre_norm=True,
    causal=True,
    keys=Keys(
        fields={
            "heads": Field(("n_head", "num_attention_heads")),
            "eps": Field(("layer_norm_epsilon",), 1e-5),
            "activation": Field(("activation_function",), "gelu_new"),
        },
        rules=COMMON
        | {
            "model_type": neutral("gpt2"),
            "architectures": every(r"(TF|Flax)?GPT2(Model|LMHeadModel|DoubleHeadsModel|For\w+)"),
            **dict.fromkeys(("n_embd", "hidden_size"), same("d")),
            **dict.fromkeys(("n_layer", "num_hidden_layers"), same("layers")),
            **dict.fromkeys(("n_positions", "n_ctx", "max_position_embeddings"), same("positions")),
            "vocab_size": same("vocab"),
            "n_inner": _hidden(),
            "scale_attn_weights": neutral(True),
            "scale_attn_by_inverse_layer_idx": neutral(False),
            "is_causal": neutral(True),
        },
    ),
    layer_buffers={"attn.bias": _triangle, "attn.masked_bias": _minus_infinity},
    unused=(r"(lm_head|score|classifier)\.(weight|bias)", r"multiple_choice_head\.summary\.(weight|bias)"),
)


class GPT2(Transformer):
    """A GPT-2 decoder; made by :func:`gpt2`."""


def gpt2(
    source: Source,
    *,
    config: Config = None,
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
        A damaged file, tensors that are missing, do not fit or are not known, another architecture, a key of the
        configuration that changes the map, such as another scaling of the logits (the message names file and key).
    """
    checkpoint = open_checkpoint(source)
    layout = FAMILY.fit(checkpoint)
    given = read_config(checkpoint, config)
    heads, d = num_heads, layout.facts["d"]
    if heads is None and FAMILY.keys.read(given, "heads", checkpoint.origin) is None:
        if d % HEAD_DIM:
            raise ValueError(
                f"num_heads must be given: {checkpoint.origin} has no config.json with it beside it, and its dimension {d} is "
                f"no multiple of {HEAD_DIM}."
            )
        heads = d // HEAD_DIM
    return GPT2(layout, configure(layout, given, heads=heads, eps=eps, activation=activation))
