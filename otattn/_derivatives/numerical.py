"""Numerical derivatives: the complex step where a function is analytic, else central differences with their error."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._derivatives.derivative import Derivative, Product

__all__ = ["central_differences", "numerical_derivative"]

Array = NDArray[np.float64]
Function = Callable[[Any], Any]

COMPLEX_STEP = 1e-30
"""Relative to the tokens: its square is nothing beside one, so that the imaginary part is the derivative to rounding."""
CLOSE = 1e-7
"""Relative: how far the complex step may lie from differences, beyond ten times their own error."""
_EPS = float(np.finfo(np.float64).eps)


def numerical_derivative(function: Function, x: Array) -> Derivative:
    r"""The derivative of ``function : (n, d) -> (m, e)`` at ``x``.

    Complex step: :math:`f(x + i h v) = f(x) + i h f'(x) v + O(h^2)` for an analytic f, and h may be so small that nothing but
    the first two terms are there. It is used where f takes complex tokens, its real part is f(x) and its imaginary part
    agrees with differences in a random direction (which absolute values, norms and conjugates do not).

    Else the fourth-order central differences with step ``eps^(1/5)`` of the spread of the tokens. Their error is estimated
    along a random direction: the difference of two steps, which is sixteen times the truncation of the smaller one, and the
    rounding of the values.
    """
    raw = function(x)
    value = check.points(raw, "function")
    differences, step = central_differences(function, x, check.resolution(raw))
    v = np.random.default_rng(0).standard_normal(x.shape)
    slope, double = differences(v), differences(v, 2.0)
    size, rounding = float(np.linalg.norm(slope)), check.resolution(raw)
    error = float(np.linalg.norm(slope - double)) + 1.5 * rounding * float(np.linalg.norm(value)) / step * float(
        np.abs(v).max()
    )
    error += _EPS * float(np.abs(x).max()) / step * size
    imaginary = _complex_step(function, x)
    shape = (x.shape[0], x.shape[1])
    out = (value.shape[0], value.shape[1])
    if imaginary is not None:
        found = _tried(imaginary, v, value, max(rounding, 1e-12))
        if found is not None and float(np.linalg.norm(found - slope)) <= max(CLOSE * size, 10.0 * error):
            return Derivative(shape, out, imaginary, None, "complex step", rounding if rounding > _EPS else 0.0)
    relative = error / size if size > 0.0 else (0.0 if error == 0.0 else float("inf"))
    return Derivative(shape, out, differences, None, "central differences", relative)


def central_differences(function: Function, x: Array, rounding: float = _EPS) -> tuple[Callable[..., Array], float]:
    """``(v, factor=1) -> f'(x) v`` by fourth-order central differences, and their step for directions of size one."""
    spread = float(np.abs(x - x.mean(axis=0)).max()) or float(np.abs(x).max()) or 1.0
    step = rounding**0.2 * spread

    def along(v: Array, factor: float = 1.0) -> Array:
        top = float(np.abs(v).max())
        if top == 0.0:
            return np.zeros_like(check.points(function(x), "function"))
        h = factor * step / top
        one, two = (
            check.points(function(x + k * h * v), "function") - check.points(function(x - k * h * v), "function")
            for k in (1.0, 2.0)
        )
        return np.asarray((8.0 * one - two) / (12.0 * h))

    return along, step


def _complex_step(function: Function, x: Array) -> Product:
    scale = COMPLEX_STEP * (float(np.abs(x).max()) or 1.0)

    def along(v: Array) -> Array:
        top = float(np.abs(v).max()) or 1.0
        return np.asarray(np.asarray(function(x + 1j * (scale / top) * v)).imag * (top / scale))

    return along


def _tried(imaginary: Product, v: Array, value: Array, tol: float) -> Array | None:
    """The complex step along v; None where the function does not take complex tokens."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a cast that drops the imaginary part warns
            found = imaginary(v)
    except Exception:  # code that was not written for complex numbers may raise anything
        return None
    return found if found.shape == value.shape and np.isfinite(found).all() else None
