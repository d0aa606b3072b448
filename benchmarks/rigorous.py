"""Rigorous proofs of the upper bounds that the other benchmarks report: balls and intervals against float64.

Run: ``python -m benchmarks.rigorous [--only grid,few,heads]``; writes ``benchmarks/results/rigorous.md``. For the winner of
every cell of the enclosure grids, of the cells with few tokens, and for the twelve heads of the sample layer, the table says
whether ``verify(rigorous=True)`` holds, how far the value that it proves is below the one returned, and how long it took.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import otattn as oa
from benchmarks.common import RESULTS, machine
from benchmarks.enclosure import grid, matrices
from benchmarks.peers import cases

Case = tuple[str, Any, float, "int | None", str]


def grid_cases() -> Iterator[Case]:
    for name, values, V, a, n in grid():
        effort = "deep" if name == "I_3" or n is None else "fast"
        yield f"{name}, V {values}, a = {a:g}", oa.SoftmaxAttention(matrices()[name], V), math.sqrt(a), n, effort


def few_cases() -> Iterator[Case]:
    for case in cases(False):
        for a in (1.0, 4.0, 9.0):
            yield f"{case.name}, a = {a:g}", case.attention, math.sqrt(a), len(case.X), "fast"


def head_cases() -> Iterator[Case]:
    layer = oa.load_sample()
    radius = float(np.linalg.norm(layer.hidden_states, axis=2).max())
    for h, head in enumerate(layer.heads):
        yield f"head {h} of the sample layer", head, radius, layer.hidden_states.shape[1], "fast"


CASES = {"grid": grid_cases, "few": few_cases, "heads": head_cases}


def row(case: Case) -> tuple[str, bool, float, float]:
    """A line of the table, whether the proof holds, the relative distance of the two values, and the seconds."""
    name, attention, radius, n, effort = case
    start = time.perf_counter()
    bound = oa.lipschitz_upper_bound(attention, radius=radius, n=n, effort=effort)
    found = time.perf_counter() - start
    start = time.perf_counter()
    holds = bound.verify(rigorous=True)
    seconds = time.perf_counter() - start
    gap = 1.0 - bound.rigorous_value() / bound.value
    tokens = "any" if n is None else str(n)
    cells = [
        name,
        tokens,
        f"{bound.value:.10g}",
        bound.theorem,
        str(holds),
        f"{gap:.1e}",
        f"{found:.1f}",
        f"{seconds:.1f}",
    ]
    return "| " + " | ".join(cells) + " |", holds, gap, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="parts, separated by commas")
    parts = parser.parse_args().only.split(",")
    lines = ["# Rigorous proofs of upper bounds", "", *machine("python-flint", seeds="those of the cases")]
    for part in parts:
        header = ["case", "n", "value", "theorem", "proved", "1 - proved/value", "seconds (bound)", "seconds (proof)"]
        lines += [f"## {part}", "", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        found = []
        for case in CASES[part]():
            line, *numbers = row(case)
            found.append(numbers)
            lines.append(line)
            print(line, flush=True)
        proved, gaps, seconds = zip(*found, strict=True)
        lines += [
            "",
            f"{sum(proved)} of {len(proved)} proved; largest distance {max(gaps):.1e}, longest {max(seconds):.1f} s.",
            "",
        ]
        print(lines[-2], flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rigorous.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
