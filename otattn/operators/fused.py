r"""The Jacobian of softmax attention with a fused product :math:`J^T J`.

In head space, with E the tile of :mod:`otattn.operators.streaming`, ``P = E / Z``, ``O = P V`` and
``T = E o ([dQ | Q] [K | dK]^T)``, the directional derivative of a head and its adjoint are

.. math:: do = (T V + E\,dV) / Z - r \circ O, \quad r = T 1 / Z, \qquad
          dS = E \circ \bigl((g V^T - \langle g, O\rangle 1^T) / Z\bigr), \quad
          \bar Q = dS\,K, \; \bar K = dS^T Q, \; \bar V = P^T g .

The product ``J^T J`` does the first and then the second for a block of rows while its tile is in the cache:
each entry of P is read (or recomputed) once. All projections of all heads are one matrix product.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.linalg import LinearOperator

from otattn.attention import AttentionMap, JacobianOperator
from otattn.measures import MeasureLike
from otattn.operators.layer import SoftmaxLayer
from otattn.operators.products import HeadProducts
from otattn.operators.stacked import StackedProducts, can_be_stacked

__all__ = ["FusedJacobian"]

Array = NDArray[Any]


class FusedJacobian(JacobianOperator):
    r"""The Jacobian of softmax attention at a measure, with products in one pass over the attention matrix.

    It is ``W^{1/2} J W^{-1/2}`` with ``J = D_X f`` and W the diagonal of the weights, token by token: the
    operator in :math:`L^2(\mu)`, whose norm is the particle part of the local Lipschitz constant in W_2. For
    uniform weights it is J itself. Atoms of zero weight do not enter: their rows and columns are zero.

    Parameters
    ----------
    attention : SoftmaxAttention, or MultiHeadAttention of them, or either of the two in MaskedAttention
    mu : measure or array_like (n, d)
        A :class:`SpaceTimeMeasure` or a sequence when the attention is masked.
    dtype : float64 or float32
        Of the work and of the results. float32 becomes float64 when logits or weights leave its range.
    reweight : bool
        False gives ``D_X f`` (at the atoms of positive weight) whatever the weights.
    memory : int, optional
        Bytes that the attention matrices of all heads may take; beyond it their tiles are recomputed in each
        product. ``otattn.attention.memory.MEMORY_BUDGET`` by default.
    workers : int, optional
        Threads over blocks of rows; by default as many as the BLAS has, for large n.

    Raises
    ------
    TypeError
        The attention is of another kind (:func:`otattn.operators.measure_jacobian` takes any).

    Notes
    -----
    ``J^T J`` costs ``16 k n^2`` operations a head and ``4 (2k + e) n d`` for its projections; an eighth more
    when tiles are recomputed. Memory without the attention matrices is linear in n. Products of one object
    from several threads wait for each other.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> J = FusedJacobian(SoftmaxAttention([[0.0]], [[2.0]]), [[1.0], [3.0]])
    >>> J.jvp([[1.0], [0.0]]).ravel(), J.gram([[1.0], [1.0]]).ravel()
    (array([1., 1.]), array([4., 4.]))
    """

    def __init__(
        self,
        attention: AttentionMap,
        mu: MeasureLike,
        *,
        dtype: Any = np.float64,
        reweight: bool = True,
        memory: int | None = None,
        workers: int | None = None,
    ) -> None:
        self._fill(SoftmaxLayer(attention, mu, reweight=reweight), dtype, memory, workers)

    def _fill(self, layer: SoftmaxLayer, dtype: Any, memory: int | None, workers: int | None) -> None:
        kind = np.dtype(dtype)
        if kind not in (np.dtype(np.float32), np.dtype(np.float64)):
            raise ValueError(f"dtype must be float32 or float64, received {kind}.")
        if kind == np.float32 and not layer.fits_float32:
            kind = np.dtype(np.float64)
        self.layer = layer
        self.n, self.d, self.e = layer.atoms, layer.d, layer.e
        LinearOperator.__init__(self, dtype=kind, shape=(self.n * self.e, self.n * self.d))
        self._memory, self._workers, self._dense = memory, workers, None
        self._lock = threading.Lock()
        self._products: HeadProducts | StackedProducts | None = None

    def astype(self, dtype: Any) -> FusedJacobian:
        """The same operator with another work dtype."""
        out = object.__new__(FusedJacobian)
        out._fill(self.layer, dtype, self._memory, self._workers)
        return out

    def prepare(self) -> FusedJacobian:
        """Compute the attention matrix, or its normalisers, now; the first product does it otherwise."""
        with self._lock:
            self._ready()
        return self

    @property
    def stored(self) -> bool:
        """True when the attention matrix is kept, False when each product recomputes it."""
        with self._lock:
            return self._ready().stored

    @property
    def scale(self) -> float:
        """A power of two of the size of the value matrices; ``scaled_gram`` is ``J^T J / scale^2``."""
        return self.layer.scale

    def jvp(self, direction: ArrayLike) -> Array:
        """``J`` applied to token displacements ``(n, d)``; returns ``(n, e)``."""
        return self._run("jvp", direction) * self.dtype.type(self.layer.scale)

    def vjp(self, cotangent: ArrayLike) -> Array:
        """The adjoint applied to ``(n, e)``; returns ``(n, d)``."""
        return self._run("vjp", cotangent) * self.dtype.type(self.layer.scale)

    def gram(self, direction: ArrayLike) -> Array:
        """``J^T J`` applied to ``(n, d)``, each block of P read once."""
        return self._run("gram", direction) * self.dtype.type(self.layer.scale) ** 2

    def scaled_gram(self, direction: ArrayLike) -> Array:
        """``J^T J / scale^2`` on ``(n, d)``: in range wherever the singular values are."""
        return self._run("gram", direction)

    def _run(self, kind: str, given: ArrayLike) -> Array:
        layer, columns = self.layer, self.e if kind == "vjp" else self.d
        x = np.asarray(given, dtype=self.dtype)
        if x.size != self.n * columns:
            name = "cotangent" if kind == "vjp" else "direction"
            raise ValueError(f"{name} must have shape ({self.n}, {columns}) or be flat, received {x.shape}.")
        with self._lock:
            y = getattr(self._ready(), kind)(layer.gather(x.reshape(self.n, columns)))
            return layer.scatter(y)

    def _ready(self) -> HeadProducts | StackedProducts:
        if self._products is None:
            if self._memory is None and self._workers is None and can_be_stacked(self.layer, self.dtype):
                self._products = StackedProducts(self.layer, self.dtype)
            else:
                self._products = HeadProducts(self.layer, self.dtype, self._memory, self._workers)
        return self._products
