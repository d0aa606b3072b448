r"""Four ways for a covariance to settle: at zero, on a line, on a plane, on two lines
==================================================================================

Softmax attention keeps Gaussians Gaussian, and its flow moves the covariance by ``Sigma' = V Sigma A Sigma + Sigma A^T
Sigma V^T``. In the plane a covariance ``[[a, c], [c, b]]`` is the point ``(a - b, 2c, a + b)`` of a round cone. Four pairs
of A and V send random points of the cone to four kinds of limits, all of which have a closed form:

* V = I, A = -I: to 0, since ``(Sigma^-1)' = 2 I``;
* V = I, A = diag(-1, 0): to the line of ``diag(0, x)``, ``x = b - c^2 / a``, since only one entry of ``Sigma^-1`` grows;
* V = diag(0, 1), A = diag(-1, 0): to the plane ``c = 0``, at ``diag(a, b - c^2 / a)``, since ``a' = 0``, ``c' = -a c``,
  ``b' = -2 c^2``;
* V = -A, A = [[0, 1], [1, 0]]: to two lines, ``diag(x, 0)`` or ``diag(0, x)`` with ``x = |a - b|``, since ``a' = b'`` and
  the flow descends ``(a b + c^2) / 2``.

All limits but those of the plane have rank at most 1, on the boundary of the cone: they are degenerate Gaussians.

Reproduces: Castin, Ablin, Carrillo, Peyré, "A Unified Perspective on the Dynamics of Deep Transformers", 2025, the
figure with the evolution of covariances in the cone of positive semidefinite 2 x 2 matrices, with its four patterns
(the parameters here are ours, chosen for their closed forms).

How the numbers compare: the same four patterns; the ends of the flows agree with the closed forms to 2e-4 where the
decay is like 1/t (stopped at t = 1e4), much better where it is exponential.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _gallery import gallery, panels

import otattn as oa

TOP = 2.5


def patterns() -> dict[str, tuple[np.ndarray, np.ndarray, float, Callable[[float, float, float], np.ndarray]]]:
    """A, V, the time at which the flow is stopped (longer for decays like 1/t), and the limit of ``(a, b, c)``."""
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    half = np.diag([-1.0, 0.0])
    return {
        "to zero": (-np.eye(2), np.eye(2), 1e4, lambda a, b, c: np.zeros((2, 2))),
        "to a line": (half, np.eye(2), 1e4, lambda a, b, c: np.diag([0.0, b - c * c / a])),
        "to a plane": (half, np.diag([0.0, 1.0]), 1e2, lambda a, b, c: np.diag([a, b - c * c / a])),
        "to two lines": (swap, -swap, 1e2, lambda a, b, c: np.diag([max(a - b, 0.0), max(b - a, 0.0)])),
    }


def cone(covs: np.ndarray) -> np.ndarray:
    """Coordinates ``(a - b, 2c, a + b)`` of a stack of covariances."""
    a, b, c = covs[..., 0, 0], covs[..., 1, 1], covs[..., 0, 1]
    return np.stack([a - b, 2.0 * c, a + b], axis=-1)


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("covariance_patterns", __doc__, argv)
    rng = np.random.default_rng(2)
    roots = rng.uniform(-1.0, 1.0, (14, 2, 2))
    starts = roots @ np.swapaxes(roots, 1, 2) + 0.02 * np.eye(2)
    figure, axes = panels(2, rows=2, size=(4.0, 3.7), layout="none", subplot_kw={"projection": "3d"})
    figure.subplots_adjust(left=0.0, right=0.95, bottom=0.09, top=0.91, wspace=0.06, hspace=0.12)
    figure.suptitle(r"covariances $\Sigma$ with rows (a, c), (c, b) in the cone of rank 1 and 2", fontsize=11)
    worst = 0.0
    for ax, (title, (A, V, end, limit)) in zip(axes, patterns().items(), strict=True):
        _draw_cone(ax, title)
        times = np.concatenate([[0.0], np.logspace(-2, np.log10(end), 80)])
        runs = oa.gaussian_flow_batch(oa.SoftmaxAttention(A, V), starts, t_span=(0.0, end), t_eval=times, rtol=1e-8)
        error = 0.0
        for S, run in zip(starts, runs, strict=True):
            expected = limit(S[0, 0], S[1, 1], S[0, 1])
            error = max(error, float(np.abs(run.covs[-1] - expected).max()))
            x, y, z = cone(run.covs).T
            ax.plot(x, y, z, color=oa.plotting.COLORS["blue"], lw=1)
            ax.scatter(x[:1], y[:1], z[:1], color=oa.plotting.COLORS["orange"], s=8)
            ax.scatter(x[-1:], y[-1:], z[-1:], color=oa.plotting.COLORS["red"], s=22, marker="^")
        ax.set_title(title, fontsize=11)
        print(f"{title:>13}: limits within {error:.1e} of the closed form")
        worst = max(worst, error)
    figure.legend(handles=_legend(), loc="lower center", ncols=4, fontsize=9, frameon=False)
    print(f"headline: all four patterns, limits within {worst:.1e} of the closed forms")
    assert worst < 1e-3, f"limits should agree with the closed forms, received an error of {worst:.1e}"
    pictures.save(figure, "covariance_patterns")


def _draw_cone(ax: Any, title: str) -> None:
    angle, height = np.meshgrid(np.linspace(0.0, 2.0 * np.pi, 33), np.linspace(0.0, TOP, 6))
    colors = oa.plotting.COLORS
    ax.plot_wireframe(height * np.cos(angle), height * np.sin(angle), height, color=colors["grey"], lw=0.3, alpha=0.5)
    if title == "to a plane":
        corner = np.array([[0.0, 0.0], [-TOP, TOP]])
        ax.plot_surface(corner, np.zeros((2, 2)), np.abs(corner), color=colors["green"], alpha=0.25)
    for side in {"to a line": (-1,), "to two lines": (-1, 1)}.get(title, ()):
        ax.plot([0.0, side * TOP], [0.0, 0.0], [0.0, TOP], color=colors["green"], lw=3, alpha=0.5)
    ax.grid(False)
    ax.set_xticks([-2, 0, 2])
    ax.set_yticks([-2, 0, 2])
    ax.set_zticks([0, 1, 2])
    ax.set_xlabel("a - b", labelpad=-4)
    ax.set_ylabel("2c", labelpad=-4)
    ax.set_zlabel("a + b", labelpad=-6)
    ax.tick_params(labelsize=8, pad=-2)
    ax.set_zlim(0.0, TOP)
    ax.set_box_aspect((1.0, 1.0, 0.8), zoom=1.15)
    ax.view_init(elev=20, azim=-65)


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    colors = oa.plotting.COLORS
    return [
        Line2D([], [], color=colors["orange"], marker="o", ls="none", ms=4, label="start"),
        Line2D([], [], color=colors["blue"], lw=1.5, label="covariance along the flow"),
        Line2D([], [], color=colors["green"], lw=3, alpha=0.5, label="limit set"),
        Line2D([], [], color=colors["red"], marker="^", ls="none", ms=6, label="end of the flow"),
    ]


if __name__ == "__main__":
    main()
