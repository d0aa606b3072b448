"""What a busy reader takes away: five or six sentences and one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from otattn.report.section import Section, number

__all__ = ["summarised"]


def summarised(sections: Sequence[Section]) -> list[Section]:
    """The sections behind their summary, which shows the picture of the first of them."""
    data = {section.title: section.data for section in sections}
    first = sections[0]
    sentences = [
        *([_network(data["The network"])] if "The network" in data else []),
        *_enclosure(data["Enclosure of the Lipschitz constant"]),
        _stability(data["Stability constants"]),
        _local(data["Local constants"]),
        _structure(data["Gradient-flow structure"]),
    ]
    lines = [line for sentence in sentences for line in (sentence, "")]
    return [
        Section("Summary", lines, {"sentences": sentences}, first.pictures),
        replace(first, pictures={}),
        *sections[1:],
    ]


def _network(data: dict[str, Any]) -> str:
    return (
        f"At {data['tokens']} tokens the network of {len(data['composed'])} layers stretches small displacements by up to "
        f"{number(data['composed'][-1])} in W_2; the product of its layers' constants is {number(data['product'][-1])}."
    )


def _enclosure(data: dict[str, Any]) -> list[str]:
    heads = data["heads"]
    lower, upper = (_range([head[key] for head in heads]) for key in ("lower", "upper"))
    real = _mean([head["lower"] / head["real"] for head in heads])
    return [
        f"Over all {data['n']} tokens of norm at most {data['radius']:.1f}, the W_2 Lipschitz constant of each head lies between "
        f"a witnessed value ({lower}) and a proven one ({upper}): a factor of {number(data['geometric_mean_ratio'], 3)} in the "
        "geometric mean.",
        f"At the given tokens the constant is {real:.3g} times smaller: the ball is a worst case, and they are far from it.",
    ]


def _stability(data: dict[str, Any]) -> str:
    largest = max(head["W_2"]["largest"] for head in data["heads"])
    return (
        f"Between pairs of runs of {data['n']} of these tokens no head stretched W_2 by more than {number(largest, 3)} "
        f"({data['n_pairs']} pairs a head; a measured value, no bound)."
    )


def _local(data: dict[str, Any]) -> str:
    growth = data.get("mean_exponent")
    if growth is None or not math.isfinite(growth["exponent"]):
        return "There are too few tokens to say how the local constant grows with their number."
    return (
        f"With more tokens the local constant grows like n^{growth['exponent']:.2f} (standard error {growth['standard_error']:.2f}); "
        "the worst case over the ball grows like the square root of n."
    )


def _structure(data: dict[str, Any]) -> str:
    if "layer" not in data:
        return "The layer maps to another dimension than its own: it has no flow in depth."
    return f"Is the whole layer, as a flow in depth, a gradient flow? {data['layer']['verdict']}, to {data['layer']['tol']:g}."


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return number(low) if len(values) == 1 else f"{number(low)} to {number(high)}"


def _mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values)) if min(values) > 0 else math.nan
