"""The interpolation between the steps of scipy's solvers, as plain numbers and back."""

from __future__ import annotations

from typing import Any

from scipy.integrate import DenseOutput, OdeSolution

__all__ = ["packed", "unpacked"]


def packed(solution: Any) -> Any:
    """The attributes of a solution and of its pieces by name; what is no solution of scipy as it is."""
    if not isinstance(solution, OdeSolution) or any(type(p) not in _kinds().values() for p in solution.interpolants):
        return solution
    return {**vars(solution), "interpolants": [[type(p).__name__, vars(p)] for p in solution.interpolants]}


def unpacked(state: dict[str, Any]) -> OdeSolution:
    """The solution whose attributes these are."""
    pieces = [_made(_kinds()[kind], attributes) for kind, attributes in state["interpolants"]]
    solution: OdeSolution = _made(OdeSolution, {**state, "interpolants": pieces})
    return solution


def _kinds() -> dict[str, type]:
    """The pieces that scipy's solvers make."""
    return {kind.__name__: kind for kind in DenseOutput.__subclasses__() if kind.__module__.startswith("scipy.")}


def _made(kind: type, attributes: dict[str, Any]) -> Any:
    out: Any = object.__new__(kind)
    vars(out).update(attributes)
    return out
