"""Upper bounds that carry their proof: dual multipliers, the data they multiply, and a recheck in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otattn import _validate as check
from otattn.errors import CertificateError
from otattn.lipschitz.bound import Bound

__all__ = ["Certificate", "certify", "dual_function", "multiplier"]

Array = NDArray[np.float64]
DualFunction = Callable[[Mapping[str, Any], Mapping[str, Array]], float]

ROUNDING = 1e-12
"""Relative margin of the value over what is proved: another BLAS may round the recheck differently."""

_DUAL_FUNCTIONS: dict[str, DualFunction] = {}


def dual_function(name: str) -> Callable[[DualFunction], DualFunction]:
    """Register a relaxation's dual function ``(problem, multipliers) -> proved upper bound``, numpy only."""

    def register(function: DualFunction) -> DualFunction:
        if name in _DUAL_FUNCTIONS:
            raise ValueError(f"name must be new, received {name!r}, which is registered already; choose another.")
        _DUAL_FUNCTIONS[name] = function
        return function

    return register


@dataclass(frozen=True, eq=False, repr=False)
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
        Dual variables, in the units of ``problem``.
    problem : dict
        The data that the multipliers multiply: normalised, with the scales that undo it.
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
    >>> from otattn.lipschitz.relaxations import field_jacobian
    >>> from otattn.measures import Ball
    >>> bound = field_jacobian(SoftmaxAttention([[2.0]], [[3.0]]), Ball(1.0))
    >>> round(bound.value, 6), bound.verify(), replace(bound, value=5.9).verify()
    (6.0, True, False)
    """

    relaxation: str = ""
    multipliers: dict[str, Array] = field(default_factory=dict)
    problem: dict[str, Any] = field(default_factory=dict)
    solver: str = ""
    solver_status: str = ""
    solver_value: float = float("nan")
    residuals: dict[str, float] = field(default_factory=dict)

    def proved_value(self) -> float:
        """The bound that the multipliers prove, recomputed from ``problem`` and ``multipliers`` alone.

        Raises
        ------
        CertificateError
            The multipliers are not admissible, or the relaxation is unknown.
        """
        function = _DUAL_FUNCTIONS.get(self.relaxation)
        if function is None:
            raise CertificateError(f"no dual function is registered for the relaxation {self.relaxation!r}.")
        return _evaluate(function, self.relaxation, self.problem, self.multipliers)

    def verify(self) -> bool:
        """True when the multipliers prove ``value``; any inadmissible or altered piece gives False."""
        try:
            proved = self.proved_value()
        except CertificateError:
            return False
        return bool(self.kind == "upper" and np.isfinite(self.value) and proved <= self.value)

    def to_dict(self) -> dict[str, Any]:
        """The plain numbers, ready for JSON."""
        claimed = self.solver_value if np.isfinite(self.solver_value) else None
        solver = {"solver": self.solver, "solver_status": self.solver_status, "solver_value": claimed}
        return {
            **super().to_dict(),
            "relaxation": self.relaxation,
            **solver,
            "residuals": dict(self.residuals),
        }

    def __repr__(self) -> str:
        return "Certificate" + super().__repr__().removeprefix("Bound")


def certify(
    relaxation: str,
    *,
    problem: Mapping[str, Any],
    multipliers: Mapping[str, Any],
    source: str,
    solver: str,
    solver_status: str,
    solver_value: float,
    domain: Any = None,
    n: int | None = None,
    witness: Any = None,
    details: Mapping[str, Any] | None = None,
    residuals: Mapping[str, float] | None = None,
    proved: float | None = None,
) -> Certificate:
    """The certificate whose value is the dual function at ``multipliers``, whatever the solver claimed.

    ``proved`` is that value when the caller has just evaluated it on the same data.

    Raises
    ------
    CertificateError
        The dual function rejects the multipliers or proves nothing finite.
    """
    data = {key: _stored(value) for key, value in problem.items()}
    duals = {key: check.frozen(np.array(value, dtype=np.float64)) for key, value in multipliers.items()}
    if proved is None:
        proved = _evaluate(_DUAL_FUNCTIONS[relaxation], relaxation, data, duals)
    if not np.isfinite(proved):
        raise CertificateError(f"the multipliers of {relaxation!r} prove no finite bound (received {proved}).")
    value = proved * (1.0 + ROUNDING)
    return Certificate(
        value=value,
        kind="upper",
        source=source,
        domain=domain,
        n=n,
        witness=witness,
        details=dict(details or {}),
        relaxation=relaxation,
        multipliers=duals,
        problem=data,
        solver=solver,
        solver_status=solver_status,
        solver_value=float(solver_value),
        residuals={"gap": value - float(solver_value), **(residuals or {})},
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


def _evaluate(function: DualFunction, name: str, problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    try:
        with np.errstate(all="ignore"):
            value = float(function(problem, multipliers))
    except (LookupError, ArithmeticError, AttributeError, ValueError, TypeError, np.linalg.LinAlgError) as exc:
        raise CertificateError(f"the dual function of {name!r} rejects its multipliers: {exc}") from exc
    if not np.isfinite(value) or value < 0:
        raise CertificateError(f"the multipliers of {name!r} prove no finite bound (their dual value is {value}).")
    return value


def _stored(value: Any) -> Any:
    return check.frozen(np.array(value)) if isinstance(value, np.ndarray) else value
