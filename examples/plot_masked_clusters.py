r"""Who leads a masked transformer: Rényi centres
==============================================

Under a causal mask the first token sees only itself. On the sphere, with V = I, it never moves, and in the end all tokens
follow it. For a sharp kernel, ``A = beta I``, that takes very long: before it, tokens gather around several of them. A token
feels others at distances of the order ``beta^(-1/2)`` only, so one that is farther than ``delta beta^(-1/2)`` from all
earlier tokens, a strong Rényi centre, has nobody to follow. We predict the clusters from the tokens at time 0 and let
the flow decide.

A token at distance ``delta beta^(-1/2)`` of one other moves towards it at the speed ``delta e^(-delta^2 / 2) beta^(-1/2)``: at
delta = 3 it takes the time ``e^(4.5) / 3 = 30`` to move by ``beta^(-1/2)``. So we count clusters at t = 30.

Two pictures. Left: 64 tokens on the circle at beta = 64, with the strong centres. Right: the number of clusters against time
for three beta, mean of six draws, with the mean number of strong centres.

Reproduces: Karagodin, Polyanskiy, Rigollet, "Clustering in causal attention masking", NeurIPS 2024: with V = I all tokens
tend to the first, and for large beta strong Rényi centres are the centres of metastable clusters (number and position; the
constant delta is not fixed there). Masked flows: Castin, Ablin, Carrillo, Peyré, 2025.

How the numbers compare: at delta = 3 and t = 30 the six draws give 4.2, 8.5 and 16.5 clusters at beta = 16, 64 and 256, where
4.0, 8.7 and 16.2 strong centres were predicted; 88 to 92 percent of these are where they were, within half of
``beta^(-1/2)``, and 91 to 97 percent of the tokens are at one. delta = 3 is the one of five values that fits best; at t = 10,
our first guess, five clusters more were left at beta = 64.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa

N, DRAWS, DELTA = 64, 6, 3.0
WHEN = 30.0


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("masked_clusters", __doc__, argv)
    times = np.concatenate([[0.0], np.logspace(-1.0, 3.0, 81), [WHEN]])
    times = np.unique(times)
    at = int(np.searchsorted(times, WHEN))
    colors = oa.plotting.COLORS
    _, (left, right) = panels(2, size=(4.8, 4.2))
    differences, stayed, gathered = [], [], []
    for beta, color in ((16.0, "orange"), (64.0, "blue"), (256.0, "green")):
        unit = beta**-0.5
        counts, predicted, still, near = [], [], [], []
        for seed in range(DRAWS):
            run = circle(beta, seed, times)
            start, then = run.points[0], run.points[at]
            strong = oa.renyi_centres(start, DELTA * unit, strong=True)
            counts.append(oa.token_clusters(run, tol=0.3 * unit).counts)
            predicted.append(len(strong))
            still += (np.linalg.norm(then[strong] - start[strong], axis=1) < 0.5 * unit).tolist()
            near.append((np.linalg.norm(then[:, None] - start[strong], axis=2).min(axis=1) < unit).mean())
            if beta == 64.0 and seed == 0:
                angles(left, run, strong)
        mean = np.mean(counts, axis=0)
        differences.append(float(mean[at] / np.mean(predicted) - 1.0))
        stayed.append(float(np.mean(still)))
        gathered.append(float(np.mean(near)))
        print(
            f"beta = {beta:g}: {np.mean(predicted):.1f} strong centres, {mean[at]:.1f} clusters at t = {WHEN:g}, {mean[-1]:.1f} at "
            f"t = 1000; {stayed[-1]:.0%} of the centres have stayed, {gathered[-1]:.0%} of the tokens are at one"
        )
        right.plot(times[1:], mean[1:], color=colors[color], label=rf"$\beta$ = {beta:g}")
        right.axhline(np.mean(predicted), color=colors[color], ls="--", lw=1)
    worst = max(abs(x) for x in differences)
    print(
        f"headline: clusters at t = {WHEN:g} as many as strong centres within {worst:.0%}; {min(stayed):.0%} of these have stayed"
    )
    assert worst < 0.15, f"counts should agree, received relative differences of {differences}"
    assert min(stayed) > 0.8, f"strong centres should stay, received {stayed}"
    assert min(gathered) > 0.85, f"tokens should be at strong centres, received {gathered}"

    right.axvline(WHEN, color=colors["grey"], ls=":", lw=1)
    right.set_xscale("log")
    right.set_xlabel("time t")
    right.set_ylabel("number of clusters, mean of six draws")
    right.set_title("dashed: strong Rényi centres at time 0", fontsize=10)
    right.legend(fontsize=8, frameon=False)
    pictures.save(left, "masked_clusters")


def circle(beta: float, seed: int, times: np.ndarray) -> oa.Trajectory:
    """The masked flow of tokens that are uniform on the circle."""
    X = np.random.default_rng(seed).standard_normal((N, 2))
    sequence = oa.SpaceTimeMeasure.from_sequence(X / np.linalg.norm(X, axis=1, keepdims=True))
    masked = oa.MaskedAttention(oa.SoftmaxAttention(beta * np.eye(2), np.eye(2)))
    span = (0.0, float(times[-1]))
    options = {"t_eval": times, "dense": False, "rtol": 1e-6, "atol": 1e-9}
    return oa.flow(masked, sequence, t_span=span, normalization="sphere", **options)


def angles(ax: object, run: oa.Trajectory, strong: np.ndarray) -> None:
    """The angles of the tokens against time, unwrapped, and the strong centres at time 0."""
    colors, start = oa.plotting.COLORS, 0.1
    turned = np.unwrap(np.arctan2(run.points[:, :, 1], run.points[:, :, 0]), axis=0)
    ax.plot(run.times[1:], turned[1:], color=colors["sky"], lw=0.7)
    ax.plot(run.times[1:], turned[1:, strong], color=colors["blue"], lw=1.4)
    ax.plot(np.full(len(strong), start), turned[0, strong], color=colors["red"], marker="^", ms=6, ls="none")
    ax.plot([], [], color=colors["red"], marker="^", ls="none", label="strong centres at time 0")
    ax.plot([], [], color=colors["blue"], label="their paths")
    ax.plot([], [], color=colors["sky"], label="other tokens")
    ax.set_xscale("log")
    ax.set_xlabel("time t")
    ax.set_ylabel("angle")
    ax.set_ylim(-4.0, 5.6)
    ax.set_title(r"64 tokens on the circle, $\beta$ = 64", fontsize=10)
    ax.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)


if __name__ == "__main__":
    main()
