"""Mutation testing of the formulas: one small change at a time, and do the tests notice?

Run: ``python -m benchmarks.mutation [--seconds 3000] [--seed 0] [--only PATH] [--again]``; writes
``benchmarks/results/mutation.md``. Mutants are a random sample (numbers, signs, operators, comparisons, minimum and maximum,
square roots) of every module of ``GROUPS``, after the ones of ``KNOWN``. They live in a copy of the tree. A first run of the
tests under ``coverage`` says which tests reach which line; those are run on the mutant, the quickest first, until one fails.
``--again`` runs the survivors that are not explained once more. Why a survivor is equal to the original, or which test kills it
now, is read from ``benchmarks/results/mutation_judged.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.forked_tests import load, pytest_child
from benchmarks.mutants import Mutant, mutants

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
LOG = ROOT / "build" / "mutation.jsonl"
LIMIT = 20.0
"""Seconds of tests (as measured in the first run) that a mutant has to survive; tests beyond them are left out."""


@dataclass(frozen=True)
class Group:
    """Modules (with the number of mutants of each) and the test files or folders that cover them."""

    folder: str
    modules: dict[str, int]
    tests: tuple[str, ...]

    @classmethod
    def of(cls, folder: str, modules: str, tests: str, names: str = "") -> Group:
        words = modules.split()
        counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        return cls(folder, counts, (*tests.split(), *(f"tests/lipschitz/test_{name}.py" for name in names.split())))


@dataclass(frozen=True)
class Record:
    """What became of one mutant."""

    path: str
    line: int
    old: str
    new: str
    outcome: str
    tests: int
    code: str
    """The line of source, by which the mutant is found again when lines move."""

    @property
    def key(self) -> str:
        return f"{self.path}: {self.code} | {self.old} -> {self.new}"


GROUPS = (
    Group.of(
        "otattn/distances",
        "transport 8 duality 7 costs 6 bures 10 double_double 6 bottleneck 5",
        "tests/distances",
    ),
    Group.of(
        "otattn/stability",
        "ratio 8 enclosed 10 functions 8 images 10 transport_bounds 12 certify 8 study 0",
        "tests/stability",
    ),
    Group.of(
        "otattn",
        "attention/head 6 lipschitz/upper/multi_head 6 lipschitz/local/enclosed 5 operators/proved_norm 5 "
        "operators/norm_bounds 5",
        "tests/operators/test_norm_bounds.py tests/lipschitz/upper/test_multi_head.py",
        "mutants_of_constants mutants_of_upper_bounds local_attacked local_upper",
    ),
    Group.of(
        "otattn/lipschitz",
        "arithmetic/rounding 6 constants/quadratic 8 constants/rows 8 constants/regions 12 constants/sum_of_heads 5 containment 6 "
        "bound 4 upper/softmax 10 upper/masked 8 upper/l2 6 upper/unnormalised 5 upper/scores 4 "
        "local/at_measure 10",
        "",
        "theorems published rotary_bounds many_tokens papers containment mutants mutants_of_constants "
        "mutants_of_upper_bounds local_attacked",
    ),
    Group.of(
        "otattn/lipschitz/arithmetic",
        "intervals 8 _interval_kernels 8 balls 6",
        "",
        "intervals interval_sums interval_arrays balls mutants mutants_of_arithmetic",
    ),
    Group.of(
        "otattn/lipschitz",
        "upper/rows_and_columns 6 upper/mean_field 7 upper/psd_columns 5 upper/psd_rows 4 upper/psd 5 "
        "forms/negative_identity 6 forms/anchor_rows 6 forms/psd_mean_field 6 forms/concentration 4 forms/self_coupling 2 "
        "forms/two_tokens 6 forms/token_pairs 4 forms/frontier_rows 4 forms/vertex_rows 4 forms/own_pairs 4 forms/frontier 4 "
        "constants/field 4 constants/_field_hull 5 constants/self_logit 6 constants/column_exponent 4 "
        "constants/self_entropy 5 constants/simplex 4 constants/moved_rows 5 upper/near_tokens 5",
        "tests/lipschitz/constants tests/lipschitz/upper tests/lipschitz/forms",
        "mutants mutants_of_constants mutants_of_upper_bounds local_attacked",
    ),
)
KNOWN = (
    ("otattn/distances/transport.py", "(len(mass) + 4) * _EPS * float(mass @", "0 * _EPS * float(mass @"),
    ("otattn/stability/study.py", "RESOLUTION = 1e-12", "RESOLUTION = 1e-3"),
    ("otattn/lipschitz/constants/regions.py", "up(np.sqrt(domain.dim)) * r", "1.0 * r"),
    (
        "otattn/lipschitz/constants/regions.py",
        "c = c + self.form.A @ self._center",
        "c = c - self.form.A @ self._center",
    ),
    ("otattn/lipschitz/constants/regions.py", "up(0.5 * _pair_lengths", "up(0.25 * _pair_lengths"),
)


def chosen(base: dict[str, Any], mutant: Mutant) -> list[str]:
    """Tests that reach the mutant's statement (the module, for what is done on import), the quickest first."""
    reached = base["lines"].get(mutant.path, {})
    here = {name for k in range(mutant.first, mutant.last + 1) for name in reached.get(str(k), [])} - {""}
    if not here and any(str(k) in reached for k in range(mutant.first, mutant.last + 1)):
        here = {name for names in reached.values() for name in names} - {""}
    order = sorted(here - set(base["failed"]), key=lambda name: base["seconds"].get(name, 0.0))
    spent, out = 0.0, []
    for name in order:
        spent += base["seconds"].get(name, 0.0)
        if out and spent > LIMIT:
            break
        out.append(name)
    return out


def judge(tree: Path, mutant: Mutant, tests: list[str], limit: float) -> Record:
    """Apply a mutant, run the tests, undo it."""
    record = Record(mutant.path, mutant.line, mutant.old, mutant.new, "not covered", len(tests), mutant.code)
    if not tests:
        return record
    target = tree / mutant.path
    original = target.read_bytes()
    files = sorted({test.split("::")[0] for test in tests})
    target.write_bytes(mutant.apply(original))
    for cache in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
        cache.unlink()
    try:
        code = pytest_child(tree, files, limit, tests, [])
    finally:
        target.write_bytes(original)
        for cache in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            cache.unlink()
    # 1: a test failed, 2, 3, 4: not even collected
    outcome = "timeout" if code is None else "survived" if code == 0 else "killed"
    return replace(record, outcome=outcome)


def sample(group: Group, seed: int, only: str | None, wanted: set[str] | None) -> list[Mutant]:
    """The mutants of a group: known ones, then a random sample of each module; or those of ``wanted``."""
    first, out = [], []
    for name, count in group.modules.items():
        path = f"{group.folder}/{name}.py"
        source = (ROOT / path).read_bytes()
        if only and only not in path:
            continue
        texts = [Mutant.of_text(path, source, old, new) for where, old, new in KNOWN if where == path]
        known, found = [m for m in texts if m is not None], mutants(path, source)
        if wanted is None:
            first += known
            out += random.Random(f"{seed} {path}").sample(found, min(count, len(found)))
        else:
            out += [m for m in known + found if m.key in wanted]
    # a run that ends early has seen a part of each module
    random.Random(seed).shuffle(out)
    return first + out


def read_log() -> dict[str, Record]:
    """The latest record of every mutant."""
    rows = LOG.read_text().splitlines() if LOG.exists() else []
    records = [Record(**json.loads(row)) for row in rows]
    return {r.key: r for r in records}


def read_judged() -> dict[str, str]:
    """What was found about survivors, one line each: "equal: ..." or the test that kills it."""
    file = RESULTS / "mutation_judged.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def report(records: list[Record], seed: int) -> list[str]:
    """The lines of the result: totals of each module, then every mutant that no test noticed."""
    judged = read_judged()
    outcomes = ("killed", "timeout", "survived", "not covered")
    lines = [
        "# Mutants of the formulas",
        "",
        f"Seed {seed}; see `benchmarks/mutation.py`. Each row counts mutants.",
        "",
    ]
    lines += ["| module | mutants | " + " | ".join(outcomes) + " |", "|" + "---|" * 6]
    paths = sorted({r.path for r in records})
    for path in [*paths, "all"]:
        here = [r.outcome for r in records if path in (r.path, "all")]
        lines.append(f"| {path} | {len(here)} | " + " | ".join(str(here.count(o)) for o in outcomes) + " |")
    lines += ["", "## What no test notices", ""]
    lines += ["Not covered: no test of the first run reaches the line, or none of those that do is quick enough.", ""]
    alive = [r for r in records if r.outcome in ("survived", "not covered")]
    for r in sorted(alive, key=lambda r: (r.path, r.line)):
        lines.append(f"- {r.path}:{r.line}, `{r.old}` -> `{r.new}` ({r.outcome}): {judged.get(r.key, 'not judged')}")
    lines += ["", "## Survivors that a new test kills", ""]
    for r in records:
        if r.key in judged and r not in alive:
            lines.append(f"- {r.path}:{r.line}, `{r.old}` -> `{r.new}`: {judged[r.key]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3000.0, help="begin no mutant later than this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="PATH", help="modules whose path has this in it")
    parser.add_argument("--again", action="store_true", help="the survivors of the log without explanation, once more")
    parser.add_argument("--tests", nargs="+", metavar="FILE", help="these tests in place of those of the groups")
    parser.add_argument("--report", action="store_true", help="write the result from the log, run nothing")
    options = parser.parse_args()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    start = time.monotonic()
    log = read_log()
    wanted = None
    if options.again:
        equal = {key for key, text in read_judged().items() if text.startswith("equal")}
        wanted = {key for key, r in log.items() if r.outcome in ("survived", "not covered")} - equal
    LOG.parent.mkdir(exist_ok=True)
    work = []
    for group in () if options.report else GROUPS:
        if options.tests:
            group = replace(group, tests=tuple(options.tests))
        todo = sample(group, options.seed, options.only, wanted)
        work.append((group, todo if options.again else [m for m in todo if m.key not in log]))
    work = [(group, todo) for group, todo in work if todo]
    for k, (group, todo) in enumerate(work):
        # what is left of the time is shared by the groups that are left
        now = time.monotonic()
        run(group, todo, now + (start + options.seconds - now) / (len(work) - k), options.again)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "mutation.md").write_text("\n".join([*report(list(read_log().values()), options.seed), ""]))


def run(group: Group, todo: list[Mutant], end: float, again: bool) -> None:
    """First run, then mutant after mutant, in a new copy of the tree."""
    load()

    if not todo or time.monotonic() > end:
        return
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name).resolve()
        for part in ("otattn", "tests", "examples", "benchmarks"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for part in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / part, tree / part)
        paths = sorted({m.path for m in todo})
        files = [f for f in [*group.tests, *paths] if (tree / f).exists()]
        begun = time.monotonic()
        base = pytest_child(tree, files, 900.0, None, paths)
        if base is None:
            raise RuntimeError(f"the tests of {group.folder} must end within 900 s; give fewer of them")
        print(
            f"{group.folder}: {len(base['seconds'])} tests in {time.monotonic() - begun:.0f} s, fail: {base['failed']}"
        )
        for mutant in todo:
            if time.monotonic() > end:
                return
            tests = chosen(base, mutant)
            # collecting takes some seconds; five times what the tests took at first
            limit = 25.0 + 5.0 * sum(base["seconds"].get(test, 0.0) for test in tests)
            record = judge(tree, mutant, tests, limit)
            if not again or record.outcome in ("killed", "timeout"):
                with LOG.open("a") as out:
                    out.write(json.dumps(asdict(record)) + "\n")
            where = f"{record.path}:{record.line}"
            print(
                f"{time.monotonic() - begun:5.0f} {record.outcome:11} {where}, {record.old} -> {record.new}", flush=True
            )


if __name__ == "__main__":
    main()
