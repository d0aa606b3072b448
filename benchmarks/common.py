"""What the benchmark scripts share: interleaved rounds, ratios round by round, and the line that names the machine."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
Times = dict[str, list[float]]


def interleaved(methods: Mapping[str, Callable[[], Any]], rounds: int) -> Times:
    """Wall times: every round runs every method once; a first round that loads and allocates is not counted."""
    times: Times = {name: [] for name in methods}
    for run in methods.values():
        run()
    for _ in range(rounds):
        for name, run in methods.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def ratio(times: Times, name: str, base: str) -> float:
    """Median over the rounds of the time of ``name`` over that of ``base`` in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[base], strict=True))


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log value against log size by least squares."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def machine(*packages: str, seeds: str) -> list[str]:
    """Processor, load, versions and seeds, as the lines of a Markdown list."""
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in names if line.startswith("model name")]
    name = models[0] if models else platform.processor() or platform.machine()
    versions = ", ".join(f"{p} {metadata.version(p)}" for p in ("numpy", "scipy", *packages))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    threads = os.environ.get("OPENBLAS_NUM_THREADS", "all")
    real_time = hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)
    return [
        f"- {name}, {os.cpu_count()} cores, BLAS threads: {threads}; load at the end {load:.1f}"
        f"{', real-time priority' if real_time else ''}",
        f"- Python {platform.python_version()}, {versions}",
        f"- seeds: {seeds}",
        "",
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows), ""]


def arguments(doc: str | None) -> argparse.Namespace:
    """``--quick`` and ``--out``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few sizes and rounds")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def panels(count: int, *, height: float = 3.9) -> list[Any]:
    """Axes side by side in one figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return axes


def write(name: str, lines: Sequence[str], out: Path, ax: Any = None) -> None:
    """``name.md``, and ``name.png`` of a picture."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")
    if ax is not None:
        ax.figure.savefig(out / f"{name}.png", dpi=160)
    print("\n".join(lines))
