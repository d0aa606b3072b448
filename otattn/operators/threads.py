"""Threads that share the work of one product, with one BLAS thread inside each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any

try:
    from threadpoolctl import ThreadpoolController
except ImportError:  # everything still runs: one thread of ours, and as many of the BLAS as it likes
    ThreadpoolController = None

__all__ = ["blas_threads", "run", "single_blas_thread"]


class _Limit:
    """The one limit of the process: how many blocks hold it, what to restore when the last one leaves."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.before = 1
        self.limiter: Any = None


_LIMIT = _Limit()


@cache
def _controller() -> Any:
    return None if ThreadpoolController is None else ThreadpoolController().select(user_api="blas")


def blas_threads() -> int:
    """Threads that the BLAS may use: what a user or joblib has left it (1 where it cannot be asked)."""
    control = _controller()
    if control is None:
        return 1
    with _LIMIT.lock:
        if _LIMIT.holders:  # limited by ourselves: what it was before counts
            return _LIMIT.before
        return max((info["num_threads"] for info in control.info()), default=1)


@contextmanager
def single_blas_thread() -> Iterator[None]:
    """One BLAS thread inside the block.

    The limit belongs to the process: of nested or concurrent blocks the first sets it and the last lifts it;
    so threads that enter and leave in any order never freeze it.
    """
    control = _controller()
    if control is None:
        yield
        return
    with _LIMIT.lock:
        if _LIMIT.holders == 0:
            _LIMIT.before = max((info["num_threads"] for info in control.info()), default=1)
            _LIMIT.limiter = control.limit(limits=1)
        _LIMIT.holders += 1
    try:
        yield
    finally:
        with _LIMIT.lock:
            _LIMIT.holders -= 1
            if _LIMIT.holders == 0:
                _LIMIT.limiter.restore_original_limits()


def run(work: Callable[[int], None], workers: int) -> None:
    """``work(0), ..., work(workers - 1)`` in parallel; the first exception is raised."""
    with single_blas_thread():
        if workers == 1:
            work(0)
            return
        with ThreadPoolExecutor(workers - 1) as pool:
            others = [pool.submit(work, w) for w in range(1, workers)]
            work(0)
            for future in others:
                future.result()
