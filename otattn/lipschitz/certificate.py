"""Upper bounds that carry their proof: dual multipliers, and a recheck from the statement alone.

A relaxation is two functions: ``problem(statement)`` makes the data of the dual program from the map, the domain, n and p,
and ``dual(problem, multipliers)`` is the bound that the multipliers prove. Both run in float64 with margins, or, where the
relaxation offers it, in ball and interval arithmetic. A certificate stores the statement and the multipliers, never the
data between them: each recheck makes those anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.linalg import LinAlgError

from otattn import _validate as check
from otattn._linalg import Array, lost_below
from otattn._tabular import plain
from otattn.errors import CertificateError
from otattn.lipschitz.arithmetic.balls import exact_arithmetic
from otattn.lipschitz.arithmetic.rounding import ROUNDING, log, top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.theorem import Quantity, check_count, check_dimension

DualFunction = Callable[[Mapping[str, Any], Mapping[str, Array]], Any]
Coverage = Callable[[Any, Any], "str | None"]
"""Why a relaxation does not run on balls and intervals for a map and a domain; None where it does."""


@dataclass(frozen=True, eq=False)
class Statement:
    """What is bounded, and how much work the relaxation may do.

    Attributes
    ----------
    attention, domain, n, p
        The map, where its tokens live, their number (None: any measure), and the order.
    options : mapping
        Choices of which any is admissible (gaps of searches, counts of cells), and bounds with proofs of their own.
    exact : bool
        True for ball and interval arithmetic.
    """

    attention: Any
    domain: Any
    n: int | None
    p: float
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False


ProblemFunction = Callable[[Statement], dict[str, Any]]

_DUAL_FUNCTIONS: dict[str, DualFunction] = {}
_EXACT: dict[str, Coverage | None] = {}
_QUANTITIES: dict[str, Quantity] = {}
_PROBLEMS: dict[str, ProblemFunction] = {}


def dual_function(
    name: str, *, exact: bool | Coverage = False, quantity: Quantity = "lipschitz"
) -> Callable[[DualFunction], DualFunction]:
    """Register a relaxation's dual function ``(problem, multipliers) -> proved upper bound``, numpy only.

    ``exact`` says that it runs on balls and intervals too, or for which maps, ``quantity`` what it bounds.
    """

    def register(function: DualFunction) -> DualFunction:
        _check_new(name, _DUAL_FUNCTIONS)
        _DUAL_FUNCTIONS[name] = function
        _QUANTITIES[name] = quantity
        if exact:
            _EXACT[name] = None if isinstance(exact, bool) else exact
        return function

    return register


def problem_function(*names: str) -> Callable[[ProblemFunction], ProblemFunction]:
    """Register how the data of the relaxations ``names`` are made from a :class:`Statement`."""

    def register(function: ProblemFunction) -> ProblemFunction:
        for name in names:
            _check_new(name, _PROBLEMS)
            _PROBLEMS[name] = function
        return function

    return register


def _check_new(name: str, known: Mapping[str, Any]) -> None:
    if name in known:
        raise ValueError(f"name must be new, received {name!r}, which is registered already; choose another.")


@dataclass(frozen=True, eq=False)
class Certificate(Bound):
    r"""A proved upper bound with the multipliers that prove it.

    Weak duality: every admissible multiplier ``m`` gives ``sup <= dual(problem, m)``. A solver proposes
    ``m``, and ``value`` is the dual function at ``m`` after repair, evaluated in numpy and rounded outward;
    what the solver said about its own success is kept for the record and never used.

    Attributes
    ----------
    relaxation : str
        Name of the relaxation, the key of its dual function.
    multipliers : dict of ndarray
        Dual variables, in the units of the relaxation's normalised data.
    options : dict
        Choices of which any is admissible: gaps of searches, numbers of cells, bounds with certificates of their own.
    solver, solver_status : str
        Who proposed the multipliers, and what it claimed.
    solver_value : float
        The optimum that the solver claimed (nan when it claimed none); it may lie below the truth.
    residuals : dict of float
        ``gap`` (``value`` minus ``solver_value``) and what the relaxation adds, such as the value of a
        feasible point.

    Examples
    --------
    >>> from dataclasses import replace
    >>> from otattn.attention import SoftmaxAttention
    >>> from otattn.lipschitz.relaxations import field_certificate
    >>> bound = field_certificate(SoftmaxAttention([[2.0]], [[3.0]]), radius=1.0)
    >>> round(bound.value, 6), bound.verify(), replace(bound, value=5.9).verify()
    (6.0, True, False)
    """

    relaxation: str = ""
    multipliers: dict[str, Array] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    solver: str = ""
    solver_status: str = ""
    solver_value: float = float("nan")
    residuals: dict[str, float] = field(default_factory=dict)

    def proved_value(self, *, rigorous: bool = False) -> float:
        """The bound that the multipliers prove, recomputed from the statement and the multipliers alone.

        Parameters
        ----------
        rigorous : bool
            In ball and interval arithmetic (extra ``proof``).

        Raises
        ------
        CertificateError
            The multipliers are not admissible, or the relaxation is unknown.
        ValueError
            ``rigorous`` where the relaxation has no such evaluation.
        """
        name = self.relaxation
        if name not in _DUAL_FUNCTIONS or name not in _PROBLEMS:
            raise CertificateError(f"no dual function is registered for the relaxation {name!r}.")
        if self.quantity != _QUANTITIES[name]:
            raise CertificateError(f"{name!r} bounds {_QUANTITIES[name]!r}, received the quantity {self.quantity!r}.")
        check_count(self.n)
        check.check_order(self.p)
        check_dimension(self.domain, getattr(self.attention, "in_dim", None))
        if rigorous:
            self._check_exact()
        statement = Statement(self.attention, self.domain, self.n, self.p, self.options, rigorous)
        with exact_arithmetic() if rigorous else nullcontext():
            return _evaluate(_DUAL_FUNCTIONS[name], name, _problem(name, statement), self.multipliers)

    @property
    def _provable(self) -> bool:
        return True

    @property
    def _has_exact(self) -> bool:
        return self.relaxation in _EXACT and self._uncovered() is None

    def _uncovered(self) -> str | None:
        coverage = _EXACT.get(self.relaxation)
        return None if coverage is None else coverage(self.attention, self.domain)

    def _check_exact(self) -> None:
        if self.relaxation in _EXACT and (why := self._uncovered()) is not None:
            raise ValueError(
                f"no rigorous evaluation of {self.relaxation!r} is offered for this map: {why}; verify() checks it in float64 "
                "with margins for rounding."
            )
        super()._check_exact()

    def _proves(self, rigorous: bool) -> bool:
        if self.kind != "upper" or not np.isfinite(self.value):
            return False
        proved = self.proved_value(rigorous=rigorous)
        return bool(proved <= self.value and log(proved) <= self.log_value)

    def rigorous_value(self) -> float:
        """The value that ball and interval arithmetic proves for the statement and the multipliers (extra ``proof``)."""
        return self.proved_value(rigorous=True)

    def to_dict(self) -> dict[str, Any]:
        """The plain numbers, ready for JSON."""
        claimed = self.solver_value if np.isfinite(self.solver_value) else None
        solver = {"solver": self.solver, "solver_status": self.solver_status, "solver_value": claimed}
        return {
            **super().to_dict(),
            "relaxation": self.relaxation,
            **solver,
            "residuals": plain(self.residuals),
        }


def certify(
    relaxation: str,
    *,
    statement: Statement,
    multipliers: Mapping[str, Any],
    solver: str,
    solver_status: str,
    solver_value: float,
    problem: Mapping[str, Any] | None = None,
    witness: Any = None,
    details: Mapping[str, Any] | None = None,
    residuals: Mapping[str, float] | None = None,
    proved: float | None = None,
) -> Certificate:
    """The certificate whose value is the dual function at ``multipliers``, whatever the solver claimed.

    ``problem`` are the data of the statement when the caller has made them already, and ``proved`` the value when the caller
    has just evaluated it.

    Raises
    ------
    CertificateError
        The dual function rejects the multipliers or proves nothing finite.
    """
    duals = {key: check.frozen(np.array(value, dtype=np.float64)) for key, value in multipliers.items()}
    if proved is None:
        data = _problem(relaxation, statement) if problem is None else problem
        proved = _evaluate(_DUAL_FUNCTIONS[relaxation], relaxation, data, duals)
    if not np.isfinite(proved):
        raise CertificateError(f"the multipliers of {relaxation!r} prove no finite bound (received {proved}).")
    value = proved * (1.0 + ROUNDING) + lost_below(proved)
    return Certificate(
        value=value,
        kind="upper",
        p=statement.p,
        domain=statement.domain,
        n=statement.n,
        witness=witness,
        details=dict(details or {}),
        attention=statement.attention,
        theorem=relaxation.partition("/")[0],
        quantity=_QUANTITIES[relaxation],
        relaxation=relaxation,
        multipliers=duals,
        options=dict(statement.options),
        solver=solver,
        solver_status=solver_status,
        solver_value=float(solver_value),
        residuals={"gap": value - float(solver_value), **(residuals or {})},
    )


def certify_value(
    relaxation: str, *, statement: Statement, value: float, details: Mapping[str, Any] | None = None
) -> Certificate:
    """The certificate of a relaxation without multipliers, its value just evaluated."""
    return certify(
        relaxation,
        statement=statement,
        multipliers={},
        solver="none",
        solver_status="evaluated",
        solver_value=value,
        details=details,
        proved=value,
    )


def multiplier(
    multipliers: Mapping[str, Array],
    name: str,
    shape: tuple[int, ...],
    *,
    positive: bool = False,
    sign: bool = False,
) -> Array:
    """The multiplier ``name``: finite, of this shape, positive, or non-negative (``sign``)."""
    value = multipliers.get(name)
    if value is None or value.shape != shape or not np.isfinite(value).all():
        received = "none" if value is None else f"shape {value.shape}"
        raise CertificateError(f"multiplier {name!r} must be finite of shape {shape}, received {received}.")
    if (positive and not (value > 0).all()) or (sign and not (value >= 0).all()):
        raise CertificateError(
            f"multiplier {name!r} must be {'positive' if positive else 'non-negative'}, "
            f"received a smallest entry of {value.min():g}; run the solver longer or choose another."
        )
    return value


def _problem(name: str, statement: Statement) -> dict[str, Any]:
    try:
        return _PROBLEMS[name](statement)
    except (LookupError, ArithmeticError, AssertionError, AttributeError, ValueError, TypeError, LinAlgError) as exc:
        raise CertificateError(f"the statement of {name!r} does not satisfy its hypotheses: {exc}") from exc


def _evaluate(function: DualFunction, name: str, problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    try:
        with np.errstate(all="ignore"):
            value = top(function(problem, multipliers))
    except (LookupError, ArithmeticError, AssertionError, AttributeError, ValueError, TypeError, LinAlgError) as exc:
        raise CertificateError(f"the dual function of {name!r} rejects its multipliers: {exc}") from exc
    if not np.isfinite(value) or value < 0:
        raise CertificateError(f"the multipliers of {name!r} prove no finite bound (their dual value is {value}).")
    return value
