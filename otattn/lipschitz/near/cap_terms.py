r"""What a soft cap adds to the third derivative of a softmax head near given tokens: the terms with ``phi''`` and ``phi'''``.

With ``|tau_j| <= q |delta_i| + G |delta_j|`` (q the largest raw key of the row) and the centred ``|t_j| <= (K + G) |delta_i| + G
|delta_j| + G sum_k p_k |delta_k|``, in a row of largest value Y, ``B = sup|phi''|``, ``T = sup|phi'''|``:

- ``3 kappa_3(v, t, phi'' tau^2)``, two expectations: ``6 B Y (2 G) G^2 sum p_j |delta_j|^2`` where ``delta_i = 0``, ``6 B Y (K + 3 G)
  (q + G)^2`` in all;
- ``3 Cov(V delta, phi'' tau^2)``: ``6 B v G^2 sum p_j |delta_j|^2`` and ``6 B v (q + G)^2``;
- ``Cov(v, phi''' tau^3)``: ``T Y G^3 sum p_j |delta_j|^2`` and ``T Y (q + G)^3``;
- ``6 Cov(v, phi'' tau m)``: 0 and ``6 B Y (q + G) a``.

The rows together are at most the largest column norm of what stands before ``|delta_j|^2``, plus the largest of the differences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.head import Curve

__all__ = ["CapTerms"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CapTerms:
    """Row by row the largest raw key and the largest ``|phi''|`` at the tokens, and its bounds everywhere."""

    keys: Array
    bend: Array
    second: float
    third: float

    @classmethod
    def of(cls, curve: Curve, weights: Array) -> CapTerms:
        q = np.linalg.norm(curve.raw, axis=1) * (1.0 + 4.0 * (curve.raw.shape[1] + 8) * EPS) + curve.draw
        keys = np.where(weights > 0.0, q, 0.0).max(axis=1)
        bend = np.where(weights > 0.0, np.abs(curve.bend) + curve.dbend, 0.0).max(axis=1)
        return cls(keys, bend, 0.77 / curve.cap, 2.0 / curve.cap**2 * (1.0 + 4.0 * EPS))

    def bends(self, Z: Array, r: float) -> Array:
        """``sup |phi''|`` over the ball of radius r, where logits move by at most ``Z r``."""
        return np.asarray(np.minimum(self.second, self.bend + self.third * Z * r))

    def terms(self, p: Array, G: Array, Y: Array, K: Array, a: float, v: float, r: float) -> float:
        """The bound over the ball of radius r, from those there of the weights, of ``|g|``, ``|y|``, ``|k|``, ``||A||``, ``||V||``."""
        q, y, k = self.keys + a * r, Y.max(axis=1), K.max(axis=1)
        Z = q + G
        B, T = self.bends(Z, r), self.third
        alone = 12.0 * B * y * G**3 + 6.0 * B * v * G**2 + T * y * G**3
        whole = 6.0 * B * y * (k + 3.0 * G) * Z**2 + 6.0 * B * v * Z**2 + T * y * Z**3 + 6.0 * B * y * Z * a
        n = len(p)
        columns = np.sqrt(((p[:, :n] * alone[:, None]) ** 2).sum(axis=0))
        return float(columns.max(initial=0.0) + (whole - alone).max(initial=0.0))
