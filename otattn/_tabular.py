"""Results as tables: plain records, pandas frames, HTML for notebooks."""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["Tabular", "dataframe", "html_table"]


class Tabular(ABC):
    """A result with ``rows()``: gains ``to_dataframe()`` and its table in notebooks."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """One record a row."""

    def to_dataframe(self) -> Any:
        """:meth:`rows` as a pandas DataFrame.

        Raises
        ------
        ImportError
            pandas is not installed; otattn does not require it.
        """
        return dataframe(self.rows())

    def _repr_html_(self) -> str:
        return html_table(self.rows())


def dataframe(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Records of the same keys as a pandas DataFrame."""
    try:
        import pandas as pd
    except ImportError as exc:
        raise ImportError(
            "to_dataframe needs pandas, which is not installed; run: pip install pandas, or use rows()."
        ) from exc
    keys = list(rows[0]) if rows else []
    return pd.DataFrame({key: [row[key] for row in rows] for key in keys})


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records of the same keys as an HTML table, numbers with six digits, text escaped.

    >>> html_table([{"n": 4, "name": "<b>"}])
    '<table><thead><tr><th>n</th><th>name</th></tr></thead><tbody><tr><td>4</td><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    keys = list(rows[0]) if rows else []
    head = "".join(f"<th>{html.escape(str(key))}</th>" for key in keys)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_shown(row[key]))}</td>" for key in keys) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:.6g}" if isinstance(value, float) or math.fabs(value) > 1e9 else str(value)
