r"""Limiting Gaussians are degenerate: the ranks of limits in dimension 3, 4 and 5
==============================================================================

Where do Gaussian tokens go under softmax attention, if they go anywhere? We draw random A and full-rank initial
covariances and count the rank of the limit in four cases.

* V = I and V random, symmetric ``A = K^T D K`` of rank ``r = floor(d/2)`` (D random signs). Directions in the kernel of
  ``Q L_0``, ``Sigma_0 = L_0 L_0^T``, never move, so the rank is at least ``d - r``; and a finite limit has ``Sigma A
  Sigma = 0``, so it is at most ``dim ker A + min(#positive, #negative eigenvalues of A)``.
* V = -A, A invertible with eigenvalues between 1/2 and 3/2 in size. The flow descends ``tr(A Sigma A Sigma) / 4``, the
  square of the norm of ``Sigma^(1/2) A Sigma^(1/2)``, which must vanish in the limit: the rank is at most
  ``min(#positive, #negative) <= d / 2``.
* The law of the papers, ``A = -Q^T Q / sqrt(d)`` of rank ``floor(d/2)`` and ``V = F^T F``, for softmax and L2 attention. All limits
  are finite, and of rank ``ceil(d / 2)`` by a theorem (:mod:`otattn.dynamics.low_rank_flow`).

Reproduces: Castin, Ablin, Carrillo, Peyré, "A Unified Perspective on the Dynamics of Deep Transformers", 2025: limits of
the Gaussian flow have low rank (V = I, and numerically random V), and the histograms of limit ranks for d = 3, 4, 5.

How the numbers compare: for V = I all finite limits have rank exactly ``ceil(d / 2)``; for random V they lie between the
two bounds, for V = -A at ``min(#positive, #negative)``, and for the law of the papers, softmax and L2, all at the proved
``ceil(d / 2)``. Only flows that have settled are counted: each eigenvalue was followed over decades of time to where it stays or
vanishes. Blow-ups concentrate on rank 1.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa

DIMS, DRAWS = (3, 4, 5), 50


def descents(d: int, draws: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Ranks of settled limits for V = -A, and min(#positive, #negative) of each A."""
    ranks, least = [], []
    for _ in range(draws):
        E = np.linalg.qr(rng.standard_normal((d, d)))[0]
        signs = rng.choice([-1.0, 1.0], d)
        A = (E * signs * rng.uniform(0.5, 1.5, d)) @ E.T
        root = rng.standard_normal((d, d))
        start = oa.GaussianMeasure(np.zeros(d), root @ root.T / d + 0.1 * np.eye(d))
        limit = oa.gaussian_limit(oa.SoftmaxAttention(A, -A), start)
        if not limit.settled:  # the rank of a flow that still moves is a guess
            continue
        ranks.append(limit.rank)
        least.append(int(min((signs > 0).sum(), (signs < 0).sum())))
    return np.array(ranks), np.array(least)


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("rank_histograms", __doc__, argv)
    _, axes = panels(2, rows=2, size=(4.6, 3.4))
    colors = [oa.plotting.COLORS[name] for name in ("blue", "orange", "green")]
    worst, total, settled = 1.0, 0, 0
    for k, (d, color) in enumerate(zip(DIMS, colors, strict=True)):
        for ax, value in zip(axes, ("identity", "random"), strict=False):
            found = oa.limit_rank_histogram(dim=d, draws=DRAWS, value=value, symmetric=True, rng=d)
            finite = np.array([limit.kind == "finite" for limit in found.limits]) & found.settled
            ranks, bounds = found.ranks[finite], found.bounds[finite]
            print(f"V {value:>8}, d = {d}: {finite.sum()} finite limits of ranks {sorted(set(ranks.tolist()))}")
            if value == "identity":
                assert np.all(ranks == (d + 1) // 2), f"ranks should be ceil(d / 2), received {set(ranks.tolist())}"
            inside = float(np.mean((ranks >= d - d // 2) & (ranks <= bounds)))
            assert inside == 1.0, f"ranks should lie between their bounds, received {inside:.0%} for d = {d}"
            worst = min(worst, inside)
            _bars(ax, k, ranks, color, f"d = {d}, finite limit")
            other = found.ranks[~finite & found.settled]
            _bars(ax, k, other, color, f"d = {d}, blow-up", below=np.bincount(ranks, minlength=6))
        ranks, least = descents(d, DRAWS, np.random.default_rng(d))
        exact = int((ranks == least).sum())
        print(f"V = -A, d = {d}: rank min(#positive, #negative) in {exact} of {len(ranks)} settled draws")
        assert exact == len(ranks), f"ranks should be min(#positive, #negative), received {exact} of {len(ranks)}"
        total, settled = total + exact, settled + len(ranks)
        _bars(axes[2], k, ranks, color, f"d = {d}")
        _published(axes[3], k, d, color)
    print(
        f"headline: ceil(d / 2) for V = I; between the bounds in {worst:.0%} for random V; "
        f"min(#positive, #negative) in {total} of {settled} settled draws for V = -A"
    )
    for ax, title in zip(
        axes,
        (
            "V = I, A of rank floor(d/2)",
            "random V, A of rank floor(d/2)",
            f"V = -A, settled among {DRAWS}",
            "the law of the papers",
        ),
        strict=True,
    ):
        ax.set_xticks(range(6))
        ax.set_xlabel("rank of the limit")
        ax.set_ylabel("number of draws")
        ax.locator_params(axis="y", integer=True)
        ax.set_ylim(0.0, 1.25 * ax.get_ylim()[1])
        ax.set_title(title, fontsize=10)
        ax.legend(fontsize=7, frameon=False, loc="upper right")
    pictures.save(axes[0], "rank_histograms")


def _published(ax: object, k: int, d: int, color: str) -> None:
    """Softmax, and L2 above it, under the law of the papers."""
    softmax, l2 = (
        oa.limit_rank_histogram(variant, dim=d, draws=DRAWS // 2, law="published", rng=d)
        for variant in ("softmax", "l2")
    )
    kept = []
    for found in (softmax, l2):
        kept.append(found.ranks[found.settled])
        print(
            f"law of the papers, {found.variant:>7}, d = {d}: ranks {sorted(set(kept[-1].tolist()))} of {len(kept[-1])} settled "
            f"draws among {DRAWS // 2}, proved {found.proved}"
        )
        assert len(kept[-1]) >= 0.8 * len(found.ranks), f"most should have settled, received {len(kept[-1])}"
        assert found.kinds["finite"] == len(found.ranks), f"limits should be finite, received {found.kinds}"
        assert (kept[-1] == found.proved).all(), f"ranks should be {found.proved}, received {kept[-1]}"
    _bars(ax, k, kept[0], color, f"d = {d}, softmax")
    _bars(ax, k, kept[1], color, f"d = {d}, L2", below=np.bincount(kept[0], minlength=6))


def _bars(ax: object, k: int, ranks: np.ndarray, color: str, label: str, *, below: np.ndarray | None = None) -> None:
    style = {"alpha": 1.0} if below is None else {"alpha": 0.45, "hatch": "///", "bottom": below}
    ax.bar(np.arange(6) + 0.27 * (k - 1), np.bincount(ranks, minlength=6), 0.25, color=color, label=label, **style)


if __name__ == "__main__":
    main()
