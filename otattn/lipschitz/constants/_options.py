"""The free choices of a certificate, and the statements that need no search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement
from otattn.lipschitz.theorem import prove


def number(options: Mapping[str, Any], name: str, *, least: float = 0.0, most: float = math.inf) -> float:
    """The entry ``name``, in ``[least, most]``."""
    value = float(options[name])
    if not least <= value <= most:
        raise ValueError(f"the option {name} must be in [{least:g}, {most:g}], received {value!r}; it was altered.")
    return value


def integer(options: Mapping[str, Any], name: str, *, least: int = 1, most: int = 10**7) -> int:
    """The entry ``name``, a whole number in ``[least, most]``."""
    value = options[name]
    if not math.isfinite(value) or value != int(value) or not least <= value <= most:
        raise ValueError(
            f"the option {name} must be an integer in [{least}, {most}], received {value!r}; it was altered."
        )
    return int(value)


def trivial(statement: Statement) -> Bound:
    """The constant of one token, or of ``V = 0``: the closed form is exact then."""
    return prove("column_bound", statement.attention, statement.domain, statement.n, statement.p)
