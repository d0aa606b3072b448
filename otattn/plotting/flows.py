"""Tokens along a flow: trajectories in the plane and on the sphere, clusters, stability in time, animations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from otattn._linalg import Array
from otattn.dynamics.clustering import ClusterHistory
from otattn.dynamics.flow_stability import FlowStability
from otattn.dynamics.mean_field_limit import MeanFieldLimit
from otattn.dynamics.polytope import LimitPolytope
from otattn.dynamics.residual import DepthConvergence
from otattn.dynamics.trajectory import Trajectory
from otattn.plotting.style import COLORS, axes, expect, finished, metric, power

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "animate_flow",
    "axes_3d",
    "plot_cluster_counts",
    "plot_depth_convergence",
    "plot_flow_stability",
    "plot_limit_polytope",
    "plot_mean_field_limit",
    "plot_sphere_flow",
    "plot_token_flow",
]

LOG10 = math.log(10.0)


def axes_3d(ax: Any = None, *, figsize: tuple[float, float] = (5.6, 5.2)) -> Any:
    """``ax`` itself, or three-dimensional axes of a new figure."""
    if ax is not None:
        if getattr(ax, "name", "") != "3d":
            raise ValueError("ax must be three-dimensional axes, received plane ones; make them with projection='3d'.")
        return ax
    import mpl_toolkits.mplot3d  # noqa: F401  (registers the projection)

    return axes(None, figsize=figsize, projection="3d")


def plot_token_flow(trajectory: Trajectory, *, ax: Axes | None = None) -> Axes:
    """Paths of tokens in the plane (or positions against time in dimension 1); hollow at the start, full at the end.

    Parameters
    ----------
    trajectory : Trajectory
        Of dimension 1 or 2. The area of a dot is proportional to the token's weight.
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes

    Raises
    ------
    ValueError
        Another dimension.
    """
    expect(trajectory, Trajectory, "trajectory")
    if trajectory.dim > 2:
        raise ValueError(
            f"trajectory must have dimension 1 or 2, received {trajectory.dim}; plot_sphere_flow draws dimension 3."
        )
    ax = axes(ax, figsize=(5.4, 5.0) if trajectory.dim == 2 else (6.4, 4.2))
    X = trajectory.points
    sizes = _sizes(trajectory)
    if trajectory.dim == 1:
        ax.plot(trajectory.times, X[:, :, 0], color=COLORS["blue"], lw=0.9, alpha=0.8)
        ax.set(xlabel="time t", ylabel="token x")
        return ax
    ax.plot(X[:, :, 0], X[:, :, 1], color=COLORS["sky"], lw=0.8, alpha=0.8, zorder=1)
    ax.scatter(
        X[0, :, 0],
        X[0, :, 1],
        s=sizes,
        facecolors="white",
        edgecolors=COLORS["blue"],
        lw=0.9,
        zorder=2,
        label=f"t = {trajectory.times[0]:.3g}",
    )
    ax.scatter(
        X[-1, :, 0], X[-1, :, 1], s=sizes, color=COLORS["red"], lw=0, zorder=3, label=f"t = {trajectory.times[-1]:.3g}"
    )
    ax.set_aspect("equal", adjustable="datalim")
    return finished(ax, xlabel="first coordinate", ylabel="second coordinate")


def plot_sphere_flow(trajectory: Trajectory, *, ax: Axes | None = None) -> Axes:
    """Paths of tokens of dimension 3 around a transparent sphere of their mean final norm.

    Parameters
    ----------
    trajectory : Trajectory
        Of dimension 3, usually with ``normalization="sphere"``.
    ax : three-dimensional matplotlib Axes, optional
    """
    expect(trajectory, Trajectory, "trajectory")
    if trajectory.dim != 3:
        raise ValueError(
            f"trajectory must have dimension 3, received {trajectory.dim}; plot_token_flow draws the plane."
        )
    sphere: Any = axes_3d(ax)
    X = trajectory.points
    R = float(np.linalg.norm(X[-1], axis=1).mean())
    u, v = np.linspace(0, 2 * np.pi, 41), np.linspace(0, np.pi, 21)
    ball = [np.outer(np.cos(u), np.sin(v)), np.outer(np.sin(u), np.sin(v)), np.outer(np.ones_like(u), np.cos(v))]
    sphere.plot_surface(*(0.99 * R * c for c in ball), color=COLORS["grey"], alpha=0.12, lw=0)
    sphere.plot_wireframe(*(0.99 * R * c for c in ball), rstride=5, cstride=5, color=COLORS["grey"], lw=0.3, alpha=0.5)
    for i in range(trajectory.n):
        sphere.plot(*X[:, i].T, color=COLORS["blue"], lw=0.9, alpha=0.8)
    sizes = _sizes(trajectory)
    sphere.scatter(*X[0].T, s=sizes, facecolors="white", edgecolors=COLORS["blue"], depthshade=False)
    sphere.scatter(*X[-1].T, s=sizes, color=COLORS["red"], depthshade=False)
    sphere.set_box_aspect((1, 1, 1))
    sphere.set_axis_off()
    return sphere


def plot_cluster_counts(history: ClusterHistory, *, ax: Axes | None = None) -> Axes:
    """Number of clusters against time; the three longest plateaus before the end are marked, and the one that lasts.

    Parameters
    ----------
    history : ClusterHistory
    ax : matplotlib Axes, optional
    """
    expect(history, ClusterHistory, "history")
    ax = axes(ax)
    ax.step(history.times, history.counts, where="post", color=COLORS["blue"], lw=1.8)
    long = sorted(history.plateaus()[:-1], key=lambda p: p.duration, reverse=True)[:3]
    for k, p in enumerate(long):
        label = "longest plateaus" if k == 0 else ""
        ax.hlines(p.count, p.start, p.stop, color=COLORS["orange"], lw=5, alpha=0.5, label=label)
    for p in history.plateaus()[-1:]:
        ax.hlines(p.count, p.start, p.stop, color=COLORS["green"], lw=5, alpha=0.5, label=f"at the end: {p.count}")
    ax.set_ylim(0, 1.08 * max(int(history.counts.max()), 1))
    ax.locator_params(axis="y", integer=True)
    return finished(ax, xlabel="time t", ylabel=f"clusters (linked below {history.tol:.2g})")


def plot_limit_polytope(polytope: LimitPolytope, trajectory: Trajectory, *, ax: Axes | None = None) -> Axes:
    """Rescaled tokens in the plane with the polytope that they tend to.

    Parameters
    ----------
    polytope : LimitPolytope
        Of tokens in dimension 2.
    trajectory : Trajectory
        The flow of which it is the limit.
    ax : matplotlib Axes, optional
    """
    expect(polytope, LimitPolytope, "polytope")
    expect(trajectory, Trajectory, "trajectory")
    ax = plot_token_flow(trajectory, ax=ax)
    x = polytope.vertices - polytope.vertices.mean(axis=0)
    around = polytope.vertices[np.argsort(np.arctan2(x[:, 1], x[:, 0]))]
    ax.fill(
        around[:, 0], around[:, 1], facecolor=COLORS["yellow"], edgecolor=COLORS["black"], lw=1.2, alpha=0.35, zorder=0
    )
    ax.scatter(
        around[:, 0], around[:, 1], marker="s", s=46, facecolors="none", edgecolors=COLORS["black"], zorder=4,
        label=f"{polytope.n_vertices} vertices",
    )  # fmt: skip
    ax.legend(fontsize=8, frameon=False)
    return ax


def plot_flow_stability(stability: FlowStability, *, ax: Axes | None = None) -> Axes:
    """Growth of the distance of two flows (log10), with the Gronwall bounds.

    Parameters
    ----------
    stability : FlowStability
    ax : matplotlib Axes, optional

    Notes
    -----
    Bounds may be above the largest float: what is drawn are logarithms, and what leaves them too ends the curve; the
    legend says so of a bound that is never finite. The axis of ordinates is symmetric-logarithmic, and named so, when
    bounds exceed the measured growth a hundredfold. Without bounds, growth below tenfold is drawn as it is.
    """
    expect(stability, FlowStability, "stability")
    ax = axes(ax)
    with np.errstate(divide="ignore"):
        logs = np.log(stability.ratios) / LOG10
    top = float(np.abs(logs[np.isfinite(logs)]).max(initial=0.0))
    quotient = f"{metric(stability.p)}$(\\mu_t, \\nu_t)$ / {metric(stability.p)}$(\\mu_0, \\nu_0)$"
    if not stability.log_bounds and top < 1.0:
        ax.plot(stability.times, stability.ratios, color=COLORS["black"], lw=2.2, label="measured")
        ax.axhline(1.0, color=COLORS["grey"], lw=0.6)
        return finished(ax, xlabel="time t", ylabel=quotient)
    ax.plot(stability.times, logs, color=COLORS["black"], lw=2.2, label="measured", zorder=5)
    highest = top
    styles = {"published": ("red", "--"), "ours": ("blue", "-."), "ours, radius along the flow": ("green", ":")}
    for name, values in stability.log_bounds.items():
        color, style = styles.get(name, ("purple", "--"))
        shown = np.where(np.isfinite(values), values, np.nan) / LOG10
        highest = max([highest, *shown[np.isfinite(shown)]])
        late = "" if np.isfinite(values[-1:]).all() else ", above all numbers at the end"
        ax.plot(stability.times, shown, color=COLORS[color], ls=style, lw=1.6, label=f"Gronwall, {name}{late}")
    scale = ""
    if highest > 100.0 * max(top, 1e-3):
        ax.set_yscale("symlog", linthresh=max(1.0, top))
        scale = f" (linear up to {max(1.0, top):.2g})"
    ax.axhline(0.0, color=COLORS["grey"], lw=0.6)
    return finished(ax, xlabel="time t", ylabel=f"$\\log_{{10}}$ of {quotient}{scale}")


def plot_depth_convergence(study: DepthConvergence, *, ax: Axes | None = None) -> Axes:
    """Distance of residual networks from their flow against the depth, log-log, with the fitted order."""
    expect(study, DepthConvergence, "study")
    ax = axes(ax)
    fit = study.fit()
    ax.loglog(study.depths, study.errors, color=COLORS["blue"], marker="o", ms=4, lw=0, label="network against flow")
    line = fit.prefactor * study.depths**fit.exponent
    ax.loglog(study.depths, line, color=COLORS["orange"], lw=1.5, label=f"fitted order {study.order:.3f} in 1/L")
    return finished(ax, xlabel="depth L", ylabel="root mean square distance at the end")


def plot_mean_field_limit(study: MeanFieldLimit, *, ax: Axes | None = None) -> Axes:
    """Distance of n-particle flows from the limit flow against n, log-log: samples (dots), their mean, fitted rate."""
    expect(study, MeanFieldLimit, "study")
    ax = axes(ax)
    fit = study.fit()
    for k, values in enumerate(study.distances.T):
        ax.loglog(
            study.n_values, values, color=COLORS["sky"], marker="o", ms=3, lw=0, label="samples" if k == 0 else None
        )
    line = fit.prefactor * study.n_values**fit.exponent
    label = f"fitted: {power(fit.exponent, fit.standard_error)}"
    ax.loglog(study.n_values, line, color=COLORS["orange"], lw=1.8, label=label)
    ax.set_xticks(study.n_values, [f"{int(n)}" for n in study.n_values])
    ax.minorticks_off()
    what = "moments (Bures-Wasserstein)" if study.reference == "gaussian" else f"particles ({metric(2)})"
    return finished(ax, xlabel="number of tokens n", ylabel=f"distance at t = {study.time:g}, {what}")


def animate_flow(
    trajectory: Trajectory, path: str | Path, *, frames: int = 60, fps: int = 20, trail: int = 8, dpi: int = 100
) -> Path:
    """Write an animation of tokens in the plane with matplotlib's writers.

    Parameters
    ----------
    trajectory : Trajectory
        Of dimension 2, with dense output (the frames are equidistant in time).
    path : str or Path
        ``.gif`` needs Pillow (which matplotlib brings); ``.mp4`` needs ffmpeg.
    frames, fps, dpi : int
    trail : int
        Number of past frames that are drawn behind each token.

    Returns
    -------
    Path

    Raises
    ------
    ValueError
        Another dimension, or another ending of the path.
    """
    expect(trajectory, Trajectory, "trajectory")
    from matplotlib import animation

    if trajectory.dim != 2:
        raise ValueError(f"trajectory must have dimension 2 for an animation, received {trajectory.dim}.")
    target = Path(path)
    writers = {".gif": "pillow", ".mp4": "ffmpeg"}
    if target.suffix not in writers:
        raise ValueError(f"path must end in one of {sorted(writers)}, received {target.name!r}.")
    times = np.linspace(trajectory.t_span[0], trajectory.end, frames)
    X = trajectory(times)
    ax = axes(None, figsize=(4.8, 4.8))
    low, high = X.min(axis=(0, 1)), X.max(axis=(0, 1))
    room = 0.05 * float((high - low).max()) + 1e-12
    ax.set_xlim(low[0] - room, high[0] + room)
    ax.set_ylim(low[1] - room, high[1] + room)
    ax.set_aspect("equal")
    lines = ax.plot(X[:1, :, 0], X[:1, :, 1], color=COLORS["sky"], lw=1.0)
    dots = ax.scatter(*X[0].T, s=_sizes(trajectory), color=COLORS["red"], lw=0, zorder=3)
    title = ax.set_title("")
    writer = animation.writers[writers[target.suffix]](fps=fps)
    with writer.saving(ax.figure, str(target), dpi):
        for k in range(frames):
            past = X[max(0, k - trail) : k + 1]
            for i, line in enumerate(lines):
                line.set_data(past[:, i, 0], past[:, i, 1])
            dots.set_offsets(X[k])
            title.set_text(f"t = {times[k]:.3g}")
            writer.grab_frame()
    return target


def _sizes(trajectory: Trajectory) -> Array:
    """Areas of dots: 18 points for a token of average weight."""
    return np.asarray(np.clip(18.0 * trajectory.n * trajectory.weights, 3.0, 300.0))
