"""Distances and stability ratios against what one would write with POT: values, accuracy for close measures, time.

Run: ``python -m benchmarks.distances``; writes ``benchmarks/results/distances.md`` and ``distances.png``. Times are medians
over rounds in one process, each round running every method once; ratios are taken round by round.
"""

from __future__ import annotations

import math
import os
import pathlib
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import ot

import otattn as oa
from otattn.plotting.style import COLORS, axes, save

RESULTS = pathlib.Path(__file__).parent / "results"
ROUNDS = 5


def pot_loop(X: np.ndarray, Y: np.ndarray) -> np.ndarray:
    """W_2 by POT's network simplex on its squared Euclidean costs, pair by pair."""
    n = X.shape[1]
    w = np.full(n, 1.0 / n)
    return np.array([math.sqrt(max(ot.emd2(w, w, ot.dist(x, y)), 0.0)) for x, y in zip(X, Y, strict=True)])


def rounds(methods: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Wall times, interleaved."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for run in methods.values():
        run()  # the first call loads and allocates
    for _ in range(ROUNDS):
        for name, run in methods.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


def lines_of(times: dict[str, list[float]], base: str, digits: str) -> list[str]:
    out = ["| method | median | ratio to ours |", "|---|---|---|"]
    for name, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, times[base], strict=True))
        out.append(f"| {name} | {statistics.median(values):{digits}} s | {ratio:.2f} |")
    return [*out, ""]


def small_problems() -> list[str]:
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((2, 10_000, 16, 4))
    times = rounds({"otattn wasserstein_batch": lambda: oa.wasserstein_batch(X, Y), "POT loop": lambda: pot_loop(X, Y)})
    worst = float(np.abs(oa.wasserstein_batch(X, Y) / pot_loop(X, Y) - 1.0).max())
    head = [
        "## 10,000 pairs of 16 points in dimension 4",
        "",
        f"Largest relative difference of the values: {worst:.1e}.",
        "",
    ]
    return head + lines_of(times, "otattn wasserstein_batch", ".3g")


def small_covariances() -> list[str]:
    rng = np.random.default_rng(1)
    L = rng.standard_normal((2, 10_000, 2, 2))
    S = L @ np.swapaxes(L, -1, -2)
    zero = np.zeros(2)

    def loop() -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return np.array(
                [ot.gaussian.bures_wasserstein_distance(zero, zero, a, b) for a, b in zip(S[0], S[1], strict=True)]
            )

    times = rounds({"otattn covariance_distance": lambda: oa.covariance_distance(S[0], S[1]), "POT loop": loop})
    worst = float(np.abs(oa.covariance_distance(S[0], S[1]) / np.real(loop()) - 1.0).max())
    head = ["## 10,000 pairs of 2 x 2 covariances", "", f"Largest relative difference of the values: {worst:.1e}.", ""]
    return head + lines_of(times, "otattn covariance_distance", ".3g")


def close_ratios(ax: object) -> list[str]:
    """``W_2(F mu, F nu) / W_2(mu, nu)`` for tokens near 10, displaced by ``h``, against ``|J step| / |step|``."""
    rng = np.random.default_rng(2)
    d, n = 3, 16
    attention = oa.SoftmaxAttention(rng.standard_normal((d, d)) / d, rng.standard_normal((d, d)) / d)
    X = 10.0 + rng.standard_normal((n, d))
    J = attention.jacobian(X)
    direction = rng.standard_normal((n, d))
    direction /= np.linalg.norm(direction)
    out = [
        "## Stability ratio of close measures (offset 10)",
        "",
        "Relative error against the Jacobian's prediction. The curvature of the map itself contributes about h.",
        "",
        "| displacement h | otattn | POT |",
        "|---|---|---|",
    ]
    errors: dict[str, list[float]] = {"otattn": [], "POT": []}
    sizes = [10.0**-k for k in range(2, 11)]
    for h in sizes:
        Y = X + h * direction
        step = Y - X  # as stored
        truth = float(np.linalg.norm(J @ step.ravel()) / np.linalg.norm(step))
        ours = oa.stability_ratio(attention, X, Y).value
        images = attention.on_tokens(X)[None], attention.on_tokens(Y)[None]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            top, bottom = float(pot_loop(*images)[0]), float(pot_loop(X[None], Y[None])[0])
        theirs = top / bottom if bottom > 0 else math.nan
        errors["otattn"].append(abs(ours / truth - 1.0))
        errors["POT"].append(abs(theirs / truth - 1.0) if math.isfinite(theirs) else math.nan)
        shown = "0/0" if math.isnan(theirs) else f"{errors['POT'][-1]:.1e}"
        out.append(f"| {h:.0e} | {errors['otattn'][-1]:.1e} | {shown} |")
    ax.loglog(sizes, errors["otattn"], marker="o", color=COLORS["blue"], label="otattn, stability ratio")  # type: ignore[attr-defined]
    ax.loglog(sizes, errors["POT"], marker="s", color=COLORS["red"], label="POT loop, stability ratio")  # type: ignore[attr-defined]
    return [*out, ""]


def close_covariances(ax: object) -> list[str]:
    """Bures-Wasserstein of S and (1 + h)^2 S: exactly ``h sqrt(tr S)``."""
    rng = np.random.default_rng(3)
    L = rng.standard_normal((4, 4))
    S = L @ L.T
    zero = np.zeros(4)
    out = ["## Bures-Wasserstein distance of close covariances", "", "| h | otattn | POT |", "|---|---|---|"]
    sizes = [10.0**-k for k in range(1, 13)]
    errors: dict[str, list[float]] = {"otattn": [], "POT": []}
    for h in sizes:
        T = S + (2 * h + h * h) * S
        truth = h * math.sqrt(np.trace(S))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = float(np.real(ot.gaussian.bures_wasserstein_distance(zero, zero, S, T)))
        errors["otattn"].append(abs(float(oa.covariance_distance(S, T)) / truth - 1.0))
        errors["POT"].append(abs(theirs / truth - 1.0))
        out.append(f"| {h:.0e} | {errors['otattn'][-1]:.1e} | {errors['POT'][-1]:.1e} |")
    ax.loglog(
        sizes, np.maximum(errors["otattn"], 1e-16), marker="o", ls="--", color=COLORS["sky"], label="otattn, Bures"
    )  # type: ignore[attr-defined]
    ax.loglog(sizes, errors["POT"], marker="s", ls="--", color=COLORS["orange"], label="POT, Bures")  # type: ignore[attr-defined]
    return [*out, "", "The stored covariances differ from the intended ones by rounding, about 1e-16 / h.", ""]


def main() -> None:
    ax = axes()
    lines = [
        "# Distances",
        "",
        f"Python {platform.python_version()}, numpy {np.__version__}, POT {ot.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} cores; seeds 0 to 3; {ROUNDS} interleaved rounds.",
        "",
        *small_problems(),
        *small_covariances(),
        *close_ratios(ax),
        *close_covariances(ax),
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "distances.md").write_text("\n".join(lines), encoding="utf-8")
    ax.set_xlabel("displacement h")
    ax.set_ylabel("relative error")
    ax.legend(fontsize=8, frameon=False)
    save(ax, RESULTS / "distances.png")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
