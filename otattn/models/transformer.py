"""A transformer read from a checkpoint: layers on demand and a numpy forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.attention import AttentionMap, Compose, LayerNorm
from otattn.data.layer import SampleLayer
from otattn.models.config import ModelConfig
from otattn.models.embedding import embed, images_of, ragged, token_ids_of
from otattn.models.family import Buffer, Layout
from otattn.models.heads import tokenwise
from otattn.models.layer import ModelLayer, read_layer, read_norm

__all__ = ["Transformer"]

Array = NDArray[np.float64]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Transformer:
    """A transformer whose layers are read from its checkpoint when they are asked for (nothing is kept).

    One forward pass for all architectures: what differs is in the table of the family. Made by :func:`otattn.load_model`.

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
        for name in layout.family.tied:
            self._equal_words(layout.prefix + name)

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

    def _equal_words(self, name: str) -> None:
        words = f"{self.layout.prefix}{self.layout.family.embeddings['words'][0]}.weight"
        if name in self.checkpoint and not np.array_equal(self.checkpoint.tensor(name), self.checkpoint.tensor(words)):
            raise ValueError(
                f"{name} in {self.checkpoint.origin} must equal {words}, received other numbers; the model has two tables of "
                "words, which is not known here."
            )

    @property
    def _facts(self) -> dict[str, Any]:
        return {**self.layout.facts, "rotary": self.config.rotary}

    def _layer(self, index: int) -> ModelLayer:
        with self._named(f"layer {index}"):
            return self._build(index)

    def _build(self, index: int) -> ModelLayer:
        self._hold(self.layout.family.layer_buffers, self.layout.stem(index))
        return read_layer(self.layout, self.config, index)

    def embed(self, inputs: ArrayLike, visible: Mask | None = None) -> Array:
        """What enters the first layer, ``(windows, n, d)``, for what :meth:`ids` returns."""
        return embed(self.layout, self.config, np.asarray(inputs), visible)

    def _final_norm(self) -> LayerNorm | None:
        name = self.layout.family.norms.get("final")
        return None if name is None else read_norm(self.layout, self.config, self.layout.prefix + name)

    def ids(self, token_ids: ArrayLike) -> Any:
        """``token_ids`` as ``(windows, n)`` integers of the vocabulary; images as ``(windows, channels, height, width)``."""
        if self.layout.family.embeddings:
            return token_ids_of(token_ids, self.config)
        return images_of(token_ids, self.layout)

    def _inputs(self, token_ids: Any, mask: ArrayLike | None) -> tuple[Any, Mask | None]:
        """Checked inputs and which tokens are seen; texts of several lengths are padded at their ends."""
        if self.layout.family.embeddings and mask is None and ragged(token_ids):
            texts = [self.ids(text)[0] for text in token_ids]
            lengths = np.array([len(text) for text in texts])
            filler = 0 if self.config.pad is None else self.config.pad
            ids = np.full((len(texts), lengths.max()), filler, dtype=np.int64)
            for row, text in zip(ids, texts, strict=True):
                row[: len(text)] = text
            return ids, np.arange(ids.shape[1]) < lengths[:, None]
        ids = self.ids(token_ids)
        if mask is None:
            return ids, None
        seen = np.asarray(mask)
        if seen.size != ids.size or ids.ndim != 2 or not np.isin(seen, (0, 1)).all() or not seen.any():
            raise ValueError(
                f"mask must have an entry 0 or 1 for each token, {ids.shape} of them, not all 0, received shape {seen.shape}; "
                "tokenizers give it as attention_mask."
            )
        visible = seen.reshape(ids.shape).astype(bool)
        if not visible.any(axis=1).all():
            raise ValueError("mask must leave a token in each window, received a window without any; drop the window.")
        return ids, visible

    def walk(
        self, token_ids: Any, *, stop: int | None = None, mask: ArrayLike | None = None
    ) -> Iterator[tuple[ModelLayer, Array, Array]]:
        """Layer by layer: the layer, what enters it, and what its attention sees, both ``(windows, n, d)``.

        Parameters
        ----------
        token_ids, mask
            As :meth:`hidden_states` takes them.
        stop : int, optional
            Number of layers to walk, all by default.
        """
        ids, visible = self._inputs(token_ids, mask)
        X = self._checked("the embedding", lambda: self.embed(ids, visible))
        total = self.num_layers if stop is None else min(check.count(stop, "stop"), self.num_layers)
        for index in range(total):
            layer = self._layer(index)
            seen = self._checked(f"layer {index}", partial(layer.attention_input, X))
            yield layer, X, seen
            if index + 1 < total:
                X = self._forward(layer, X, seen, visible)

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

    def _forward(self, layer: ModelLayer, X: Array, seen: Array, visible: Mask | None) -> Array:
        return self._checked(f"layer {layer.index}", lambda: layer.forward(X, seen, visible))

    def hidden_states(self, token_ids: Any, *, mask: ArrayLike | None = None) -> Array:
        """The tokens between the layers: what enters layer 0, 1, ..., and what leaves the last.

        Parameters
        ----------
        token_ids : array_like of int (n,) or (windows, n), or sequence of sequences of int
            Texts of several lengths are padded at their ends to the longest. For a model of images: ``(channels, height,
            width)`` or ``(windows, channels, height, width)`` numbers.
        mask : array_like (windows, n), optional
            0 for padding, which no token sees. Padding at the start moves the first position, so that the states of a text do
            not depend on how it is padded.

        Returns
        -------
        ndarray (layers + 1, n, d) or (layers + 1, windows, n, d)
            float64. The last entry includes the final normalisation where the architecture has one. Rows of padding are nan,
            so that nothing is measured on them.
        """
        ids, visible = self._inputs(token_ids, mask)
        out = []
        last: tuple[ModelLayer, Array, Array] | None = None
        for last in self.walk(ids, mask=visible):
            out.append(last[1])
        assert last is not None
        X = self._forward(*last, visible)
        norm = self._final_norm()
        out.append(X if norm is None else self._checked("the last norm", lambda: tokenwise(norm, X)))
        return self._stacked(out, token_ids, visible)

    def _stacked(self, states: list[Array], inputs: Any, visible: Mask | None) -> Array:
        """One array, nan at padding, without windows when one was given without."""
        out = np.stack(states)
        if visible is not None:
            out[:, ~visible] = np.nan
        return out if self._many(inputs) else out[:, 0]

    def _many(self, inputs: Any) -> bool:
        """Whether several windows were given."""
        return ragged(inputs) or np.ndim(inputs) == (2 if self.layout.family.embeddings else 4)

    def attention_inputs(self, token_ids: Any, *, mask: ArrayLike | None = None) -> Array:
        """The tokens that the attention of each layer sees, ``(layers, [windows,] n, d)``, given as to :meth:`hidden_states`.

        Equal to ``hidden_states[:-1]`` for BERT; normalised ones for architectures that normalise first.
        """
        ids, visible = self._inputs(token_ids, mask)
        return self._stacked([seen for _, _, seen in self.walk(ids, mask=visible)], token_ids, visible)

    def sample(self, layer: int, token_ids: ArrayLike) -> SampleLayer:
        """Layer number ``layer`` with the tokens that its attention sees, as the rest of the library takes real layers."""
        index = self.index(layer)
        ids = self.ids(token_ids)
        found: tuple[ModelLayer, Array, Array] | None = None
        for step in self.walk(ids, stop=index + 1):
            found = step
        assert found is not None
        part, origin = found[0], f"layer {index} of {self.checkpoint.origin}"
        return SampleLayer(check.frozen(found[2]), part.heads, part.outputs, part.attention, ids, origin)

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
        return f"{type(self).__name__}({c.family}, layers={c.num_layers}, heads={c.num_heads}, dim={c.dim})"


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
