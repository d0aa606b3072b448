"""The softmax heads of which a map is a sum: what compression is proved and chosen for."""

from __future__ import annotations

from otattn._linalg import Array
from otattn.attention import MultiHeadAttention, SoftmaxAttention
from otattn.attention.base import AttentionMap, as_attention

__all__ = ["Part", "softmax_parts"]

Part = tuple[SoftmaxAttention, Array | None]
"""A head and its output matrix (None is the identity)."""


def softmax_parts(attention: AttentionMap) -> tuple[Part, ...]:
    """The heads of softmax attention, or of a multi-head sum of such.

    Raises
    ------
    TypeError
        The map is another one; a subclass may evaluate something else, so it is another one too.
    """
    as_attention(attention)
    if type(attention) is SoftmaxAttention:
        return ((attention, None),)
    odd: AttentionMap = attention
    if type(attention) is MultiHeadAttention:
        odd = next((head for head in attention.heads if type(head) is not SoftmaxAttention), attention)
        if odd is attention:
            outputs = attention.outputs or (None,) * len(attention.heads)
            return tuple(
                (head, W)
                for head, W in zip(attention.heads, outputs, strict=True)
                if isinstance(head, SoftmaxAttention)
            )
    if odd.causal:
        advice = "give its map without the mask, the tokens that a query sees as mu, and that query as queries="
    else:
        advice = "measure wasserstein(attention.pushforward(mu), attention.pushforward(nu)) instead"
    raise TypeError(
        f"attention must be softmax attention or a multi-head sum of softmax heads, received {odd.kind}; {advice}."
    )
