"""What every result can do: plain values, tables, one line in print, a file."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from enum import Enum
from os import PathLike
from typing import Any, ClassVar, Self

import numpy as np

from otattn._files.result_file import read_file, write_file
from otattn._files.saved import Saved

__all__ = ["Result", "dataframe", "html_table", "plain"]

LONGEST_TABLE = 20
"""Rows of a table in a notebook."""


class Result(Saved):
    """A dataclass that a function of this package returns."""

    _columns: ClassVar[tuple[str, ...]] = ()
    """Fields and properties of one length that make the rows; without any, the result is one row of its plain fields."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: arrays as lists, maps and measures in words, inf and nan as strings."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}  # type: ignore[arg-type]

    def rows(self) -> list[dict[str, Any]]:
        """The table as records of the same keys."""
        if self._columns:
            columns = [np.asarray(getattr(self, name)).tolist() for name in self._columns]
            return [dict(zip(self._columns, row, strict=True)) for row in zip(*columns, strict=True)]
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return [{k: plain(v, strict=False) for k, v in values.items() if v is None or isinstance(v, _SCALARS)}]

    def to_dataframe(self) -> Any:
        """:meth:`rows` as a pandas DataFrame.

        Raises
        ------
        ImportError
            pandas is not installed; otattn does not require it.
        """
        return dataframe(self.rows())

    def save(self, path: str | PathLike[str]) -> None:
        """Write the result to one ``.npz`` file without pickles, which appears whole or not at all.

        Raises
        ------
        TypeError
            It holds what no file can, such as a function of yours; the message names it.
        ValueError
            ``path`` is a link, a folder or a device.
        """
        write_file(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read what :meth:`save` wrote, the same to the last bit.

        Raises
        ------
        FileNotFoundError
            There is no such file.
        ValueError
            The file is a link, damaged, or holds something else.
        """
        found: Self = read_file(path, cls)
        return found

    def _html_rows(self) -> list[dict[str, Any]]:
        """The rows that a notebook shows."""
        return self.rows()

    def _repr_html_(self) -> str:
        return html_table(self._html_rows(), longest=LONGEST_TABLE)


_SCALARS = (bool, int, float, str, np.generic)


def plain(value: Any, *, strict: bool = True) -> Any:
    """A value as JSON knows it; ``strict``: numbers that are not finite as strings.

    >>> plain({"a": (np.float64(1.0), float("inf")), "b": np.eye(1)})
    {'a': [1.0, 'inf'], 'b': [[1.0]]}
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(entry, strict=strict) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry, strict=strict) for entry in value]
    if isinstance(value, float):
        return str(value) if strict and not math.isfinite(value) else float(value)
    if isinstance(value, (str, Enum)):
        return str(value)
    if value is None or isinstance(value, (bool, int)):
        return value
    if hasattr(value, "tocoo"):
        sparse = value.tocoo()
        return plain({"rows": sparse.row, "cols": sparse.col, "values": sparse.data}, strict=strict)
    return repr(value) if isinstance(value, Saved) else getattr(value, "__qualname__", type(value).__name__)


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


def html_table(rows: Sequence[Mapping[str, Any]], *, longest: int | None = None) -> str:
    """Records of the same keys as an HTML table, numbers with six digits, text escaped; the first ``longest`` of them.

    >>> html_table([{"n": 4, "name": "<b>"}])
    '<table><thead><tr><th>n</th><th>name</th></tr></thead><tbody><tr><td>4</td><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    keys = list(rows[0]) if rows else []
    head = "".join(f"<th>{html.escape(str(key))}</th>" for key in keys)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_shown(row[key]))}</td>" for key in keys) + "</tr>"
        for row in rows[:longest]
    )
    left = 0 if longest is None else len(rows) - longest
    if left > 0:
        body += f'<tr><td colspan="{len(keys)}">and {left} more</td></tr>'
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:.6g}" if isinstance(value, float) or math.fabs(value) > 1e9 else str(value)
