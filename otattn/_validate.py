"""The few checks of arguments; every message says what is required, what was received, and how to fix it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MASS_TOL",
    "as_float_array",
    "check_order",
    "check_weights",
    "frozen",
    "matrix",
    "moderate",
    "points",
    "positive",
    "probability",
    "real_array",
    "real_dtype",
    "resolution",
    "rng_from",
    "vector",
]

_EPS = float(np.finfo(np.float64).eps)
_BFLOAT16_EPS = 2.0**-7
_MAX_NDIM = 32
MASS_TOL = 1e-6
"""Relative: how far the sum of weights may lie from 1, and the masses of two measures at one time from each other. It
is the error that a float32 softmax leaves in a sum; types coarser than float32 are given two of their own roundings."""
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
    """``value`` as a finite float64 array of its own (integers and half precision are widened).

    The one place where arrays from outside come in: numpy arrays and matrices, nested lists, torch tensors, pandas
    frames (also of nullable types). What float64 cannot say is refused by name: masked entries, missing values,
    complex numbers, text, objects, long doubles beyond its range.
    """
    raw = real_array(value, name)
    with np.errstate(all="ignore"):  # what overflows is refused below, by name
        out = np.array(raw, dtype=np.float64)
    if ndim is not None and out.ndim != ndim:
        raise ValueError(
            f"{name} must have {ndim} dimension(s), received shape {out.shape}; reshape it (a list of n points of R^d is (n, d))."
        )
    finite = np.isfinite(out)
    if not finite.all():
        bad = int(np.size(out) - finite.sum())
        if raw.dtype.itemsize > 8 and np.isfinite(raw[~finite]).any():
            raise ValueError(
                f"{name} must have entries of at most {np.finfo(np.float64).max:.3g}, received {bad} {raw.dtype} entries "
                "beyond float64; rescale the units."
            )
        raise ValueError(f"{name} must be finite, received {bad} NaN or infinite entries; remove or replace them.")
    return out


def resolution(value: Any) -> float:
    """The spacing of the numbers near 1 in the type that ``value`` came in: float64's for whatever is finer, or exact.

    Tolerances on what a caller computed (symmetry, sums) follow it: float32 arithmetic leaves errors of this size.
    """
    if "bfloat16" in str(getattr(value, "dtype", "")):
        return _BFLOAT16_EPS
    try:
        dtype = real_array(value, "value").dtype
    except ValueError:  # whoever reads the array says what is wrong with it
        return _EPS
    return max(_EPS, float(np.finfo(dtype).eps)) if dtype.kind == "f" else _EPS


def real_array(value: Any, name: str) -> NDArray[Any]:
    """An array of real numbers in a type that casts to float64, finite or not."""
    try:
        raw = np.asarray(_plain(value, name))
    except _Refused as exc:
        raise ValueError(str(exc)) from None
    except Exception as exc:
        raise ValueError(f"{name} must be an array of numbers, received {type(value).__name__} ({exc}).") from exc
    real_dtype(raw.dtype, name)
    return raw


def real_dtype(dtype: np.dtype[Any], name: str) -> None:
    """Refuse a type of array that does not cast to float64."""
    if dtype.kind in "biuf" or _is_small_float(dtype):
        return
    if dtype.kind == "V" and dtype.names is None and dtype.itemsize == 2:
        raise ValueError(
            f"{name} must be an array of real numbers, received dtype {dtype}, two bytes without a meaning (numpy "
            "stores bfloat16 so); convert it to float32 before saving it, or view it as ml_dtypes.bfloat16."
        )
    raise ValueError(f"{name} must be an array of real numbers, received dtype {dtype}; convert it to float64 first.")


class _Refused(ValueError):
    """A refusal that already says everything."""


def _plain(value: Any, name: str, depth: int = 0) -> Any:
    """What numpy reads right: arrays of other libraries as numpy's, also inside lists; nothing masked or missing."""
    if isinstance(value, (list, tuple)):
        if all(isinstance(part, (bool, int, float)) for part in value):
            return value
        if depth > _MAX_NDIM:
            raise _Refused(f"{name} must be nested at most {_MAX_NDIM} deep, received a deeper list; flatten it.")
        return [_plain(part, name, depth + 1) for part in value]
    if isinstance(value, np.ma.MaskedArray):
        masked = int(np.count_nonzero(np.ma.getmaskarray(value)))
        if masked:  # they hold numbers that are not meant
            raise _Refused(
                f"{name} must have no masked entries, received {masked}; fill them (filled) or drop them (compressed)."
            )
        return value.data
    if hasattr(value, "toarray"):
        raise _Refused(f"{name} must be a dense array, received {type(value).__name__}; call its toarray() first.")
    return _from_frame(_from_torch(value), name)


def _from_frame(value: Any, name: str) -> Any:
    """The numbers of a pandas object, nullable types included; anything else as it is."""
    if not (type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "to_numpy")):
        return value
    missing = int(np.count_nonzero(np.asarray(value.isna())))
    if missing:
        raise _Refused(
            f"{name} must have no missing values, received {missing}; fill them (fillna) or drop them (dropna)."
        )
    dtypes = list(value.dtypes) if hasattr(value, "columns") else [value.dtype]
    # "kind" is numpy's letter, also for nullable and arrow types
    if all(isinstance(t, np.dtype) for t in dtypes) or any(getattr(t, "kind", "O") not in "biuf" for t in dtypes):
        return value.to_numpy()
    # half and single precision stay what they are, so that tolerances see it
    return value.to_numpy(dtype=np.result_type(*(f"{t.kind}{getattr(t, 'itemsize', 8)}" for t in dtypes)))


def _is_small_float(dtype: np.dtype[Any]) -> bool:
    """The types of ml_dtypes (bfloat16, float8, int4 ...), which numpy counts as void but casts right."""
    return dtype.kind == "V" and dtype.type.__module__.partition(".")[0] == "ml_dtypes" and "complex" not in dtype.name


def _from_torch(value: Any) -> Any:
    """A torch tensor (also one with a gradient, on a device, in a small float) as an array; anything else as it is."""
    if not (hasattr(value, "detach") and hasattr(value, "cpu") and hasattr(value, "double")):
        return value
    if str(getattr(value, "layout", "torch.strided")) != "torch.strided":
        raise _Refused(f"a tensor must be dense, received one of layout {value.layout}; call its to_dense() first.")
    if getattr(value, "is_quantized", False):
        raise _Refused("a tensor must hold numbers, received quantized ones; call its dequantize() first.")
    if getattr(value, "is_meta", False):
        raise _Refused(
            "a tensor must hold numbers, received one on the meta device, which has none; load its values first."
        )
    tensor = value.detach().cpu()
    for resolve in ("resolve_conj", "resolve_neg"):  # bits that numpy does not know
        tensor = getattr(tensor, resolve, lambda t=tensor: t)()
    small = any(name in str(getattr(tensor, "dtype", "")) for name in ("bfloat16", "float8"))
    return tensor.float().numpy() if small else tensor.numpy()


def moderate(out: NDArray[np.float64], name: str, limit: float = LARGEST) -> NDArray[np.float64]:
    """The array itself when no entry exceeds the limit."""
    size = float(np.abs(out).max(initial=0.0))
    if size > limit:
        raise ValueError(
            f"{name} must have entries of at most {limit:g}, received {size:g}, whose products overflow; rescale the units."
        )
    return out


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
    allowed = max(MASS_TOL, 2.0 * resolution(value))
    if not normalise and abs(total - 1.0) > allowed:
        raise ValueError(
            f"{name} must sum to 1 (within {allowed:g}), received a sum of {total!r}; "
            "divide by the sum, or use DiscreteMeasure.normalized."
        )
    w = w / scale
    return w / w.sum()


def check_order(p: Any) -> float:
    """The order ``p`` of a Wasserstein distance, in ``[1, inf]``."""
    try:
        value = _scalar(p)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"p must be a number in [1, inf], received {p!r}.") from exc
    if not value >= 1.0:
        raise ValueError(f"p must lie in [1, inf], received {p!r}; W_p is a distance only for p >= 1.")
    return value


def probability(value: Any, name: str) -> float:
    """A float strictly between 0 and 1."""
    out = positive(value, name)
    if not out < 1.0:
        raise ValueError(f"{name} must be less than 1, received {value!r}; it is a probability.")
    return out


def positive(value: Any, name: str, *, zero: bool = False, limit: float = np.inf) -> float:
    """A finite positive (or non-negative) float, at most ``limit``."""
    try:
        out = _scalar(value)
    except (TypeError, ValueError) as exc:
        raise ValueError(f"{name} must be a number, received {value!r}.") from exc
    if not np.isfinite(out) or out < 0 or (out == 0 and not zero):
        raise ValueError(f"{name} must be finite and {'non-negative' if zero else 'positive'}, received {out:g}.")
    if out > limit:
        raise ValueError(
            f"{name} must be at most {limit:g}, received {value!r}, whose products overflow; rescale the units."
        )
    return out


def _scalar(value: Any) -> float:
    """A real number as a float: no text, nothing masked, no array of another shape than ()."""
    value = _from_torch(value)
    if isinstance(value, (str, bytes, np.ma.MaskedArray)) or np.ndim(value) or np.iscomplexobj(value):
        raise TypeError(f"received {type(value).__name__}")
    try:
        with np.errstate(all="ignore"):
            return float(value)
    except OverflowError as exc:
        raise ValueError("beyond float64") from exc


def count(value: Any, name: str, *, least: int = 1) -> int:
    """An integer of at least ``least``."""
    value = _from_torch(value)
    if isinstance(value, np.ndarray) and value.shape == () and value.dtype.kind in "iu":
        value = value[()]
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
