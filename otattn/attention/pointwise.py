"""Unnormalised attention: weights ``h(<A x, y>)`` for a scalar h, integrated against the measure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from otattn import _validate as check
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.jacobian import JacobianOperator
from otattn.attention.kernels import Head, Pointwise, PointwiseKernel
from otattn.measures import GaussianMeasure

__all__ = ["ExponentialAttention", "LinearAttention", "PointwiseAttention", "ReLUAttention", "SigmoidAttention"]

Array = NDArray[np.float64]


def _exp(S: Array) -> Array:
    top = float(S.max())
    if top > 709.0:
        raise OverflowError(
            f"the logits of unnormalised exponential attention must stay below 709, received {top:.4g}; "
            "scale A or the tokens down, or normalise (softmax)."
        )
    return np.asarray(np.exp(S))


def _expit_derivative(S: Array) -> Array:
    return np.asarray(expit(S) * expit(-S))  # no cancellation in 1 - expit(S)


@dataclass(frozen=True, eq=False, init=False)
class PointwiseAttention(AttentionMap):
    r"""``Gamma_mu(x) = V int h(<A x, y>) y dmu(y)``; the base of the unnormalised variants.

    Parameters
    ----------
    A : array_like (d, d)
    V : array_like (e, d)
    """

    A: Array
    V: Array
    h: ClassVar[Pointwise]

    def __init__(self, A: ArrayLike, V: ArrayLike) -> None:
        form = check.matrix(A, "A")
        if form.shape[0] != form.shape[1]:
            raise ValueError(f"A must be square, (d, d), received shape {form.shape}; multiply the factors: K.T @ Q.")
        object.__setattr__(self, "A", check.frozen(form))
        object.__setattr__(self, "V", check.frozen(check.matrix(V, "V", shape=(None, len(form)))))

    @property
    def in_dim(self) -> int:
        return int(self.V.shape[1])

    @property
    def out_dim(self) -> int:
        return int(self.V.shape[0])

    def head(self) -> Head:
        """The linear maps of the head."""
        return Head(self.A, np.eye(self.in_dim), self.V)

    def _kernel(self, mu: Measure, times: Array | None, block_size: int | None) -> PointwiseKernel:
        atom_times = getattr(mu, "times", None) if times is not None else None
        return PointwiseKernel(self.head(), self.h, mu.points, mu.weights, times=atom_times, block_size=block_size)

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._kernel(mu, times, block_size).apply(x, times)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._kernel(mu, times, block_size).field(x, times)

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        return self._kernel(mu, times, block_size).jacobian(times)


class SigmoidAttention(PointwiseAttention):
    """Attention with the logistic function, ``h(s) = 1 / (1 + exp(-s))``, integrated against the measure.

    Examples
    --------
    >>> SigmoidAttention([[1.0]], [[1.0]])([[0.0]], [[2.0]])
    array([[1.]])
    """

    h = Pointwise(lambda S: np.asarray(expit(S)), _expit_derivative)


class ReLUAttention(PointwiseAttention):
    """Attention with ``h(s) = max(s, 0)``; the derivative at 0 is taken as 0.

    Examples
    --------
    >>> ReLUAttention([[1.0]], [[1.0]])([[1.0]], [[2.0]])
    array([[4.]])
    """

    h = Pointwise(lambda S: np.maximum(S, 0.0), lambda S: (S > 0).astype(np.float64))


class LinearAttention(PointwiseAttention):
    """Attention with ``h(s) = s``: ``Gamma_mu(x) = V (int y y^T dmu) A x``.

    Examples
    --------
    >>> LinearAttention([[1.0]], [[1.0]])([[1.0]], [[2.0]])
    array([[4.]])
    """

    h = Pointwise(lambda S: S.copy(), lambda S: np.ones_like(S))

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        """``Gamma(x) = V (Sigma + alpha alpha^T) A x``."""
        second = gaussian.cov + np.outer(gaussian.mean, gaussian.mean)
        return self.V @ second @ self.A, np.zeros(self.out_dim)


class ExponentialAttention(PointwiseAttention):
    """Unnormalised exponential attention, ``h(s) = exp(s)``.

    Logits above 709 raise an OverflowError (the value is not representable).

    Examples
    --------
    >>> ExponentialAttention([[1.0]], [[1.0]])([[0.0]], [[2.0]])
    array([[2.]])
    """

    h = Pointwise(_exp, _exp)
