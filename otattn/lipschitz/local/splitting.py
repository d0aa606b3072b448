"""The splitting part of a local constant: how much the field stretches at an atom whose parts move apart."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from otattn.attention import AttentionMap
from otattn.attention.base import Measure
from otattn.lipschitz.local.far_mass import largest_field_norm
from otattn.lipschitz.local.field_ceiling import field_ceilings
from otattn.operators.layer import SoftmaxLayer, supports_fused

__all__ = ["splitting_beside", "splitting_part"]

Array = NDArray[np.float64]
FIELD_BYTES = 64 * 2**20
FIRST_FIELDS = 8
"""Fields of the highest ceilings that are found first: mostly they leave no other."""
CEILINGS_FROM = 64
"""Atoms from which on ceilings cost less than the fields that they save."""


def splitting_part(attention: AttentionMap, mu: Measure, *, ceilings: Array | None = None, floor: float = 0.0) -> float:
    """``max_i ||D_x Gamma_mu(x_i)||``, in row chunks; 0 for maps whose atoms do not split.

    ``ceilings`` bound the norms atom by atom: those that are not above ``floor``, or above what has been found, are left out.
    For many atoms of a softmax head or layer they are found here.
    """
    if not attention.splits:
        return 0.0
    d = mu.dim
    e = d if attention.out_dim is None else attention.out_dim
    rows = max(1, FIELD_BYTES // (8 * d * e))
    if ceilings is None and mu.n >= CEILINGS_FROM and supports_fused(attention):
        ceilings = _ceilings(SoftmaxLayer(attention, mu), floor)
    step = rows if ceilings is None else min(rows, FIRST_FIELDS)
    ceilings = np.full(mu.n, np.inf) if ceilings is None else ceilings
    order, start, best = np.argsort(-ceilings, kind="stable"), 0, floor
    while start < mu.n:
        part = order[start : start + step]
        part = part[ceilings[part] > best]
        if not part.size:
            break
        start, step = start + step, min(2 * step, rows)
        times = mu.times[part] if attention.causal else None  # type: ignore[union-attr]
        best = largest_field_norm(attention.field_jacobian(mu.points[part], mu, times=times), best)
    return float(best)


def splitting_beside(
    attention: AttentionMap, mu: Measure, layer: SoftmaxLayer | None, particle: float
) -> tuple[float | None, float]:
    """The splitting part where it may exceed the particle part (else None), and a ceiling of it."""
    if layer is None or not attention.splits:
        known = splitting_part(attention, mu)
        return known, known
    ceilings = _ceilings(layer, particle)
    highest = float(ceilings.max())
    if highest <= particle:
        return None, highest
    found = splitting_part(attention, mu, ceilings=ceilings, floor=particle)
    return (found, found) if found > particle else (None, particle)


def _ceilings(layer: SoftmaxLayer, floor: float) -> Array:
    """The ceilings in the order of the atoms, all of which have weight."""
    out = np.empty(layer.atoms)
    out[layer.chosen] = field_ceilings(layer, floor)
    return out
