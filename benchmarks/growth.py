"""How the time of our local constant grows with the number of tokens, the dimension and the number of heads.

Run: ``python -m benchmarks.growth [--quick]``; writes ``benchmarks/results/growth.md`` and ``growth.png``. All sizes of one
sweep are timed in turn, round after round. Sizes lie above the dense decomposition of small Jacobians. The number of
Lanczos products depends on the gap of the problem, not on its size, so the time of one product with ``J^T J`` is given as
well. What else the whole constant takes is the splitting part, the field's derivative at each token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

import otattn as oa
from benchmarks.common import arguments, exponent, interleaved, machine, panels, table, write
from otattn.operators import measure_jacobian, top_singular
from otattn.plotting.style import COLORS

SWEEPS = {
    "n": ("tokens n (d = 32, one head)", (64, 128, 256, 512, 1024), 2.0),
    "d": ("dimension d (n = 128, one head, k = d)", (16, 32, 64, 128), 2.0),
    "heads": ("heads h (n = 256, d = 64, k = 16 each)", (1, 2, 4, 8, 16), 1.0),
}


def layer(n: int, d: int, heads: int, k: int, seed: int) -> tuple[oa.AttentionMap, np.ndarray]:
    """Gaussian weights and tokens; output matrices scaled so that the sum over heads keeps its size."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(heads):
        Q, K, V = rng.standard_normal((3, k, d)) / np.sqrt(d)
        parts.append(oa.SoftmaxAttention.from_qkv(Q, K, V))
    outputs = [rng.standard_normal((d, k)) / np.sqrt(k * heads) for _ in range(heads)]
    return oa.MultiHeadAttention(parts, outputs), rng.standard_normal((n, d))


def sweep(name: str, sizes: Sequence[int], rounds: int) -> list[tuple[float, float, int]]:
    """Median seconds of the whole constant, of its particle part, and Lanczos products, for each size."""
    products: dict[int, int] = {}
    methods: dict[str, Callable[[], None]] = {}

    def add(size: int) -> None:
        n, d, heads = {"n": (size, 32, 1), "d": (128, size, 1), "heads": (256, 64, size)}[name]
        attention, X = layer(n, d, heads, 16 if name == "heads" else d, seed=size)
        measure = oa.DiscreteMeasure(X)

        def particle() -> None:
            J = measure_jacobian(attention, measure)
            products[size] = top_singular(J, precision="precise", tol=1e-8).iterations

        methods[f"whole {size}"] = lambda: oa.local_lipschitz(attention, X)
        methods[f"particle {size}"] = particle

    for size in sizes:
        add(size)
    times = {key: statistics.median(values) for key, values in interleaved(methods, rounds).items()}
    return [(times[f"whole {s}"], times[f"particle {s}"], products[s]) for s in sizes]


def main() -> None:
    options = arguments(__doc__)
    rounds = 2 if options.quick else 5
    lines = [
        "# Growth of the time of `local_lipschitz`",
        "",
        f"p = 2, tolerance 1e-8, {rounds} interleaved rounds, medians. *Particle part*: the top singular value of the Jacobian by "
        "Lanczos, preparation included; the whole constant has the splitting part too. *A product*: particle part over the number of "
        "products with J^T J. Exponents by least squares, over all sizes and over the last three.",
        "",
    ]
    axes, fits = panels(3), []
    for ax, (name, (label, sizes, slope)) in zip(axes, SWEEPS.items(), strict=True):
        sizes = sizes[:3] if options.quick else sizes
        whole, particle, count = zip(*sweep(name, sizes, rounds), strict=True)
        product = [t / k for t, k in zip(particle, count, strict=True)]
        curves = {"whole constant": whole, "particle part": particle, "one product": product}
        for what, values in curves.items():
            fits.append((name, what, f"{exponent(sizes, values):.2f}", f"{exponent(sizes[-3:], values[-3:]):.2f}"))
        rows = [
            (s, f"{t:.3g} s", f"{q:.3g} s", k, f"{1e3 * u:.3g} ms")
            for s, t, q, k, u in zip(sizes, whole, particle, count, product, strict=True)
        ]
        head = (name, "whole constant", "particle part", "products", "a product")
        lines += [f"## {label}", "", *table(head, rows)]
        for (what, values), color in zip(curves.items(), ("blue", "green", "sky"), strict=True):
            ax.loglog(sizes, values, marker="o", color=COLORS[color], label=what)
        guide = 0.6 * product[-1] * (np.array(sizes) / sizes[-1]) ** slope
        ax.loglog(sizes, guide, ls=":", color=COLORS["grey"], label=f"slope {slope:g}")
        ax.set_xticks(sizes, [str(s) for s in sizes])
        ax.minorticks_off()
        ax.set_xlabel(label)
        ax.legend(fontsize=8, frameon=False)
    axes[0].set_ylabel("seconds")
    head = ("in", "of", "exponent, all sizes", "exponent, last three")
    lines += ["## Fitted exponents", "", *table(head, fits), *machine(seeds="the size that varies")]
    write("growth", lines, options.out, axes[0])


if __name__ == "__main__":
    main()
