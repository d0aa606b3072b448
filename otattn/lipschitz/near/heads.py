"""The softmax heads of an attention map at given tokens: the border to the attention maps, and the expansion of their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import norm_upper, product_error, spectral_norm_upper
from otattn.attention import MaskedAttention, MultiHeadAttention, SoftmaxAttention
from otattn.attention.head import Head, heads_of
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.constants.moved_rows import Made, MovedRows, moved_rows
from otattn.lipschitz.near.capped import capped_head, capped_hessian
from otattn.lipschitz.near.expansion import Taylor
from otattn.lipschitz.near.gram_hessian import Hessian, hessian_norm
from otattn.lipschitz.near.gram_jacobian import LARGEST_PRODUCTS, fits
from otattn.lipschitz.near.head import Curve, HeadAtTokens, head_at_tokens
from otattn.lipschitz.near.scores import Places, places_of, score_head, score_heads
from otattn.lipschitz.near.third_order import third_order

__all__ = ["Heads", "form_error", "heads_at", "heads_expansion", "softmax_heads", "turned"]

Array = NDArray[np.float64]


def softmax_heads(attention: Any) -> tuple[Head, ...]:
    """The softmax heads whose sum a map is, masked or not; none for another map."""
    heads = heads_of(attention)
    return heads if all(isinstance(h.map, SoftmaxAttention) and not h.output_error for h in heads) else ()


@dataclass(frozen=True, eq=False)
class Heads:
    """Softmax heads at tokens.

    ``intervals`` are the heads with their values as they are; ``offset``, known up to
    ``offset_error``, is what is added to their outputs: the map is ``sum_h W_h P_h v_h + offset``.
    """

    heads: list[HeadAtTokens]
    intervals: list[MovedRows]
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
        J = np.zeros((n, len(self.offset), n, d))
        rows = np.arange(n)
        for h in (h.levered for h in self.heads):
            V, y, F = (h.V, h.y, h.field) if h.W is None else (h.W @ h.V, h.y @ h.W.T, h.W @ h.field)
            J += np.einsum("ij,ije,id->iejd", h.P, y, h.g, optimize=True) + np.einsum("ij,ed->iejd", h.P, V)
            J[rows, :, rows] += F
        return J.reshape(n * len(self.offset), n * d), self.jacobian_error()

    def jacobian_error(self) -> float:
        """A bound of the norm of what the errors of the floats and of the products add to the Jacobian."""
        lost, rows = 0.0, np.arange(self.heads[0].n)
        for h in (h.levered for h in self.heads):
            G, Y, _ = h.sizes
            change = h.dP * (h.v + Y * G[:, None]) + h.weights * (h.dV + (h.dy * G)[:, None] + Y * h.dg[:, None])
            change += 8.0 * h.terms * EPS * h.weights * (h.size_V + Y * G[:, None])
            change[rows, rows] += h.dfield + 8.0 * h.terms * EPS * np.linalg.norm(h.field, axis=(1, 2))
            lost += (1.0 if h.W is None else float(norm_upper(h.W))) * float(spectral_norm_upper(change))
        return lost * (1.0 + 8.0 * len(self.heads) * EPS)


def placed_heads(attention: Any, n: int) -> list[tuple[Head, Places]]:
    """The heads whose sum a map is with what the places of n tokens do to them."""
    scores = score_heads(attention)
    if scores:
        outputs = getattr(attention, "outputs", None) or (None,) * len(scores)
        return [(score_head(h, W), places_of(h, n)) for h, W in zip(scores, outputs, strict=True)]
    parts = softmax_heads(attention)
    if not parts:
        raise TypeError(f"attention must be made of softmax heads, received {type(attention).__name__}.")
    return [(head, Places(np.tril(np.ones((n, n), dtype=bool)) if head.causal else None)) for head in parts]


def heads_at(attention: Any, tokens: Array) -> Heads:
    """The heads at float tokens ``(n, d)``."""
    parts = placed_heads(attention, len(tokens))
    mean = tokens.mean(axis=0)
    centred = tokens - mean
    sizes = np.linalg.norm(tokens, axis=1)
    heads, intervals = [], []
    offset: Any = 0.0
    lost = 0.0
    for head, places in parts:
        W = head.output
        y = np.vstack([centred, -mean]) if places.sink else centred
        width = float(np.linalg.norm(y, axis=1).max())
        small = 2.0 * (tokens.shape[1] + 8) * EPS  # products with tokens, twice over
        form = form_error(head)
        made = Made(
            sizes * (1.0 + small),
            width * (1.0 + small) + 4.0 * EPS * float(sizes.max()),
            small,
            form,
            0.0,
            head.shift,
            places.size,
        )
        interval = moved_rows(tokens, y, head.A, head.V, head.c, 0.0, places.seen, made, places.added)
        cap = getattr(head.map, "cap", None)
        if cap is None:
            made_head = head_at_tokens(interval, W, head.A, form)
        else:
            made_head, interval = capped_head(interval, tokens, places, cap, made, head.A, W, form)
        heads.append(made_head)
        intervals.append(interval)
        value = head.V @ mean
        value = value if head.map.value_bias is None else value + head.map.value_bias
        offset = offset + (value if W is None else W @ value)
        size = float(norm_upper(head.V)) * float(np.linalg.norm(mean)) + float(np.linalg.norm(value))
        lost += 8.0 * (tokens.shape[1] + len(value) + 8) * EPS * size * (1.0 if W is None else float(norm_upper(W)))
    bias, more = _output_bias(attention)
    lost += 8.0 * len(parts) * EPS * float(np.linalg.norm(offset)) + more
    return Heads(heads, intervals, np.asarray(offset + bias), lost + 2.0 * EPS * float(np.linalg.norm(offset + bias)))


def form_error(head: Head) -> float:
    """How far the form that the map runs on is from A (Frobenius norm).

    That is the product of its factors, or, where this is nothing but rounding, A is a matrix near it.
    """
    if head.factors is None:
        return head.lost * float(np.sqrt(head.d)) * (1.0 + 4.0 * EPS)
    return product_error(head.factors[1].T, head.factors[0])


def _output_bias(attention: Any) -> tuple[Any, float]:
    """What sums of heads, one in the other, add to the tokens, and a bound of its error."""
    if isinstance(attention, MaskedAttention):
        return _output_bias(attention.attention)
    if not isinstance(attention, MultiHeadAttention):
        return 0.0, 0.0
    total: Any = 0.0 if attention.output_bias is None else attention.output_bias
    lost = 0.0
    for h, W in zip(attention.heads, attention.outputs or [None] * len(attention.heads), strict=True):
        bias, error = _output_bias(h)
        if W is not None and np.ndim(bias):
            error = error * float(norm_upper(W)) + product_error(W, bias[:, None])
            bias = W @ bias
        total = total + bias
        lost += error + 2.0 * EPS * float(np.linalg.norm(total))
    return total, lost


def turned(heads: list[HeadAtTokens], left: Array | None, right: Array | None) -> list[HeadAtTokens]:
    """The heads of ``left f(right z)``: inputs ``z``, outputs on the left."""
    out = []
    for h in heads:
        new = h if right is None else _on_the_right(h, right)
        out.append(new if left is None else replace(new, W=left if h.W is None else left @ h.W))
    return out


def _on_the_right(h: HeadAtTokens, R: Array) -> HeadAtTokens:
    assert h.A is not None
    norm = float(spectral_norm_upper(R))
    small = (
        4.0 * (len(R) + 8) * EPS * float(norm_upper(R))
    )  # rounding of a product with R, relative to the other factor
    G, _, K = h.sizes
    A, V = R.T @ h.A @ R, h.V @ R
    dA, dV = norm**2 * h.dA + 4.0 * small * norm * float(norm_upper(h.A)), norm * h.dV + small * h.size_V
    return replace(
        h,
        k=h.k @ R,
        g=h.g @ R,
        V=V,
        field=h.field @ R,
        dk=norm * h.dk + small * K.max(axis=1),
        dg=norm * h.dg + small * G,
        dfield=norm * h.dfield + small * np.linalg.norm(h.field, axis=(1, 2)),
        dV=dV,
        curve=None if h.curve is None else _curve_on_the_right(h.curve, R, norm, small),
        A=A,
        dA=dA,
        a=float(spectral_norm_upper(A)) + dA,
        v=float(spectral_norm_upper(V)) + dV,
    )


def _curve_on_the_right(curve: Curve, R: Array, norm: float, small: float) -> Curve:
    size = float(np.linalg.norm(curve.raw, axis=1).max())
    return curve._replace(raw=curve.raw @ R, draw=norm * curve.draw + small * size)


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

    Beyond ``LARGEST_GRAM`` rows with a stated probability, as are the norms of such maps.

    ``|sum_h W_h z_h| <= || [W_1 / w_1, ..] || (sum_h w_h^2 |z_h|^2)^{1/2}`` with ``w_h = ||W_h||``.
    """
    bound = hessian_norm if heads[0].curve is None else capped_hessian
    if fits(heads, LARGEST_PRODUCTS):
        found = bound(heads)
        return found.norm, _shares(found)
    norms = [1.0 if h.W is None else float(spectral_norm_upper(h.W)) for h in heads]
    scaled = [np.eye(len(h.V)) if h.W is None else h.W / max(w, 1e-300) for h, w in zip(heads, norms, strict=True)]
    joint = float(spectral_norm_upper(np.concatenate(scaled, axis=1)))
    total = 0.0
    for h, w in zip(heads, norms, strict=True):
        alone = [replace(h, W=None)]
        total += (w * bound(alone).norm) ** 2 if fits(alone) else float("inf")
    return joint * float(np.sqrt(total)) * (1.0 + 1e-14), {}


def _shares(found: Hessian) -> dict[str, float]:
    return {"others": found.others, "own": found.own}
