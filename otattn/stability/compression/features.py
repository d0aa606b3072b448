"""Where a head tells tokens apart: distances there are logit errors and value errors, in one unit."""

from __future__ import annotations

import numpy as np

from otattn._linalg import Array, psd_sqrt
from otattn.attention.base import AttentionMap
from otattn.measures import DiscreteMeasure
from otattn.stability.compression.heads import softmax_parts

__all__ = ["head_features"]

VALUES = 0.5
"""Weight of the values beside the logits; on trained heads half or twice as much makes little difference."""


def head_features(attention: AttentionMap, x: Array, mu: DiscreteMeasure, queries: DiscreteMeasure) -> Array:
    r"""Points ``x (n, d)`` in the space that the heads see, ``(n, f)``.

    For each head the keys times the root of the second moment of the queries, so that distances are root mean squares of
    logit differences, and the values in units of twice their spread under ``mu``.
    """
    centre, columns = mu.mean(), []
    for head, W in softmax_parts(attention):
        maps = head.projections()
        q = queries.points @ maps.Wq.T
        q = q if maps.bq is None else q + maps.bq
        values = mu.points @ maps.V.T
        moved = (x - centre) @ maps.V.T
        if W is not None:
            values, moved = values @ W.T, moved @ W.T
        values = values - mu.weights @ values
        spread = float(np.sqrt(mu.weights @ np.sum(values**2, axis=1)))
        columns.append((x - centre) @ maps.Wk.T @ psd_sqrt((q.T * queries.weights) @ q))
        if spread > 0.0:
            columns.append(VALUES * moved / spread)
    return np.hstack(columns)
