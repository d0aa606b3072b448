"""BERT encoders: absolute positions, LayerNorm after each part, no mask."""

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
from otattn.models.layer import ModelLayer, Projections, norm_domain, tokenwise
from otattn.models.transformer import MAX_LAYERS, ModelConfig, Transformer, feed_forward, layer_norm, read_config, whole

__all__ = ["Bert", "bert"]

Array = NDArray[np.float64]
_WORDS = "embeddings.word_embeddings.weight"


class Bert(Transformer):
    """A BERT encoder; made by :func:`bert`."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, prefix: str) -> None:
        super().__init__(checkpoint, config)
        self.prefix = prefix

    def _norm(self, name: str) -> LayerNorm:
        return layer_norm(self.checkpoint, self.prefix + name, self.config.dim, self.config.eps)

    def _linear(self, name: str) -> tuple[Array, Array]:
        d, read = self.config.dim, self.checkpoint.tensor
        return read(f"{name}.weight", d, d), read(f"{name}.bias", d)

    def _layer(self, index: int) -> ModelLayer:
        c, stem = self.config, f"{self.prefix}encoder.layer.{index}."
        (q, bq), (k, bk), (v, bv) = (self._linear(f"{stem}attention.self.{s}") for s in ("query", "key", "value"))
        out, bo = self._linear(f"{stem}attention.output.dense")
        before = f"encoder.layer.{index - 1}.output.LayerNorm" if index else "embeddings.LayerNorm"
        return ModelLayer(
            index,
            Projections(q, k, v, out, bq, bk, bv, bo, c.num_heads, c.num_heads, masked=False),
            self._norm(f"encoder.layer.{index}.attention.output.LayerNorm"),
            self._norm(f"encoder.layer.{index}.output.LayerNorm"),
            feed_forward(
                self.checkpoint,
                f"{stem}intermediate.dense",
                f"{stem}output.dense",
                activation=c.activation,
                d=c.dim,
            ),
            False,
            norm_domain(self._norm(before)),
        )

    def embed(self, token_ids: NDArray[np.int64]) -> Array:
        d, read, stem = self.config.dim, self.checkpoint.tensor, f"{self.prefix}embeddings."
        words, index = np.unique(token_ids, return_inverse=True)
        X = read(f"{stem}word_embeddings.weight", None, d, rows=words)[index.reshape(token_ids.shape)]
        X = X + read(f"{stem}position_embeddings.weight", None, d)[: token_ids.shape[1]]
        X += read(f"{stem}token_type_embeddings.weight", None, d)[0]
        return tokenwise(self._norm("embeddings.LayerNorm"), X)

    def _final_norm(self) -> None:
        return None


def bert(
    source: Checkpoint | Mapping[str, Any] | str | PathLike[str],
    *,
    config: Mapping[str, Any] | str | PathLike[str] | None = None,
    num_heads: int | None = None,
    eps: float | None = None,
    activation: str | None = None,
) -> Bert:
    """A BERT model from a checkpoint, with or without a prefix before its names ("bert.", "model.", ...).

    Parameters
    ----------
    source : path, mapping of arrays, or Checkpoint
        A ``.safetensors`` or ``.npz`` file or the folder of ``model.safetensors``.
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
        A damaged file, tensors that are missing or do not fit, an unknown number of heads, another architecture.

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
    given = read_config(checkpoint, config)
    kind = given.get("model_type", "bert")
    position = given.get("position_embedding_type", "absolute")
    if kind != "bert" or position != "absolute":
        raise ValueError(
            f"a BERT model with absolute positions is required, received model_type {kind!r} with {position!r} positions; "
            "build its layers from plain arrays with otattn.load_layer."
        )
    prefix = checkpoint.prefix_of(_WORDS)
    vocab, d = checkpoint.shapes[prefix + _WORDS][:2]
    heads = num_heads if num_heads is not None else given.get("num_attention_heads")
    if heads is None:
        raise ValueError(
            f"num_heads must be given: {checkpoint.origin} has no config.json beside it, and its tensors do not tell how many "
            f"heads share the {d} rows."
        )
    layers = checkpoint.count_layers(lambda i: f"{prefix}encoder.layer.{i}.attention.self.query.weight")
    return Bert(
        checkpoint,
        ModelConfig(
            family="bert",
            num_layers=whole(layers, "the number of layers", most=MAX_LAYERS),
            num_heads=whole(heads, "num_heads", most=d),
            num_kv_heads=whole(heads, "num_heads", most=d),
            dim=d,
            vocab_size=vocab,
            max_length=checkpoint.shapes.get(f"{prefix}embeddings.position_embeddings.weight", (0,))[0],
            eps=check.positive(eps if eps is not None else given.get("layer_norm_eps", 1e-12), "eps", zero=True),
            activation=activation_name(activation or given.get("hidden_act", "gelu")),
            pre_norm=False,
            causal=False,
        ),
        prefix,
    )
