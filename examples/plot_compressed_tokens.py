r"""Fewer tokens: what attention loses when a text is merged into clusters
======================================================================

128 tokens of a real text enter a trained head. We put k weighted atoms in their place: centroids of clusters in the space that
the head sees (logits over the queries, and values), or of clusters in R^384, or the k tokens that get most attention. How far
does the image move? Three answers, one for each k: measured in W_2; proven, from what is kept of each cluster (mass, centroid,
covariance, radii), with all rounding counted; and what the local Lipschitz constant predicts, which knows nothing but W_2 of
the tokens.

On the right the queries stay and keys and values are compressed, as in a cache: the error at each query, and its proven bound.

Reproduces: the third estimate of the talks on this subject, how Gamma_mu(x) depends on the measure, put to use; the setting is
that of caches that are pruned to the tokens with most attention (Zhang et al., "H2O: heavy-hitter oracle", NeurIPS 2023).

How the numbers compare: there is no bound to compare with. For 32 of 128 atoms the image moves by 0.3 to 0.4, at most 1.2 is
proven, and the local constant times W_2 of the tokens says 90 to 110, more than a hundred times the spread of the images.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa

HEADS, SIZES, SHOWN = (3, 6), (8, 16, 32, 64, 96), 32


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("compressed_tokens", __doc__, argv)
    sample = oa.load_sample()
    X, colors = sample.tokens(0), oa.plotting.COLORS
    figure, (left, right) = panels(2, size=(5.6, 4.2))

    head = sample.heads[HEADS[0]]
    bounds = [oa.compression_bound(head, X, oa.compress(X, k, attention=head, rng=0)) for k in SIZES]
    for label, color, style, values in (
        ("local constant times $W_2$ of the tokens", "red", ":", [b.local * b.distance for b in bounds]),
        ("proven", "orange", "-", [b.value for b in bounds]),
        ("measured", "blue", "-", [b.measured for b in bounds]),
    ):
        left.plot(SIZES, values, color=colors[color], ls=style, marker="o", ms=4, label=label)
    images = head.on_tokens(X)
    spread = float(np.sqrt(np.sum(np.var(images, axis=0))))
    left.axhline(spread, color="0.6", lw=1, label="spread of the images")
    plain = [oa.wasserstein(head.pushforward(oa.compress(X, k, rng=0)), oa.DiscreteMeasure(images)) for k in SIZES]
    left.plot(SIZES, plain, color=colors["sky"], ls="--", label="measured, clusters in $R^{384}$")
    left.set(xscale="log", yscale="log", xlabel="atoms k, of 128 tokens", ylabel="$W_2$ of the images")
    left.set_xticks(SIZES, [str(k) for k in SIZES])
    left.minorticks_off()
    left.set_ylim(0.1, 400.0)
    left.set_title("queries, keys and values in k atoms", fontsize=10)
    left.legend(fontsize=8, frameon=False, loc="upper right", bbox_to_anchor=(1.0, 0.78))

    for name, method, color in (("merged", "merge", "blue"), ("pruned to most attention", "prune", "green")):
        nu = oa.compress(X, SHOWN, attention=head, method=method, rng=0)
        kept = oa.compression_bound(head, X, nu, queries=X)
        order = np.argsort(kept.errors)
        right.plot(kept.errors[order], color=colors[color], label=f"{name}: measured")
        right.plot(kept.bounds[order], color=colors[color], lw=0.8, alpha=0.6, label=f"{name}: proven")
    right.set(yscale="log", xlabel="query, in order of its error", ylabel=r"$|\Gamma_\mu(x) - \Gamma_\nu(x)|$")
    right.set_title(f"keys and values in {SHOWN} atoms, queries kept", fontsize=10)
    right.legend(fontsize=8, frameon=False)

    found = [bounds[SIZES.index(SHOWN)]]
    found += [
        oa.compression_bound(sample.heads[h], X, oa.compress(X, SHOWN, attention=sample.heads[h], rng=0))
        for h in HEADS[1:]
    ]
    for h, b in zip(HEADS, found, strict=True):
        print(f"head {h}: measured {b.measured:.3f}, proven {b.value:.3f}, local {b.local * b.distance:.1f}")
        assert b.lower <= b.measured <= b.upper <= b.value, "what is proven of the images must agree"
        assert b.measured < 0.45, "the image should move by 0.3 to 0.4"
        assert b.value < 1.25, "at most 1.2 should be proven"
    least = min(b.local * b.distance / b.value for b in found)
    print(f"headline: the proven bound is at least {least:.0f} times below the local constant times W_2")
    assert least > 50.0
    pictures.save(figure, "compressed_tokens")


if __name__ == "__main__":
    main()
