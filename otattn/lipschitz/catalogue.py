"""The catalogue of theorems: what each states, when it applies, where it comes from, how it is evaluated.

A theorem enters once, where its proof is: the function that evaluates it carries :func:`theorem`. Tables, the best upper bound,
certificates, reports and the attacks of the tests all read :data:`THEOREMS`. Whether a theorem applies is an answer, a reason or
None, and not an exception: an error inside a theorem is never taken for "does not apply".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from otattn import _validate as check
from otattn._tabular import Tabular
from otattn.attention import (
    AttentionMap,
    L2Attention,
    MaskedAttention,
    MultiHeadAttention,
    RotaryAttention,
    SoftmaxAttention,
)
from otattn.attention.pointwise import PointwiseAttention
from otattn.measures.domains import Ball, Domain

__all__ = ["THEOREMS", "Catalogue", "Reason", "Theorem", "every", "theorem", "theorems"]

Reason = Callable[[Any, Any, "int | None", float], "str | None"]
"""``(attention, domain, n, p)`` -> why the theorem does not apply, None when it does."""
Quantity = Literal["lipschitz", "field", "column_exponent", "column_sum", "self_entropy", "row", "covariance", "local"]
"""What is bounded: the Lipschitz constant of F; ``sup ||V C A||``; ``kappa``; column sums; ``sup |g|^2 lambda(C)``; the norm
of one row; a covariance over an interval simplex; the local constant at one measure."""
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
    proof: str
    applies: Reason
    evaluate: Evaluation

    @property
    def published(self) -> bool:
        """True for a theorem of a paper, False for our own."""
        return not self.reference.startswith("otattn")

    def reason(self, attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        """Why the theorem says nothing about this constant of this map; None when it applies."""
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
) -> Callable[[Evaluation], Evaluation]:
    """Register the function that evaluates a theorem: ``(attention, domain, n, p, exact) -> Bound``."""

    def register(function: Evaluation) -> Evaluation:
        if key in THEOREMS:
            raise ValueError(f"key must be new, received {key!r}, which is registered already; choose another.")
        module = inspect.getmodule(function)
        proof = "" if module is None else module.__name__
        THEOREMS[key] = Theorem(
            key, statement, hypotheses, reference, kind, quantity, closed, measures, rigorous, proof, applies, function
        )
        return function

    return register


def every(*reasons: Reason) -> Reason:
    """All hypotheses; the first that fails is the reason."""

    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        return next((why for reason in reasons if (why := reason(attention, domain, n, p)) is not None), None)

    return applies


def order_two(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """The Wasserstein distance is W_2."""
    return None if p == 2.0 else f"p must be 2, received {p:g}"


def order_between(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Reason:
    """p lies in the interval."""
    ends = f"{'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"

    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        inside = low <= p <= high and not (low_open and p == low) and not (high_open and p == high)
        return None if inside else f"p must lie in {ends}, received {p:g}"

    return applies


def tokens(least: int = 1) -> Reason:
    """A number of equal tokens is given."""

    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        if n is None:
            return "n, a number of tokens, must be given; it says nothing of any measure"
        return None if n >= least else f"n must be at least {least}, received {n}"

    return applies


def any_measure(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """The constant over all measures."""
    return None if n is None else f"n must be None, it is about any measure, received {n}"


def no_domain(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """All of ``R^d``."""
    return None if domain is None else f"it is about all of R^d, domain None, received {domain!r}"


def centred_ball(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """The domain of the published theorems."""
    return None if isinstance(domain, Ball) else f"domain must be a centred ball, received {domain!r}"


def no_bias(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """A softmax head whose logits are ``<A x, y>`` alone."""
    head: Any = unmasked(attention)
    biases = [head.bias, None if head.factors is None else head.factors[2]]
    size = max((float(np.abs(b).max(initial=0.0)) for b in biases if b is not None), default=0.0)
    return f"it assumes no query bias, received one with entries up to {size:g}" if size > 0.0 else None


def unmasked(attention: AttentionMap) -> AttentionMap:
    """The map under a mask, or the map itself."""
    return attention.attention if isinstance(attention, MaskedAttention) else attention


def kind_of(attention: Any) -> str:
    """The name of a map, its mask said."""
    if isinstance(attention, MaskedAttention):
        return f"MaskedAttention({type(attention.attention).__name__})"
    return type(attention).__name__


def _head(kinds: type | tuple[type, ...], name: str, masked: bool | None) -> Reason:
    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        causal = isinstance(attention, MaskedAttention)
        if isinstance(unmasked(attention), kinds) and (masked is None or masked == causal):
            return None
        wanted = {None: f"{name}, masked or not", True: f"MaskedAttention({name})", False: f"{name} without a mask"}
        return f"attention must be {wanted[masked]}, received {kind_of(attention)}"

    return applies


def softmax(masked: bool | None = None) -> Reason:
    """A softmax head; ``masked`` None accepts both kinds."""
    return _head(SoftmaxAttention, "SoftmaxAttention", masked)


def l2(masked: bool | None = None) -> Reason:
    """An L2 head."""
    return _head(L2Attention, "L2Attention", masked)


unnormalised_map: Reason = _head(PointwiseAttention, "sigmoid, ReLU, linear or exponential attention", None)
rotary: Reason = _head(RotaryAttention, "RotaryAttention", False)


def single_heads(attention: Any, causal: bool = False) -> Iterator[tuple[Any, bool]]:
    """The heads of a map, nested sums opened, each with whether a mask hides later tokens from it."""
    if isinstance(attention, MaskedAttention):
        yield from single_heads(attention.attention, True)
    elif isinstance(attention, MultiHeadAttention):
        for head in attention.heads:
            yield from single_heads(head, causal)
    else:
        yield attention, causal


def sum_of_heads(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """Softmax, L2 and unnormalised heads, one or several."""
    for head, _ in single_heads(attention):
        if not isinstance(head, SoftmaxAttention | L2Attention | PointwiseAttention):
            return f"attention must be built of softmax, L2 or unnormalised heads, received {type(head).__name__}"
    return None


def several_heads(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    """A sum of heads."""
    if isinstance(unmasked(attention), MultiHeadAttention):
        return None
    return f"attention must be MultiHeadAttention, masked or not, received {kind_of(attention)}"


def unless(condition: Callable[[int | None, float], bool], reason: Reason) -> Reason:
    """The hypothesis, waived where ``condition(n, p)`` holds."""

    def applies(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        return None if condition(n, p) else reason(attention, domain, n, p)

    return applies


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
    region = Ball(check.positive(radius, "radius")) if radius is not None else domain
    return Catalogue(records, tuple(_covers(t, attention, region, n, order) for t in records))


def _covers(record: Theorem, attention: AttentionMap, domain: Any, n: int | None, p: float) -> str | None:
    """Why a theorem does not; an upper bound for any measure is one for n tokens."""
    why = record.reason(attention, domain, n, p)
    if why is None or n is None or record.kind != "upper":
        return why
    return None if record.reason(attention, domain, None, p) is None else why
