r"""The discrete constant from the two tokens that move most, each row's spread, and the column sums together.

Unit ball, notation of :mod:`otattn.lipschitz.constants.self_logit`. Let ``eps`` be a unit displacement of n tokens with
norms ``e_1 >= e_2 >= ...`` after sorting, ``D f eps = V (K_i eps + C_i A eps_i)_i``, ``K_i eps = sum_j p_j (I + y_j g^T)
eps_j`` with ``p_j = P_ij``, ``y_j = z_j - m_i``, ``g = g_i``, ``gamma = |g|``, ``lam = lambda_max(C_i)``.

**Row.** For a unit u let ``N_j = |u + <u,y_j> g|``. ``sum_j p_j N_j^2 = 1 + 2 <u,g> sum p_j <u,y_j> + gamma^2 u^T C_i u <=
Omega = 1 + gamma^2 lam``. With ``p = p_1``, ``X = p N_1`` and ``Y = sum_{j>1} p_j N_j``,

.. math:: \langle u, K_i\epsilon\rangle \le e_1 X + e_2 Y, \qquad \frac{X^2}{p} + \frac{Y^2}{1-p} \le \Omega, \qquad
          X \le p + \gamma \min\bigl(2p(1-p), \sqrt{\lambda p (1-p)}\bigr) .

The second is Cauchy-Schwarz, ``Y^2 <= (1-p) sum_{j>1} p_j N_j^2``. For the third put ``s = <u,y_1>``; the other tokens have
mean ``-p s/(1-p)`` along u, so ``|s|/(1-p) <= 2`` (a chord of the ball) and ``p s^2 + (1-p) (p s/(1-p))^2 = p s^2/(1-p) <=
u^T C_i u <= lam``. Call k the maximum over p; when p > 1/2, ``lam <= 4 p (1-p)`` (along any u the mean is at least
``p |t| - (1-p)`` in absolute value, t the heavy atom's coordinate, so the variance is at most
``p t^2 + 1 - p - (p|t| - 1 + p)_+^2``, which increases with ``|t| <= 1``). k increases in ``e_1, e_2, gamma, lam``, is homogeneous
in e, and equals ``e sqrt(Omega)`` at ``e_1 = e_2 = e``.

**Field part.** ``|V C_i A eps_i| <= sigma tr(C_i) e_i``, and the self-token entropy bounds ``tr C_i``: put ``lam`` for this bound.

**Columns.** ``|K_i eps|^2 <= Omega sum_j P_ij e_j^2`` (Cauchy-Schwarz) and ``sum_i P_ij <= T_n``, so with
``k_i = |K_i eps|``: ``sum_i k_i^2 / Omega_i <= T_n``, ``T_n = min(n, e^kappa, 1 + 1/(1/(n-1) + e^{-kappa}))``.

**Joint.** ``|D f eps|^2 <= sum_i (v k_i + sigma lam_i e_i)^2`` subject to ``k_i <= k(e_1, e_2; gamma_i, lam_i)``, the column
constraint, ``sum e_i^2 = 1``, ``e_i <= e_2`` for i > 2, and ``(gamma_i, lam_i)`` in the region that it allows. With multipliers
``alpha, mu >= 0``, and ``rem = 1 - e_1^2 - e_2^2``,

.. math:: \alpha T_n + \mu\, rem + F(e_1) + F(e_2) + (n-2) \max_{0 \le e \le e_2} (F(e) - \mu e^2), \quad
          F(e) = \max_{(\gamma,\lambda)} \max_{0 \le \kappa \le k} (v\kappa + \sigma\lambda e)^2 - \alpha \kappa^2/\Omega .

**Under a causal mask** row i is a row of the tokens that it sees, itself among them: at most n, so the self-token entropy with
``tau_n`` stands, and its two tokens that move most move no more than those of all. The columns give ``T_n = n``, which says nothing.

**On an ellipsoid** ``x = E z + b`` all is said of z, ``|z| <= 1``, but for what multiplies ``eps_j``: the spread is that of z, with
the self-token entropy of ``<E^T g_i, z>`` (bounded in terms of ``|g_i|``, by the same proof; ``|E^T g_i| <= ||E|| |g_i|``), ``sigma =
max_{|u|=1} |V E u| |A^T E u|``. With ``w = V^T u`` in place of u, ``N_j = |w + <E^T w, y_j> g|``: gamma becomes ``|g_i| ||V E|| / v``.

Any ``alpha, mu`` is valid, also one a cell; on a cell of ``(rho, theta)``, ``e_1 = rho cos theta``, ``e_2 = rho sin theta``,
every term is monotone, so the corner with the largest e's in k and F, and the smallest rho in rem, bounds the cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn._linalg import EPS, Array
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.intervals import lift, like, upper
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, problem_function
from otattn.lipschitz.constants._solve import integer, number
from otattn.lipschitz.constants.cells import Maximum, boxes, maximise, proved_below
from otattn.lipschitz.constants.heads import UnitNumbers, numbers_of
from otattn.lipschitz.constants.self_logit import SelfLogit, spread_region
from otattn.lipschitz.hypotheses import every, order_two, softmax, tokens
from otattn.lipschitz.theorem import prove, theorem
from otattn.lipschitz.upper.softmax import columns_at_most
from otattn.measures.domains import Domain

_CELLS = 20_000


@dataclass(frozen=True, eq=False)
class Rows:
    """The row constants at the corners of the region: all arrays have one entry a corner.

    ``diagonal`` bounds ``|V C_i A| / v``. Floats, or intervals: then every method is exact.
    """

    gamma: Any
    spread: Any
    diagonal: Any
    n: int
    T: Any
    atoms: int

    @classmethod
    def of(cls, problem: Mapping[str, Any], multipliers: Mapping[str, Array], family: SelfLogit | None = None) -> Rows:
        """What the program knows of the rows; ``family`` spares the search from building it again at each step."""
        head, n = problem["head"], problem["n"]
        family = SelfLogit.of(head, multipliers) if family is None else family
        gamma, spread = spread_region(head, n, family, multipliers["edges"])
        diagonal = upper(np.minimum(head.trace_sigma * spread, head.sigma) / head.v)
        gamma = upper(gamma * head.turn) if head.exact else gamma * top(head.turn) * (1.0 + 4 * EPS)
        return cls(gamma, spread, diagonal, n, float(upper(columns_at_most(n, head.kappa))), problem["atoms"])

    @cached_property
    def omega(self) -> Any:
        """``1 + gamma^2 lam``."""
        return 1.0 + self.gamma**2 * self.spread

    def intervals(self) -> Rows:
        """The same numbers as intervals of length 0."""
        return Rows(lift(self.gamma), lift(self.spread), lift(self.diagonal), self.n, lift(self.T), self.atoms)

    def row(self, e1: Any, e2: Any) -> Any:
        """``k (cells, corners)`` for token norms ``e1, e2 (cells,)``: the maximum over cells of the atom's mass p.

        The maximum of ``e1 X + e2 Y`` is at most ``(e1 - z) cap + sqrt(Omega (p z^2 + (1-p) e2^2))`` for every z in
        ``[0, e1]``; the best z for the middle p is used on the whole cell, where the root is largest at an end.
        """
        one = self.gamma[:1] * 0.0 + 1.0
        edges = np.linspace(0.0, 1.0, self.atoms + 1)
        best = np.zeros((e1.size, self.gamma.size))
        x1, x2 = e1[:, None], e2[:, None]
        for start, end in itertools.pairwise(edges.tolist()):
            middle, a, b = 0.5 * (start + end), start * one, end * one
            near = min(max(0.5, start), end) * one
            lam = np.minimum(self.spread, 4 * a * (1 - a) if start > 0.5 else one)
            omega = 1.0 + self.gamma**2 * lam
            cap = b + self.gamma * np.minimum(2 * near * (1 - near), np.sqrt(lam * near * (1 - near)))
            z: Any = _best_shift(middle, *(upper(x) for x in (omega, cap, x1, x2)))
            z = like(z, x1)
            root = np.sqrt(omega * np.maximum(a * z**2 + (1 - a) * x2**2, b * z**2 + (1 - b) * x2**2))
            # z may exceed e1 by its rounding: the first term is then at most 0
            best = np.maximum(best, np.maximum(x1 - z, 0.0) * cap + root)
        return best

    def peak(self, k: Any, e: Any, alpha: Any) -> Any:
        """``max_{x <= k} (x + b)^2 - s x^2``, ``b = diagonal e``, ``s = alpha / Omega``, elementwise.

        For ``s > 1`` the maximum over all x is ``b^2 (1 + 1/(s-1))``, at ``x = b / (s-1)``; else it stands at k.
        """
        b = self.diagonal * e
        shrink = alpha / self.omega
        with np.errstate(divide="ignore", invalid="ignore"):
            free = b**2 + b**2 / (shrink - 1)
        end = np.where((shrink > 1) & (b < k * (shrink - 1)), free, (k + b) ** 2 - shrink * k**2)
        # an interval around s = 1 divides by zero
        return np.minimum(end, (k + b) ** 2 - np.minimum(shrink, 1.0) * k**2)

    def total(self, k: Any, e1: Any, e2: Any, rem: Any, alpha: Any, mu: Any) -> Any:
        """The bound at multipliers ``alpha, mu``; ``k (..., corners)``, the others broadcast to ``(...)``."""
        e1, e2, alpha, mu = (x[..., None] for x in (e1, e2, alpha, mu))
        value = alpha[..., 0] * self.T + self.peak(k, e1, alpha).max(axis=-1)
        if self.n > 1:
            value = value + self.peak(k, e2, alpha).max(axis=-1)
        if self.n > 2:
            with np.errstate(divide="ignore", invalid="ignore"):
                # past the e where the inner maximum saturates, F(e) - mu e^2 is (k + b e)^2 - mu e^2 - const
                vertex = np.where(mu > self.diagonal**2, k * self.diagonal / (mu - self.diagonal**2), np.inf)
            rest = np.zeros(value.shape + (1,))
            for e in (np.minimum(e2, np.where(np.isnan(vertex), np.inf, vertex)), e2 + 0 * k, 0 * e2):
                rest = np.maximum(rest, self.peak(k, e, alpha) - mu * e**2)
            value = value + mu[..., 0] * rem + (self.n - 2) * rest.max(axis=-1)
        return value


def _best_shift(p: float, omega: Array, cap: Array, x1: Array, x2: Array) -> Array:
    """A z in ``[0, x1]`` near the least value of ``(x1 - z) cap + sqrt(Omega (p z^2 + (1-p) x2^2))``."""
    room = p * omega - cap**2
    with np.errstate(divide="ignore"):
        z = np.where(room > 0, cap * np.sqrt((1 - p) / (p * np.maximum(room, 0.0))), np.inf)
    with np.errstate(invalid="ignore"):  # 0 * inf, in entries that the next line does not take
        scaled = x2 * z
    return np.minimum(x1, np.where(x2 > 0, scaled, np.where(room > 0, 0.0, np.inf)))


@dataclass(frozen=True, eq=False)
class Search:
    """Cells of ``(rho, theta)``; ``memory`` keeps the multipliers found so far, to start from on later cells.

    ``proof`` are the rows in interval arithmetic when the bounds of the cells are to be exact; ``afresh`` hands nothing on.
    """

    rows: Rows
    memory: list[tuple[Array, Array, Array]] = field(default_factory=list)
    proof: Rows | None = None
    afresh: bool = False

    def maximum(self, tol: float) -> Maximum:
        """The largest bound of a cell, in logarithms."""
        return maximise(self.bound, *_cover(self.rows.n), tol=tol, max_cells=_CELLS)

    def corner(self, lo: Any, hi: Any, *, exact: bool = False) -> tuple[Any, Any, Any, Any]:
        """``k, e1, e2, rem`` at the worst corner of each cell."""
        rows, wrap = (self.proof or self.rows, lift) if exact else (self.rows, np.asarray)
        angles, where = np.unique(np.array([lo[1], hi[1]]), axis=1, return_inverse=True)
        low, high = wrap(angles[0]), wrap(angles[1])
        (r0, t0), (r1, t1) = ((wrap(x[0]), wrap(x[1])) for x in (lo, hi))
        k = rows.row(np.cos(low), np.sin(high))[where.ravel()] * r1[:, None]
        e1, e2 = r1 * np.cos(t0), r1 * np.sin(t1)
        return k, e1, e2, np.clip(1 - r0**2, 0.0, max(0, rows.n - 2) * e2**2)

    def bound(self, lo: Array, hi: Array) -> Array:
        """Logarithm of the bound of each cell, ``-inf`` where it is empty."""
        value, alpha, mu = self.optimum(lo, hi)
        if self.proof is not None:
            value = upper(self.proof.total(*self.corner(lo, hi, exact=True), lift(alpha), lift(mu)))
        # the other norms cannot hold what the two largest leave
        most = (self.rows.n - 2) * (hi[0] * np.sin(hi[1])) ** 2
        log_value = np.log(value) if self.proof is None else upper(np.log(lift(value)))
        return np.where(1 - hi[0] ** 2 > most * (1 + 1e-12) + 1e-12, -np.inf, log_value)

    def winners(self, at: Array) -> Array:
        """The corners of the region where the rows' maxima stand at the point ``at (2, 1)``."""
        _, alpha, mu = self.optimum(at, at)
        k, e1, e2, _ = self.corner(at, at)
        values = [self.rows.peak(k, e[:, None], alpha[:, None])[0] for e in (e1, e2, 0.5 * e2)]
        values[2] = values[2] - 0.25 * float(mu[0] * e2[0] ** 2)
        return np.unique([int(x.argmax()) for x in values])

    def optimum(self, lo: Array, hi: Array) -> tuple[Array, Array, Array]:
        """The bound of each cell with the multipliers ``alpha, mu`` sought for it (any are valid)."""
        n = self.rows.n
        k, e1, e2, rem = self.corner(lo, hi)
        omega = float(self.rows.omega.max())
        shape = e1.shape
        scale = self.rows.peak(k, e2[:, None], np.zeros((1, 1))).max(axis=-1) / np.maximum(e2, 1e-3) ** 2
        value, part, log_mu = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)

        def attempt(new_part: Array, new_log: Array) -> Array:
            nonlocal value, part, log_mu
            mu = scale * np.exp(new_log) if n > 2 else np.zeros(shape)
            found = self.rows.total(k, e1, e2, rem, omega * new_part, mu)
            better = found < value
            value = np.where(better, found, value)
            part, log_mu = np.where(better, new_part, part), np.where(better, new_log, log_mu)
            return found

        # T_n = n says nothing beyond k <= sqrt(Omega): no multiplier for it then
        columns = 0.97 * n > self.rows.T
        middle = 0.5 * (lo + hi)
        if self.memory and not self.afresh:
            # the multipliers of the nearest cell so far
            places, parts, logs = (np.concatenate(x, axis=-1) for x in zip(*self.memory, strict=True))
            near = ((middle[:, :, None] - places[:, None, :]) ** 2).sum(axis=0).argmin(axis=1)
            attempt(parts[near], logs[near])
        else:
            for first in (0.0, 0.35, 0.8, 1.4, 3.0) if columns else (0.0,):
                for log_m in np.linspace(-6.0, 3.0, 19) if n > 2 else (0.0,):
                    attempt(np.full(shape, first), np.full(shape, log_m))
        for step in (0.3, 0.12, 0.04):
            for sign in (1.0, -1.0):
                if n > 2:
                    attempt(part, log_mu + sign * step)
                if columns:
                    attempt(np.maximum(part, 0.02) * (1 + step) ** sign, log_mu)
        self.memory.append((middle, part, log_mu))
        return value, omega * part, scale * np.exp(log_mu)


def _cover(n: int) -> tuple[Array, Array]:
    """Cells of ``(rho, theta)`` that cover all pairs ``e_1 >= e_2``."""
    # the two largest of n squares of sum 1 have a sum of at least 2/n
    rho = np.linspace(math.sqrt(2 / n) * (1 - 1e-14), 1.0, 9) if n > 2 else np.ones(2)
    # theta <= pi/4, which a float does not reach
    return boxes(rho, np.linspace(0.0, np.nextafter(math.pi / 4, 1.0), 9))


@problem_function("rows_and_columns")
def _problem(statement: Statement) -> dict[str, Any]:
    if statement.p != 2.0:
        raise ValueError(f"p must be 2 for rows_and_columns, received {statement.p:g}.")
    head, n = numbers_of(statement, masked=None, shaped=True), check.count(statement.n, "n")
    target = number(statement.options, "target", least=-math.inf)
    return {"head": head, "n": n, "atoms": integer(statement.options, "atoms", most=10_000), "target": target}


@dual_function("rows_and_columns", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    head: UnitNumbers = problem["head"]
    if problem["n"] == 1:
        return head.v
    rows = Rows.of(problem, multipliers)
    proof, target, log_square = rows.intervals() if head.exact else None, problem["target"], math.inf
    for afresh in (False, True):  # the last digits decide the order of cells, and so what is handed on
        search = Search(rows, proof=proof, afresh=afresh)
        log_square = min(log_square, proved_below(search.bound, *_cover(rows.n), target=target, max_cells=2 * _CELLS))
        if log_square <= target + 1e-11 * max(1.0, abs(target)):
            break
    return head.v * (np.exp(0.5 * lift(log_square)) if head.exact else math.exp(0.5 * log_square) * (1 + 1e-12))


@theorem(
    "rows_and_columns",
    statement="rows and columns together: a program over the two tokens that move most",
    hypotheses="softmax, masked or not; any domain; n tokens; p = 2",
    applies=every(softmax(), tokens(), order_two),
    closed=False,
)
def rows_and_columns(attention: AttentionMap, domain: Domain, n: int, p: float, *, effort: str = "fast") -> Bound:
    """Upper bound for n tokens from rows and columns together, under a causal mask from rows alone, by branch and bound.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Gap of the branch and bound, 0.5 percent (a few seconds) or 0.1 percent, and coarser or finer cells for the rows.

    Returns
    -------
    Certificate
        Multipliers: the self-logit ones (``nu``, ``gap``) and the ``edges`` of the cells of ``|g|``; each recheck seeks alpha, mu.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> bound = rows_and_columns(SoftmaxAttention([[-4.0]], [[1.0]]), radius=1.0, n=2)
    >>> bound.value < 12, bound.verify()   # the published bound is 20.9
    (True, True)
    """
    deep, statement = effort == "deep", Statement(attention, domain, n, p)
    tol, atoms = (2e-3, 200) if deep else (1e-2, 80)
    head = numbers_of(statement, masked=None, shaped=True)
    if n == 1 or head.v == 0.0:
        return prove("row_bound", attention, domain, n, p)
    problem = {"head": head, "n": n, "atoms": atoms}
    family = SelfLogit.default(head)
    edges = np.linspace(0.0, 1.0, 25)
    multipliers = {"nu": family.nu, "gap": family.gap, "edges": edges}
    for _ in range(3 if deep else 2):
        # finer cells of |g| where they decide, around the worst spot so far
        search = Search(Rows.of(problem, multipliers, family))
        spot = search.maximum(0.03)
        at = 0.5 * (spot.lo + spot.hi)[:, None]
        for _ in range(60 if deep else 40):
            rows = Rows.of(problem, multipliers, family)
            if rows.gamma.size == 1:
                break
            gamma = rows.gamma[Search(rows, list(search.memory)).winners(at)] / (head.top * top(head.turn))
            cell = np.clip(np.searchsorted(edges, gamma * (1 - 1e-12)) - 1, 0, edges.size - 2)
            if (cell := cell[np.diff(edges)[cell] > (1e-3 if deep else 4e-3)]).size == 0:
                break
            edges = np.union1d(edges, 0.5 * (edges[cell] + edges[cell + 1]))
            multipliers["edges"] = edges
    # a recheck proves each member anew: only those that decide are kept
    family = family.decisive(head.top * edges[:-1], head.top * edges[1:])
    multipliers |= {"nu": family.nu, "gap": family.gap}
    rows = Rows.of(problem, multipliers, family)
    found = Search(rows).maximum(tol)
    return certify(
        "rows_and_columns",
        statement=replace(statement, options={"atoms": atoms, "target": found.value}),
        problem=problem | {"target": found.value},
        multipliers=multipliers,
        solver="branch and bound",
        solver_status=found.status(tol),
        solver_value=head.v * math.exp(0.5 * found.seen),
        details={"column_sum": rows.T, "sigma": head.trace_sigma, "cells": found.cells},
    )
