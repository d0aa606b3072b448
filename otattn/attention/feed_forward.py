"""The feed-forward part of a transformer layer, plain or gated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, ndtr

from otattn import _validate as check
from otattn.attention.base import Measure
from otattn.attention.tokenwise import TokenwiseMap, field_rows

__all__ = ["TANH_GELU", "FeedForward", "activation_name"]

Array = NDArray[np.float64]
Function = Callable[[Array], Array]
TANH_GELU = (float(np.sqrt(2.0 / np.pi)), 0.044715)
"""``c`` and ``b`` of ``s (1 + tanh(c (s + b s^3))) / 2``, the approximation of the GELU."""
_C, _B = TANH_GELU


def _gelu_slope(s: Array) -> Array:
    return np.asarray(ndtr(s) + s * np.exp(-0.5 * np.clip(s, -40.0, 40.0) ** 2) / np.sqrt(2.0 * np.pi))


def _tanh_gelu(s: Array) -> Array:
    # tanh(x) = 2 expit(2 x) - 1; beyond 1e3 the value is s or 0 to all digits, and the cube must not overflow
    inner = np.clip(s, -1e3, 1e3)
    return np.asarray(s * expit(2.0 * _C * (inner + _B * inner**3)))


def _tanh_gelu_slope(s: Array) -> Array:
    s = np.clip(s, -1e3, 1e3)
    half = expit(2.0 * _C * (s + _B * s**3))
    return np.asarray(half + s * half * (1.0 - half) * 2.0 * _C * (1.0 + 3 * _B * s**2))


def _silu_slope(s: Array) -> Array:
    return np.asarray(expit(s) * (1.0 + s * expit(-s)))


_FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "gelu": (lambda s: s * ndtr(s), _gelu_slope),
    "gelu_tanh": (_tanh_gelu, _tanh_gelu_slope),
    "relu": (lambda s: np.maximum(s, 0.0), lambda s: (s > 0).astype(np.float64)),
    "silu": (lambda s: s * expit(s), _silu_slope),
    "tanh": (np.tanh, lambda s: 1.0 / np.cosh(np.clip(s, -350.0, 350.0)) ** 2),
}
_ALIASES = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
    "gelu_python": "gelu",
}


def activation_name(name: str, what: str = "activation") -> str:
    """The activation's own name for the names that configuration files use."""
    known = _ALIASES.get(name, name) if isinstance(name, str) else None
    if known not in _FUNCTIONS:
        raise ValueError(f"{what} must be one of {sorted({*_FUNCTIONS, *_ALIASES})}, received {name!r}.")
    return str(known)


@dataclass(frozen=True, eq=False, init=False)
class FeedForward(TokenwiseMap):
    """``W (phi(G x + g) * (U x + b)) + c`` with a gate G, else ``W phi(U x + b) + c``.

    Parameters
    ----------
    up : array_like (h, d)
        U.
    down : array_like (e, h)
        W.
    activation : {"gelu", "gelu_tanh", "relu", "silu", "tanh"}
        phi; the first is the exact GELU, the second its approximation through tanh (GPT-2); names of configuration
        files are understood.
    gate : array_like (h, d), optional
        G, as in the Llama family.
    up_bias, gate_bias : array_like (h,), optional
        b and g.
    down_bias : array_like (e,), optional
        c.

    Examples
    --------
    >>> FeedForward([[1.0]], [[2.0]], activation="relu").on_tokens([[3.0], [-3.0]]).ravel()
    array([6., 0.])
    """

    up: Array
    down: Array
    activation: str
    gate: Array | None
    up_bias: Array | None
    down_bias: Array | None
    gate_bias: Array | None

    def __init__(
        self,
        up: ArrayLike,
        down: ArrayLike,
        *,
        activation: str,
        gate: ArrayLike | None = None,
        up_bias: ArrayLike | None = None,
        down_bias: ArrayLike | None = None,
        gate_bias: ArrayLike | None = None,
    ) -> None:
        if gate is None and gate_bias is not None:
            raise ValueError("gate_bias must come with a gate, received none; drop it or give gate.")
        U = check.matrix(up, "up")
        W = check.matrix(down, "down", shape=(None, len(U)))
        fields = {
            "up": check.frozen(U),
            "down": check.frozen(W),
            "activation": activation_name(activation),
            "gate": None if gate is None else check.frozen(check.matrix(gate, "gate", shape=U.shape)),
            "up_bias": None if up_bias is None else check.frozen(check.vector(up_bias, "up_bias", size=len(U))),
            "down_bias": None if down_bias is None else check.frozen(check.vector(down_bias, "down_bias", size=len(W))),
            "gate_bias": None if gate_bias is None else check.frozen(check.vector(gate_bias, "gate_bias", size=len(U))),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def in_dim(self) -> int:
        return int(self.up.shape[1])

    @property
    def out_dim(self) -> int:
        return int(self.down.shape[0])

    def _inner(self, x: Array) -> Array:
        return x @ self.up.T if self.up_bias is None else x @ self.up.T + self.up_bias

    def _gated(self, x: Array, gate: Array) -> Array:
        return x @ gate.T if self.gate_bias is None else x @ gate.T + self.gate_bias

    def _map(self, x: Array) -> Array:
        phi = _FUNCTIONS[self.activation][0]
        s = self._inner(x)
        s = phi(s) if self.gate is None else phi(self._gated(x, self.gate)) * s
        out = s @ self.down.T
        return np.asarray(out if self.down_bias is None else out + self.down_bias)

    def _slopes(self, x: Array) -> tuple[Array, Array | None]:
        """Derivatives of the hidden values in ``U x`` and in ``G x``."""
        phi, slope = _FUNCTIONS[self.activation]
        s = self._inner(x)
        if self.gate is None:
            return slope(s), None
        g = self._gated(x, self.gate)
        return phi(g), slope(g) * s

    @property
    def _width(self) -> int:
        return len(self.up) * (1 if self.gate is None else 2)

    def linearised(self, x: Array, dtype: Any = np.float64) -> tuple[Function, Function]:
        """See :class:`otattn.attention.TokenwiseMap`."""
        a, b = self._slopes(x)
        a, up, down = (np.asarray(part, dtype=dtype) for part in (a, self.up, self.down))
        if b is None or self.gate is None:

            def jvp(v: Array) -> Array:
                return np.asarray((a * (np.asarray(v, dtype=dtype) @ up.T)) @ down.T)

            def vjp(g: Array) -> Array:
                return np.asarray((a * (np.asarray(g, dtype=dtype) @ down)) @ up)

            return jvp, vjp
        b, gate = np.asarray(b, dtype=dtype), np.asarray(self.gate, dtype=dtype)

        def gated_jvp(v: Array) -> Array:
            v = np.asarray(v, dtype=dtype)
            return np.asarray((a * (v @ up.T) + b * (v @ gate.T)) @ down.T)

        def gated_vjp(g: Array) -> Array:
            back = np.asarray(g, dtype=dtype) @ down
            return np.asarray((a * back) @ up + (b * back) @ gate)

        return gated_jvp, gated_vjp

    def as_perceptron(self) -> tuple[Array, Array, Array, Array, str, Array | None, Array | None]:
        """``(U, b, W, c, activation, G, g)``, biases as arrays: what the expansions near given tokens need."""
        h, e = len(self.up), len(self.down)
        b, c, g = (
            np.zeros(size) if bias is None else bias
            for bias, size in ((self.up_bias, h), (self.down_bias, e), (self.gate_bias, h))
        )
        return self.up, b, self.down, c, self.activation, self.gate, None if self.gate is None else g

    def _jvp(self, x: Array, v: Array) -> Array:
        a, b = self._slopes(x)
        hidden = a * (v @ self.up.T)
        if b is not None and self.gate is not None:
            hidden += b * (v @ self.gate.T)
        return np.asarray(hidden @ self.down.T)

    def _vjp(self, x: Array, g: Array) -> Array:
        a, b = self._slopes(x)
        back = g @ self.down
        out = (a * back) @ self.up
        if b is not None and self.gate is not None:
            out += (b * back) @ self.gate
        return np.asarray(out)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        a, b = self._slopes(x)
        out = np.empty((len(x), self.out_dim, self.in_dim))
        for rows in field_rows(len(x), len(self.up), self.in_dim):
            hidden = a[rows][:, :, None] * self.up
            if b is not None and self.gate is not None:
                hidden += b[rows][:, :, None] * self.gate
            out[rows] = self.down @ hidden
        return out
