"""One theorem of the library: what it states, when it applies, how it is evaluated, and the function that users call.

A theorem enters once, where its proof is: the function that evaluates it carries :func:`theorem`. Tables, the best upper bound,
certificates, reports and the attacks of the tests all read :data:`THEOREMS`. Whether a theorem applies is an answer, a reason or
None, and not an exception: an error inside a theorem is never taken for "does not apply".
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from otattn import _validate as check
from otattn._files.saved import Saved
from otattn.attention import AttentionMap
from otattn.attention.base import as_attention
from otattn.lipschitz.arithmetic.balls import exact_arithmetic
from otattn.lipschitz.hypotheses import Reason
from otattn.measures.domains import Ball, Domain

if TYPE_CHECKING:
    from otattn.lipschitz.bound import Bound

Quantity = Literal[
    "lipschitz",
    "value",
    "field",
    "measure",
    "column_exponent",
    "column_sum",
    "self_entropy",
    "row",
    "covariance",
    "local",
    "pairs",
]
"""What is bounded: the Lipschitz constant of F; ``sup |Gamma_mu(x)|``; ``sup ||D_x Gamma_mu(x)||``; the largest constant of ``mu ->
Gamma_mu(x)``, x kept; ``kappa``; column sums; ``sup |g|^2 lambda(C)``; the norm
of one row; a covariance over an interval simplex; the local constant at one measure; how far the images of one measure
and of others part."""
Evaluation = Callable[..., Any]


class PublicTheorem(Protocol):
    """What users call: one signature for every theorem."""

    def __call__(
        self,
        attention: AttentionMap,
        *,
        radius: float | None = None,
        domain: Domain | None = None,
        n: int | None = None,
        p: float = 2,
        **options: Any,
    ) -> Bound: ...


THEOREMS: dict[str, Theorem] = {}
"""All theorems by key, in the order in which their modules are read."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Theorem(Saved):
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
    applies: Reason
    evaluate: Evaluation
    proof: str
    reference: str = "otattn"
    kind: Literal["upper", "lower", "local"] = "upper"
    quantity: Quantity = "lipschitz"
    closed: bool = True
    measures: bool = False
    rigorous: bool = True
    everywhere: bool = False

    @property
    def published(self) -> bool:
        """True for a theorem of a paper, False for our own."""
        return not self.reference.startswith("otattn")

    def reason(self, attention: Any, domain: Any, n: int | None, p: float) -> str | None:
        """Why the theorem says nothing about this constant of this map; None when it applies."""
        if domain is None and not self.everywhere:
            return "it says nothing on all of R^d; a radius or a domain must be given"
        return self.applies(attention, domain, n, p)

    def search(self, attention: AttentionMap, domain: Any, n: int | None, p: float, effort: str) -> Bound:
        """The bound of a theorem that needs a search, with this effort where it has the choice."""
        options = {"effort": effort} if "effort" in inspect.signature(self.evaluate).parameters else {}
        found: Bound = self.evaluate(attention, domain, n, p, **options)
        return found

    def _to_fields(self) -> dict[str, Any]:
        return {"key": self.key}

    @classmethod
    def _from_fields(cls, state: dict[str, Any]) -> Theorem:
        read_all()
        return THEOREMS[state["key"]]

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


def theorem(key: str, *, count: int | None = None, **record: Any) -> Callable[[Evaluation], PublicTheorem]:
    """Register the function that evaluates a theorem; what it becomes is the function that users call.

    A closed form is ``(attention, domain, n, p, exact) -> Bound``. Others are ``(attention, domain, n, p, *, options) -> Bound``,
    their options keyword-only (``effort`` is passed on by the search for the best bound). ``count`` is the n that is meant when
    none is given; ``record`` are the fields of :class:`Theorem`.
    """

    def register(function: Evaluation) -> PublicTheorem:
        if key in THEOREMS:
            raise ValueError(f"key must be new, received {key!r}, which is registered already; choose another.")
        module = inspect.getmodule(function)
        proof = "" if module is None else module.__name__
        THEOREMS[key] = Theorem(key=key, evaluate=function, proof=proof, **record)
        return _public(THEOREMS[key], count)

    return register


def check_dimension(domain: Any, dim: int | None) -> None:
    """Refuse a domain of another space than that of the tokens."""
    received = getattr(domain, "dim", None)
    if None not in (received, dim) and received != dim:
        raise ValueError(f"domain must have dimension {dim} like the attention, received {received}.")


def check_effort(effort: Any) -> None:
    """Refuse what is neither "fast" nor "deep"."""
    if effort not in ("fast", "deep"):
        raise ValueError(f"effort must be 'fast' or 'deep', received {effort!r}.")


_PARAMETERS = """
    Parameters
    ----------
    attention : AttentionMap
        Hypotheses: {hypotheses}.
    radius : float, optional
        Tokens in the centred ball of this radius; or ``domain``.
    domain : Domain, optional
    n : int, optional
        Number of tokens of equal weight; None is any measure (mean-field).
    p : float
        Order of the Wasserstein distance, in ``[1, inf]``.
"""
_ERRORS = """
    Raises
    ------
    ValueError
        The hypotheses do not hold; the message says which.
"""


def _public(record: Theorem, default: int | None) -> PublicTheorem:
    """The function that users call: it resolves the domain, checks the hypotheses, and evaluates."""
    function, ask = inspect.unwrap(record.evaluate), _ask

    def public(
        attention: AttentionMap,
        *,
        radius: float | None = None,
        domain: Domain | None = None,
        n: int | None = default,
        p: float = 2,
        **options: Any,
    ) -> Bound:
        return ask(record, attention, radius, domain, n, p, options)

    # made in the room of its theorem, where doctest looks for its examples
    out = FunctionType(public.__code__, function.__globals__, function.__name__, None, public.__closure__)
    out.__kwdefaults__, out.__module__, out.__qualname__ = public.__kwdefaults__, function.__module__, function.__name__
    shared = [v for k, v in inspect.signature(public).parameters.items() if k != "options"]
    own = [v for v in inspect.signature(function).parameters.values() if v.kind is v.KEYWORD_ONLY]
    out.__signature__ = inspect.Signature([*shared, *own], return_annotation="Bound")  # type: ignore[attr-defined]
    text = inspect.cleandoc(function.__doc__ or record.statement)
    head, *sections = re.split(r"\n(?=[A-Z][A-Za-z ]+\n----+\n)", text)
    parameters = inspect.cleandoc(_PARAMETERS.format(hypotheses=record.hypotheses))
    own_parameters = next((s for s in sections if s.startswith("Other Parameters\n")), "")
    if own_parameters:
        sections.remove(own_parameters)
        parameters += "\n" + own_parameters.split("\n", 2)[2].rstrip()
    if not any(s.startswith("References\n") for s in sections):
        source = record.reference if record.published else "Our own theorem"
        sections.append(f"References\n----------\n{source}; the proof is in :mod:`{record.proof}`.")
    out.__doc__ = "\n\n".join(part.strip("\n") for part in (head, parameters, inspect.cleandoc(_ERRORS), *sections))
    return out


def _ask(
    record: Theorem,
    attention: AttentionMap,
    radius: float | None,
    domain: Domain | None,
    n: int | None,
    p: float,
    options: dict[str, Any],
) -> Bound:
    as_attention(attention)
    region: Any = None
    if radius is not None or domain is not None or not record.everywhere:
        region = domain_of(attention, radius, domain)
    count, order = check_count(n), check.check_order(p)
    if record.closed:
        if options:
            raise TypeError(f"{record.key} takes no option, received {sorted(options)}.")
        return prove(record.key, attention, region, count, order)
    _check_applies(record, attention, region, count, order)
    check_effort(options.get("effort", "fast"))
    found: Bound = record.evaluate(attention, region, count, order, **options)
    return found


def prove(theorem: str, attention: Any, domain: Any, n: int | None, p: float, *, exact: bool = False) -> Bound:
    """The bound that a theorem gives for a statement; with ``exact`` in ball and interval arithmetic.

    Raises
    ------
    ValueError
        The hypotheses do not hold, or ``exact`` is not offered for the theorem.
    """
    check_count(n)
    check.check_order(p)
    check_dimension(domain, attention.in_dim)
    record = THEOREMS[theorem]
    _check_applies(record, attention, domain, n, p)
    with exact_arithmetic() if exact else nullcontext():
        found: Bound = record.evaluate(attention, domain, n, p, exact)
    return dataclasses.replace(found, attention=attention)


def check_count(n: Any) -> int | None:
    """``n`` as a number of tokens, None for the mean-field constant."""
    return None if n is None else check.count(n, "n")


def _check_applies(record: Theorem, attention: Any, domain: Any, n: int | None, p: float) -> None:
    why = record.reason(attention, domain, n, p)
    if why is not None:
        raise ValueError(f"{record.key} does not apply: {why}; otattn.theorems(attention, ...) lists what does.")


def resolve_domain(radius: float | None, domain: Domain | None, dim: int | None) -> Domain:
    """The domain that one of ``radius`` and ``domain`` names, its dimension checked."""
    if (radius is None) == (domain is None):
        received = "neither" if radius is None else "both"
        raise ValueError(f"exactly one of radius and domain must be given, received {received}.")
    if radius is not None:
        return Ball(radius)
    if not isinstance(domain, Domain):
        raise ValueError(f"domain must be a Ball, Ellipsoid, LayerNormDomain, Box or PointSet, received {domain!r}.")
    check_dimension(domain, dim)
    return domain


def domain_of(attention: AttentionMap, radius: float | None, domain: Domain | None) -> Domain:
    """The domain that is named; where none is, that of the tokens of a map which comes from a checkpoint."""
    if radius is None and domain is None:
        domain = attention.domain
    return resolve_domain(radius, domain, attention.in_dim)


def read_all() -> None:
    """Read the modules of all theorems: each registers where its proof is."""
    import otattn.lipschitz.bounds
    import otattn.lipschitz.relaxations  # noqa: F401
