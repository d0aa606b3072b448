"""The enclosure of a Lipschitz constant: a witnessed lower and a proven upper bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn._progress import watched
from otattn._tabular import Result, plain
from otattn.attention import AttentionMap, SoftmaxAttention
from otattn.lipschitz.bound import Bound, Enclosure
from otattn.lipschitz.lower.best import lipschitz_lower_bound
from otattn.lipschitz.table import closed_bounds
from otattn.lipschitz.theorem import THEOREMS
from otattn.lipschitz.upper_bound import Effort, lipschitz_upper_bound
from otattn.measures import Ball, Domain


def enclose_lipschitz(
    attention: AttentionMap,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
    rng: np.random.Generator | int = 0,
    effort: Effort = "fast",
    progress: bool = False,
) -> Enclosure:
    """A witnessed lower and a proven upper bound of the W_p Lipschitz constant of ``F(mu) = (Gamma_mu)_# mu``.

    Parameters
    ----------
    attention : AttentionMap
    radius, domain, n, p, effort
        As for :func:`otattn.lipschitz_upper_bound`; the lower bound offers the orders 1, 2 and inf.
    rng : Generator or int
        Starts of the search for the witness.
    progress : bool
        Show a bar on the error stream.

    Returns
    -------
    Enclosure
        ``lower.witness`` is a measure, ``upper.theorem`` the one that won, ``ratio`` is upper over lower.

    Examples
    --------
    >>> enclosure = enclose_lipschitz(SoftmaxAttention([[0.0]], [[2.0]]), radius=1.0, n=1)
    >>> enclosure.lower.value <= enclosure.upper.value, round(enclosure.ratio, 6)
    (True, 1.0)
    """
    given: dict[str, Any] = {"radius": radius, "domain": domain, "n": n, "p": p, "effort": effort}
    sides: dict[str, Callable[[], Bound]] = {
        "lower bound": lambda: lipschitz_lower_bound(attention, rng=rng, **given),
        "upper bound": lambda: lipschitz_upper_bound(attention, **given),
    }
    lower, upper = (sides[name]() for name in watched(list(sides), "enclosure", progress=progress, unit="side"))
    return Enclosure(lower, upper)


def published_upper(attention: AttentionMap, *, radius: float, n: int | None) -> Bound | None:
    """The published W_2 upper bound for the map (B1, its masked form, or B3), None where there is none."""
    if not isinstance(attention.unmasked, SoftmaxAttention):
        return None
    records = [record for record in THEOREMS.values() if record.published and record.kind == "upper"]
    found = [b for record in records for b in closed_bounds(record, attention, Ball(radius), n, 2.0)]
    return min(found, key=lambda b: b.log_value, default=None)


@dataclass(frozen=True, eq=False)
class EnclosureTable(Result):
    """Enclosures for several numbers of tokens (or radii), with the published bound beside.

    Attributes
    ----------
    parameter : str
        "n" or "radius": what varies.
    values : tuple
        Its values; n may be None (any measure).
    enclosures : tuple of Enclosure
    published : tuple of (Bound or None)
    """

    parameter: str
    values: tuple[Any, ...]
    enclosures: tuple[Enclosure, ...]
    published: tuple[Bound | None, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One record a value."""
        out = []
        for value, enclosure, paper in zip(self.values, self.enclosures, self.published, strict=True):
            out.append(
                {
                    self.parameter: value,
                    "lower": enclosure.lower.value,
                    "upper": enclosure.upper.value,
                    "ratio": enclosure.ratio,
                    "published": None if paper is None else paper.value,
                    "upper_by": enclosure.upper.name,
                    "lower_by": enclosure.lower.name,
                }
            )
        return out

    def geometric_mean_ratio(self) -> float:
        """Geometric mean of upper over lower."""
        return math.exp(float(np.mean([math.log(e.ratio) for e in self.enclosures])))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        return {"parameter": self.parameter, "rows": plain(self.rows())}

    def __str__(self) -> str:
        lines = [f"{self.parameter:>10} {'lower':>12} {'upper':>12} {'ratio':>7} {'published':>12}  upper bound by"]
        for row in self.rows():
            name = "any" if row[self.parameter] is None else f"{row[self.parameter]:g}"
            paper = "-" if row["published"] is None else f"{row['published']:.5g}"
            lines.append(
                f"{name:>10} {row['lower']:>12.5g} {row['upper']:>12.5g} {row['ratio']:>7.3f} {paper:>12}  "
                f"{row['upper_by']}"
            )
        return "\n".join(lines)


def enclosure_table(
    attention: AttentionMap,
    *,
    radius: float,
    n_values: Sequence[int | None] = (4, 16, 64, 256, None),
    radii: Sequence[float] | None = None,
    p: float = 2,
    rng: np.random.Generator | int = 0,
    effort: Effort = "fast",
    progress: bool = False,
) -> EnclosureTable:
    """Enclosures against n at one radius, or against the radius at the first of ``n_values`` when ``radii`` is given.

    Parameters
    ----------
    attention : AttentionMap
    radius : float
    n_values : sequence of int or None
        None stands for all measures.
    radii : sequence of float, optional
    p, rng, effort, progress
        As for :func:`enclose_lipschitz`.
    """
    rows = [(radius, n) for n in n_values] if radii is None else [(r, n_values[0]) for r in radii]
    cases = watched(rows, "enclosures", progress=progress, note=lambda row: f"R = {row[0]:g}, n = {row[1]}", unit="row")
    enclosures = tuple(enclose_lipschitz(attention, radius=r, n=n, p=p, rng=rng, effort=effort) for r, n in cases)
    papers = tuple(published_upper(attention, radius=r, n=n) if p == 2 else None for r, n in rows)
    name, values = ("n", tuple(n_values)) if radii is None else ("radius", tuple(radii))
    return EnclosureTable(name, values, enclosures, papers)
