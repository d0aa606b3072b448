"""The few checks of arguments; every message says what is required, what was received, and how to fix it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "as_float_array",
    "check_order",
    "check_weights",
    "frozen",
    "matrix",
    "moderate",
    "points",
    "positive",
    "rng_from",
    "vector",
]

WEIGHT_SUM_TOL = 1e-6
LARGEST = 1e30
"""Entries of matrices, covariances and domains up to here: products of ten of them still fit in float64."""


def frozen(array: NDArray[np.float64]) -> NDArray[np.float64]:
    """The array itself, C-contiguous, read-only."""
    out = np.ascontiguousarray(array)
    if out.flags.writeable:
        if out is array:
            out = out.copy()
        out.flags.writeable = False
    return out


def as_float_array(value: Any, name: str, *, ndim: int | None = None) -> NDArray[np.float64]:
    """``value`` as a finite float64 array (integers and half precision are widened first)."""
    try:
        raw = np.asarray(_from_torch(value))
    except Exception as exc:
        raise ValueError(f"{name} must be an array of numbers, received {type(value).__name__} ({exc}).") from exc
    if raw.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} must be an array of real numbers, received dtype {raw.dtype}; convert it to float64 first."
        )
    out = np.array(raw, dtype=np.float64)
    if ndim is not None and out.ndim != ndim:
        raise ValueError(
            f"{name} must have {ndim} dimension(s), received shape {out.shape}; reshape it (a list of n points of R^d is (n, d))."
        )
    if not np.isfinite(out).all():
        bad = int(np.size(out) - np.isfinite(out).sum())
        raise ValueError(f"{name} must be finite, received {bad} NaN or infinite entries; remove or replace them.")
    return out


def moderate(out: NDArray[np.float64], name: str, limit: float = LARGEST) -> NDArray[np.float64]:
    """The array itself when no entry exceeds the limit."""
    size = float(np.abs(out).max(initial=0.0))
    if size > limit:
        raise ValueError(
            f"{name} must have entries of at most {limit:g}, received {size:g}, whose products overflow; rescale the units."
        )
    return out


def _from_torch(value: Any) -> Any:
    """A torch tensor (also one with a gradient, on a device, or in bfloat16) as an array; anything else as it is."""
    if not (hasattr(value, "detach") and hasattr(value, "cpu") and hasattr(value, "double")):
        return value
    tensor = value.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def points(value: Any, name: str = "points", *, dim: int | None = None) -> NDArray[np.float64]:
    """A finite ``(n, d)`` array with n >= 1 and d >= 1."""
    out = as_float_array(value, name, ndim=2)
    if out.shape[0] == 0 or out.shape[1] == 0:
        raise ValueError(f"{name} must hold at least one point of dimension at least 1, received shape {out.shape}.")
    if dim is not None and out.shape[1] != dim:
        raise ValueError(f"{name} must have dimension {dim}, received shape {out.shape}; check the last axis.")
    return out


def matrix(value: Any, name: str, *, shape: tuple[int | None, int | None] = (None, None)) -> NDArray[np.float64]:
    """A finite, non-empty matrix; ``None`` in ``shape`` leaves that side free."""
    out = as_float_array(value, name, ndim=2)
    if 0 in out.shape:
        raise ValueError(f"{name} must be non-empty, received shape {out.shape}.")
    if any(want is not None and want != have for want, have in zip(shape, out.shape, strict=True)):
        want_text = "(" + ", ".join("any" if s is None else str(s) for s in shape) + ")"
        raise ValueError(f"{name} must have shape {want_text}, received {out.shape}; check it or transpose it.")
    return out


def vector(value: Any, name: str, *, size: int | None = None, limit: float = np.inf) -> NDArray[np.float64]:
    """A finite ``(size,)`` array, its entries at most ``limit``."""
    out = as_float_array(value, name, ndim=1)
    if size is not None and out.shape[0] != size:
        raise ValueError(f"{name} must have {size} entries, received {out.shape[0]}.")
    return moderate(out, name, limit)


def check_weights(value: Any, n: int, name: str = "weights", *, normalise: bool = False) -> NDArray[np.float64]:
    """Non-negative weights of sum one, renormalised to rounding; ``normalise`` accepts any positive mass."""
    w = vector(value, name, size=n)
    if (w < 0).any():
        raise ValueError(f"{name} must be non-negative, received a smallest entry of {w.min():g}; drop or clip it.")
    scale = float(w.max())
    if scale == 0.0:
        raise ValueError(f"{name} must have positive mass, received a sum of 0; give at least one positive weight.")
    total = float((w / scale).sum()) * scale
    if not normalise and abs(total - 1.0) > WEIGHT_SUM_TOL:
        raise ValueError(
            f"{name} must sum to 1 (within {WEIGHT_SUM_TOL:g}), received a sum of {total!r}; "
            "divide by the sum, or use DiscreteMeasure.normalized."
        )
    w = w / scale
    return w / w.sum()


def check_order(p: Any) -> float:
    """The order ``p`` of a Wasserstein distance, in ``[1, inf]``."""
    try:
        value = float(p)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"p must be a number in [1, inf], received {p!r}.") from exc
    if not value >= 1.0:
        raise ValueError(f"p must lie in [1, inf], received {p!r}; W_p is a distance only for p >= 1.")
    return value


def positive(value: Any, name: str, *, zero: bool = False, limit: float = np.inf) -> float:
    """A finite positive (or non-negative) float, at most ``limit``."""
    try:
        out = float(value)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{name} must be a number, received {value!r}.") from exc
    if not np.isfinite(out) or out < 0 or (out == 0 and not zero):
        raise ValueError(f"{name} must be finite and {'non-negative' if zero else 'positive'}, received {value!r}.")
    if out > limit:
        raise ValueError(
            f"{name} must be at most {limit:g}, received {value!r}, whose products overflow; rescale the units."
        )
    return out


def count(value: Any, name: str, *, least: int = 1) -> int:
    """An integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be an integer, received {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, received {value}.")
    return int(value)


def rng_from(rng: Any) -> np.random.Generator:
    """A Generator from a Generator, a SeedSequence, or an integer seed."""
    if isinstance(rng, np.random.Generator):
        return rng
    if isinstance(rng, (int, np.integer, np.random.SeedSequence)) and not isinstance(rng, bool):
        return np.random.default_rng(rng)
    raise TypeError(f"rng must be a numpy Generator or an integer seed, received {type(rng).__name__}.")
