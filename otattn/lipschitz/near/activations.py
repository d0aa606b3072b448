r"""Activations of a perceptron with their derivatives, and bounds of the third one on the whole line.

``GELU'' = (2 - s^2) phi``, ``GELU''' = (s^3 - 4 s) phi``, phi the normal density: largest where ``s^4 - 7 s^2 + 4 = 0``, 0.7788.
``tanh''' = -2 sech^2 (1 - 3 tanh^2)``, at most 2. SiLU and the GELU through tanh are ``s sigma(q)``, whose third derivative is
``3 (sigma'' q'^2 + sigma' q'') + s (sigma''' q'^3 + 3 sigma'' q' q'' + sigma' q''')``; their bounds are rounded up from the maxima
0.3082 and 0.7767 (the tests enclose them by intervals).
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
    """An activation, its first two derivatives, and upper bounds of the absolute values of the first three."""

    value: Callable[[Array], Array]
    first: Callable[[Array], Array]
    second: Callable[[Array], Array]
    sup_first: float
    sup_second: float
    sup_third: float


def _density(s: Array) -> Array:
    return np.asarray(np.exp(-0.5 * np.clip(s, -40.0, 40.0) ** 2) / np.sqrt(2.0 * np.pi))


def _sigmoid(s: Array, q: Array, q1: Array, q2: Array) -> tuple[Array, Array, Array]:
    """``s sigma(q(s))`` and its first two derivatives."""
    value, slope = expit(q), expit(q) * expit(-q)
    bend = slope * (expit(-q) - expit(q))
    return s * value, value + s * slope * q1, 2.0 * slope * q1 + s * (bend * q1**2 + slope * q2)


def _silu(s: Array) -> tuple[Array, Array, Array]:
    return _sigmoid(s, s, np.ones_like(s), np.zeros_like(s))


def _gelu_tanh(s: Array) -> tuple[Array, Array, Array]:
    t = np.clip(s, -1e3, 1e3)
    q = (2.0 * _C * (t + _CUBE * t**3), 2.0 * _C * (1.0 + 3.0 * _CUBE * t**2), 12.0 * _C * _CUBE * t)
    value, first, second = _sigmoid(t, *q)
    return np.where(t == s, value, np.maximum(s, 0.0)), first, second


def _sech2(s: Array) -> Array:
    return np.asarray(1.0 / np.cosh(np.clip(s, -350.0, 350.0)) ** 2)


ACTIVATIONS: dict[str, Activation] = {
    "gelu": Activation(
        lambda s: s * ndtr(s),
        lambda s: ndtr(s) + s * _density(s),
        lambda s: (2.0 - np.clip(s, -40.0, 40.0) ** 2) * _density(s),
        1.13,
        0.798,
        0.779,
    ),
    "gelu_tanh": Activation(
        lambda s: _gelu_tanh(s)[0], lambda s: _gelu_tanh(s)[1], lambda s: _gelu_tanh(s)[2], 1.13, 0.798, 0.777
    ),
    "silu": Activation(lambda s: _silu(s)[0], lambda s: _silu(s)[1], lambda s: _silu(s)[2], 1.1, 0.5, 0.3083),
    "tanh": Activation(np.tanh, _sech2, lambda s: -2.0 * np.tanh(s) * _sech2(s), 1.0, 0.77, 2.0),
    "identity": Activation(lambda s: s, np.ones_like, np.zeros_like, 1.0, 0.0, 0.0),
    "relu": Activation(
        lambda s: np.maximum(s, 0.0), lambda s: (s > 0).astype(np.float64), np.zeros_like, 1.0, np.inf, np.inf
    ),
}
"""ReLU has no second derivative: its kinks are counted apart."""
