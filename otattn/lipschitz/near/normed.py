r"""Queries, keys and values that are normalised: blocks of coordinates of each token, with a LayerNorm or RMSNorm each.

After the affine first stage of a lift (:mod:`~otattn.lipschitz.near.rotary`) the blocks of ``y = L x + b`` that a head normalises
are mapped by ``N_b`` each and the others left as they are; then all are turned by their places. With ``D_b`` the blocks of D,

``|D^k f [D, .., D]|^2 = sum_b |D^k N_b [D_b, ..]|^2 <= max_b c_b^2 sum_b |D_b|^{2k} <= max_b c_b^2 |D|^{2k}``,

so that the constants are the largest of those of the blocks. In other coordinates, ``left f(right z)``, the constants are at most
``||left|| ||right||^k`` times these, and at most the sum over the blocks of those of ``left_b N_b(right_b z)``: the smaller is
taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import spectral_norm_upper
from otattn.attention import LayerNorm, TokenwiseMap
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.expansion import Expansion, Taylor
from otattn.lipschitz.near.tokenwise import tokenwise_errors, tokenwise_expansion

__all__ = ["BlockNorms"]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class BlockNorms(TokenwiseMap):
    """Norms of blocks of the coordinates of R^size; other coordinates stay."""

    norms: tuple[tuple[slice, LayerNorm], ...]
    size: int

    @property
    def in_dim(self) -> int:
        return self.size

    @property
    def out_dim(self) -> int:
        return self.size

    def _map(self, x: Array) -> Array:
        out = np.array(x)
        for block, norm in self.norms:
            out[:, block] = norm._map(x[:, block])
        return out

    def _jvp(self, x: Array, v: Array) -> Array:
        out = np.array(v)
        for block, norm in self.norms:
            out[:, block] = norm._jvp(x[:, block], v[:, block])
        return out

    def _vjp(self, x: Array, g: Array) -> Array:
        out = np.array(g)
        for block, norm in self.norms:
            out[:, block] = norm._vjp(x[:, block], g[:, block])
        return out

    def errors(self, x: Array) -> tuple[float, float]:
        """What rounding adds to the map at float tokens (Frobenius norm), and to its Jacobian (operator norm)."""
        values, slopes = zip(*(tokenwise_errors(norm, x[:, block]) for block, norm in self.norms), strict=True)
        return float(np.linalg.norm(values)) * (1.0 + 8.0 * len(values) * EPS), max(slopes)

    def expansion(self, x: Array, left: Array | None, right: Array | None) -> Expansion:
        """That of ``left f(right z)`` at float tokens ``x = right z``."""
        here = _largest([tokenwise_expansion(norm, x[:, block]) for block, norm in self.norms])
        if left is None and right is None:
            return here
        l, r = (1.0 if M is None else float(spectral_norm_upper(M)) for M in (left, right))
        L, R = (np.eye(self.size) if M is None else M for M in (left, right))
        parts = [tokenwise_expansion(norm, x[:, block], L[:, block], R[block]) for block, norm in self.norms]
        seconds, thirds = (
            [p.second for p in parts if isinstance(p, Taylor)],
            [p.third for p in parts if isinstance(p, Taylor)],
        )
        up = 1.0 + 8.0 * (len(parts) + 4) * EPS

        def third(t: float) -> float:
            return min(l * r**3 * here.third(r * t), sum(f(t) for f in thirds)) * up

        return Taylor(min(l * r * r * here.second, sum(seconds)) * up, third)


def _largest(parts: list[Expansion]) -> Taylor:
    """The expansion whose constants are the largest of the parts."""
    found = [p for p in parts if isinstance(p, Taylor)]
    return Taylor(max(p.second for p in found), lambda r: max(p.third(r) for p in found))
