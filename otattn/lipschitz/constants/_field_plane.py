r"""The field part ``sup ||V C A||`` on a rectangle: exact up to cells.

Covariances of measures on ``[-r_1, r_1] x [-r_2, r_2]`` have ``C = D S D`` with ``D = diag(r)``, ``S >= 0`` and
``diag S <= 1`` (Popoviciu). The norm is convex in C, so it is largest at an extreme point S of that set. A positive
definite S is none: with only the two diagonal conditions its off-diagonal entry can move both ways. So ``S = v v^T``
with ``max|v_i| = 1`` and

.. math:: \sup \|V C A\| = \max_{\max|v_i| = 1} |V D v|\,|A^T D v|,

attained by two atoms ``+-D v`` of equal mass. On a cell of an edge ``v = (1, t)`` or ``(t, 1)``, for any ``s > 0``,
``|V D v| |A^T D v| <= (s |V D v|^2 + |A^T D v|^2 / s) / 2``, which is convex in t: its values at the two ends of the cell
bound it. With s made for the middle of the cell the excess is of second order in the width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import product
from otattn.lipschitz.certificate import Certificate, Statement, certify, dual_function, multiplier

_CELLS = 4096


def _edges(V: Any, K: Any, t: Any) -> tuple[Any, Any]:
    """``|V v|^2`` and ``|K v|^2`` at ``(1, t)`` and ``(t, 1)``, shape ``(2, len(t))``."""
    v = [np.stack([np.ones_like(t), t]), np.stack([t, np.ones_like(t)])]
    return (
        np.stack([((V @ x) ** 2).sum(axis=0) for x in v]),
        np.stack([((K @ x) ** 2).sum(axis=0) for x in v]),
    )


@dual_function("field_certificate/plane", exact=True, quantity="field")
def _plane_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    V, K = problem["values"], problem["keys"]
    s: Any = multiplier(multipliers, "s", (2, _CELLS), positive=True)
    t: Any = np.linspace(-1.0, 1.0, _CELLS + 1)
    margin = 1.0 + 64 * EPS + problem["slack"]
    if isinstance(V, BallMatrix):
        V, K, s, t, margin = V.interval(), K.interval(), lift(s), lift(t), 1.0
    a, b = _edges(V, K, t)
    ends = (a[:, :-1], b[:, :-1]), (a[:, 1:], b[:, 1:])
    largest = np.stack([(0.5 * (s * x + y / s)).max() for x, y in ends]).max()
    return product(largest * margin, *problem["units"])


def best_edge_point(V: Array, K: Array) -> Array:
    """A boundary point v of the unit square that nearly maximises ``|V v| |K v|``."""
    t = np.linspace(-1.0, 1.0, 2 * _CELLS + 1)
    a, b = _edges(V, K, t)
    edge, k = np.unravel_index(int((a * b).argmax()), a.shape)
    return np.array([1.0, t[k]]) if edge == 0 else np.array([t[k], 1.0])


def plane_field(statement: Statement, problem: Mapping[str, Any], common: Mapping[str, Any]) -> Certificate:
    """The certificate for ``V D`` and ``A^T D`` of norm about one each."""
    V, K = problem["values"], problem["keys"]
    t = np.linspace(-1.0, 1.0, _CELLS + 1)
    a, b = _edges(V, K, 0.5 * (t[1:] + t[:-1]))
    s = np.clip(np.sqrt(b / np.maximum(a, 1e-300)), 1e-6, 1e6)
    return certify(
        "field_certificate/plane",
        statement=statement,
        problem=problem,
        multipliers={"s": s},
        solver="cells",
        solver_status="closed",
        solver_value=float(np.sqrt((a * b).max())) * product(*problem["units"]),
        **common,
    )
