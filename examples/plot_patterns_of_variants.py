r"""Covariances under L2, Sinkhorn and two heads: the same four patterns, and a disc of mixed fates
===============================================================================================

The story on the four patterns of covariances is about softmax attention. Here the same A and V stand in L2 attention (``Q =
I/2``, ``K = A^T``, so that ``2 K^T Q = A``), in Sinkhorn attention, and in a first head that a second one joins. All keep Gaussians
Gaussian, and all send random covariances of the plane to the same four kinds of limits: to zero, to a line, to a plane, to two
lines. Second picture: one pair A, V for which it depends on the start whether the covariance converges, 88 starts of trace 1.

Reproduces: Castin, Ablin, Carrillo, Peyré, "A Unified Perspective on the Dynamics of Deep Transformers", 2025: the figures with
the four patterns in the cone of covariances for the variants of attention, and from the talks on it the disc of initial
covariances of which 83 converge and 5 blow up (their A and V are not printed; the parameters here are ours).

How the numbers compare: the same patterns for all variants, the ends within 1e-4 of the limit sets where the decay is like 1/t.
The limits themselves are those of softmax attention in closed form, but for L2 attention on two lines, where a - b is no longer
kept. In the mixed disc 82 of our starts converge and 6 blow up under softmax attention (talk: 83 and 5). Under Sinkhorn attention
85 converge, and 3 grow exponentially but for all time. (Under L2 attention these A and V leave flows that turn and grow too slowly
to be told apart in time; they are not counted.)
"""

from collections.abc import Callable, Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa

EYE, SWAP, HALF = np.eye(2), np.array([[0.0, 1.0], [1.0, 0.0]]), np.diag([-1.0, 0.0])
STARTS, GROWING = 88, 0.05
Head = tuple[np.ndarray, np.ndarray]
MIXED = np.array([[1.1, 1.8], [-2.6, -0.1]]), np.array([[1.0, 1.4], [0.7, 1.5]])
ROWS = {"L2": "blue", "Sinkhorn": "green", "two heads": "purple"}


def patterns() -> dict[str, tuple[Head, Head, float, Callable[[np.ndarray], np.ndarray]]]:
    """Two heads (A, V), the time at which the flow is stopped, and the limits of softmax attention from the starts."""

    def shortened(S: np.ndarray) -> np.ndarray:
        return S[:, 1, 1] - S[:, 0, 1] ** 2 / S[:, 0, 0]

    def entries(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.stack([a, b], axis=1)[:, :, None] * EYE

    return {
        "to zero": (
            (-EYE, EYE),
            (np.array([[-1.0, 0.5], [-0.5, -1.0]]), np.diag([1.0, 0.5])),
            1e4,
            lambda S: 0.0 * S,
        ),
        "to a line": (
            (HALF, EYE),
            (0.5 * HALF, np.array([[1.0, 0.5], [0.0, 1.0]])),
            1e4,
            lambda S: entries(0.0 * S[:, 0, 0], shortened(S)),
        ),
        "to a plane": (
            (HALF, np.diag([0.0, 1.0])),
            (0.3 * HALF, np.diag([0.0, 0.7])),
            1e3,
            lambda S: entries(S[:, 0, 0], shortened(S)),
        ),
        "to two lines": (
            (SWAP, -SWAP),
            (2.0 * SWAP, -SWAP),
            1e3,
            lambda S: entries(*np.maximum([d := S[:, 0, 0] - S[:, 1, 1], -d], 0.0)),
        ),
    }


def variants(A: np.ndarray, V: np.ndarray) -> dict[str, oa.AttentionMap]:
    return {
        "softmax": oa.SoftmaxAttention(A, V),
        "L2": oa.L2Attention(0.5 * EYE, A.T, V),
        "Sinkhorn": oa.SinkhornAttention(A, V),
    }


def away(title: str, ends: np.ndarray) -> float:
    """Largest distance (of an entry) of the covariances from the limit set of a pattern."""
    a, b, c = ends[:, 0, 0], ends[:, 1, 1], np.abs(ends[:, 0, 1])
    off = {"to zero": np.maximum(a, b), "to a line": a, "to a plane": 0.0 * a, "to two lines": np.minimum(a, b)}
    return float(max(off[title].max(), c.max()))


def disc_of_starts(count: int) -> np.ndarray:
    """Covariances of trace 1, uniform in the disc of ``(a - b, 2c)``."""
    rng = np.random.default_rng(1)
    radius, angle = np.sqrt(rng.uniform(0.0, 1.0, count)), rng.uniform(0.0, 2.0 * np.pi, count)
    u, v = radius * np.cos(angle), radius * np.sin(angle)
    return 0.5 * np.moveaxis(np.array([[1.0 + u, v], [v, 1.0 - u]]), 2, 0)


def fates(attention: oa.AttentionMap, starts: np.ndarray) -> np.ndarray:
    """0 where the flow converges, 1 where its trace grows exponentially, 2 where it blows up."""
    out = []
    for run in oa.gaussian_flow_batch(attention, starts, t_span=(0.0, 60.0), rtol=1e-7):
        rate = (run.log_traces[-1] - run.log_traces[-2]) / (run.times[-1] - run.times[-2])
        out.append(2 if run.blow_up_time < np.inf else int(rate > GROWING))
        assert run.blow_up_time < np.inf or not 0.5 * GROWING < rate < 2.0 * GROWING, f"no clear fate, rate {rate:.3g}"
    return np.array(out)


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("patterns_of_variants", __doc__, argv)
    rng = np.random.default_rng(2)
    roots = rng.uniform(-1.0, 1.0, (14, 2, 2))
    starts = roots @ np.swapaxes(roots, 1, 2) + 0.02 * EYE
    figure, axes = panels(4, rows=3, size=(2.7, 2.5), sharex=True, sharey=True)
    worst, moved = 0.0, {}
    for j, (title, (first, second, end, limit)) in enumerate(patterns().items()):
        maps = variants(*first)
        maps["two heads"] = oa.MultiHeadAttention([maps["softmax"], oa.SoftmaxAttention(*second)])
        for i, (name, color) in enumerate(ROWS.items()):
            times = np.concatenate([[0.0], np.logspace(-2, np.log10(end), 80)])
            runs = oa.gaussian_flow_batch(maps[name], starts, t_span=(0.0, end), t_eval=times, rtol=1e-8)
            covs = np.array([run.covs for run in runs])
            off = away(title, covs[:, -1])
            moved[name, title] = float(np.abs(covs[:, -1] - limit(starts)).max())
            print(
                f"{name:>9} {title:>12}: ends within {off:.1e} of the set, {moved[name, title]:.1e} of the limit of softmax"
            )
            worst = max(worst, off)
            _flow(axes[4 * i + j], covs, title, oa.plotting.COLORS[color])
            if i == 0:
                axes[j].set_title(title, fontsize=11)
            axes[4 * i + j].set(xlabel="a - b" if i == 2 else "", ylabel=f"{name}\n2c" if j == 0 else "")
    _key(axes[0])
    figure.suptitle(r"covariances $\Sigma$ with rows (a, c), (c, b), the cone seen from above", fontsize=11)
    shapes = disc_of_starts(STARTS)
    found = {name: fates(variants(*MIXED)[name], shapes) for name in ("softmax", "Sinkhorn")}
    counts = {name: np.bincount(kinds, minlength=3).tolist() for name, kinds in found.items()}
    print(f"mixed disc, [converge, grow exponentially, blow up]: {counts}")
    kept = max(value for key, value in moved.items() if key != ("L2", "to two lines"))
    print(
        f"headline: the same four patterns under three variants (ends within {worst:.1e}, limits of softmax within {kept:.1e} but for "
        f"L2 on two lines, {moved['L2', 'to two lines']:.2f}); mixed disc: {counts['softmax'][0]} converge, "
        f"{counts['softmax'][2]} blow up"
    )
    assert worst < 1e-3, f"all flows should end in the limit sets, received a distance of {worst:.1e}"
    assert kept < 1e-3, f"limits should be those of softmax, received {kept:.1e}"
    assert moved["L2", "to two lines"] > 0.1, "L2 attention should not keep a - b"
    assert counts["softmax"][0] > 0.85 * STARTS, f"most starts should converge: {counts}"
    assert counts["softmax"][2] > 0, "some starts should blow up under softmax"
    assert counts["Sinkhorn"][2] == 0, "Sinkhorn attention does not blow up"
    pictures.save(figure, "patterns_of_variants")
    pictures.save(mixed(found), "mixed_disc")


def _flow(ax: object, covs: np.ndarray, title: str, color: str) -> None:
    """Paths in the coordinates ``(a - b, 2c)``, with the limit set below."""
    colors = oa.plotting.COLORS
    reach = {"to zero": ([0.0], "."), "to a line": ([-2.0, 0.0], "-")}.get(title, ([-2.0, 2.0], "-"))
    ax.plot(
        reach[0],
        [0.0] * len(reach[0]),
        color=colors["orange"],
        lw=5,
        alpha=0.5,
        marker="o" if title == "to zero" else None,
    )
    x, y = covs[..., 0, 0] - covs[..., 1, 1], 2.0 * covs[..., 0, 1]
    ax.plot(x.T, y.T, color=color, lw=1.0)
    ax.plot(x[:, 0], y[:, 0], color=colors["grey"], marker="o", ms=3, ls="none")
    ax.plot(x[:, -1], y[:, -1], color=colors["red"], marker="^", ms=4, ls="none")


def _key(ax: object) -> None:
    from matplotlib.lines import Line2D

    colors = oa.plotting.COLORS
    handles = [
        Line2D([], [], color=colors["grey"], marker="o", ms=3, ls="none", label="start"),
        Line2D([], [], color=colors["red"], marker="^", ms=4, ls="none", label="end"),
        Line2D([], [], color=colors["orange"], lw=5, alpha=0.5, label="limit set"),
    ]
    ax.legend(handles=handles, fontsize=7, frameon=False, loc="lower right")


def mixed(found: dict[str, np.ndarray]) -> object:
    """The starts in the disc of shapes, by their fate."""
    figure, axes = panels(2, size=(4.2, 4.2))
    S = disc_of_starts(STARTS)
    u, v = S[:, 0, 0] - S[:, 1, 1], 2.0 * S[:, 0, 1]
    looks = (("converges", "blue", "o"), ("grows exponentially", "orange", "s"), ("blows up", "red", "^"))
    angle = np.linspace(0.0, 2.0 * np.pi, 200)
    for ax, (name, kinds) in zip(axes, found.items(), strict=True):
        ax.plot(np.cos(angle), np.sin(angle), color=oa.plotting.COLORS["grey"], lw=1.0)
        for k, (label, color, marker) in enumerate(looks):
            if (kinds == k).any():
                dots = {"color": oa.plotting.COLORS[color], "marker": marker, "ms": 5 + 2 * (k > 0), "ls": "none"}
                ax.plot(u[kinds == k], v[kinds == k], label=f"{label}: {(kinds == k).sum()}", **dots)
        ax.set(xlabel="(a - b) / (a + b)", ylabel="2c / (a + b)", ylim=(-1.06, 1.45), aspect="equal")
        ax.set_title(name, fontsize=11)
        ax.legend(fontsize=8, frameon=False, loc="upper center", ncols=2)
    figure.suptitle(f"fates of {STARTS} covariances of trace 1, both variants with the same A and V", fontsize=11)
    return figure


if __name__ == "__main__":
    main()
