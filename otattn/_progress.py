"""Progress of long work: a bar on the error stream where it is asked for, and lines of the logger ``otattn``."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from tqdm.auto import tqdm

__all__ = ["LOG", "reaching", "watched"]

T = TypeVar("T")
LOG = logging.getLogger("otattn")
"""Steps of long work are of level INFO: ``logging.basicConfig(level="INFO")`` shows them."""


def watched(
    items: Sequence[T], what: str, *, progress: bool, note: Callable[[T], str] = str, unit: str = "step"
) -> Iterator[T]:
    """The items one by one, each a step of the bar and, when it is done, a line of the log.

    Examples
    --------
    >>> [n * n for n in watched([1, 2, 3], "squares", progress=False)]
    [1, 4, 9]
    """
    with tqdm(total=len(items), desc=what, unit=unit, disable=not progress, leave=False, file=sys.stderr) as bar:
        for count, item in enumerate(items, start=1):
            start = time.perf_counter()
            yield item
            bar.update()
            if LOG.isEnabledFor(logging.INFO):
                spent = time.perf_counter() - start
                LOG.info("%s: %s, %d of %d, %.3g s", what, note(item), count, len(items), spent)


@contextmanager
def reaching(what: str, end: float, *, progress: bool) -> Iterator[Callable[[float], None]]:
    """A bar from 0 to ``end``; calls tell how far the work is. It never goes back.

    Examples
    --------
    >>> with reaching("flow", 2.0, progress=False) as reached:
    ...     reached(1.5)
    """
    form = "{desc}: {percentage:3.0f}%|{bar}| t = {n:.3g} of {total:.3g} [{elapsed}<{remaining}]"
    with tqdm(total=end, desc=what, bar_format=form, disable=not progress, leave=False, file=sys.stderr) as bar:
        yield lambda t: bar.update(max(0.0, min(t, end) - bar.n)) and None
