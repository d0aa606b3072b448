r"""The discrete constant of ``A = -alpha I``: a token that others use as a far anchor has a dead row of its own.

Unit ball, ``a = alpha R^2``, ``n >= 3`` tokens, no bias, no mask, any V, ``v = ||V||``; logits ``l_ik = -a <x_i, x_k>``, ``g_i
= -a x_i``, weights ``P_ij``, mean ``m_i``, covariance ``C_i`` of row i. A displacement eps has norms ``e_j = |eps_j|``, ``sum
e_j^2 = 1``; ``D f eps = V (K_i eps - a C_i eps_i)_i``, ``K_i eps = sum_j P_ij (I + (x_j - m_i) g_i^T) eps_j``, and ``R_i`` is
the norm of its row i. ``phi`` is :func:`~otattn.lipschitz.constants.rows.row_norm`. Each token has the number

.. math:: c_j = \max_k -\langle x_j, x_k\rangle \in [-1, 1], \qquad \mu_j = \sqrt{(1 + c_j)/2}, \qquad \hat e_j = \phi(a\mu_j)\, e_j .

Its largest logit is ``a c_j``, and ``|x_j - x_k|^2 <= 2 - 2 <x_j, x_k> <= 2 + 2 min(c_j, c_k)``: tokens far from others have a
large c.

**Rows.** Two bounds: ``R_i / v <= R(e_i, s_i; c_i)`` of :mod:`otattn.lipschitz.forms.anchor_rows`, ``s_i^2`` the two largest
squares of the norms of the other tokens, and ``R_i / v <= sqrt(two largest \hat e_j^2) + a e_i``: ``K_i`` is largest at weights
on two tokens, where its norm is that of ``row_norm`` at ``t = a |x_j - x_k|/2 <= a min(mu_j, mu_k)``, and phi, at least 1,
increases.

**Total.** Let J, K be the tokens of the two largest ``\hat e``, ``\hat s^2 = \hat e_J^2 + \hat e_K^2``, ``rem = 1 - e_J^2 -
e_K^2``, and ``e_3`` the largest norm of the others, whose sum is Sg. By the last bound, for each ``xi > 0``, ``sum_{i != J,K}
R_i^2 / v^2 <= (1 + xi)(n-2) \hat s^2 + a^2 rem + a^2 Sg^2/(xi (n-2))``. Hence the square of the constant is at most ``v^2``
times the maximum over ``e_J >= e_K`` and ``e_3`` of

.. math:: \min_\xi \Bigl\{ \Phi_\xi(e_J, s_J) + \Phi_\xi(e_K, s_K) + a^2 rem + \frac{a^2 Sg^2}{\xi(n-2)} \Bigr\}, \quad
          \Phi_\xi(e, s) = \max_c \{ R(e, s; c)^2/v^2 + (1+\xi)(n-2)\,\phi(a\mu(c))^2 e^2 \},

with ``s_J^2 = max(e_K^2 + e_3^2, min(2 e_3^2, rem))``, ``s_K`` likewise, and ``Sg <= min(e_3 + sqrt((n-3)(rem - e_3^2)),
sqrt((n-2) rem))``.

**Evaluation.** Phi increases in e and s and is homogeneous of degree 2: a table over directions ``(cos, sin)``, each entry at
the corner of its cell of directions and the maximum over cells of c (lower end where c is subtracted, upper end where it is
added), bounds it at every ``(e, s)`` by ``rho^2`` times an entry whose corner times rho lies above. The maximum over ``e_J = r
cos theta``, ``e_K = r sin theta``, ``e_3`` is a branch and bound: every term is monotone.

When A is within delta of ``-alpha I`` (rounding), the constant moves by at most ``v delta ((4 + 7a) sqrt(n) + 2a + 1)``, as for
the other forms (:mod:`otattn.lipschitz.upper.psd`; its argument holds for every A).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn._linalg import EPS, Array, mid, norm_upper
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, like, upper
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number, trivial
from otattn.lipschitz.constants.cells import Maximum, boxes, maximise, proved_below
from otattn.lipschitz.constants.heads import UnitNumbers, numbers_of, softmax_head, unit_numbers
from otattn.lipschitz.constants.rows import row_norm
from otattn.lipschitz.constants.self_logit import form_reason
from otattn.lipschitz.forms.anchor_rows import AnchorRows
from otattn.lipschitz.hypotheses import every, order_two, softmax, tokens
from otattn.lipschitz.theorem import theorem
from otattn.measures.domains import Domain

_CELLS = 1_000_000
_SHARES = 24
"""Numbers xi of which each box takes the best; neighbours differ by a third."""
_RANGE = 1e-6, 1e4
"""``alpha R^2``: below it is no better than the row bound, above its differences lose their digits."""


@dataclass(frozen=True, eq=False)
class Total:
    """The maximum over ``(r, theta, e_3)`` from the table ``phi (xi, directions)``, floats that bound Phi at the corners."""

    a: Any
    n: int
    angles: Array
    corners: tuple[Array, Array]
    xi: Array
    phi: Array

    @classmethod
    def of(cls, a: Any, n: int, multipliers: Mapping[str, Array]) -> Total:
        """The table that the multipliers prove."""
        angles, levels = (multiplier(multipliers, k, multipliers[k].shape) for k in ("angles", "levels"))
        rows = AnchorRows.of(a, n, angles, levels)
        r = multiplier(multipliers, "radii", (angles.size - 1, levels.size), sign=True)
        xi = multiplier(multipliers, "xi", (_SHARES,), positive=True)
        if (r > 1.0).any() or r[:, 0].any():
            raise ValueError(f"radii must be at most 1, the first 0, received {r.max()} and {r[:, 0].max()}.")
        square = rows.row(r) ** 2
        hat = (row_norm(a * np.sqrt(0.5 * (1.0 + rows.ends[1]))) * like(rows.e, a)) ** 2
        phi = [upper((square + (1.0 + like(x, a)) * (n - 2) * hat).max(axis=1)) for x in xi]
        return cls(a, n, angles, (rows.e[:, 0], rows.s[:, 0]), xi, np.array(phi))

    def terms(self, lo: Array, hi: Array, wrap: Any) -> tuple[Any, ...]:
        """``(e, s)`` of J and of K, rem and ``Sg^2`` at the worst corner of each box."""
        (r0, t0, x0), (r1, t1, x1) = ([wrap(x) for x in end] for end in (lo, hi))
        n, eJ, eK = self.n, r1 * np.cos(t0), r1 * np.sin(t1)
        rem = np.clip(1.0 - r0**2, 0.0, 1.0)
        if n == 3:
            return (eJ, np.sqrt(eK**2 + rem)), (eK, np.sqrt(eJ**2 + rem)), rem, rem
        e3 = np.minimum(x1, np.sqrt(rem))
        two = np.minimum(2.0 * e3**2, rem)
        sJ, sK = (np.sqrt(np.maximum(x**2 + e3**2, two)) for x in (eK, eJ))
        others = np.sqrt((n - 3.0) * np.clip(rem - x0**2, 0.0, 1.0))
        return (eJ, sJ), (eK, sK), rem, np.minimum((e3 + others) ** 2, (n - 2.0) * rem)

    def bound(self, lo: Array, hi: Array) -> Array:
        """Logarithm of the bound of the square on boxes, ``-inf`` where one is empty."""
        a, k, (ce, cs) = float(upper(self.a)), self.n - 2, self.corners
        J, K, rem, spread = self.terms(lo, hi, np.asarray)
        cells = [
            np.clip(np.searchsorted(self.angles, np.arctan2(e, s), side="right") - 1, 0, ce.size - 1) for e, s in (J, K)
        ]
        scales = [np.maximum(e / ce[j], s / cs[j]) ** 2 for (e, s), j in zip((J, K), cells, strict=True)]
        fixed = sum(self.phi[:, j] * scale for j, scale in zip(cells, scales, strict=True))
        each = fixed + a**2 * (rem + spread / (k * self.xi[:, None]))
        value: Any = each.min(axis=0)
        if not isinstance(self.a, float):
            # xi and the cells of the table may be any: those found in floats
            best = each.argmin(axis=0)
            J, K, rem, spread = self.terms(lo, hi, lift)
            value = self.a**2 * (rem + spread / (k * lift(self.xi[best])))
            for (e, s), j in zip((J, K), cells, strict=True):
                value = value + self.phi[best, j] * np.maximum(e / ce[j], s / cs[j]) ** 2
        found = upper(np.log(value))
        if self.n == 3:
            return found
        # e_3 is one of n - 2 norms whose squares sum to rem
        most, least = 1.0 - lo[0] ** 2, 1.0 - hi[0] ** 2
        empty = (lo[2] ** 2 > most + 1e-12) | (least > k * hi[2] ** 2 + 1e-12)
        return np.where(empty, -np.inf, found)

    def cover(self) -> tuple[Array, Array]:
        """Boxes of ``(r, theta, e_3)``; three tokens have no free ``e_3``."""
        third = np.linspace(0.0, 1.0, 13) if self.n > 3 else np.zeros(2)
        return boxes(np.linspace(0.0, 1.0, 13), np.linspace(0.0, np.nextafter(math.pi / 4, 1.0), 9), third)

    def maximum(self, tol: float) -> Maximum:
        """The largest bound of a box, in logarithms."""
        return maximise(self.bound, *self.cover(), tol=tol, max_cells=_CELLS)


def _defect(head: UnitNumbers) -> tuple[float, float]:
    """alpha, and the distance of A to ``-alpha I``, outward."""
    A = mid(head.A)
    alpha = -float(np.trace(A)) / len(A)
    form: Any = BallMatrix.exact(alpha * np.eye(len(A))) if head.exact else alpha * np.eye(len(A))
    rounded = 0.0 if head.exact else 4.0 * EPS * len(A) * abs(alpha)
    return alpha, (top(norm_upper(head.A + form)) + rounded + head.noise) * (1.0 + 1e-12)


def _fails(head: UnitNumbers, dim: int | None) -> str | None:
    """Why the head, of tokens in ``R^dim``, is none of this theorem."""
    if top(head.v) == 0.0 or (top(head.a) == 0.0 and head.centred):
        return None
    why = form_reason(head, semidefinite=False)
    if why is not None:
        return why
    if len(head.A) != dim:  # what A does not see of a token may lie between two
        return f"the form A must be -alpha I on all of R^{dim}, received factors of it on {len(head.A)} dimensions"
    alpha, defect = _defect(head)
    if not alpha > 0.0 or not defect <= 1e-10 * alpha:
        return f"the form A must be -alpha I with alpha > 0, received one at distance {defect:g} from {-alpha:g} I (times R^2)"
    if not _RANGE[0] <= alpha <= _RANGE[1]:
        return f"alpha R^2 must lie in [{_RANGE[0]:g}, {_RANGE[1]:g}], received {alpha:g}"
    return None


def _negative_identity(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    A = softmax_head(attention).A
    away = np.linalg.norm(A - np.trace(A) / len(A) * np.eye(len(A)))
    if away > 1e-9 * np.linalg.norm(A):  # the numbers of a head take longer
        return f"the form A must be -alpha I with alpha > 0, received one at distance {away:g} from a multiple of I"
    return _fails(unit_numbers(attention, domain), attention.in_dim)


def _hypotheses(head: UnitNumbers, dim: int | None) -> tuple[float, float]:
    """``alpha R^2`` and the distance of A to its multiple of the identity."""
    why = _fails(head, dim)
    if why is not None:
        raise ValueError(f"negative_identity does not apply: {why}; use relaxations.rows_and_columns.")
    return _defect(head)


@problem_function("negative_identity")
def _problem(statement: Statement) -> dict[str, Any]:
    if statement.p != 2.0:
        raise ValueError(f"p must be 2 for negative_identity, received {statement.p:g}.")
    head, n = numbers_of(statement), check.count(statement.n, "n", least=3)
    alpha, defect = _hypotheses(head, statement.attention.in_dim)
    target = number(statement.options, "target", least=-math.inf)
    return {"head": head, "alpha": alpha, "defect": defect, "n": n, "target": target}


@dual_function("negative_identity", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    alpha = problem["alpha"]
    total = Total.of(lift(alpha) if problem["head"].exact else alpha, problem["n"], multipliers)
    # boxes below the target need no splitting: only that none exceeds it is to be shown
    found = proved_below(total.bound, *total.cover(), target=problem["target"], max_cells=2 * _CELLS)
    return _bound(found, problem)


def _bound(log_square: float, problem: Mapping[str, Any]) -> Any:
    """The bound that a proved maximum of the square gives, outward."""
    head, alpha, defect = problem["head"], problem["alpha"], problem["defect"]
    a, size, log_value = (lift(x) if head.exact else x for x in (alpha, float(problem["n"]), log_square))
    # differences of size a lose a few units of a, the square is at least a
    margin = 0.0 if head.exact else 1e-12 + 1e-14 * alpha
    return head.v * (np.exp(0.5 * (log_value + margin)) + defect * ((4.0 + 7.0 * a) * np.sqrt(size) + 2.0 * a + 1.0))


@theorem(
    "negative_identity",
    statement="A = -alpha I: anchors that others use have dead rows, a program over three norms",
    hypotheses="softmax without a mask and without a bias, A = -alpha I; domain centred at 0; n >= 3 tokens; p = 2",
    applies=every(softmax(masked=False), tokens(least=3), order_two, _negative_identity),
    closed=False,
)
def negative_identity(attention: AttentionMap, domain: Domain, n: int, p: float, *, effort: str = "fast") -> Bound:
    """Upper bound of the Lipschitz constant of n tokens for ``A = -alpha I``, by branch and bound.

    It is sharper than the general bounds for ``alpha R^2`` above 1 to 4 (more for more tokens), free of the dimension, and of V
    but for its norm.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Cells of the table of rows, and gap of the branch and bound: under a second, or a few seconds.

    Returns
    -------
    Certificate
        Multipliers: the cells of directions (``angles``) and of c (``levels``), the ``radii`` that choose lambda on each pair of
        them, and the shares ``xi``. A plain :class:`Bound` when A or V is zero.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = negative_identity(SoftmaxAttention([[-25.0]], [[1.0]]), radius=1.0, n=8)
    >>> bound.value < 57.5, bound.verify()   # 68.4 for a general A of this norm
    (True, True)
    """
    deep = effort == "deep"
    statement = Statement(attention, domain, n, p)
    head = numbers_of(statement)
    if top(head.v) == 0.0 or (top(head.a) == 0.0 and head.centred):
        return trivial(statement)
    alpha, defect = _hypotheses(head, attention.in_dim)
    problem = {"head": head, "alpha": alpha, "defect": defect, "n": n}
    directions, cells, tol = (800, 128, 5e-4) if deep else (400, 80, 1e-3)
    multipliers = {
        "angles": np.linspace(0.0, math.pi / 2, directions + 1),
        "levels": np.linspace(0.0, 1.0, cells + 1),
        "xi": np.geomspace(0.005, 2.5, _SHARES),
    }
    multipliers["radii"] = AnchorRows.of(alpha, n, multipliers["angles"], multipliers["levels"]).radii()
    found = Total.of(alpha, n, multipliers).maximum(tol)
    return certify(
        "negative_identity",
        statement=replace(statement, options={"target": found.value}),
        multipliers=multipliers,
        solver="branch and bound",
        solver_status=found.status(tol),
        solver_value=float(_bound(found.seen, problem)),
        details={"cells": found.cells},
        # the maximum has just been proved: what a recheck raises it by is added
        proved=float(_bound(found.value + 1e-11, problem)),
    )
