"""Damaged ``.npz``, ``.npy`` and JSON files given to the command line; a table of what came out.

Run: ``python -m benchmarks.fuzz_arrays [--files 10000]``; writes ``benchmarks/results/fuzz_arrays.md``. Right is one line
that says what is wrong, or the numbers that the arrays have; a traceback, another number, a warning, more than 10 s or
a peak memory of more than 1 GB is a fault and is listed.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import resource
import sys
import tempfile
import time
import warnings

from tqdm import tqdm

RESULTS = pathlib.Path(__file__).parent / "results"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

LONGEST = 10.0
PEAK = 10**9


def peak() -> int:
    """Most bytes that the process has held so far."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else 1024 * size


def main(count: int = 10_000, seed: int = 0) -> int:
    """Feed ``count`` pairs of files from ``seed`` on; returns the number of faults."""
    from array_files import one_file

    kinds: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    faults, longest, start = [], {"report": 0.0, "other": 0.0}, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in tqdm(range(seed, seed + count), desc="files"):
            for outcome in one_file(k, pathlib.Path(folder)):
                kinds[outcome.mutation][outcome.kind] += 1
                refused = outcome.kind == "refused"
                group = "report" if outcome.command in ("report", "bounds") and not refused else "other"
                longest[group] = max(longest[group], outcome.seconds)
                if outcome.kind == "fault" or (group == "other" and outcome.seconds > LONGEST):
                    faults.append(f"seed {k}, {outcome.command}, {outcome.mutation}: {outcome.text[:300]}")
    if peak() > PEAK:
        faults.append(f"peak memory {peak() / 1e6:.0f} MB")
    lines = [
        "# Damaged files of arrays",
        "",
        f"{count} pairs of files (weights and tokens), seeds {seed} to {seed + count - 1}, through the command line; "
        f"{time.perf_counter() - start:.0f} s, peak memory {peak() / 1e6:.0f} MB, longest call {longest['other']:.1f} s "
        f"({longest['report']:.1f} s for bounds and reports of files that are whole); {len(faults)} faults.",
        "",
        "| what was done | right numbers | refused in one line | faults |",
        "|---|---|---|---|",
        *(f"| {name} | {c['value']} | {c['refused']} | {c['fault']} |" for name, c in sorted(kinds.items())),
        "",
        *(f"- {fault}" for fault in faults),
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fuzz_arrays.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(lines[2])
    return len(faults)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(min(main(options.files, options.seed), 1))
