"""A softmax attention layer at a measure: its projections, the order of its tokens, its scales, its products with tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import cloud_centre, row_norms
from otattn.attention import AttentionMap, MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.measures import SpaceTimeMeasure

__all__ = ["Factor", "HeadSlices", "Mixing", "SoftmaxLayer", "supports_fused"]

Array = NDArray[Any]

FEW_TOKENS = 192
TURNED_ROWS = 64


class Factor:
    """``x W^T`` and ``z W`` for a fixed matrix W and n rows of tokens.

    With few tokens in float32 the product is computed as ``(W x^T)^T``, and W is also kept transposed for the
    other direction: OpenBLAS is up to three times faster when the long side comes first.
    """

    def __init__(self, W: Array, n: int) -> None:
        self.W = W
        self._turned: Array | None = None
        if n <= FEW_TOKENS and W.dtype == np.float32:
            self._turned = np.empty(W.shape[::-1], W.dtype)
            for a in range(0, len(W), TURNED_ROWS):  # block by block, as a whole it misses the cache
                self._turned[:, a : a + TURNED_ROWS] = W[a : a + TURNED_ROWS].T

    def forward(self, x: Array, out: Array | None = None) -> Array:
        """``x W^T``; into ``out`` where that costs nothing."""
        if self._turned is not None:
            return np.asarray((self.W @ x.T).T)
        return np.matmul(x, self.W.T, out=out)

    def back(self, z: Array) -> Array:
        """``z W``."""
        if self._turned is not None:
            return np.asarray((self._turned @ z.T).T)
        return np.asarray(z @ self.W)


# float32 carries logits up to this size (to 1e-3), these ratios of weights, these factors
FLOAT32_LOGIT = 1e4
FLOAT32_WEIGHT = 1e-24
FLOAT32_FACTOR = 1e5
CACHED_ENTRIES = 3_000_000
"""Projected tokens of at most this many entries are kept between work dtypes."""


def supports_fused(attention: AttentionMap) -> bool:
    """True for softmax attention, multi-head softmax attention, and either of them masked."""
    return _softmax_heads(attention) is not None


def _softmax_heads(attention: Any) -> tuple[list[SoftmaxAttention], Sequence[Array] | None] | None:
    if isinstance(attention, MaskedAttention):
        attention = attention.attention
    if isinstance(attention, SoftmaxAttention):
        return [attention], None
    if not isinstance(attention, MultiHeadAttention):
        return None
    heads: list[SoftmaxAttention] = []
    for head in attention.heads:
        inner = head.attention if isinstance(head, MaskedAttention) else head
        if not isinstance(inner, SoftmaxAttention):
            return None
        heads.append(inner)
    return heads, attention.outputs


@dataclass(frozen=True)
class HeadSlices:
    """Where a head lies: ``[q | k | v]`` in the stacked projections, its values among the joined outputs."""

    k: int
    e: int
    columns: slice
    values: slice

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """The columns of queries, keys and values."""
        a = self.columns.start
        b = a + self.k
        return slice(a, b), slice(b, b + self.k), slice(b + self.k, self.columns.stop)


class SoftmaxLayer:
    """The float64 data that operators of any work dtype share.

    Tokens are those of positive weight, in the order of their times when the attention is masked, so that a
    row sees a prefix of the columns. Values and output matrices are divided by powers of two (``scale`` is
    their product); another brings queries and keys of a head to one size, which leaves the logits alone.
    """

    def __init__(self, attention: AttentionMap, mu: Any, *, reweight: bool = True) -> None:
        parts = _softmax_heads(attention)
        if parts is None:
            raise TypeError(
                "attention must be softmax attention, multi-head attention of softmax heads, or one of them "
                f"masked, received {type(attention).__name__}; use measure_jacobian or attention.jacobian."
            )
        heads, outputs = parts
        measure = attention.as_measure(mu)
        chosen = np.flatnonzero(measure.weights > 0)
        self.visible: NDArray[np.int64] | None = None
        if attention.causal:
            assert isinstance(measure, SpaceTimeMeasure)
            chosen = chosen[np.argsort(measure.times[chosen], kind="stable")]
            times = measure.times[chosen]
            self.visible = np.searchsorted(times, times, side="right")
        self.atoms, self.d, self.n = measure.n, measure.dim, len(chosen)
        self._chosen = None if np.array_equal(chosen, np.arange(self.atoms)) else chosen
        w = measure.weights[chosen]
        self._x = measure.points if self._chosen is None else measure.points[chosen]
        self._centre = cloud_centre(self._x, w)
        uniform = bool((w == w[0]).all())
        self.column = None if uniform else np.log(w / w.max())
        self.root = np.sqrt(w / w.mean())[:, None] if reweight and not uniform else None
        self._read_heads(heads)
        self._read_outputs(outputs, heads)
        self.scale = self._value_scale * self._output_scale
        self.fits_float32 = self._measure_heads(float(w.min() / w.max()))

    def _read_heads(self, heads: Sequence[SoftmaxAttention]) -> None:
        self._maps = [h.projections() for h in heads]
        slices, column, value = [], 0, 0
        for m in self._maps:
            k, e = m.Wk.shape[0], m.e
            stop = column + 2 * k + e
            slices.append(HeadSlices(k, e, slice(column, stop), slice(value, value + e)))
            column, value = stop, value + e
        self.heads, self.width, self.value_width = tuple(slices), column, value
        self._value_scale = _power_of_two(max(_size(m.V) for m in self._maps))

    def _read_outputs(self, outputs: Sequence[Array] | None, heads: Sequence[SoftmaxAttention]) -> None:
        """``outputs`` becomes the joined ``(E, sum e_h)`` matrix; None where the values are the output."""
        self._output_scale = 1.0
        self.outputs: Array | None = None
        if outputs is not None:
            joined = np.concatenate(outputs, axis=1)
            self._output_scale = _power_of_two(_size(joined))
            self.outputs = joined / self._output_scale
        elif len(heads) > 1:
            self.outputs = np.tile(np.eye(heads[0].out_dim), len(heads))
        self.e = self.value_width if self.outputs is None else int(self.outputs.shape[0])
        # a row of the outputs that meets one head only couples nothing: concatenation has such rows only
        self.coupled = False
        if self.outputs is not None and len(heads) > 1:
            used = np.stack([(self.outputs[:, h.values] != 0).any(axis=1) for h in self.heads])
            self.coupled = bool((used.sum(axis=0) > 1).any())

    def _measure_heads(self, weight_ratio: float) -> bool:
        """Finds the factors that balance queries and keys; True when float32 holds it all."""
        self._balances: list[float] = []
        self._cache: dict[tuple[int, int], Array] = {}
        self._centred: Array | None = None
        fits = weight_ratio >= FLOAT32_WEIGHT
        for h, m in enumerate(self._maps):
            q, k = float(row_norms(self._part(h, 0)).max()), float(row_norms(self._part(h, 1)).max())
            balance = _power_of_two(np.sqrt(q / k)) if q > 0.0 and k > 0.0 else 1.0
            self._balances.append(balance)
            fits = fits and q * k <= FLOAT32_LOGIT
            factors = (
                _size(m.Wq) / balance,
                _size(m.Wk) * balance,
                float(row_norms(self._part(h, 2)).max()) / self._value_scale,
            )
            fits = fits and max(factors) <= FLOAT32_FACTOR
        return fits

    def _part(self, h: int, which: int) -> Array:
        """Queries (0), centred keys (1) or centred values (2): softmax does not see the shift of these two."""
        if (h, which) in self._cache:
            return self._cache[h, which]
        m, small = self._maps[h], self.n * self.width <= CACHED_ENTRIES
        if self._centred is None:
            # differences first: no digits are lost for clouds far from the origin
            x = self._x - self._centre
            if small:
                self._centred = x
        else:
            x = self._centred
        out = x @ (m.Wq, m.Wk, m.V)[which].T
        if which == 0:
            out += m.Wq @ self._centre
            if m.bq is not None:
                out += m.bq
        if small:
            self._cache[h, which] = out
        return np.asarray(out)

    def queries(self, h: int) -> Array:
        """Queries of head h, scaled, ``(n, k)``."""
        return self._part(h, 0) / self._balances[h]

    def keys(self, h: int) -> Array:
        """Centred keys of head h, scaled, ``(n, k)``."""
        return self._part(h, 1) * self._balances[h]

    def values(self, h: int) -> Array:
        """Centred values of head h, scaled, ``(n, e)``."""
        return self._part(h, 2) / self._value_scale

    def stacked(self, dtype: np.dtype[Any]) -> Array:
        """All projections of all heads, scaled, ``(sum (2 k_h + e_h), d)``."""
        W = np.empty((self.width, self.d), dtype)
        for m, s, balance in zip(self._maps, self.heads, self._balances, strict=True):
            q, k, v = s.parts
            np.divide(m.Wq, balance, out=W[q], casting="same_kind")
            np.multiply(m.Wk, balance, out=W[k], casting="same_kind")
            np.divide(m.V, self._value_scale, out=W[v], casting="same_kind")
        return W

    @property
    def reach(self) -> float:
        """The largest norm of a token."""
        return float(row_norms(self._x).max())

    @property
    def chosen(self) -> NDArray[np.intp]:
        """The atoms that the rows of the layer are."""
        return np.arange(self.atoms) if self._chosen is None else self._chosen

    def gather(self, x: Array) -> Array:
        """Rows of all atoms to rows of the layer."""
        return x if self._chosen is None else x[self._chosen]

    def scatter(self, y: Array) -> Array:
        """The inverse: zero rows at atoms of zero weight."""
        if self._chosen is None:
            return y
        out = np.zeros((self.atoms, y.shape[1]), y.dtype)
        out[self._chosen] = y
        return out


class Mixing:
    """What stands between the heads and their adjoints in ``J^T J``: ``g = o W_o^T W_o``.

    When no two heads share an output direction (one head; concatenation) the product falls apart into one a
    head, and the layer is not ``coupled``.
    """

    def __init__(self, layer: SoftmaxLayer, factor: Factor | None) -> None:
        self._layer, self._factor = layer, factor
        self._M: Array | None = None
        self._blocks: list[Array | None] = [None] * len(layer.heads)
        if factor is None:
            return
        outputs = factor.W
        if layer.coupled:
            E, total = outputs.shape
            # the square of W_o saves up to half of each product but costs E / n products to form
            if total < 2 * E and 8 * layer.n > E:
                self._M = outputs.T @ outputs
            return
        for i, h in enumerate(layer.heads):
            block = outputs[:, h.values].T @ outputs[:, h.values]
            if not np.array_equal(block, np.eye(h.e)):
                self._blocks[i] = block

    def __call__(self, o: Array, group: Sequence[int]) -> Iterator[tuple[int, Array]]:
        """The cotangents of the heads of the group, from the joined outputs ``o`` of these heads."""
        heads = self._layer.heads
        if self._layer.coupled:
            assert self._factor is not None
            g = self._factor.back(self._factor.forward(o)) if self._M is None else o @ self._M
            for h in group:
                yield h, g[:, heads[h].values]
            return
        for h in group:
            block, values = self._blocks[h], o[:, heads[h].values]
            yield h, values if block is None else values @ block


def _size(M: Array) -> float:
    """The largest entry: the magnitude of a matrix."""
    return max(float(M.max()), -float(M.min()))


def _power_of_two(x: float) -> float:
    return float(2.0 ** np.round(np.log2(x))) if x > 0 else 1.0
