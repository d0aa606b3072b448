"""Numbers as strict JSON: values that are not finite become strings."""

from __future__ import annotations

import json
from typing import Any

from otattn._tabular import plain

__all__ = ["to_json"]


def to_json(data: Any) -> str:
    """``data`` as JSON text; ``inf`` and ``nan``, which JSON lacks, are written as strings."""
    return json.dumps(plain(data), indent=1, allow_nan=False)
