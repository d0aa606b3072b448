"""What an attack on one function found, how a call counts as refused, and how a suspicion is settled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath as mp
import numpy as np
from exact import digits

import otattn as oa

SUSPICION = 1e-8
"""Relative distance below a bound from which on a float value is computed again in 100 digits."""
NOISE = mp.mpf(10) ** -40
"""What 100 digits leave of a number that is exactly 0."""


@dataclass(frozen=True)
class Outcome:
    """``state`` is "held", "refused" (the function does not cover the problem) or "violated"."""

    function: str
    kind: str
    state: str
    tried: int = 0
    report: str = ""
    share: float = 0.0
    """How much of the bound was attained."""


class Refused(Exception):
    """The function said that it does not cover the problem."""


def asked(call: Callable[[], Any]) -> Any:
    """The answer of a function of the library; errors other than a refusal in words go through."""
    try:
        return call()
    except np.linalg.LinAlgError:
        raise
    except OverflowError as exc:
        if "must" not in str(exc):  # the interpreter's own
            raise
        raise Refused(str(exc)) from exc
    except (ValueError, TypeError, oa.OtattnError) as exc:
        raise Refused(str(exc)) from exc


def attempt(name: str, body: Callable[[], Outcome], kind: str, about: Any) -> Outcome:
    """The outcome of ``body``: a refusal is one of the three states, any other error is a violation."""
    try:
        return body()
    except Refused:
        return Outcome(name, kind, "refused")
    except Exception as exc:
        if isinstance(exc, AssertionError | AttributeError | NameError):
            raise
        return Outcome(name, kind, "violated", 0, f"{name} raised {type(exc).__name__}: {exc}\n  {about!r}")


def settled(
    function: str, kind: str, bound: float, value: float, tried: int, sure: Callable[[], object], about
) -> Outcome:
    """Held, unless ``sure()``, the value in exact arithmetic, exceeds the bound by anything at all."""
    if np.isnan(bound):
        return Outcome(function, kind, "violated", tried, f"{function}: the bound is nan\n  {about!r}")
    share = value / bound if 0 < bound < float("inf") else 0.0
    if not (value > 0 and value >= bound * (1 - SUSPICION)):
        return Outcome(function, kind, "held", tried, share=share)
    with digits():
        excess = sure() - mp.mpf(bound)
        if excess <= NOISE:
            return Outcome(function, kind, "held", tried, share=share)
        relative = mp.nstr(excess / mp.mpf(bound), 5) if bound > 0 else "inf"
    report = f"{function}: {bound!r} is exceeded by {relative} of it ({value!r} in float64)\n  {about!r}"
    return Outcome(function, kind, "violated", tried, report, share)


def outcome(name: str, kind: str, faults: list[str], about: Any, tried: int = 1) -> Outcome:
    """Held when there are no faults."""
    if not faults:
        return Outcome(name, kind, "held", tried, share=1.0)
    return Outcome(name, kind, "violated", tried, f"{name}: {'; '.join(faults)}\n  {about!r}")
