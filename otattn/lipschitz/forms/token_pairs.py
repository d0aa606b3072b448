r"""Two tokens: quadratic forms that say how far the logits let the pair of tokens stretch, box by box.

Unit ball, notation and the proof of :mod:`otattn.lipschitz.forms.two_tokens`: ``d = x_1 - x_2``, ``g_i = A x_i + c``, the leads
``l_1 = <g_1, d>``, ``l_2 = -<g_2, d>``, ``e = d/|d|``.

**Forms.** Each ``Q`` is a quadratic form in ``z = (x_1, x_2, 1)``. Numbers nu, tau and ``w >= 0`` with

.. math:: Q + \nu_1 l_1 + \nu_2 l_2 - \tau |d|^2 \preceq w_1 |x_1|^2 + w_2 |x_2|^2 + w_0

prove ``Q <= w_0 + w_1 + w_2 + tau |d|^2 - <nu, l>``. What misses the inequality is at most a ``lambda_max``, which is added
(``|z|^2 <= 3``), so any numbers are admissible. The components along e of the vectors in Q are known from the leads: what is
left across e is ``Q - sum_m k_m(l)^2/|d|^2`` with linear ``k_m``. As ``k^2/|d|^2 >= 2 kappa k - kappa^2 |d|^2`` for every kappa
(taken at the middle of a box), that is at most a linear function of ``(|d|^2, l_1, l_2)``. Boxes are of ``|d|``, ``l_1`` and s, with
``l_1 + l_2 = <A d, d> = s |d|^2``: their ends bound it. A negative bound of a square proves that a box is empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from otattn._linalg import EPS, Array, column_of, lambda_max_upper, mid, norm_upper
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import top

FORMS: Mapping[str, tuple[tuple[float, float], ...]] = {
    "own": ((2.0, 1.0), (1.0, 0.0)),  # |g_1 + A^T d|^2 + |g_1|^2
    "turned": ((1.0, 1.0),),  # |A^T d|^2
    "sum": ((1.0, -1.0),),  # |g_1 + g_2|^2
    "symmetric": ((2.0, 2.0),),  # |(A + A^T) d|^2
    "values": (),  # |V d|^2
}
"""The forms Q, and the ``k_m`` of each as coefficients of ``l_1, l_2``."""
Ends = tuple[Any, Any]
NAMES = tuple(FORMS)
SLOPES = 17
"""Multipliers of each form in d alone: one parameter, and an error of second order."""


class PairForms:
    """The quadratic forms, in units of ``unit`` (of the size of g)."""

    def __init__(self, A: Any, c: Any, V: Any, a: float, noise: float) -> None:
        d = len(A)
        zero, one = np.zeros((d, d)), np.eye(d)
        self.unit = max(a, top(norm_upper(c)), 1e-300)  # a float, the unit of length of the gradients
        A, c = A / self.unit, c / self.unit
        self.A, self.V, self.exact = A, V, isinstance(A, BallMatrix)
        # places of x_1, x_2 and 1 in z, as matrices
        at1, at2, at0 = np.hstack([one, zero, zero[:, :1]]), np.hstack([zero, one, zero[:, :1]]), np.eye(2 * d + 1)[-1:]
        offset = column_of(c) @ at0
        G1, G2, D = A @ at1 + offset, A @ at2 + offset, at1 - at2
        H = A.T @ D
        l1, l2 = G1.T @ D, G2.T @ D
        self.l1, self.l2 = 0.5 * (l1 + l1.T), -0.5 * (l2 + l2.T)
        self.gap = D.T @ D

        def square(*parts: Any) -> Any:
            return sum((M.T @ M for M in parts[1:]), parts[0].T @ parts[0])

        self.forms = {
            "own": square(G1 + H, G1),
            "turned": square(H),
            "sum": square(G1 + G2),
            "symmetric": square((A + A.T) @ D),
            "values": square(V @ D),
        }
        self.parts = [np.diag(np.repeat(part, [d, d, 1])).astype(float) for part in ((0, 0, 1), (1, 0, 0), (0, 1, 0))]
        # |g| is known to this, in the unit; the forms and the leads then move by at most a multiple of it
        self.noise = noise / self.unit

    def combination(self, name: str, nu: Array, tau: float) -> Any:
        """``Q + nu_1 l_1 + nu_2 l_2 - tau |d|^2``."""
        return self.forms[name] + float(nu[0]) * self.l1 + float(nu[1]) * self.l2 - tau * self.gap

    def excess(self, name: str, nu: Array, tau: float, w: Array) -> float:
        """By how much the multipliers miss the inequality, outward."""
        M = self.combination(name, nu, tau) - sum(wi * part for wi, part in zip(w, self.parts, strict=True))
        size = 32.0 + np.abs(nu).sum() + 4 * abs(tau) + w.sum()
        # entries are sums of d products of numbers of at most these sizes
        noise = 0.0 if self.exact else 64.0 * len(M) * EPS * size
        noise += 40.0 * self.noise * size
        return float(np.maximum(0.0, top(lambda_max_upper(M)) + noise))  # a nan stays one: no bound then

    def scaled(self, name: str, nu: Array, tau: float, ratio: Array) -> Array:
        """The least ``t * ratio`` that satisfies the inequality."""
        M = self.combination(name, nu, tau)
        root = np.sqrt(sum(r * np.diag(part) for r, part in zip(ratio, self.parts, strict=True)))
        t = float(np.linalg.eigvalsh(M / np.outer(root, root))[-1])
        return max(t, 0.0) * ratio

    def of_the_gap(self) -> list[tuple[str, Array, float, Array]]:
        """Members for the forms in d alone: ``Q + nu (l_1 + l_2) <= tau |d|^2``, tau the least for its nu."""
        A, V = mid(self.A), mid(self.V)
        S, zero, found = 0.5 * (A + A.T), np.zeros(3), []
        w = np.linalg.eigvalsh(S)
        slopes = np.linspace(w[0], w[-1], SLOPES) if w[-1] - w[0] > 1e-9 else w[:1]
        squares = {"turned": (A @ A.T, 1.0), "symmetric": (4.0 * S @ S, 2.0)}
        for name, (Q, factor) in squares.items():
            for kappa in slopes.tolist():
                nu = -2.0 * factor * kappa
                found.append((name, np.full(2, nu), float(np.linalg.eigvalsh(Q + nu * S)[-1]), zero))
        for nu in np.unique(np.concatenate([[0.0], np.geomspace(0.1, 6.0, 5), -np.geomspace(0.1, 6.0, 5)])).tolist():
            found.append(("values", np.full(2, nu), float(np.linalg.eigvalsh(V.T @ V + nu * S)[-1]), zero))
        return found

    def stretches(self) -> tuple[float, float]:
        """Floats that ``s = <A d, d>/|d|^2`` lies between."""
        S = 0.5 * (self.A + self.A.T)
        margin = 8.0 * self.noise + (0.0 if self.exact else 64.0 * len(S) * EPS)
        return -top(lambda_max_upper(-S)) - margin, top(lambda_max_upper(S)) + margin


class Family:
    """Bounds of one form, one for each set of multipliers."""

    def __init__(self, forms: PairForms, name: str, nu: Array, tau: Array, w: Array) -> None:
        self.nu, self.tau, self.squares = nu, tau, FORMS[name]
        slack = np.array([forms.excess(name, *one) for one in zip(nu, tau, w, strict=True)])
        self.exact = forms.exact
        self.const = (lift(w) if self.exact else w).sum(axis=1) + 3.0 * (lift(slack) if self.exact else slack)

    def __call__(self, gap: Ends, lead: Ends, stretch: Ends, middle: Array, *, swapped: bool = False) -> Any:
        """The bound on boxes of ``|d|^2, l_1, s``, each as its ends; ``middle (3, count)`` lies near the middles of these.

        ``swapped`` exchanges the tokens.
        """
        size, one = middle[0], middle[1]
        two = size * middle[2] - one
        first, second = (two, one) if swapped else (one, two)
        slopes: list[Any] = [np.zeros(size.shape)] * 3
        for k in self.squares:
            kappa = np.clip((k[0] * first + k[1] * second) / np.maximum(size, 1e-12), -4.0, 4.0)
            kappa = lift(kappa) if self.exact else kappa
            slopes = [slopes[0] + kappa * kappa, slopes[1] - 2.0 * k[0] * kappa, slopes[2] - 2.0 * k[1] * kappa]
        best = np.full(size.shape, np.inf)
        for (n1, n2), tau, const in zip(self.nu, self.tau, self.const, strict=True):
            s1, s2 = slopes[1] - n1, slopes[2] - n2
            s1, s2 = (s2, s1) if swapped else (s1, s2)
            # l_2 = s |d|^2 - l_1
            per_gap = slopes[0] + tau + np.maximum(s2 * stretch[0], s2 * stretch[1])
            value = const + np.maximum(per_gap * gap[0], per_gap * gap[1])
            best = np.minimum(best, value + np.maximum((s1 - s2) * lead[0], (s1 - s2) * lead[1]))
        return best
