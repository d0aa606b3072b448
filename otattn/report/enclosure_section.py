"""The enclosure of each head: a witnessed lower and a proven upper bound, beside the published one and the real tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from joblib import Parallel, delayed

from otattn.attention import SoftmaxAttention
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


def enclosure_section(layer: SampleLayer, growth: LocalGrowth, *, seed: int, advance: Any, n_jobs: int = 1) -> Section:
    """Enclosures over the ball of the largest token norm, for as many tokens as a window has; heads in parallel."""
    n = layer.hidden_states.shape[1]
    radius = float(growth.radii.max())
    children = np.random.SeedSequence(seed).spawn(len(layer.heads))
    heads = layer.softmax_heads("a report")
    tasks = (delayed(_enclosed)(head, n, radius, child) for head, child in zip(heads, children, strict=True))
    rows: list[list[str]] = []
    records: list[dict[str, Any]] = []
    for h, (found, theorem) in enumerate(Parallel(n_jobs=n_jobs, return_as="generator")(tasks)):
        values = {"real": float(growth.values[h, :, -1].mean()), **found}
        number_of = layer.first_head + h
        records.append({"head": number_of, **values, "upper_by": theorem})
        rows.append([str(number_of), *map(number, values.values()), theorem])
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


def _enclosed(
    head: SoftmaxAttention, n: int, radius: float, child: np.random.SeedSequence
) -> tuple[dict[str, float], str]:
    """Both bounds of one head, their ratio and the published bound; which theorem the upper one is of."""
    witness = adversarial_head_tokens(head, n, radius, rng=child)
    value = cluster_constant(head, witness, n=n)
    source = "local constant at adversarial tokens"
    lower = Bound(value, "lower", source, 2.0, Ball(radius), n, witness, attention=head)
    enclosure = Enclosure(lower, lipschitz_upper_bound(head, radius=radius, n=n))
    paper = published_upper(head, radius=radius, n=n)
    values = {
        "lower": enclosure.lower.value,
        "upper": enclosure.upper.value,
        "ratio": enclosure.ratio,
        "published": math.nan if paper is None else paper.value,
    }
    return values, enclosure.upper.name
