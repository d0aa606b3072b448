r"""The field part ``sup ||V C A||`` on a box: exact up to cells.

**Two atoms.** On every compact convex domain K,

.. math:: \sup \|V C A\| = \tfrac14 \max_{\delta \in K - K} |V\delta|\,|A^T\delta| ,

attained by half the mass at either end of the best ``delta``. Proof: for unit p, q let ``a = <p, V x>``, ``b = <q, A^T x>``. For
all ``s, t > 0`` with ``s t = 1``, ``4 Cov(a, b) = Var(s a + t b) - Var(s a - t b) <= h(s, t)^2 / 4``, h the support function of the
pairs ``(a, b)(K - K)``, a compact convex set of the plane, symmetric about 0. The convex h has a least value on the convex set
``s t >= 1`` (or tends to it along a ray on which the pairs have ``a = 0`` or ``b = 0``, and Cov is 0), where by Lagrange a point
that attains h is ``m (t, s)``, ``m >= 0``: so ``h = 2 m`` and ``h^2 / 4 = m^2`` is the product of its coordinates, ``<p, V delta>
<q, A^T delta> <= |V delta| |A^T delta|``.

**Cells.** For a box with half widths r, ``delta = 2 D v``, ``D = diag(r)``, ``max |v_i| = 1``: a face ``v_f = 1`` for each f. On a
cell of a face, for any ``s > 0``, ``|V D v| |A^T D v| <= (s |V D v|^2 + |A^T D v|^2 / s) / 2`` is convex in v: its values at the
vertices of the cell bound it. The best s of each cell leaves an excess that vanishes as the cells shrink.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import minimize

from otattn._linalg import EPS, Array
from otattn.lipschitz.arithmetic.balls import BallMatrix
from otattn.lipschitz.arithmetic.intervals import lift, upper
from otattn.lipschitz.arithmetic.rounding import product
from otattn.lipschitz.certificate import Certificate, Statement, certify, dual_function, multiplier
from otattn.lipschitz.constants._solve import Proposal
from otattn.lipschitz.constants.cells import CellBound, maximise, proved_below

VERTEX_LIMIT = 12
"""Largest dimension: a cell of a face has two to the power of dimension minus one vertices."""
_WORK = 2_000_000
"""Vertices in all after which a search ends."""
_GAP = 1e-7


def _cell_bound(V: Any, K: Any) -> CellBound:
    """``max |V v| |K v|`` on cells ``(face, the other coordinates)``, V and K of norm about one."""
    exact = isinstance(V, BallMatrix)
    if exact:
        V, K = V.interval(), K.interval()
    k = V.shape[1]
    high = np.array(list(itertools.product([False, True], repeat=k - 1)), dtype=bool).reshape(2 ** (k - 1), k - 1)
    flips = np.arange(2 ** (k - 1))[:, None] ^ (1 << np.arange(k - 1)[::-1])
    rounding = 0.0 if exact else 64.0 * k * (k + len(V) + len(K)) * EPS

    def squares(v: Array, face: int) -> tuple[Any, Any]:
        rest = np.delete(np.arange(k), face)
        x = lift(v) if exact else v
        out = []
        for M in (V, K):
            image = x @ M[:, rest].T + M[:, face]
            out.append((image * image).sum(axis=-1) + rounding)
        return out[0], out[1]

    def face_bound(lo: Array, hi: Array, face: int) -> tuple[Array, Array]:
        count = lo.shape[1]
        v = np.where(high, hi.T[:, None], lo.T[:, None])
        q1, q2 = (q.reshape(count, -1) for q in squares(v.reshape(count * len(high), k - 1), face))
        s = _best_weight(upper(q1), upper(q2))
        values = upper(0.5 * (lift(s) * q1 + q2 / lift(s)) if exact else 0.5 * (s * q1 + q2 / s))
        # the coordinate that changes the ratio of the two lengths most at the largest vertex
        top = values.argmax(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.nan_to_num(np.log(upper(q1)) - np.log(upper(q2)))
        rows = np.arange(count)[:, None]
        pull = np.abs(ratio[rows, flips[top]] - ratio[rows, top[:, None]]) * (hi - lo).T
        return values.max(axis=1), pull + 1e-12 * (hi - lo).T

    def bound(lo: Array, hi: Array) -> tuple[Array, Array]:
        value, pull = np.empty(lo.shape[1]), np.zeros(lo.shape)
        for face in range(k):
            mine = np.flatnonzero(lo[0] == face)
            for part in np.array_split(mine, 1 + len(mine) * len(high) // 65_536):
                if part.size:
                    value[part], sides = face_bound(lo[1:, part], hi[1:, part], face)
                    pull[1:, part] = sides.T
        return value, pull

    return bound


def _best_weight(q1: Array, q2: Array) -> Array:
    """For each row an s, a column, that nearly minimises ``max(s q1 + q2 / s)``: convex in log s, by bisection of its slope."""
    low, high = np.full((len(q1), 1), -14.0), np.full((len(q1), 1), 14.0)
    for _ in range(26):
        t = 0.5 * (low + high)
        s = np.exp(t)
        rises, falls = s * q1, q2 / s
        top = (rises + falls).argmax(axis=1)[:, None]
        up = np.take_along_axis(rises, top, 1) > np.take_along_axis(falls, top, 1)
        low, high = np.where(up, low, t), np.where(up, t, high)
    return np.exp(0.5 * (low + high))


def _cover(k: int) -> tuple[Array, Array]:
    """Every face of the cube with a coordinate 1, as one cell each; the first row is the number of the face."""
    face = np.arange(k, dtype=np.float64)[None]
    return np.vstack([face, -np.ones((k - 1, k))]), np.vstack([face, np.ones((k - 1, k))])


def _cells(k: int) -> int:
    return max(_WORK >> (k - 1), 64)


@dual_function("field_certificate/cells", exact=True, quantity="field")
def _cells_dual(problem: Mapping[str, Any], multipliers: Mapping[str, Array]) -> Any:
    level = float(multiplier(multipliers, "level", (1,), sign=True)[0])
    V, K, units = problem["values"], problem["keys"], problem["units"]
    if units is None:
        return 0.0
    k = V.shape[1]
    largest = proved_below(_cell_bound(V, K), *_cover(k), target=level, max_cells=2 * _cells(k))
    return product(lift(largest) * 1.0 if isinstance(V, BallMatrix) else largest * (1.0 + problem["slack"]), *units)


def best_step(V: Array, K: Array, starts: list[Array]) -> Array:
    """A point v of the cube that nearly maximises ``|V v| |K v|``: ascents from the given ones."""

    def fall(v: Array) -> tuple[float, Array]:
        x, y = V @ v, K @ v
        a, b = max(float(x @ x), 1e-300), max(float(y @ y), 1e-300)
        return -0.5 * float(np.log(a) + np.log(b)), -(x @ V) / a - (y @ K) / b

    found = [minimize(fall, v, jac=True, method="L-BFGS-B", bounds=[(-1.0, 1.0)] * len(v)).x for v in starts]
    return np.asarray(max([*starts, *found], key=lambda v: float(np.linalg.norm(V @ v) * np.linalg.norm(K @ v))))


def cells_field(
    statement: Statement, problem: Mapping[str, Any], step: Array, common: Mapping[str, Any]
) -> Certificate:
    """The certificate for ``V D`` and ``A^T D`` of norm about one each, after a good step of the cube."""
    V, K, units = problem["values"], problem["keys"], problem["units"]
    level, claims = 0.0, Proposal("cells", "closed", 0.0).claims(1.0)
    if units is not None:
        k = V.shape[1]
        seen = float(np.linalg.norm(V @ step) * np.linalg.norm(K @ step))
        tol = _GAP * seen
        found = maximise(_cell_bound(V, K), *_cover(k), tol=tol, max_cells=_cells(k), floor=seen)
        level = max(found.value, seen)
        claims = Proposal("cells", found.status(tol), found.seen).claims(product(*units))
    return certify(
        "field_certificate/cells",
        statement=statement,
        problem=problem,
        multipliers={"level": [level]},
        **claims,
        **common,
    )
