"""Colours and axes shared by all pictures (matplotlib is imported when a picture is drawn)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["COLORS", "axes", "expect", "finished", "metric", "power", "save"]

# Okabe and Ito's palette: distinguishable with every common colour blindness
COLORS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "purple": "#CC79A7",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
    "grey": "#7F7F7F",
    "black": "#000000",
}


def axes(ax: Any = None, *, figsize: tuple[float, float] = (6.4, 4.2), projection: str | None = None) -> Any:
    """``ax`` itself, or the axes of a new figure (made without pyplot, so nothing has to be closed)."""
    if ax is not None:
        return ax
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, layout="constrained")
    FigureCanvasAgg(figure)
    out = figure.add_subplot(projection=projection)
    if projection is None:
        out.spines[["top", "right"]].set_visible(False)
    return out


def metric(p: float | str) -> str:
    """``W_p`` as mathtext, for labels."""
    return r"$W_\infty$" if p in (float("inf"), "inf") else f"$W_{{{p if isinstance(p, str) else f'{p:g}'}}}$"


def power(exponent: float, error: float | None = None) -> str:
    """``n^exponent`` as mathtext, with its standard error."""
    return f"$n^{{{exponent:.2f}" + ("}$" if error is None else f" \\pm {error:.2f}}}$")


def finished(ax: Any, *, legend: Mapping[str, Any] | None = None, **properties: Any) -> Any:
    """``ax`` with its labels and scales set, and a legend: the end of a picture."""
    ax.set(**properties)
    ax.legend(fontsize=8, frameon=False, **(legend or {}))
    return ax


DRAWN_BY = {
    "ClusterHistory": "plot_cluster_counts",
    "DepthConvergence": "plot_depth_convergence",
    "DepthProfile": "plot_depth",
    "DisplacementConvexity": "plot_displacement_convexity",
    "EnclosureTable": "plot_enclosure",
    "EnergyDissipation": "plot_energy_dissipation",
    "FlowStability": "plot_flow_stability",
    "GaussianTrajectory": "plot_covariance_ellipses, plot_covariance_cone and plot_shape_disc",
    "LimitPolytope": "plot_limit_polytope",
    "LocalGrowth": "plot_local_growth",
    "SampleComplexity": "plot_sample_complexity",
    "MeanFieldLimit": "plot_mean_field_limit",
    "RankHistogram": "plot_rank_histogram",
    "RealAgainstAdversarial": "plot_real_against_adversarial",
    "StabilityStudy": "plot_stability",
    "StructureTable": "plot_structure_table",
    "Trajectory": "plot_token_flow, plot_sphere_flow and animate_flow",
}
"""Which functions draw a result."""


def expect(value: Any, kind: type, name: str) -> None:
    """Refuse a result that a function does not draw, with the name of the one that does.

    Raises
    ------
    TypeError
        ``value`` is not of the type ``kind``.
    """
    if not isinstance(value, kind):
        other = DRAWN_BY.get(type(value).__name__)
        fix = f"{other} take{'' if ' and ' in other else 's'} that" if other else f"build a {kind.__name__} first"
        raise TypeError(f"{name} must be a {kind.__name__}, received {type(value).__name__}; {fix}.")


def save(ax: Any, path: Any, *, dpi: int = 160, columns: int | None = None) -> None:
    """Write the figure of ``ax`` to ``path``; endings ``.pdf`` and ``.svg`` give vectors.

    Parameters
    ----------
    ax : matplotlib Axes
    path : str or Path
    dpi : int
        Dots per inch of pictures that are not vectors.
    columns : {None, 1, 2}
        Scale the figure to the width of one (3.35 inches) or two columns (6.9 inches) of a paper.
    """
    if columns is not None:
        if columns not in (1, 2):
            raise ValueError(f"columns must be 1, 2 or None, received {columns!r}.")
        width, height = ax.figure.get_size_inches()
        wide = 3.35 if columns == 1 else 6.9
        ax.figure.set_size_inches(wide, height * wide / width)
    ax.figure.savefig(path, dpi=dpi)
