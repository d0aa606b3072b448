"""A hash of what a study depends on, by content: two processes that build the same study agree on it."""

from __future__ import annotations

import hashlib
import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

__all__ = ["fingerprint"]


def fingerprint(*parts: Any) -> str:
    """A hash of values: arrays by their bytes, dataclasses by their fields, functions by their names."""
    digest = hashlib.sha256()
    for part in parts:
        _absorb(digest, part)
    return digest.hexdigest()


def _absorb(digest: Any, value: Any) -> None:
    kind = type(value)
    digest.update(f"<{kind.__module__}.{kind.__qualname__}>".encode())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype.str}{value.shape}".encode() + np.ascontiguousarray(value).tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            digest.update(field.name.encode())
            _absorb(digest, getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for part in value:
            _absorb(digest, part)
    elif value is None or isinstance(value, (bool, int, float, str, np.generic)):
        digest.update(repr(value).encode())
    elif hasattr(value, "__qualname__"):
        digest.update(f"{value.__module__}.{value.__qualname__}".encode())
    else:
        digest.update(pickle.dumps(value))
