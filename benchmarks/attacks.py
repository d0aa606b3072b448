"""Attacks on every public function that proves or certifies a number; what was tried, what held, what was exceeded.

Run: ``python -m benchmarks.attacks [--seconds 600] [--seed 1] [--only NAME ...]``; writes ``benchmarks/results/attacks.md``.
Each attack draws an attention map, a domain, a number of tokens and an order, asks the function for its bound, and looks for
configurations that exceed it, with definitions of its own; what is suspected is settled in 100 digits, without a tolerance. Every
function gets the same time. Exit code 1 when something was exceeded.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import sys
import time

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
import numpy as np

from benchmarks.common import RESULTS, machine, table

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "attacks"))

SHOWN = 3
"""Violations of one function that are printed and kept."""


def main() -> int:
    from outcomes import Outcome
    from registry import ATTACKERS, VARIANTS

    everything = ATTACKERS | VARIANTS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=sorted(everything), metavar="NAME")
    options = parser.parse_args()
    # the same attack may stand for several functions
    names = {attack: name for name, attack in reversed(everything.items()) if not options.only or name in options.only}
    found: dict[str, list[Outcome]] = collections.defaultdict(list)
    spent = dict.fromkeys(names.values(), 0.0)
    rngs = {name: np.random.default_rng([options.seed, k]) for k, name in enumerate(sorted(names.values()))}
    start = time.perf_counter()
    while time.perf_counter() - start < options.seconds:
        name = min(spent, key=lambda key: spent[key])
        begun = time.perf_counter()
        outcome = everything[name](rngs[name])
        spent[name] += time.perf_counter() - begun
        if outcome.state == "violated" and sum(o.state == "violated" for o in found[name]) < SHOWN:
            print("VIOLATION", outcome.report, flush=True)
        found[name].append(outcome)
    lines = report(found, options.seconds, options.seed)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "attacks.md").write_text("\n".join(lines), encoding="utf-8")
    violations = [o for outcomes in found.values() for o in outcomes if o.state == "violated"]
    tried = sum(o.tried for outcomes in found.values() for o in outcomes)
    print(f"seed {options.seed}: tried {tried} configurations, violations {len(violations)}")
    return int(bool(violations))


def report(found, seconds: float, seed: int) -> list[str]:
    """Counts by function and by kind of map, and the violations."""
    rows, kinds = [], collections.Counter()
    for name in sorted(found):
        states = collections.Counter(o.state for o in found[name])
        share = max((o.share for o in found[name] if o.state == "held"), default=0.0)
        tried = sum(o.tried for o in found[name])
        rows.append((name, states["held"], states["refused"], states["violated"], tried, f"{share:.9g}"))
    for outcomes in found.values():
        for o in outcomes:
            kinds[o.kind, o.state] += 1
    words = sorted({kind for kind, _ in kinds})
    by_kind = [(kind, *(kinds[kind, state] for state in ("held", "refused", "violated"))) for kind in words]
    reports = []
    for outcomes in found.values():
        reports += [f"- `{o.report}`" for o in outcomes if o.state == "violated"][:SHOWN]
    total = sum(row[4] for row in rows)
    return [
        "# Attacks on what is proven",
        "",
        f"{total} configurations against {sum(row[1] + row[3] for row in rows)} answers of {len(rows)} attacks; "
        f"{sum(row[3] for row in rows)} exceeded.",
        "",
        *machine("mpmath", seeds=f"{seed}; {seconds:.0f} s"),
        *table(
            ["function", "held", "refused", "exceeded", "configurations", "largest share of the bound in float64"], rows
        ),
        *table(["kind", "held", "refused", "exceeded"], by_kind),
        *reports,
    ]


if __name__ == "__main__":
    sys.exit(main())
