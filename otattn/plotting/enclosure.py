"""Enclosures: upper, lower and published bounds against n or against the radius."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from otattn.lipschitz.comparison import RealAgainstAdversarial
from otattn.lipschitz.enclosure import EnclosureTable
from otattn.lipschitz.local.growth import fit_exponent
from otattn.plotting.growth import against_tokens
from otattn.plotting.style import COLORS, axes, expect, finished, metric, power

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_enclosure", "plot_head_enclosures", "plot_real_against_adversarial"]


def plot_enclosure(table: EnclosureTable, *, ax: Axes | None = None) -> Axes:
    """The band between witnessed lower and proven upper bounds, and the published bound above it; log-log.

    A mean-field row (any measure) is drawn as horizontal lines.
    """
    expect(table, EnclosureTable, "table")
    from matplotlib.ticker import NullLocator

    ax = axes(ax)
    rows = table.rows()
    finite = [r for r in rows if r[table.parameter] is not None]
    if finite:
        x = [r[table.parameter] for r in finite]
        low, high = [r["lower"] for r in finite], [r["upper"] for r in finite]
        ax.fill_between(x, low, high, color=COLORS["sky"], alpha=0.35, label="enclosure")
        ax.plot(x, high, color=COLORS["blue"], marker="v", ms=4, label="upper bound, proven")
        ax.plot(x, low, color=COLORS["green"], marker="^", ms=4, label="lower bound, witnessed")
        paper = [r["published"] if r["published"] is not None else np.nan for r in finite]
        if np.isfinite(paper).any():
            ax.plot(x, paper, color=COLORS["red"], ls="--", marker="s", ms=3, label="published upper bound")
    for r in rows:
        if r[table.parameter] is None and finite and r["upper"] > 100.0 * max(high):
            # a line so far above would squash the rest
            label = f"any measure: {r['lower']:.3g} to {r['upper']:.3g}, above the picture"
            ax.plot([], [], ls="none", label=label)
        elif r[table.parameter] is None:
            ax.axhline(r["upper"], color=COLORS["blue"], ls=":", lw=1.2, label="upper bound, any measure")
            ax.axhline(r["lower"], color=COLORS["green"], ls=":", lw=1.2, label="lower bound, any measure")
    finished(
        ax,
        xscale="log",
        yscale="log",
        xlabel="number of tokens n" if table.parameter == "n" else "radius R of the token ball",
        ylabel=f"Lipschitz constant in {metric(table.enclosures[0].upper.p)}",
    )
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks([r[table.parameter] for r in finite], [f"{r[table.parameter]:g}" for r in finite])
    return ax


def plot_head_enclosures(rows: Sequence[Mapping[str, float]], *, ax: Axes | None = None) -> Axes:
    """One interval a head from the witnessed lower to the proven upper bound; published bound and real tokens beside it.

    ``rows`` have the keys ``head``, ``lower``, ``upper``, ``published`` and ``real``.
    """
    ax = axes(ax)
    x = np.arange(len(rows))
    low, high, paper, real = (np.array([r[k] for r in rows]) for k in ("lower", "upper", "published", "real"))
    ax.vlines(x, low, high, color=COLORS["sky"], lw=6, label="enclosure")
    ax.plot(x, paper, color=COLORS["red"], marker="s", ms=4, ls="", label="published upper bound")
    ax.plot(x, high, color=COLORS["blue"], marker=7, ms=6, ls="", label="upper bound, proven")  # tips at the values
    ax.plot(x, low, color=COLORS["green"], marker=6, ms=6, ls="", label="lower bound, witnessed")
    ax.plot(x, real, color=COLORS["orange"], marker="o", ms=4, ls="", label="local constant at real tokens")
    ax.set_yscale("log")
    ax.set_xticks(x, [str(r["head"]) for r in rows])
    return finished(
        ax,
        legend={"loc": "center left", "bbox_to_anchor": (1.0, 0.5)},
        xlabel="head",
        ylabel=f"Lipschitz constant in {metric(2)}",
    )


def plot_real_against_adversarial(result: RealAgainstAdversarial, *, ax: Axes | None = None) -> Axes:
    """Local constants at real and at adversarial tokens, one thin line a head, geometric means with exponents."""
    expect(result, RealAgainstAdversarial, "result")
    ax = axes(ax)
    n = result.growth.n_values
    groups = (
        ("real tokens", result.growth.values.mean(axis=1), "blue", "sky"),
        ("adversarial tokens", result.adversarial, "red", "orange"),
    )
    for name, values, strong, light in groups:
        for row in values:
            ax.plot(n, row, color=COLORS[light], lw=0.7, alpha=0.8)
        mean = np.exp(np.log(values).mean(axis=0))
        fit = fit_exponent(n, mean)
        low, high = fit.interval()
        label = f"{name}: {power(fit.exponent)}, exponent in [{low:.2f}, {high:.2f}]"
        ax.plot(n, mean, color=COLORS[strong], lw=2, marker="o", ms=4, label=label)
    return against_tokens(ax, n)
