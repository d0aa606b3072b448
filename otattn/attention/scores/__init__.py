"""Attention with composed logits: positions, norms of queries and keys, caps, windows, sinks, gates, shared keys."""

from otattn.attention.scores.attention import ScoreAttention
from otattn.attention.scores.gated import GatedAttention
from otattn.attention.scores.grouped import grouped_queries
from otattn.attention.scores.positions import Mask, PositionBias, Rotation, alibi_slopes

__all__ = [
    "GatedAttention",
    "Mask",
    "PositionBias",
    "Rotation",
    "ScoreAttention",
    "alibi_slopes",
    "grouped_queries",
]
