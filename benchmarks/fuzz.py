"""Random calls of every public function with good, extreme and wrong arguments; a table of what came out.

Run: ``python -m benchmarks.fuzz [--calls 50000]``; writes ``benchmarks/results/fuzz.md``. A value or a named error with a
message counts as right; another exception, a warning, a nan or a call of more than 60 s is a fault and is listed.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys
import time

from tqdm import tqdm

RESULTS = pathlib.Path(__file__).parent / "results"
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))


def main() -> None:
    from fuzz_calls import one_call

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=100_000, help="first seed")
    options = parser.parse_args()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    faults = []
    start = time.perf_counter()
    for seed in tqdm(range(options.first, options.first + options.calls), desc="calls"):
        try:
            name, outcome = one_call(seed)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            faults.append(f"seed {seed}: {type(exc).__name__}: {exc}")
            print(faults[-1], flush=True)
            continue
        counts[name][outcome] += 1
    kinds = sorted({kind for c in counts.values() for kind in c} - {"value"})
    lines = [
        "# Fuzzed calls",
        "",
        f"{options.calls} calls, seeds {options.first} to {options.first + options.calls - 1}, "
        f"{time.perf_counter() - start:.0f} s; {len(faults)} faults.",
        "",
        "| function | value | " + " | ".join(kinds) + " |",
        "|" + "---|" * (2 + len(kinds)),
        *(
            f"| {name} | {c['value']} | " + " | ".join(str(c[kind]) for kind in kinds) + " |"
            for name, c in sorted(counts.items())
        ),
        "",
        *(f"- {fault}" for fault in faults),
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fuzz.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[:4]))


if __name__ == "__main__":
    main()
