r"""Activations of a perceptron with their derivatives, and bounds of these on the whole line.

With phi the normal density, the derivatives of the exact GELU from the second on are ``(2 - s^2) phi``, ``(s^3 - 4 s) phi`` and
``(7 s^2 - 4 - s^4) phi``; the first is largest where the second vanishes, at sqrt 2. Those of tanh are polynomials in ``t = tanh
s``. SiLU and the GELU through tanh are ``s sigma(q)``, whose derivative of order k is ``s (sigma q)^(k) + k (sigma q)^(k - 1)``.

The bounds are proved, and rounded up. ``tests/lipschitz/near/test_activations.py`` does it: the line is cut into cells, on each of
which interval arithmetic bounds the derivative, and cells are cut again until all are below; beyond 40 what is left is a
polynomial times ``e^{-|q|}``. What is not proved is the rounding of the values of the functions here, for which their users allow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, ndtr

__all__ = ["ACTIVATIONS", "Activation"]

Array = NDArray[np.float64]
_C = float(np.sqrt(2.0 / np.pi))
_CUBE = 0.044715


class Activation(NamedTuple):
    """An activation, its first three derivatives, and upper bounds of the absolute values of the first four."""

    value: Callable[[Array], Array]
    first: Callable[[Array], Array]
    second: Callable[[Array], Array]
    third: Callable[[Array], Array]
    sup_first: float
    sup_second: float
    sup_third: float
    sup_fourth: float


def _density(s: Array) -> Array:
    return np.asarray(np.exp(-0.5 * np.clip(s, -40.0, 40.0) ** 2) / np.sqrt(2.0 * np.pi))


def _sigmoid(order: int, s: Array, q: Array, q1: Array, q2: Array, q3: Array) -> Array:
    """A derivative of ``s sigma(q(s))``, from the derivatives of q."""
    value, slope = expit(q), expit(q) * expit(-q)
    if order == 0:
        return np.asarray(s * value)
    if order == 1:
        return np.asarray(value + s * slope * q1)
    bend = slope * (expit(-q) - expit(q))
    if order == 2:
        return np.asarray(2.0 * slope * q1 + s * (bend * q1**2 + slope * q2))
    jerk = slope * (1.0 - 6.0 * slope)
    return np.asarray(3.0 * (bend * q1**2 + slope * q2) + s * (jerk * q1**3 + 3.0 * bend * q1 * q2 + slope * q3))


def _silu(order: int) -> Callable[[Array], Array]:
    return lambda s: _sigmoid(order, s, s, np.ones_like(s), np.zeros_like(s), np.zeros_like(s))


def _gelu_tanh(order: int) -> Callable[[Array], Array]:
    def derivative(s: Array) -> Array:
        t = np.clip(s, -1e2, 1e2)  # beyond, all but the value are those of ReLU to all digits
        q = 2.0 * _C * (t + _CUBE * t**3)
        slopes = 2.0 * _C * (1.0 + 3.0 * _CUBE * t**2), 12.0 * _C * _CUBE * t, np.full_like(t, 12.0 * _C * _CUBE)
        out = _sigmoid(order, t, q, *slopes)
        return np.where(t == s, out, np.maximum(s, 0.0)) if order == 0 else out

    return derivative


def _gelu(order: int) -> Callable[[Array], Array]:
    def derivative(s: Array) -> Array:
        if order == 0:
            return np.asarray(s * ndtr(s))
        t = np.clip(s, -40.0, 40.0)
        factor = {1: t, 2: 2.0 - t**2, 3: t**3 - 4.0 * t}[order]
        return np.asarray((ndtr(s) if order == 1 else 0.0) + factor * _density(t))

    return derivative


def _tanh(order: int) -> Callable[[Array], Array]:
    def derivative(s: Array) -> Array:
        t = np.tanh(s)
        slope = 1.0 / np.cosh(np.clip(s, -350.0, 350.0)) ** 2
        return np.asarray({0: t, 1: slope, 2: -2.0 * t * slope, 3: -2.0 * slope * (1.0 - 3.0 * t**2)}[order])

    return derivative


def _made(family: Callable[[int], Callable[[Array], Array]], *bounds: float) -> Activation:
    first, second, third, fourth = bounds
    return Activation(family(0), family(1), family(2), family(3), first, second, third, fourth)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": _made(_gelu, 1.13, 0.798, 0.779, 1.5958),
    "gelu_tanh": _made(_gelu_tanh, 1.13, 0.798, 0.777, 1.604),
    "silu": _made(_silu, 1.1, 0.50001, 0.3083, 0.5001),
    "tanh": _made(_tanh, 1.00001, 0.77, 2.00001, 4.086),
    "identity": Activation(lambda s: s, np.ones_like, np.zeros_like, np.zeros_like, 1.0, 0.0, 0.0, 0.0),
    "relu": Activation(
        lambda s: np.maximum(s, 0.0),
        lambda s: (s > 0).astype(np.float64),
        np.zeros_like,
        np.zeros_like,
        1.0,
        np.inf,
        np.inf,
        np.inf,
    ),
}
"""ReLU has no second derivative: its kinks are counted apart."""
