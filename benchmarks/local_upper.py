"""The local constant from above: what a proof and a probability cost, how far above the value they are, how often they fail.

    python benchmarks/local_upper.py [--rounds 3] [--quick]

Three tables: the singular value by our Lanczos against ARPACK (``scipy.sparse.linalg.eigsh``) on the same fused product; the
upper side for heads and layers of growing size; the rate at which bounds of a large failure probability fail on operators made
against them. CPU seconds and ratios within a run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import RESULTS, machine
from otattn import local_lipschitz
from otattn.attention import MultiHeadAttention, SoftmaxAttention
from otattn.data import load_sample
from otattn.operators import FusedJacobian, spectral_norm_bounds, top_singular

Layer = tuple[str, Any, np.ndarray]


def layers(*, quick: bool) -> list[Layer]:
    """A trained layer, and layers of Gaussian weights (d = 768, 12 heads)."""
    sample = load_sample()
    out: list[Layer] = [("MiniLM layer, n = 128", sample.attention, sample.tokens(0))]
    for n in () if quick else (64, 256):
        rng = np.random.default_rng(0)
        d, heads = 768, 12
        k = d // heads
        parts = [SoftmaxAttention.from_qkv(*(0.05 * rng.normal(size=(k, d)) for _ in range(3))) for _ in range(heads)]
        outputs = [0.05 * rng.normal(size=(d, k)) for _ in range(heads)]
        X = np.sqrt(0.5) * rng.normal(size=d) + np.sqrt(0.5) * rng.normal(size=(n, d))
        out.append((f"Gaussian layer, n = {n}", MultiHeadAttention(parts, outputs), 0.7 * X))
    return out


def arpack(attention: Any, X: np.ndarray, dtype: Any, tol: float) -> tuple[float, int]:
    """ARPACK on the fused product; the value is evaluated in float64, as ours is."""
    J, count = FusedJacobian(attention, X, dtype=dtype), 0

    def product(x: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        return J.scaled_gram(x).reshape(-1)

    size = J.shape[1]
    start = np.random.default_rng(0).standard_normal(size).astype(dtype)
    operator = LinearOperator((size, size), matvec=product, dtype=J.dtype)
    right = eigsh(operator, k=1, v0=start, tol=tol)[1][:, 0].astype(np.float64)
    return float(np.linalg.norm(FusedJacobian(attention, X).matvec(right / np.linalg.norm(right)))), count


def ours(attention: Any, X: np.ndarray, precision: Any) -> tuple[float, int]:
    top = top_singular(FusedJacobian(attention, X), precision=precision)
    return top.value, top.iterations


def bounds(attention: Any, X: np.ndarray) -> tuple[float, float]:
    found = spectral_norm_bounds(FusedJacobian(attention, X))
    return found.upper, found.upper / found.lower - 1.0


def lanczos_table(rounds: int, *, quick: bool) -> list[str]:
    """CPU seconds over those of ours, fast, in the same round."""
    lines = ["| layer | method | products | relative error | CPU, ratio to ours fast |", "|---|---|---|---|---|"]
    for name, attention, X in layers(quick=quick):
        methods: dict[str, Callable[[Any, np.ndarray], tuple[float, float]]] = {
            "ours, fast (2e-5)": lambda a, x: ours(a, x, "fast"),
            "eigsh, float32, 2e-5": lambda a, x: arpack(a, x, np.float32, 4e-5),
            "ours, precise (1e-9)": lambda a, x: ours(a, x, "precise"),
            "eigsh, float64, 1e-9": lambda a, x: arpack(a, x, np.float64, 2e-9),
            "both sides, 1e-6, failure 1e-9": bounds,
        }
        truth = top_singular(FusedJacobian(attention, X), tol=1e-12).value
        seconds: dict[str, list[float]] = {m: [] for m in methods}
        found = {}
        for _ in range(rounds):
            for m, run in methods.items():
                start = time.process_time()
                found[m] = run(attention, X)
                seconds[m].append(time.process_time() - start)
        base = seconds["ours, fast (2e-5)"]
        for m in methods:
            ratio = statistics.median(a / b for a, b in zip(seconds[m], base, strict=True))
            products = f"{found[m][1]}" if isinstance(found[m][1], int) else "two runs"
            lines.append(f"| {name} | {m} | {products} | {abs(found[m][0] / truth - 1):.0e} | {ratio:.2f} |")
    return [*lines, ""]


def upper_table(*, quick: bool) -> list[str]:
    """One head with Gaussian weights."""
    lines = ["| n, d | kind | upper / value - 1 | CPU of the value | CPU of the bound |", "|---|---|---|---|---|"]
    sizes = (
        [(16, 8), (64, 16), (128, 16)] if quick else [(16, 8), (64, 16), (128, 16), (2048, 1), (256, 16), (1024, 64)]
    )
    for n, d in sizes:
        rng = np.random.default_rng(0)
        attention = SoftmaxAttention(rng.normal(size=(d, d)) / d, rng.normal(size=(d, d)))
        start = time.process_time()
        local = local_lipschitz(attention, rng.normal(size=(n, d)))
        middle = time.process_time()
        excess, kind = local.upper / local.value - 1.0, local.upper_kind
        end = time.process_time()
        lines.append(f"| {n}, {d} | {kind} | {excess:.1e} | {middle - start:.2g} s | {end - middle:.2g} s |")
    return [*lines, ""]


def failure_table(runs: int) -> list[str]:
    """One value of 1.5 above 1, 1, ..., and one step: then the bound fails exactly where the start allows it to."""
    lines = ["| stated failure | steps | failed | of |", "|---|---|---|---|"]
    w = np.r_[1.5, np.ones(1999)]
    operator = LinearOperator((2000, 2000), matvec=lambda x: w * x, rmatvec=lambda x: w * x, dtype=np.dtype(float))
    for failure in (0.3, 0.1, 0.01):
        for steps in (1, 2):
            found = [spectral_norm_bounds(operator, failure=failure, max_iter=steps, rng=s).upper for s in range(runs)]
            lines.append(f"| {failure:g} | {steps} | {sum(u < 1.5 for u in found)} | {runs} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    text = [
        "# The local constant from above",
        "",
        "Written by `python benchmarks/local_upper.py`, whose docstring says what is measured.",
        "",
        "## The singular value: our Lanczos and ARPACK on the same fused product",
        "",
        *lanczos_table(args.rounds, quick=args.quick),
        "## The upper side of one head",
        "",
        *upper_table(quick=args.quick),
        "## Failures, of operators made against the bound",
        "",
        *failure_table(300 if args.quick else 3000),
        *machine(seeds="layers, tokens and starts 0; failures 0, 1, ..."),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "local_upper.md").write_text("\n".join(text))
    print("\n".join(text))


if __name__ == "__main__":
    main()
