r"""Very large tokens: attention becomes a selection
================================================

Scale tokens X by R and let R grow: every row of the attention matrix becomes the indicator of its largest logit, the
map on tokens becomes ``x_i -> V x_{m_i}``, and its local Lipschitz constant tends to ``||V|| sqrt(k)``, k the largest
number of rows that select the same token. Not ``R^2 sqrt(n)``: the worst case of the theorems needs ties.

Reproduces: Castin, Ablin, Peyré, "How Smooth Is Attention?", ICML 2024, the large-radius regime (n fixed, R to
infinity, for almost every X): ``Lip_{RX} -> ||V|| sqrt(largest number of rows with the same argmax)``.

How the numbers compare: for 12 random configurations of 24 tokens each the constant at the last radius agrees with the
limit to rounding; before, where a row hesitates between two far tokens, it goes through a maximum that can be 50 times
the limit. So the regime is real, but it starts at ``R^2`` times the smallest margin of the logits of about 30.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa

RADII = np.logspace(-1, 1.5, 41)


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("large_radius", __doc__, argv)
    rng = np.random.default_rng(1)
    curves, limits, margins = [], [], []
    for _ in range(12):
        A, V = rng.standard_normal((2, 2)), rng.standard_normal((2, 2))
        attention = oa.SoftmaxAttention(A, V)
        X = oa.Ball(1.0, 2).sample(24, rng)
        limit = oa.bounds.castin2024_large_radius(attention, X)
        limits.append(limit.value)
        margins.append(limit.details["margin"])
        radii = RADII / np.sqrt(margins[-1])  # in these units all configurations select at about the same radius
        curves.append([oa.local_lipschitz(attention, R * X).value for R in radii])
    values, ends = np.array(curves), np.array(limits)
    error = np.abs(values[:, -1] / ends - 1.0)
    peak = (values.max(axis=1) / ends).max()
    print(f"limits ||V|| sqrt(k): {', '.join(f'{v:.3f}' for v in ends)}")
    print(
        f"headline: at the largest radius the limit is reached to {error.max():.1e}; largest peak {peak:.2f} times it"
    )
    assert error.max() < 1e-12, f"the local constant should reach its limit, received an error of {error.max():.1e}"

    _, (left, right) = panels(2, size=(4.8, 4.0))
    x = RADII**2
    for k, curve in enumerate(values / ends[:, None]):
        left.plot(x, curve, color=oa.plotting.COLORS["sky"], lw=1, label="one configuration" if k == 0 else None)
        right.plot(x, np.maximum(np.abs(curve - 1.0), 1e-16), color=oa.plotting.COLORS["sky"], lw=1)
    left.axhline(1.0, color=oa.plotting.COLORS["red"], ls="--", label=r"limit $\|V\| \sqrt{k}$")
    left.set_yscale("log")
    left.set_ylabel("local constant at R X / limit")
    left.legend(fontsize=8, frameon=False)
    right.set_yscale("log")
    right.set_ylabel("relative distance to the limit (cut at 1e-16)")
    for ax in (left, right):
        ax.set_xscale("log")
        ax.set_xlabel("$R^2$ times the smallest margin of the logits")
    pictures.save(left, "large_radius")


if __name__ == "__main__":
    main()
