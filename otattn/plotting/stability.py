"""Stability ratios W_p(F(mu), F(nu)) / W_p(mu, nu) of several maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.plotting.style import COLORS, axes, finished, metric
from otattn.stability.result import StabilityStudy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_stability"]

Ratios = StabilityStudy | Sequence[float] | NDArray[np.float64]
PALETTE = ("blue", "orange", "green", "purple")


def plot_stability(
    ratios: StabilityStudy | Iterable[Ratios] | Mapping[str, StabilityStudy | Iterable[Ratios]],
    *,
    labels: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Spread of stability ratios, one group a map, one colour a metric.

    Parameters
    ----------
    ratios : StabilityStudy, sequence, or mapping of metric to one of them
        A study, or one study or one sequence of ratios a map; at most four metrics.
    labels : sequence of str, optional
        Names of the maps; by default those of the studies, or numbers.
    ax : matplotlib Axes, optional

    Raises
    ------
    TypeError, ValueError
        Something else, or ratios that are not finite.

    Notes
    -----
    A bar reaches from the smallest to the largest ratio, the box from the first to the third quartile, the dot is the
    largest: it is the empirical stability constant, a lower value of the Lipschitz constant.
    """
    metrics = ratios if isinstance(ratios, Mapping) else {_metric(ratios): ratios}
    if not 1 <= len(metrics) <= len(PALETTE):
        raise ValueError(
            f"ratios must have 1 to {len(PALETTE)} metrics, received {len(metrics)}; draw the others apart."
        )
    groups = {order: _maps(value) for order, value in metrics.items()}
    count = max(len(maps) for maps in groups.values())
    names = [name for maps in groups.values() if len(maps) == count for name, _ in maps][:count]
    if labels is not None and len(labels) != count:
        raise ValueError(f"labels must name {count} maps, received {len(labels)}.")
    ax = axes(ax)
    width = 0.8 / len(groups)
    for k, ((order, maps), color) in enumerate(zip(groups.items(), PALETTE, strict=False)):
        for i, (_, r) in enumerate(maps):
            x = i + (k - (len(groups) - 1) / 2) * width
            q1, q3 = np.quantile(r, [0.25, 0.75])
            ax.plot([x, x], [r.min(), r.max()], color=COLORS[color], lw=1)
            ax.plot([x, x], [q1, q3], color=COLORS[color], lw=5, solid_capstyle="butt", alpha=0.6)
            ax.plot([x], [r.max()], color=COLORS[color], marker="o", ms=4, label=order if i == 0 else None)
    ax.set_xticks(range(count), names if labels is None else labels)
    for width, name in ((1, "all ratios"), (5, "middle half")):
        ax.plot([], [], color=COLORS["grey"], lw=width, label=name)
    ax.plot([], [], color=COLORS["grey"], marker="o", ms=4, ls="none", label="largest: a lower bound of the constant")
    ax.set_ylim(bottom=0)
    return finished(ax, xlabel="attention map", ylabel=rf"{metric('p')}$(F\mu, F\nu)$ / {metric('p')}$(\mu, \nu)$")


def _metric(ratios: Any) -> str:
    """The order of the studies, where they have one."""
    many = [ratios] if isinstance(ratios, StabilityStudy) else ratios
    orders = {study.p for study in many if isinstance(study, StabilityStudy)} if isinstance(many, Iterable) else set()
    return metric(orders.pop() if len(orders) == 1 else "p")


def _maps(value: Any) -> list[tuple[str, NDArray[np.float64]]]:
    """Name and ratios of each map of a metric."""
    if isinstance(value, StabilityStudy):
        value = [value]
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(
            "ratios must be a StabilityStudy, several of them, or one sequence of ratios a map, received "
            f"{type(value).__name__}; pass study, or {{name: [study, ...]}}."
        )
    out = []
    for i, one in enumerate(value):
        if isinstance(one, StabilityStudy):
            name, numbers = one.labels.get("attention", str(i)), one.ratios
        else:
            name, numbers = str(i), check.vector(one, f"ratios of map {i}")
        if not len(numbers):
            raise ValueError(f"each map must have at least one ratio, received none for map {i}.")
        out.append((name, numbers))
    if not out:
        raise ValueError("ratios must hold at least one map, received none.")
    return out
