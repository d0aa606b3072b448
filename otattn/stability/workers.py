"""Chunks of work in joblib's workers: results as they come, and no worker outlives the process that it works for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from joblib import Parallel, delayed

__all__ = ["in_workers"]

LOOK = 0.5
"""Seconds between two looks of a worker at its parent."""
ROUNDS = 8
"""Rounds in which a backend works that returns whole lists only."""
_WATCHED: set[int] = set()


def in_workers(work: Callable[[Any], Any], chunks: Sequence[Any], n_jobs: int | None) -> Iterator[Any]:
    """``work(chunk)`` of each chunk as it finishes, in any order; in rounds on backends that return whole lists only.

    Raises
    ------
    concurrent.futures.BrokenExecutor
        A worker process ended while it worked (out of memory, a signal).
    """
    if not chunks:
        return
    task, owner = delayed(_guarded), os.getpid()
    try:
        parallel = Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    except ValueError:
        parallel = Parallel(n_jobs=n_jobs)
        step = max(1, len(chunks) // ROUNDS)
        for k in range(0, len(chunks), step):
            yield from parallel(task(owner, work, chunk) for chunk in chunks[k : k + step])
        return
    yield from parallel(task(owner, work, chunk) for chunk in chunks)


def _guarded(owner: int, work: Callable[[Any], Any], chunk: Any) -> Any:
    _end_with(owner)
    return work(chunk)


def _end_with(owner: int) -> None:
    """Let this process end soon after its parent: a parent that is killed cannot say so, and joblib's workers wait on.

    Only where the process is a child of the owner (threads, clusters and the process itself are left alone). Systems that
    never change the number of a parent (Windows) end no worker.
    """
    me = os.getpid()
    if me == owner or me in _WATCHED or os.getppid() != owner:
        return
    _WATCHED.add(me)
    threading.Thread(target=_watch, args=(owner,), name="otattn-parent", daemon=True).start()


def _watch(owner: int) -> None:
    while os.getppid() == owner:
        time.sleep(LOOK)
    os._exit(1)
