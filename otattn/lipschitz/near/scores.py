r"""Heads with composed logits near given tokens: windows, blocks, added biases and sinks.

A :class:`~otattn.attention.ScoreAttention` without a rotation or norms is a softmax head whose rows see some tokens and whose
logits have fixed numbers added: P is the softmax of those, and all derivatives are the formulas of this folder with it, since
what is added does not move. (:mod:`~otattn.lipschitz.near.capped` has those of logits with a cap.) A sink is one more column, of
logit, key and value that do not move: a key and a value of zero, for logits ``<A x_i + c, y>`` and values ``V y`` without
biases of the key and value (:mod:`~otattn.lipschitz.near.head` says what becomes of its rows).

With a rotation, with norms, or with biases beside a sink or a cap, the map is a composition whose last stage is such heads
(:mod:`~otattn.lipschitz.near.rotary`, :mod:`~otattn.lipschitz.near.normed`): biases, norms and turns are in the first stages.

Positions are the whole numbers 1 to n where the map has no ``length``, ``length i / n`` in floats otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from otattn.attention import LayerNorm, MultiHeadAttention, ScoreAttention
from otattn.attention.head import Head
from otattn.lipschitz.constants._dual_quadratic import EPS

__all__ = ["Places", "bare", "places_of", "score_head", "score_heads", "why_no_scores"]

Array = NDArray[np.float64]


class Places(NamedTuple):
    """What the places of n tokens do to the rows of a head: ``(n, n)``, one more column for a sink; None is nothing."""

    seen: NDArray[np.bool_] | None
    added: Array | None = None
    size: float = 0.0
    """Of the parts of ``added``, which are rounded."""
    sink: bool = False


def score_heads(map: Any) -> tuple[ScoreAttention, ...]:
    """The heads with composed logits whose sum a map is; none for another map."""
    parts = map.heads if isinstance(map, MultiHeadAttention) else (map,)
    heads = tuple(h for h in parts if isinstance(h, ScoreAttention))
    return heads if len(heads) == len(parts) else ()


def why_no_scores(heads: tuple[ScoreAttention, ...]) -> str | None:
    """Why the heads have no expansion; None when they have one."""
    if len({h.cap is None for h in heads}) > 1:
        return "all of its heads have a soft cap or none, received both"
    for h in heads:
        for name in ("query_norm", "key_norm", "value_norm"):
            norm = getattr(h, name)
            if norm is not None and not isinstance(norm, LayerNorm):
                return (
                    f"queries, keys and values are normalised by LayerNorm or RMSNorm, received {norm.kind} as {name}"
                )
    return None


def bare(heads: tuple[ScoreAttention, ...]) -> bool:
    """Whether the logits are ``<A x + c, y>``, capped or not, plus what does not move, and the values those of a softmax head."""
    for h in heads:
        moved: list[Any] = [h.rotation, h.query_norm, h.key_norm, h.value_norm]
        moved += [] if h.sink is None else [h.key_bias, h.value_bias]
        moved += [] if h.cap is None else [h.key_bias]
        if any(part is not None for part in moved):
            return False
    return True


def score_head(h: ScoreAttention, output: Array | None) -> Head:
    """The matrices of a bare head."""
    made = Head.of(h, h.K, h.V, factors=(h.Q, h.K, h.query_bias))
    shift = abs(h.scale) * (made.shift + 4.0 * EPS * float(np.linalg.norm(made.c)))
    return replace(made.heated(h.scale), shift=shift).with_output(output)


def places_of(map: Any, n: int) -> Places:
    """For a bare head."""
    places = np.arange(1.0, n + 1.0)
    if map.length is not None:
        places = map.length * (places / n)
    seen = None if map.mask is None else ~map.mask.hidden(places, places)
    if seen is not None and not seen.any(axis=1).all():
        raise ValueError(
            f"every row must see an atom, received a mask that hides all {n} tokens from token {seen.any(axis=1).argmin() + 1}; "
            "widen the mask."
        )
    added, size = np.zeros((n, n)), 0.0
    if map.bias is not None:
        added = map.bias.at(places[None, :] - places[:, None])
        table = 0.0 if map.bias.table is None else float(np.abs(map.bias.table).max())
        size = abs(map.bias.slope) * float(places[-1]) + table
    if map.sink is None:
        return Places(seen, None if map.bias is None else added, size)
    ratio = 0.0 if map.length is None else float(np.log(n / map.length))
    added = np.column_stack([added, np.full(n, map.sink + ratio)])
    if seen is not None:
        seen = np.column_stack([seen, np.ones(n, dtype=bool)])
    return Places(seen, added, size + (abs(map.sink) + abs(ratio)) * (1.0 + 8.0 * EPS), True)
