"""Maps that move each token on its own: LayerNorm, RMSNorm, MLP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, ndtr

from otattn import _validate as check
from otattn.attention import base
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.jacobian import JacobianOperator

__all__ = ["MLP", "LayerNorm", "RMSNorm", "TokenwiseMap", "field_rows"]

Array = NDArray[np.float64]
Product = Callable[[Array], Array]


def field_rows(m: int, width: int, d: int) -> Iterator[slice]:
    """Runs of the m rows whose ``(rows, width, d)`` arrays fit a quarter of the memory budget."""
    step = max(1, base.MEMORY_BUDGET // (32 * max(width * d, 1)))
    return (slice(start, min(start + step, m)) for start in range(0, m, step))


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


@dataclass(frozen=True, eq=False, init=False)
class LayerNorm(TokenwiseMap):
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

    def _jvp(self, x: Array, v: Array) -> Array:
        return np.asarray(self._pull(*self._standard(x), v) * self.gain)

    def _vjp(self, x: Array, g: Array) -> Array:
        return self._pull(*self._standard(x), g * self.gain)


class RMSNorm(LayerNorm):
    """``gain * x / sqrt(mean(x^2) + eps)``: LayerNorm without centring.

    Examples
    --------
    >>> RMSNorm([1.0, 1.0]).on_tokens([[3.0, -3.0]])
    array([[ 1., -1.]])
    """

    def __init__(self, gain: ArrayLike, *, eps: float = 0.0) -> None:
        super().__init__(gain, eps=eps, center=False)


def _gelu_derivative(s: Array) -> Array:
    # beyond 40 the density is below the smallest float; clipped so that the square does not overflow
    return np.asarray(ndtr(s) + s * np.exp(-0.5 * np.clip(s, -40.0, 40.0) ** 2) / np.sqrt(2.0 * np.pi))


def _silu_derivative(s: Array) -> Array:
    return np.asarray(expit(s) * (1.0 + s * expit(-s)))


_ACTIVATIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "relu": (lambda s: np.maximum(s, 0.0), lambda s: (s > 0).astype(np.float64)),
    "gelu": (lambda s: s * ndtr(s), _gelu_derivative),
    "silu": (lambda s: s * expit(s), _silu_derivative),
    "tanh": (np.tanh, lambda s: 1.0 / np.cosh(np.clip(s, -350.0, 350.0)) ** 2),
    "identity": (lambda s: s, np.ones_like),
}


@dataclass(frozen=True, eq=False, init=False)
class MLP(TokenwiseMap):
    """The two-layer perceptron ``W activation(U x + b) + output_bias``.

    Parameters
    ----------
    U : array_like (h, d)
    b : array_like (h,)
    W : array_like (e, h)
    activation : {"gelu", "relu", "silu", "tanh", "identity"}
        GELU is the exact one, ``s Phi(s)``.
    output_bias : array_like (e,), optional

    Examples
    --------
    >>> MLP([[1.0]], [0.0], [[2.0]], activation="relu").on_tokens([[3.0], [-3.0]]).ravel()
    array([6., 0.])
    """

    U: Array
    b: Array
    W: Array
    activation: str
    output_bias: Array | None

    def __init__(
        self,
        U: ArrayLike,
        b: ArrayLike,
        W: ArrayLike,
        *,
        activation: str = "gelu",
        output_bias: ArrayLike | None = None,
    ) -> None:
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {sorted(_ACTIVATIONS)}, received {activation!r}.")
        up = check.matrix(U, "U")
        object.__setattr__(self, "U", check.frozen(up))
        object.__setattr__(self, "b", check.frozen(check.vector(b, "b", size=len(up))))
        down = check.matrix(W, "W", shape=(None, len(up)))
        object.__setattr__(self, "W", check.frozen(down))
        object.__setattr__(self, "activation", activation)
        c = None if output_bias is None else check.frozen(check.vector(output_bias, "output_bias", size=len(down)))
        object.__setattr__(self, "output_bias", c)

    @property
    def in_dim(self) -> int:
        return int(self.U.shape[1])

    @property
    def out_dim(self) -> int:
        return int(self.W.shape[0])

    def _map(self, x: Array) -> Array:
        out = _ACTIVATIONS[self.activation][0](x @ self.U.T + self.b) @ self.W.T
        return np.asarray(out if self.output_bias is None else out + self.output_bias)

    def _slope(self, x: Array) -> Array:
        return np.asarray(_ACTIVATIONS[self.activation][1](x @ self.U.T + self.b))

    @property
    def _width(self) -> int:
        return len(self.U)

    def linearised(self, x: Array, dtype: Any = np.float64) -> tuple[Product, Product]:
        """See :class:`TokenwiseMap`."""
        slope, U, W = (np.asarray(a, dtype=dtype) for a in (self._slope(x), self.U, self.W))

        def jvp(v: Array) -> Array:
            return np.asarray((slope * (np.asarray(v, dtype=dtype) @ U.T)) @ W.T)

        def vjp(g: Array) -> Array:
            return np.asarray((slope * (np.asarray(g, dtype=dtype) @ W)) @ U)

        return jvp, vjp

    def _jvp(self, x: Array, v: Array) -> Array:
        return np.asarray((self._slope(x) * (v @ self.U.T)) @ self.W.T)

    def _vjp(self, x: Array, g: Array) -> Array:
        return np.asarray((self._slope(x) * (g @ self.W)) @ self.U)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        slope, out = self._slope(x), np.empty((len(x), self.out_dim, self.in_dim))
        for rows in field_rows(len(x), len(self.U), self.in_dim):
            out[rows] = self.W @ (slope[rows][:, :, None] * self.U)
        return out
