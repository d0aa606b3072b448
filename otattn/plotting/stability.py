"""Stability ratios W_p(F(mu), F(nu)) / W_p(mu, nu) of several maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from otattn.plotting.style import COLORS, axes

__all__ = ["plot_stability"]


def plot_stability(
    ratios: Mapping[str, Sequence[Sequence[float]]], *, labels: Sequence[str] | None = None, ax: Any = None
) -> Any:
    """Spread of stability ratios, one group a map, one colour a metric.

    Parameters
    ----------
    ratios : metric -> one sequence of ratios a map
    labels : sequence of str, optional
        Names of the maps.
    ax : matplotlib Axes, optional

    Notes
    -----
    A bar reaches from the smallest to the largest ratio, the box from the first to the third quartile, the dot is the
    largest: it is the empirical stability constant, a lower value of the Lipschitz constant.
    """
    ax = axes(ax)
    width = 0.8 / max(len(ratios), 1)
    count = 0
    for k, ((metric, groups), color) in enumerate(
        zip(ratios.items(), ("blue", "orange", "green", "purple"), strict=False)
    ):
        count = max(count, len(groups))
        for i, values in enumerate(groups):
            x = i + (k - (len(ratios) - 1) / 2) * width
            r = np.asarray(values, dtype=float)
            q1, q3 = np.quantile(r, [0.25, 0.75])
            ax.plot([x, x], [r.min(), r.max()], color=COLORS[color], lw=1)
            ax.plot([x, x], [q1, q3], color=COLORS[color], lw=5, solid_capstyle="butt", alpha=0.6)
            ax.plot([x], [r.max()], color=COLORS[color], marker="o", ms=4, label=metric if i == 0 else None)
    ax.set_xticks(range(count), labels if labels is not None else [str(i) for i in range(count)])
    ax.set_xlabel("attention map")
    ax.set_ylabel("W_p(F(mu), F(nu)) / W_p(mu, nu)")
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=8, frameon=False)
    return ax
