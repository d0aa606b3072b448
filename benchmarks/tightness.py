"""How tight each theorem of the catalogue is: its value over a witnessed lower bound, maps of every variant, three sizes.

    python -m benchmarks.tightness [--quick] [--out benchmarks/results]

Every record of ``oa.theorems()`` that bounds the W_2 Lipschitz constant from above is asked at each map where it applies, for n = 8
tokens and for all measures, at ||A|| R^2 = 0.5, 4, 16 (R^2 where a map has no A), and compared with the best lower bound that we find.
The ratio is at least one; it is the slack of both sides together. The site's table of statements has the range of each row.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import otattn as oa
from benchmarks.common import arguments, machine, panels, table, write
from otattn.plotting.style import COLORS

SIZES = (0.5, 4.0, 16.0)
TOKENS = 8
D = 3


def drawn(seed: int) -> np.ndarray:
    """A matrix of norm 1 in general position."""
    G = np.random.default_rng(seed).standard_normal((D, D))
    return G / np.linalg.norm(G, 2)


A, B, I = drawn(0), drawn(1), np.eye(D)
NORM = oa.RMSNorm(np.ones(D) / D**0.5, eps=1e-2)
MAPS: dict[str, Callable[[], Any]] = {
    "softmax, generic A": lambda: oa.SoftmaxAttention(A, I),
    "softmax, A = I": lambda: oa.SoftmaxAttention(I, I),
    "softmax, A = -I": lambda: oa.SoftmaxAttention(-I, I),
    "softmax, random V": lambda: oa.SoftmaxAttention(A, B),
    "masked softmax": lambda: oa.MaskedAttention(oa.SoftmaxAttention(A, I)),
    "several heads": lambda: oa.MultiHeadAttention([oa.SoftmaxAttention(A, I), oa.SoftmaxAttention(B, I)]),
    "L2": lambda: oa.L2Attention(I, I, I),
    "Sinkhorn": lambda: oa.SinkhornAttention(-I, I),
    "sigmoid": lambda: oa.SigmoidAttention(A, I),
    "linear": lambda: oa.LinearAttention(A, I),
    "ReLU": lambda: oa.ReLUAttention(A, I),
    "cosine": lambda: oa.ScoreAttention(I, I, I, query_norm=NORM, key_norm=NORM),
    "gated": lambda: oa.GatedAttention(oa.SoftmaxAttention(A, I), B),
    "rotary": lambda: oa.RotaryAttention(np.eye(2), np.eye(2), np.eye(2)),
    "residual": lambda: oa.Residual(oa.SoftmaxAttention(A, I)),
}


def measured(quick: bool) -> list[dict[str, Any]]:
    """One record a theorem, map, size and number of tokens."""
    keys = [t.key for t in oa.theorems().records if (t.quantity, t.kind) == ("lipschitz", "upper")]
    found = []
    for name, build in MAPS.items():
        attention = build()
        for a in SIZES[:2] if quick else SIZES:
            for n in (TOKENS,) if quick else (TOKENS, None):
                radius = math.sqrt(a)
                try:
                    lower = oa.lipschitz_lower_bound(attention, radius=radius, n=n, rng=0).value
                except ValueError as why:
                    print(f"{name}, n = {n}: no lower bound ({why})", file=sys.stderr)
                    continue
                reasons = oa.theorems(attention, radius=radius, n=n)
                for record, why in zip(reasons.records, reasons.reasons or (), strict=True):
                    if record.key not in keys or why is not None:
                        continue
                    upper = oa.lipschitz_upper_bound(attention, radius=radius, n=n, theorem=record.key)
                    ratio = math.exp(upper.log_value - math.log(lower))
                    found.append({"theorem": record.key, "map": name, "a": a, "n": n, "ratio": ratio})
        print(f"{name}: {len(found)} values", file=sys.stderr, flush=True)
    return found


def rows_of(found: list[dict[str, Any]]) -> list[list[str]]:
    """A row a theorem and map: the ratios by size."""
    rows = []
    for key, name, n in dict.fromkeys(
        (r["theorem"], r["map"], r["n"]) for r in sorted(found, key=lambda r: r["theorem"])
    ):
        ratios = {r["a"]: r["ratio"] for r in found if (r["theorem"], r["map"], r["n"]) == (key, name, n)}
        tokens = "any measure" if n is None else f"{n}"
        rows.append([key, name, tokens, *(f"{ratios[a]:.3g}" if a in ratios else "" for a in SIZES)])
    return rows


def picture(found: list[dict[str, Any]]) -> Any:
    """A line a theorem: every ratio, by size."""
    keys = sorted({r["theorem"] for r in found}, key=lambda k: min(r["ratio"] for r in found if r["theorem"] == k))
    (ax,) = panels(1, height=0.25 * len(keys) + 1.4)
    ax.figure.set_figwidth(8.0)
    for a, color, shift in zip(SIZES, ("blue", "orange", "red"), (-0.2, 0.0, 0.2), strict=True):
        for n, marker in ((TOKENS, "o"), (None, "s")):
            chosen = [r for r in found if (r["a"], r["n"]) == (a, n)]
            ax.plot(
                [min(r["ratio"], CUT) for r in chosen],
                [keys.index(r["theorem"]) + shift for r in chosen],
                marker,
                ms=4,
                color=COLORS[color],
                alpha=0.8,
                label=rf"$\Vert A\Vert R^2 = {a:g}$, {'any measure' if n is None else f'{n} tokens'}",
            )
    ax.set_xscale("log")
    ax.set_xlim(0.9, 1.2 * CUT)
    ax.set_yticks(range(len(keys)), keys, fontsize=8)
    ax.set_ylim(len(keys) - 0.4, -0.6)
    ax.grid(axis="y", lw=0.3)
    ax.set_xlabel(rf"upper bound over witnessed lower bound (beyond $10^{{{math.log10(CUT):.0f}}}$: at the edge)")
    ax.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3, frameon=False)
    return ax


CUT = 1e4
"""Largest ratio of the picture: bounds of any measure grow exponentially."""


def main() -> None:
    args = arguments(__doc__)
    found = measured(args.quick)
    lines = [
        "# How tight each theorem is",
        "",
        "Written by `python -m benchmarks.tightness`, whose docstring says what is measured.",
        "",
    ]
    lines += table(["theorem", "map", "tokens", *(f"a = {a:g}" for a in SIZES)], rows_of(found))
    lines += machine("pot", seeds="0")
    write("tightness", lines, args.out, picture(found))


if __name__ == "__main__":
    main()
