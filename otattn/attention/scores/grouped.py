"""Grouped queries: several heads of queries share one head of keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn.attention.multihead import MultiHeadAttention
from otattn.attention.scores.attention import ScoreAttention

__all__ = ["grouped_queries"]


def grouped_queries(
    Q: ArrayLike,
    K: ArrayLike,
    V: ArrayLike,
    output: ArrayLike,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    query_bias: ArrayLike | None = None,
    key_bias: ArrayLike | None = None,
    value_bias: ArrayLike | None = None,
    output_bias: ArrayLike | None = None,
    per_head: Sequence[Mapping[str, Any]] | None = None,
    **options: Any,
) -> MultiHeadAttention:
    """Attention of stacked projections; query head h has the keys and values number ``h G // H`` of G.

    Parameters
    ----------
    Q : array_like (H k, d)
    K : array_like (G k, d)
    V : array_like (G e, d)
    output : array_like (D, H e)
    num_heads, num_kv_heads : int
        H and G, by default H; G divides H (1: one head of keys and values for all).
    query_bias : array_like (H k,), optional
    key_bias : array_like (G k,), optional
    value_bias : array_like (G e,), optional
    output_bias : array_like (D,), optional
    per_head : sequence of dict (H,), optional
        What a head has of its own, such as its sink or the slope of its bias.
    **options
        Of :class:`ScoreAttention`, the same for all heads.

    Raises
    ------
    ValueError
        Shapes or numbers of heads that do not fit.

    Examples
    --------
    >>> import numpy as np
    >>> whole = grouped_queries(np.eye(4), np.eye(4)[:2], np.eye(4)[:2], np.eye(4), num_heads=2, num_kv_heads=1)
    >>> len(whole.heads), whole.on_tokens(np.eye(4)).shape
    (2, (4, 4))

    References
    ----------
    Ainslie et al., "GQA: training generalized multi-query transformer models from multi-head checkpoints", 2023.
    """
    H = check.count(num_heads, "num_heads")
    G = H if num_kv_heads is None else check.count(num_kv_heads, "num_kv_heads")
    q, k, v, W = (check.matrix(M, name) for M, name in ((Q, "Q"), (K, "K"), (V, "V"), (output, "output")))
    if H % G or len(q) % H or len(k) % G or len(v) % G or len(q) // H != len(k) // G or W.shape[1] != H * (len(v) // G):
        raise ValueError(
            f"Q, K, V and output must fit {H} heads of queries and {G} of keys and values, G a divisor of H, received shapes "
            f"{q.shape}, {k.shape}, {v.shape} and {W.shape}; check num_heads and num_kv_heads."
        )
    own: list[dict[str, Any]] = [{}] * H if per_head is None else [dict(part) for part in per_head]
    if len(own) != H:
        raise ValueError(f"per_head must have one entry a head, received {len(own)} for {H} heads.")
    size, e = len(q) // H, len(v) // G
    biases: dict[str, Any] = {
        "query_bias": None if query_bias is None else check.vector(query_bias, "query_bias", size=len(q)),
        "key_bias": None if key_bias is None else check.vector(key_bias, "key_bias", size=len(k)),
        "value_bias": None if value_bias is None else check.vector(value_bias, "value_bias", size=len(v)),
    }
    heads = []
    for h in range(H):
        g = h * G // H
        of_query, of_key = slice(h * size, (h + 1) * size), slice(g * size, (g + 1) * size)
        of_value = slice(g * e, (g + 1) * e)
        rows = {"query_bias": of_query, "key_bias": of_key, "value_bias": of_value}
        cut = {name: None if b is None else b[rows[name]] for name, b in biases.items()}
        heads.append(ScoreAttention(q[of_query], k[of_key], v[of_value], **cut, **options, **own[h]))
    outputs = [W[:, h * e : (h + 1) * e] for h in range(H)]
    return MultiHeadAttention(heads, outputs, output_bias=output_bias)
