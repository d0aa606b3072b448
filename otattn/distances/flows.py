"""Flows on the tree of a simplex basis, in exact integers.

Floating-point flows carry dust: masses near 1e-17 that rounding has put on arcs of any length. Transport
amplifies it (see `masses`), so the flows are computed again from the tree alone. On a tree the flow of an arc
is the difference of source and target mass on one side of it. Where that difference is within the rounding of
the masses on both sides, the arc is cut, and the weights of each part are balanced by a common factor that
differs from 1 by rounding.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.distances.forest import Peeling, peel
from otattn.distances.masses import DUST, to_weights
from otattn.errors import ConvergenceError

__all__ = ["Support", "elimination", "forest_flow", "network_simplex"]

Index = NDArray[np.intp]
Support = tuple[Index, Index, Array]
Step = tuple[int, int, int]
Preference = Callable[[int, bool], Array]

FINE = 2**64  # integers are refined by this factor, so that a division by flooring is far below rounding
SERVED = 2**44  # every marginal is met to this relative accuracy, 5.7e-14


def forest_flow(
    rows: Index, cols: Index, A: list[int], B: list[int], preference: Preference
) -> tuple[Support, Peeling | None] | None:
    """``(rows, cols, mass)``, rows ascending, whose marginals are ``A (n,)``, ``B (m,)`` up to rounding; the peeling of its arcs.

    Atoms that the forest serves too little, those so light that the simplex does not see them, are given
    partners: ``preference(i, True)`` ranks the m columns for row i, ``preference(j, False)`` the n rows for
    column j, least first. The peeling is None where that happens, all of it when the arcs hold a cycle or some atom cannot be served.
    """
    plain = _plain_flow(rows, cols, A, B)
    if plain is not None:
        return (rows, cols, plain[0]), plain[1]
    n = len(A)
    mass = [v * FINE for v in A] + [v * FINE for v in B]
    arcs = list(zip(rows.tolist(), (cols + n).tolist(), strict=True))
    steps = elimination(arcs, mass)
    if len(steps) != len(arcs):
        return None
    cut = _cut(steps, mass, n)
    flows = _balanced_flows(steps, cut, mass, n, len(arcs))
    if not _serve(arcs, flows, mass, n, preference):
        return None
    total = sum(A) * FINE
    keep = sorted((arc, flow) for arc, flow in zip(arcs, flows, strict=True) if flow > 0)
    kept = (
        np.array([arc[0] for arc, _ in keep], dtype=np.intp),
        np.array([arc[1] - n for arc, _ in keep], dtype=np.intp),
        np.array([flow / total for _, flow in keep]),
    )
    return kept, None


def _plain_flow(rows: Index, cols: Index, A: list[int], B: list[int]) -> tuple[Array, Peeling] | None:
    """The flows of a forest whose trees balance exactly, when none of them could be rounding, and its peeling; else None.

    From the leaves inward each arc carries what is left over behind it. Nothing has to be cut or served then, so
    that one pass is all there is to do.
    """
    n, peeling = len(A), peel(rows, cols, len(A), len(B))
    if len(peeling) != len(rows):  # a cycle
        return None
    source, target = [*A, *[0] * len(B)], [*[0] * n, *B]
    flows = [0] * len(rows)
    for v, u, k in peeling:
        s, t = source[v], target[v]
        flow = s - t if v < n else t - s
        if flow * DUST <= (s if s > t else t):
            return None
        flows[k] = flow
        source[u] += s
        target[u] += t
        source[v] = target[v] = 0
    # the roots hold what their trees hold
    if source != target:
        return None
    total = sum(A)
    return np.array([flow / total for flow in flows]), peeling


def elimination(arcs: list[tuple[int, int]], mass: list[int]) -> list[Step]:
    """Steps ``(leaf, arc, other end)`` that take the forest apart, light leaves first; a cycle stays."""
    at: list[list[int]] = [[] for _ in mass]
    for k, (u, v) in enumerate(arcs):
        at[u].append(k)
        at[v].append(k)
    degree = [len(k) for k in at]
    gone = [False] * len(arcs)
    heap = [(mass[v], v) for v, k in enumerate(degree) if k == 1]
    heapq.heapify(heap)
    steps = []
    while heap:
        _, v = heapq.heappop(heap)
        if degree[v] == 0:
            continue
        k = next(k for k in at[v] if not gone[k])
        u = sum(arcs[k]) - v
        gone[k] = True
        degree[u] -= 1
        degree[v] -= 1
        steps.append((v, k, u))
        if degree[u] == 1:
            heapq.heappush(heap, (mass[u], u))
    return steps


def _parts(steps: list[Step], cut: set[int], mass: list[int], n: int) -> tuple[list[int], list[int], list[int]]:
    """The part of each node when the arcs ``cut`` are taken out, and each part's source and target mass."""
    part = list(range(len(mass)))
    for v, k, u in reversed(steps):
        if k not in cut:
            part[v] = part[u]
    source, target = [0] * len(mass), [0] * len(mass)
    for v, w in enumerate(mass):
        (source if v < n else target)[part[v]] += w
    return part, source, target


def _cut(steps: list[Step], mass: list[int], n: int) -> set[int]:
    """The arcs whose flow is within the rounding of the masses on both of their sides."""
    part, all_source, all_target = _parts(steps, set(), mass, n)
    source = [w if v < n else 0 for v, w in enumerate(mass)]
    target = [0 if v < n else w for v, w in enumerate(mass)]
    cut = set()
    for v, k, u in steps:
        flow = abs(source[v] - target[v]) * DUST
        behind = max(source[v], target[v])
        ahead = max(all_source[part[v]] - source[v], all_target[part[v]] - target[v])
        if flow <= behind and flow <= ahead:
            cut.add(k)
        source[u] += source[v]
        target[u] += target[v]
    return cut


def _balanced_flows(steps: list[Step], cut: set[int], mass: list[int], n: int, arcs: int) -> list[int]:
    part, source, target = _parts(steps, cut, mass, n)
    left = []
    for v, w in enumerate(mass):
        s, t = source[part[v]], target[part[v]]
        if abs(s - t) * SERVED > min(s, t):  # not rounding: leave the difference to be served
            source[part[v]] = target[part[v]] = s = t = 1
        left.append(w * (t if v < n else s))
    flows = [0] * arcs
    for v, k, u in steps:
        if k not in cut:
            flow = max(left[v], 0)
            left[u] -= flow
            flows[k] = flow // target[part[v]]
    return flows


def _serve(arcs: list[tuple[int, int]], flows: list[int], mass: list[int], n: int, preference: Preference) -> bool:
    """Give what the forest owes: arcs (in place) from light atoms to heavy ones, where they do not count."""
    left = list(mass)
    at: list[list[int]] = [[] for _ in mass]
    for k, (u, v) in enumerate(arcs):
        left[u] -= flows[k]
        left[v] -= flows[k]
        at[u].append(k)
        at[v].append(k)
    for v, w in enumerate(mass):
        if -left[v] * SERVED > w:  # served too much
            had = w - left[v]
            for k in at[v]:
                less = flows[k] - flows[k] * w // had
                flows[k] -= less
                for end in arcs[k]:
                    left[end] += less
    owed = [v for v, w in enumerate(mass) if left[v] * SERVED > w]
    if not owed:
        return all(abs(rest) * SERVED <= w for rest, w in zip(left, mass, strict=True))
    heaviest = max(mass)
    weight = np.array([w / heaviest for w in mass])
    for v in owed:
        others = np.arange(n, len(mass)) if v < n else np.arange(n)
        rank = preference(v, True) if v < n else preference(v - n, False)
        while left[v] * SERVED > mass[v]:
            # a partner that lacks mass itself, or one so heavy that the gift is below its rounding
            needs = np.array([left[u] * SERVED > mass[u] for u in others.tolist()])
            able = needs | (weight[others] >= left[v] / heaviest * DUST)
            if not able.any():
                return False
            u = int(others[able][rank[able].argmin()])
            gift = min(left[v], left[u]) if needs[u - others[0]] else left[v]
            arcs.append((min(u, v), max(u, v)))
            flows.append(gift)
            left[u] -= gift
            left[v] -= gift
    return all(abs(rest) * SERVED <= w for rest, w in zip(left, mass, strict=True))


MAX_PIVOTS = 2**31 - 1


def network_simplex(R: Array, A: list[int], B: list[int]) -> tuple[Support, Peeling | None, Array]:
    """A plan for the cost ``R >= 0`` on its support, ``(rows, cols, mass)``, its peeling (if known), and potentials of the columns.

    ``R`` is divided by its largest entry in place: POT compares costs with absolute tolerances.

    Raises
    ------
    ConvergenceError
        POT stopped early, or its plan does not serve every atom.
    """
    import ot  # imported late: POT looks for every array library there is

    scale = float(R.max()) or 1.0
    if scale != 1.0:
        R /= scale
    options = {"numItermax": MAX_PIVOTS, "log": True, "center_dual": False, "check_marginals": False}
    plan, log = ot.emd(to_weights(A), to_weights(B), R, **options)
    if log["warning"] is not None:
        raise ConvergenceError(
            f"the network simplex must reach an optimal plan between {len(A)} and {len(B)} atoms, but "
            f"stopped with: {log['warning']}; merge near-duplicate atoms or compare smaller samples."
        )
    v = log["v"]
    rows, cols = np.divmod(np.flatnonzero(plan.ravel() != 0.0), len(B))
    flow = forest_flow(rows, cols, A, B, lambda k, is_row: R[k] - v if is_row else R[:, k])
    if flow is None:
        raise ConvergenceError(
            f"a transport plan must serve every atom, but the simplex found none between {len(A)} and "
            f"{len(B)} atoms; drop atoms of negligible weight."
        )
    return *flow, v * scale
