"""Maps that move each token on its own, and the norms among them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.jacobian import JacobianOperator

__all__ = ["LayerNorm", "Linearised", "RMSNorm", "TokenwiseMap"]

Product = Callable[[Array], Array]


class TokenwiseMap(AttentionMap):
    """A map ``x -> phi(x)`` that does not depend on the measure."""

    @property
    def _kernels(self) -> int:
        return 0

    @abstractmethod
    def _map(self, x: Array) -> Array: ...

    @abstractmethod
    def _jvp(self, x: Array, v: Array) -> Array: ...

    @abstractmethod
    def _vjp(self, x: Array, g: Array) -> Array: ...

    @property
    def _width(self) -> int:
        """Numbers a token that :meth:`linearised` keeps."""
        return 0

    def linearised(self, x: Array, dtype: Any = np.float64) -> tuple[Product, Product]:
        """The derivative at the tokens ``x (n, d)`` and its adjoint, what they share computed once, in ``dtype``."""

        def jvp(v: Array) -> Array:
            return np.asarray(self._jvp(x, np.asarray(v, dtype=np.float64)), dtype=dtype)

        def vjp(g: Array) -> Array:
            return np.asarray(self._vjp(x, np.asarray(g, dtype=np.float64)), dtype=dtype)

        return jvp, vjp

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        return self._map(x)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        d = x.shape[1]
        columns = [self._jvp(x, np.broadcast_to(row, x.shape)) for row in np.eye(d)]
        return np.stack(columns, axis=2)

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        x = mu.points
        if block_size is None:
            jvp, vjp = self.linearised(x)
        else:  # nothing is kept

            def jvp(v: Array) -> Array:
                return self._jvp(x, v)

            def vjp(g: Array) -> Array:
                return self._vjp(x, g)

        def dense() -> Array:
            D = self._field(x, mu, None, None)
            out = np.zeros((mu.n, D.shape[1], mu.n, mu.dim))
            out[np.arange(mu.n), :, np.arange(mu.n)] = D
            return out

        return JacobianOperator(
            mu.n,
            mu.dim,
            mu.dim if self.out_dim is None else self.out_dim,
            jvp=jvp,
            vjp=vjp,
            dense=dense,
        )


class Linearised(TokenwiseMap):
    """A token-wise map whose derivative is written once, in ``linearised``."""

    def _jvp(self, x: Array, v: Array) -> Array:
        return self.linearised(x)[0](v)

    def _vjp(self, x: Array, g: Array) -> Array:
        return self.linearised(x)[1](g)


@dataclass(frozen=True, eq=False, init=False)
class LayerNorm(Linearised):
    r"""``gain * (x - mean(x)) / sqrt(var(x) + eps) + bias``, token by token.

    Parameters
    ----------
    gain : array_like (d,)
    bias : array_like (d,), optional
    eps : float
        Added to the variance; with 0 (the default) a constant token is a ValueError.
    center : bool
        Subtract the mean (False gives RMSNorm).

    Examples
    --------
    >>> LayerNorm([1.0, 1.0]).on_tokens([[0.0, 4.0]])
    array([[-1.,  1.]])
    """

    gain: Array
    bias: Array | None
    eps: float
    center: bool

    def __init__(
        self, gain: ArrayLike, bias: ArrayLike | None = None, *, eps: float = 0.0, center: bool = True
    ) -> None:
        g = check.vector(gain, "gain")
        object.__setattr__(self, "gain", check.frozen(g))
        b = None if bias is None else check.frozen(check.vector(bias, "bias", size=g.size))
        object.__setattr__(self, "bias", b)
        object.__setattr__(self, "eps", check.positive(eps, "eps", zero=True))
        object.__setattr__(self, "center", bool(center))

    @property
    def in_dim(self) -> int:
        return int(self.gain.size)

    @property
    def out_dim(self) -> int:
        return int(self.gain.size)

    def _centred(self, x: Array) -> Array:
        if not self.center:
            return x
        # differences of entries first: the mean of equal or far-offset entries rounds
        y = x - x[:, :1]
        return np.asarray(y - y.mean(axis=1, keepdims=True))

    def _standard(self, x: Array) -> tuple[Array, Array]:
        """The standardised tokens and their scales ``sqrt(var + eps)``."""
        y = self._centred(x)
        # scaled by the largest entry, so that squares neither overflow nor vanish
        top = np.abs(y).max(axis=1, keepdims=True)
        safe = np.where(top > 0, top, 1.0)
        scale = np.hypot(safe * np.sqrt(np.mean((y / safe) ** 2, axis=1, keepdims=True)), np.sqrt(self.eps))
        if (scale == 0).any():
            raise ValueError(
                f"tokens must not be {'constant' if self.center else 'zero'} when eps is 0, received token "
                f"{int((scale == 0).argmax())}; give eps > 0."
            )
        return y / scale, scale

    def _map(self, x: Array) -> Array:
        z = self._standard(x)[0] * self.gain
        return z if self.bias is None else z + self.bias

    def _pull(self, z: Array, scale: Array, v: Array) -> Array:
        """The symmetric derivative of the standardisation."""
        return (self._centred(v) - z * np.mean(z * v, axis=1, keepdims=True)) / scale

    @property
    def _width(self) -> int:
        return self.in_dim

    def linearised(self, x: Array, dtype: Any = np.float64) -> tuple[Product, Product]:
        """See :class:`TokenwiseMap`."""
        z, scale, gain = (np.asarray(a, dtype=dtype) for a in (*self._standard(x), self.gain))

        def jvp(v: Array) -> Array:
            return np.asarray(self._pull(z, scale, np.asarray(v, dtype=dtype)) * gain)

        def vjp(g: Array) -> Array:
            return self._pull(z, scale, np.asarray(g, dtype=dtype) * gain)

        return jvp, vjp


class RMSNorm(LayerNorm):
    """``gain * x / sqrt(mean(x^2) + eps)``: LayerNorm without centring.

    Examples
    --------
    >>> RMSNorm([1.0, 1.0]).on_tokens([[3.0, -3.0]])
    array([[ 1., -1.]])
    """

    def __init__(self, gain: ArrayLike, *, eps: float = 0.0) -> None:
        super().__init__(gain, eps=eps, center=False)
