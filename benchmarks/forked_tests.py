"""Runs of pytest in forked processes, for `benchmarks.mutation`: packages are loaded once, otattn by each process anew."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["load", "pytest_child"]

ROOT = Path(__file__).parents[1]
PACKAGES = ("cvxpy", "flint", "mpmath", "ot", "pytest", "scipy.optimize", "scipy.stats")
"""Loaded once, before the forks."""


def load() -> None:
    for package in PACKAGES:
        importlib.import_module(package)


class Plugin:
    """Notes failures, seconds and, under coverage, the lines of each test; or keeps the tests of ``order`` only."""

    def __init__(self, order: list[str] | None = None, cov: Any = None) -> None:
        self.order, self.cov = order, cov
        self.failed: set[str] = set()
        self.seconds: dict[str, float] = {}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self.order is not None:
            at = {name: k for k, name in enumerate(self.order)}
            items[:] = sorted((item for item in items if item.nodeid in at), key=lambda item: at[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        if self.cov is not None:
            self.cov.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.add(report.nodeid)


def pytest_child(tree: Path, files: list[str], limit: float, order: list[str] | None, lines: list[str]) -> Any:
    """Run pytest in a forked process (the packages are loaded already): its exit code, or what ``lines`` ask for.

    None when it took longer than ``limit``.
    """
    answer = tree / "answer.json"
    answer.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.setsid()
            os.chdir(tree)
            null = os.open(tree / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(null, 1)
            os.dup2(null, 2)
            code = _child(tree, files, order, lines, answer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            if lines:
                if not answer.exists():
                    raise RuntimeError((tree / "output.txt").read_text()[-3000:])
                return json.loads(answer.read_text())
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _child(tree: Path, files: list[str], order: list[str] | None, lines: list[str], answer: Path) -> int:
    import pytest

    assert "otattn" not in sys.modules
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = str(tree)
    cov = None
    if lines:
        import coverage

        cov = coverage.Coverage(data_file=None, include=[str(tree / path) for path in lines], config_file=False)
        cov.start()
    plugin = Plugin(order, cov)
    stop = [] if lines else ["-x"]
    options = [
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "--continue-on-collection-errors",
        "--tb=no",
    ]
    code = int(pytest.main([*files, *stop, *options], plugins=[plugin]))
    if cov is not None:
        cov.stop()
        data = cov.get_data()
        reached = {p: data.contexts_by_lineno(str(tree / p)) for p in lines}
        answer.write_text(json.dumps({"failed": sorted(plugin.failed), "seconds": plugin.seconds, "lines": reached}))
    return code
