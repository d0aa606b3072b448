"""The search behind lower bounds: structured starts, short ascents of many, long ascents of the best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from otattn._linalg import Array
from otattn.lipschitz.lower import mean_field_witnesses as mean_field
from otattn.lipschitz.lower import witnesses
from otattn.lipschitz.lower.ascent import Candidates, Weighting, ascend, evaluate, round_multiplicities
from otattn.lipschitz.lower.problem import Problem

WIDE = 64
"""Above this many dimensions an ascent takes a tenth of a second a start."""


@dataclass(frozen=True)
class _Budget:
    """How many starts of each kind, how many ascents, how long."""

    random: int
    per_pool: int
    short: int
    survivors: int
    long: int
    finalists: int
    exchanges: int
    path: int


_BUDGETS = {
    "fast": _Budget(random=24, per_pool=12, short=25, survivors=6, long=80, finalists=2, exchanges=1, path=3),
    "deep": _Budget(random=160, per_pool=48, short=60, survivors=24, long=300, finalists=6, exchanges=4, path=4),
}


def _budget(problem: Problem) -> _Budget:
    budget = _BUDGETS[problem.effort]
    width = max(problem.chart.E.shape[0], problem.forms[0].V.shape[0])
    if width <= 12:
        return budget
    # the cost of an ascent grows with the cube of the width up to the dense limit: fewer and shorter ones
    thin = 2 if width <= 40 else 4 if width <= WIDE else 8
    least = {"random": 2, "per_pool": 2, "short": 12, "survivors": 2, "long": 40, "finalists": 1}
    thinned = {name: max(fewest, getattr(budget, name) // thin) for name, fewest in least.items()}
    return replace(budget, **thinned, path=budget.path if width <= WIDE else 1)


@dataclass(frozen=True, eq=False)
class Found:
    """The best measure of a search: latents ``(c, k)``, log-weights ``(c,)`` and the value of the analytic form."""

    value: float
    latents: Array
    log_weights: Array

    @property
    def candidate(self) -> Candidates:
        """The same as a batch of one."""
        return Candidates(self.latents[None], self.log_weights[None])


class _Pool:
    """Candidates by number of atoms, with the values reached; the best of each is kept."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.budget = problem, _budget(problem)
        self.best = Found(-1.0, np.zeros((0, 0)), np.zeros(0))

    def score(self, candidates: Candidates) -> Array:
        """Values ``(B,)``; the best measure seen is remembered."""
        values = np.nan_to_num(evaluate(self.problem, candidates), nan=0.0)
        top = int(values.argmax())
        if self.best.value < 0.0 or values[top] > self.best.value * (1.0 + 1e-12):
            self.best = Found(float(values[top]), candidates.latents[top], candidates.log_weights[top])
        return np.asarray(values)

    def choose(self, candidates: Candidates, count: int, *, apart: float = 0.0) -> Candidates:
        """The best ``count`` candidates of distinct values, first those with some atom ``apart`` from those chosen."""
        values = self.score(candidates)
        order = [int(i) for i in np.argsort(-values, kind="stable")]
        kept: list[int] = []
        for distance in (apart, 0.0) if apart > 0.0 else (0.0,):
            for i in order:
                if len(kept) == count:
                    break
                gaps = np.linalg.norm(candidates.latents[kept] - candidates.latents[i], axis=2).max(axis=1)
                same = np.abs(values[kept] - values[i]) <= 1e-7 * values[i]
                if not (same | (gaps < distance)).any():
                    kept.append(i)
        return candidates.take(np.array(kept, dtype=np.int64))


def _grouped(batches: Iterable[Candidates | None]) -> dict[int, list[Candidates]]:
    groups: dict[int, list[Candidates]] = {}
    for batch in batches:
        if batch is not None and batch.size:
            groups.setdefault(batch.atoms, []).append(batch)
    return groups


def token_starts(problem: Problem, rng: np.random.Generator, random: int) -> list[Candidates]:
    """Every structured configuration of n >= 2 tokens, and random ones."""
    n = problem.tokens
    out: list[Candidates | None] = []
    for form in problem.forms:
        out += [
            witnesses.castin_antipodal(problem, form),
            witnesses.castin_half(problem, form),
            witnesses.two_anchor(problem, form, rng),
            witnesses.field_atoms(problem, form, rng),
        ]
        for batch in (mean_field.three_atoms(problem, form, rng), mean_field.self_block_measures(problem, form, rng)):
            if batch.atoms <= n:
                out.append(Candidates(batch.latents, round_multiplicities(batch.log_weights, n)))
    out.append(witnesses.self_block(problem, rng))
    # wide problems (real heads): more atoms cost seconds and have never won there
    sizes = {2, 3, 4} if problem.chart.E.shape[0] > WIDE else {2, 3, 4, 5, min(n, 8)}
    for c in sorted(sizes):
        if c <= n:
            batch = witnesses.random_tokens(problem.chart, n, c, random, rng)
            out.append(Candidates(batch.latents, round_multiplicities(batch.log_weights, n)))
    return [b for b in out if b is not None]


def search_tokens(problem: Problem, rng: np.random.Generator) -> Found:
    """The best configuration of n tokens found; its log-weights are logarithms of the counts."""
    n, chart, pool = problem.tokens, problem.chart, _Pool(problem)
    budget = pool.budget
    if n == 1:
        z = np.zeros((1, 1, chart.latent_dim)) if chart.kind != "sphere" else chart.sample((1, 1), rng)
        pool.score(Candidates(z, np.zeros((1, 1))))
        return pool.best
    reached: list[tuple[float, Candidates]] = []
    for batches in _grouped(token_starts(problem, rng, budget.random)).values():
        starts = Candidates.join(pool.choose(b, budget.per_pool, apart=0.3) for b in batches)
        results = []
        weightings: tuple[Weighting, ...] = ("fixed", "tokens") if starts.atoms < n else ("fixed",)
        for weighting in weightings:
            _, moved = ascend(problem, starts, weighting=weighting, steps=budget.short)
            results.append(Candidates(moved.latents, round_multiplicities(moved.log_weights, n)))
        results.append(_follow_path(problem, starts, budget))
        survivors = pool.choose(Candidates.join(results), budget.survivors)
        _, moved = ascend(problem, survivors, steps=budget.long)
        for value, i in zip(pool.score(moved), range(moved.size), strict=True):
            reached.append((float(value), moved.take(np.array([i]))))
    reached.sort(key=lambda item: -item[0])
    for _, candidate in reached[: budget.finalists]:
        _exchange(pool, candidate)
    _polish_field(pool, rng)
    return pool.best


def _follow_path(problem: Problem, starts: Candidates, budget: _Budget) -> Candidates:
    """Ascend at small logits first and raise them by factors of three: cold starts fail when the logits are large."""
    E = problem.chart.E
    heat = max(float(np.linalg.norm(E.T @ f.A @ E, 2)) for f in problem.forms)
    factors: list[float] = []
    while heat > 3.0 and len(factors) < budget.path:
        heat /= 3.0
        factors.append(3.0 ** -(len(factors) + 1.0))
    for factor in [*reversed(factors), 1.0]:
        scaled = tuple(f.heated(factor) for f in problem.forms)
        _, starts = ascend(replace(problem, forms=scaled), starts, steps=budget.short)
    return starts


def exchanged_counts(log_counts: Array, share: float, *, all_but_one: bool = False) -> Array:
    """Log-counts ``(m, c)`` after one token, a share of an atom's, or all but one have gone to another atom."""
    counts = np.rint(np.exp(log_counts))
    trials = []
    for i, j in np.argwhere(~np.eye(len(counts), dtype=bool)):
        for move in {1.0, float(np.rint(share * counts[i])), counts[i] - 1.0 if all_but_one else 1.0}:
            if 1.0 <= move < counts[i]:
                new = counts.copy()
                new[[i, j]] += [-move, move]
                trials.append(new)
    return np.log(np.unique(np.array(trials).reshape(-1, len(counts)), axis=0))


def _exchange(pool: _Pool, candidate: Candidates) -> None:
    """Move tokens between the atoms of a configuration as long as that helps, re-ascending the positions."""
    value = float(pool.score(candidate)[0])
    for _ in range(pool.budget.exchanges):
        logs = exchanged_counts(candidate.log_weights[0], 0.2, all_but_one=True)
        if not len(logs):
            return
        best = pool.choose(Candidates(np.repeat(candidate.latents, len(logs), axis=0), logs), pool.budget.survivors)
        _, ascended = ascend(pool.problem, best, steps=pool.budget.long)
        values = pool.score(ascended)
        top = int(values.argmax())
        if values[top] <= value * (1.0 + 1e-9):
            return
        value, candidate = float(values[top]), ascended.take(np.array([top]))


def _polish_field(pool: _Pool, rng: np.random.Generator) -> None:
    """Ascend the field of a pair of tokens that split, when it comes near the best value at all."""
    problem = pool.problem
    for form in problem.forms:
        starts = witnesses.field_atoms(problem, form, rng)
        if starts is None:
            continue
        sigma = witnesses.field_direction(problem, form, rng)[0] if len(problem.forms) == 1 else np.inf
        if sigma > pool.best.value:
            _, moved = ascend(problem, starts.take(np.array([1])), split_atom=2, steps=pool.budget.long)
            pool.score(moved)


def search_measures(problem: Problem, rng: np.random.Generator) -> Found:
    """The best measure with at most five atoms found, weights free."""
    pool = _Pool(problem)
    starts: list[Candidates] = []
    for form in problem.forms:
        pool.score(mean_field.field_measure(problem, form, rng))
        starts += [mean_field.three_atoms(problem, form, rng), mean_field.self_block_measures(problem, form, rng)]
    starts += [witnesses.random_tokens(problem.chart, 10**6, c, pool.budget.random, rng) for c in (2, 3, 4, 5)]
    for batches in _grouped(starts).values():
        _ascend_free(
            pool,
            Candidates.join(pool.choose(b, pool.budget.per_pool, apart=0.3) for b in batches),
            pool.budget.survivors,
        )
    # more atoms: split an atom of the best measure in two and ascend again
    one = pool.best.candidate
    for _ in range(2):
        if one.atoms < 5:
            one = _ascend_free(pool, _split_atoms(problem, one, rng), max(2, pool.budget.survivors // 2))
    return pool.best


def _ascend_free(pool: _Pool, starts: Candidates, survivors: int) -> Candidates:
    """The best measure after short ascents of all starts and long ones of the survivors, weights free."""
    _, moved = ascend(pool.problem, starts, weighting="free", steps=pool.budget.short)
    chosen = pool.choose(moved, survivors)
    _, moved = ascend(pool.problem, chosen, weighting="free", steps=pool.budget.long)
    return moved.best(pool.score(moved), 1)


def _split_atoms(problem: Problem, one: Candidates, rng: np.random.Generator) -> Candidates:
    """The measure with one of its atoms split into two of half the weight, three times each."""
    copies = np.arange(3 * one.atoms)
    k = copies % one.atoms
    latents, lw = np.repeat(one.latents, len(k), axis=0), np.repeat(one.log_weights, len(k), axis=0)
    extra = problem.chart.clip(latents[copies, k] + 0.2 * rng.standard_normal((len(k), problem.chart.latent_dim)))
    lw[copies, k] -= np.log(2.0)
    return Candidates(
        np.concatenate([latents, extra[:, None]], axis=1), np.concatenate([lw, lw[copies, k][:, None]], axis=1)
    )
