r"""Two tokens: along their difference the Jacobian is a matrix of two numbers, across it three lengths.

Unit ball, notation of :mod:`otattn.lipschitz.constants.self_logit`; ``d = x_1 - x_2``, ``e = d/|d|``, ``g_i = A x_i + c``, ``h = A^T
d``, ``l_1 = <g_1, d>``, ``l_2 = -<g_2, d>`` (the lead of a token's own logit), ``p_i = P_ii = 1/(1 + e^{-l_i})``, ``q_i = p_i (1 -
p_i)``, ``T_i = tanh(l_i/2)``. The weights of row 1 have the mean ``p_1 x_1 + (1 - p_1) x_2`` and the covariance ``q_1 d d^T``, so

.. math:: (Df\,\epsilon)_1 = V\bigl[\, p_1\epsilon_1 + (1-p_1)\epsilon_2
          + q_1\, d\,\bigl(\langle g_1 + h, \epsilon_1\rangle - \langle g_1, \epsilon_2\rangle\bigr)\bigr]

and row 2 by exchanging the tokens. Let ``u = (u_1, u_2)`` be a unit output, ``||V|| = 1``, ``w_i = V^T u_i``, ``beta = |Ve|``,
``alpha_i = <u_i, Ve>/beta``, so that ``<w_i, d> = beta |d| alpha_i`` and ``w_i = beta alpha_i e + w_i'``, ``w_i'`` across e. With
``a_i = q_i alpha_i`` the two columns of ``Df^T u`` are those of

.. math:: W P + \beta |d| G, \qquad G = \bigl[a_1 (g_1 + h) + a_2 g_2,\; -a_1 g_1 + a_2 (h - g_2)\bigr], \qquad W = [w_1, w_2].

**Along e** all is known from the leads, as ``<g_1 - g_2, d> = <h, d> = l_1 + l_2``: the row ``beta alpha^T N``, ``N_11 = p_1 + q_1
(2 l_1 + l_2)``, ``N_12 = 1 - p_1 - q_1 l_1``, row 2 likewise. **Across e**, dashes for what is left of a vector: ``W' P + beta |d|
G'``. Two bounds of its norm:

- *by tokens*: ``||P|| |W'| + beta (b_1 |alpha_1| + b_2 |alpha_2|)``,
  ``b_i = q_i |d| (|(g_i + h_i)'|^2 + |g_i'|^2)^{1/2}``, ``h_1 = h = -h_2``;
- *by sum and difference*: on the right by the rotation to the columns ``(1, 1)/sqrt2``, ``(1, -1)/sqrt2``, which P maps to ``(1,
  1)/sqrt2`` and ``(T_1, -T_2)/sqrt2``. With ``a_1 = (a_+ + a_-)/sqrt2``, ``a_2 = (a_+ - a_-)/sqrt2``, w and alpha alike, the columns
  are

  .. math:: w_+' + \beta|d|\, a_+ h', \qquad \tfrac{T_1 - T_2}2 w_+' + \tfrac{T_1 + T_2}2 w_-'
            + \beta |d| \bigl(a_+ (g_1 + g_2)' + a_- ((A + A^T) d)'\bigr) ,

  and ``a_+ = r alpha_+ + s alpha_-``, ``a_- = s alpha_+ + r alpha_-``, ``r, s = (q_1 +- q_2)/2``: triangle inequalities bound
  their lengths.

So ``|Df^T u|^2`` is at most a quadratic form with non-negative coefficients in ``(|alpha_1|, |alpha_2|, |W'|)``, or in ``(|alpha_+|,
|alpha_-|, |w_+'|, |w_-'|)``, where of ``N N^T`` (rotated) the absolute values are taken. As ``|u|^2 >= |W|^2 = beta^2 |alpha|^2 +
|W'|^2`` and ``|u|^2 >= |alpha|^2``, also ``|u|^2 >= (1 - k + k beta^2) |alpha|^2 + k |W'|^2`` for k in (0, 1]: divided by these
weights the form is a matrix S, ``||Df||^2 <= ||V||^2 lambda_max(S)``, and ``lambda_max(S) <= max_i (S y)_i / y_i`` for every ``y > 0``
(Collatz and Wielandt). S increases in its entries, ``b_i`` and the like in the forms of :mod:`otattn.lipschitz.forms.token_pairs`,
``beta`` in the form ``|Vd|^2``. The two bounds are nearly sharp for most A (measured, V = I, before the forms: 4 percent).

**Boxes** of ``|d|``, ``l_1`` and ``s = (l_1 + l_2)/|d|^2``, ``l_1 >= l_2`` by symmetry; a finite family of multipliers serves all,
and is grown by cutting planes where the bound of a point is largest. The maximum over boxes is by branch and bound.

If V = I and tokens are seen on the span of A only (low rank), they may lie apart across it, along one direction: A gets a zero row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from otattn._linalg import EPS, Array, mid, norm_upper
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number, trivial
from otattn.lipschitz.constants.cells import Maximum, boxes, maximise, proved_below
from otattn.lipschitz.constants.heads import UnitNumbers, numbers_of, softmax_head
from otattn.lipschitz.forms.pair_rows import Rows, largest, size, times
from otattn.lipschitz.forms.token_pairs import NAMES, Family, PairForms
from otattn.lipschitz.hypotheses import every, order_two, softmax
from otattn.lipschitz.theorem import theorem
from otattn.measures.domains import Ball, Domain

_CELLS = {"fast": 60_000, "deep": 400_000}
_MARGIN = 1e-11
_LARGEST = 1e150
"""Sums of products of larger multipliers overflow, and a lost term would empty a box that is not."""
_POINTS = 2500
"""Points among which the search for multipliers looks for the worst."""
_SHARES = (1.0, 0.7, 0.4)
"""The numbers k."""

Member = tuple[str, Array, float, Array]


@dataclass(frozen=True, eq=False)
class Pairs:
    """The bound of boxes of ``(|d|, l_1, s)``, ``l_1`` and s in units of ``forms.unit``."""

    forms: PairForms
    families: Mapping[str, Family]
    plain: bool
    """True for V = I: beta = 1."""

    @classmethod
    def of(cls, forms: PairForms, members: list[Member], plain: bool) -> Pairs:
        """The families of the members."""
        families = {}
        for name in NAMES:
            mine = [m[1:] for m in members if m[0] == name]
            if not mine:
                raise ValueError(f"the form {name} needs at least one multiplier, received none.")
            nu, tau, w = (np.array(x) for x in zip(*mine, strict=True))
            families[name] = Family(forms, name, nu, tau, w)
        return cls(forms, families, plain)

    def bound(self, lo: Array, hi: Array) -> tuple[Array, Array]:
        """``log lambda_max(S)`` on boxes, -inf where one is empty, and which side to halve."""
        exact, unit = self.forms.exact, self.forms.unit
        wrap: Any = lift if exact else np.asarray
        r, lead, stretch = ((wrap(lo[k]), wrap(hi[k])) for k in range(3))
        gap = r[0] * r[0], r[1] * r[1]
        at = 0.5 * (lo + hi)
        middle = np.array([at[0] ** 2, at[1], at[2]])
        left = {k: f(gap, lead, stretch, middle) for k, f in self.families.items()}
        other = self.families["own"](gap, lead, stretch, middle, swapped=True)
        both = times(gap, stretch)
        loose = 8.0 * EPS * (size(both) + size(lead))  # a difference of floats may have lost its digits
        two = both[0] - lead[1] - loose, both[1] - lead[0] + loose
        empty = (upper(lead[1] - two[0]) < 0) | np.any([upper(x) < 0 for x in (*left.values(), other)], axis=0)
        lengths = {
            k: unit * np.sqrt(np.maximum(x, 0.0) * gap[1])
            for k, x in left.items()
            if k in ("own", "turned", "sum", "symmetric")
        }
        across = unit * np.sqrt(np.maximum(other, 0.0) * gap[1])
        row = Rows.of(*[(unit * x[0], unit * x[1]) for x in (lead, two, both)])
        value = np.full(lo.shape[1], np.inf)
        for alpha, k in self.weights(left, gap[0]):
            for S in (row.by_tokens((lengths["own"], across), alpha, k), row.by_sum_and_difference(lengths, alpha, k)):
                value = np.minimum(value, largest(S))
        with np.errstate(divide="ignore"):
            found = upper(np.log(wrap(value)))
        return np.where(empty, -np.inf, found), self.pull(lo, hi)

    def weights(self, left: Mapping[str, Any], gap: Any) -> list[tuple[Any, float]]:
        """``beta (1 - k + k beta^2)^{-1/2}``, an upper bound on each box, and k."""
        if self.plain:
            return [(0.0 * gap + 1.0, 1.0)]
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(gap > 0.0, np.clip(left["values"] / gap, 1e-12, 1.0), 1.0)
        return [(np.sqrt(most / (1.0 - k + k * most)), k) for k in _SHARES]

    def pull(self, lo: Array, hi: Array) -> Array:
        """About how much each side loosens the bound; any numbers are admissible."""
        unit, wide = self.forms.unit, hi - lo
        two = [lo[0] ** 2 * lo[2] - hi[1], hi[0] ** 2 * hi[2] - lo[1]]
        near = [np.maximum(np.maximum(x, -y), 0.0) for x, y in ((lo[1], hi[1]), two)]
        q = sum(np.exp(-unit * x) for x in near) + 1e-3
        lead = unit * wide[1] * q * (1.0 + unit * near[0])
        return np.array([(0.05 + 2.0 * unit * q) * wide[0], lead, unit * wide[2] * hi[0] ** 2 * q])


def _cover(forms: PairForms, reach: float) -> tuple[Array, Array]:
    """Boxes that hold every pair of tokens; no lead exceeds ``reach``."""
    scale = np.append(0.0, np.geomspace(min(0.5 / forms.unit, 0.5 * reach), reach, 6))
    scale[-1] = reach
    low, high = forms.stretches()
    stretch = np.linspace(low, high, 9) if high - low > 1e-9 else np.array([low, high])
    return boxes(np.linspace(0.0, 2.0, 17), np.append(-scale[:0:-1], scale), stretch)


@dataclass(frozen=True, eq=False)
class Stated:
    """The numbers of a statement: the head, its forms, and the largest lead."""

    head: UnitNumbers
    forms: PairForms
    plain: bool
    reach: float

    @classmethod
    def of(cls, statement: Statement) -> Stated:
        """The head on all that two tokens show it."""
        head = numbers_of(statement)
        ball = isinstance(statement.domain, Ball)
        form = softmax_head(statement.attention, masked=False, exact=statement.exact).on_span(ball=ball)
        A, c, V, v = head.A, head.c, form.V, top(head.v)
        make: Any = BallMatrix.exact if head.exact else np.asarray
        plain = V.shape[0] == V.shape[1] and np.array_equal(mid(V), np.eye(len(A))) and not (V - np.eye(len(A))).any()
        if form.basis is not None and plain:
            k = len(A)
            wide = np.eye(k, k + 1)
            A, c, V = make(wide.T) @ (A @ make(wide)), c @ make(wide), make(np.eye(k + 1))
        lost = 0.0 if head.exact else form.error + 8.0 * len(V) * EPS
        noise = head.noise + lost * max(top(head.a), top(norm_upper(c)))
        forms = PairForms(A, c, V / (1.0 if v == 0.0 else v), top(head.a), noise)
        # no lead exceeds |g| |d|
        return cls(head, forms, plain, 2.0 * (1.0 + 1e-12) * max(top(head.top), 1e-300) / forms.unit)

    def maximum(self, members: list[Member], tol: float, max_cells: int) -> Maximum:
        """The largest bound of a box."""
        pairs = Pairs.of(self.forms, members, self.plain)
        return maximise(pairs.bound, *_cover(self.forms, self.reach), tol=tol, max_cells=max_cells)

    def value(self, log_square: float) -> Any:
        """The bound that a proved maximum gives."""
        if self.head.exact:
            return self.head.v * np.exp(0.5 * lift(log_square))
        return self.head.v * math.exp(0.5 * log_square) * (1.0 + _MARGIN)


@problem_function("two_tokens")
def _problem(statement: Statement) -> dict[str, Any]:
    if statement.p != 2.0 or statement.n != 2:
        raise ValueError(f"n and p must be 2 for two_tokens, received n = {statement.n}, p = {statement.p:g}.")
    return {"stated": Stated.of(statement), "target": number(statement.options, "target", least=-math.inf)}


@dual_function("two_tokens", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    stated: Stated = problem["stated"]
    tau = multiplier(multipliers, "tau", multipliers["tau"].shape)
    if tau.ndim != 1 or tau.size == 0:
        raise ValueError(f"tau must be a vector, received shape {tau.shape}.")
    nu, w = multiplier(multipliers, "nu", (tau.size, 2)), multiplier(multipliers, "w", (tau.size, 3), sign=True)
    form = multiplier(multipliers, "form", tau.shape, sign=True)
    if not np.isin(form, np.arange(len(NAMES))).all():
        raise ValueError(f"form must be integers below {len(NAMES)}, received {form!r}.")
    if max(float(np.abs(part).max()) for part in (nu, tau, w)) > _LARGEST:
        raise ValueError(f"multipliers must be at most {_LARGEST:g}, received larger ones; drop them from the family.")
    members = [(NAMES[int(f)], *one) for f, *one in zip(form, nu, tau, w, strict=True)]
    pairs = Pairs.of(stated.forms, members, stated.plain)
    cover = _cover(stated.forms, stated.reach)
    return stated.value(proved_below(pairs.bound, *cover, target=problem["target"], max_cells=2 * _CELLS["deep"]))


def _cut(forms: PairForms, name: str, at: Array, start: Array) -> Member:
    """Multipliers that are good at ``at = (|d|, l_1, l_2)``."""

    def unpack(theta: Array) -> tuple[Array, float, Array]:
        ratio = np.exp(np.clip(np.array([theta[3], 0.0, theta[4]]), -12.0, 12.0))
        return theta[:2], float(theta[2]), ratio / ratio.sum()

    def value(theta: Array) -> float:
        nu, tau, ratio = unpack(theta)
        return float(forms.scaled(name, nu, tau, ratio).sum() + tau * at[0] ** 2 - nu @ at[1:])

    found = minimize(value, start, method="Nelder-Mead", options={"maxfev": 250, "xatol": 1e-4, "fatol": 1e-6})
    nu, tau, ratio = unpack(found.x)
    return name, nu, tau, forms.scaled(name, nu, tau, ratio)


def _first(forms: PairForms) -> list[Member]:
    """Multipliers that need no search."""
    members = forms.of_the_gap()
    # for A = -sign I, c = 0, the own form is 2 |x_2|^2 - 6 sign l_1 - |d|^2 = 2 |x_1|^2 - 2 sign l_1 + |d|^2; no descent finds them
    own = [
        (s * size, 0.0, tau, r)
        for s in (1.0, -1.0)
        for size, tau, r in ((6.0, -1.0, (1e-6, 1e-6, 1.0)), (2.0, 1.0, (1e-6, 1.0, 1e-6)))
    ]
    for name, rows in (("own", own), ("sum", [(0.0, 0.0, -1.0, (1e-6, 1.0, 1.0)), (0.0, 0.0, 0.0, (1e-6, 1.0, 1.0))])):
        for n1, n2, tau, ratio in rows:
            nu = np.array([n1, n2])
            members.append((name, nu, tau, forms.scaled(name, nu, tau, np.array(ratio))))
    return members


_STARTS = np.array(
    [
        [0.0, 0.0, 0.5, -4.0, 0.0],
        [0.5, 0.5, 0.0, -4.0, 0.5],
        [-3.0, -3.0, -1.0, -4.0, 0.0],
        [6.0, 0.0, -1.0, -9.0, 9.0],
        [-6.0, 0.0, -1.0, -9.0, 9.0],
    ]
)


def _worst(stated: Stated, members: list[Member], rng: np.random.Generator) -> tuple[Array, float]:
    """A point where the bound is large, and the bound there."""
    pairs = Pairs.of(stated.forms, members, stated.plain)
    low, high = stated.forms.stretches()
    sides = np.array([2.0, 2.0 * min(stated.reach, 8.0 / stated.forms.unit), high - low])[:, None]
    least = np.array([0.0, -0.5 * sides[1, 0], low])[:, None]
    x = least + sides * rng.random((3, _POINTS))
    for width in (0.1, 0.03, 0.01, 0.003, 0.0):
        value = pairs.bound(x, x)[0]
        best = x[:, np.argsort(value)[-_POINTS // 100 :]]
        near = np.repeat(best, 10, axis=1)
        near = near + width * sides * rng.normal(size=near.shape)
        x = np.concatenate([best, np.clip(near, least, least + sides)], axis=1)
    return x[:, 0], float(value.max())


def _grown(stated: Stated, cuts: int) -> list[Member]:
    """The first family and what bounds its worst point so far better, again and again: the search is not convex in w."""
    forms, rng = stated.forms, np.random.default_rng(0)
    members = _first(forms)
    best, stale = math.inf, 0
    for k in range(cuts):
        (r, lead, stretch), value = _worst(stated, members, rng)
        best, stale = (value, 0) if value < best - 1e-3 else (best, stale + 1)
        if stale > 5 or value == -math.inf:
            break
        at = np.array([r, lead, stretch * r * r - lead])
        start = _STARTS[k % len(_STARTS)]
        spots = (("own", at), ("own", at[[0, 2, 1]]), ("sum", at), ("turned", at))
        members += [_cut(forms, name, spot, start) for name, spot in spots[: 3 + (k % 3 == 0)]]
    return members


def _only_two(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    return None if n == 2 else f"n must be 2, received {n}"


@theorem(
    "two_tokens",
    statement="the Jacobian along and across the difference of two tokens: quadratic forms under quadratic constraints",
    hypotheses="softmax without a mask; any domain; two tokens; p = 2",
    applies=every(softmax(masked=False), _only_two, order_two),
    closed=False,
    count=2,
)
def two_tokens(attention: AttentionMap, domain: Domain, n: int, p: float, *, effort: str = "fast") -> Bound:
    """Upper bound of the Lipschitz constant of two tokens, for any A, V and bias, by branch and bound.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Gap of the branch and bound, 1 percent or 0.25 percent, and number of cutting planes.

    Returns
    -------
    Certificate
        Multipliers ``form (K,)``, ``nu (K, 2)``, ``tau (K,)``, ``w (K, 3)``. A plain :class:`Bound` when V is zero.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = two_tokens(SoftmaxAttention([[-9.0, 0.0], [0.0, -9.0]], [[1.0, 0.0], [0.0, 1.0]]), radius=1.0)
    >>> bound.value < 2.55, bound.verify()   # 2.47 is attained
    (True, True)
    """
    statement = Statement(attention, domain, n, p)
    stated = Stated.of(statement)
    if top(stated.head.v) == 0.0:
        return trivial(statement)
    tol, cuts = (5e-3, 60) if effort == "deep" else (2e-2, 20)
    members = _grown(stated, cuts)
    found = stated.maximum(members, tol, _CELLS[effort])
    names, nu, tau, w = zip(*members, strict=True)
    return certify(
        "two_tokens",
        statement=replace(statement, options={"target": found.value}),
        problem={"stated": stated, "target": found.value},
        multipliers={"form": np.array([float(NAMES.index(x)) for x in names]), "nu": nu, "tau": tau, "w": w},
        solver="branch and bound",
        solver_status=found.status(tol),
        solver_value=float(stated.value(found.seen)),
        details={"cells": found.cells, "members": len(members)},
    )
