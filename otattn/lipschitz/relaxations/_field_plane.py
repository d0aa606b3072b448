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
from numpy.typing import NDArray

from otattn.lipschitz.relaxations._quadratic import EPS
from otattn.lipschitz.relaxations.certificate import Certificate, certify, dual_function, multiplier

__all__ = ["best_edge_point", "plane_field"]

Array = NDArray[np.float64]

_CELLS = 4096


def _edges(V: Array, K: Array, t: Array) -> tuple[Array, Array]:
    """``|V v|^2`` and ``|K v|^2`` at ``(1, t)`` and ``(t, 1)``, shape ``(2, len(t))``."""
    v = np.stack([np.stack([np.ones_like(t), t]), np.stack([t, np.ones_like(t)])])
    return np.sum((V @ v) ** 2, axis=1), np.sum((K @ v) ** 2, axis=1)


@dual_function("field_jacobian/plane")
def _plane_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> float:
    V, K = problem["values"], problem["keys"]
    s = multiplier(multipliers, "s", (2, _CELLS), positive=True)
    a, b = _edges(V, K, np.linspace(-1.0, 1.0, _CELLS + 1))
    top = max(float((0.5 * (s * x + y / s)).max()) for x, y in ((a[:, :-1], b[:, :-1]), (a[:, 1:], b[:, 1:])))
    return float(problem["scale"] * top * (1.0 + 64 * EPS))


def best_edge_point(V: Array, K: Array) -> Array:
    """A boundary point v of the unit square that nearly maximises ``|V v| |K v|``."""
    t = np.linspace(-1.0, 1.0, 2 * _CELLS + 1)
    a, b = _edges(V, K, t)
    edge, k = np.unravel_index(int((a * b).argmax()), a.shape)
    return np.array([1.0, t[k]]) if edge == 0 else np.array([t[k], 1.0])


def plane_field(V: Array, K: Array, scale: float, common: Mapping[str, Any]) -> Certificate:
    """The certificate for ``V D`` and ``A^T D`` of norm one each, ``scale`` the product of their norms."""
    t = np.linspace(-1.0, 1.0, _CELLS + 1)
    a, b = _edges(V, K, 0.5 * (t[1:] + t[:-1]))
    s = np.clip(np.sqrt(b / np.maximum(a, 1e-300)), 1e-6, 1e6)
    return certify(
        "field_jacobian/plane",
        problem={"values": V, "keys": K, "scale": scale},
        multipliers={"s": s},
        source="field part on a rectangle (own theorem): max over its boundary of |V D v| |A' D v|",
        solver="cells",
        solver_status="closed",
        solver_value=float(np.sqrt((a * b).max())) * scale,
        **common,
    )
