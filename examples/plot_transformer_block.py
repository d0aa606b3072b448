r"""A transformer block: what LayerNorm does to the Lipschitz constant
==================================================================

Attention on tokens of size s is steep: its local constant grows like s^2. In a transformer LayerNorm comes first, so
that attention sees tokens on one ellipsoid, whatever s is. We scale the tokens of one random configuration and follow
the local constant of three maps: attention alone, attention behind LayerNorm, and a whole block (pre-norm, residual
connections, MLP).

Two consequences can be read off exactly. ``LN(sX) = LN(X)``, so the constant of attention behind LayerNorm is
proportional to 1/s, without error; and it is at most the product of the constant of LayerNorm,
``sqrt(d) max |gain| / min |x - mean x|``, with that of attention on the ellipsoid, for which a proven bound exists. The
block tends to the identity, its constant to 1, as s grows: residual connections keep it there.

Reproduces: Castin, Ablin, Peyré, "How Smooth Is Attention?", ICML 2024, the discussion of LayerNorm, which makes the
radius R of the bounds a constant of the model; here with the derivative of LayerNorm itself, which the bounds on
ellipsoids leave out: LayerNorm is not Lipschitz near tokens with equal coordinates.

How the numbers compare: attention alone climbs from 1.5 to 140, like s^2 at its steepest, before it settles at 3.5 (the
large-radius regime); behind LayerNorm the exponent is -1 to rounding, and the proven product bound, which holds for the
worst tokens and the worst direction of LayerNorm at once, is 29 times above the constant.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa

DIM, N, HIDDEN = 6, 16, 24


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("transformer_block", __doc__, argv)
    rng = np.random.default_rng(5)
    A, V = rng.standard_normal((DIM, DIM)) / DIM, rng.standard_normal((DIM, DIM)) / np.sqrt(DIM)
    attention = oa.SoftmaxAttention(A, V)
    gain, bias = 1.0 + 0.2 * rng.standard_normal(DIM), 0.1 * rng.standard_normal(DIM)
    norm = oa.LayerNorm(gain, bias)
    mlp = oa.MLP(
        rng.standard_normal((HIDDEN, DIM)) / np.sqrt(DIM),
        0.1 * rng.standard_normal(HIDDEN),
        rng.standard_normal((DIM, HIDDEN)) / np.sqrt(HIDDEN),
    )
    maps = {
        "attention alone": attention,
        "attention behind LayerNorm": oa.Compose(norm, attention),
        "pre-norm block": oa.TransformerBlock(attention, mlp, attention_norm=norm, mlp_norm=norm),
    }
    X = rng.standard_normal((N, DIM))
    scales = np.logspace(-1.5, 2.5, 41)
    constants = {
        name: np.array([oa.local_lipschitz(block, s * X).value for s in scales]) for name, block in maps.items()
    }
    centred = np.linalg.norm(X - X.mean(axis=1, keepdims=True), axis=1).min()
    norm_constant = np.sqrt(DIM) * np.abs(gain).max() / (centred * scales)
    upper = oa.lipschitz_upper_bound(attention, domain=oa.LayerNormDomain(gain, bias), n=N)
    product = norm_constant * upper.value

    behind = constants["attention behind LayerNorm"]
    drift = np.abs(behind * scales / (behind[0] * scales[0]) - 1.0).max()
    end = constants["pre-norm block"][-1]
    slack = float((product / behind).min())
    print(f"attention on the LayerNorm ellipsoid: at most {upper.value:.2f} for {N} tokens ({upper.theorem})")
    print(
        f"headline: behind LayerNorm the constant is c / s to {drift:.1e}; the product bound is {slack:.1f} times above"
    )
    print(f"the block at the largest tokens: {end:.4f}")
    assert drift < 1e-10, f"LayerNorm should make the constant proportional to 1 / s, received a drift of {drift:.1e}"
    assert slack >= 1.0, f"the product bound is violated by a factor of {slack:.3f}"
    assert abs(end - 1.0) < 0.05, f"the block should tend to the identity, received a constant of {end:.3f}"

    _, (ax,) = panels(1, size=(6.8, 4.4))
    for (name, values), color, marker in zip(constants.items(), ("orange", "blue", "green"), "so^", strict=True):
        ax.plot(scales, values, color=oa.plotting.COLORS[color], marker=marker, ms=3, label=name)
    # in the colour of the one curve that it bounds
    ax.plot(scales, product, color=oa.plotting.COLORS["blue"], ls="--", label="proven, attention behind LayerNorm only")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("size s of the tokens")
    ax.set_ylabel("local Lipschitz constant at $s X$ in $W_2$")
    ax.legend(fontsize=8, frameon=False)
    pictures.save(ax, "transformer_block")


if __name__ == "__main__":
    main()
