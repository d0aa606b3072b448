"""The catalogue of theorems: what each states, when it applies, where it comes from, how it is evaluated.

A theorem enters once, where its proof is: the function that evaluates it carries :func:`theorem`. Tables, the best upper bound,
certificates, reports and the attacks of the tests all read :data:`THEOREMS`. Whether a theorem applies is an answer, a reason or
None, and not an exception: an error inside a theorem is never taken for "does not apply".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from otattn import _validate as check
from otattn._tabular import Tabular
from otattn.attention import AttentionMap
from otattn.lipschitz.hypotheses import Reason
from otattn.measures.domains import Ball, Domain

__all__ = ["THEOREMS", "Catalogue", "Quantity", "Theorem", "theorem", "theorems"]

Quantity = Literal[
    "lipschitz", "field", "column_exponent", "column_sum", "self_entropy", "row", "covariance", "local", "pairs"
]
"""What is bounded: the Lipschitz constant of F; ``sup ||V C A||``; ``kappa``; column sums; ``sup |g|^2 lambda(C)``; the norm
of one row; a covariance over an interval simplex; the local constant at one measure; how far the images of one measure
and of others part."""
Evaluation = Callable[..., Any]

THEOREMS: dict[str, Theorem] = {}
"""All theorems by key, in the order in which their modules are read."""


@dataclass(frozen=True, eq=False)
class Theorem:
    """One theorem.

    Attributes
    ----------
    key : str
        Its name, also that of its function in ``otattn.bounds`` or ``otattn.relaxations``.
    statement : str
        The bound, in a formula.
    hypotheses : str
        Of the map, the domain, n and p.
    reference : str
        Paper and theorem; "otattn" for our own.
    kind : {"upper", "lower", "local"}
    quantity : str
        What is bounded.
    closed : bool
        A closed form, which needs no solver.
    measures : bool
        It has a form for any measure beside the one for n tokens.
    rigorous : bool
        Ball and interval arithmetic prove it too.
    everywhere : bool
        It says something on all of ``R^d`` (domain None) too.
    proof : str
        Module whose text is the proof.
    """

    key: str
    statement: str
    hypotheses: str
    reference: str
    kind: Literal["upper", "lower", "local"]
    quantity: Quantity
    closed: bool
    measures: bool
    rigorous: bool
    everywhere: bool
    proof: str
    applies: Reason
    evaluate: Evaluation

    @property
    def published(self) -> bool:
        """True for a theorem of a paper, False for our own."""
        return not self.reference.startswith("otattn")

    def reason(self, attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        """Why the theorem says nothing about this constant of this map; None when it applies."""
        if domain is None and not self.everywhere:
            return "it says nothing on all of R^d; a radius or a domain must be given"
        return self.applies(attention, domain, n, p)

    def row(self) -> dict[str, Any]:
        """The record, without its functions."""
        return {
            "theorem": self.key,
            "bounds": self.quantity,
            "kind": self.kind,
            "statement": self.statement,
            "hypotheses": self.hypotheses,
            "reference": self.reference,
            "rigorous": self.rigorous,
            "proof": self.proof,
        }


def theorem(
    key: str,
    *,
    statement: str,
    hypotheses: str,
    applies: Reason,
    reference: str = "otattn",
    kind: Literal["upper", "lower", "local"] = "upper",
    quantity: Quantity = "lipschitz",
    closed: bool = True,
    measures: bool = False,
    rigorous: bool = True,
    everywhere: bool = False,
) -> Callable[[Evaluation], Evaluation]:
    """Register the function that evaluates a theorem: ``(attention, domain, n, p, exact) -> Bound``."""

    def register(function: Evaluation) -> Evaluation:
        if key in THEOREMS:
            raise ValueError(f"key must be new, received {key!r}, which is registered already; choose another.")
        module = inspect.getmodule(function)
        proof = "" if module is None else module.__name__
        THEOREMS[key] = Theorem(
            key,
            statement,
            hypotheses,
            reference,
            kind,
            quantity,
            closed,
            measures,
            rigorous,
            everywhere,
            proof,
            applies,
            function,
        )
        return function

    return register


@dataclass(frozen=True, eq=False)
class Catalogue(Tabular):
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
    ['pointwise_bound']
    """
    import otattn.lipschitz.bounds
    import otattn.lipschitz.relaxations  # noqa: F401  (every theorem registers where its proof is)

    records = tuple(THEOREMS.values())
    if attention is None:
        return Catalogue(records)
    if not isinstance(attention, AttentionMap):
        raise TypeError(f"attention must be an attention map, received {type(attention).__name__}; build one first.")
    if n is not None:
        check.count(n, "n")
    order = check.check_order(p)
    if radius is not None and domain is not None:
        raise ValueError("at most one of radius and domain must be given, received both.")
    region: Any = Ball(check.positive(radius, "radius")) if radius is not None else domain
    if region is not None and not isinstance(region, Domain) and not hasattr(region, "points"):
        raise TypeError(
            "domain must be a Ball, Ellipsoid, LayerNormDomain, Box or PointSet, or the measure of a local bound, received "
            f"{type(region).__name__}; for tokens of norm at most R give radius=R."
        )
    dim = getattr(region, "dim", None)
    if None not in (dim, attention.in_dim) and dim != attention.in_dim:
        raise ValueError(f"domain must have dimension {attention.in_dim} like the attention, received {dim}.")
    return Catalogue(records, tuple(_covers(t, attention, region, n, order) for t in records))


def _covers(record: Theorem, attention: AttentionMap, domain: Any, n: int | None, p: float) -> str | None:
    """Why a theorem does not; an upper bound for any measure is one for n tokens."""
    why = record.reason(attention, domain, n, p)
    if why is None or n is None or record.kind != "upper":
        return why
    return None if record.reason(attention, domain, None, p) is None else why
