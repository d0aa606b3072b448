"""Certified local constants around given tokens against the largest value that an ascent finds there.

Run: ``python -m benchmarks.near_tokens``; writes ``benchmarks/results/near_tokens.md`` and ``near_tokens.png``.
Tokens may move by ``rho`` each. The ascent is projected gradient on the analytic derivative of the top singular value,
from the tokens themselves and from random points of the ball.
"""

from __future__ import annotations

import pathlib
import time

import numpy as np

import otattn as oa
from otattn.lipschitz.comparison import reduced_head
from otattn.lipschitz.constants.heads import softmax_head
from otattn.lipschitz.lower.charts import forms_of
from otattn.lipschitz.lower.clusters import Configuration
from otattn.plotting.style import COLORS, axes, save

RESULTS = pathlib.Path(__file__).parent / "results"
FRACTIONS = (1e-3, 1e-2, 3e-2, 1e-1)


def ascend(attention: oa.SoftmaxAttention, X: np.ndarray, rho: float, rng: np.random.Generator) -> float:
    """The largest local constant found with every token within ``rho`` of its place."""
    forms = forms_of(attention)
    assert forms is not None
    batch, steps = 4, 30
    D = rng.standard_normal((batch, *X.shape))
    D *= rho / np.linalg.norm(D, axis=2, keepdims=True)
    D[0] = 0.0
    best = 0.0
    for k in range(steps):
        one = Configuration(forms, X + D, np.zeros((batch, len(X))))
        value, u, v = one.top()
        best = max(best, float(value.max()))
        gradient = one.gradient(u, v)[0]
        size = np.linalg.norm(gradient, axis=2, keepdims=True)
        D = D + rho * (1.0 - k / steps) * gradient / np.maximum(size, 1e-300)
        norm = np.linalg.norm(D, axis=2, keepdims=True)
        D *= np.minimum(1.0, rho / np.maximum(norm, 1e-300))
    return best


def problems() -> list[tuple[str, oa.SoftmaxAttention, np.ndarray]]:
    """Random tokens in a ball, and heads of the bundled layer at real tokens (in the span that they read)."""
    rng = np.random.default_rng(0)
    out = []
    for n, d, a in ((4, 3, 4.0), (16, 3, 9.0), (32, 8, 9.0)):
        A, V = rng.standard_normal((d, d)), rng.standard_normal((d, d))
        X = rng.standard_normal((n, d))
        X /= np.linalg.norm(X, axis=1).max()
        out.append((f"random, n = {n}, d = {d}, a = {a:g}", oa.SoftmaxAttention(a * A / np.linalg.norm(A, 2), V), X))
    layer = oa.load_sample()
    for h in (0, 3):
        head = layer.heads[h]
        attention, _ = reduced_head(head)
        basis = softmax_head(head, masked=False).on_span().basis
        X = layer.tokens(0)[:16]
        out.append((f"head {h} of the layer, n = 16", attention, X if basis is None else X @ basis))
    return out


def main() -> None:
    rng = np.random.default_rng(1)
    lines = [
        "# Local constants around given tokens",
        "",
        "`certified` holds for all tokens within rho of the given ones, `ascent` is the largest value found there; "
        "R is the largest token norm; seeds 0 and 1.",
        "",
        "| tokens | rho / R | at the tokens | ascent | certified | certified / ascent | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    ax = axes()
    for (name, attention, X), color in zip(problems(), COLORS.values(), strict=False):
        R = float(np.linalg.norm(X, axis=1).max())
        here = float(np.linalg.norm(attention.jacobian(X).to_dense(), 2))
        ratios = []
        for fraction in FRACTIONS:
            found = ascend(attention, X, fraction * R, rng)
            start = time.perf_counter()
            bound = oa.relaxations.near_tokens(attention, X, fraction * R)
            seconds = time.perf_counter() - start
            assert found <= bound.value
            ratios.append(bound.value / found)
            lines.append(
                f"| {name} | {fraction:g} | {here:.4g} | {found:.4g} | {bound.value:.4g} | {ratios[-1]:.3f} | {seconds:.2f} |"
            )
            print(lines[-1], flush=True)
        ax.plot(FRACTIONS, ratios, marker="o", ms=4, color=color, label=name)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "near_tokens.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("displacement of each token, rho / R")
    ax.set_ylabel("certified bound / largest value found")
    ax.legend(fontsize=8, frameon=False)
    save(ax, RESULTS / "near_tokens.png")


if __name__ == "__main__":
    main()
