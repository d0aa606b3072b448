"""A network and its tokens, however they are given: a model and token indices, maps and what enters them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn.attention import AttentionMap, Compose
from otattn.attention.base import Measure

__all__ = ["Network", "network_of"]

Array = NDArray[np.float64]


@runtime_checkable
class Network(Protocol):
    """A model: its layers as a map, and what its first layer receives for token indices."""

    @property
    def num_layers(self) -> int: ...

    def map(self, first: int = 0, last: int | None = None, *, final_norm: bool = True) -> Compose: ...

    def ids(self, token_ids: ArrayLike) -> NDArray[np.int64]: ...

    def embed(self, token_ids: NDArray[np.int64]) -> Array: ...


def network_of(
    network: Any, tokens: Any, first: int = 0, last: int | None = None
) -> tuple[Compose, Measure, tuple[str, ...]]:
    """A network as a composition of named stages, with the measure that enters it."""
    if isinstance(network, (AttentionMap, Sequence)):
        whole = Compose(network) if isinstance(network, AttentionMap) else Compose(*network)
        maps = network.maps if isinstance(network, Compose) else whole.maps
        chosen = list(enumerate(maps))[first:last]
        if not chosen:
            raise ValueError(f"first and last must leave a stage, received {first} and {last} of {len(maps)} stages.")
        whole = Compose(*(m for _, m in chosen))
        return whole, whole.as_measure(tokens), tuple(f"{i} {type(m).__name__}" for i, m in chosen)
    if not isinstance(network, Network):
        raise TypeError(
            "network must be a model of otattn.models, a Compose or a sequence of attention maps, received "
            f"{type(network).__name__}; a model has the methods map, ids and embed."
        )
    whole = network.map(first, last)
    raw = tokens if hasattr(tokens, "points") else np.asarray(tokens)
    if isinstance(raw, np.ndarray) and raw.dtype.kind in "iu":
        ids = network.ids(raw)
        if len(ids) > 1:
            raise ValueError(f"tokens must be one window (n,), received {len(ids)} windows; take them one by one.")
        raw = network.embed(ids)[0]
        raw = network.map(0, first).on_tokens(raw) if first else raw
    count = network.num_layers
    begin, end = range(count)[slice(first, last)].start, range(count)[slice(first, last)].stop
    names = [f"layer {i}" for i in range(begin, end)]
    return whole, whole.as_measure(raw), tuple(names + ["final norm"] * (len(whole.maps) - len(names)))
