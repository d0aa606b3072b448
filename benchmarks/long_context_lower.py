"""A lower value of the local constant of one head on a long context, from a sample of its tokens, beside the exact value.

    python -m benchmarks.long_context_lower [--sizes 4096 8192] [--seeds 5] [--sample 512] [--out benchmarks/results]

The problem is that of ``benchmarks.long_context``. The top singular pair of the Jacobian at a random sample of the tokens is found
first; its right vector moves the keys and values of the sample, and to this every token of the context answers through its
attention to the sample: a guess ``u`` of the left vector at all tokens. Then ``|J^T u| / |u|`` is never above the particle part of
the local constant, whatever u is; it is evaluated with the whole Jacobian in float64, in one product with ``J^T``. Only that product
goes over all pairs of tokens. The spread over seeds is that of the value as a random variable; each of the values is a lower value.

The exact value is ``local_lipschitz(head, tokens, tol=2e-5)`` in the same process, in the same round. Ratios are of processor time.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, machine, panels, table, write
from benchmarks.long_context import TOL, problem
from otattn.attention import AttentionMap
from otattn.lipschitz import local_lipschitz
from otattn.operators import FusedJacobian, top_singular

ROWS = 1024


def sampled_lower(head: AttentionMap, tokens: np.ndarray, sample: int, seed: int) -> float:
    """``|J^T u| / |u|`` with u from a sample of the tokens; up to rounding a lower value of ``|J|``."""
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(len(tokens), sample, replace=False))
    moved = top_singular(FusedJacobian(head, tokens[chosen]), rng=rng).right
    u = answers(head, tokens, chosen, moved)
    return float(np.linalg.norm(FusedJacobian(head, tokens).vjp(u)) / np.linalg.norm(u))


def answers(head: Any, tokens: np.ndarray, chosen: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """How the value at each token moves with the keys and values of a sample, under the attention to the sample alone."""
    maps, keys = head.projections(), tokens[chosen]
    K, V, dK, dV = keys @ maps.Wk.T, keys @ maps.V.T, moved @ maps.Wk.T, moved @ maps.V.T
    out = np.empty((len(tokens), len(maps.V)))
    for start in range(0, len(tokens), ROWS):
        rows = slice(start, start + ROWS)
        Q = tokens[rows] @ maps.Wq.T + (0.0 if maps.bq is None else maps.bq)
        P = Q @ K.T
        P = np.exp(P - P.max(axis=1, keepdims=True))
        P /= P.sum(axis=1, keepdims=True)
        T = P * (Q @ dK.T)
        out[rows] = T @ V + P @ dV - T.sum(axis=1, keepdims=True) * (P @ V)
    return out


def timed(call: Any) -> tuple[Any, float]:
    """What a call gives, and its processor time."""
    begun = time.process_time()
    return call(), time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[4096, 8192])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sample", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    cells, drawn = [], []
    for n in args.sizes:
        head, tokens = problem(n)
        local, exact = timed(lambda: local_lipschitz(head, tokens, tol=TOL))  # noqa: B023
        runs = [timed(lambda: sampled_lower(head, tokens, args.sample, seed)) for seed in range(args.seeds)]  # noqa: B023
        values, times = np.array(runs).T
        if (values > local.particle * (1.0 + TOL)).any():
            raise AssertionError(f"a lower value above the exact one: {values.max()} > {local.particle}")
        spread = values.std(ddof=1)
        cells.append(
            [f"{n:,}", f"{local.particle:.5f}", f"{values.mean():.5f} +- {spread:.1e}", f"{values.min():.5f}"]
            + [f"{1.0 - values.mean() / local.particle:.1e}", f"{exact:.3g} s", f"{np.median(times):.3g} s"]
            + [f"{np.median(times) / exact:.3f}"]
        )
        drawn.append((n, values / local.particle))
        print(cells[-1], flush=True)
    lines = [
        "# Lower values on long contexts",
        "",
        "Written by `python -m benchmarks.long_context_lower`, whose docstring says what is measured.",
        "",
        *machine(seeds=f"0 to {args.seeds - 1}, samples of {args.sample} tokens"),
    ]
    header = ["n", "exact", "lower: mean +- deviation over seeds", "least", "relative gap of the mean"]
    lines += table([*header, "exact, CPU", "lower, CPU (median)", "ratio"], cells)
    (ax,) = panels(1)
    for n, ratios in drawn:
        ax.semilogx([n] * len(ratios), ratios, "o", color="C0", alpha=0.6)
    ax.set(xlabel="tokens n", ylabel="lower value / exact value")
    write("long_context_lower", lines, args.out, ax)


if __name__ == "__main__":
    main()
