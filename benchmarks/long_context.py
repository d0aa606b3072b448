"""Exact local constants of one head on long contexts: time and memory against the number of tokens.

    python -m benchmarks.long_context [--sizes 4096 8192 16384 32768 65536] [--out benchmarks/results]

The call is ``local_lipschitz(head, tokens, tol=2e-5)`` and then ``.splitting``: both parts, the particle part iterated in float32
with its residual evaluated in float64. Weights are never kept beyond the memory budget: blocks of rows are computed again in each
product. The head is the first one of the bundled layer (k = 32), in an orthonormal basis of what it sees (96 dimensions), which leaves
its constants as they are. Tokens are synthetic: those of the bundled windows drawn with replacement, each moved by a Gaussian of a
fifth of their deviation.

Above 32,768 tokens one product ``J^T J x`` in float32 is measured and no constant.

Each size runs in a process of its own, whose peak resident set is that of everything: interpreter, libraries, tokens, buffers.
Numbers for 131,072 tokens are extrapolated: time by the exponent of a product between the two largest whole constants, memory by the
line through them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.common import RESULTS, exponent, machine, panels, table, write
from otattn.attention import AttentionMap
from otattn.data import load_sample
from otattn.lipschitz import local_lipschitz
from otattn.operators import FusedJacobian
from otattn.stability.heads import in_span

LARGEST, FAR = 32_768, 131_072
TOL = 2e-5
JITTER = 0.2


def problem(n: int) -> tuple[AttentionMap, np.ndarray]:
    """The head and n tokens, in the span that it sees."""
    sample, rng = load_sample(), np.random.default_rng(0)
    known = np.concatenate([sample.tokens(w) for w in range(len(sample.token_ids))])
    head, Z = in_span(sample.heads[0], known)
    return head, Z[rng.integers(len(Z), size=n)] + JITTER * Z.std(axis=0) * rng.normal(size=(n, Z.shape[1]))


def child(n: int) -> None:
    """One size; prints its measurements as JSON."""
    head, tokens = problem(n)
    clocks = [(time.perf_counter(), time.process_time())]

    def clock() -> None:
        clocks.append((time.perf_counter(), time.process_time()))

    if n > LARGEST:
        J = FusedJacobian(head, tokens, dtype=np.float32)
        J.prepare()
        clock()
        J.gram(tokens.astype(np.float32))
        clock()
        wall, cpu = np.subtract(clocks[2], clocks[1])
        print(json.dumps({"n": n, "products": 1, "wall": wall, "cpu": cpu, "peak": peak()}))
        return
    local = local_lipschitz(head, tokens, tol=TOL)
    clock()
    splitting = local.splitting
    clock()
    (wall, cpu), (_, split) = (np.subtract(b, a) for a, b in pairwise(clocks))
    found = {
        "n": n,
        "value": local.value,
        "particle": local.particle,
        "splitting": splitting,
        "residual": local.residual,
    }
    found |= {"products": local.iterations, "wall": wall, "cpu": cpu, "split": split}
    print(json.dumps(found | {"peak": peak()}))


def peak() -> float:
    """MB of the process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def extrapolated(rows: list[dict[str, float]]) -> list[str]:
    """What the two largest sizes with a whole constant say of 131,072 tokens."""
    a, b = rows[-2], rows[-1]
    each = [r["cpu"] / r["products"] for r in (a, b)]
    order = exponent([a["n"], b["n"]], each)
    products = max(r["products"] for r in rows)
    hours = products * each[1] * (FAR / b["n"]) ** order / 3600
    memory = b["peak"] + (b["peak"] - a["peak"]) / (b["n"] - a["n"]) * (FAR - b["n"])
    return [
        f"Growth of the CPU time of a product between the two largest sizes: n^{order:.2f}. Extrapolated to {FAR:,} tokens, with "
        f"{products:.0f} products: {hours:.1f} CPU hours, {memory:.0f} MB at the peak. Neither was measured.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    rows: list[dict[str, float]] = []
    for n in args.sizes:
        command = [sys.executable, "-m", "benchmarks.long_context", "--child", str(n)]
        root = Path(__file__).parents[1]
        answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, env={**os.environ})
        rows.append(json.loads(answer.stdout))
        print(rows[-1], flush=True)
        report(rows, args.out)


def report(rows: list[dict[str, float]], out: Path) -> None:
    """What has been measured so far (an interrupted run keeps its finished sizes)."""
    lines = [
        "# Long contexts",
        "",
        "Written by `python -m benchmarks.long_context`, whose docstring says what is measured.",
        "",
    ]
    lines += machine(seeds="0")
    header = [
        "n",
        "particle",
        "splitting",
        "residual (float64)",
        "products",
        "whole call",
        "CPU",
        "CPU of a product",
        "then splitting, CPU",
        "peak memory",
    ]
    cells = [
        [f"{r['n']:,.0f}"]
        + ([f"{r['particle']:.6g}", f"{r['splitting']:.6g}", f"{r['residual']:.1e}"] if "particle" in r else 3 * ["-"])
        + [f"{r['products']:.0f}", f"{r['wall']:.3g} s", f"{r['cpu']:.3g} s", f"{r['cpu'] / r['products']:.3g} s"]
        + [f"{r['split']:.3g} s" if "split" in r else "-", f"{r['peak']:.0f} MB"]
        for r in rows
    ]
    lines += table(header, cells)
    whole = [r for r in rows if "particle" in r]
    if len(whole) > 1:
        lines += extrapolated(whole)
    left, right = panels(2)
    n = [r["n"] for r in rows]
    left.loglog([r["n"] for r in whole], [r["cpu"] for r in whole], "o-", label="whole call, CPU")
    left.loglog([r["n"] for r in whole], [r["split"] for r in whole], "s-", label="then splitting, CPU")
    left.loglog(n, [r["cpu"] / r["products"] for r in rows], "^-", label="one product, CPU")
    left.set(xlabel="tokens n", ylabel="seconds")
    right.loglog(n, [r["peak"] for r in rows], "o-", label="peak of the process")
    right.loglog(n, [4 * m**2 / 2**20 for m in n], "--", color="0.6", label="one n x n float32 matrix")
    right.set(xlabel="tokens n", ylabel="MB")
    for ax in (left, right):
        ax.legend(fontsize=7)
    write("long_context", lines, out, left)


if __name__ == "__main__":
    main()
