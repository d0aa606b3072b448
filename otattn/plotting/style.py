"""Colours and axes shared by all pictures (matplotlib is imported when a picture is drawn)."""

from __future__ import annotations

from typing import Any

__all__ = ["COLORS", "axes", "save"]

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


def axes(ax: Any = None, *, figsize: tuple[float, float] = (6.4, 4.2)) -> Any:
    """``ax`` itself, or the axes of a new figure (made without pyplot, so nothing has to be closed)."""
    if ax is not None:
        return ax
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=figsize, layout="constrained")
    FigureCanvasAgg(figure)
    out = figure.add_subplot()
    out.spines[["top", "right"]].set_visible(False)
    return out


def save(ax: Any, path: Any, *, dpi: int = 160) -> None:
    """Write the figure of ``ax`` to ``path``."""
    ax.figure.savefig(path, dpi=dpi)
