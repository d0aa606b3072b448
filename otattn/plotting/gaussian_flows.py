"""Covariances along Gaussian flows: the cone, the disc of shapes, ellipses, and ranks of limits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from otattn._linalg import Array
from otattn.dynamics.gaussian_trajectory import GaussianTrajectory
from otattn.dynamics.limit_rank import RankHistogram
from otattn.plotting.flows import axes_3d
from otattn.plotting.style import COLORS, axes, expect, finished

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "plot_covariance_cone",
    "plot_covariance_ellipses",
    "plot_rank_histogram",
    "plot_shape_disc",
]

SHAPE = r"covariance $\Sigma$ with rows (a, c), (c, b)"
PALETTE = ("blue", "orange", "green", "purple", "sky", "red")


def cone_coordinates(covs: Array) -> Array:
    """``(a - b, 2 c, a + b)`` of covariances ``[[a, c], [c, b]]``: PSD matrices are a round cone, rank one its boundary."""
    a, b, c = covs[..., 0, 0], covs[..., 1, 1], covs[..., 0, 1]
    return np.stack([a - b, 2.0 * c, a + b], axis=-1)


def plot_covariance_cone(
    trajectories: GaussianTrajectory | Iterable[GaussianTrajectory],
    *,
    max_trace: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Covariances of dimension 2 inside the cone of positive semi-definite matrices.

    Parameters
    ----------
    trajectories : one or several GaussianTrajectory
        Hollow dots: start. Full dots: end of what is shown.
    max_trace : float, optional
        Height of the cone; 1.2 times the largest initial trace, or the largest of those that stay below four times it.
    ax : three-dimensional matplotlib Axes, optional
    """
    flows = _plane(trajectories)
    space: Any = axes_3d(ax)
    start = max(math.exp(float(g.log_traces[0])) for g in flows)
    below = [math.exp(min(float(g.log_traces.max()), 700.0)) for g in flows]
    height = max_trace or 1.2 * max([start, *[v for v in below if v < 4.0 * start]])
    r, angle = np.meshgrid([0.0, height], np.linspace(0.0, 2.0 * np.pi, 61))
    space.plot_surface(r * np.cos(angle), r * np.sin(angle), r, color=COLORS["grey"], alpha=0.10, lw=0)
    rim = np.linspace(0.0, 2.0 * np.pi, 121)
    space.plot(height * np.cos(rim), height * np.sin(rim), height, color=COLORS["grey"], lw=0.8)
    for k, g in enumerate(flows):
        keep = np.maximum.accumulate(g.log_traces) <= math.log(height)
        if not keep.any():
            continue
        points = cone_coordinates(np.exp(g.log_traces[keep])[:, None, None] * g.shapes[keep])
        color = COLORS[PALETTE[k % len(PALETTE)]]
        space.plot(*points.T, color=color, lw=1.0)
        space.scatter(*points[:1].T, s=14, facecolors="white", edgecolors=color, depthshade=False)
        space.scatter(*points[-1:].T, s=14, color=color, depthshade=False)
    space.set(xlabel="a - b", ylabel="2c", zlabel="a + b")
    space.set_title(SHAPE, fontsize=9)
    return space


def plot_shape_disc(trajectories: GaussianTrajectory | Iterable[GaussianTrajectory], *, ax: Axes | None = None) -> Axes:
    """``Sigma / tr Sigma`` of dimension 2 in the unit disc: the centre is isotropic, the circle has rank one.

    Parameters
    ----------
    trajectories : one or several GaussianTrajectory
        Blow-up and divergence included; hollow dots: start, full dots: end (red where the flow blows up).
    ax : matplotlib Axes, optional
    """
    flows = _plane(trajectories)
    ax = axes(ax, figsize=(5.0, 5.0))
    rim = np.linspace(0.0, 2.0 * np.pi, 181)
    ax.plot(np.cos(rim), np.sin(rim), color=COLORS["grey"], lw=1.0)
    for k, (grown, color, label) in enumerate(((False, "blue", "exists to the end"), (True, "red", "blows up"))):
        chosen = [g for g in flows if (g.blow_up_time < math.inf) == grown]
        for i, g in enumerate(chosen):
            x, y, _ = cone_coordinates(g.shapes).T
            ax.plot(x, y, color=COLORS[color], lw=0.9, alpha=0.8, zorder=1 + k, label=label if i == 0 else None)
            ax.scatter(x[:1], y[:1], s=12, facecolors="white", edgecolors=COLORS["grey"], zorder=3)
            ax.scatter(x[-1:], y[-1:], s=16, color=COLORS[color], zorder=4)
    ax.set_aspect("equal")
    ax.set_title(SHAPE, fontsize=9)
    place = {"loc": "upper center", "ncols": 2}
    return finished(ax, legend=place, xlabel="(a - b) / (a + b)", ylabel="2c / (a + b)", ylim=(-1.06, 1.3))


def plot_covariance_ellipses(trajectory: GaussianTrajectory, *, count: int = 8, ax: Axes | None = None) -> Axes:
    """Ellipses of one standard deviation at ``count`` of the times, from light to dark."""
    expect(trajectory, GaussianTrajectory, "trajectory")
    _plane(trajectory)
    ax = axes(ax, figsize=(5.0, 5.0))
    angle = np.linspace(0.0, 2.0 * np.pi, 181)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    index = np.unique(np.linspace(0, len(trajectory) - 1, count).round().astype(int))
    for i, k in enumerate(index):
        w, E = np.linalg.eigh(trajectory.covs[k])
        curve = trajectory.means[k][:, None] + (E * np.sqrt(np.maximum(w, 0.0))) @ circle
        shade = 0.25 + 0.75 * i / max(len(index) - 1, 1)
        ax.plot(
            *curve,
            color=COLORS["blue"],
            alpha=shade,
            lw=1.4,
            label=f"t = {trajectory.times[k]:.3g}" if i in (0, len(index) - 1) else None,
        )
    ax.set_aspect("equal", adjustable="datalim")
    return finished(ax, xlabel="first coordinate", ylabel="second coordinate")


def plot_rank_histogram(histograms: RankHistogram | Sequence[RankHistogram], *, ax: Axes | None = None) -> Axes:
    """How many limits have each rank, one colour an experiment; hatched parts had not settled.

    Parameters
    ----------
    histograms : one or several RankHistogram
    ax : matplotlib Axes, optional
    """
    many: list[Any] = list(histograms) if isinstance(histograms, Iterable) else [histograms]
    for h in many:
        expect(h, RankHistogram, "histograms")
    ax = axes(ax)
    width = 0.8 / len(many)
    top = max(h.dim for h in many)
    for k, h in enumerate(many):
        x = np.arange(h.dim + 1) + (k - (len(many) - 1) / 2) * width
        color = COLORS[PALETTE[k % len(PALETTE)]]
        settled = np.bincount(h.ranks[h.settled], minlength=h.dim + 1)
        label = f"{h.variant}, d = {h.dim}, V {h.value}"
        ax.bar(x, settled, width, color=color, label=label)
        ax.bar(
            x, h.counts - settled, width, bottom=settled, color=color, alpha=0.45, hatch="///", edgecolor="white", lw=0
        )
    ax.set_xticks(range(top + 1))
    ax.locator_params(axis="y", integer=True)
    return finished(ax, xlabel="rank of the limit", ylabel="number of draws")


def _plane(trajectories: GaussianTrajectory | Iterable[GaussianTrajectory]) -> list[GaussianTrajectory]:
    flows: list[Any] = [trajectories]
    if isinstance(trajectories, Iterable) and not isinstance(trajectories, GaussianTrajectory):
        flows = list(trajectories)
    for g in flows:
        expect(g, GaussianTrajectory, "trajectories")
    if not flows or any(g.dim != 2 or not len(g) for g in flows):
        dims = sorted({g.dim for g in flows})
        raise ValueError(f"trajectories must have dimension 2 and at least one time, received dimensions {dims}.")
    return flows
