"""Sequences with a large causal local constant: blocks of equal tokens in an order, light blocks first or last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from otattn._linalg import Array
from otattn.lipschitz.lower import mean_field_witnesses as mean_field
from otattn.lipschitz.lower import witnesses
from otattn.lipschitz.lower.ascent import Candidates, ascend, evaluate, round_multiplicities, symmetric_part
from otattn.lipschitz.lower.problem import Problem
from otattn.lipschitz.lower.search import Found, exchanged_counts, search_tokens, token_starts

_SIZE = {"fast": (6, 2, 30), "deep": (24, 6, 120)}
"""Orders evaluated, sequences ascended, steps each."""
_CORE = 48
"""Longest sequence that is searched from many starts."""
_FREE_LIMIT = 24
"""Up to this many tokens the best sequence is ascended once more with every token on its own."""


def _groups(log_counts: Array) -> NDArray[np.int64]:
    """The block of every token."""
    return np.repeat(np.arange(len(log_counts)), np.rint(np.exp(log_counts)).astype(np.int64))


def _norm(problem: Problem, z: Array, log_counts: Array) -> float:
    """The causal norm at blocks of latents ``(c, k)``."""
    return float(symmetric_part(problem, Candidates(z[None], log_counts[None]), _groups(log_counts))[0])


def search_sequences(problem: Problem, rng: np.random.Generator) -> tuple[Array, Array]:
    """Latents ``(c, k)`` and log-counts ``(c,)`` of the blocks, in order, of the best causal sequence found.

    The search runs on at most 48 tokens; the best sequence is then doubled until it has n, ascending each time.
    """
    n = problem.tokens
    orders, ascents, steps = _SIZE[problem.effort]
    if n == 1:
        return problem.chart.sample((1, 1), rng)[0], np.zeros(1)
    length = min(n, _CORE)
    scored = _screened(replace(problem, n=length), rng, orders)
    best = Found(-1.0, *scored[0][1:])
    for _, z, lw in scored[: ascents + 1]:
        best = _better(best, _ascended(problem, z, lw, steps))
    for _ in range(2 if problem.effort == "fast" else 8):
        # move tokens between blocks while that helps
        trials = exchanged_counts(best.log_weights, 0.3)
        if not len(trials):
            break
        values = [_norm(problem, best.latents, lw) for lw in trials]
        moved = _ascended(problem, best.latents, trials[int(np.argmax(values))], steps)
        if moved.value <= best.value * (1.0 + 1e-9):
            break
        best = moved
    if n <= _FREE_LIMIT:
        best = _better(best, _ascended(problem, best.latents[_groups(best.log_weights)], np.zeros(n), steps))
        best = _better(best, _from_random_sequences(problem, rng, 8 * orders, steps))
    while length < n:
        length = min(2 * length, n)
        best = _lengthened(problem, best, length, steps // 2)
    return best.latents, best.log_weights


def _better(one: Found, other: Found) -> Found:
    return other if other.value > one.value else one


def _screened(problem: Problem, rng: np.random.Generator, orders: int) -> list[tuple[float, Array, Array]]:
    """Structured and random blocks, light ones first or last, with their values; the unmasked optimum leads the list."""
    pool = [search_tokens(replace(problem.unmasked, effort="fast"), rng).candidate]
    for batch in token_starts(problem, rng, orders):
        pick = rng.permutation(batch.size)[: 4 * orders]
        pool.append(Candidates(batch.latents[pick], round_multiplicities(batch.log_weights[pick], problem.tokens)))
    scored: list[tuple[float, Array, Array]] = []
    for batch in pool:
        for i in range(batch.size):
            for sign in (1.0, -1.0):
                order = np.argsort(sign * batch.log_weights[i], kind="stable")
                z, lw = batch.latents[i][order], batch.log_weights[i][order]
                scored.append((_norm(problem, z, lw), z, lw))
    lead = max(scored[:2], key=lambda item: item[0])
    return [lead, *sorted(scored, key=lambda item: -item[0])]


def _ascended(problem: Problem, z: Array, lw: Array, steps: int) -> Found:
    """The better of a sequence and its ascent."""
    _, found = ascend(problem, Candidates(z[None], lw[None]), steps=steps, groups=_groups(lw))
    moved = found.latents[0]
    return _better(Found(_norm(problem, z, lw), z, lw), Found(_norm(problem, moved, lw), moved, lw))


def _from_random_sequences(problem: Problem, rng: np.random.Generator, count: int, steps: int) -> Found:
    """Every token on its own from the start: the best of many ascents, ascended once more."""
    n = problem.tokens
    starts = Candidates(problem.chart.sample((count, n), rng), np.zeros((count, n)))
    values, moved = ascend(problem, starts, steps=steps, groups=np.arange(n))
    return _ascended(problem, moved.best(values, 1).latents[0], np.zeros(n), steps)


def _lengthened(problem: Problem, best: Found, n: int, steps: int) -> Found:
    """The sequence with n tokens: its last block longer (never worse, the mask hides it), or all large blocks."""
    counts = np.rint(np.exp(best.log_weights))
    last = counts.copy()
    last[-1] += n - counts.sum()
    large = np.where(counts > 2.0, counts, 0.0)
    large[-1] = counts[-1]
    few = counts.sum() - large.sum()
    shares = np.round(large * (n - few) / large.sum())
    all_large = np.where(large > 0.0, np.maximum(shares, 1.0), counts)
    all_large[-1] += n - all_large.sum()
    out = _ascended(problem, best.latents, np.log(last), steps)
    if all_large[-1] >= 1.0 and (all_large != last).any():
        out = _better(out, _ascended(problem, best.latents, np.log(all_large), steps))
    return out


def search_chains(problem: Problem, rng: np.random.Generator) -> tuple[Array, Array]:
    """Latents and log-weights of the best space-time measure found whose atoms come one after another, weights free.

    The heavy atom of a witness on one time slice becomes a chain of growing atoms: earlier ones compete less with the
    light atoms that all of them see.
    """
    _, ascents, steps = _SIZE[problem.effort]
    best = Found(-1.0, np.zeros((1, problem.chart.latent_dim)), np.zeros(1))
    batches = [mean_field.three_atoms(problem, f, rng) for f in problem.forms]
    batches.append(witnesses.random_tokens(problem.chart, 1000, 3, 24 * ascents, rng))
    for batch in batches:
        order = np.argsort(batch.log_weights, axis=1, kind="stable")
        starts = Candidates(
            np.take_along_axis(batch.latents, order[..., None], axis=1),
            np.take_along_axis(batch.log_weights, order, axis=1),
        )
        for links in (1, 4):
            best = _better(best, _best_chain(problem, _linked(starts, links), ascents, steps))
    for _ in range(2 if problem.effort == "fast" else 4):
        grown = _best_chain(problem, _linked(best.candidate, 4), 1, steps)
        if grown.value <= best.value:
            break
        best = grown
    return best.latents, best.log_weights


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


def _best_chain(problem: Problem, starts: Candidates, ascents: int, steps: int) -> Found:
    starts = starts.best(symmetric_part(problem, starts), 4 * ascents)
    values, moved = ascend(problem, starts, weighting="free", steps=steps)
    _, moved = ascend(problem, moved.best(values, ascents), weighting="free", steps=4 * steps)
    values = evaluate(problem, moved)
    top = moved.best(values, 1)
    return Found(float(values.max()), top.latents[0], top.log_weights[0])
