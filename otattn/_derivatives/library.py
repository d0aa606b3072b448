"""What a function of the caller is written in: numpy, torch or jax; and its derivative there."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn._derivatives.derivative import Derivative
from otattn._derivatives.numerical import numerical_derivative

__all__ = ["Library", "library_of"]

Array = NDArray[np.float64]
Function = Callable[[Any], Any]


@dataclass(frozen=True)
class Library:
    """A library of arrays, in a precision.

    Attributes
    ----------
    name : {"numpy", "torch", "jax"}
    dtype : str
        "float64", or "float32" for torch code whose constants are of it.
    device : str
        Of torch modules.
    """

    name: str = "numpy"
    dtype: str = "float64"
    device: str = "cpu"

    def constant(self, x: Any) -> Any:
        """An array of numbers as the library's own."""
        if self.name == "torch":
            import torch

            return torch.tensor(np.asarray(x), dtype=getattr(torch, self.dtype), device=self.device)
        if self.name == "jax":
            import jax

            with jax.enable_x64(True):
                return jax.numpy.asarray(x)
        return x

    def evaluate(self, function: Function, x: Array) -> Any:
        """The values of ``function`` at ``x``, in whatever type it returns."""
        if self.name == "torch":
            import torch

            with torch.no_grad():
                return function(self.constant(x))
        if self.name == "jax":
            import jax

            with jax.enable_x64(True):
                return np.asarray(function(self.constant(x)))
        return function(x)

    def derivative(self, function: Function, x: Array) -> Derivative:
        """The derivative of ``function : (n, d) -> (m, e)`` at ``x``."""
        if self.name == "torch":
            return _by_torch(self, function, x)
        return _by_jax(self, function, x) if self.name == "jax" else numerical_derivative(function, x)


def library_of(function: Any, call: Callable[[Library], Any]) -> Library:
    """The library that ``function`` is written in; ``call`` evaluates it somewhere with arrays of a library.

    Torch modules tell it, and what is returned for numpy arrays does; a function that refuses these with a TypeError or an
    AttributeError is tried with tensors where torch is loaded. Nothing is imported to find out.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(function, torch.nn.Module):
        first = next((p for p in function.parameters() if p.is_floating_point()), None)
        single = first is not None and first.dtype != torch.float64
        return Library("torch", "float32" if single else "float64", "cpu" if first is None else str(first.device))
    try:
        with warnings.catch_warnings():
            # torch says so of our read-only arrays when it shares their memory
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            found = type(call(Library())).__module__.partition(".")[0]
    except (TypeError, AttributeError) as exc:
        if torch is None:
            raise
        return _torch_precision(call, exc)
    if found == "torch":
        return _torch_precision(call, None)
    return Library("jax" if found in ("jax", "jaxlib") else "numpy")


def _torch_precision(call: Callable[[Library], Any], refusal: Exception | None) -> Library:
    """Double precision, unless the function's own constants are of single precision and do not mix."""
    errors: list[Exception] = []
    for dtype in ("float64", "float32"):
        try:
            call(Library("torch", dtype))
        except (TypeError, AttributeError, RuntimeError) as exc:
            errors.append(exc)
        else:
            return Library("torch", dtype)
    if refusal is None:
        raise errors[0]
    refusal.add_note(f"called with torch tensors it raised {type(errors[0]).__name__}: {errors[0]}")
    raise refusal


def _by_torch(library: Library, function: Function, x: Array) -> Derivative:
    import torch

    from otattn._derivatives.torch_graph import Graph

    with torch.enable_grad():
        graph = Graph(function, library.constant(x).requires_grad_())
    if not isinstance(graph.y, torch.Tensor):
        raise TypeError(f"function must return one torch tensor, received {type(graph.y).__name__}; take it out.")
    value = check.points(graph.y, "function")

    def product(run: Callable[[Any], Any]) -> Callable[[Array], Array]:
        return lambda v: check.as_float_array(run(library.constant(v)), "function's derivative")

    error = 0.0 if graph.y.dtype == torch.float64 and library.dtype == "float64" else check.resolution(graph.y)
    return Derivative(_pair(x), _pair(value), product(graph.jvp), product(graph.vjp), "torch", error)


def _by_jax(library: Library, function: Function, x: Array) -> Derivative:
    import jax

    with jax.enable_x64(True):
        at = library.constant(x)
        value, pull = jax.vjp(function, at)
        pull, push = jax.jit(pull), jax.jit(jax.linearize(function, at)[1])  # compiled once for all products

    def product(run: Callable[[Any], Any]) -> Callable[[Array], Array]:
        def along(v: Array) -> Array:
            with jax.enable_x64(True):
                return check.as_float_array(
                    np.asarray(run(library.constant(v).astype(value.dtype))), "function's derivative"
                )

        return along

    error = 0.0 if value.dtype == np.float64 else check.resolution(np.asarray(value))
    rows = product(lambda g: pull(g)[0])
    columns = product(lambda v: push(v.astype(at.dtype)))
    return Derivative(_pair(x), _pair(np.asarray(value)), columns, rows, "jax", error)


def _pair(x: Any) -> tuple[int, int]:
    return int(x.shape[0]), int(x.shape[1])
