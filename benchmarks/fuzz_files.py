"""Thousands of mutated files of every format: a named error or a right value, bounded memory and time.

Run: ``python -m benchmarks.fuzz_files [--files 20000] [--first 0] [--formats ...]``; writes ``benchmarks/results/fuzz_files.md``.
The files are read in a process of their own. Faults are: another exception, a warning, a message that does not name the file,
another value than an independent reading of the same bytes gives, a crash, more than 10 s, more than 1 GB.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import multiprocessing
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.common import RESULTS, machine, table

TESTS = Path(__file__).parents[1] / "tests"
MODULES = ("models/fuzz_checkpoints", "models/fuzz_tokenizers", "data/fuzz_arrays")
"""Modules of the tests that add their formats to file_fuzz.FORMATS; one that is not there is left out."""
SECONDS, MEGABYTES = 10.0, 1000.0


def formats() -> dict[str, Any]:
    """All formats by name."""
    sys.path[:0] = [str(TESTS / "models"), str(TESTS / "data")]
    for name in MODULES:
        if (TESTS / f"{name}.py").is_file():
            importlib.import_module(name.rpartition("/")[2])
    return importlib.import_module("file_fuzz").FORMATS


def work(pipe: Connection) -> None:
    """Reads files as it is told: a seed and the name of a format in, an outcome and the memory so far out."""
    formats()
    fuzz = importlib.import_module("file_fuzz")
    with fuzz.quiet():
        while True:
            try:
                name, seed = pipe.recv()
            except (EOFError, OSError):  # the parent has ended
                return
            start = time.perf_counter()
            try:
                outcome = fuzz.one_file(name, seed)
            except fuzz.Fault as exc:
                outcome = f"FAULT {exc}"
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            pipe.send((outcome, time.perf_counter() - start, used))


class Worker:
    """A process that is started anew when it hangs or dies."""

    def __init__(self) -> None:
        self.context = multiprocessing.get_context("spawn")
        self.start()

    def start(self) -> None:
        self.pipe, inner = self.context.Pipe()
        self.process = self.context.Process(target=work, args=(inner,), daemon=True)
        self.process.start()
        inner.close()
        self.fresh = True

    def ask(self, name: str, seed: int) -> tuple[str, float, float]:
        try:
            self.pipe.send((name, seed))
            # a fresh process imports everything first
            if self.pipe.poll(SECONDS + 60.0 * self.fresh):
                self.fresh = False
                return self.pipe.recv()
            what = f"FAULT {name} {seed}: more than {SECONDS:g} s"
        except (EOFError, OSError):
            what = f"FAULT {name} {seed}: the process died ({self.process.exitcode})"
        self.process.kill()
        self.process.join()
        self.start()
        return what, SECONDS, 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--formats", nargs="+", help="some of them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    names = options.formats or sorted(formats())
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    slowest: dict[str, float] = collections.defaultdict(float)
    faults, most = [], 0.0
    worker, start = Worker(), time.perf_counter()
    for number in tqdm(range(options.files), desc="files"):
        name, seed = names[number % len(names)], options.first + number // len(names)
        outcome, seconds, used = worker.ask(name, seed)
        slowest[name], most = max(slowest[name], seconds), max(most, used)
        if not outcome.startswith("FAULT") and seconds > SECONDS:
            outcome = f"FAULT {name} {seed}: {seconds:.1f} s"
        counts[name][outcome.partition(" ")[0]] += 1
        if outcome.startswith("FAULT"):
            faults.append(outcome[6:])
            print(faults[-1], flush=True)
    worker.process.kill()
    if most > MEGABYTES:
        faults.append(f"the reading process took {most:.0f} MB at its peak")
    kinds = sorted({kind for c in counts.values() for kind in c} - {"value", "FAULT"})
    rows = [
        [name, sum(c.values()), c["value"], *(c[kind] for kind in kinds), c["FAULT"], f"{slowest[name]:.2f}"]
        for name, c in sorted(counts.items())
    ]
    lines = [
        "# Mutated files",
        "",
        f"{options.files} files, seeds from {options.first}, {time.perf_counter() - start:.0f} s; {len(faults)} faults. The "
        f"process that reads them, libraries and independent readings included, took {most:.0f} MB at its peak.",
        "",
        *table(("format", "files", "right value", *kinds, "faults", "slowest, s"), rows),
        *(f"- {fault}" for fault in faults),
        *machine("safetensors", "tokenizers", "gguf", seeds=f"{options.first} on"),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "fuzz_files.md").write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")
    print("\n".join(lines))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
