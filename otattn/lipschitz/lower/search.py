"""The search behind lower bounds: structured starts, short ascents of many, long ascents of the best."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from otattn.lipschitz.lower import mean_field_witnesses as mean_field
from otattn.lipschitz.lower import witnesses
from otattn.lipschitz.lower.ascent import Candidates, Weighting, ascend, evaluate, round_multiplicities
from otattn.lipschitz.lower.charts import Chart
from otattn.lipschitz.lower.forms import Form

__all__ = ["Effort", "Found", "search_measures", "search_tokens"]

Array = NDArray[np.float64]
Effort = Literal["fast", "deep"]
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


def _budget(effort: Effort, forms: tuple[Form, ...], chart: Chart) -> _Budget:
    budget = _BUDGETS[effort]
    width = max(chart.E.shape[0], forms[0].V.shape[0])
    if width <= 12:
        return budget
    # the cost of an ascent grows with the cube of the width up to the dense limit: fewer and shorter ones
    thin = 2 if width <= 40 else 4 if width <= WIDE else 8
    return replace(
        budget,
        random=max(2, budget.random // thin),
        per_pool=max(2, budget.per_pool // thin),
        short=max(12, budget.short // thin),
        survivors=max(2, budget.survivors // thin),
        long=max(40, budget.long // thin),
        finalists=max(1, budget.finalists // thin),
        path=budget.path if width <= WIDE else 1,
    )


@dataclass(frozen=True, eq=False)
class Found:
    """The best measure of a search: latents ``(c, k)``, log-weights ``(c,)`` and the value of the analytic form."""

    value: float
    latents: Array
    log_weights: Array


class _Pool:
    """Candidates by number of atoms, with the values reached; the best of each is kept."""

    def __init__(
        self, forms: tuple[Form, ...], chart: Chart, n: int | None, hidden: NDArray[np.bool_] | None = None
    ) -> None:
        self.forms, self.chart, self.n, self.hidden = forms, chart, n, hidden
        self.best: Found | None = None

    def score(self, candidates: Candidates) -> Array:
        """Values ``(B,)``; the best measure seen is remembered."""
        can_split = None if self.n is None else candidates.log_weights > np.log(1.5)
        symmetric, fields = evaluate(self.forms, self.chart, candidates, can_split=can_split, hidden=self.hidden)
        values = np.nan_to_num(np.maximum(symmetric, fields.max(axis=1)), nan=0.0)
        top = int(values.argmax())
        if self.best is None or values[top] > self.best.value * (1.0 + 1e-12):
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


def _join(batches: list[Candidates]) -> Candidates:
    out = batches[0]
    for other in batches[1:]:
        out = out.joined(other)
    return out


def token_starts(
    forms: tuple[Form, ...], chart: Chart, n: int, rng: np.random.Generator, random: int
) -> list[Candidates]:
    """Every structured configuration of n >= 2 tokens, and random ones."""
    out: list[Candidates | None] = []
    for form in forms:
        out += [
            witnesses.castin_antipodal(form, chart, n),
            witnesses.castin_half(form, chart, n),
            witnesses.two_anchor(form, chart, n, rng),
            witnesses.field_atoms(form, chart, n, rng),
        ]
        for batch in (
            mean_field.three_atoms(form, chart, rng),
            mean_field.self_block_measures(form, chart, rng),
        ):
            if batch.atoms <= n:
                out.append(Candidates(batch.latents, round_multiplicities(batch.log_weights, n)))
    out.append(witnesses.self_block(forms, chart, n, rng))
    # wide problems (real heads): more atoms cost seconds and have never won there
    sizes = {2, 3, 4} if chart.E.shape[0] > WIDE else {2, 3, 4, 5, min(n, 8)}
    for c in sorted(sizes):
        if c <= n:
            batch = witnesses.random_tokens(chart, n, c, random, rng)
            out.append(Candidates(batch.latents, round_multiplicities(batch.log_weights, n)))
    return [b for b in out if b is not None]


def search_tokens(
    forms: tuple[Form, ...], chart: Chart, n: int, rng: np.random.Generator, effort: Effort = "fast"
) -> Found:
    """The best configuration of n tokens found; its log-weights are logarithms of the counts."""
    budget = _budget(effort, forms, chart)
    pool = _Pool(forms, chart, n)
    if n == 1:
        pool.score(
            Candidates(
                np.zeros((1, 1, chart.latent_dim)) if chart.kind != "sphere" else chart.sample((1, 1), rng),
                np.zeros((1, 1)),
            )
        )
        assert pool.best is not None
        return pool.best
    reached: list[tuple[float, Candidates]] = []
    for batches in _grouped(token_starts(forms, chart, n, rng, budget.random)).values():
        starts = _join([pool.choose(b, budget.per_pool, apart=0.3) for b in batches])
        results = []
        weightings: tuple[Weighting, ...] = ("fixed", "tokens") if starts.atoms < n else ("fixed",)
        for weighting in weightings:
            _, moved = ascend(forms, chart, starts, weighting=weighting, n=n, steps=budget.short)
            results.append(Candidates(moved.latents, round_multiplicities(moved.log_weights, n)))
        results.append(_follow_path(forms, chart, starts, budget))
        survivors = pool.choose(_join(results), budget.survivors)
        _, moved = ascend(forms, chart, survivors, weighting="fixed", steps=budget.long)
        for value, i in zip(pool.score(moved), range(moved.size), strict=True):
            reached.append((float(value), moved.take(np.array([i]))))
    reached.sort(key=lambda item: -item[0])
    for _, candidate in reached[: budget.finalists]:
        _exchange(pool, candidate, n, budget)
    _polish_field(pool, forms, chart, n, rng, budget)
    assert pool.best is not None
    return pool.best


def _heat(forms: tuple[Form, ...], chart: Chart) -> float:
    """The size of the logits, ``max_h ||E^T A E||``."""
    return max(float(np.linalg.norm(chart.E.T @ f.A @ chart.E, 2)) for f in forms)


def _follow_path(forms: tuple[Form, ...], chart: Chart, starts: Candidates, budget: _Budget) -> Candidates:
    """Ascend at small logits first and raise them by factors of three: cold starts fail when the logits are large."""
    heat = _heat(forms, chart)
    factors: list[float] = []
    while heat > 3.0 and len(factors) < budget.path:
        heat /= 3.0
        factors.append(3.0 ** -(len(factors) + 1.0))
    for factor in [*reversed(factors), 1.0]:
        scaled = tuple(Form(factor * f.A, f.V, factor * f.bias, None if f.H is None else factor * f.H) for f in forms)
        _, starts = ascend(scaled, chart, starts, weighting="fixed", steps=budget.short)
    return starts


def _exchange(pool: _Pool, candidate: Candidates, n: int, budget: _Budget) -> None:
    """Move tokens between the atoms of a configuration as long as that helps, re-ascending the positions."""
    value = float(pool.score(candidate)[0])
    c = candidate.atoms
    for _ in range(budget.exchanges):
        counts = np.rint(np.exp(candidate.log_weights[0]))
        trials = []
        for i in range(c):
            for j in range(c):
                for move in sorted({1.0, np.rint(0.2 * counts[i]), counts[i] - 1.0}):
                    if i != j and 1.0 <= move < counts[i]:
                        new = counts.copy()
                        new[i] -= move
                        new[j] += move
                        trials.append(new)
        if not trials:
            return
        logs = np.log(np.unique(np.array(trials), axis=0))
        moved = Candidates(np.repeat(candidate.latents, len(logs), axis=0), logs)
        best = pool.choose(moved, budget.survivors)
        _, ascended = ascend(pool.forms, pool.chart, best, weighting="fixed", steps=budget.long)
        values = pool.score(ascended)
        top = int(values.argmax())
        if values[top] <= value * (1.0 + 1e-9):
            return
        value, candidate = float(values[top]), ascended.take(np.array([top]))


def _polish_field(
    pool: _Pool, forms: tuple[Form, ...], chart: Chart, n: int, rng: np.random.Generator, budget: _Budget
) -> None:
    """Ascend the field of a pair of tokens that split, when it comes near the best value at all."""
    for form in forms:
        starts = witnesses.field_atoms(form, chart, n, rng)
        if starts is None or pool.best is None:
            continue
        sigma = witnesses.field_direction(form, chart, rng)[0] if len(forms) == 1 else np.inf
        if sigma > pool.best.value:
            _, moved = ascend(
                forms, chart, starts.take(np.array([1])), weighting="fixed", split_atom=2, steps=budget.long
            )
            pool.score(moved)


def search_measures(forms: tuple[Form, ...], chart: Chart, rng: np.random.Generator, effort: Effort = "fast") -> Found:
    """The best measure with at most five atoms found, weights free."""
    budget = _budget(effort, forms, chart)
    pool = _Pool(forms, chart, None)
    starts: list[Candidates] = []
    for form in forms:
        field = mean_field.field_measure(form, chart, rng)
        pool.score(field)
        starts += [
            mean_field.three_atoms(form, chart, rng),
            mean_field.self_block_measures(form, chart, rng),
        ]
    for c in (2, 3, 4, 5):
        batch = witnesses.random_tokens(chart, 10**6, c, budget.random, rng)
        starts.append(batch)
    for batches in _grouped(starts).values():
        chosen = _join([pool.choose(b, budget.per_pool, apart=0.3) for b in batches])
        _, moved = ascend(forms, chart, chosen, weighting="free", steps=budget.short)
        survivors = pool.choose(moved, budget.survivors)
        _, moved = ascend(forms, chart, survivors, weighting="free", steps=budget.long)
        pool.score(moved)
    assert pool.best is not None
    best = pool.best
    # more atoms: split an atom of the best measure in two and ascend again
    one = Candidates(best.latents[None], best.log_weights[None])
    for _ in range(2):
        if one.atoms >= 5:
            break
        one = _split_atom(pool, forms, chart, one, rng, budget)
    assert pool.best is not None
    return pool.best


def _split_atom(
    pool: _Pool,
    forms: tuple[Form, ...],
    chart: Chart,
    one: Candidates,
    rng: np.random.Generator,
    budget: _Budget,
) -> Candidates:
    c = one.atoms
    copies = 3 * c
    k = np.arange(copies) % c
    latents = np.repeat(one.latents, copies, axis=0)
    extra = chart.clip(latents[np.arange(copies), k] + 0.2 * rng.standard_normal((copies, chart.latent_dim)))
    lw = np.repeat(one.log_weights, copies, axis=0)
    lw[np.arange(copies), k] -= np.log(2.0)
    grown = Candidates(
        np.concatenate([latents, extra[:, None]], axis=1),
        np.concatenate([lw, lw[np.arange(copies), k][:, None]], axis=1),
    )
    _, moved = ascend(forms, chart, grown, weighting="free", steps=budget.short)
    survivors = pool.choose(moved, max(2, budget.survivors // 2))
    _, moved = ascend(forms, chart, survivors, weighting="free", steps=budget.long)
    values = pool.score(moved)
    return moved.take(np.array([int(values.argmax())]))
