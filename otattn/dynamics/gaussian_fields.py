r"""Velocities of Gaussian measures, vectorised over a stack of them.

A velocity ``Gamma(x) = b + G x`` keeps Gaussians Gaussian: ``alpha' = b + G alpha`` and ``Sigma' = G Sigma + Sigma
G^T``. With a factor ``Sigma = L L^T`` the second is ``L' = G L``: Sigma stays positive semi-definite and keeps its
rank without any projection. Factors are written ``L = e^s M``, so that neither growth nor decay leaves float64.

Each field maps ``(M (B, d, d), s (B,), alpha (B, d))`` to ``(G M, alpha')``; parameters are single matrices or
stacks of B. Formulas that would multiply a huge number by a rounded zero are avoided:

- softmax: ``G M = e^{2s} V M (M^T A M)``, ``alpha' = V (alpha + Sigma (A alpha + c)) + b_V``;
- L2: ``G M = 2 V R Q M``, ``alpha' = V (alpha + 2 R (Q - K) alpha)`` with ``R = L (I + 2 C^T C)^{-1} C^T``, ``C = K
  L`` (``= Sigma K^T (I + 2 K Sigma K^T)^{-1}``), from the singular values of ``C``;
- Sinkhorn: ``G M = V M U diag(2 b / (1 + sqrt(1 + 4 b^2))) W^T`` with ``L^T A L = U diag(b) W^T``, ``alpha' = V
  alpha``;
- linear: ``G M = V (Sigma + alpha alpha^T) A M``, ``alpha' = V (Sigma + alpha alpha^T) A alpha``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.attention import (
    AttentionMap,
    L2Attention,
    LinearAttention,
    MultiHeadAttention,
    Residual,
    SinkhornAttention,
    SoftmaxAttention,
)
from otattn.measures import GaussianMeasure

__all__ = ["GaussianField", "L2Field", "SoftmaxField", "SumField", "field_of", "gaussian_field"]

Index = NDArray[np.intp]
Rates = tuple[Array, Array]

FADE = 1e-10
"""Relative size of singular values of ``K L`` (L2) and ``L^T A L`` (Sinkhorn) below which directions no longer act."""


class GaussianField(ABC):
    """The velocity of a stack of Gaussians."""

    @property
    def autonomous_covariance(self) -> bool:
        """True when the covariance does not feel the mean."""
        return True

    @abstractmethod
    def rates(self, M: Array, s: Array, alpha: Array, t: Array) -> Rates:
        """``G M`` and ``alpha'``."""

    def take(self, index: Index) -> GaussianField:
        """The field of some members of the stack."""
        stacked = {k: part[index] for k, part in vars(self).items() if isinstance(part, np.ndarray) and part.ndim == 3}
        return replace(self, **stacked) if stacked else self  # type: ignore[type-var]

    def products(self, centred: bool) -> list[tuple[Array, Array]] | None:
        """Pairs ``(V, A)`` with ``G = sum V Sigma A`` (for a mean that is zero, if ``centred``), None where there are none."""
        return None


def _apply(P: Array, x: Array) -> Array:
    """Matrices (one, or a stack) times a stack of vectors."""
    return np.asarray(np.squeeze(P @ x[..., None], -1))


def _transpose(P: Array) -> Array:
    return np.swapaxes(P, -1, -2)


@dataclass(frozen=True, eq=False)
class SoftmaxField(GaussianField):
    """Softmax attention with logits ``<A x + c, y>``."""

    A: Array
    V: Array
    bias: Array | None = None
    value_bias: Array | None = None

    def products(self, centred: bool) -> list[tuple[Array, Array]] | None:
        return [(self.V, self.A)]

    def rates(self, M: Array, s: Array, alpha: Array, t: Array) -> Rates:
        Mt = _transpose(M)
        scale = np.exp(2.0 * s)
        moved = scale[:, None, None] * (self.V @ (M @ (Mt @ (self.A @ M))))
        g = _apply(self.A, alpha)
        if self.bias is not None:
            g = g + self.bias
        mean = _apply(self.V, alpha + scale[:, None] * _apply(M, _apply(Mt, g)))
        return moved, mean if self.value_bias is None else mean + self.value_bias


@dataclass(frozen=True, eq=False)
class LinearField(GaussianField):
    """Linear attention, ``h(s) = s``."""

    A: Array
    V: Array

    @property
    def autonomous_covariance(self) -> bool:
        return False

    def products(self, centred: bool) -> list[tuple[Array, Array]] | None:
        return [(self.V, self.A)] if centred else None

    def rates(self, M: Array, s: Array, alpha: Array, t: Array) -> Rates:
        scale = np.exp(2.0 * s)[:, None]
        AM, Aa = self.A @ M, _apply(self.A, alpha)
        # second moments times A M and A alpha
        inner = scale[..., None] * (M @ (_transpose(M) @ AM)) + alpha[:, :, None] * (alpha[:, None, :] @ AM)
        mean = scale * _apply(M, _apply(_transpose(M), Aa)) + alpha * (alpha * Aa).sum(axis=1, keepdims=True)
        return self.V @ inner, _apply(self.V, mean)


@dataclass(frozen=True, eq=False)
class L2Field(GaussianField):
    """L2 attention with factors Q, K of shape (k, d)."""

    Q: Array
    K: Array
    V: Array

    def rates(self, M: Array, s: Array, alpha: Array, t: Array) -> Rates:
        U, c, Wt = np.linalg.svd(self.K @ M, full_matrices=False)
        # R = M W diag(q c / (p + 2 q c^2)) U^T with q / p = e^{2s}. Singular values near rounding would be noise that is
        # amplified to order one: they are faded out, smoothly, so that the solver does not stumble over them
        q, p = np.exp(2.0 * np.minimum(s, 0.0))[:, None], np.exp(-2.0 * np.maximum(s, 0.0))[:, None]
        bottom = p + 2.0 * q * (c * c + (FADE * c[:, :1]) ** 2)
        weight = q * c / np.where(bottom > 0, bottom, 1.0)
        R = (M @ _transpose(Wt) * weight[:, None, :]) @ _transpose(U)
        moved = 2.0 * (self.V @ (R @ (self.Q @ M)))
        mean = _apply(self.V, alpha + 2.0 * _apply(R, _apply(self.Q - self.K, alpha)))
        return moved, mean


@dataclass(frozen=True, eq=False)
class SinkhornField(GaussianField):
    """Sinkhorn attention."""

    A: Array
    V: Array

    def rates(self, M: Array, s: Array, alpha: Array, t: Array) -> Rates:
        U, b, Wt = np.linalg.svd(_transpose(M) @ (self.A @ M))
        q, p = np.exp(2.0 * np.minimum(s, 0.0))[:, None], np.exp(-2.0 * np.maximum(s, 0.0))[:, None]
        top = 2.0 * q * b
        # the polar factor of what is rounding is noise: faded out as for L2
        bottom = p + np.hypot(p, np.hypot(top, FADE * top[:, :1]))
        weight = top / np.where(bottom > 0, bottom, 1.0)
        return self.V @ ((M @ U * weight[:, None, :]) @ Wt), _apply(self.V, alpha)


@dataclass(frozen=True, eq=False)
class SumField(GaussianField):
    """Several heads with output matrices."""

    parts: Sequence[GaussianField]
    outputs: Sequence[Array] | None
    bias: Array | None

    @property
    def autonomous_covariance(self) -> bool:
        return all(p.autonomous_covariance for p in self.parts)

    def take(self, index: Index) -> GaussianField:
        return replace(self, parts=[part.take(index) for part in self.parts])

    def products(self, centred: bool) -> list[tuple[Array, Array]] | None:
        out: list[tuple[Array, Array]] = []
        for i, part in enumerate(self.parts):
            pairs = part.products(centred)
            if pairs is None:
                return None
            out += pairs if self.outputs is None else [(self.outputs[i] @ V, A) for V, A in pairs]
        return out

    def rates(self, M: Array, s: Array, alpha: Array, t: Array) -> Rates:
        moved, mean = np.zeros_like(M), np.zeros_like(alpha)
        for i, part in enumerate(self.parts):
            dM, da = part.rates(M, s, alpha, t)
            if self.outputs is not None:
                dM, da = self.outputs[i] @ dM, _apply(self.outputs[i], da)
            moved, mean = moved + dM, mean + da
        return np.asarray(moved), np.asarray(mean if self.bias is None else mean + self.bias)


@dataclass(frozen=True, eq=False)
class ScaledField(GaussianField):
    """A residual layer, which moves by ``scale`` times its map."""

    inner: GaussianField
    scale: float

    @property
    def autonomous_covariance(self) -> bool:
        return self.inner.autonomous_covariance

    def rates(self, M: Array, s: Array, alpha: Array, t: Array) -> Rates:
        dM, da = self.inner.rates(M, s, alpha, t)
        return self.scale * dM, self.scale * da


@dataclass(frozen=True, eq=False)
class AffineField(GaussianField):
    """Any map with a ``gaussian_affine``, one Gaussian after the other; also parameters that depend on time."""

    layer: Callable[[float], AttentionMap]

    @property
    def autonomous_covariance(self) -> bool:
        return False

    def rates(self, M: Array, s: Array, alpha: Array, t: Array) -> Rates:
        moved, mean = np.empty_like(M), np.empty_like(alpha)
        for k in range(len(M)):
            attention = self.layer(float(t[k]))
            fast = field_of(attention)
            if fast is not None:
                one, da = fast.rates(M[k : k + 1], s[k : k + 1], alpha[k : k + 1], t[k : k + 1])
                moved[k], mean[k] = one[0], da[0]
                continue
            L = np.exp(s[k]) * M[k]
            drift = attention.drift
            G, b = drift.map.gaussian_affine(GaussianMeasure(alpha[k], L @ L.T))
            moved[k] = drift.scale * (G @ M[k]) - drift.skip * M[k]
            mean[k] = drift.scale * (G @ alpha[k] + b) - drift.skip * alpha[k]
        return moved, mean


def gaussian_field(attention: AttentionMap | Callable[[float], AttentionMap]) -> GaussianField:
    """The field of an attention map, or of a callable ``t -> attention map``.

    Raises
    ------
    NotGaussianPreservingError
        The map does not keep Gaussians Gaussian.
    """
    if not isinstance(attention, AttentionMap):
        return AffineField(attention)
    known = field_of(attention)
    return AffineField(lambda t: attention) if known is None else known


@singledispatch
def field_of(attention: AttentionMap) -> GaussianField | None:
    """The closed field of a map, None for one that is followed through its ``gaussian_affine``.

    Register a function for a new attention map: ``field_of.register(NewAttention)``.
    """
    return None


field_of.register(SoftmaxAttention, lambda a: SoftmaxField(a.A, a.V, a.bias, a.value_bias))
field_of.register(LinearAttention, lambda a: LinearField(a.A, a.V))
field_of.register(L2Attention, lambda a: L2Field(a.Q, a.K, a.V))
field_of.register(SinkhornAttention, lambda a: SinkhornField(a.A, a.V) if a.unfinished is None else None)


@field_of.register
def _several(attention: MultiHeadAttention) -> GaussianField | None:
    parts = [_as_map(h) for h in attention.heads]
    known = [p for p in parts if p is not None]
    return SumField(known, attention.outputs, attention.output_bias) if len(known) == len(parts) else None


@field_of.register
def _residual(attention: Residual) -> GaussianField | None:
    inner = _as_map(attention.map)
    return None if inner is None else ScaledField(inner, attention.scale)


def _as_map(attention: AttentionMap) -> GaussianField | None:
    """The field of a part; the field of a residual layer is that of its increment, not of what it is as a map."""
    return field_of(attention) if attention.drift.map is attention else None
