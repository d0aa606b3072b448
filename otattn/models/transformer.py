"""A transformer read from a checkpoint: layers on demand and a numpy forward pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.attention import LayerNorm, SoftmaxAttention
from otattn.data.layer import SampleLayer
from otattn.models.checkpoint import Checkpoint, FileCheckpoint, read_json
from otattn.models.feed_forward import FeedForward
from otattn.models.layer import ModelLayer, tokenwise

__all__ = ["ModelConfig", "Transformer", "read_config"]

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
MAX_LAYERS = 4096


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that a checkpoint's tensors do not tell, and those that they do.

    ``max_length`` is None when positions are unbounded; ``rotary`` holds base, layout and number of turned coordinates.
    """

    family: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    dim: int
    vocab_size: int
    max_length: int | None
    eps: float
    activation: str
    pre_norm: bool
    causal: bool
    rotary: dict[str, float | int | str] | None = None


class Transformer(ABC):
    """A transformer whose layers are read from its checkpoint when they are asked for (nothing is kept).

    Attributes
    ----------
    checkpoint : Checkpoint
    config : ModelConfig
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint, self.config = checkpoint, config

    @property
    def layers(self) -> LayerSequence:
        """The layers: ``model.layers[3].heads[5]``; each access reads the layer anew."""
        return LayerSequence(self)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @abstractmethod
    def _layer(self, index: int) -> ModelLayer: ...

    @abstractmethod
    def embed(self, token_ids: Ids) -> Array:
        """What enters the first layer, ``(windows, n, d)``."""

    @abstractmethod
    def _final_norm(self) -> LayerNorm | None: ...

    def ids(self, token_ids: ArrayLike) -> Ids:
        """``token_ids`` as ``(windows, n)`` integers of the vocabulary."""
        raw = np.asarray(token_ids)
        if raw.dtype.kind not in "iu" or raw.ndim not in (1, 2) or raw.size == 0:
            raise ValueError(
                f"token_ids must be integers of shape (n,) or (windows, n), received {raw.dtype} of shape {raw.shape}; "
                "otattn.models.text_windows makes them from text."
            )
        if raw.min() < 0 or raw.max() >= self.config.vocab_size:
            raise ValueError(
                f"token_ids must lie in [0, {self.config.vocab_size}), received [{raw.min()}, {raw.max()}]; "
                "use the tokenizer of this model."
            )
        limit = self.config.max_length
        if limit is not None and raw.shape[-1] > limit:
            raise ValueError(
                f"token_ids must have at most {limit} tokens a window, received {raw.shape[-1]}; cut them."
            )
        return raw.astype(np.int64).reshape(-1, raw.shape[-1])

    def walk(self, token_ids: ArrayLike, *, stop: int | None = None) -> Iterator[tuple[ModelLayer, Array, Array]]:
        """Layer by layer: the layer, what enters it, and what its attention sees, both ``(windows, n, d)``.

        Parameters
        ----------
        token_ids : array_like of int (n,) or (windows, n)
        stop : int, optional
            Number of layers to walk, all by default.
        """
        X = self.embed(self.ids(token_ids))
        total = self.num_layers if stop is None else min(check.count(stop, "stop"), self.num_layers)
        for index in range(total):
            layer = self._layer(index)
            seen = layer.attention_input(X)
            yield layer, X, seen
            if index + 1 < total:
                X = layer.forward(X, seen)

    def hidden_states(self, token_ids: ArrayLike) -> Array:
        """The tokens between the layers: what enters layer 0, 1, ..., and what leaves the last.

        Parameters
        ----------
        token_ids : array_like of int (n,) or (windows, n)
            Whole windows: no padding is known here.

        Returns
        -------
        ndarray (layers + 1, n, d) or (layers + 1, windows, n, d)
            float64. The last entry includes the final normalisation where the architecture has one.
        """
        out = []
        last: tuple[ModelLayer, Array, Array] | None = None
        for last in self.walk(token_ids):
            out.append(last[1])
        assert last is not None
        X = last[0].forward(last[1], last[2])
        norm = self._final_norm()
        out.append(X if norm is None else tokenwise(norm, X))
        stacked = np.stack(out)
        return stacked if np.ndim(token_ids) == 2 else stacked[:, 0]

    def attention_inputs(self, token_ids: ArrayLike) -> Array:
        """The tokens that the attention of each layer sees, ``(layers, [windows,] n, d)``.

        Equal to ``hidden_states[:-1]`` for BERT; normalised ones for architectures that normalise first.
        """
        stacked = np.stack([seen for _, _, seen in self.walk(token_ids)])
        return stacked if np.ndim(token_ids) == 2 else stacked[:, 0]

    def sample(self, layer: int, token_ids: ArrayLike) -> SampleLayer:
        """Layer number ``layer`` with the tokens that enter it, as the rest of the library takes real layers.

        Raises
        ------
        ValueError
            The heads are no plain softmax attention (masked or rotary ones).
        """
        index = self.index(layer)
        ids = self.ids(token_ids)
        found: tuple[ModelLayer, Array, Array] | None = None
        for step in self.walk(ids, stop=index + 1):
            found = step
        assert found is not None
        part = found[0]
        heads = tuple(h for h in part.heads if isinstance(h, SoftmaxAttention))
        attention: Any = part.attention
        if len(heads) < len(part.heads):
            raise ValueError(
                f"sample needs heads of plain softmax attention, received {type(part.heads[0]).__name__}; use "
                "walk or attention_inputs with model.layers."
            )
        return SampleLayer(
            check.frozen(found[2]),
            heads,
            attention.outputs,
            attention,
            ids,
            f"layer {index} of {self.checkpoint.origin}",
        )

    def index(self, layer: int) -> int:
        """``layer`` as a number in ``[0, num_layers)``; negative ones count from the end."""
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
            raise TypeError(f"layer must be an integer, received {layer!r}.")
        if not -self.num_layers <= layer < self.num_layers:
            raise IndexError(f"layer must lie in [-{self.num_layers}, {self.num_layers}), received {layer}.")
        return int(layer) % self.num_layers

    def __repr__(self) -> str:
        c = self.config
        return f"{type(self).__name__}(layers={c.num_layers}, heads={c.num_heads}, dim={c.dim})"


class LayerSequence(Sequence[ModelLayer]):
    """The layers of a model, each read when it is asked for."""

    def __init__(self, model: Transformer) -> None:
        self._model = model

    def __len__(self) -> int:
        return self._model.num_layers

    @overload
    def __getitem__(self, index: int) -> ModelLayer: ...

    @overload
    def __getitem__(self, index: slice) -> list[ModelLayer]: ...

    def __getitem__(self, index: int | slice) -> ModelLayer | list[ModelLayer]:
        if isinstance(index, slice):
            return [self._model._layer(i) for i in range(*index.indices(len(self)))]
        return self._model._layer(self._model.index(index))


def read_config(checkpoint: Checkpoint, config: Mapping[str, Any] | str | PathLike[str] | None) -> dict[str, Any]:
    """The configuration: a mapping, a file, or ``config.json`` beside the checkpoint (empty when there is none)."""
    if isinstance(config, Mapping):
        return dict(config)
    if config is not None:
        return read_json(Path(config))
    if isinstance(checkpoint, FileCheckpoint):
        beside = checkpoint.path.parent / "config.json"
        if beside.is_file():
            return read_json(beside)
    return {}


def whole(value: Any, name: str, *, most: int = 1 << 30) -> int:
    """A positive integer from a configuration."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value <= most:
        raise ValueError(f"{name} must be an integer from 1 to {most}, received {value!r}; check the configuration.")
    return int(value)


def feed_forward(
    checkpoint: Checkpoint, up: str, down: str, *, activation: str, d: int, transposed: bool = False
) -> FeedForward:
    """A plain feed-forward part from the names of its two linear maps (``.weight`` and ``.bias``)."""
    U = checkpoint.tensor(f"{up}.weight", *((d, None) if transposed else (None, d)))
    W = checkpoint.tensor(f"{down}.weight", *((None, d) if transposed else (d, None)))
    if transposed:
        U, W = U.T, W.T
    return FeedForward(
        U,
        W,
        activation=activation,
        up_bias=checkpoint.tensor(f"{up}.bias", len(U)),
        down_bias=checkpoint.tensor(f"{down}.bias", d),
    )


def layer_norm(checkpoint: Checkpoint, name: str, d: int, eps: float) -> LayerNorm:
    """LayerNorm by its name; old checkpoints say gamma and beta for weight and bias."""
    gain, bias = ("gamma", "beta") if f"{name}.gamma" in checkpoint else ("weight", "bias")
    return LayerNorm(checkpoint.tensor(f"{name}.{gain}", d), checkpoint.tensor(f"{name}.{bias}", d), eps=eps)
