"""The local constant in W_2 from above, and what kind of bound it is."""

from __future__ import annotations

from typing import Literal

import numpy as np

from otattn.attention import AttentionMap, memory
from otattn.attention.base import Measure
from otattn.lipschitz.local.enclosed import enclosed_norms, made_of_softmax
from otattn.operators import measure_jacobian, spectral_norm_bounds

__all__ = ["UpperKind", "constant_above"]

UpperKind = Literal["proved", "computed", "probabilistic", "margins", "none"]
PROVED_SIDE = 2048
"""Jacobians of softmax heads whose smaller side is at most this are enclosed and factorised."""
ENCLOSURE_COPIES = 8
"""Arrays of the Jacobian's size that an enclosure and its proof hold at a time, at most."""
_EPS = float(np.finfo(np.float64).eps)


def constant_above(
    attention: AttentionMap, mu: Measure, splitting: float, *, failure: float, seed: int
) -> tuple[float, UpperKind]:
    """An upper bound of the larger of the particle and the splitting part, and its kind.

    Parameters
    ----------
    attention : AttentionMap
    mu : measure
    splitting : float
        The splitting part as computed, or a ceiling of it.
    failure : float
        Largest probability that a bound of kind "probabilistic" is below the constant.
    seed : int
        Of its starts.

    Returns
    -------
    upper : float
    kind : {"proved", "computed", "probabilistic"}
        As in :class:`~otattn.operators.NormBounds`; "proved" counts what rounds in the derivative too.
    """
    n, d = int((mu.weights > 0).sum()), mu.dim
    e = d if attention.out_dim is None else attention.out_dim
    fits = n * min(d, e) <= PROVED_SIDE and 8 * ENCLOSURE_COPIES * n * n * d * e <= 2 * memory.MEMORY_BUDGET
    if fits and made_of_softmax(attention):
        upper = max(enclosed_norms(attention, mu))
        if upper < np.inf:
            return upper, "proved"
    bounds = spectral_norm_bounds(measure_jacobian(attention, mu), failure=failure, rng=seed)
    # the fields are decomposed one by one, with the backward error of a decomposition
    return max(bounds.upper, splitting * (1.0 + 8.0 * max(d, e) * _EPS)), bounds.how
