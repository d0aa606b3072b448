"""Memory and time of the fused product ``J^T J`` against the number of tokens, one head, d = k = 64, float32.

Each size runs in a process of its own, so that the peak of its resident set is that of the whole: interpreter,
libraries, tokens, weights, buffers. Beyond the memory budget the attention matrix is never stored.

    python benchmarks/local_scale.py [--sizes 1024 4096 16384 65536] [--out benchmarks/results]

``--constant N`` also computes whole local constants (precision "fast") up to N tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

D = 64


def child(n: int, constant: bool) -> None:
    """One size; prints its measurements as JSON."""
    from otattn.attention import SoftmaxAttention
    from otattn.operators import FusedJacobian, top_singular

    rng = np.random.default_rng(0)
    Q, K, V = (rng.normal(size=(D, D)) / np.sqrt(D) for _ in range(3))
    J = FusedJacobian(SoftmaxAttention.from_qkv(Q, K, V), rng.normal(size=(n, D)), dtype=np.float32)
    x = rng.normal(size=(n, D)).astype(np.float32)
    out: dict[str, float] = {"n": n}
    start = time.perf_counter()
    J.prepare()
    out["prepare"] = time.perf_counter() - start
    repeats = 3 if n <= 8192 else 1
    times, cpu = [], []
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        J.gram(x)
        times.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    out["product"], out["cpu"] = min(times), min(cpu)
    out["stored"] = float(J.stored)
    out["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if constant:
        start = time.perf_counter()
        result = top_singular(J)
        out["constant"], out["iterations"] = time.perf_counter() - start, result.iterations
        out["value"] = result.value
        out["constant_peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(out))


def table(rows: list[dict[str, float]]) -> list[str]:
    lines = [
        "| n | J^T J | CPU | growth per 4x | GF/s (CPU) | attention matrix | peak memory | whole constant (fast) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for i, r in enumerate(rows):
        flops = (16 if r["stored"] else 18) * D * r["n"] ** 2
        growth = "" if i == 0 else f"{r['product'] / rows[i - 1]['product']:.1f}x"
        whole = "-"
        if "constant" in r:
            whole = (
                f"{r['value']:.6g} in {r['constant']:.3g} s, {r['iterations']:.0f} products, "
                f"{r['constant_peak'] / 2**20:.0f} MB"
            )
        lines.append(
            f"| {r['n']:.0f} | {r['product']:.3g} s | {r['cpu']:.3g} s | {growth} | {flops / r['cpu'] / 1e9:.0f} | "
            f"{'stored' if r['stored'] else 'recomputed'} | {r['peak'] / 2**20:.0f} MB | {whole} |"
        )
    return lines


def picture(rows: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n = np.array([r["n"] for r in rows])
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.6))
    left.loglog(n, [r["product"] for r in rows], "o-", label="J^T J")
    left.loglog(n, rows[-1]["product"] * (n / n[-1]) ** 2, "--", color="0.6", label="n^2")
    left.set(xlabel="tokens n", ylabel="seconds")
    left.legend()
    right.loglog(n, [r["peak"] / 2**20 for r in rows], "o-", label="peak memory of the process")
    right.loglog(n, 4 * n**2 / 2**20, "--", color="0.6", label="one n x n float32 matrix")
    right.set(xlabel="tokens n", ylabel="MB")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--constant", type=int, default=4096, help="largest n for a whole constant")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.child <= args.constant)
        return
    rows = []
    for n in args.sizes:
        command = [sys.executable, __file__, "--child", str(n), "--constant", str(args.constant)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(answer.stdout))
        print(rows[-1], flush=True)
    head = [
        "# One head against the number of tokens",
        "",
        "Written by `python benchmarks/local_scale.py`; its docstring says what is measured.",
        "",
        f"- {platform.processor() or platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}, "
        f"numpy {np.__version__}; seed 0",
        "",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "local_scale.md").write_text("\n".join([*head, *table(rows), ""]))
    picture(rows, args.out / "local_scale.png")


if __name__ == "__main__":
    main()
