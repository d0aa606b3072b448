"""The softmax heads of an attention map at given tokens: the border to the attention maps, and the expansion of their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper, product_error, spectral_norm_upper
from otattn.attention import AttentionMap, MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.constants._interval_head import IntervalHead, Made, interval_head
from otattn.lipschitz.near.expansion import Taylor
from otattn.lipschitz.near.gram_hessian import Hessian, hessian_norm
from otattn.lipschitz.near.gram_jacobian import fits
from otattn.lipschitz.near.head import HeadAtTokens, head_at_tokens
from otattn.lipschitz.near.third_order import third_order

__all__ = ["Heads", "heads_at", "heads_expansion", "is_softmax", "softmax_parts"]

Array = NDArray[np.float64]


def softmax_parts(attention: Any) -> tuple[list[tuple[SoftmaxAttention, Array | None]], bool] | None:
    """The softmax heads of a map with their output matrices, and whether they are masked; None for another map."""
    causal = isinstance(attention, MaskedAttention)
    whole = attention.attention if isinstance(attention, MaskedAttention) else attention
    parts: list[tuple[Any, Array | None]] = [(whole, None)]
    if isinstance(whole, MultiHeadAttention):
        causal = causal or whole.causal
        heads = [h.attention if isinstance(h, MaskedAttention) else h for h in whole.heads]
        parts = list(zip(heads, whole.outputs or [None] * len(heads), strict=True))
    return (parts, causal) if all(isinstance(h, SoftmaxAttention) for h, _ in parts) else None


def is_softmax(attention: AttentionMap) -> bool:
    """Whether the map is made of softmax heads, masked or not."""
    return softmax_parts(attention) is not None


@dataclass(frozen=True, eq=False)
class Heads:
    """Softmax heads at tokens.

    ``values``: bounds of the norms of the values ``v_j`` (from the tokens' mean), head by head; ``offset``: what is added
    to the heads' outputs ``W (P v)``, known up to ``offset_error``, so that the map is ``sum_h W_h P_h v_h + offset``; ``intervals``: the heads with
    the values as they are.
    """

    heads: list[HeadAtTokens]
    intervals: list[IntervalHead]
    offset: Array
    offset_error: float

    def images(self) -> tuple[Array, float]:
        """The map at the tokens in float64, and a bound of its error."""
        out, lost = np.zeros((self.heads[0].n, len(self.offset))) + self.offset, 0.0
        for h, head in zip(self.heads, self.intervals, strict=True):
            sizes = np.linalg.norm(head.values, axis=1) + head.dv
            rows = h.dP @ sizes + head.dv + 4.0 * h.terms * EPS * (h.P @ sizes)
            part = h.P @ head.values
            out += part if h.W is None else part @ h.W.T
            w = 1.0 if h.W is None else float(norm_upper(h.W))
            lost += w * (float(norm_upper(rows)) + 4.0 * h.terms * EPS * float(norm_upper(part)))
        lost += 8.0 * (len(self.heads) + 1) * EPS * float(norm_upper(out))
        return out, lost + np.sqrt(len(out)) * self.offset_error

    def jacobian(self) -> tuple[Array, float]:
        """The matrix ``(n D, n d)`` and a bound of the norm of its error."""
        n, d = self.heads[0].n, self.heads[0].g.shape[1]
        D = len(self.offset)
        J, lost = np.zeros((n, D, n, d)), 0.0
        rows = np.arange(n)
        for h in self.heads:
            V, y, F = (h.V, h.y, h.field) if h.W is None else (h.W @ h.V, h.y @ h.W.T, h.W @ h.field)
            J += np.einsum("ij,ije,id->iejd", h.P, y, h.g, optimize=True) + np.einsum("ij,ed->iejd", h.P, V)
            J[rows, :, rows] += F
            G, Y, _ = h.sizes
            change = h.dP * (h.v + Y * G[:, None]) + h.weights * (h.dV + (h.dy * G)[:, None] + Y * h.dg[:, None])
            change += 8.0 * h.terms * EPS * h.weights * (h.size_V + Y * G[:, None])
            change[rows, rows] += h.dfield + 8.0 * h.terms * EPS * np.linalg.norm(h.field, axis=(1, 2))
            w = 1.0 if h.W is None else float(norm_upper(h.W))
            lost += w * float(spectral_norm_upper(change))
        return J.reshape(n * D, n * d), lost * (1.0 + 1e-9)


def heads_at(attention: Any, tokens: Array) -> Heads:
    """The heads at float tokens ``(n, d)``, in the coordinates of the tokens."""
    found = softmax_parts(attention)
    if found is None:
        raise TypeError(f"attention must be made of softmax heads, received {type(attention).__name__}.")
    parts, causal = found
    n = len(tokens)
    mask = np.tril(np.ones((n, n), dtype=bool)) if causal else None
    mean = tokens.mean(axis=0)
    y = tokens - mean
    sizes, width = np.linalg.norm(tokens, axis=1), float(np.linalg.norm(y, axis=1).max())
    heads, intervals = [], []
    offset: Any = 0.0
    lost = 0.0
    for head, W in parts:
        c, a, dc = np.zeros(head.in_dim) if head.bias is None else head.bias, 0.0, 0.0
        if head.factors is not None:  # the map is evaluated by its factors, whose products are A and c
            q, k, b = head.factors
            a, dc = product_error(k.T, q), 0.0 if b is None else product_error(k.T, b[:, None])
        small = 8.0 * (sum(head.V.shape) + 8) * EPS
        made = Made(sizes * (1.0 + small), width * (1.0 + small) + 4.0 * EPS * float(sizes.max()), small, a, 0.0, dc)
        interval = interval_head(tokens, y, head.A, head.V, c, 0.0, mask, made)
        heads.append(head_at_tokens(interval, W))
        intervals.append(interval)
        value = head.V @ mean
        value = value if head.value_bias is None else value + head.value_bias
        offset = offset + (value if W is None else W @ value)
        size = float(norm_upper(head.V)) * float(np.linalg.norm(mean)) + float(np.linalg.norm(value))
        lost += 8.0 * (tokens.shape[1] + len(value) + 8) * EPS * size * (1.0 if W is None else float(norm_upper(W)))
    bias = _output_bias(attention)
    lost += 8.0 * len(parts) * EPS * float(np.linalg.norm(offset))
    return Heads(heads, intervals, np.asarray(offset if bias is None else offset + bias), lost)


def _output_bias(attention: Any) -> Array | None:
    whole = attention.attention if isinstance(attention, MaskedAttention) else attention
    return whole.output_bias if isinstance(whole, MultiHeadAttention) else None


def heads_expansion(heads: list[HeadAtTokens]) -> tuple[Taylor, dict[str, float]]:
    """The expansion of the sum of the heads, and what its C is made of."""
    hessian, shares = _second(heads)
    thirds: list[Callable[[float], float]] = [third_order(h) for h in heads]
    norms = [1.0 if h.W is None else float(spectral_norm_upper(h.W)) for h in heads]

    def third(r: float) -> float:
        return sum(w * D3(r) for w, D3 in zip(norms, thirds, strict=True)) * (1.0 + 1e-14)

    return Taylor(hessian, third), shares


def _second(heads: list[HeadAtTokens]) -> tuple[float, dict[str, float]]:
    """C jointly where the Gram matrix is formed, and by Cauchy-Schwarz over the heads otherwise.

    ``|sum_h W_h z_h| <= || [W_1 / w_1, ..] || (sum_h w_h^2 |z_h|^2)^{1/2}`` with ``w_h = ||W_h||``.
    """
    if fits(heads):
        found = hessian_norm(heads)
        return found.norm, _shares(found)
    norms = [1.0 if h.W is None else float(spectral_norm_upper(h.W)) for h in heads]
    scaled = [np.eye(len(h.V)) if h.W is None else h.W / max(w, 1e-300) for h, w in zip(heads, norms, strict=True)]
    joint = float(spectral_norm_upper(np.concatenate(scaled, axis=1)))
    total = 0.0
    for h, w in zip(heads, norms, strict=True):
        alone = [replace(h, W=None)]
        total += (w * hessian_norm(alone).norm) ** 2 if fits(alone) else float("inf")
    return joint * float(np.sqrt(total)) * (1.0 + 1e-14), {}


def _shares(found: Hessian) -> dict[str, float]:
    return {"others": found.others, "own": 2.0 * found.own, "both": found.both}
