"""Mean-field bounds (any measure) against discrete bounds (n tokens), and where they cross."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from otattn.attention import SoftmaxAttention
from otattn.data import SampleLayer
from otattn.lipschitz import bounds
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.local.growth import LocalGrowth
from otattn.plotting import plot_crossover
from otattn.report.section import Section, number, table

__all__ = ["bounds_section", "log10_of"]

GRID = 60


def log10_of(bound: Bound) -> float:
    """log10 of a bound that may exceed the largest float."""
    return bound.log_value / math.log(10.0)


def _power(log10: float) -> str:
    return number(10.0**log10) if log10 < 5 else f"10^{log10:.1f}"


def _curves(
    head: SoftmaxAttention, radius: float, log10_n: list[float]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    sizes = [max(1, round(10.0**x)) for x in log10_n]
    discrete = {
        "published, n tokens": [log10_of(bounds.castin2024_discrete(head, radius=radius, n=n)) for n in sizes],
        "ours, n tokens": [log10_of(bounds.row_bound(head, radius=radius, n=n)) for n in sizes],
    }
    ours = (bounds.column_bound(head, radius=radius), bounds.density_bound(head, radius=radius))
    mean_field = {
        "published, any measure": log10_of(bounds.geshkovski2024_mean_field(head, radius=radius)),
        "ours, any measure": min(map(log10_of, ours)),
    }
    return discrete, mean_field


def bounds_section(layer: SampleLayer, *, growth: LocalGrowth, advance: Any) -> Section:
    """Published and own bounds of every head at one radius, with the crossovers; a picture of the first head."""
    n, radius = layer.hidden_states.shape[1], float(growth.radii.max())
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    heads = layer.softmax_heads("a report")
    for h, head in enumerate(heads, layer.first_head):
        discrete, mean_field = _curves(head, radius, [math.log10(n)])
        crossing = bounds.crossover(head, radius).log10
        record: dict[str, Any] = {
            "head": h,
            "norm_A_times_radius_squared": float(np.linalg.norm(head.A, 2)) * radius**2,
            "log10_discrete": {name: values[0] for name, values in discrete.items()},
            "log10_mean_field": mean_field,
            "log10_crossover_n": crossing,
        }
        records.append(record)
        powers = [*record["log10_discrete"].values(), *mean_field.values(), *crossing.values()]
        rows.append([str(h), number(record["norm_A_times_radius_squared"]), *map(_power, powers)])
        advance()
    crossings = records[0]["log10_crossover_n"]
    grid = np.linspace(0.0, max(3.0, 1.1 * max(crossings.values())), GRID).tolist()
    grid = [x for x in grid if x <= 300.0]
    curves, levels = _curves(heads[0], radius, grid)

    def picture() -> Any:
        first, *others = curves
        less = {f"{k} ({10.0 ** (curves[first][-1] - curves[k][-1]):.1f} times less)": curves[k] for k in others}
        ax = plot_crossover(grid, {first: curves[first], **less}, levels, crossings=crossings)
        ax.set_title(f"head {layer.first_head}, R = {radius:.1f}", fontsize=10)
        return ax

    header = ["head", "||A|| R^2", *(f"{name.split(',')[0]}, n = {n}" for name in curves), *levels]
    header += [f"crossover n, {name}" for name in crossings]
    lines = [
        f"W_2 Lipschitz bounds on the ball of radius R = {radius:.2f}: for n = {n} tokens (grows like the square root of n), "
        "for any measure (mean-field, no n but exponential in ||A|| R^2), and the number of tokens from which the "
        "mean-field bound is the smaller one.",
        "",
        *table(header, rows),
    ]
    return Section(
        "Mean-field and discrete bounds", lines, {"radius": radius, "heads": records}, {"crossover.png": picture}
    )
