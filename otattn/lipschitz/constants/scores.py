r"""The numbers of attention with composed logits on a domain: slopes and sizes of values and logits, sums of columns.

**Norms.** LayerNorm and RMSNorm of dimension k, ``z -> g o P z / sigma + b``, ``sigma^2 = |P z|^2 / k + eps``, P the
projection on vectors of mean 0 or the identity: the derivative ``g o (P - P z z^T P / (k sigma^2)) / sigma`` has norm at most
``max|g| / sqrt(eps)``, and ``|P z| / sigma`` increases with ``|P z| <= |z|``, so that the image lies within ``max|g| s /
sqrt(s^2 / k + eps) <= max|g| sqrt(k)`` of b, where ``|z| <= s``, whatever s is.

**Logits.** With ``q = R_i N_q(Q x + b_q)``, ``k = R_j N_k(K y + b_k)`` (turning changes no norm) a logit ``c tanh(s <q, k> /
c) + beta`` has the gradient ``s sech^2(.) D k^T q`` in y, of norm at most ``G = |s| sup|q| Lip(k)``, and in x at most ``H =
|s| sup|k| Lip(q)``. Without its bias it lies in ``[-B, B]``, ``B = min(c, |s| sup|q| sup|k|)``. Two logits of a row differ by
at most ``2 B``, and without a rotation by at most ``2 r G``, r the half diameter of the domain, and by the range of the bias.

**Values.** ``v`` is the Lipschitz constant of the values, ``rho`` half the largest range of ``<u, value>``, ``|u| = 1``, over
the domain, and over the value 0 of a sink too. So under every probability on them ``<u, value>`` has standard deviation at
most rho (Popoviciu). ``reach`` is the largest norm of a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from otattn._linalg import norm_upper
from otattn.attention import LayerNorm, ScoreAttention
from otattn.attention.head import Head, check_sizes
from otattn.lipschitz.arithmetic.balls import BallMatrix, arithmetic_of
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import is_zero, least, product, top, up
from otattn.lipschitz.constants.regions import Region, Seen
from otattn.measures.domains import Domain

__all__ = ["EDGE", "ScoreNumbers"]

EDGE = 1e-3
"""Offsets of a sequence are whole numbers: far more than positions are rounded by, far less than one."""


@dataclass(frozen=True, eq=False)
class ScoreNumbers:
    """What a map sees of a domain; None is all of ``R^d``, where what is not normalised is unbounded."""

    map: ScoreAttention
    domain: Domain | None
    exact: bool = False

    def __post_init__(self) -> None:
        check_sizes(self.map)

    def _wrap(self, M: Any) -> Any:
        return BallMatrix.exact(M) if self.exact else np.asarray(M)

    def number(self, x: float) -> Any:
        """A float in the arithmetic of the numbers."""
        return lift(x) if self.exact else x

    def _length(self, b: Any) -> Any:
        return 0.0 if b is None else norm_upper(self._wrap(b))

    @cached_property
    def _region(self) -> Region | None:
        return None if self.domain is None else Region.of(self.domain, exact=self.exact)

    def _seen(self, M: Any, b: Any) -> Seen | None:
        """The image ``M x + b`` of the domain: :attr:`Seen.G` is its largest norm, :attr:`Seen.value_radius` its half width."""
        if self._region is None:
            return None
        return Seen(Head.of(None, M, M, b, arithmetic=arithmetic_of(self.exact)), self._region)

    def _feature(self, M: Any, b: Any, norm: Any) -> tuple[Any, Any, Any]:
        """Of ``N(M x + b)``: its Lipschitz constant, half its width, and its largest norm."""
        seen = self._seen(M, b)
        slope = Head.of(None, M, M, arithmetic=arithmetic_of(self.exact)).norm_A
        everywhere = 0.0 if is_zero(slope) else math.inf
        half = everywhere if seen is None else seen.value_radius
        size = everywhere + self._length(b) if seen is None else seen.G
        if norm is None:
            return slope, half, size
        assert isinstance(norm, LayerNorm)
        g, k, eps = float(np.abs(norm.gain).max()), float(norm.in_dim), self.number(norm.eps)
        root = np.sqrt(eps)
        slope = up(product(g, slope) / root)
        # |z| / sigma increases with |z|, up to sqrt(k)
        ratio = np.sqrt(self.number(k))
        if math.isfinite(top(size)):
            ratio = least(ratio, size / np.sqrt(size * size / k + eps))
        width = up(product(g, ratio))
        return slope, least(width, up(product(g, half) / root)), up(width + self._length(norm.bias))

    @cached_property
    def _value(self) -> tuple[Any, Any, Any]:
        return self._feature(self.map.V, self.map.value_bias, self.map.value_norm)

    @cached_property
    def _query(self) -> tuple[Any, Any, Any]:
        return self._feature(self.map.Q, self.map.query_bias, self.map.query_norm)

    @cached_property
    def _key(self) -> tuple[Any, Any, Any]:
        return self._feature(self.map.K, self.map.key_bias, self.map.key_norm)

    @property
    def v(self) -> Any:
        """The Lipschitz constant of the values."""
        return self._value[0]

    @property
    def reach(self) -> Any:
        """The largest norm of a value."""
        return self._value[2]

    @cached_property
    def spread(self) -> Any:
        """``rho``: half the range of the values, that of a sink among them."""
        rho = self._value[1]
        return rho if self.map.sink is None else up(np.maximum(rho, 0.5 * self.reach))

    @cached_property
    def G(self) -> Any:
        """The largest gradient of a logit in the key's token."""
        return up(product(abs(self.map.scale), self._query[2], self._key[0]))

    @cached_property
    def H(self) -> Any:
        """The largest gradient of a logit in the query's token."""
        return up(product(abs(self.map.scale), self._key[2], self._query[0]))

    @cached_property
    def t(self) -> Any:
        """``rho G``: how much the values' range times a gradient moves an image."""
        return up(product(self.spread, self.G))

    @cached_property
    def sigma(self) -> Any:
        """``rho H``, at least the norm of the field's derivative ``sum_j P_ij (v_j - vbar) (h_ij - hbar)^T``."""
        return up(product(self.spread, self.H))

    def logit_range(self, n: int | None) -> Any:
        """How much two logits of one row differ at most, for n tokens or any measure."""
        size = up(product(abs(self.map.scale), self._query[2], self._key[2]))
        if self.map.cap is not None:
            size = least(self.number(self.map.cap), size)
        width = up(2.0 * size)
        if self.map.rotation is None and self._region is not None:
            width = least(width, up(2.0 * product(self.G, self._region.half_diameter)))
        return up(width + self._bias_range(n))

    def _bias_range(self, n: int | None) -> Any:
        """The range of the positions' bias over the offsets that a token sees."""
        bias = self.map.bias
        if bias is None:
            return 0.0
        before, after = self._offsets(n)
        far = 0.0 if bias.slope == 0.0 else up(abs(bias.slope) * max(before, after))
        if bias.table is None:
            return self.number(far)
        m = len(bias.table) // 2
        low, high = (m if math.isinf(x) else min(m, math.floor(x + 0.5)) for x in (before, after))
        part = self.number(1.0) * bias.table[m - low : m + high + 1]
        return self.number(far) + up(part.max() - part.min())

    def _offsets(self, n: int | None) -> tuple[float, float]:
        """The largest ``i - j`` and ``j - i`` between two tokens that see each other."""
        extent = self.map.length if self.map.length is not None else math.inf if n is None else n - 1.0
        before, after = (math.inf, math.inf) if self.map.mask is None else self.map.mask.window
        return min(before, extent) + EDGE, min(after, extent) + EDGE
