"""The cost matrix ``(|x_i - y_j| / scale)^p`` at a scale where the powers that matter neither vanish nor
overflow.
"""

from __future__ import annotations

import numpy as np

from otattn._linalg import Array
from otattn.distances.bottleneck import bottleneck
from otattn.distances.costs import powers

__all__ = ["DECADES", "ground_cost", "scaled_cost"]

CAP = 1e20  # at the scale W_inf an optimal plan costs at most 1: such an entry carries less than rounding
PLAIN = (1e-35, 1e15)  # distances whose powers stay in float64 without scaling, for p <= 8
DECADES = 150.0  # powers that span at most this many keep their digits at the scale of the largest


def ground_cost(D: Array, p: float, A: list[int], B: list[int]) -> tuple[Array, float]:
    """Costs and their scale, for finite ``p``. Capping and underflow only lower a cost, so dual bounds stay
    valid.
    """
    top = float(D.max())
    least = float(D.min(initial=top, where=D > 0.0))
    if top == 0.0 or (p <= 8.0 and PLAIN[0] < least and top < PLAIN[1]):
        return powers(D, p), 1.0
    # distances so unequal that their powers leave float64: the scale that matters is then W_inf
    scale = top if p * float(np.log10(top / least)) <= DECADES else bottleneck(D, A, B).value or top
    return scaled_cost(D, p, scale), scale


def scaled_cost(D: Array, p: float, scale: float) -> Array:
    """``min((D / scale)^p, 1e20)``, or plainly ``D^p`` at scale 1."""
    if scale == 1.0:
        return powers(D, p)
    with np.errstate(over="ignore", under="ignore"):
        return np.minimum(powers(D / scale, p), CAP)
