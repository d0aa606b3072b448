"""How much one evaluation keeps at once: the budget, and the blocks of rows that fit it."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["MEMORY_BUDGET", "block_rows", "blocks", "field_rows"]

MEMORY_BUDGET = 256 * 2**20
"""Bytes that the row blocks of one evaluation may take together (n x n arrays are only built below it)."""


def block_rows(m: int, n: int, width: int = 4) -> int:
    """How many of m rows of n entries to handle at once: ``width`` such blocks fit the memory budget.

    Blocks much above the cache gain nothing, below 256 rows the matrix products lose speed.
    """
    fit = MEMORY_BUDGET // (8 * width * max(n, 1))
    return max(1, min(m, fit, max(256, 2**21 // max(n, 1))))


def blocks(m: int, n: int, block_size: int | None, width: int = 4) -> Iterator[slice]:
    """Slices of the m rows such that ``width`` arrays of ``rows x n`` fit the memory budget."""
    rows = block_size or block_rows(m, n, width)
    for start in range(0, m, rows):
        yield slice(start, min(m, start + rows))


def field_rows(m: int, width: int, d: int) -> Iterator[slice]:
    """Runs of the m rows whose ``(rows, width, d)`` arrays fit a quarter of the memory budget."""
    step = max(1, MEMORY_BUDGET // (32 * max(width * d, 1)))
    return (slice(start, min(start + step, m)) for start in range(0, m, step))
