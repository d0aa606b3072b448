r"""A law that is concentrated is far from one that is spread: its divergence from the other's variance.

Let alpha and P be laws on the unit ball, e a unit vector, ``z = <e, .>``. Under alpha, z has a mean of absolute value at most s,
``0 <= s <= 1``, and a variance at most b; under P it has the variance V. For every ``0 <= m <= s`` and ``C > (1 + m)^2``

.. math:: -KL(\alpha | P) \le \log(C - V) + E, \qquad
          E = \min\{\gamma(s - m) + K b,\; \gamma(0) + \kappa\,((s - m)^2 + b)\}, \qquad \gamma(t) = -\log(C - t^2),

``kappa = (gamma(1 + m) - gamma(0))/(1 + m)^2`` and ``K = max(kappa, r(1 - m; s - m), r(-1 - m; s - m))``, where ``r(t; u) =
(gamma(t) - gamma(u) - gamma'(u) (t - u))/(t - u)^2``.

*Proof.* Choose the sign of e such that the mean s' of z under alpha is in ``[0, s]``, and let ``m' = min(m, s')``. The function
``phi = C - (z - m')^2`` is positive, so ``-KL(alpha|P) <= log E_P phi - E_alpha log phi`` (Donsker and Varadhan), and ``E_P (z -
m')^2 >= V``. It remains to bound ``E_alpha gamma(t)``, ``t = z - m'`` in ``[-1 - m', 1 - m']``, of mean ``u = s' - m'``. The series
of gamma in ``t^2`` has positive coefficients (but for its constant). So it is convex in ``t^2``, and the chord from 0 to ``(1 +
m')^2`` gives ``gamma(0) + kappa' E t^2``, with ``kappa' <= kappa`` and ``E t^2 <= (s' - m')^2 + b <= (s - m)^2 + b``: the second
bound. For the first, if ``s' < m`` then ``u = 0`` and the chord gives ``gamma(0) + kappa b``. Else ``m' = m`` and Taylor's formula
gives ``gamma(u) + E r(t; u) (t - u)^2``, with ``r(t; u) = int_0^1 (1 - x) gamma''(u + x (t - u)) dx``. As ``gamma''`` is even
and convex, r is convex in t and in u: its maximum over t is at ``1 - m`` or ``-1 - m``; that over u in ``[0, s - m]`` is at ``s -
m`` for ``t = 1 - m``, where all arguments are positive, and for ``t = -1 - m`` it is there or at 0, where ``r = kappa``. []

The binary divergence of the second moments is the case ``m = 0`` of the second bound, at its best C. Convexity also bounds
``r(1 - m; u)`` by ``gamma''(u)/3 + gamma''(1 - m)/6``, which loses no digits when s is near 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_NEAR = 0.1
"""Below this distance of s from 1 the difference quotient loses digits, and the bound by convexity is nearly sharp."""


def exponent(s: Any, b: Any, m: Any, C: Any) -> Any:
    """``E`` of the lemma, for ``0 <= m <= s <= 1`` and ``C > (1 + m)^2``; increasing in s and in b."""
    u, far, near = s - m, 1.0 + m, 1.0 - m
    log_C, rest = np.log(C), C - u * u
    here, slope, end = -np.log(rest), 2.0 * u / rest, -np.log(C - far * far)
    kappa = (end + log_C) / (far * far)
    left = (end - here + slope * (1.0 + s)) / (1.0 + s) ** 2
    gap = np.maximum(1.0 - s, _NEAR)
    quotient = (-np.log(C - near * near) - here - slope * gap) / (gap * gap)
    right = np.where(s < 1.0 - _NEAR, quotient, _bend(C, u) / 3.0 + _bend(C, near) / 6.0)
    K = np.maximum(kappa, np.maximum(left, right))
    return np.minimum(here + K * b, kappa * (u * u + b) - log_C)


def _bend(C: Any, t: Any) -> Any:
    """``gamma''(t)``."""
    return 2.0 * (C + t * t) / (C - t * t) ** 2
