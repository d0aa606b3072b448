"""Enclosure ratios over a grid of attention maps, with the published bounds and times.

Run: ``python -m benchmarks.enclosure``; upper bounds of A = I_3 and those over all measures with ``effort="deep"``, the others
"fast"; writes ``benchmarks/results/enclosure.md`` and ``enclosure.png``. With names of matrices, as in ``python -m
benchmarks.enclosure "skew 3x3"``, only their rows are computed, and the others are those of the file.
"""

from __future__ import annotations

import math
import pathlib
import platform
import sys
import time

import numpy as np

import otattn as oa
from otattn.lipschitz.enclosure import published_upper
from otattn.plotting.style import COLORS, axes, save

RESULTS = pathlib.Path(__file__).parent / "results"


def unit(M: np.ndarray) -> np.ndarray:
    return M / np.linalg.norm(M, 2)


def matrices() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "I_3": np.eye(3),
        "-I_3": -np.eye(3),
        "generic 3x3": unit(rng.normal(size=(3, 3))),
        "generic 8x8": unit(rng.normal(size=(8, 8))),
        "rank 2 in 8x8": unit(rng.normal(size=(8, 2)) @ rng.normal(size=(2, 8))),
        "skew 3x3": unit(np.array([[0.0, 1.0, 0.3], [-1.0, 0.0, 0.2], [-0.3, -0.2, 0.0]])),
    }


def grid() -> list[tuple[str, str, np.ndarray, float, int | None]]:
    """The cells: name of A, name of V, V, a, n."""
    rng = np.random.default_rng(2)
    cases: list[tuple[str, str, np.ndarray, float, int | None]] = []
    for values in ("I", "random"):
        for name in ("I_3", "-I_3", "generic 3x3", "generic 8x8", "rank 2 in 8x8"):
            d = len(matrices()[name])
            V = np.eye(d) if values == "I" else unit(rng.normal(size=(d, d)))
            for a in (4.0, 25.0, 100.0):
                cases += [(name, values, V, a, n) for n in (8, 64)]
    cases += [("I_3", "I, more sizes", np.eye(3), a, n) for a in (4.0, 9.0, 25.0) for n in (4, 8, 16)]
    for name in ("I_3", "-I_3", "skew 3x3", "generic 3x3", "generic 8x8"):
        for a in (1.0, 4.0, 9.0, 25.0):
            cases.append((name, "I, any measure", np.eye(len(matrices()[name])), a, None))
    return cases


def known() -> dict[tuple[str, ...], str]:
    """The rows of the file, by their first four columns."""
    path = RESULTS / "enclosure.md"
    rows = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    cells = [[x.strip() for x in row.split("|")[1:-1]] for row in rows if row.startswith("|")]
    return {tuple(row[:4]): f"| {' | '.join(row)} |" for row in cells if len(row) == 10}


def measured(name: str, values: str, V: np.ndarray, a: float, n: int | None) -> str:
    """One row of the table."""
    attention = oa.SoftmaxAttention(matrices()[name], V)
    radius = math.sqrt(a)
    start = time.perf_counter()
    lower = oa.lipschitz_lower_bound(attention, radius=radius, n=n, rng=0)
    effort = "deep" if name == "I_3" or n is None else "fast"
    enclosure = oa.Enclosure(lower, oa.lipschitz_upper_bound(attention, radius=radius, n=n, effort=effort))
    seconds = time.perf_counter() - start
    over = published_upper(attention, radius=radius, n=n).value / enclosure.lower.value
    return (
        f"| {name} | {values} | {a:g} | {'any' if n is None else n} | {enclosure.lower.value:.5g} | "
        f"{enclosure.upper.value:.5g} | {enclosure.ratio:.3f} | {over:.3g} | {enclosure.upper.theorem} | {seconds:.1f} |"
    )


def main() -> None:
    lines = [
        "# Enclosures of the W_2 Lipschitz constant",
        "",
        f"Python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}; seeds 0 to 2; "
        "unit spectral norms, R^2 = a; effort fast, for A = I_3 and over all measures deep. `published` is the smaller of the "
        "bounds for n tokens and for any measure.",
        "",
        "| A | V | a | n | lower | upper | upper / lower | published / lower | won by | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    ratios: dict[str, list[float]] = {}
    papers: dict[str, list[float]] = {}
    only, before = sys.argv[1:], known()
    for name, values, V, a, n in grid():
        key = name, values, f"{a:g}", "any" if n is None else str(n)
        row = before[key] if only and name not in only else measured(name, values, V, a, n)
        ratio, over = (float(row.split("|")[k]) for k in (7, 8))
        ratios.setdefault(values, []).append(ratio)
        papers.setdefault(values, []).append(over)
        lines.append(row)
        print(row, flush=True)
    lines += [
        "",
        "| V | geometric mean of upper / lower | worst | published: geometric mean | worst |",
        "|---|---|---|---|---|",
    ]
    for values, r in ratios.items():
        p = papers[values]
        lines.append(
            f"| {values} | {math.exp(np.log(r).mean()):.3f} | {max(r):.3f} | {math.exp(np.log(p).mean()):.3g} | {max(p):.3g} |"
        )
        print(lines[-1])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "enclosure.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    ax = axes()
    for k, (values, color) in enumerate(zip(ratios, ("blue", "green", "sky", "orange"), strict=False)):
        x = np.arange(len(ratios[values])) + sum(len(ratios[v]) for v in list(ratios)[:k])
        ax.scatter(x, ratios[values], color=COLORS[color], s=18, label=f"ours, V = {values}")
        ax.scatter(x, papers[values], color=COLORS["red"], s=12, marker="s", label="published" if k == 0 else None)
    ax.set_yscale("log")
    ax.set_ylim(0.9, 1e6)
    ax.set_xlabel("case (see the table)")
    ax.set_ylabel("upper bound / lower bound")
    ax.legend(fontsize=8, frameon=False)
    save(ax, RESULTS / "enclosure.png")


if __name__ == "__main__":
    main()
