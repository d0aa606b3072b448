"""Norms of composed layers against products of norms, by depth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otattn.lipschitz.local.depth import DepthProfile
from otattn.plotting.style import COLORS, axes, expect, finished, metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_depth"]


def plot_depth(profile: DepthProfile, *, ax: Axes | None = None) -> Axes:
    """The norm of the first 1, 2, ... stages with its error bar, each stage's own norm, and their product; log scale.

    Where the profile has them: the splitting part and the measured stability between two texts.

    Parameters
    ----------
    profile : DepthProfile
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
    """
    expect(profile, DepthProfile, "profile")
    ax = axes(ax)
    depth = np.arange(1, len(profile.names) + 1)
    ax.plot(depth, profile.product, color=COLORS["red"], marker="s", ms=4, lw=1.8, label="product of the layers' norms")
    ax.plot(depth, profile.blocks, color=COLORS["sky"], marker="^", ms=4, lw=1, ls="--", label="each layer's norm")
    ax.errorbar(
        depth,
        profile.composed,
        yerr=profile.error_bars[0],
        color=COLORS["blue"],
        marker="o",
        ms=5,
        lw=2,
        capsize=3,
        label="norm of the layers composed",
    )
    for values, color, label in (
        (profile.splitting, "purple", "splitting part, composed"),
        (profile.stability, "green", "measured between two texts"),
    ):
        if values is not None:
            ax.plot(depth, values, color=COLORS[color], marker="d", ms=4, lw=1.2, label=label)
    ax.set_yscale("log")
    step = max(1, -(-len(depth) // 12))
    ax.set_xticks(depth[::step], [str(d) for d in depth[::step]])
    return finished(
        ax, xlabel="depth (number of stages)", ylabel=f"local constant in {metric(2)} at n = {profile.mu.n} tokens"
    )
