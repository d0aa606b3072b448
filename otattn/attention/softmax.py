"""Softmax (dot-product) self-attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import FAR, Array, cloud_centre
from otattn.attention.head import FLOATS, Arithmetic, Head
from otattn.attention.jacobian import finite
from otattn.attention.kernels import Projections
from otattn.attention.single_head import SingleHead, square
from otattn.measures import GaussianMeasure

__all__ = ["SoftmaxAttention"]

BATCH_TOKENS = 128
BATCH_ENTRIES = 1 << 18
"""Problems of at most this many tokens are stacked, so many at once that their logits take 2 MB."""


@dataclass(frozen=True, eq=False, init=False)
class SoftmaxAttention(SingleHead):
    r"""Softmax self-attention with logits ``<A x + c, y>``.

    .. math:: \Gamma_\mu(x) = b_V + V \frac{\int e^{\langle A x + c, y\rangle}\, y \, d\mu(y)}
                                          {\int e^{\langle A x + c, y\rangle} \, d\mu(y)}

    Parameters
    ----------
    A : array_like (d, d)
        Bilinear form of the logits, ``K^T Q * scale`` for learned factors.
    V : array_like (e, d)
        Value matrix; its rank and the number of its rows are free.
    bias : array_like (d,), optional
        The vector ``c``, zero by default.
    value_bias : array_like (e,), optional
        The vector ``b_V``, zero by default.

    Raises
    ------
    ValueError
        Shapes that do not fit, or entries that are not finite.

    Examples
    --------
    >>> attention = SoftmaxAttention([[1.0]], [[1.0]])
    >>> attention([[0.0], [1.0]], [[0.0], [1.0]]).ravel()
    array([0.5       , 0.73105858])

    References
    ----------
    Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024, section 2.
    """

    A: Array
    V: Array
    bias: Array | None
    value_bias: Array | None
    factors: tuple[Array, Array, Array | None] | None
    """``(scale * Q, K, scale * b_Q)`` when built by :meth:`from_qkv`; products then run in head space."""

    def __init__(
        self,
        A: ArrayLike,
        V: ArrayLike,
        *,
        bias: ArrayLike | None = None,
        value_bias: ArrayLike | None = None,
    ) -> None:
        form = square(A)
        d = len(form)
        values = check.matrix(V, "V", shape=(None, d))
        self._fill(
            form,
            values,
            None if bias is None else check.vector(bias, "bias", size=d),
            None if value_bias is None else check.vector(value_bias, "value_bias", size=len(values)),
            None,
        )

    def _fill(
        self,
        A: Array,
        V: Array,
        bias: Array | None,
        value_bias: Array | None,
        factors: tuple[Array, Array, Array | None] | None,
    ) -> None:
        object.__setattr__(self, "A", check.frozen(A))
        object.__setattr__(self, "V", check.frozen(V))
        object.__setattr__(self, "bias", None if bias is None else check.frozen(bias))
        object.__setattr__(self, "value_bias", None if value_bias is None else check.frozen(value_bias))
        object.__setattr__(self, "factors", factors)

    @classmethod
    def from_qkv(
        cls,
        Q: ArrayLike,
        K: ArrayLike,
        V: ArrayLike,
        *,
        scale: float | None = None,
        query_bias: ArrayLike | None = None,
        key_bias: ArrayLike | None = None,
        value_bias: ArrayLike | None = None,
    ) -> SoftmaxAttention:
        """Attention of learned factors: ``A = scale K^T Q``, ``c = scale K^T query_bias``.

        Parameters
        ----------
        Q, K : array_like (k, d)
        V : array_like (e, d)
        scale : float, optional
            ``1 / sqrt(k)`` by default.
        query_bias, key_bias : array_like (k,), optional
            The key bias adds a term constant in y to the logits of a row, which the softmax cancels.
        value_bias : array_like (e,), optional
        """
        q = check.matrix(Q, "Q")
        k, d = q.shape
        keys = check.matrix(K, "K", shape=(k, d))
        values = check.matrix(V, "V", shape=(None, d))
        s = 1.0 / np.sqrt(k) if scale is None else check.as_float_array(scale, "scale", ndim=0).item()
        if key_bias is not None:
            check.vector(key_bias, "key_bias", size=k)
        bq = None if query_bias is None else check.frozen(s * check.vector(query_bias, "query_bias", size=k))
        q = s * q
        out = object.__new__(cls)
        out._fill(
            keys.T @ q,
            values,
            None if bq is None else keys.T @ bq,
            None if value_bias is None else check.vector(value_bias, "value_bias", size=len(values)),
            (check.frozen(q), check.frozen(keys), bq),
        )
        return out

    def _rebuilt(self) -> SoftmaxAttention:
        out = SoftmaxAttention(self.A, self.V, bias=self.bias, value_bias=self.value_bias)
        if self.factors is not None:
            q, k, bq = self.factors
            new = self.from_qkv(q, k, self.V, scale=1.0, query_bias=bq, value_bias=self.value_bias)
            size = 1e-9 * float(np.linalg.norm(q) * np.linalg.norm(k))  # entries of A may cancel
            same = new.A.shape == self.A.shape and np.allclose(new.A, self.A, rtol=1e-9, atol=size)
            object.__setattr__(out, "factors", new.factors if same else None)
        return out

    def projections(self) -> Projections:
        """The affine maps of the head, in head space when the attention was built from factors."""
        if self.factors is not None and len(self.factors[0]) < self.in_dim:
            q, k, bq = self.factors
            return Projections(q, k, self.V, bq, self.value_bias)
        return Projections(self.A, np.eye(self.in_dim), self.V, self.bias, self.value_bias)

    def _heads(self, arithmetic: Arithmetic) -> tuple[Head, ...]:
        parts = (self.A, self.V, self.bias, self.factors)
        known = self.__dict__.get("_known", ((), ()))  # a bound asks for the head at each of its n and radii
        if arithmetic is FLOATS and len(known[0]) and all(a is b for a, b in zip(known[0], parts, strict=True)):
            return tuple(known[1])
        factors = self.factors if self.factors is not None and len(self.factors[0]) < self.in_dim else None
        heads = (Head.of(self, self.A, self.V, self.bias, factors=factors, arithmetic=arithmetic),)
        if arithmetic is FLOATS:
            self.__dict__["_known"] = (parts, heads)
        return heads

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    def in_coordinates(self, E: Array, left: Array) -> SoftmaxAttention:
        V = finite(left @ self.V @ E)
        offset = None if self.value_bias is None else finite(left @ self.value_bias)
        if self.factors is not None:
            q, k, bq = self.factors
            return SoftmaxAttention.from_qkv(
                finite(q @ E), finite(k @ E), V, scale=1.0, query_bias=bq, value_bias=offset
            )
        bias = None if self.bias is None else finite(E.T @ self.bias)
        return SoftmaxAttention(finite(E.T @ self.A @ E), V, bias=bias, value_bias=offset)

    def logits(self, x: Array, head: int = 0) -> Array:
        g = x @ self.A.T
        return np.asarray((g if self.bias is None else g + self.bias) @ x.T)

    def _batch(self, X: Array) -> Array:
        B, n, d = X.shape
        if n > BATCH_TOKENS:  # large problems gain nothing from being stacked
            return super()._batch(X)
        head, out = self.projections(), np.empty((B, n, self.out_dim))
        rows = max(1, BATCH_ENTRIES // (n * max(n, d)))
        for start in range(0, B, rows):
            x = X[start : start + rows]
            centre = x.mean(axis=1, keepdims=True)
            sizes = np.abs(x).max(axis=2)
            for b in np.flatnonzero(sizes.max(axis=1) / FAR > sizes.min(axis=1)):
                centre[b] = cloud_centre(x[b], np.full(n, 1.0 / n))
            y = x - centre  # logits are wanted up to a term constant in each row
            q = x @ head.Wq.T if head.bq is None else x @ head.Wq.T + head.bq
            P = q @ np.swapaxes(y @ head.Wk.T, 1, 2)
            P -= P.max(axis=2, keepdims=True)
            np.exp(P, out=P)
            P /= P.sum(axis=2, keepdims=True)
            out[start : start + rows] = P @ (y @ head.V.T) + centre @ head.V.T
        return out if self.value_bias is None else out + self.value_bias

    def gaussian_affine(self, gaussian: GaussianMeasure) -> tuple[Array, Array]:
        r"""``Gamma(x) = V (alpha + Sigma (A x + c)) + b_V`` for ``mu = N(alpha, Sigma)``.

        Tilting a Gaussian by ``exp <g, y>`` moves its mean by ``Sigma g``.
        """
        self._check_dim(gaussian.dim)
        S = gaussian.cov
        centre = gaussian.mean if self.bias is None else gaussian.mean + S @ self.bias
        offset = self.V @ centre
        return self.V @ S @ self.A, offset if self.value_bias is None else offset + self.value_bias
