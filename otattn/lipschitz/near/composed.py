r"""The second derivative of a stack as one form, and what is left of the stack after it.

Letters of :mod:`~otattn.lipschitz.near.stack`; ``H_t`` is the second derivative of stage t at the tokens, ``C_t`` a bound of it,
``j_a = ||J_{1:a}||``, and ``B_a = D^2 F_{1:a} = sum_t J_{t+1:a} H_t[J_{1:t-1} ., J_{1:t-1} .]``. Term by term ``|B_a| <= sum_t
||J_{t+1:a}|| C_t j_{t-1}^2``, but no direction is the worst of all stages at once: for six layers of MiniLM this sum is a
thousand times what B is.

**Images.** Let ``D_a = J_{1:a} D + e_a``. With ``q_a`` the remainder of stage a after the second order,

``D_a = J_a D_{a-1} + H_a[D_{a-1}, D_{a-1}] / 2 + q_a``, so ``e_a = B_a[D, D] / 2 + c_a`` by the identity for B,
``c_a = M_a[D, (e_t)] + sum_t J_{t+1:a} (H_t[e_{t-1}, e_{t-1}] / 2 + q_t)``,
``M_a[D, (e_t)] = sum_t J_{t+1:a} H_t[J_{1:t-1} D, e_{t-1}]``.

With ``w_a >= |e_a|``, and any positive weights, M is bounded in two ways,

``|M_a| <= sum_t ||J_{t+1:a}|| C_t j_{t-1} r w_{t-1}`` and ``|M_a| <= ||M_a|| r (sum_t (w_{t-1} / weight_{t-1})^2)^{1/2}``,

``||M_a||`` the norm of the bilinear map of D and of all e together, ``e_t`` divided by their weights. The rest of c is at most
``sum_t ||J_{t+1:a}|| (C_t w_{t-1}^2 / 2 + Q_t(r_{t-1}))``, and ``w_a = |B_a| r^2 / 2 + |c_a|``. Also ``|e_a| <= sum_t ||J_{t+1:a}||
(C_t r_{t-1}^2 / 2 + Q_t(r_{t-1}))``, the bound without B: w is the smaller of the two, ``r_a = j_a r + w_a``.

**Jacobians.** Let ``J'_a .. J'_1 = J_{1:a} + U_a``, ``U_a = B_a[D, .] + V_a`` and ``J'_a = J_a + H_a[D_{a-1}, .] + p_a``. Then

``V_a = M_a[., (e_t)] + M_a[D, (U_t .)] + sum_t J_{t+1:a} (H_t[e_{t-1}, U_{t-1} .] + p_t (J_{1:t-1} + U_{t-1}))``,

and ``|U_a| <= |B_a| r + |V_a|``, or the bound without B.

**The norm of a bilinear map, with a stated probability** (``sketched``), of B and of M. For a unit zeta let ``|H(zeta)|_F`` be the
Frobenius norm of the matrix of ``<zeta, B[., .]>``; the norm is at most the largest, h, at a zeta that belongs to B. For
independent standard normal D and E, ``x = <zeta, B[D, E]>`` has ``E exp(-s x^2) = E (1 + 2 s |H^T D|^2)^{-1/2}``, and ``|H^T D|^2``
is a sum of ``s_i^2 g_i^2`` with ``sum s_i^2 = h^2``: the power is convex, so this is at most ``M(s h^2) = E (1 + 2 s h^2 g^2)^{-1/2} =
e^y K_0(y) / sqrt(4 pi s h^2)``, ``y = 1 / (8 s h^2)`` (rank one is the worst). By Markov the mean of ``x^2`` over k pairs is below
``theta h^2`` with probability at most ``(e^{s theta} M(s))^k`` for any s. It is at most the square of the norm of the matrix of the
k vectors ``B[D, E] / sqrt k``, so this norm over ``sqrt theta`` bounds B. One pass of k pairs through the stack gives the
vectors of all ``B_a``, by ``B_a[D, E] = J_a B_{a-1}[D, E] + H_a[J_{1:a-1} D, J_{1:a-1} E]``, and one those of all ``M_a``.

Rounding. B and M are those of the float tokens, with float Jacobians; what the errors of these add is at most the difference
of the bounds term by term with and without the errors (a product telescopes). Rounding of the pass is that of its stages:
``MARGIN`` times that bound is added for it, a margin as it is for the norms of the products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import k0e

from otattn.lipschitz.arithmetic.largest_eigenvalue import FAILURE
from otattn.lipschitz.constants._dual_quadratic import EPS
from otattn.lipschitz.near.expansion import Cubic

__all__ = ["Bends", "bends_term_by_term", "budget", "grown", "sketch_factor", "sketched", "walk", "with_errors"]

Array = NDArray[np.float64]
PAIRS = 192
"""Pairs of directions: the bound is 1.96 times the norm that they show."""
BATCH = 16
"""Pairs that go through the stack together."""
MARGIN = 1e-10
_UP = 1.0 + 1e-13


class Bends(NamedTuple):
    """Bounds of the forms of a stack, for all of its beginnings (a = 0, .., S).

    ``whole[a]`` is that of B_a; ``mixed[a]`` that of M_a, whose arguments e_t are measured in ``weights[t]``.
    """

    whole: Array
    mixed: Array
    weights: Array


def bends_term_by_term(stages: Sequence[Cubic], norms: Array, offs: Sequence[float]) -> Array:
    """``sum_t ||J_{t+1:a}|| C_t j_{t-1}^2``, a = 0, .., S."""
    S = len(stages)
    own = [f.curvature(e) * norms[0, t] ** 2 for t, (f, e) in enumerate(zip(stages, offs, strict=True))]
    return np.array([sum(norms[t + 1, a] * own[t] for t in range(a)) for a in range(S + 1)]) * _UP


def with_errors(found: Bends, stages: Sequence[Cubic], before: Array, after: Array, offs: Sequence[float]) -> Bends:
    """The bounds at the true tokens, from those of the floats: ``before`` are norms of float Jacobians, ``after`` of the true ones."""
    S, still = len(stages), [0.0] * len(stages)
    more, less = bends_term_by_term(stages, after, offs), bends_term_by_term(stages, before, still)
    whole = found.whole + np.maximum(more - less, 0.0) + MARGIN * more
    own = [
        (after[0, t] * f.curvature(e), before[0, t] * f.curvature())
        for t, (f, e) in enumerate(zip(stages, offs, strict=True))
    ]
    mixed = found.mixed.copy()
    for a in range(S + 1):
        terms = [
            (
                max(after[t + 1, a] * own[t][0] - before[t + 1, a] * own[t][1], 0.0)
                + MARGIN * after[t + 1, a] * own[t][0]
            )
            * found.weights[t]
            for t in range(a)
        ]
        mixed[a] += float(np.linalg.norm(terms))
    return Bends(np.minimum(whole, more), mixed, found.weights)


class _Terms:
    """The sums ``sum_{t <= a} ||J_{t+1:a}|| x_t`` with the forms where these say more."""

    def __init__(self, norms: Array, bends: Bends | None) -> None:
        self.norms, self.bends = norms, bends

    def total(self, x: list[float]) -> float:
        a = len(x)
        return float(self.norms[1 : a + 1, a] @ np.array(x))

    def crossed(self, C: list[float], w: list[float], r: float) -> float:
        """Of ``H_t[J_{1:t-1} D, e_t]``, ``|D| <= r``, ``|e_t| <= w_t``."""
        a = len(w)
        plain = self.total([c * x * j for c, x, j in zip(C, w, self.norms[0], strict=False)]) * r
        if self.bends is None:
            return plain
        return min(plain, float(self.bends.mixed[a] * np.linalg.norm(np.array(w) / self.bends.weights[:a]) * r))


def walk(
    stages: Sequence[Cubic], norms: Array, offs: Sequence[float], bends: Bends | None, r: float
) -> tuple[list[float], list[float], float]:
    """``r_a``, ``w_a`` (a = 0, .., S), and the bound of ``|c_S|``; without ``bends`` term by term."""
    whole = bends_term_by_term(stages, norms, offs) if bends is None else bends.whole
    terms, C = _Terms(norms, bends), [f.curvature(e) for f, e in zip(stages, offs, strict=True)]
    radii, apart, short, long = [r], [0.0], [], []
    third = 0.0
    for a, stage in enumerate(stages):
        rest = stage.third_remainder(radii[a], offs[a])
        short.append(0.5 * C[a] * apart[a] ** 2 + rest)
        long.append(0.5 * C[a] * radii[a] ** 2 + rest)
        third = (terms.total(short) + terms.crossed(C, apart, r)) * _UP
        apart.append(min(0.5 * whole[a + 1] * r**2 + third, terms.total(long)) * _UP)
        radii.append(float(norms[0, a + 1] * r + apart[-1]) * _UP)
    return radii, apart, third


def grown(
    stages: Sequence[Cubic], norms: Array, offs: Sequence[float], bends: Bends | None, r: float
) -> tuple[list[float], float]:
    """The bounds of ``|U_a|``, a = 0, .., S, and of ``|V_S|``."""
    radii, apart, _ = walk(stages, norms, offs, bends, r)
    whole = bends_term_by_term(stages, norms, offs) if bends is None else bends.whole
    terms, C = _Terms(norms, bends), [f.curvature(e) for f, e in zip(stages, offs, strict=True)]
    change, short, long = [0.0], [], []
    third = 0.0
    for a, stage in enumerate(stages):
        size = float(norms[0, a] + change[a])
        rest = stage.third_growth(radii[a], offs[a])
        short.append(C[a] * apart[a] * change[a] + rest * size)
        long.append((C[a] * radii[a] + rest) * size)
        crossed = terms.crossed(C, apart[: a + 1], 1.0) + terms.crossed(C, change, r)
        third = (terms.total(short) + crossed) * _UP
        change.append(min(whole[a + 1] * r + third, terms.total(long)) * _UP)
    return change, third


def budget(
    stages: Sequence[Cubic], norms: Array, offs: Sequence[float], bends: Bends | None, r: float
) -> dict[str, float | list[float]]:
    """What the remainder at r is made of.

    ``remainder``, the whole; ``second``, ``|B_S| r^2 / 2``; ``crossed``, what the forms H make of ``J D`` and e; ``stages``, the
    rest stage by stage, and ``third``, what of it their third derivatives are. Where the bound without B is smaller, ``stages`` is
    all of it.
    """
    S = len(stages)
    radii, apart, rest = walk(stages, norms, offs, bends, r)
    out, C = norms[1:, S], [f.curvature(e) for f, e in zip(stages, offs, strict=True)]
    third = [float(x * f.third_remainder(s, e)) for x, f, s, e in zip(out, stages, radii, offs, strict=False)]
    plain = [float(0.5 * x * c * s**2 + q) for x, c, s, q in zip(out, C, radii, third, strict=False)]
    second = 0.0 if bends is None else 0.5 * float(bends.whole[-1]) * r**2
    if bends is None or second + rest > sum(plain):
        return {"remainder": sum(plain), "second": 0.0, "crossed": 0.0, "stages": plain, "third": third}
    own = [float(0.5 * x * c * w**2 + q) for x, c, w, q in zip(out, C, apart, third, strict=False)]
    crossed = _Terms(norms, bends).crossed(C, apart[:-1], r)
    return {"remainder": second + rest, "second": second, "crossed": crossed, "stages": own, "third": third}


def sketch_factor(k: int, failure: float) -> float:
    """``theta^{-1/2}``."""
    s = np.logspace(-2.0, 4.0, 1000)
    y = 1.0 / (8.0 * s)
    logs = np.log(k0e(y)) - 0.5 * np.log(4.0 * math.pi * s)
    theta = float(((-logs - math.log(1.0 / failure) / k) / s).max()) * (1.0 - 1e-9)
    return 1.0 / math.sqrt(theta) if theta > 0.0 else float("inf")


def sketched(
    images: Callable[[np.random.Generator, int], list[Array]], turns: Sequence[Array | None], seed: int
) -> Array:
    """Bounds of bilinear maps ``B_a``, a = 0, .., S (the first is 0), in the coordinates ``turns[a]``, each with probability ``1 -
    FAILURE``.

    ``images(rng, k)`` are the ``B_a[D, E]``, a = 1, .., S, ``(k, n, d)``, at k standard normal pairs.
    """
    rng = np.random.default_rng(seed)
    parts: list[list[Array]] = [[] for _ in turns[1:]]
    for _ in range(PAIRS // BATCH):
        for part, image, turn in zip(parts, images(rng, BATCH), turns[1:], strict=True):
            part.append((image if turn is None else image @ turn.T).reshape(BATCH, -1))
    found = [0.0]
    for part in parts:
        M = np.concatenate(part)
        top = float(np.linalg.norm(M, 2)) * (1.0 + 8.0 * M.shape[1] * EPS)
        found.append(top / math.sqrt(PAIRS) * sketch_factor(PAIRS, FAILURE))
    return np.array(found)
