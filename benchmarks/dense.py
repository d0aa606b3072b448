"""The local constant of small layers against the full Jacobian by PyTorch's autograd and its singular values.

Run: ``python -m benchmarks.dense [--quick]``; writes ``benchmarks/results/dense.md`` and ``dense.png``. PyTorch computes
``torch.func.jacrev`` of multi-head softmax attention, written from the definition, and ``torch.linalg.svdvals`` of it, in
float64; otattn computes ``local_lipschitz`` (which holds the splitting part too) from the attention object.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

import otattn as oa
from benchmarks.common import arguments, interleaved, machine, panels, ratio, table, write
from benchmarks.growth import layer
from otattn.plotting.style import COLORS

CASES = [
    (4, 16, 1),
    (8, 16, 1),
    (16, 16, 1),
    (32, 16, 1),
    (64, 16, 1),
    (8, 32, 4),
    (16, 32, 4),
    (32, 32, 4),
    (64, 32, 4),
]
QUICK = [(4, 16, 1), (16, 16, 1), (16, 32, 4)]


def jacobian_svd(attention: Any, X: np.ndarray) -> Callable[[], float]:
    """The largest singular value of autograd's Jacobian; weights are converted before the clock starts."""
    import torch

    queries, keys = zip(*(head.factors[:2] for head in attention.heads), strict=True)
    Q, K = (torch.tensor(np.stack(M)) for M in (queries, keys))
    V = torch.tensor(np.stack([head.V for head in attention.heads]))
    W = torch.tensor(np.stack(attention.outputs))
    x = torch.tensor(X)

    def forward(x: Any) -> Any:
        q, k, v = (torch.einsum("hkd,nd->hnk", M, x) for M in (Q, K, V))
        P = torch.softmax(q @ k.transpose(1, 2), dim=-1)
        return torch.einsum("hnk,hdk->nd", P @ v, W)

    def run() -> float:
        J = torch.func.jacrev(forward)(x).reshape(x.numel(), x.numel())
        return float(torch.linalg.svdvals(J)[0])

    return run


def main() -> None:
    import torch

    options = arguments(__doc__)
    rounds = 3 if options.quick else 5
    torch.set_num_threads(1)
    rows, points = [], []
    for n, d, heads in QUICK if options.quick else CASES:
        attention, X = layer(n, d, heads, d // heads, seed=n)
        theirs = jacobian_svd(attention, X)

        def ours(attention: Any = attention, X: np.ndarray = X) -> float:
            return oa.local_lipschitz(attention, X).particle

        way = "Lanczos" if oa.local_lipschitz(attention, X).iterations else "dense SVD"
        error = abs(ours() / theirs() - 1.0)
        times = interleaved({"ours": ours, "torch": theirs}, rounds)
        factor = ratio(times, "torch", "ours")
        a, b = (statistics.median(times[name]) for name in ("ours", "torch"))
        points.append((n * d, heads, a, b))
        rows.append(
            (n, d, heads, n * d, way, f"{1e3 * a:.3g} ms", f"{1e3 * b:.3g} ms", f"{factor:.2f}", f"{error:.1e}")
        )
        print(rows[-1], flush=True)
    head = (
        "n",
        "d",
        "heads",
        "n d",
        "otattn by",
        "otattn",
        "torch jacrev + svdvals",
        "torch / otattn",
        "relative difference",
    )
    lines = [
        "# The local constant of small layers against the full Jacobian",
        "",
        f"float64, one thread each, {rounds} interleaved rounds, medians; ratios round by round.",
        "",
        *table(head, rows),
        *machine("torch", seeds="the number of tokens"),
    ]
    ax = panels(1)[0]
    for heads, style in ((1, "-"), (4, "--")):
        x, a, b = zip(*((s, a, b) for s, h, a, b in points if h == heads), strict=True)
        name = "one head" if heads == 1 else f"{heads} heads"
        ax.loglog(x, a, style, marker="o", color=COLORS["blue"], label=f"otattn, {name}")
        ax.loglog(x, b, style, marker="s", color=COLORS["red"], label=f"torch, full Jacobian, {name}")
    ax.set_xlabel("size of the Jacobian, n d")
    ax.set_ylabel("seconds")
    ax.legend(fontsize=8, frameon=False)
    write("dense", lines, options.out, ax)


if __name__ == "__main__":
    main()
