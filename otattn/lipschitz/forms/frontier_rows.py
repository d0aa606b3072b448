r"""The discrete constant for any A and V: whole rows, and what A and V leave orthogonal to the gradient.

Unit ball, no bias, no mask, ``n >= 3`` tokens, ``a = ||A|| R^2``, ``v = ||V||``. In the worst case of the general bound
(:mod:`otattn.lipschitz.upper.rows_and_columns`) the rows of the two tokens that move most see each other and stretch their own
displacement too. Two bounds of a row know better:

- :mod:`otattn.lipschitz.forms.vertex_rows`: a row is one of two tokens, and pays for what it sees off its largest logit. It is the
  better one for large a.
- :mod:`otattn.lipschitz.forms.entropic_rows`: a row's own token takes a part of its mass, which ties the heights of all others to
  their masses. It is the better one for small a.

Both let V count with what it does orthogonally, or nearly so, to the gradient. :mod:`otattn.lipschitz.forms.frontier_total` sums
the smaller ones.

When A is known to within delta (rounding), the constant moves by at most ``v delta ((4 + 7a) sqrt(n) + 2a + 1)``, as for the other
forms (:mod:`otattn.lipschitz.upper.psd`; its argument holds for every A), and by less when V is, relative to v.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn._linalg import EPS, Array, bordered, mid
from otattn.attention import AttentionMap
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift
from otattn.lipschitz.arithmetic.rounding import top
from otattn.lipschitz.bound import Bound
from otattn.lipschitz.certificate import Statement, certify, dual_function, multiplier, problem_function
from otattn.lipschitz.constants._solve import number, trivial
from otattn.lipschitz.constants.cells import proved_below
from otattn.lipschitz.constants.heads import UnitNumbers, numbers_of, softmax_head, unit_numbers
from otattn.lipschitz.constants.self_logit import SelfLogit, entropy_gap
from otattn.lipschitz.forms.entropic_rows import GAMMA, EntropicRows, Sight, every_cell
from otattn.lipschitz.forms.frontier import TILTS, Frontier
from otattn.lipschitz.forms.frontier_search import LEVELS, finer, refined
from otattn.lipschitz.forms.frontier_total import MAX_CELLS, Total
from otattn.lipschitz.forms.own_blocks import OwnBlocks
from otattn.lipschitz.forms.own_pairs import OwnPairs
from otattn.lipschitz.forms.vertex_rows import LINES, Cells, VertexRows
from otattn.lipschitz.hypotheses import centred_ball, every, no_bias, order_two, softmax, tokens
from otattn.lipschitz.theorem import theorem
from otattn.measures.domains import Domain

_SHARES = 24
"""Multipliers mu of which each box takes the best."""
_LARGEST = 100.0
"""Multipliers mu are at most this often ``1 + a^2``."""
_RANGE = 1e-3, 1e4
"""``||A|| R^2``: below it is no better than the row bound, above its differences lose their digits."""


@dataclass(frozen=True, eq=False)
class Whole:
    """A head on all that its tokens show it: A and V with norms of at most 1, and how far the exact ones are."""

    head: UnitNumbers
    A: Any
    V: Any
    a: float
    v: float
    n: int
    defect: float

    @classmethod
    def of(cls, statement: Statement) -> Whole:
        """The head of a statement."""
        head = numbers_of(statement)
        form = softmax_head(statement.attention, masked=False, exact=statement.exact).on_span(ball=True)
        A, V, a, v = head.A, form.V, top(head.a), top(head.v)
        if form.basis is not None and len(V) == len(A) and np.array_equal(mid(V), np.eye(len(A))):
            # two tokens may lie apart in what A does not see, along one direction: V sees it
            zero: Any = BallMatrix.exact(np.zeros(len(A))) if head.exact else np.zeros(len(A))
            A, V = bordered(A, zero), (BallMatrix.exact if head.exact else np.asarray)(np.eye(len(A) + 1))
        defect = 0.0 if head.exact else head.noise + form.error + 32.0 * (len(A) + len(V)) * EPS * (1.0 + a)
        return cls(head, A / a, V / v, a, v, check.count(statement.n, "n", least=3), defect)

    def number(self) -> Any:
        """``||A|| R^2`` in the arithmetic of the head."""
        return lift(self.a) if self.head.exact else self.a

    def cells(self, edges: Array, family: SelfLogit, frontier: Frontier) -> Cells:
        """The cells of gamma that edges bound."""
        if edges.ndim != 1 or edges.size < 2 or edges[0] != 0.0 or edges[-1] != 1.0 or not (np.diff(edges) > 0).all():
            raise ValueError(f"edges must increase from 0 to 1, received {edges!r}.")
        g0, g1 = (self.number() * x for x in (edges[:-1], edges[1:]))
        low = family.lower(g0, g1) - (0.0 if self.head.exact else 1e-12 * self.a)
        return Cells.of(self.number(), entropy_gap(self.n), edges, low, self.field, frontier)

    @property
    def field(self) -> float:
        """vartheta of the field part."""
        return min(1.0, top(self.head.trace_sigma / (self.number() * self.v)) * (1.0 + 8.0 * EPS))

    def sight(self, family: SelfLogit, frontier: Frontier) -> Sight:
        """What is known of entropic rows."""
        g0, g1 = (self.number() * x for x in (GAMMA[:-1], GAMMA[1:]))
        low = family.lower(g0, g1) - (0.0 if self.head.exact else 1e-12 * self.a)
        return Sight.of(self.number(), self.n, low, self.field, frontier)


def _rows(whole: Whole, multipliers: Mapping[str, Array]) -> VertexRows:
    """The cells of rows that the multipliers describe."""
    edges, angles = (multiplier(multipliers, k, multipliers[k].shape) for k in ("edges", "angles"))
    lam = multiplier(multipliers, "levels", LEVELS.shape, sign=True)
    frontier = Frontier.of(whole.A, whole.V, multipliers)
    cells = whole.cells(edges, SelfLogit.of(whole.head, multipliers), frontier)
    return VertexRows.of(cells, OwnPairs.of(whole.A, whole.V, multipliers), angles, lam)


def _entropic(whole: Whole, multipliers: Mapping[str, Array]) -> EntropicRows:
    """The entropic rows that the multipliers describe."""
    family, frontier = SelfLogit.of(whole.head, multipliers), Frontier.of(whole.A, whole.V, multipliers)
    return EntropicRows.of(whole.sight(family, frontier), OwnBlocks.of(whole.A, whole.V, multipliers))


def _total(whole: Whole, rows: VertexRows, entropic: EntropicRows, multipliers: Mapping[str, Array]) -> Total:
    mu = multiplier(multipliers, "mu", (_SHARES,), sign=True)
    if not mu.max() <= _LARGEST * (1.0 + whole.a**2):
        # what is added and taken off again must not swallow the rows
        raise ValueError(f"mu must be at most {_LARGEST:g} (1 + a^2), received {mu.max():g}.")
    return Total(whole.n, multipliers["angles"], rows.proved(multipliers), mu, whole.head.exact, entropic)


def _fails(head: UnitNumbers) -> str | None:
    """Why the head is none of this theorem."""
    if top(head.v) == 0.0 or top(head.a) == 0.0 or _RANGE[0] <= top(head.a) <= _RANGE[1]:
        return None
    return f"||A|| R^2 must lie in [{_RANGE[0]:g}, {_RANGE[1]:g}], received {top(head.a):g}"


def _size(attention: Any, domain: Any, n: int | None, p: float) -> str | None:
    return _fails(unit_numbers(attention, domain))


_STATED = every(softmax(masked=False), tokens(least=3), order_two, centred_ball, no_bias, _size)


@problem_function("frontier_rows")
def _problem(statement: Statement) -> dict[str, Any]:
    why = _STATED(statement.attention, statement.domain, statement.n, statement.p)
    if why is not None:
        raise ValueError(f"frontier_rows does not apply: {why}; use relaxations.rows_and_columns.")
    whole = Whole.of(statement)
    if not whole.a * whole.v > 0.0:
        raise ValueError("A and V must not be zero: the constant is then that of a mean, which needs no multipliers.")
    return {"whole": whole, "target": number(statement.options, "target", least=-math.inf)}


@dual_function("frontier_rows", exact=True)
def _dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    whole: Whole = problem["whole"]
    total = _total(whole, _rows(whole, multipliers), _entropic(whole, multipliers), multipliers)
    # boxes below the target need no splitting: only that none exceeds it is to be shown
    found = proved_below(total.bound, *total.cover(), target=problem["target"], max_cells=2 * MAX_CELLS)
    return _bound(found, whole)


def _bound(log_square: float, whole: Whole) -> Any:
    """The bound that a proved maximum of the square gives, outward."""
    exact = whole.head.exact
    a, v, size, log_value = (lift(x) if exact else x for x in (whole.a, whole.v, float(whole.n), log_square))
    # differences of size a lose a few units of a, the square is at least one
    margin = 0.0 if exact else 1e-12 + 1e-14 * a
    return v * (np.exp(0.5 * (log_value + margin)) + whole.defect * ((4.0 + 7.0 * a) * np.sqrt(size) + 2.0 * a + 1.0))


@theorem(
    "frontier_rows",
    statement="whole rows: two tokens, the own token's mass, what A and V leave across the gradient: a program over three norms",
    hypotheses="softmax without a mask and without a bias; a centred ball; n >= 3 tokens; p = 2",
    applies=_STATED,
    closed=False,
)
def frontier_rows(attention: AttentionMap, domain: Domain, n: int, p: float, *, effort: str = "fast") -> Bound:
    """Upper bound for n tokens and any A and V: rows of two tokens, their own mass, the frontier of ``|A x|, |A^T d|, |V d|``.

    It is the sharper the fewer tokens there are, the larger ``||A|| R^2`` is, and the less A and V resemble multiples of
    orthogonal matrices. Its matrices are twice as large as those of the head: for small dimensions.

    Other Parameters
    ----------------
    effort : {"fast", "deep"}
        Cells of directions and of ``|g|``, and gap of the branch and bound: a few seconds, or three times as many.

    Returns
    -------
    Certificate
        Multipliers: those of the self-logit (``nu``, ``gap``), of the frontier (``heights`` and ``shares``; ``lines``, a row ``(s, y,
        lambda, t)`` for each use of its soft lemma), of the own pairs (``pairs``) and of the own blocks (``blocks``); cells of
        ``|g|`` (``edges``), of directions (``angles``) and the ``levels`` of lambda; for each direction and cell the ``choice`` of a
        bound, its radius (``radii``) and its ``level``; and the ``mu`` of the total. A plain :class:`Bound` when A or V is zero.

    Examples
    --------
    >>> from otattn.attention import SoftmaxAttention
    >>> head = SoftmaxAttention([[25.0, 0.0], [0.0, -8.0]], [[1.0, 0.0], [0.0, 0.3]])
    >>> bound = frontier_rows(head, radius=1.0, n=8)
    >>> bound.value < 50.0, bound.verify()   # 60 by rows and columns
    (True, True)
    """
    deep = effort == "deep"
    directions, width, tol = (400, 1 / 800, 5e-4) if deep else (160, 1 / 256, 2e-3)
    if n is not None and n <= 4:
        tol *= 2.0  # few norms are tied to each other, which a box does not see
    statement = Statement(attention, domain, n, p)
    why = _STATED(attention, domain, n, p)
    if why is not None:
        raise ValueError(f"frontier_rows does not apply: {why}; use relaxations.rows_and_columns.")
    head = numbers_of(statement)
    if top(head.v) == 0.0 or top(head.a) == 0.0:
        return trivial(statement)
    whole = Whole.of(statement)
    family = SelfLogit.default(head)
    frontier, pairs = Frontier.found(whole.A, whole.V), OwnPairs.found(whole.A, whole.V)
    edges, coarse = refined(
        lambda x: whole.cells(x, family, frontier), lambda cells, x: VertexRows.of(cells, pairs, x, LEVELS), width
    )
    # a recheck proves each member anew: only those that decide are kept
    frontier = frontier.decisive((GAMMA[:-1], TILTS), (edges[:-1], LINES))
    family = family.decisive(*(head.a * np.append(edges[x], GAMMA[x]) for x in (slice(-1), slice(1, None))))
    blocks = OwnBlocks.found(whole.A, whole.V, whole.field)
    sight = whole.sight(family, frontier)
    blocks = blocks.take(every_cell(sight, blocks)[1])
    entropic = EntropicRows.of(sight, blocks)
    angles = np.linspace(0.0, math.pi / 2, directions + 1)
    rows = VertexRows.of(whole.cells(edges, family, frontier), pairs, angles, LEVELS)
    plan = finer(rows, coarse)
    multipliers = {
        "nu": family.nu,
        "gap": family.gap,
        "heights": frontier.heights,
        "shares": frontier.shares,
        "lines": frontier.lines,
        "pairs": pairs.members,
        "blocks": blocks.members,
        "edges": edges,
        "angles": angles,
        "levels": LEVELS,
        "choice": plan.choice.astype(float),
        "radii": plan.radii,
        "level": plan.level.astype(float),
        "mu": np.geomspace(0.02, 50.0, _SHARES) * (1.0 + whole.a**2),
    }
    found = _total(whole, rows, entropic, multipliers).maximum(tol)
    return certify(
        "frontier_rows",
        statement=replace(statement, options={"target": found.value}),
        multipliers=multipliers,
        solver="branch and bound",
        solver_status=found.status(tol),
        solver_value=float(_bound(found.seen, whole)),
        details={"cells": found.cells, "edges": edges.size},
        # the maximum has just been proved: what a recheck raises it by is added
        proved=float(_bound(found.value + 1e-11, whole)),
    )
