r"""When are the energies of attention convex along transport?
==========================================================

A flow that descends an energy which is convex along Wasserstein geodesics brings any two measures closer. We follow the
energies of attention along geodesics between random measures and record the smallest and largest second derivative, in
units of W_2^2, for A = I and for the indefinite A = diag(1, -1).

For A positive semidefinite the energies of exponential and of linear attention are convex along every path
``z_i(t) = z_i + t v_i`` with masses w_i: for ``E = (1/2) sum w_i w_j k(<A z_i, z_j>)`` with k = exp,

    ``E'' = (1/2) sum w_i w_j exp(<A z_i, z_j>) [ (<A v_i, z_j> + <A z_i, v_j>)^2 + 2 <A v_i, v_j> ]``

where the first term is a square and the second a sum over the Schur product of two positive semidefinite matrices,
``exp(<A z_i, z_j>)`` and ``<A v_i, v_j>``; for linear attention, ``k(s) = s^2 / 2``, the square has the factor 1 and
``<A z_i, z_j>`` replaces the exponential in the second term. On Gaussians the energy of softmax attention with A = I is
``tr(Sigma^2) / 4``, the fourth power of a Schatten norm of the factor F of ``Sigma = F F^T``, which moves along a
straight line: convex too.

Reproduces: Castin, Ablin, Carrillo, Peyré, "A Unified Perspective on the Dynamics of Deep Transformers", 2025, the
discussion of displacement convexity: the energies of attention are not displacement convex in general.

How the numbers compare: with A = diag(1, -1) a geodesic that bends down is found for every one of the seven energies;
with A = I none is, for any of them (proven for three, above; for the others it is what random geodesics show).
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa


def studies(A: np.ndarray) -> dict[str, oa.DisplacementConvexity]:
    e = oa.energies
    measures = oa.samplers.uniform_ball_pairs(4, 2, 2.0)
    gaussians = oa.samplers.gaussian_measure_pairs(2, mean_scale=0.0)
    energies = {
        "exponential": (e.ExponentialEnergy(A), measures),
        "linear": (e.LinearEnergy(A), measures),
        "ReLU": (e.ReLUEnergy(A), measures),
        "sigmoid": (e.SigmoidEnergy(A), measures),
        "Sinkhorn": (e.SinkhornEnergy(A), measures),
        "softmax, Gaussians": (e.GaussianSoftmaxEnergy(A), gaussians),
        "Sinkhorn, Gaussians": (e.GaussianSinkhornEnergy(A), gaussians),
    }
    return {
        name: oa.displacement_convexity_study(energy, sampler, n_pairs=40, rng=0)
        for name, (energy, sampler) in energies.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("displacement_convexity", __doc__, argv)
    cases = {"A = I": studies(np.eye(2)), "A = diag(1, -1)": studies(np.diag([1.0, -1.0]))}
    for title, found in cases.items():
        for name, study in found.items():
            print(f"{title:>15}, {name:<19}: second derivative from {study.least:8.3f} to {study.greatest:8.3f} W_2^2")
    convex = sum(s.convex for s in cases["A = I"].values())
    violated = sum(not s.convex for s in cases["A = diag(1, -1)"].values())
    print(f"headline: of 7 energies, {convex} bend up on all geodesics for A = I, {violated} bend down for diag(1, -1)")
    proven = ("exponential", "linear", "softmax, Gaussians")
    assert all(cases["A = I"][name].convex for name in proven), "a theorem is violated for A = I"
    assert violated == 7, f"every energy should have a geodesic that bends down, found {violated} of 7"

    _, (left, right) = panels(2, size=(5.2, 4.2))
    for k, ((title, found), color) in enumerate(zip(cases.items(), ("blue", "orange"), strict=True)):
        y = np.arange(len(found)) + 0.3 * (k - 0.5)
        low = np.array([s.least for s in found.values()])
        high = np.array([s.greatest for s in found.values()])
        left.hlines(y, low, high, color=oa.plotting.COLORS[color], lw=4, label=title)
    left.axvline(0.0, color=oa.plotting.COLORS["grey"], lw=1)
    left.set_xscale("symlog", linthresh=1.0)
    left.set_xlim(-6.0, 200.0)
    left.set_xticks([-3, -1, 0, 1, 10, 100], ["-3", "-1", "0", "1", "10", "100"])
    left.set_yticks(range(7), list(cases["A = I"]))
    left.invert_yaxis()
    left.set_xlabel("second derivative along geodesics, in units of $W_2^2$ (linear from -1 to 1)")
    left.legend(fontsize=8, frameon=False, loc="lower right")
    oa.plotting.plot_displacement_convexity(cases["A = diag(1, -1)"]["Sinkhorn"], ax=right)
    right.set_title("Sinkhorn, A = diag(1, -1): the worst geodesic", fontsize=10)
    pictures.save(left, "displacement_convexity")


if __name__ == "__main__":
    main()
