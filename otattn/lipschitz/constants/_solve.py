"""The free choices of a certificate: its options, and multipliers by a scalar search or by cvxpy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from scipy.optimize import minimize_scalar

from otattn import _validate as check
from otattn.errors import CertificateError
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement
from otattn.lipschitz.theorem import prove

_ITERATION_OPTION = {"CLARABEL": "max_iter", "SCS": "max_iters"}


@dataclass(frozen=True)
class Proposal:
    """What a solver says of its own work; a record, not a proof."""

    solver: str = "none"
    status: str = "zero map"
    value: float = 0.0

    def claims(self, scale: float = 1.0) -> dict[str, Any]:
        """What a certificate records, the value in units of ``1 / scale``."""
        return {"solver": self.solver, "solver_status": self.status, "solver_value": self.value * scale}


def scalar_search(
    function: Callable[[float], float], low: float, high: float, *, max_iter: int | None = None
) -> tuple[float, Proposal]:
    """A minimiser of a convex function on ``[low, high]``, ends included."""
    options = {"xatol": 1e-11 * max(abs(low), abs(high)), "maxiter": 200 if max_iter is None else max_iter}
    result = minimize_scalar(function, bounds=(low, high), method="bounded", options=options)
    best = min((float(result.x), low, high), key=function)
    status = "optimal" if result.success else "iteration_limit"
    if result.success:
        # the method resolves its argument to 1e-8 of its size, which shows at a kink: search once more around the best
        center, width = best, 1e-6 * (high - low)
        around = (max(low, center - width) - center, min(high, center + width) - center)
        fine = minimize_scalar(
            lambda x: function(center + x), bounds=around, method="bounded", options={"xatol": 1e-9 * width}
        )
        best = min((center + float(fine.x), center), key=function)
    return best, Proposal("scalar search", status, float(function(best)))


def cvxpy_solve(problem: Any, solver: str, max_iter: int | None = None) -> Proposal:
    """Run a cvxpy problem; its variables then hold a proposal, which the caller must repair and evaluate.

    Raises
    ------
    ValueError
        The solver is not one of those supported.
    CertificateError
        The solver gave no point at all.
    """
    import cvxpy as cp

    name = str(solver).upper()
    if name not in _ITERATION_OPTION:
        raise ValueError(
            f"solver must be one of {sorted(_ITERATION_OPTION)}, received {solver!r}; both come with cvxpy."
        )
    options = {} if max_iter is None else {_ITERATION_OPTION[name]: check.count(max_iter, "max_iter")}
    with warnings.catch_warnings():
        # an inaccurate point is welcome: it is repaired, and its value recomputed, before anybody sees it
        warnings.filterwarnings("ignore", message="Solution may be inaccurate", category=UserWarning)
        try:
            problem.solve(solver=name, **options)
        except cp.error.SolverError as exc:
            raise CertificateError(
                f"{name} gave no multipliers ({exc}); try another solver or a larger max_iter."
            ) from exc
    if any(variable.value is None for variable in problem.variables()):
        raise CertificateError(f"{name} gave no multipliers (status {problem.status}); try another solver.")
    value = problem.value
    return Proposal(name, str(problem.status), float("nan") if value is None else float(value))


def scalar_value(variable: Any) -> float:
    """The value of a scalar cvxpy variable."""
    return float(variable.value)


def number(options: Mapping[str, Any], name: str, *, least: float = 0.0, most: float = math.inf) -> float:
    """The entry ``name``, in ``[least, most]``."""
    value = float(options[name])
    if not least <= value <= most:
        raise ValueError(f"the option {name} must be in [{least:g}, {most:g}], received {value!r}; it was altered.")
    return value


def integer(options: Mapping[str, Any], name: str, *, least: int = 1, most: int = 10**7) -> int:
    """The entry ``name``, a whole number in ``[least, most]``."""
    value = options[name]
    if not math.isfinite(value) or value != int(value) or not least <= value <= most:
        raise ValueError(
            f"the option {name} must be an integer in [{least}, {most}], received {value!r}; it was altered."
        )
    return int(value)


def trivial(statement: Statement) -> Bound:
    """The constant of one token, or of ``V = 0``: the closed form is exact then."""
    return prove("column_bound", statement.attention, statement.domain, statement.n, statement.p)
