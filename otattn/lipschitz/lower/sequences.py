"""Sequences with a large causal local constant: blocks of equal tokens in an order, light blocks first or last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otattn.lipschitz.lower import mean_field_witnesses as mean_field
from otattn.lipschitz.lower import witnesses
from otattn.lipschitz.lower.ascent import Candidates, ascend, evaluate, lbfgs, round_multiplicities
from otattn.lipschitz.lower.charts import Chart
from otattn.lipschitz.lower.clusters import Configuration
from otattn.lipschitz.lower.forms import Form
from otattn.lipschitz.lower.search import Effort, search_tokens, token_starts

__all__ = ["search_chains", "search_sequences"]

Array = NDArray[np.float64]

_SIZE = {"fast": (6, 2, 30), "deep": (24, 6, 120)}
"""Orders evaluated, sequences ascended, steps each."""
_CORE = 48
"""Longest sequence that is searched from many starts."""
_FREE_LIMIT = 24
"""Up to this many tokens the best sequence is ascended once more with every token on its own."""


@dataclass(frozen=True, eq=False)
class _BlockObjective:
    """``-log`` of the causal norm in the positions of blocks; ``groups (n,)`` names the block of every token."""

    forms: tuple[Form, ...]
    chart: Chart
    groups: NDArray[np.int64]

    def configuration(self, z: Array) -> Configuration:
        n = len(self.groups)
        hidden = np.triu(np.ones((n, n), dtype=bool), 1)
        return Configuration(self.forms, (z @ self.chart.E.T)[:, self.groups], np.zeros((len(z), n)), 0.5, hidden)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        c = int(self.groups.max()) + 1
        omega = x.reshape(len(x), c, self.chart.latent_dim)
        z = self.chart.latents(omega)
        batch = self.configuration(z)
        normals = self.chart.normals(z)
        each = None if normals is None else normals[:, self.groups]
        value, u, v = batch.top(each, exact=False)
        gz = batch.gradient(u, v)[0] @ self.chart.E
        if normals is not None:
            gz += self.chart.normal_gradient(z[:, self.groups], batch.rmatvec(u), v)
        summed = np.zeros_like(z)
        np.add.at(summed.swapaxes(0, 1), self.groups, gz.swapaxes(0, 1))
        scale = -1.0 / np.maximum(value, 1e-300)
        gradient = self.chart.pull(omega, summed).reshape(len(x), -1) * scale[:, None]
        gradient[~np.isfinite(gradient).all(axis=1) | ~(value > 0.0)] = 0.0
        return np.where(value > 0.0, -np.log(np.maximum(value, 1e-300)), 700.0), gradient

    def value(self, z: Array) -> float:
        """The causal norm at latents ``(c, k)``."""
        normals = self.chart.normals(z[None])
        each = None if normals is None else normals[:, self.groups]
        return float(self.configuration(z[None]).top(each, exact=False)[0][0])


def _groups(counts: Array) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(counts)), np.rint(counts).astype(np.int64))


def search_sequences(
    forms: tuple[Form, ...], chart: Chart, n: int, rng: np.random.Generator, effort: Effort = "fast"
) -> tuple[Array, Array]:
    """Latents ``(c, k)`` and log-counts ``(c,)`` of the blocks, in order, of the best causal sequence found.

    The search runs on at most 48 tokens; the best sequence is then doubled until it has n, ascending each time.
    """
    orders, ascents, steps = _SIZE[effort]
    if n == 1:
        return chart.sample((1, 1), rng)[0], np.zeros(1)
    length = min(n, _CORE)
    scored = _screened(forms, chart, length, rng, orders)
    best = _Sequence(-1.0, *scored[0][1:])
    for _, z, lw in scored[: ascents + 1]:
        best = max(best, _ascended(forms, chart, z, lw, steps), key=lambda s: s.value)
    best = _exchanged(forms, chart, best, steps, rounds=2 if effort == "fast" else 8)
    if n <= _FREE_LIMIT:
        groups = _groups(np.exp(best.log_counts))
        free = _ascended(forms, chart, best.latents[groups], np.zeros(n), steps)
        best = max(best, free, key=lambda s: s.value)
    while length < n:
        length = min(2 * length, n)
        best = _lengthened(forms, chart, best, length, steps // 2)
    return best.latents, best.log_counts


@dataclass(frozen=True, eq=False)
class _Sequence:
    value: float
    latents: Array
    log_counts: Array


def _screened(
    forms: tuple[Form, ...], chart: Chart, n: int, rng: np.random.Generator, orders: int
) -> list[tuple[float, Array, Array]]:
    """Structured and random blocks, light ones first or last, with their values; the unmasked optimum leads the list."""
    found = search_tokens(forms, chart, n, rng, "fast")
    pool = [Candidates(found.latents[None], found.log_weights[None])]
    for batch in token_starts(forms, chart, n, rng, orders):
        pick = rng.permutation(batch.size)[: 4 * orders]
        pool.append(Candidates(batch.latents[pick], round_multiplicities(batch.log_weights[pick], n)))
    scored: list[tuple[float, Array, Array]] = []
    for batch in pool:
        for i in range(batch.size):
            for sign in (1.0, -1.0):
                order = np.argsort(sign * batch.log_weights[i], kind="stable")
                z, lw = batch.latents[i][order], batch.log_weights[i][order]
                scored.append((_BlockObjective(forms, chart, _groups(np.exp(lw))).value(z), z, lw))
    lead = max(scored[:2], key=lambda item: item[0])
    return [lead, *sorted(scored, key=lambda item: -item[0])]


def _ascended(forms: tuple[Form, ...], chart: Chart, z: Array, lw: Array, steps: int) -> _Sequence:
    """The better of a sequence and its ascent."""
    objective = _BlockObjective(forms, chart, _groups(np.exp(lw)))
    x, _ = lbfgs(objective, chart.parameters(z).reshape(1, -1), steps=steps)
    moved = chart.latents(x.reshape(z.shape))
    here, there = objective.value(z), objective.value(moved)
    return _Sequence(there, moved, lw) if there > here else _Sequence(here, z, lw)


def _exchanged(forms: tuple[Form, ...], chart: Chart, best: _Sequence, steps: int, rounds: int) -> _Sequence:
    """Move tokens between blocks while that helps."""
    for _ in range(rounds):
        counts = np.rint(np.exp(best.log_counts))
        trials = []
        for i, j in np.argwhere(~np.eye(len(counts), dtype=bool)):
            for move in {1.0, float(np.rint(0.3 * counts[i]))}:
                if 1.0 <= move < counts[i]:
                    new = counts.copy()
                    new[i] -= move
                    new[j] += move
                    trials.append(np.log(new))
        scored = [(_BlockObjective(forms, chart, _groups(np.exp(lw))).value(best.latents), lw) for lw in trials]
        if not scored:
            return best
        new_best = _ascended(forms, chart, best.latents, max(scored, key=lambda item: item[0])[1], steps)
        if new_best.value <= best.value * (1.0 + 1e-9):
            return best
        best = new_best
    return best


def _lengthened(forms: tuple[Form, ...], chart: Chart, best: _Sequence, n: int, steps: int) -> _Sequence:
    """The sequence with n tokens: its last block longer (never worse, the mask hides it), or all large blocks."""
    counts = np.rint(np.exp(best.log_counts))
    last = counts.copy()
    last[-1] += n - counts.sum()
    large = np.where(counts > 2.0, counts, 0.0)
    large[-1] = counts[-1]
    few = counts.sum() - large.sum()
    shares = np.round(large * (n - few) / large.sum())
    all_large = np.where(large > 0.0, np.maximum(shares, 1.0), counts)
    all_large[-1] += n - all_large.sum()
    out = _ascended(forms, chart, best.latents, np.log(last), steps)
    if all_large[-1] >= 1.0 and (all_large != last).any():
        out = max(out, _ascended(forms, chart, best.latents, np.log(all_large), steps), key=lambda s: s.value)
    return out


def search_chains(
    forms: tuple[Form, ...], chart: Chart, rng: np.random.Generator, effort: Effort = "fast"
) -> tuple[Array, Array]:
    """Latents and log-weights of the best space-time measure found whose atoms come one after another, weights free.

    The heavy atom of a witness on one time slice becomes a chain of growing atoms: earlier ones compete less with the
    light atoms that all of them see.
    """
    _, ascents, steps = _SIZE[effort]
    best = _Sequence(-1.0, np.zeros((1, chart.latent_dim)), np.zeros(1))
    batches = [mean_field.three_atoms(f, chart, rng) for f in forms]
    batches.append(witnesses.random_tokens(chart, 1000, 3, 24 * ascents, rng))
    for batch in batches:
        order = np.argsort(batch.log_weights, axis=1, kind="stable")
        starts = Candidates(
            np.take_along_axis(batch.latents, order[..., None], axis=1),
            np.take_along_axis(batch.log_weights, order, axis=1),
        )
        for links in (1, 4):
            best = max(best, _best_chain(forms, chart, _linked(starts, links), ascents, steps), key=lambda s: s.value)
    for _ in range(2 if effort == "fast" else 4):
        one = Candidates(best.latents[None], best.log_counts[None])
        grown = _best_chain(forms, chart, _linked(one, 4), 1, steps)
        if grown.value <= best.value:
            break
        best = grown
    return best.latents, best.log_counts


def _linked(starts: Candidates, links: int) -> Candidates:
    """The heaviest atom of each measure split into links whose weights grow by a factor of 1.7."""
    z, lw = starts.latents, starts.log_weights
    powers = 0.5 * np.arange(links)
    powers -= np.log(np.exp(powers).sum())
    rows_z, rows_w = [], []
    for i, k in enumerate(lw.argmax(axis=1)):
        rows_z.append(np.concatenate([z[i, :k], np.repeat(z[i, k : k + 1], links, axis=0), z[i, k + 1 :]]))
        rows_w.append(np.concatenate([lw[i, :k], lw[i, k] + powers, lw[i, k + 1 :]]))
    return Candidates(np.stack(rows_z), np.stack(rows_w))


def _best_chain(forms: tuple[Form, ...], chart: Chart, starts: Candidates, ascents: int, steps: int) -> _Sequence:
    hidden = np.triu(np.ones((starts.atoms, starts.atoms), dtype=bool), 1)
    values = evaluate(forms, chart, starts, hidden=hidden)[0]
    starts = starts.take(np.argsort(-values, kind="stable")[: 4 * ascents])
    values, moved = ascend(forms, chart, starts, weighting="free", steps=steps, hidden=hidden)
    moved = moved.take(np.argsort(-values, kind="stable")[:ascents])
    _, moved = ascend(forms, chart, moved, weighting="free", steps=4 * steps, hidden=hidden)
    symmetric, fields = evaluate(forms, chart, moved, hidden=hidden)
    values = np.maximum(symmetric, fields.max(axis=1))
    top = int(values.argmax())
    return _Sequence(float(values[top]), moved.latents[top], moved.log_weights[top])
