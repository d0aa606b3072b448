r"""The radius does not grow: LayerNorm holds the tokens in one ellipsoid
=====================================================================

Every bound for attention on a ball of radius R begs the question: how large is R, and does it grow with the number of
tokens n? The word and position embeddings of BERT are learned, but before each attention layer LayerNorm maps every
token to ``gain * z + bias`` with ``sum z = 0`` and ``|z|^2 = d``, so all tokens lie on one ellipsoid, whatever n is.

The sample layer of the package holds tokens, not the LayerNorm that made them. It can be read off the tokens:
``sum_i x_i / gain_i`` is the same for all tokens (a null vector of the tokens with a column -1 beside them), and with
``1 / gain`` known up to a factor, ``|z|^2 = d`` says that the tokens divided by the gain lie on a sphere, whose centre
solves a linear problem. So the radius R that the theorems need is known: the farthest point of the ellipsoid.

Reproduces: Castin, Ablin, Peyré, "How Smooth Is Attention?", ICML 2024, the discussion of LayerNorm (tokens in an
ellipsoid) and the measurement of token radii against n for models with learned positions.

How the numbers compare: the largest norm of n tokens grows like n^0.01 between n = 8 and 128, so the growth of the
local constant on text is no effect of the radius. The ellipsoid reaches farther than any token of the text does, and
the published bound, which is quadratic in R, pays for that.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa


def layer_norm_of(tokens: np.ndarray) -> oa.LayerNormDomain:
    """The LayerNorm whose image holds the rows of ``tokens`` (at least 2 d of them); gains taken positive on average."""
    count, d = tokens.shape
    null = np.linalg.svd(np.column_stack([tokens, -np.ones(count)]))[2][-1]
    inverse, total = null[:-1], null[-1]  # 1 / gain and sum(bias / gain), up to one factor
    y = tokens * inverse
    # |y - m|^2 = r^2 is linear in m and in r^2 - |m|^2, and sum m = sum y = total
    middle = np.linalg.lstsq(np.column_stack([2.0 * y, np.ones(count)]), (y**2).sum(axis=1), rcond=None)[0][:-1]
    middle += (total - middle.sum()) / d
    scale = np.sqrt(((y - middle) ** 2).sum(axis=1).mean() / d) * np.sign(inverse.sum())
    return oa.LayerNormDomain(scale / inverse, middle / inverse)


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("token_radius", __doc__, argv)
    layer = oa.load_sample()
    print("the bundled sample: tokens that enter layer 3 of all-MiniLM-L6-v2 (learned positions), 4 windows of 128")
    tokens = layer.hidden_states.reshape(-1, layer.dim)
    domain = layer_norm_of(tokens)
    gap = np.linalg.norm(domain.project(tokens) - tokens, axis=1).max()
    print(f"LayerNorm recovered: all {len(tokens)} tokens within {gap:.1e} of its ellipsoid")

    sizes = np.array([8, 16, 32, 64, 128])
    norms = np.linalg.norm(layer.hidden_states, axis=2)
    largest = np.stack([norms[:, :n].max(axis=1) for n in sizes], axis=1)
    typical = np.stack([np.median(norms[:, :n], axis=1) for n in sizes], axis=1)
    slopes = np.polynomial.polynomial.polyfit(np.log(sizes), np.log(largest).T, 1)[1]
    reach = domain.max_norm
    print(f"headline: the radius grows like n^{slopes.mean():.3f}; text {largest.max():.2f}, ellipsoid {reach:.2f}")
    assert gap < 1e-3, f"the tokens must lie on the recovered ellipsoid, received a gap of {gap:.1e}"
    assert 0.0 <= slopes.mean() < 0.03, f"the radius should not grow with n, received n^{slopes.mean():.3f}"
    assert largest.max() <= reach, f"the ellipsoid must hold the tokens, {largest.max():.3f} > {reach:.3f}"

    colors = oa.plotting.COLORS
    _, (left, right) = panels(2)
    for k, (name, values, color) in enumerate(
        (("largest of n tokens", largest, "blue"), ("median of n tokens", typical, "green"))
    ):
        left.plot(sizes, values.T, color=colors[color], lw=0.8, alpha=0.5)
        left.plot(sizes, values.mean(axis=0), color=colors[color], marker="os"[k], lw=2, label=name)
    left.axhline(reach, color=colors["red"], ls="--", label="farthest point of the LayerNorm ellipsoid")
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(n) for n in sizes])
    left.set_ylim(0, 1.25 * reach)
    left.set_xlabel("number of tokens n")
    left.set_ylabel("norm of the tokens")
    left.legend(fontsize=8, frameon=False, loc="lower right")

    head = layer.heads[0]
    for name, radius, color in (("ellipsoid", reach, "red"), ("text", largest.max(), "blue")):
        bound = [oa.bounds.castin2024_discrete(head, radius=radius, n=int(n)).value for n in sizes]
        right.plot(sizes, bound, color=colors[color], marker="s", ms=4, label=f"published bound, R of the {name}")
    ours = [oa.bounds.row_bound(head, radius=largest.max(), n=int(n)).value for n in sizes]
    right.plot(sizes, ours, color=colors["green"], marker="v", ms=4, label="our bound, R of the text")
    local = [oa.local_lipschitz(head, layer.tokens(0, int(n))).value for n in sizes]
    right.plot(sizes, local, color=colors["orange"], marker="o", ms=4, label="local constant at the text")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(sizes, [str(n) for n in sizes])
    right.set_xlabel("number of tokens n")
    right.set_ylabel("Lipschitz constant in $W_2$, head 0")
    right.legend(fontsize=8, frameon=False, loc="center right")
    pictures.save(right, "token_radius")


if __name__ == "__main__":
    main()
