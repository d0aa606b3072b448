"""Numbers as strict JSON: values that are not finite become strings."""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["to_json"]


def to_json(data: Any) -> str:
    """``data`` as JSON text; ``inf`` and ``nan``, which JSON lacks, are written as strings."""
    return json.dumps(_plain(data), indent=1, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
