"""Libraries of the extra ``models``, imported when a file needs them."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["need"]


def need(module: str) -> Any:
    """The module, or an ImportError that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        package = module.split(".")[0]
        raise ImportError(
            f"reading this file needs the package {package!r}, which is not installed; "
            'install the extra: pip install "otattn[models]".'
        ) from exc
