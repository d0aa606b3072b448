"""The enclosure of each head: a witnessed lower and a proven upper bound, beside the published one and the real tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from otattn.data import SampleLayer
from otattn.lipschitz.bound import Bound, Enclosure
from otattn.lipschitz.comparison import adversarial_head_tokens
from otattn.lipschitz.enclosure import published_upper
from otattn.lipschitz.local.growth import LocalGrowth
from otattn.lipschitz.lower.clusters import cluster_constant
from otattn.lipschitz.upper_bound import lipschitz_upper_bound
from otattn.measures import Ball
from otattn.plotting import plot_head_enclosures
from otattn.report.section import Section, number, table

__all__ = ["enclosure_section"]


def enclosure_section(layer: SampleLayer, growth: LocalGrowth, *, seed: int, advance: Any) -> Section:
    """Enclosures over the ball of the largest token norm, for as many tokens as a window has."""
    n = layer.hidden_states.shape[1]
    radius = float(growth.radii.max())
    children = np.random.SeedSequence(seed).spawn(len(layer.heads))
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    for h, head in enumerate(layer.softmax_heads("a report")):
        witness = adversarial_head_tokens(head, n, radius, rng=children[h])
        value = cluster_constant(head, witness, n=n)
        source = "local constant at adversarial tokens"
        lower = Bound(value, "lower", source, 2.0, Ball(radius), n, witness, attention=head)
        enclosure = Enclosure(lower, lipschitz_upper_bound(head, radius=radius, n=n))
        paper = published_upper(head, radius=radius, n=n)
        values = {
            "real": float(growth.values[h, :, -1].mean()),
            "lower": enclosure.lower.value,
            "upper": enclosure.upper.value,
            "ratio": enclosure.ratio,
            "published": math.nan if paper is None else paper.value,
        }
        number_of = layer.first_head + h
        records.append({"head": number_of, **values, "upper_by": enclosure.upper.name})
        rows.append([str(number_of), *map(number, values.values()), enclosure.upper.name])
        advance()
    ratios = [r["ratio"] for r in records if math.isfinite(r["ratio"])]
    mean = math.exp(float(np.log(ratios).mean())) if ratios else math.nan
    lines = [
        f"W_2 Lipschitz constant over all n = {n} tokens in the ball of radius R = {radius:.2f}: a lower bound (the local "
        "constant at adversarial tokens, given with them) and an upper bound (the best of our theorems and certified "
        f"relaxations). Geometric mean of upper over lower: {number(mean)}.",
        "",
        *table(["head", "real tokens", "lower", "upper", "upper / lower", "published upper", "upper bound by"], rows),
    ]
    data = {"n": n, "radius": radius, "geometric_mean_ratio": mean, "heads": records}
    return Section(
        "Enclosure of the Lipschitz constant", lines, data, {"enclosure.png": partial(plot_head_enclosures, records)}
    )
