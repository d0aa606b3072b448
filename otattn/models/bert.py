"""BERT encoders: absolute positions, LayerNorm after each part, no mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn.models.family import Family
from otattn.models.keys import COMMON, HARMLESS, Field, Keys, every, neutral, same
from otattn.models.opening import Config, Source, configure, read_config
from otattn.models.shards import open_checkpoint
from otattn.models.transformer import Transformer

__all__ = ["Bert", "bert"]


def _numbered(values: NDArray[np.float64], _: Mapping[str, Any]) -> str | None:
    return None if np.array_equal(values.ravel(), np.arange(values.size)) else "0, 1, 2, ..."


def _zeros(values: NDArray[np.float64], _: Mapping[str, Any]) -> str | None:
    return "zeros" if values.any() else None


def _doubt(given: Mapping[str, Any], facts: Mapping[str, Any]) -> str | None:
    """RoBERTa has the same tensors, but its positions start after the padding token's index, 1."""
    if facts["types"] == 1 and given.get("type_vocab_size") is None:
        return "has one row of token_type_embeddings, as RoBERTa, whose positions start elsewhere"
    pad = given.get("pad_token_id")
    return None if pad in (None, 0) else f"has pad_token_id {pad!r}, as RoBERTa, whose positions start elsewhere"


FAMILY = Family(
    name="bert",
    title="BERT",
    embeddings={
        "words": ("embeddings.word_embeddings", "vocab d"),
        "positions": ("embeddings.position_embeddings", "positions d"),
        "types": ("embeddings.token_type_embeddings", "types d"),
    },
    norms={"embedding": "embeddings.LayerNorm"},
    layer="encoder.layer.{i}.",
    linear={
        "query": ("attention.self.query", "d d"),
        "key": ("attention.self.key", "d d"),
        "value": ("attention.self.value", "d d"),
        "output": ("attention.output.dense", "d d"),
        "up": ("intermediate.dense", "h d"),
        "down": ("output.dense", "d h"),
    },
    layer_norms={"first": "attention.output.LayerNorm", "second": "output.LayerNorm"},
    biases="all",
    norm_bias=True,
    transposed=False,
    pre_norm=False,
    causal=False,
    keys=Keys(
        fields={
            "heads": Field(("num_attention_heads",)),
            "eps": Field(("layer_norm_eps",), 1e-12),
            "activation": Field(("hidden_act",), "gelu"),
        },
        rules=COMMON
        | {
            "model_type": neutral("bert"),
            "architectures": every(r"(TF|Flax)?Bert(Model|LMHeadModel|For\w+)"),
            "hidden_size": same("d"),
            "num_hidden_layers": same("layers"),
            "intermediate_size": same("h"),
            "vocab_size": same("vocab"),
            "max_position_embeddings": same("positions"),
            "type_vocab_size": same("types"),
            "position_embedding_type": neutral("absolute"),
            "is_decoder": neutral(False),
            "is_causal": neutral(False),
            "directionality": neutral("bidi"),
        },
        harmless=HARMLESS,
    ),
    buffers={"embeddings.position_ids": _numbered, "embeddings.token_type_ids": _zeros},
    unused=(
        r"pooler\.dense\.(weight|bias)",
        r"cls\.(predictions|seq_relationship)\..+",
        r"(classifier|qa_outputs)\.(weight|bias)",
    ),
    doubt=_doubt,
)


class Bert(Transformer):
    """A BERT encoder; made by :func:`bert`."""


def bert(
    source: Source,
    *,
    config: Config = None,
    num_heads: int | None = None,
    eps: float | None = None,
    activation: str | None = None,
) -> Bert:
    """A BERT model from a checkpoint, with or without a prefix before its names ("bert.", "model.", ...).

    Parameters
    ----------
    source : path, mapping of arrays, or Checkpoint
        A ``.safetensors`` or ``.npz`` file, an index of shards, or the folder of one of them.
    config : mapping or path, optional
        The model's ``config.json``; the one beside the file by default, where there is one.
    num_heads : int, optional
        From the configuration by default; tensors do not tell it.
    eps : float, optional
        Of LayerNorm; from the configuration, else 1e-12.
    activation : str, optional
        From the configuration, else "gelu".

    Returns
    -------
    Bert
        ``layers`` (with ``heads``, ``attention``, ``domain``, ``block``), ``hidden_states(token_ids)``.

    Raises
    ------
    FileNotFoundError
    ImportError
        The extra ``models`` is not installed.
    ValueError
        A damaged file, tensors that are missing, do not fit or are not known, an unknown number of heads, another
        architecture, a key of the configuration that changes the map (the message names file and key).

    Examples
    --------
    >>> import numpy as np
    >>> rng, d = np.random.default_rng(0), 4
    >>> linear = lambda name, rows, cols: {f"{name}.weight": rng.normal(size=(rows, cols)), f"{name}.bias": np.zeros(rows)}
    >>> norm = lambda name: {f"{name}.weight": np.ones(d), f"{name}.bias": np.zeros(d)}
    >>> stem = "encoder.layer.0."
    >>> weights = {f"embeddings.{k}_embeddings.weight": rng.normal(size=(s, d))
    ...            for k, s in (("word", 7), ("position", 5), ("token_type", 2))}
    >>> for part in ("self.query", "self.key", "self.value", "output.dense"):
    ...     weights |= linear(f"{stem}attention.{part}", d, d)
    >>> weights |= linear(f"{stem}intermediate.dense", 8, d) | linear(f"{stem}output.dense", d, 8)
    >>> weights |= norm("embeddings.LayerNorm") | norm(f"{stem}attention.output.LayerNorm")
    >>> weights |= norm(f"{stem}output.LayerNorm")
    >>> model = bert(weights, num_heads=2)
    >>> model, model.hidden_states([1, 2, 3]).shape, model.layers[0]
    (Bert(layers=1, heads=2, dim=4), (2, 3, 4), ModelLayer(0, heads=2, kv_heads=2, dim=4))
    """
    checkpoint = open_checkpoint(source)
    layout = FAMILY.fit(checkpoint)
    given = read_config(checkpoint, config)
    if num_heads is None and FAMILY.keys.read(given, "heads", checkpoint.origin) is None:
        raise ValueError(
            f"num_heads must be given: {checkpoint.origin} has no config.json with it beside it, and its tensors do not tell "
            f"how many heads share the {layout.facts['d']} rows."
        )
    return Bert(layout, configure(layout, given, heads=num_heads, eps=eps, activation=activation))
