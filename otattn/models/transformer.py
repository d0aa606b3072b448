"""A transformer read from a checkpoint: layers on demand and a numpy forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.attention import AttentionMap, Compose, LayerNorm, RMSNorm, SoftmaxAttention
from otattn.attention.feed_forward import FeedForward
from otattn.data.layer import SampleLayer
from otattn.models.family import Buffer, Layout
from otattn.models.layer import ModelLayer, Projections, norm_domain, tokenwise

__all__ = ["ModelConfig", "Transformer"]

Array = NDArray[np.float64]
Ids = NDArray[np.int64]


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


class Transformer:
    """A transformer whose layers are read from its checkpoint when they are asked for (nothing is kept).

    One forward pass for all architectures: what differs is in the table of the family.

    Attributes
    ----------
    layout : Layout
        The table, fitted to the checkpoint.
    checkpoint : Checkpoint
    config : ModelConfig
    """

    def __init__(self, layout: Layout, config: ModelConfig) -> None:
        self.layout, self.checkpoint, self.config = layout, layout.checkpoint, config
        self._hold(layout.family.buffers, layout.prefix)

    @property
    def layers(self) -> LayerSequence:
        """The layers: ``model.layers[3].heads[5]``; each access reads the layer anew."""
        return LayerSequence(self)

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    def _hold(self, buffers: Mapping[str, Buffer], stem: str) -> None:
        """Buffers that are there hold what this forward pass uses in their place."""
        for name, rule in buffers.items():
            full = stem + name
            required = rule(self.checkpoint.buffer(full), self._facts) if full in self.checkpoint else None
            if required is not None:
                raise ValueError(
                    f"{full} in {self.checkpoint.origin} must hold {required}, received other values; the model uses "
                    "positions or masks that are not known here."
                )

    @property
    def _facts(self) -> dict[str, Any]:
        return {**self.layout.facts, "rotary": self.config.rotary}

    def _norm(self, name: str) -> LayerNorm | RMSNorm:
        read, d, eps = self.checkpoint.tensor, self.config.dim, self.config.eps
        names = self.layout.norm(name)
        gain = read(names[0], d)
        return LayerNorm(gain, read(names[1], d), eps=eps) if len(names) > 1 else RMSNorm(gain, eps=eps)

    def _linear(self, index: int, use: str) -> tuple[Array, Array | None]:
        """Matrix and bias in the convention ``y = W x + b``."""
        W, name = self.checkpoint.tensor(self.layout.weight(index, use)), self.layout.bias(index, use)
        W = W.T if self.layout.family.transposed else W
        return W, None if name is None else self.checkpoint.tensor(name, len(W))

    def _layer(self, index: int) -> ModelLayer:
        with self._named(f"layer {index}"):
            return self._build(index)

    def _build(self, index: int) -> ModelLayer:
        family, c, stem = self.layout.family, self.config, self.layout.stem(index)
        self._hold(family.layer_buffers, stem)
        maps = {use: self._linear(index, use) for use in family.linear}
        if "fused" in maps:
            W, b = maps.pop("fused")
            biases: Any = (None,) * 3 if b is None else np.split(b, 3)
            maps |= dict(zip(("query", "key", "value"), zip(np.split(W, 3), biases, strict=True), strict=True))
        (q, bq), (k, bk), (v, bv), (out, bo) = (maps[use] for use in ("query", "key", "value", "output"))
        (up, b_up), (down, b_down), (gate, b_gate) = (maps.get(use, (None, None)) for use in ("up", "down", "gate"))
        assert up is not None
        assert down is not None
        first = self._norm(stem + family.layer_norms["first"])
        if c.pre_norm:
            before = first
        elif index:
            before = self._norm(self.layout.stem(index - 1) + family.layer_norms["second"])
        else:
            before = self._norm(self.layout.prefix + family.norms["embedding"])
        return ModelLayer(
            index,
            Projections(q, k, v, out, bq, bk, bv, bo, c.num_heads, c.num_kv_heads, masked=c.causal, rotary=c.rotary),
            first,
            self._norm(stem + family.layer_norms["second"]),
            FeedForward(up, down, activation=c.activation, gate=gate, up_bias=b_up, down_bias=b_down, gate_bias=b_gate),
            c.pre_norm,
            norm_domain(before),
        )

    def embed(self, token_ids: Ids) -> Array:
        """What enters the first layer, ``(windows, n, d)``."""
        family, d, read = self.layout.family, self.config.dim, self.checkpoint.tensor
        tables = {use: f"{self.layout.prefix}{name}.weight" for use, (name, _) in family.embeddings.items()}
        words, index = np.unique(token_ids, return_inverse=True)
        X = read(tables["words"], None, d, rows=words)[index.reshape(token_ids.shape)]
        if "positions" in tables:
            X = X + read(tables["positions"], None, d, rows=np.arange(token_ids.shape[1]))
        if "types" in tables:  # one text: all tokens are of the first type
            X = X + read(tables["types"], None, d)[0]
        norm = family.norms.get("embedding")
        return np.asarray(X) if norm is None else tokenwise(self._norm(self.layout.prefix + norm), X)

    def _final_norm(self) -> LayerNorm | RMSNorm | None:
        name = self.layout.family.norms.get("final")
        return None if name is None else self._norm(self.layout.prefix + name)

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
        ids = self.ids(token_ids)
        X = self._checked("the embedding", lambda: self.embed(ids))
        total = self.num_layers if stop is None else min(check.count(stop, "stop"), self.num_layers)
        for index in range(total):
            layer = self._layer(index)
            seen = self._checked(f"layer {index}", partial(layer.attention_input, X))
            yield layer, X, seen
            if index + 1 < total:
                X = self._forward(layer, X, seen)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Errors of parts that know no file say which one it is."""
        try:
            yield
        except ValueError as exc:
            if self.checkpoint.origin in str(exc):
                raise
            raise ValueError(f"{what} of {self.checkpoint.origin} cannot be used: {exc}") from exc

    def _checked(self, what: str, compute: Callable[[], Array]) -> Array:
        """The result of a step, which is finite: overflow is an error, not a zero behind a normalisation."""
        try:
            with self._named(what), np.errstate(over="raise", invalid="raise", divide="raise"):
                out = compute()
        except FloatingPointError:
            out = np.array(np.inf)
        if not np.isfinite(out).all():
            raise ValueError(
                f"{what} of {self.checkpoint.origin} must give numbers within float64, received infinite ones; its weights are "
                "damaged, get another copy."
            )
        return out

    def _forward(self, layer: ModelLayer, X: Array, seen: Array) -> Array:
        return self._checked(f"layer {layer.index}", lambda: layer.forward(X, seen))

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
        X = self._forward(*last)
        norm = self._final_norm()
        out.append(X if norm is None else self._checked("the last norm", lambda: tokenwise(norm, X)))
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

    def map(self, first: int = 0, last: int | None = None, *, final_norm: bool = True) -> Compose:
        """Layers ``first`` to ``last - 1`` as one attention map: what enters layer ``first`` to what enters layer ``last``.

        Parameters
        ----------
        first, last : int
            Layer numbers; negative ones count from the end, ``last=None`` is the end of the model.
        final_norm : bool
            With ``last`` at the end: whether the normalisation behind the last layer, where there is one, belongs to the
            map, as it does to :meth:`hidden_states`.

        Returns
        -------
        Compose
            ``maps`` are the layers' blocks (and the final normalisation). All weights are read and kept.

        Examples
        --------
        ``model.map(a, b).on_tokens(states[a])`` is ``states[b]`` for ``states = model.hidden_states(token_ids)``.
        """
        start = self.index(first)
        stop = self.num_layers if last is None or last == self.num_layers else self.index(last)
        if not start < stop:
            raise ValueError(
                f"last must come after first, received layers {start} to {stop} of {self.num_layers}; an empty network has no map."
            )
        maps: list[AttentionMap] = [self._layer(i).block for i in range(start, stop)]
        norm = self._final_norm() if final_norm and stop == self.num_layers else None
        return Compose(*maps) if norm is None else Compose(*maps, norm)

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
