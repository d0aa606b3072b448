"""One attention head: the base of the variants with one kernel."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.attention.base import AttentionMap, Mass, Measure, Values
from otattn.attention.jacobian import JacobianOperator
from otattn.attention.kernels import NormalisedKernel, Projections
from otattn.attention.normalised_jacobian import NormalisedJacobian

__all__ = ["SingleHead", "square"]

Array = NDArray[np.float64]


class SingleHead(AttentionMap):
    """``Gamma_mu(x) = int k(x, y) (V y + value_bias) dmu(y)`` with a kernel that the variant gives."""

    V: Array
    maskable = True
    mass: ClassVar[Mass] = "one"

    @property
    def in_dim(self) -> int:
        return int(self.V.shape[1])

    @property
    def out_dim(self) -> int:
        return int(self.V.shape[0])

    def values(self) -> tuple[Values, ...]:
        return (Values(self.V, getattr(self, "value_bias", None), self.mass),)

    @abstractmethod
    def projections(self) -> Projections:
        """The affine maps of the head."""

    def _kernel(self, mu: Measure, times: Array | None, block_size: int | None) -> Any:
        """The weights of the atoms: normalised exponentials of the logits unless the variant says otherwise."""
        seen = getattr(mu, "times", None) if times is not None else None
        return NormalisedKernel(self.projections(), mu.points, mu.weights, times=seen, block_size=block_size)

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._kernel(mu, times, block_size).apply(x, times)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._kernel(mu, times, block_size).field(x, times)

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        return NormalisedJacobian(self._kernel(mu, times, block_size), times).operator()


def square(A: ArrayLike) -> Array:
    """The bilinear form of a head, ``(d, d)``."""
    form = check.matrix(A, "A")
    if form.shape[0] != form.shape[1]:
        raise ValueError(
            f"A must be square, (d, d), received shape {form.shape}; multiply the factors, K.T @ Q, or use from_qkv."
        )
    return form
