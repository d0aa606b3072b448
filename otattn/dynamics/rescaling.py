"""Rescaled tokens ``z = e^{-tV} x``: the attention that moves them, without ever forming x.

With ``E = e^{tV}`` the logits of ``x = E z`` are those of ``z`` under ``A_t = E^T A E``, and the values of a head
become ``E^{-1} V_h E`` acting on averages of z. So ``z' = Gamma_t(z) - V z`` for an attention map ``Gamma_t`` of the
same kind: no difference of large numbers is taken, however much x grows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import expm

from otattn.attention import AttentionMap

__all__ = ["conjugate", "value_matrix"]

Array = NDArray[np.float64]


def value_matrix(attention: AttentionMap) -> Array:
    """The linear map V of one token alone: that of a head, ``sum_h W_h V_h`` of several.

    Raises
    ------
    ValueError
        The map has no value matrix (an MLP, a normalisation, a composition), or it is not square.
    """
    drift = attention.drift
    terms = drift.map.values()
    if terms is None or drift.skip:
        raise ValueError(
            f'normalization="rescaled" must have an attention map with a value matrix, received '
            f'{attention.kind}; use None or "sphere".'
        )
    V = np.asarray(drift.scale * np.sum([term.V for term in terms], axis=0))
    if V.shape[0] != V.shape[1]:
        raise ValueError(f"V must be square for a flow, received shape {V.shape}; add an output matrix.")
    return V


def conjugate(attention: AttentionMap, V: Array, t: float) -> AttentionMap:
    """The attention that acts on ``z = e^{-tV} x`` as ``attention`` acts on x: ``e^{-tV} Gamma(e^{tV} z)``.

    Raises
    ------
    OverflowError
        The rescaled parameters are not representable.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return attention.in_coordinates(expm(t * V), expm(-t * V))
