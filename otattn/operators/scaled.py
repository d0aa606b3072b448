"""An operator in units of its size, so that its products with itself are in range wherever it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention import JacobianOperator
from otattn.operators.device import DeviceGram, has_float64
from otattn.operators.fused import FusedJacobian
from otattn.operators.network import TwoPrecisions

__all__ = ["ScaledOperator"]

FUSED_SCALES = (1e-60, 1e60)
"""Where the scale of a fused product is that far from the operator's size, its two halves are taken apart."""


class ScaledOperator:
    """J on flat vectors in units of ``scale``, a power of two that the first product sets; its products round by ``eps``.

    Parameters
    ----------
    operator : FusedJacobian, LinearOperator or matrix
        Real; anything ``scipy.sparse.linalg.aslinearoperator`` takes.
    device : torch.device, optional
        Where ``gram`` is computed for a FusedJacobian; its two halves, and what is evaluated, are not.
    """

    def __init__(self, operator: Any, device: Any = None) -> None:
        self._fused: FusedJacobian | None = None
        self._device = device
        self.scale, self._scaled = 1.0, False
        if isinstance(operator, FusedJacobian):
            operator = self._fused = operator if operator.dtype == np.float64 else operator.astype(np.float64)
        elif isinstance(operator, list | tuple):
            operator = check.matrix(operator, "operator")
        self._tokens = operator if isinstance(operator, JacobianOperator) else None
        self._linear = operator if isinstance(operator, LinearOperator) else aslinearoperator(operator)
        if self._linear.dtype is not None and np.dtype(self._linear.dtype).kind == "c":
            raise ValueError("operator must be real, received a complex one; stack its real and imaginary parts.")
        self._products: FusedJacobian | DeviceGram | None = None if device is not None else self._fused
        self.outputs, self.size = self._linear.shape
        single = self._linear.dtype is not None and np.dtype(self._linear.dtype).name in ("float16", "float32")
        self.eps = float(np.finfo(np.float32 if single else np.float64).eps)

    def single(self) -> ScaledOperator | None:
        """The same in float32, where there is such a form and its range holds the operator."""
        out = object.__new__(ScaledOperator)
        out.__dict__.update(self.__dict__)
        if isinstance(self._linear, TwoPrecisions):
            out._linear = self._linear.single
            return out
        if self._fused is None or not self._fused.layer.fits_float32:
            return None
        if self._device is None:
            out._products = out._linear = self._fused.astype(np.float32)
        else:
            out._products = DeviceGram(self._fused.layer, self._device, np.float32)
        out.scale = out._products.scale
        return out

    def start(self, rng: np.random.Generator) -> Array:
        """A random vector; zero at atoms of zero weight, which no product reaches."""
        x = rng.standard_normal(self.size)
        if self._fused is None:
            return x
        layer = self._fused.layer
        return np.asarray(layer.scatter(layer.gather(x.reshape(self._fused.n, self._fused.d)))).reshape(-1)

    def guess(self, given: ArrayLike) -> Array | None:
        """A given start as a unit vector; None where it is zero."""
        x = check.as_float_array(given, "start").reshape(-1)
        if x.size != self.size:
            raise ValueError(f"start must have {self.size} entries like the operator's input, received {x.size}.")
        norm = float(np.linalg.norm(x))
        return x / norm if norm > 0.0 else None

    def input(self, x: Array) -> Array:
        """``x``, read-only, one row a token where the operator acts on tokens."""
        return check.frozen(x if self._tokens is None else x.reshape(self._tokens.n, self._tokens.d))

    def output(self, y: Array) -> Array:
        """``y``, read-only, one row a token where the operator acts on tokens."""
        return check.frozen(y if self._tokens is None else y.reshape(self._tokens.n, self._tokens.e))

    def gram(self, x: NDArray[Any]) -> NDArray[Any]:
        """``J^T J x / scale^2``."""
        if self._fused is not None:
            factor = self._fused.scale / self.scale
            if FUSED_SCALES[0] < factor < FUSED_SCALES[1]:
                products = self._ready()
                product = products.scaled_gram(x).reshape(-1)
                return product if factor == 1.0 else product * products.dtype.type(factor**2)
        return self._backward(self._forward(x))

    def _ready(self) -> FusedJacobian | DeviceGram:
        """What takes the products: on the device where it has float64."""
        if self._products is None:
            assert self._fused is not None
            wide = has_float64(self._device)
            self._products = DeviceGram(self._fused.layer, self._device, np.float64) if wide else self._fused
        return self._products

    def evaluate(self, x: Array) -> tuple[float, Array, Array]:
        """``|J x|^2``, ``J x`` and ``J^T J x`` for a unit vector, in units of the scale."""
        y = self._forward(x)
        return float(y @ y), y, self._backward(y)

    def _forward(self, x: Array) -> Array:
        y = _finite(self._linear.matvec(x))
        if not self._scaled and (size := float(np.abs(y).max(initial=0.0))) > 0.0:
            self.scale, self._scaled = float(2.0 ** np.round(np.log2(size))), True
        return y / self.scale

    def _backward(self, y: Array) -> Array:
        return _finite(self._linear.rmatvec(y)) / self.scale


def _finite(y: Any) -> Array:
    out = np.asarray(y, dtype=np.float64).reshape(-1)
    if not np.isfinite(out).all():
        raise ValueError("operator must give finite products, received NaN or infinite entries; scale its data.")
    return out
