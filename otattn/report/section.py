"""One section of a report: text, numbers, pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Section", "cells", "number", "table"]


@dataclass(frozen=True)
class Section:
    """What a section contributes: Markdown lines, plain data for the JSON file, pictures by file name.

    A picture is a function that draws it and returns its axes; it is called when all numbers are written.
    """

    title: str
    lines: list[str]
    data: dict[str, Any]
    pictures: dict[str, Callable[[], Any]] = field(default_factory=dict)


def number(value: float | None, digits: int = 4) -> str:
    """A number as the report prints it."""
    if value is None:
        return "-"
    if value != value:
        return "n/a"
    return f"{value:.{digits}g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table; bars inside cells (norms) are escaped, as GitHub's Markdown wants it."""

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"

    return [line(header), "|" + "---|" * len(header), *map(line, rows), ""]


def cells(line: str) -> list[str]:
    """The cells of one line of a Markdown table."""
    return [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]
