"""Tensors of a module as arrays, and which of them were read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.attention import FeedForward, LayerNorm, RMSNorm
from otattn.attention.feed_forward import activation_name

__all__ = ["Linear", "Weights"]

Array = NDArray[np.float64]
Linear = tuple[Array, Array | None]
"""Matrix and bias, ``y = W x + b``."""


class Weights:
    """Reads the tensors of a module, so that none is left over."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._read: set[int] = set()

    def tensor(self, value: Any, name: str) -> Array:
        """A tensor as a float64 array."""
        self._read.add(id(value))
        return check.as_float_array(value, name)

    def linear(self, layer: Any, name: str) -> Linear:
        """Of a Linear, or of the Conv1D of transformers, which stores the transpose."""
        W = self.tensor(layer.weight, f"{name}.weight")
        if W.ndim != 2:
            raise ValueError(f"{name}.weight must be a matrix, received shape {W.shape}; use FunctionAttention.")
        bias = None if layer.bias is None else self.tensor(layer.bias, f"{name}.bias")
        return (W.T if type(layer).__name__ == "Conv1D" else W), bias

    def norm(self, layer: Any, name: str) -> LayerNorm | RMSNorm:
        """Of a LayerNorm, or of an RMSNorm of torch or transformers."""
        kind = type(layer).__name__
        if not kind.endswith(("LayerNorm", "RMSNorm")):
            raise ValueError(f"{name} must be a LayerNorm or an RMSNorm, received {kind}; use FunctionAttention.")
        if layer.weight is None:
            gain = np.ones(tuple(layer.normalized_shape))
        else:
            gain = self.tensor(layer.weight, f"{name}.weight")
        if kind.endswith("RMSNorm"):
            eps = getattr(layer, "variance_epsilon", None)
            eps = layer.eps if eps is None else eps
            if eps is None:
                raise ValueError(f"{name} must have an eps of its own, received None; give eps=... to RMSNorm.")
            return RMSNorm(gain, eps=float(eps))
        bias = getattr(layer, "bias", None)
        return LayerNorm(gain, None if bias is None else self.tensor(bias, f"{name}.bias"), eps=float(layer.eps))

    def feed_forward(
        self, up: Any, down: Any, activation: Any, gate: Any = None, scale: Array | None = None
    ) -> FeedForward:
        """Two (with a gate three) linear maps; ``scale`` multiplies the output."""
        (U, b), (W, c) = self.linear(up, "the first linear map"), self.linear(down, "the second linear map")
        G, g = (None, None) if gate is None else self.linear(gate, "the gate")
        W, c = scaled(W, c, scale)
        name = activation if isinstance(activation, str) else _activation(activation)
        return FeedForward(U, W, activation=activation_name(name), gate=G, up_bias=b, down_bias=c, gate_bias=g)

    def all_read(self, name: str) -> None:
        """Refuse a module with parameters that have no use in the map."""
        left = [n for n, p in self.module.named_parameters() if id(p) not in self._read]
        if left:
            raise ValueError(
                f"module must hold parameters of {name} only, received {', '.join(left[:4])}{', ...' if len(left) > 4 else ''}, "
                "whose use is not known here; use FunctionAttention(lambda X: ..., dim) with a call on tokens (n, d)."
            )


def scaled(W: Array, b: Array | None, scale: Array | None) -> Linear:
    """Rows times ``scale``."""
    if scale is None:
        return W, b
    return W * scale[:, None], None if b is None else b * scale


def _activation(function: Any) -> str:
    """The name of an activation of torch."""
    name = getattr(function, "__name__", type(function).__name__).lower()
    if name == "gelu" and getattr(function, "approximate", "none") == "tanh":
        return "gelu_tanh"
    return str(name)
