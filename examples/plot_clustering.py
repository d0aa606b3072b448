r"""Clusters emerge: rescaled tokens move to the corners of a polytope
==================================================================

With V = I and a positive definite A every token runs away from the origin like ``e^t``. Divided by that growth,
``z = e^(-t) x``, the tokens converge: attention becomes a choice of the token that is farthest in the direction ``A z``,
``z' = z_choice - z``, so the extreme tokens stay where they are and the others move towards them.

Reproduces: Geshkovski, Letrouit, Polyanskiy, Rigollet, "The emergence of clusters in self-attention dynamics", 2023:
the theorem for V = I and positive definite A (rescaled tokens converge to the boundary of a convex polytope, or to 0)
and its figures, in which the limits are few and mostly corners.

How the numbers compare: 40 random tokens of the plane end in 5 to 7 clusters; every cluster is a corner of the polytope,
none is at 0, and the tokens approach their limits at the rate ``e^(-t)`` that the limit equation gives.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels
from scipy.spatial import ConvexHull

import otattn as oa

END = 14.0


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("clustering", __doc__, argv)
    attention = oa.SoftmaxAttention(np.eye(2), np.eye(2))
    times = np.linspace(0.0, END, 561)
    colors = oa.plotting.COLORS
    _, (left, right) = panels(2, size=(4.8, 4.3))
    corners, rates = [], []
    for seed in range(4):
        X = np.random.default_rng(seed).uniform(-5.0, 5.0, (40, 2))
        run = oa.flow(attention, X, t_span=(0.0, END), normalization="rescaled", t_eval=times)
        last = run.points[-1]
        count = int(oa.token_clusters(run, tol=1e-3).counts[-1])
        polytope = oa.limit_polytope(run)
        corners.append((count, polytope.n_vertices))
        distance = np.linalg.norm(run.points - last, axis=2).max(axis=1)
        late = (times > 3.0) & (times < 9.0)
        rates.append(float(np.polynomial.polynomial.polyfit(times[late], np.log(distance[late]), 1)[1]))
        print(f"seed {seed}: {count} clusters, {polytope.n_vertices} corners, distances like e^({rates[-1]:.3f} t)")
        right.plot(
            times[:-40],
            distance[:-40],
            color=colors["blue"],
            lw=1.2,
            label="four draws of 40 tokens" if seed == 0 else None,
        )
        if seed == 1:
            left.plot(*run.points[:, 0].T, color=colors["sky"], lw=0.8, label="paths")
            left.plot(*np.moveaxis(run.points[:, 1:], 2, 0), color=colors["sky"], lw=0.8)
            left.plot(*X.T, color=colors["grey"], marker="o", ms=3, ls="none", label="tokens at t = 0")
            around = polytope.vertices[ConvexHull(polytope.vertices).vertices]  # in the order of the boundary
            left.fill(*around.T, ec=colors["green"], fc="none", lw=1.2, label="polytope")
            left.plot(*around.T, color=colors["red"], marker="^", ms=8, ls="none", label="its corners: the limits")
    print(f"headline: every cluster is a corner of the polytope, {corners}; slowest rate {max(rates):.3f} (theory: -1)")
    assert all(clusters == vertices for clusters, vertices in corners), f"clusters off the corners: {corners}"
    assert np.abs(np.array(rates) + 1.0).max() < 0.05, f"distances should decay like e^(-t), received {rates}"

    left.set_aspect("equal")
    left.set_xlim(-6.0, 6.0)
    left.set_ylim(-6.0, 8.0)
    left.set_xlabel("first coordinate of $z = e^{-t} x$")
    left.set_ylabel("second coordinate")
    left.legend(fontsize=8, frameon=False, loc="upper center", ncols=2)
    right.plot(times, 10.0 * np.exp(-times), color=colors["red"], ls="--", label="$10\\ e^{-t}$")
    right.set_yscale("log")
    right.set_xlabel("time t")
    right.set_ylabel("largest distance of a token to its limit")
    right.legend(fontsize=8, frameon=False)
    pictures.save(left, "clustering")


if __name__ == "__main__":
    main()
