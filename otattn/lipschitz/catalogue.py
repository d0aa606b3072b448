"""The catalogue of theorems, and for a given map which apply and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from otattn import _validate as check
from otattn._tabular import Result
from otattn.attention import AttentionMap
from otattn.attention.base import as_attention
from otattn.lipschitz.theorem import THEOREMS, Theorem, check_count, check_dimension, read_all
from otattn.measures.domains import Ball, Domain


@dataclass(frozen=True, eq=False)
class Catalogue(Result):
    """Theorems, and for a given map which of them apply.

    Attributes
    ----------
    records : tuple of Theorem
    reasons : tuple of (str or None), or None
        Why each does not apply, None where it does; None when no map was given.
    """

    records: tuple[Theorem, ...]
    reasons: tuple[str | None, ...] | None = None

    def rows(self) -> list[dict[str, Any]]:
        """One record a theorem."""
        if self.reasons is None:
            return [t.row() for t in self.records]
        pairs = zip(self.records, self.reasons, strict=True)
        return [{"applies": why is None, "reason": why or "", **t.row()} for t, why in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"theorems": self.rows()}

    def __repr__(self) -> str:
        if self.reasons is None:
            return f"Catalogue({len(self.records)} theorems)"
        return f"Catalogue({len(self.records)} theorems, {sum(why is None for why in self.reasons)} apply)"

    def __str__(self) -> str:
        width = max(len(t.key) for t in self.records)
        if self.reasons is None:
            return "\n".join(f"{t.key:<{width}}  {t.statement}  [{t.hypotheses}; {t.reference}]" for t in self.records)
        pairs = sorted(zip(self.records, self.reasons, strict=True), key=lambda item: item[1] is not None)
        return "\n".join(f"{t.key:<{width}}  {t.statement if why is None else f'no: {why}'}" for t, why in pairs)


def theorems(
    attention: AttentionMap | None = None,
    *,
    radius: float | None = None,
    domain: Domain | None = None,
    n: int | None = None,
    p: float = 2,
) -> Catalogue:
    """The catalogue of theorems; for a map, which apply and why the others do not.

    Parameters
    ----------
    attention : AttentionMap, optional
        Without one, all theorems with their hypotheses.
    radius : float, optional
        Tokens in the centred ball; or ``domain``. Without either, theorems about all of ``R^d`` are asked.
    domain : Domain, optional
    n : int, optional
        Number of tokens; None is any measure.
    p : float
        In ``[1, inf]``.

    Examples
    --------
    >>> import otattn as oa
    >>> catalogue = oa.theorems(oa.LinearAttention([[1.0]], [[1.0]]), radius=1.0, n=4)
    >>> [row["theorem"] for row in catalogue.rows() if row["applies"]]
    ['pointwise_bound', 'heads_field_bound', 'fixed_query_bound', 'value_bound']
    """
    read_all()
    records = tuple(THEOREMS.values())
    if attention is None:
        return Catalogue(records)
    as_attention(attention)
    check_count(n)
    order = check.check_order(p)
    if radius is not None and domain is not None:
        raise ValueError("at most one of radius and domain must be given, received both.")
    region: Any = Ball(check.positive(radius, "radius")) if radius is not None else domain
    if region is not None and not isinstance(region, Domain) and not hasattr(region, "points"):
        raise TypeError(
            "domain must be a Ball, Ellipsoid, LayerNormDomain, Box or PointSet, or the measure of a local bound, received "
            f"{type(region).__name__}; for tokens of norm at most R give radius=R."
        )
    check_dimension(region, attention.in_dim)
    return Catalogue(records, tuple(_covers(t, attention, region, n, order) for t in records))


def _covers(record: Theorem, attention: AttentionMap, domain: Any, n: int | None, p: float) -> str | None:
    """Why a theorem does not; an upper bound for any measure is one for n tokens."""
    why = record.reason(attention, domain, n, p)
    if why is None or n is None or record.kind != "upper":
        return why
    return None if record.reason(attention, domain, None, p) is None else why
