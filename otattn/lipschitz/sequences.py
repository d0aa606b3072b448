"""Sequences with a large causal local constant: blocks of equal tokens in an order, light blocks first or last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from otattn.lipschitz import mean_field_witnesses as mean_field
from otattn.lipschitz import witnesses
from otattn.lipschitz.ascent import Candidates, ascend, evaluate, lbfgs, round_multiplicities
from otattn.lipschitz.charts import Chart
from otattn.lipschitz.clusters import Configuration, Form
from otattn.lipschitz.search import Effort, search_tokens, token_starts

__all__ = ["search_chains", "search_sequences"]

Array = NDArray[np.float64]

_SIZE = {"fast": (6, 2, 30), "deep": (24, 6, 120)}
"""Orders evaluated, sequences ascended, steps each."""
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
        return Configuration(
            self.forms, (z @ self.chart.E.T)[:, self.groups], np.zeros((len(z), n)), 0.5, hidden
        )

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
        np.add.at(summed, (slice(None), self.groups), gz)
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
    """Latents ``(c, k)`` and log-counts ``(c,)`` of the blocks, in order, of the best causal sequence of n tokens found."""
    orders, ascents, steps = _SIZE[effort]
    if n == 1:
        z = chart.sample((1, 1), rng)[0]
        return z, np.zeros(1)
    pool: list[Candidates] = []
    best = search_tokens(forms, chart, n, rng, "fast")
    pool.append(Candidates(best.latents[None], best.log_weights[None]))
    for batch in token_starts(forms, chart, n, rng, orders):
        pick = rng.permutation(batch.size)[: 4 * orders]
        pool.append(Candidates(batch.latents[pick], round_multiplicities(batch.log_weights[pick], n)))
    scored: list[tuple[float, Array, Array]] = []
    small = min(n, 24)
    for batch in pool:
        for i in range(batch.size):
            for sign in (1.0, -1.0):
                order = np.argsort(sign * batch.log_weights[i], kind="stable")
                z, lw = batch.latents[i][order], batch.log_weights[i][order]
                # screened on a short sequence of the same shape when n is large
                probe = (
                    lw if n == small else round_multiplicities(lw[None], small)[0] if len(lw) <= small else lw
                )
                value = _BlockObjective(forms, chart, _groups(np.exp(probe))).value(z)
                scored.append((value, z, lw))
    # the best configuration without a mask goes on whatever its screening value
    first = sorted(scored[:2], key=lambda item: -item[0])[:1]
    scored.sort(key=lambda item: -item[0])
    top, top_value = scored[0][1:], -1.0
    for _, z, lw in [*first, *scored[:ascents]]:
        groups = _groups(np.exp(lw))
        for g in (groups, np.arange(n)) if n <= _FREE_LIMIT else (groups,):
            if len(g) == n and g is not groups:
                z, lw = z[groups], np.zeros(n)
            objective = _BlockObjective(forms, chart, g)
            x, _ = lbfgs(objective, chart.parameters(z).reshape(1, -1), steps=steps)
            moved = chart.latents(x.reshape(len(z), -1))
            for candidate in (z, moved):
                value = objective.value(candidate)
                if value > top_value:
                    top_value, top = value, (candidate, lw)
            z = moved
    return top


def search_chains(
    forms: tuple[Form, ...], chart: Chart, rng: np.random.Generator, effort: Effort = "fast"
) -> tuple[Array, Array]:
    """Latents and log-weights of the best space-time measure found whose atoms come one after another, weights free.

    The heavy atom of a witness on one time slice becomes a chain of growing atoms: earlier ones compete less with the
    light atoms that all of them see.
    """
    _, ascents, steps = _SIZE[effort]
    best_value, best = -1.0, (np.zeros((1, chart.latent_dim)), np.zeros(1))
    for links in (1, 4):
        batches = [mean_field.three_atoms(f, chart, rng) for f in forms]
        batches.append(witnesses.random_tokens(chart, 1000, 3, 24 * ascents, rng))
        for batch in batches:
            order = np.argsort(batch.log_weights, axis=1, kind="stable")
            z = np.take_along_axis(batch.latents, order[..., None], axis=1)
            lw = np.take_along_axis(batch.log_weights, order, axis=1)
            # the heaviest atom, split into links whose weights grow by a factor of e
            powers = np.arange(links) - np.log(np.exp(np.arange(links)).sum())
            z = np.concatenate([z[:, :-1], np.repeat(z[:, -1:], links, axis=1)], axis=1)
            lw = np.concatenate([lw[:, :-1], lw[:, -1:] + powers], axis=1)
            hidden = np.triu(np.ones((z.shape[1], z.shape[1]), dtype=bool), 1)
            starts = Candidates(z, lw)
            values = evaluate(forms, chart, starts, hidden=hidden)[0]
            starts = starts.take(np.argsort(-values, kind="stable")[: 4 * ascents])
            values, moved = ascend(forms, chart, starts, weighting="free", steps=steps, hidden=hidden)
            moved = moved.take(np.argsort(-values, kind="stable")[:ascents])
            _, moved = ascend(forms, chart, moved, weighting="free", steps=3 * steps, hidden=hidden)
            symmetric, fields = evaluate(forms, chart, moved, hidden=hidden)
            values = np.maximum(symmetric, fields.max(axis=1))
            top = int(values.argmax())
            if values[top] > best_value:
                best_value, best = float(values[top]), (moved.latents[top], moved.log_weights[top])
    return best
