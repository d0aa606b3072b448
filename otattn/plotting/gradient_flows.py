"""Gradient-flow structure: energies along flows and geodesics, and the defects of the variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from otattn.gradient_flow.convexity import DisplacementConvexity
from otattn.gradient_flow.dissipation import EnergyDissipation
from otattn.gradient_flow.table import StructureTable
from otattn.plotting.style import COLORS, axes, expect, finished

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_displacement_convexity", "plot_energy_dissipation", "plot_structure_table"]

_FLOOR = 1e-16
_COLUMNS = ("field", "wasserstein", "twisted", "mobility", "bures", "dissipation")


def plot_energy_dissipation(result: EnergyDissipation, *, ax: Axes | None = None) -> Axes:
    """The change of the energy along the flow (dots) and the work of the velocity (line), which must agree.

    Parameters
    ----------
    result : EnergyDissipation
    ax : matplotlib Axes, optional

    Returns
    -------
    matplotlib Axes
    """
    expect(result, EnergyDissipation, "result")
    ax = axes(ax)
    unit = "" if result.log_scale == 0.0 else f", in units of $e^{{{result.log_scale:.3g}}}$"
    work = "work of the velocity" + (", weighted by Z" if result.mobility else "")
    ax.plot(result.times, result.work, color=COLORS["blue"], lw=2, label=work)
    change = result.energies - result.energies[0]
    ax.plot(
        result.times, change, color=COLORS["red"], ls="none", marker="o", ms=6, mfc="none", label="change of energy"
    )
    way = "ascent" if result.coefficient > 0 else "descent"
    ax.set_title(f"{type(result.energy).__name__}, {way}: largest relative gap {result.defect:.1e}", fontsize=10)
    return finished(ax, xlabel="time t of the flow", ylabel=rf"$E(\mu_t) - E(\mu_0)${unit}")


def plot_structure_table(table: StructureTable, *, ax: Axes | None = None) -> Axes:
    """Defects of every variant as a heat map of their powers of ten: dark where a structure holds.

    Parameters
    ----------
    table : StructureTable
    ax : matplotlib Axes, optional

    Notes
    -----
    Cells give the defect, by its power of ten below 0.01; below 1e-16, the rounding of floats, they say so. A dash marks
    tests that do not apply.
    """
    expect(table, StructureTable, "table")
    ax = axes(ax, figsize=(7.6, 1.2 + 0.24 * len(table.entries)))
    data = np.full((len(table.entries), len(_COLUMNS)), np.nan)
    for i, row in enumerate(table.entries):
        for j, name in enumerate(_COLUMNS):
            value = row.report.defects[name]
            if value is not None:
                data[i, j] = np.log10(min(max(value, _FLOOR), 1e3))
    image = ax.imshow(np.ma.masked_invalid(data), aspect="auto", cmap="cividis", vmin=-16.0, vmax=0.0)
    for i, j in np.ndindex(data.shape):
        blank = bool(np.isnan(data[i, j]))
        text = "–" if blank else _cell(float(data[i, j]))
        color = "black" if blank or data[i, j] > -6.0 else "white"
        ax.text(j, i, text, ha="center", va="center", fontsize=7, color=color)
    names = ["field", "Wasserstein", "times Z", "any\nmobility", "Gaussians", "energy\nbalance"]
    ax.set_xticks(range(len(_COLUMNS)), names)
    ax.set_yticks(range(len(table.entries)), [f"{r.variant}, {r.values}" for r in table.entries], fontsize=7)
    ax.tick_params(axis="x", labelsize=8)
    ax.set_xlabel("structure that is tested (–: the test does not apply to this map)")
    ax.figure.colorbar(image, ax=ax, label=r"$\log_{10}$ of the defect, cut at the rounding of floats")
    return ax


def _cell(log10: float) -> str:
    if log10 > -2.0:
        return f"{10**log10:.2f}"
    return "< 1e-16" if log10 <= -16.0 else f"1e{log10:.0f}"


def plot_displacement_convexity(result: DisplacementConvexity, *, ax: Axes | None = None) -> Axes:
    """The energy along the geodesic of the most violating pair, its chord, and where it bends down most.

    Parameters
    ----------
    result : DisplacementConvexity
    ax : matplotlib Axes, optional
    """
    expect(result, DisplacementConvexity, "result")
    ax = axes(ax)
    t, e = result.times, result.energies
    ax.plot(t, e, color=COLORS["blue"], lw=2, label="E along the geodesic")
    ax.plot([t[0], t[-1]], [e[0], e[-1]], color=COLORS["grey"], ls="--", lw=1.2, label="chord (a convex E stays below)")
    at = float(np.interp(result.time, t, e))
    label = f"least second derivative, {result.least:.3g} $W_2^2$"
    ax.plot([result.time], [at], color=COLORS["red"], ls="none", marker="o", ms=6, label=label)
    pairs = "one geodesic" if result.n_pairs == 1 else f"most violating of {result.n_pairs} geodesics"
    ax.set_title(f"{type(result.energy).__name__}: {pairs}", fontsize=10)
    return finished(ax, xlabel=r"time t along the geodesic from $\mu$ to $\nu$", ylabel=r"energy $E(\mu_t)$")
