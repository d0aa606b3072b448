"""Perceptrons, the feed-forward part of a transformer layer: plain or gated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, ndtr

from otattn import _validate as check
from otattn._linalg import Array
from otattn.attention.base import Measure
from otattn.attention.memory import field_rows
from otattn.attention.tokenwise import Linearised

__all__ = ["ACTIVATIONS", "MLP", "TANH_GELU", "FeedForward", "Perceptron", "activation_name"]

Function = Callable[[Array], Array]
Parts: TypeAlias = tuple[Array, Array | None, Array, Array | None, Array | None, Array | None]
TANH_GELU = (float(np.sqrt(2.0 / np.pi)), 0.044715)
"""``c`` and ``b`` of ``s (1 + tanh(c (s + b s^3))) / 2``, the approximation of the GELU."""
_C, _B = TANH_GELU


def _gelu_slope(s: Array) -> Array:
    # beyond 40 the density is below the smallest float; clipped so that the square does not overflow
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


ACTIVATIONS: dict[str, tuple[Function, Function]] = {
    "gelu": (lambda s: s * ndtr(s), _gelu_slope),
    "gelu_tanh": (_tanh_gelu, _tanh_gelu_slope),
    "relu": (lambda s: np.maximum(s, 0.0), lambda s: (s > 0).astype(np.float64)),
    "silu": (lambda s: s * expit(s), _silu_slope),
    "tanh": (np.tanh, lambda s: 1.0 / np.cosh(np.clip(s, -350.0, 350.0)) ** 2),
    "identity": (lambda s: s, np.ones_like),
}
"""The activations with their derivatives."""
_PLAIN = sorted({*ACTIVATIONS} - {"gelu_tanh"})
_GATED = sorted({*ACTIVATIONS} - {"identity"})
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
    if known not in _GATED:
        raise ValueError(f"{what} must be one of {sorted({*_GATED, *_ALIASES})}, received {name!r}.")
    return str(known)


class Perceptron(Linearised):
    """``W (phi(G x + g) * (U x + b)) + c`` with a gate G, else ``W phi(U x + b) + c``."""

    activation: str

    @property
    @abstractmethod
    def parts(self) -> Parts:
        """``(U, b, W, c, G, g)``, None for what is not there."""

    @property
    def in_dim(self) -> int:
        return int(self.parts[0].shape[1])

    @property
    def out_dim(self) -> int:
        return len(self.parts[2])

    def as_perceptron(self) -> tuple[Array, Array, Array, Array, str, Array | None, Array | None]:
        """``(U, b, W, c, activation, G, g)``, biases as arrays."""
        U, b, W, c, G, g = self.parts
        b, c = np.zeros(len(U)) if b is None else b, np.zeros(len(W)) if c is None else c
        return U, b, W, c, self.activation, G, np.zeros(len(U)) if G is not None and g is None else g

    def _map(self, x: Array) -> Array:
        U, b, W, c, G, g = self.parts
        phi, s = ACTIVATIONS[self.activation][0], _affine(x, U, b)
        s = phi(s) if G is None else phi(_affine(x, G, g)) * s
        return _affine(s, W, c)

    def _slopes(self, x: Array) -> tuple[Array, Array | None]:
        """Derivatives of the hidden values in ``U x`` and in ``G x``."""
        U, b, _, _, G, g = self.parts
        (phi, slope), s = ACTIVATIONS[self.activation], _affine(x, U, b)
        if G is None:
            return np.asarray(slope(s)), None
        gate = _affine(x, G, g)
        return phi(gate), slope(gate) * s

    @property
    def _width(self) -> int:
        U, _, _, _, G, _ = self.parts
        return len(U) * (1 if G is None else 2)

    def linearised(self, x: Array, dtype: Any = np.float64) -> tuple[Function, Function]:
        """See :class:`otattn.attention.TokenwiseMap`."""
        (a, b), (up, _, down, _, gate, _) = self._slopes(x), self.parts
        a, up, down = (np.asarray(part, dtype=dtype) for part in (a, up, down))
        if b is not None:
            b, gate = np.asarray(b, dtype=dtype), np.asarray(gate, dtype=dtype)

        def jvp(v: Array) -> Array:
            v = np.asarray(v, dtype=dtype)
            hidden = a * (v @ up.T)
            if b is not None and gate is not None:
                hidden += b * (v @ gate.T)
            return np.asarray(hidden @ down.T)

        def vjp(g: Array) -> Array:
            back = np.asarray(g, dtype=dtype) @ down
            out = (a * back) @ up
            if b is not None and gate is not None:
                out += (b * back) @ gate
            return np.asarray(out)

        return jvp, vjp

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        (a, b), (up, _, down, _, gate, _) = self._slopes(x), self.parts
        out = np.empty((len(x), len(down), up.shape[1]))
        for rows in field_rows(len(x), *up.shape):
            hidden = a[rows][:, :, None] * up
            if b is not None and gate is not None:
                hidden += b[rows][:, :, None] * gate
            out[rows] = down @ hidden
        return out


def _affine(x: Array, W: Array, b: Array | None) -> Array:
    return np.asarray(x @ W.T if b is None else x @ W.T + b)


@dataclass(frozen=True, eq=False, init=False)
class MLP(Perceptron):
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
        if activation not in _PLAIN:
            raise ValueError(f"activation must be one of {_PLAIN}, received {activation!r}.")
        up = check.matrix(U, "U")
        object.__setattr__(self, "U", check.frozen(up))
        object.__setattr__(self, "b", check.frozen(check.vector(b, "b", size=len(up))))
        down = check.matrix(W, "W", shape=(None, len(up)))
        object.__setattr__(self, "W", check.frozen(down))
        object.__setattr__(self, "activation", activation)
        c = None if output_bias is None else check.frozen(check.vector(output_bias, "output_bias", size=len(down)))
        object.__setattr__(self, "output_bias", c)

    @property
    def parts(self) -> Parts:
        return self.U, self.b, self.W, self.output_bias, None, None


@dataclass(frozen=True, eq=False, init=False)
class FeedForward(Perceptron):
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
    def parts(self) -> Parts:
        return self.up, self.up_bias, self.down, self.down_bias, self.gate, self.gate_bias
