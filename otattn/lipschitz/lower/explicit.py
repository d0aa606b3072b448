"""Ascent of local constants for any attention map, through its Jacobian at explicit measures with few atoms.

Slower than the analytic search on clusters. At fixed weights and p = 2 the gradient takes two products with the adjoint
(:attr:`~otattn.lipschitz.lower.extremal.Extremal.slope`), whatever the map and its dimension; otherwise it is that of a frozen
linear functional of the derivatives, by forward differences. For causal maps the atoms are the blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from otattn._linalg import Array
from otattn.errors import ConvergenceError
from otattn.lipschitz.lower import mean_field_witnesses as mean_field
from otattn.lipschitz.lower import witnesses
from otattn.lipschitz.lower.ascent import LOG_WEIGHT_FLOOR, Candidates, lbfgs, round_multiplicities
from otattn.lipschitz.lower.extremal import Extremal, extremal
from otattn.lipschitz.lower.problem import Problem
from otattn.measures import DiscreteMeasure, SpaceTimeMeasure

_SIZE = {"fast": (8, 5, 25), "deep": (40, 12, 80)}
"""Random starts of each kind, how many of the best are ascended, steps each."""
STEP = 1e-6
MOST_HINTS = 4
"""Forms whose structured starts are tried for a map that is built of many heads."""
LIGHTER = np.geomspace(1.0, 300.0, 12)
"""Logarithms of the shares of rare atoms."""
GRADIENT_LIMIT = 48
"""Atoms with more coordinates than this in all are ascended along random directions only."""


@dataclass(frozen=True, eq=False)
class Layout:
    """How latents and log-weights of atoms become a measure.

    Attributes
    ----------
    kind : {"measure", "slice", "chain", "sequence"}
        A discrete measure; for causal maps and any measure, the same at one time, or the atoms one after another; for
        causal maps and n tokens, the sequence whose blocks of equal tokens are the atoms in order.

    With n tokens log-weights are logarithms of counts.
    """

    problem: Problem
    kind: Literal["measure", "slice", "chain", "sequence"]

    def counts(self, log_weights: Array) -> Array | None:
        """Tokens at each atom of the measure (None for any measure)."""
        if self.problem.n is None:
            return None
        counts = np.rint(np.exp(log_weights))
        return np.ones(int(counts.sum())) if self.kind == "sequence" else counts

    def measure(self, latents: Array, log_weights: Array) -> Any:
        """The measure of latents ``(c, k)`` and log-weights ``(c,)``."""
        points = self.problem.chart.lift(latents)
        if self.kind == "sequence":
            return SpaceTimeMeasure.from_sequence(np.repeat(points, np.rint(np.exp(log_weights)).astype(int), axis=0))
        if self.problem.n is None:
            # relative to the heaviest atom: smaller weights would not be normal floats
            w = np.exp(np.maximum(log_weights - log_weights.max(), LOG_WEIGHT_FLOOR))
        else:
            w = np.rint(np.exp(log_weights))
        w = w / w.sum()
        if self.kind == "measure":
            return DiscreteMeasure(points, w)
        times = np.arange(1, len(w) + 1) / len(w) if self.kind == "chain" else np.ones(len(w))
        return SpaceTimeMeasure(times, points, w)

    def extremal(self, latents: Array, log_weights: Array) -> tuple[Any, Extremal | None]:
        """The measure and its local constant, None where the map cannot be evaluated (overflow, no convergence)."""
        mu = self.measure(latents, log_weights)
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                return mu, extremal(self.problem, mu, self.counts(log_weights))
        except (OverflowError, ConvergenceError, np.linalg.LinAlgError):
            return mu, None

    def value(self, latents: Array, log_weights: Array) -> float:
        """The local constant, 0 where the map cannot be evaluated."""
        found = self.extremal(latents, log_weights)[1]
        return found.value if found is not None and np.isfinite(found.value) else 0.0

    def witness(self, latents: Array, log_weights: Array) -> tuple[Any, float]:
        """The measure, with equal atoms merged where that is allowed, and the local constant evaluated at it."""
        mu, counts = self.measure(latents, log_weights), self.counts(log_weights)
        if self.kind == "measure":
            merged = mu.merge_duplicates()
            if merged.n < mu.n:
                mu = merged
                counts = None if self.problem.n is None else np.rint(mu.weights * self.problem.n)
        return mu, extremal(self.problem, mu, counts).value


def _starts(layout: Layout, rng: np.random.Generator, count: int) -> list[tuple[Array, Array]]:
    """Latents and log-weights of structured and random measures."""
    problem, n = layout.problem, layout.problem.n
    chart = problem.chart
    forms = problem.forms[:: max(1, -(-len(problem.forms) // MOST_HINTS))]  # spread over the depth of a network
    batches: list[Candidates] = []
    ends = witnesses.directions(chart, forms, rng, count) if forms else chart.sample((count,), rng)
    total = 0.0 if n is None else np.log(n)
    batches.append(Candidates(ends[:, None], np.full((len(ends), 1), total)))
    for f in forms:
        structured: list[Candidates | None] = [
            mean_field.field_measure(problem, f, rng),
            mean_field.three_atoms(problem, f, rng, keep=1),
        ]
        if problem.p == np.inf:
            structured.append(mean_field.output_measures(problem, f, rng))
        if n is not None and n >= 2:
            structured = [
                witnesses.castin_antipodal(problem, f),
                witnesses.two_anchor(problem, f, rng, keep=2),
                witnesses.field_atoms(problem, f, rng),
                *(b for b in structured if b is not None and b.atoms <= n),
            ]
        batches += [b for b in structured if b is not None]
    if n is None:  # two opposed atoms, one of them ever lighter: what a kernel makes of a rare far token
        z = ends[:2]
        other = chart.clip(-z)
        shares = np.stack([-LIGHTER, np.zeros_like(LIGHTER)], axis=1)
        pairs = np.repeat(np.stack([z, other], axis=1), len(LIGHTER), axis=0)
        batches.append(Candidates(pairs, np.tile(shares, (len(z), 1))))
    if len(problem.forms) == 1:
        batches += [replace(b, log_weights=b.log_weights + total) for b in witnesses.polyhedra(chart)]
    for c in (2, 3, 4):
        if n is None or c <= n:
            batches.append(witnesses.random_tokens(chart, n or 1000, c, count, rng))
            pair = batches[0].latents[rng.integers(len(ends), size=(count, c)), 0]
            batches.append(Candidates(pair, rng.standard_normal((count, c))))
    out = []
    for batch in (b for b in batches if n is None or b.atoms <= n):
        logs = batch.log_weights if n is None else round_multiplicities(batch.log_weights, n)
        order = np.argsort(logs, axis=1, kind="stable") if layout.kind == "sequence" else None
        for i in range(batch.size):
            o = slice(None) if order is None else order[i]
            out.append((batch.latents[i][o], logs[i][o]))
    return out


def search_explicit(
    layout: Layout, rng: np.random.Generator, *, seeds: list[tuple[Array, Array]] | None = None
) -> tuple[Array, Array]:
    """The best measure found, as latents ``(c, k)`` and log-weights ``(c,)``; ``seeds`` are further starts."""
    starts, ascents, steps = _SIZE[layout.problem.effort]
    pool = [*(seeds or []), *_starts(layout, rng, starts)]
    values = np.array([layout.value(z, lw) for z, lw in pool])
    order = np.argsort(-values, kind="stable")
    best_value, best = values[order[0]], pool[order[0]]
    chosen: list[int] = []
    for i in order:
        # at most two of each number of atoms, of distinct values
        alike = [j for j in chosen if len(pool[j][0]) == len(pool[i][0])]
        if len(alike) < 2 and all(abs(values[i] - values[j]) > 1e-6 * values[i] for j in alike) and values[i] > 0.0:
            chosen.append(int(i))
        if len(chosen) == ascents:
            break
    climb = _ascend_tokens if layout.problem.n is not None and layout.problem.p == 2.0 else _ascend_along
    for i in chosen:
        z, lw = climb(layout, *pool[i], rng, steps)
        value = layout.value(z, lw)
        if value > best_value:
            best_value, best = value, (z, lw)
    return best


def _ascend_tokens(
    layout: Layout, latents: Array, log_weights: Array, rng: np.random.Generator, steps: int
) -> tuple[Array, Array]:
    """All coordinates of the atoms at once, their numbers of tokens fixed."""
    chart, (c, k) = layout.problem.chart, latents.shape
    counts = np.rint(np.exp(log_weights)).astype(np.int64)
    groups = np.repeat(np.arange(c), counts) if layout.kind == "sequence" else np.arange(c)
    some = np.linalg.qr(rng.standard_normal((c * k, min(c * k, GRADIENT_LIMIT // 2))))[0].T

    def place(x: Array) -> tuple[Array, Array]:
        return chart.latents(x.reshape(c, k)), log_weights

    def slope(found: Extremal, x: Array) -> Array:
        z = place(x)[0]
        if found.slope is None:
            return np.asarray(some.T @ _differences(lambda y: layout.measure(*place(y)), found, x, some))
        summed = np.zeros_like(z)
        np.add.at(summed, groups, found.slope(z[groups]))
        return chart.pull(x.reshape(c, k), summed).ravel()

    return place(_climb(layout, place, slope, chart.parameters(latents).ravel(), steps))


def _differences(measure: Callable[[Array], Any], found: Extremal, x: Array, directions: Array) -> Array:
    """Derivatives of the functional along some directions, by forward differences."""
    base = found.functional(measure(x))
    return np.array([(found.functional(measure(x + STEP * e)) - base) / STEP for e in directions])


def _climb(
    layout: Layout,
    place: Callable[[Array], tuple[Array, Array]],
    slope: Callable[[Extremal, Array], Array],
    x0: Array,
    steps: int,
) -> Array:
    """Ascend from ``x0``: ``place`` makes latents and log-weights of coordinates, ``slope`` the gradient of the constant there."""

    def one(x: Array) -> tuple[float, Array]:
        found = layout.extremal(*place(x))[1]
        if found is None or not found.value > 0.0:
            return 700.0, np.zeros_like(x)
        try:
            return -float(np.log(found.value)), -slope(found, x) / found.value
        except (OverflowError, ConvergenceError, np.linalg.LinAlgError):
            return 700.0, np.zeros_like(x)

    def objective(X: Array) -> tuple[Array, Array]:
        values, slopes = zip(*(one(x) for x in X), strict=True)
        return np.array(values), np.array(slopes)

    return np.asarray(lbfgs(objective, x0[None], steps=steps)[0][0])


def _ascend_along(
    layout: Layout, latents: Array, log_weights: Array, rng: np.random.Generator, steps: int
) -> tuple[Array, Array]:
    """Coordinates and, for any measure, weights; a random subspace of them where they are many."""
    chart, free = layout.problem.chart, layout.problem.n is None
    c, k = latents.shape
    size = c * k + (c if free else 0)
    start = chart.parameters(latents).ravel()
    x0 = np.concatenate([start, log_weights - log_weights.max()]) if free else start
    # many coordinates: a random subspace through the start and the atoms' own directions
    if size > GRADIENT_LIMIT:
        subspace = np.linalg.qr(rng.standard_normal((size, GRADIENT_LIMIT // 2)))[0].T
    else:
        subspace = np.eye(size)

    def place(x: Array) -> tuple[Array, Array]:
        full = x0 + x @ subspace
        return chart.latents(full[: c * k].reshape(c, k)), full[c * k :] if free else log_weights

    def slope(found: Extremal, x: Array) -> Array:
        return _differences(lambda y: layout.measure(*place(y)), found, x, np.eye(len(x)))

    return place(_climb(layout, place, slope, np.zeros(len(subspace)), steps))
