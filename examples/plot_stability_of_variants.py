r"""How much each attention map stretches W_1, W_2 and W_inf
========================================================

Softmax, L2, Sinkhorn, sigmoid, ReLU, linear and exponential attention move the same random pairs of token measures.
The largest ratio ``W_p(F(mu), F(nu)) / W_p(mu, nu)`` found is a lower value of the Lipschitz constant; the horizontal
marks are proven upper bounds for the same ball and number of tokens.

Reproduces: the question of Castin, Ablin, Carrillo, Peyré, "A Unified Perspective on the Dynamics of Deep
Transformers", 2025, which of the attention maps are Lipschitz on measures with compact support (it makes their flows
well-posed), with numbers for every variant in one picture. Beyond the paper: in W_inf the constant of softmax attention
knows neither n nor an exponential, ``||V|| (a + sqrt(1 + a^2))`` with ``a = ||A|| R^2``.

How the numbers compare: all variants are stable in all three metrics, no ratio exceeds its proven bound, and random
pairs reach at most a third of it: typical measures are far from the worst ones. For softmax the proven W_inf bound is
the smallest of the three, W_1 the largest; the exponential kernel, which is not normalised, stretches most.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa

N, DIM, RADIUS, PAIRS = 8, 2, 1.5, 40
ORDERS = {"W_1": 1.0, "W_2": 2.0, "W_inf": np.inf}


def variants() -> dict[str, oa.AttentionMap]:
    A, V = np.array([[0.6, 0.5], [-0.5, -0.4]]), np.eye(2)
    return {
        "softmax": oa.SoftmaxAttention(A, V),
        "L2": oa.L2Attention(A.T, np.eye(2), V),
        "Sinkhorn": oa.SinkhornAttention(A, V),
        "sigmoid": oa.SigmoidAttention(A, V),
        "ReLU": oa.ReLUAttention(A, V),
        "linear": oa.LinearAttention(A, V),
        "exp": oa.ExponentialAttention(A, V),
    }


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("stability_of_variants", __doc__, argv)
    maps = variants()
    sampler = oa.samplers.uniform_ball_pairs(N, DIM, RADIUS)
    ratios: dict[str, list[np.ndarray]] = {metric: [] for metric in ORDERS}
    uppers: dict[str, list[float]] = {metric: [] for metric in ORDERS}
    for name, attention in maps.items():
        line = []
        for metric, p in ORDERS.items():
            near = oa.samplers.perturbation_pairs(sampler.domain.sample(N, 1), 1e-2)
            far = oa.stability_study(attention, sampler, n_pairs=PAIRS, p=p, rng=0, progress=False)
            close = oa.stability_study(attention, near, n_pairs=PAIRS, p=p, rng=1, progress=False)
            ratios[metric].append(np.concatenate([far.ratios, close.ratios]))
            upper = oa.lipschitz_upper_bound(attention, radius=RADIUS, n=N, p=p).value
            uppers[metric].append(upper)
            line.append(f"{metric} {ratios[metric][-1].max():6.3f} <= {upper:7.3f}")
        print(f"{name:>8}: " + "   ".join(line))
    largest = np.array([[r.max() for r in ratios[metric]] for metric in ORDERS])
    proven = np.array([uppers[metric] for metric in ORDERS])
    share = np.max(largest / proven)
    softmax = oa.SoftmaxAttention(np.array([[0.6, 0.5], [-0.5, -0.4]]), np.eye(2))
    a = np.linalg.norm(softmax.A, 2) * RADIUS**2
    print(f"headline: random pairs reach at most {share:.0%} of a proven bound; W_inf of softmax {proven[2, 0]:.3f}")
    assert share <= 1.0, f"a measured ratio exceeds a proven bound: {share:.3f}"
    assert proven[2, 0] <= (a + np.hypot(1.0, a)) * (1 + 1e-9), "the W_inf bound of softmax must not know n"
    order = dict(zip(maps, largest[1], strict=True))
    assert max(order, key=order.__getitem__) == "exp", f"the exponential kernel should stretch most, received {order}"

    _, (ax,) = panels(1, size=(9.0, 4.4))
    named = {oa.plotting.metric(p): ratios[metric] for metric, p in ORDERS.items()}
    oa.plotting.plot_stability(named, labels=list(maps), ax=ax)
    for k, metric in enumerate(ORDERS):
        x = np.arange(len(maps)) + (k - 1) * 0.8 / 3
        label = "proven upper bound" if k == 0 else None
        ax.plot(x, uppers[metric], ls="none", marker="_", ms=14, mew=2, color=oa.plotting.COLORS["red"], label=label)
    ax.set_yscale("log")
    ax.set_ylim(0.05, 1.5 * proven.max())
    ax.set_title(
        f"{N} tokens in the ball of radius {RADIUS} of the plane, {PAIRS} random and {PAIRS} near pairs", fontsize=10
    )
    ax.legend(fontsize=8, frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    pictures.save(ax, "stability_of_variants")


if __name__ == "__main__":
    main()
