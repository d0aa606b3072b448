"""The fused product ``J^T J x`` against the rate of matrix products on the same core: operations, bytes, share of the floor.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.roofline [--quick] [--out benchmarks/results]

The layer has Gaussian weights, d = 768 and 12 heads (k = e = 64), one thread, the attention matrix kept. A product takes ``16 k n^2``
operations a head in seven matrix products with the n x n tiles, and ``4 (2k + e) n d`` in its projections; that is what is counted.
What comes on top is not: two products entry by entry and a row sum for each tile. The bytes are those of the attention matrices, read
once in the product, and of the stacked weights, read twice: what has to come from memory when the tiles are worked on in the cache.

"GEMM" is the rate of one square product of order 1024. "its own shapes" is the time of the seven products and the projections alone,
at the tiles' shapes and in the same order, without anything between them: what remains above it is entry by entry. Times are
processor times; the rounds of all are interleaved, the medians of the rounds' ratios are given.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.common import arguments, machine, table, write
from benchmarks.local import synthetic
from otattn.operators import FusedJacobian
from otattn.operators.streaming import Tiling
from otattn.operators.threads import single_blas_thread

ORDER = 1024
Array = np.ndarray[Any, Any]


def operations(n: int, d: int, heads: int, k: int) -> float:
    """Of one product, with as wide values as keys."""
    return heads * (16.0 * k * n * n + 12.0 * k * n * d)


def bytes_moved(n: int, d: int, heads: int, k: int, itemsize: int) -> float:
    """Attention matrices once, weights twice."""
    return itemsize * heads * (n * n + 2.0 * 3 * k * d)


def its_shapes(n: int, d: int, heads: int, k: int, dtype: Any) -> Callable[[], None]:
    """The matrix products of one fused product and nothing else."""
    rng = np.random.default_rng(0)

    def some(*shape: int) -> Array:
        return rng.normal(size=shape).astype(dtype)

    tiling, W, x = Tiling(n, np.dtype(dtype).itemsize), some(3 * k * heads, d), some(n, d)
    left, right, V, dV, O = some(n, 2 * k), some(n, 2 * k), some(n, k + 1), some(n, k), np.zeros((n, k), dtype)
    E = [[some(len(p), b - a) for a, b in p.tiles] for p in tiling.panels]
    T = np.empty(tiling.rows * tiling.columns, dtype)

    def run() -> None:
        Y = x @ W.T
        for _ in range(heads):
            for panel, row in zip(tiling.panels, E, strict=True):
                rows = slice(panel.start, panel.stop)
                for (a, b), tile in zip(panel.tiles, row, strict=True):
                    t = T[: tile.size].reshape(tile.shape)
                    np.matmul(left[rows], right[a:b].T, out=t)
                    t @ V[a:b, :k]
                    tile @ dV[a:b]
                    np.matmul(V[rows], V[a:b].T, out=t)
                    t @ right[a:b, :k]
                    t.T @ left[rows, k:]
                    tile.T @ O[rows]
        Y @ W

    return run


def measure(n: int, dtype: Any, rounds: int) -> list[str]:
    """One row of the table."""
    problem = synthetic(n)
    d, heads, k = problem.tokens.shape[1], len(problem.attention.heads), problem.tokens.shape[1] // 12
    J = FusedJacobian(problem.attention, problem.tokens, dtype=dtype, workers=1, memory=2**31).prepare()
    rng = np.random.default_rng(1)
    x = rng.normal(size=(n, d)).astype(dtype)
    A, B = rng.normal(size=(2, ORDER, ORDER)).astype(dtype)
    methods = {"ours": lambda: J.scaled_gram(x), "gemm": lambda: A @ B, "shapes": its_shapes(n, d, heads, k, dtype)}
    times: dict[str, list[float]] = {name: [] for name in methods}
    with single_blas_thread():
        for run in methods.values():
            run()
        for _ in range(rounds):
            for name, run in methods.items():
                begun = time.process_time()
                run()
                times[name].append(time.process_time() - begun)
    work = operations(n, d, heads, k)
    peak = [2.0 * ORDER**3 / t for t in times["gemm"]]
    share = statistics.median(work / t / p for t, p in zip(times["ours"], peak, strict=True))
    own = statistics.median(a / b for a, b in zip(times["shapes"], times["ours"], strict=True))
    return [
        f"{n:,}",
        np.dtype(dtype).name,
        f"{work / 1e9:.3g}",
        f"{bytes_moved(n, d, heads, k, np.dtype(dtype).itemsize) / 2**20:.3g}",
        f"{statistics.median(times['ours']):.3g} s",
        f"{work / statistics.median(times['ours']) / 1e9:.3g}",
        f"{statistics.median(peak) / 1e9:.3g}",
        f"{100 * share:.0f} %",
        f"{100 * own:.0f} %",
    ]


def main() -> None:
    options = arguments(__doc__)
    start = time.perf_counter()
    sizes = (256, 1024) if options.quick else (128, 256, 512, 1024, 2048)
    rows = [measure(n, dtype, 5 if options.quick else 9) for dtype in (np.float32, np.float64) for n in sizes]
    lines = ["# The fused product against matrix products", ""]
    lines += ["Written by `python -m benchmarks.roofline`, whose docstring says what is counted.", ""]
    lines += machine(seeds="weights and tokens 0, direction 1")
    header = ["n", "numbers", "Gflop", "MB", "CPU time", "Gflop/s", "GEMM Gflop/s", "share of GEMM", "its own shapes"]
    lines += table(header, rows)
    lines += [f"{time.perf_counter() - start:.0f} s."]
    write("roofline", lines, options.out)


if __name__ == "__main__":
    main()
