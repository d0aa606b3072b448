"""Local constants of the sample layer's heads at real tokens and at adversarial tokens of the same norm.

Run: ``python -m benchmarks.adversarial``; writes ``benchmarks/results/adversarial.md`` and ``adversarial.png``.
"""

from __future__ import annotations

import pathlib
import time

import otattn as oa
from otattn.plotting import plot_real_against_adversarial, save

RESULTS = pathlib.Path(__file__).parent / "results"


def main() -> None:
    layer = oa.load_sample()
    start = time.perf_counter()
    result = oa.real_against_adversarial(layer.heads, layer.hidden_states, rng=0, progress=True)
    seconds = time.perf_counter() - start
    n = int(result.growth.n_values[-1])
    lines = [
        "# Real against adversarial tokens",
        "",
        f"Bundled layer (MiniLM, layer 3), 4 windows, n = 8 to {n}; adversarial tokens: two-anchor family, norm at most "
        f"{result.radius:.2f} (the largest norm of a real token), seed 0; {seconds:.0f} s. Exponents with 95 percent "
        "intervals (real: over windows; adversarial: of the regression).",
        "",
        f"| head | real, n = {n} | adversarial, n = {n} | ratio | growth, real | growth, adversarial |",
        "|---|---|---|---|---|---|",
    ]
    for row in result.rows():
        (a, b), (c, d) = row["real_interval"], row["adversarial_interval"]
        lines.append(
            f"| {row['head']} | {row['real']:.3f} | {row['adversarial']:.0f} | {row['ratio']:.0f} | "
            f"{row['real_exponent']:.2f} [{a:.2f}, {b:.2f}] | {row['adversarial_exponent']:.2f} [{c:.2f}, {d:.2f}] |"
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "adversarial.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    save(plot_real_against_adversarial(result), RESULTS / "adversarial.png")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
