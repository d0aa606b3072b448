"""The stored data of a certificate, checked before anything is proved from them.

A certificate proves a bound of what its ``problem`` describes. Data that describe nothing (a nan, a negative norm, no
cells at all) prove nothing, and a recheck must say so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from otattn._linalg import spectral_norm
from otattn.lipschitz.relaxations.regions import UnitHead

__all__ = ["integer", "number", "stored_head"]

_LARGEST = 1e200
_SQUARED = 1e150
"""Squares of larger numbers overflow."""


def number(problem: Mapping[str, Any], name: str, *, least: float = 0.0, most: float = _LARGEST) -> float:
    """The entry ``name``, in ``[least, most]``."""
    value = float(problem[name])
    if not least <= value <= most:
        raise ValueError(
            f"{name} must be in [{least:g}, {most:g}], received {value!r}; the stored problem was altered."
        )
    return value


def integer(problem: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    """The entry ``name``, a whole number of at least ``least``."""
    value = problem[name]
    if not math.isfinite(value) or value != int(value) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, received {value!r}; the stored problem was altered.")
    return int(value)


def stored_head(problem: Mapping[str, Any]) -> UnitHead:
    """The head whose fields are entries of ``problem``; ``a`` must be the norm of A, or above."""
    A, c = problem["A"], problem["c"]
    if not (np.isfinite(A).all() and np.linalg.norm(c) <= _SQUARED):
        raise ValueError("A and c must be finite and moderate, received other entries; the stored problem was altered.")
    a = number(problem, "a", least=spectral_norm(A) * (1 - 1e-12), most=_SQUARED)
    top = number(problem, "top", most=_SQUARED)
    return UnitHead(A, c, a, top, *(number(problem, k) for k in ("v", "sigma", "trace_sigma", "kappa")))
