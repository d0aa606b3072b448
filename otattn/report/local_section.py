"""Local constants of each head at the real tokens, against the published bound, as n grows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from otattn.data import SampleLayer
from otattn.lipschitz import bounds
from otattn.lipschitz.local.growth import LocalGrowth, local_growth, sizes_within
from otattn.plotting import plot_local_growth
from otattn.report.section import Section, number, table

__all__ = ["growth_of", "local_section"]


def local_section(layer: SampleLayer, *, advance: Any) -> Section:
    """Particle and splitting parts for the first n tokens of each window, exponents, and the published bound at the same radius."""
    length = layer.hidden_states.shape[1]
    sizes = sizes_within(length)
    parts = []
    for head in layer.heads:
        parts.append(local_growth([head], layer.hidden_states, n_values=sizes))
        advance()
    growth = LocalGrowth(
        parts[0].n_values,
        np.concatenate([g.particle for g in parts]),
        np.concatenate([g.splitting for g in parts]),
        parts[0].radii,
    )
    radius = float(growth.radii.max())
    published = np.array(
        [[bounds.castin2024_discrete(head, radius=radius, n=n).value for n in sizes] for head in layer.heads]
    )
    rows = []
    for h in range(len(layer.heads)):
        fit = growth.exponent(h) if len(sizes) > 1 else None
        mean = growth.values[h].mean(axis=0)
        growing = "-" if fit is None else f"{fit.exponent:.2f} ± {fit.standard_error:.2f}"
        paper = published[h, -1]
        rows.append([str(layer.first_head + h), *map(number, mean), growing, number(paper), number(paper / mean[-1])])
    pictures: dict[str, Any] = {}
    data: dict[str, Any] = {**growth.to_dict(), "published_discrete": published.tolist(), "ball_radius": radius}
    if len(sizes) > 1:
        fit = growth.mean_exponent()
        data["mean_exponent"] = {"exponent": fit.exponent, "standard_error": fit.standard_error}
        label = f"published bound for n tokens, geometric mean, R = {radius:.1f}"
        ours = [[bounds.row_bound(head, radius=radius, n=n).value for n in sizes] for head in layer.heads]
        curves = {
            label: np.exp(np.log(published).mean(axis=0)).tolist(),
            f"our bound for n tokens, geometric mean, R = {radius:.1f}": np.exp(np.log(ours).mean(axis=0)).tolist(),
        }
        pictures["local.png"] = partial(plot_local_growth, growth, bounds=curves)
        headline = (
            f"Over heads the constant grows like n^({fit.exponent:.2f} ± {fit.standard_error:.2f}) on these tokens; "
            "the worst case over the ball grows like the square root of n."
        )
    else:
        headline = "One size only, no growth fitted."
    columns = [f"n = {n}" for n in sizes]
    header = ["head", *columns, "growth exponent", f"published, {columns[-1]}", "published / real"]
    lines = [
        "Local W_2 Lipschitz constant at the first n tokens of each window, mean over windows (exact, singular values "
        f"of the analytic Jacobian), and the published bound for n tokens in the ball of radius R = {radius:.2f} "
        "(the largest token norm).",
        "",
        headline,
        "",
        *table(header, rows),
    ]
    return Section("Local constants", lines, data, pictures)


def growth_of(section: Section) -> LocalGrowth:
    """The local constants that the section holds."""
    return LocalGrowth(
        *(np.asarray(section.data[name], dtype=float) for name in ("n", "particle", "splitting", "radius"))
    )
