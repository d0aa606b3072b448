"""Outward rounding of closed forms, and exponentials that are carried as logarithms."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["down", "log_details", "log_sum", "safe_exp", "up"]

MARGIN = 1e-12
"""Relative margin of the closed forms: a hundred operations with errors of 1e-15, and a factor 10."""


def up(value: float) -> float:
    """``value`` raised by the margin of the closed forms (non-negative values)."""
    return value * (1.0 + MARGIN)


def down(value: float) -> float:
    """``value`` lowered by the margin of the closed forms (non-negative values)."""
    return value * (1.0 - MARGIN)


def safe_exp(x: float) -> float:
    """``exp(x)``, inf exactly when the number exceeds the largest float."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def log_sum(*logs: float) -> float:
    """``log(sum_i exp(l_i))`` without overflow; terms of ``-inf`` are zeros."""
    top = max(logs)
    if math.isinf(top):
        return top
    return top + math.log(sum(math.exp(l - top) for l in logs))


def log(value: float) -> float:
    """``log(value)`` with ``log 0 = -inf``; a nan, of which nothing is known, gives inf."""
    if math.isnan(value):
        return math.inf
    return math.log(value) if value > 0 else -math.inf


def log_details(log_value: float, **details: Any) -> dict[str, Any]:
    """Details of a bound whose value may overflow: its logarithm never does."""
    return {"log_value": log_value, **details}
