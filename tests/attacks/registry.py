"""What the library promises, collected from its public namespaces, and who attacks it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from blocks import BLOCKS
from estimates import ESTIMATES
from lower import LOWER
from measured import MEASURED, nearly_equal
from near import NEAR
from outcomes import Outcome
from quantities import QUANTITIES
from scalars import SCALARS, cancelling
from transports import TRANSPORTS
from upper import UPPER, multihead, several_heads

import otattn as oa
from otattn import lipschitz

ATTACKERS: dict[str, Callable[[np.random.Generator], Outcome]] = (
    UPPER | BLOCKS | QUANTITIES | SCALARS | LOWER | TRANSPORTS | MEASURED | NEAR | ESTIMATES
)

PROMISE = re.compile(
    r"\b(proven|proved|certif\w+|never (below|above)|(upper|lower) bounds?|outward|cannot exceed)\b", re.I
)
RESULTS = re.compile(
    r"Bound|Certificate|Enclosure|Transport|CostTransport|StabilityRatio|StabilityStudy|Sweep|FlowStability"
)
"""Return types that hold a proven or certified value."""
SPACES = {"": oa, "bounds.": oa.bounds, "relaxations.": oa.relaxations, "lipschitz.": lipschitz}

NO_PROMISE = {
    "from_torch": "an attention map, checked against the forward pass of its module when it is made",
    "fit_exponent": "a least squares fit",
    "real_against_adversarial": "a table of local_lipschitz at tokens of adversarial_tokens",
    "mean_field_limit": "distances to a Gaussian flow by Gelbrich's formula, averaged over samples",
    "depth_profile": "norms by Lanczos, from below, with the bar of their residual; compared with dense products in test_depth",
    "edit_stability": "distances between given texts, and a local constant by Lanczos",
    "theorems": "the catalogue: words, and which theorems apply",
    "measure_layers": "a table of local_lipschitz, bounds.table and bounds.castin2024_discrete, layer by layer",
    "local_lipschitz_batch": "local_lipschitz at each window",
    "limit_rank_histogram": "ranks that a theorem gives, against an implicit integration in test_settled_limits",
}
"""Functions that the rule below collects and that promise nothing of their own."""


def public_functions() -> dict[str, Any]:
    """Public functions by their shortest dotted name."""
    found: dict[str, Any] = {}
    for prefix, space in SPACES.items():
        for name in space.__all__:
            member = getattr(space, name)
            if inspect.isfunction(member):
                short = "" if prefix == "lipschitz." else prefix
                found.setdefault(short + name, member)
    return found


def promises(name: str, function: Any) -> bool:
    """All of ``bounds``, ``relaxations`` and ``lipschitz``; elsewhere a result that holds a proven value, or the word for it."""
    if name.startswith(("bounds.", "relaxations.")) or name in lipschitz.__all__:
        return True
    annotation = str(inspect.signature(function).return_annotation)
    result = getattr(oa, annotation, None)
    texts = [inspect.getdoc(function) or "", (inspect.getdoc(result) or "") if inspect.isclass(result) else ""]
    return bool(RESULTS.search(annotation)) or any(PROMISE.search(text) for text in texts)


def public_methods() -> set[str]:
    """Methods of public classes whose docstring promises a bound, by the class that first defines them."""
    found = set()
    for name in oa.__all__:
        cls = getattr(oa, name)
        if not inspect.isclass(cls):
            continue
        for key, member in inspect.getmembers(cls):
            function = member.fget if isinstance(member, property) else member
            if key.startswith("_") or not inspect.isfunction(function):
                continue
            if str(inspect.signature(function).return_annotation) in ("bool", "str", "str | None"):
                continue  # answers about a number, not a number
            if PROMISE.search(inspect.getdoc(getattr(cls, key)) or ""):
                owner = next(c for c in reversed(cls.__mro__) if key in vars(c))
                found.add(f"{owner.__name__}.{key}")
    return found


METHODS = {
    "Domain.max_affine_norm": "Domain.max_affine_norm",
    "Domain.max_norm": "Domain.max_affine_norm",
    "StabilityStudy.lower_bound": "stability_study",
    "Bound.rigorous_value": "Bound.rigorous_value",
    "Enclosure.ratio": "enclose_lipschitz",
    "LocalLipschitz.upper": "local_lipschitz",
    "LocalLipschitz.upper_kind": "local_lipschitz",
    "Result.rows": "sweep",
    "Estimates.proven": "estimates",
    "CompressionBound.at": "compression_bound",
}
"""Which attack covers a method that promises."""


def promised() -> set[str]:
    """The names that must be attacked."""
    return {name for name, function in public_functions().items() if promises(name, function)} - set(NO_PROMISE)


VARIANTS: dict[str, Callable[[np.random.Generator], Outcome]] = {
    "lipschitz_upper_bound, several heads": several_heads,
    "bounds.multi_head, given bounds": multihead,
    "stability_ratio, nearly equal tokens": nearly_equal,
    "Domain.max_affine_norm, offsets that cancel": cancelling,
}
"""Further attacks on functions of which one kind of problem deserves its own count."""

RUNS = {
    "Domain.max_affine_norm, offsets that cancel": 30,
    "certified_radius": 1,
    "compression_bound": 4,
    "certify": 4,
    "stability_ratio, nearly equal tokens": 40,
    "Bound.rigorous_value": 2,
    "relaxations.rows_and_columns": 2,
    "relaxations.mean_field": 2,
    "relaxations.near_tokens": 10,
    "relaxations.two_tokens": 1,
    "relaxations.psd": 1,
    "relaxations.self_entropy": 4,
    "relaxations.row_certificate": 4,
    "relaxations.column_exponent": 5,
    "relaxations.interval_simplex": 8,
    "lipschitz_upper_bound": 3,
    "lipschitz_upper_bound, several heads": 3,
    "lipschitz_lower_bound": 1,
    "adversarial_tokens": 1,
    "enclose_lipschitz": 1,
    "relaxations.negative_identity": 3,
    "relaxations.psd_mean_field": 2,
    "relaxations.logit_gap": 2,
    "relaxations.sinkhorn_symmetric": 3,
    "relaxations.frontier_rows": 2,
    "enclosure_table": 1,
    "bounds.fixed_query_bound": 5,
    "estimates": 4,
    "flow_stability": 1,
    "flow_radius_bound": 1,
    "stability_study": 8,
    "sweep": 8,
}
"""Attacks of the fast test on functions that are slow themselves; others are attacked 12 times."""
OTHERS = 12
LONGER, OTHERS_LONGER = 2, 80
"""How many times more the slow test attacks the former, and how often the others; `benchmarks.attacks` makes millions."""
