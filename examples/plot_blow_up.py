r"""Blow-up in finite time, or never: softmax, multi-head and L2 attention on Gaussians
===================================================================================

Under softmax attention the covariance obeys a quadratic law, ``Sigma' = Sigma H Sigma`` for V = I, ``H = A + A^T``, and a
positive direction of H explodes at the finite time ``1 / lambda_max(Sigma_0^(1/2) H Sigma_0^(1/2))``. Several heads do the
same. L2 attention cannot: its velocity is at most linear in x with a bounded factor, so the covariance diverges, but
no faster than an exponential of rate ``2 max Re eig(V K^-1 Q)``.

In the discs a covariance ``[[a, c], [c, b]]`` is shown by its shape only, ``(a - b, 2c) / (a + b)``; the circle is rank 1.
Blow-up degenerates: all the mass of the covariance ends in one direction.

Reproduces: Castin, Ablin, Carrillo, Peyré, "A Unified Perspective on the Dynamics of Deep Transformers", 2025: the closed
form of the Gaussian flow with its blow-up time, and the figures of trace-normalised covariances: blow-up for softmax
and multi-head attention, divergence without blow-up for L2 attention.

How the numbers compare: the integration of softmax flows comes to an end within 1e-8 of the closed-form time; every shape
of the softmax and multi-head flows ends on the circle; under L2 attention nothing blows up, the growth rate of the trace
approaches 2, as it must for V = K = I and ``Q = diag(1, 1/2)``, and the shapes also tend to rank 1.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa


def disc(shapes: np.ndarray) -> np.ndarray:
    """``(a - b, 2c)`` of a stack of covariances of trace 1: points of the unit disc."""
    return np.stack([shapes[:, 0, 0] - shapes[:, 1, 1], 2.0 * shapes[:, 0, 1]], axis=-1)


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("blow_up", __doc__, argv)
    rng = np.random.default_rng(4)
    A = np.array([[0.8, 0.6], [-0.2, 0.1]])
    B = np.array([[0.2, -0.5], [0.5, 0.6]])
    heads = [oa.SoftmaxAttention(A, np.eye(2)), oa.SoftmaxAttention(B, np.array([[0.9, 0.3], [0.0, 0.7]]))]
    maps = {
        "softmax": heads[0],
        "two heads": oa.MultiHeadAttention(heads),
        "L2": oa.L2Attention(np.diag([1.0, 0.5]), np.eye(2), np.eye(2)),
    }
    roots = rng.uniform(-1.0, 1.0, (12, 2, 2))
    starts = roots @ np.swapaxes(roots, 1, 2) + 0.05 * np.eye(2)
    figure, axes = panels(2, rows=2, size=(4.2, 3.9))
    figure.suptitle(r"covariances $\Sigma$ with rows (a, c), (c, b); the circle is rank 1", fontsize=11)
    traces = axes[3]
    errors, ranks, rates = [], [], []
    for ax, (name, attention), color in zip(axes, maps.items(), ("blue", "green", "orange"), strict=False):
        runs = oa.gaussian_flow_batch(attention, starts, t_span=(0.0, 40.0))
        for k, (S, run) in enumerate(zip(starts, runs, strict=True)):
            path = disc(run.shapes)
            ranks.append(1.0 - np.linalg.norm(path[-1]))
            if name == "L2":
                assert run.blow_up_time == np.inf, f"L2 attention must not blow up, received {run.blow_up_time}"
                rates.append((run.log_traces[-1] - run.log_traces[-2]) / (run.times[-1] - run.times[-2]))
            else:
                assert run.blow_up_time < np.inf, f"{name} should blow up, received no blow-up"
            if name == "softmax":
                root = np.linalg.cholesky(S)
                exact = 1.0 / np.linalg.eigvalsh(root.T @ (A + A.T) @ root)[-1]
                errors.append(abs(run.times[-1] / exact - 1.0))  # the last step of the integrator: it cannot go beyond
            ax.plot(*path.T, color=oa.plotting.COLORS[color], lw=1)
            ax.plot(*path[0], color=oa.plotting.COLORS["grey"], marker="o", ms=4, ls="none")
            ax.plot(*path[-1], color=oa.plotting.COLORS["red"], marker="^", ms=6, ls="none")
            if k < 3:
                label = name if k == 0 else None
                log10 = run.log_traces / np.log(10.0)
                traces.plot(run.times, log10, color=oa.plotting.COLORS[color], lw=1.5, label=label)
        angle = np.linspace(0.0, 2.0 * np.pi, 200)
        ax.plot(np.cos(angle), np.sin(angle), color=oa.plotting.COLORS["black"], lw=0.8)
        ax.set_aspect("equal")
        ax.set_xlabel("(a - b) / (a + b)")
        ax.set_ylabel("2c / (a + b)")
        ax.set_title(f"{name}: shapes, from grey to red", fontsize=10)
    traces.set_ylim(-0.5, 8.5)
    traces.set_xlim(0.0, 8.0)
    traces.set_xlabel("time t")
    traces.set_ylabel(r"$\log_{10}$ of the trace a + b")
    traces.legend(fontsize=8, frameon=False, loc="upper right")
    traces.set_title("finite time or never", fontsize=10)
    print(f"softmax: the integration stops within {max(errors):.1e} of the time 1 / lambda_max")
    print(f"distance of the last shapes from the circle: at most {max(ranks):.1e}")
    print(
        f"headline: softmax and two heads blow up; L2 diverges at rate {np.mean(rates):.4f} (theory: 2) without blow-up"
    )
    assert max(errors) < 1e-8, f"the flow should stop at the closed-form time, received {max(errors):.1e}"
    assert max(ranks) < 1e-3, f"the shapes should tend to rank 1, received {max(ranks):.1e}"
    assert np.abs(np.array(rates) - 2.0).max() < 1e-2, f"L2 should grow at rate 2, received {rates}"
    pictures.save(axes[0], "blow_up")


if __name__ == "__main__":
    main()
